"""What combines with what in this version, as one table."""

from __future__ import annotations

from dataclasses import dataclass, fields

from zero.config.names import OPTIMIZERS, SUPPORTED_OPTIMIZERS


@dataclass(frozen=True, slots=True)
class Combination:
    """What one configuration asks to be combined."""

    stage: str
    offload_param: str
    offload_optimizer: str
    precision: str
    optimizer: str
    state_format: str
    gradients: str
    """Whether data_types.grad_accum_dtype names the type of the parameters, fp32, or another."""
    collectives: str
    """Whether communication_data_type names the type of the parameters or another."""
    directories: str
    """How many directories there are for swap files."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Combinations that do not work: every axis named must hold one of the values given."""

    where: dict[str, tuple[str, ...]]
    key: str
    """The key to change, by its full path."""
    why: str
    instead: str

    def applies(self, combination: Combination) -> bool:
        """Say whether a combination is one of these."""
        return all(getattr(combination, axis) in values for axis, values in self.where.items())


SAME, WIDER, OTHER = "type of the parameters", "fp32", "another type"

AXES: dict[str, tuple[str, ...]] = {
    "stage": ("0", "1", "2", "3"),
    "offload_param": ("none", "cpu", "nvme"),
    "offload_optimizer": ("none", "cpu", "nvme"),
    "precision": ("model", "fp32", "bf16", "fp16"),
    "optimizer": ("object", *OPTIMIZERS),
    "state_format": ("exact", "fp32", "bf16", "compact"),
    "gradients": (SAME, WIDER, OTHER),
    "collectives": (SAME, OTHER),
    "directories": ("none", "one", "several"),
}
"""Every value of every axis; what no row refuses works."""

REFUSALS = (
    Refusal(
        {"stage": ("0", "1", "2"), "offload_param": ("cpu", "nvme")},
        "zero_optimization.offload_param.device",
        "stages 0 to 2 keep parameters in full on the device; they can rest elsewhere in stage 3",
        'write "stage": 3',
    ),
    Refusal(
        {"optimizer": tuple(name for name in OPTIMIZERS if name not in SUPPORTED_OPTIMIZERS)},
        "optimizer.type",
        "by that name none runs here: it has no kernel and is not one of torch's whose step can be"
        " run on its own",
        'write "AdamW", or pass an object of a class that needs whole tensors (docs/optimizers.md)',
    ),
    Refusal(
        {"gradients": (OTHER,)},
        "data_types.grad_accum_dtype",
        "gradients are accumulated in fp32 or in the type of the parameters",
        'write "fp32", or remove it',
    ),
)


def refusals(combination: Combination) -> list[str]:
    """Return an error for every row that a combination meets; none means that it works."""
    return [
        f"{row.key}: {_asked(row, combination)} is not available: {row.why}; {row.instead}"
        for row in REFUSALS
        if row.applies(combination)
    ]


def _asked(row: Refusal, combination: Combination) -> str:
    """Say what was asked for, in the words of the axes that the row names."""
    order = [field.name for field in fields(combination) if field.name in row.where]
    return " with ".join(f"{axis} {getattr(combination, axis)}" for axis in order)
