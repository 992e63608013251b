"""The ZeRO field's own estimates: the same names, arguments, numbers and tables.

Source of every formula: DeepSpeed 0.19.8, measured. They count parameters, gradients and optimizer
state of Adam in mixed precision, and leave out NVMe, pinned buffers, buckets, activations and what
an allocator adds; `zero.plan_memory` gives what this library will allocate.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

_STATE_BYTES = 16  # gradient in fp32, master, exp_avg, exp_avg_sq
_ALL_BYTES = 18  # and the 16-bit parameter
_GIB = 1 << 30


class Parameter(Protocol):
    """What is asked of a parameter: its logical size."""

    def numel(self) -> int:
        """Return the number of elements."""


class Module(Protocol):
    """What is asked of a model: torch's modules have it."""

    def parameters(self, *, recurse: bool = ...) -> Iterator[Parameter]:
        """Yield the parameters, each once."""

    def modules(self) -> "Iterator[Module]":
        """Yield this module and all below it."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The two numbers that the estimates need of a model."""

    total_params: int
    largest_layer_params: int


def size_of(model: Module) -> ModelSize:
    """Count a model's parameters, and those that the largest of its modules owns itself.

    Shared parameters count once. Parameters on `meta` and sharded ones count like any other: they
    are told apart by identity, not by where their memory lies.
    """
    unique: dict[int, Parameter] = {id(param): param for param in model.parameters()}
    total = sum(param.numel() for param in unique.values())
    largest = max(
        (
            sum(param.numel() for param in module.parameters(recurse=False))
            for module in model.modules()
        ),
        default=0,
    )
    return ModelSize(total, largest)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,  # noqa: FBT001, FBT002  the field's signature
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return bytes (per node on the CPU, per GPU) of stage 2."""
    gpu_count = _gpu_count(num_gpus_per_node, num_nodes)
    if cpu_offload:
        gpu_bytes = 2 * total_params
        per_param = max(4 * gpu_count, _STATE_BYTES)
        cpu_bytes = total_params * per_param * additional_buffer_factor
    else:
        gpu_bytes = 2 * total_params + int(_ALL_BYTES * total_params / gpu_count)
        cpu_bytes = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu_bytes), int(gpu_bytes)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,  # noqa: FBT001, FBT002  the field's signature
    cpu_offload_params: bool = True,  # noqa: FBT001, FBT002
    zero_init: bool = True,  # noqa: FBT001, FBT002
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return bytes (per node on the CPU, per GPU, of the largest layer) of stage 3."""
    gpu_count = _gpu_count(num_gpus_per_node, num_nodes)
    gpus_factor = 1 / num_nodes
    largest_layer_bytes = 4 * largest_layer_params
    if cpu_offload:
        gpu_bytes = largest_layer_bytes
        offloaded = _ALL_BYTES if cpu_offload_params else _STATE_BYTES
        if not cpu_offload_params:
            gpu_bytes += int(2 * total_params / gpu_count)
        if zero_init:
            cpu_bytes = total_params * offloaded * gpus_factor * additional_buffer_factor
        else:
            per_param = max(4 * num_gpus_per_node, offloaded * gpus_factor)
            cpu_bytes = total_params * per_param * additional_buffer_factor
    else:
        gpu_bytes = largest_layer_bytes + int(_ALL_BYTES * total_params / gpu_count)
        params = largest_layer_params if zero_init else total_params
        cpu_bytes = params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu_bytes), int(gpu_bytes), largest_layer_bytes


def estimate_zero2_model_states_mem_needs_all_live(
    model: Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 2 for a model, which may be on `meta` or sharded."""
    estimate_zero2_model_states_mem_needs_all_cold(
        size_of(model).total_params, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 2 for a number of parameters."""
    rows = []
    for cpu_offload in (True, False):
        needs = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        rows.append((*needs, f"offload_optimizer={_device(offloaded=cpu_offload)}"))
    model = f"{int(total_params / 1e6)}M total params."
    _print_table(model, num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a model, which may be on `meta` or sharded."""
    size = size_of(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        size.total_params,
        size.largest_layer_params,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a model's two sizes."""
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu_bytes, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            options = (
                f"offload_param={_device(offloaded=params)}, "
                f"offload_optimizer={_device(offloaded=optimizer)}, zero_init={int(zero_init)}"
            )
            rows.append((cpu_bytes, gpu_bytes, options))
    model = (
        f"{int(total_params / 1e6)}M total params, "
        f"{int(largest_layer_params / 1e6)}M largest layer params."
    )
    _print_table(model, num_gpus_per_node, num_nodes, rows)


def _gpu_count(num_gpus_per_node: int, num_nodes: int) -> int:
    if num_gpus_per_node < 1 or num_nodes < 1:
        raise ValueError(
            "an estimate needs at least one GPU on at least one node, got num_gpus_per_node="
            f"{num_gpus_per_node} and num_nodes={num_nodes}"
        )
    return num_gpus_per_node * num_nodes


def _device(*, offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _print_table(
    model: str, num_gpus_per_node: int, num_nodes: int, rows: Iterable[tuple[int, int, str]]
) -> None:
    nodes = f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
    gpus = f"{num_gpus_per_node} GPU{'s' if num_gpus_per_node > 1 else ''} per node."
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes}, {gpus}",
        f"SW: Model with {model}",
        "  per CPU  |  per GPU |   Options",
        *(
            f"  {cpu_bytes / _GIB:7.2f}GB | {gpu_bytes / _GIB:6.2f}GB | {options}"
            for cpu_bytes, gpu_bytes, options in rows
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
