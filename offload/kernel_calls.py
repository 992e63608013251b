"""What the calls of kernels have in common: how a state is kept, and what is checked of it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from estimators import CODE_BLOCK_NUMEL, StateField
from offload.codes import RoundingKey
from offload.operands import StateArrays, Values
from offload.rules import AdamWScalars, UpdateScalars

# The type of an element, or those that it may have; an array and what it must hold.
ElementTypes: TypeAlias = type[np.generic] | tuple[type[np.generic], ...]
ArrayAndTypes: TypeAlias = tuple[npt.NDArray[Any], ElementTypes]
Array: TypeAlias = npt.NDArray[Any]


class Kept(enum.Enum):
    """How master and moments of a parameter are kept."""

    OWN = "own"
    """An fp32 parameter is its own master."""
    MASTER = "master"
    EXACT = "exact"
    BF16 = "bf16"
    COMPACT = "compact"


def kept_of(state: StateArrays) -> Kept:
    """Tell from the fields of a state, and their types, how it is kept."""
    if state.residual is None:
        return Kept.OWN if state.master is None else Kept.MASTER
    moment = state.exp_avg if state.exp_avg is not None else state.exp_avg_sq
    if getattr(state.residual, "dtype", None) in (np.dtype(np.int8), torch.int8):
        return Kept.COMPACT
    wide = (np.dtype(np.float32), torch.float32)
    return Kept.EXACT if getattr(moment, "dtype", None) in wide else Kept.BF16


class UpdateCalls(abc.ABC):
    """The calls of an update, on top of one that knows how the state is kept."""

    def update(
        self,
        param: Values,
        grad: Values,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None = None,
    ) -> None:
        """Update parameters and their state in place by the rule of the scalars."""
        self._update(kept_of(state), param, grad, state, scalars, key)

    def adamw_fp32(
        self,
        param: Values,
        grad: Values,
        exp_avg: Values,
        exp_avg_sq: Values,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 parameters, which are their own master, and their moments in place."""
        self._update(Kept.OWN, param, grad, StateArrays(exp_avg, exp_avg_sq), scalars, None)

    def adamw_exact(
        self,
        param: Values,
        residual: Values,
        grad: Values,
        exp_avg: Values,
        exp_avg_sq: Values,
        scalars: AdamWScalars,
    ) -> None:
        """Update bf16 parameters, the residuals that complete them to fp32, and the moments."""
        state = StateArrays(exp_avg, exp_avg_sq, residual=residual)
        self._update(Kept.EXACT, param, grad, state, scalars, None)

    def adamw_master(
        self,
        param: Values,
        master: Values,
        grad: Values,
        exp_avg: Values,
        exp_avg_sq: Values,
        scalars: AdamWScalars,
    ) -> None:
        """Update fp32 masters and their moments, and write the 16-bit parameters from them."""
        state = StateArrays(exp_avg, exp_avg_sq, master=master)
        self._update(Kept.MASTER, param, grad, state, scalars, None)

    @abc.abstractmethod
    def _update(
        self,
        kept: Kept,
        param: Values,
        grad: Values,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None,
    ) -> None:
        """Update in place; `kept` says how the masters are stored."""


# What each way holds: numpy's types, whose names are looked up for torch's.
_PARAMS: dict[Kept, tuple[str, ...]] = {
    Kept.OWN: ("fp32",),
    Kept.MASTER: ("bf16", "fp16"),
    Kept.EXACT: ("bf16",),
    Kept.BF16: ("bf16",),
    Kept.COMPACT: ("bf16",),
}
_WEIGHTS = {
    Kept.OWN: (),
    Kept.MASTER: (("master", "fp32"),),
    Kept.EXACT: (("residual", "int16"),),
    Kept.BF16: (("residual", "int16"),),
    Kept.COMPACT: (("residual", "int8"),),
}
_MOMENTS = {
    Kept.OWN: "fp32",
    Kept.MASTER: "fp32",
    Kept.EXACT: "fp32",
    Kept.BF16: "bf16",
    Kept.COMPACT: "uint8",
}
_BASES = {
    StateField.EXP_AVG: "exp_avg_base",
    StateField.EXP_AVG_SQ: "exp_avg_sq_base",
}
Operands: TypeAlias = dict[str, tuple[Values, tuple[str, ...]]]


def update_operands(
    kept: Kept, param: Values, state: StateArrays, scalars: UpdateScalars, key: RoundingKey | None
) -> tuple[Operands, Operands]:
    """Return what an update writes, one element each and one a block, with the types wanted.

    Raises:
        TypeError: if the scalars, or the key of a lossy format, are not there.
        ValueError: if the key starts inside a block.
    """
    if not isinstance(scalars, UpdateScalars):
        raise TypeError(f"scalars must be AdamWScalars or alike, got {type(scalars).__name__}")
    if kept in (Kept.BF16, Kept.COMPACT) and not isinstance(key, RoundingKey):
        raise TypeError(f"key must be a RoundingKey in a lossy format, got {type(key).__name__}")
    if key is not None and key.first % CODE_BLOCK_NUMEL:
        raise ValueError(
            f"an update in a lossy format must start at a multiple of {CODE_BLOCK_NUMEL} elements"
            f" of its parameter, got key.first {key.first}; cut the parameter there"
        )
    written: Operands = {"param": (param, _PARAMS[kept])}
    written.update({name: (getattr(state, name), (kind,)) for name, kind in _WEIGHTS[kept]})
    bases: Operands = {}
    for moment in scalars.rule.moments:
        written[moment.value] = (state.get(moment), (_MOMENTS[kept],))
        if kept is Kept.COMPACT:
            bases[_BASES[moment]] = (getattr(state, _BASES[moment]), ("uint16",))
    return written, bases


_NUMPY: dict[str, type[np.generic]] = {
    "fp32": np.float32,
    "bf16": np.uint16,
    "fp16": np.float16,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint16": np.uint16,
}


def _gradient_types(kept: Kept, param: Array) -> tuple[type[np.generic], ...]:
    if kept is Kept.OWN:
        return (np.float32,)
    is_fp16 = isinstance(param, np.ndarray) and param.dtype == np.dtype(np.float16)
    return (np.float16 if is_fp16 and kept is Kept.MASTER else np.uint16, np.float32)


def check_update(
    kept: Kept,
    operands: tuple[Array, Array],
    state: StateArrays,
    scalars: UpdateScalars,
    key: RoundingKey | None,
) -> None:
    """Raise TypeError or ValueError unless an update may run on parameter, gradient and state."""
    param, grad = operands
    written, bases = update_operands(kept, param, state, scalars, key)

    def typed(found: Operands) -> dict[str, ArrayAndTypes]:
        return {
            name: (value, tuple(_NUMPY[kind] for kind in kinds))
            for name, (value, kinds) in found.items()
        }

    check_arrays(written=typed(written), read={"grad": (grad, _gradient_types(kept, param))})
    if bases:
        check_arrays(written=typed(bases), read={})
        check_base_count(param.size, {name: value.size for name, (value, _) in bases.items()})


def check_base_count(numel: int, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless there is one base for every block."""
    wanted = -(-numel // CODE_BLOCK_NUMEL)
    for name, size in sizes.items():
        if size != wanted:
            raise ValueError(f"{name} must hold {wanted} bases of {numel} elements, got {size}")


def _check_array(name: str, array: npt.NDArray[Any], elements: ElementTypes) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array in host memory, got {type(array).__name__}")
    types = [np.dtype(each) for each in (elements if isinstance(elements, tuple) else (elements,))]
    if array.dtype not in types:
        raise TypeError(f"{name} must hold {' or '.join(map(str, types))}, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {array.shape}; flatten it first")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(f"{name} must be contiguous and aligned; pass a contiguous view or copy")


def check_arrays(
    *, written: Mapping[str, ArrayAndTypes], read: Mapping[str, ArrayAndTypes]
) -> None:
    """Raise TypeError or ValueError unless a kernel may run on these named arrays.

    All must have one length, and those written must be writable and share no memory.
    """
    operands = {**written, **read}
    for name, (array, elements) in operands.items():
        _check_array(name, array, elements)
    if len({array.size for array, _ in operands.values()}) > 1:
        lengths = ", ".join(f"{name} {array.size}" for name, (array, _) in operands.items())
        raise ValueError(f"all arrays must have one length, got {lengths}")
    for name, (array, _) in written.items():
        if not array.flags.writeable:
            raise ValueError(f"{name} is written by this kernel, but the array is read-only")
        for other_name, (other, _) in operands.items():
            if other_name != name and np.may_share_memory(array, other):
                raise ValueError(f"{name} and {other_name} share memory; pass separate arrays")


def check_values(values: Array, first_index: int) -> None:
    """Raise TypeError or ValueError unless `sum_squares` may run on `values`."""
    check_arrays(written={}, read={"values": (values, (np.float32, np.uint16, np.float16))})
    if first_index < 0:
        raise ValueError(f"first_index counts elements of one parameter from 0, got {first_index}")
