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

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        match self:
            case ElementType.FP32:
                return 4
            case ElementType.BF16 | ElementType.FP16 | ElementType.INT16:
                return 2
            case _:
                assert_never(self)


class StateFormat(enum.Enum):
    """How the optimizer state beside a 16-bit parameter is stored."""

    FP32 = "fp32"
    """fp32 master, exp_avg and exp_avg_sq: 12 bytes a parameter."""
    EXACT = "exact"
    """16-bit residual of the master, fp32 exp_avg and exp_avg_sq: 10 bytes a parameter, the same
    bits as FP32."""


class StateField(enum.Enum):
    """One array of a record."""

    MASTER = "master"
    RESIDUAL = "residual"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where one field lies in its record."""

    field: StateField
    element: ElementType
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """All stored state of one sub-group, contiguous."""

    numel: int
    fields: tuple[FieldLayout, ...]
    size_bytes: int


def record_fields(
    state_format: StateFormat, parameter: ElementType
) -> tuple[tuple[StateField, ElementType], ...]:
    """Return the fields stored beside a parameter.

    An fp32 parameter is its own master; an fp16 one does not hold the exponent of its master, so it
    keeps a whole one in every format.
    """
    moments = (
        (StateField.EXP_AVG, ElementType.FP32),
        (StateField.EXP_AVG_SQ, ElementType.FP32),
    )
    if parameter is ElementType.FP32:
        return moments
    if parameter is ElementType.FP16:
        return ((StateField.MASTER, ElementType.FP32), *moments)
    match state_format:
        case StateFormat.FP32:
            return ((StateField.MASTER, ElementType.FP32), *moments)
        case StateFormat.EXACT:
            return ((StateField.RESIDUAL, ElementType.INT16), *moments)
        case _:
            assert_never(state_format)


@functools.lru_cache(maxsize=1024)
def record_layout(state_format: StateFormat, parameter: ElementType, numel: int) -> RecordLayout:
    """Lay out the record of a sub-group of `numel` elements."""
    fields = []
    end = 0
    for field, element in record_fields(state_format, parameter):
        offset = align_up(end, FIELD_ALIGNMENT_BYTES)
        size = numel * element.size_bytes
        fields.append(FieldLayout(field, element, offset, size))
        end = offset + size
    return RecordLayout(numel, tuple(fields), align_up(end, FIELD_ALIGNMENT_BYTES))
