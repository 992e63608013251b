from offload.codes import RoundingKey
from offload.kernel_calls import Array
from offload.kernels import (
    Bf16Bits,
    FloatArray,
    Fp16Array,
    Fp32Array,
    ResidualArray,
)
from offload.rules import UpdateScalars

class KernelQueue:
    """Runs kernels in the order they were submitted, on a thread of its own."""

    def __init__(self) -> None: ...
    def done(self, ticket: int) -> bool: ...
    def wait(self, ticket: int, most_seconds: float) -> bool: ...
    def times(self, ticket: int) -> tuple[float, float]: ...
    def close(self) -> None: ...

def update_own(
    param: Array,
    grad: Array,
    exp_avg: Array | None,
    exp_avg_sq: Array | None,
    scalars: UpdateScalars,
    thread_count: int,
    queue: KernelQueue | None = None,
) -> int: ...
def update_exact(
    param: Array,
    residual: Array,
    grad: Array,
    exp_avg: Array | None,
    exp_avg_sq: Array | None,
    scalars: UpdateScalars,
    thread_count: int,
    queue: KernelQueue | None = None,
) -> int: ...
def update_master(
    param: Array,
    master: Array,
    grad: Array,
    exp_avg: Array | None,
    exp_avg_sq: Array | None,
    scalars: UpdateScalars,
    thread_count: int,
    queue: KernelQueue | None = None,
) -> int: ...
def update_bf16(
    param: Array,
    residual: Array,
    grad: Array,
    exp_avg: Array | None,
    exp_avg_sq: Array | None,
    scalars: UpdateScalars,
    key: RoundingKey | None,
    thread_count: int,
    queue: KernelQueue | None = None,
) -> int: ...
def update_compact(
    param: Array,
    residual: Array,
    grad: Array,
    exp_avg: Array | None,
    exp_avg_sq: Array | None,
    exp_avg_base: Array | None,
    exp_avg_sq_base: Array | None,
    scalars: UpdateScalars,
    key: RoundingKey | None,
    thread_count: int,
    queue: KernelQueue | None = None,
) -> int: ...
def split_master(
    master: Fp32Array, param: Bf16Bits, residual: ResidualArray, thread_count: int
) -> None: ...
def join_master(
    param: Bf16Bits, residual: ResidualArray, master: Fp32Array, thread_count: int
) -> None: ...
def round_to_fp16(master: Fp32Array, out: Fp16Array, thread_count: int) -> None: ...
def sum_squares(values: FloatArray, first_index: int, thread_count: int) -> float: ...
