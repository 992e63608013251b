"""How the optimizer state of a sub-group is stored: fields, element types, bytes."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import assert_never

from estimators.layout import align_up

FIELD_ALIGNMENT_BYTES = 64
"""Every field of a record starts at a cache line."""


class ElementType(enum.Enum):
    """Type of the elements of a stored array."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    UINT16 = "uint16"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        match self:
            case ElementType.FP32:
                return 4
            case ElementType.BF16 | ElementType.FP16 | ElementType.INT16 | ElementType.UINT16:
                return 2
            case ElementType.INT8 | ElementType.UINT8:
                return 1
            case _:
                assert_never(self)


class StateFormat(enum.Enum):
    """How the optimizer state beside a bf16 parameter is stored.

    fp32 parameters are their own master and fp16 ones keep a whole master, both with fp32 moments,
    in every format. Bytes are those of an optimizer with two moments.
    """

    FP32 = "fp32"
    """fp32 master, exp_avg and exp_avg_sq: 12 bytes a parameter."""
    EXACT = "exact"
    """16-bit residual of the master, fp32 exp_avg and exp_avg_sq: 10 bytes a parameter, the same
    bits as FP32."""
    BF16 = "bf16"
    """16-bit residual, bf16 exp_avg and exp_avg_sq, rounded stochastically: 6 bytes a parameter."""
    COMPACT = "compact"
    """8-bit residual, 8-bit exp_avg and exp_avg_sq, and one base of each for every block of
    elements: 3.125 bytes a parameter."""

    @property
    def is_lossy(self) -> bool:
        """Tell whether an update rounds, by random bits, what it stores."""
        return self in (StateFormat.BF16, StateFormat.COMPACT)


CODE_BLOCK_NUMEL = 32
"""Elements whose 8-bit codes share a base. Parameters, shards and sub-groups start at multiples of
it, so a block is the same elements in every world size."""


class StateField(enum.Enum):
    """One array of a record."""

    MASTER = "master"
    RESIDUAL = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    EXP_AVG_BASE = "exp_avg_base"
    EXP_AVG_SQ_BASE = "exp_avg_sq_base"
    EXTRA_0 = "extra_0"
    EXTRA_1 = "extra_1"
    EXTRA_2 = "extra_2"
    EXTRA_3 = "extra_3"
    EXTRA_4 = "extra_4"
    EXTRA_5 = "extra_5"


EXTRA_FIELDS = tuple(field for field in StateField if field.value.startswith("extra_"))
"""Fields for the state of optimizers that have no kernel."""


class UpdateRule(enum.Enum):
    """The arithmetic of an optimizer that the kernels have."""

    ADAMW = "adamw"
    ADAM = "adam"
    LION = "lion"
    ADAGRAD = "adagrad"
    SGD = "sgd"

    @property
    def moments(self) -> tuple[StateField, ...]:
        """What it keeps of each parameter: a signed average, an average of squares, or both.

        Lion's momentum and SGD's momentum buffer are exp_avg, Adagrad's sum is exp_avg_sq.
        """
        match self:
            case UpdateRule.ADAMW | UpdateRule.ADAM:
                return (StateField.EXP_AVG, StateField.EXP_AVG_SQ)
            case UpdateRule.LION | UpdateRule.SGD:
                return (StateField.EXP_AVG,)
            case UpdateRule.ADAGRAD:
                return (StateField.EXP_AVG_SQ,)
            case _:
                assert_never(self)


@dataclass(frozen=True, slots=True)
class GenericRule:
    """An element-wise optimizer without a kernel: how many fp32 tensors its state has."""

    state_count: int

    def __post_init__(self) -> None:
        if not 0 <= self.state_count <= len(EXTRA_FIELDS):
            raise ValueError(
                f"an optimizer may keep up to {len(EXTRA_FIELDS)} tensors of each parameter, this"
                f" one keeps {self.state_count}"
            )

    @property
    def moments(self) -> tuple[StateField, ...]:
        """The fields that its state is kept in."""
        return EXTRA_FIELDS[: self.state_count]


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where one field lies in its record."""

    field: StateField
    element: ElementType
    offset_bytes: int
    size_bytes: int

    @property
    def numel(self) -> int:
        """Elements of the field: one a parameter element, or one a block of them."""
        return self.size_bytes // self.element.size_bytes


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """All stored state of one sub-group, contiguous."""

    numel: int
    fields: tuple[FieldLayout, ...]
    size_bytes: int


_BASES = {
    StateField.EXP_AVG: StateField.EXP_AVG_BASE,
    StateField.EXP_AVG_SQ: StateField.EXP_AVG_SQ_BASE,
}


def record_fields(
    state_format: StateFormat,
    parameter: ElementType,
    rule: UpdateRule | GenericRule = UpdateRule.ADAMW,
) -> tuple[tuple[StateField, ElementType], ...]:
    """Return the fields stored beside a parameter.

    An fp32 parameter is its own master; an fp16 one does not hold the exponent of its master, so it
    keeps a whole one in every format.
    """
    moments = rule.moments
    plain = tuple((moment, ElementType.FP32) for moment in moments)
    if parameter is ElementType.FP32:
        return plain
    if parameter is ElementType.FP16:
        return ((StateField.MASTER, ElementType.FP32), *plain)
    match state_format:
        case StateFormat.FP32:
            return ((StateField.MASTER, ElementType.FP32), *plain)
        case StateFormat.EXACT:
            return ((StateField.RESIDUAL, ElementType.INT16), *plain)
        case StateFormat.BF16:
            halves = tuple((moment, ElementType.BF16) for moment in moments)
            return ((StateField.RESIDUAL, ElementType.INT16), *halves)
        case StateFormat.COMPACT:
            codes = tuple((moment, ElementType.UINT8) for moment in moments)
            bases = tuple((_BASES[moment], ElementType.UINT16) for moment in moments)
            return ((StateField.RESIDUAL, ElementType.INT8), *codes, *bases)
        case _:
            assert_never(state_format)


@functools.lru_cache(maxsize=1024)
def record_layout(
    state_format: StateFormat,
    parameter: ElementType,
    numel: int,
    rule: UpdateRule | GenericRule = UpdateRule.ADAMW,
) -> RecordLayout:
    """Lay out the record of a sub-group of `numel` elements."""
    fields = []
    end = 0
    for field, element in record_fields(state_format, parameter, rule):
        offset = align_up(end, FIELD_ALIGNMENT_BYTES)
        per_block = field in _BASES.values()
        size = (-(-numel // CODE_BLOCK_NUMEL) if per_block else numel) * element.size_bytes
        fields.append(FieldLayout(field, element, offset, size))
        end = offset + size
    # A record of nothing has a line as well, so that every sub-group that is updated has state.
    end = max(end, 1) if numel else end
    return RecordLayout(numel, tuple(fields), align_up(end, FIELD_ALIGNMENT_BYTES))
