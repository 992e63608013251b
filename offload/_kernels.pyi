from offload.kernels import (
    AdamWScalars,
    Bf16Bits,
    FloatArray,
    Fp16Array,
    Fp32Array,
    ResidualArray,
)

def adamw_fp32(
    param: Fp32Array,
    grad: Fp32Array,
    exp_avg: Fp32Array,
    exp_avg_sq: Fp32Array,
    scalars: AdamWScalars,
    thread_count: int,
) -> None: ...
def adamw_exact(
    param: Bf16Bits,
    residual: ResidualArray,
    grad: Bf16Bits | Fp32Array,
    exp_avg: Fp32Array,
    exp_avg_sq: Fp32Array,
    scalars: AdamWScalars,
    thread_count: int,
) -> None: ...
def adamw_master(
    param: Bf16Bits | Fp16Array,
    master: Fp32Array,
    grad: FloatArray,
    exp_avg: Fp32Array,
    exp_avg_sq: Fp32Array,
    scalars: AdamWScalars,
    thread_count: int,
) -> None: ...
def split_master(
    master: Fp32Array, param: Bf16Bits, residual: ResidualArray, thread_count: int
) -> None: ...
def join_master(
    param: Bf16Bits, residual: ResidualArray, master: Fp32Array, thread_count: int
) -> None: ...
def round_to_fp16(master: Fp32Array, out: Fp16Array, thread_count: int) -> None: ...
def sum_squares(values: FloatArray, first_index: int, thread_count: int) -> float: ...
