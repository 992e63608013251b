from typing import overload

from offload.kernels import AdamWScalars, Bf16Bits, Fp32Array, ResidualArray

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
    grad: Bf16Bits,
    exp_avg: Fp32Array,
    exp_avg_sq: Fp32Array,
    scalars: AdamWScalars,
    thread_count: int,
) -> None: ...
def adamw_master(
    param: Bf16Bits,
    master: Fp32Array,
    grad: Bf16Bits,
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
@overload
def sum_squares(values: Fp32Array, first_index: int, thread_count: int) -> float: ...
@overload
def sum_squares(values: Bf16Bits, first_index: int, thread_count: int) -> float: ...
