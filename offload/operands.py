"""What an update works on: the fields of a record, as arrays of the host or tensors of a device."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from estimators import CODE_BLOCK_NUMEL, StateField

Values: TypeAlias = Any
"""An array on the host, a tensor on a device, or None."""

_PER_BLOCK = ("exp_avg_base", "exp_avg_sq_base")


@dataclass(frozen=True, slots=True)
class StateArrays:
    """Views of one record, each shape `[numel]` but bases, `[block]`; absent fields are None."""

    exp_avg: Values = None
    exp_avg_sq: Values = None
    master: Values = None
    residual: Values = None
    exp_avg_base: Values = None
    exp_avg_sq_base: Values = None
    extra_0: Values = None
    extra_1: Values = None
    extra_2: Values = None
    extra_3: Values = None
    extra_4: Values = None
    extra_5: Values = None

    @classmethod
    def of(cls, views: dict[StateField, Values]) -> StateArrays:
        """Name the views of a record."""
        return cls(**{field.value: view for field, view in views.items()})

    def get(self, field: StateField) -> Values:
        """Return one field, or None if the record has none."""
        return getattr(self, field.value)

    def part(self, inside: slice) -> StateArrays:
        """Return the fields of some of the elements; coded ones start and end with a block.

        Raises:
            ValueError: if the elements start inside a block.
        """
        blocks = inside
        if self.exp_avg_base is not None or self.exp_avg_sq_base is not None:
            if inside.start % CODE_BLOCK_NUMEL:
                raise ValueError(
                    f"elements from {inside.start} on start inside a block of {CODE_BLOCK_NUMEL}"
                    " codes"
                )
            stop = -(-inside.stop // CODE_BLOCK_NUMEL)
            blocks = slice(inside.start // CODE_BLOCK_NUMEL, stop)
        return StateArrays(
            **{
                name: view[blocks if name in _PER_BLOCK else inside]
                for name in _NAMES
                if (view := getattr(self, name)) is not None
            }
        )


_NAMES = tuple(field.name for field in fields(StateArrays))
