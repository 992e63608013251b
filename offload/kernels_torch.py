"""The device kernels in torch operations, on whatever device the tensors are.

See [Note: device kernels] in offload/kernels_device.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

import torch
from torch import Tensor

from estimators import CODE_BLOCK_NUMEL, StateField, UpdateRule
from offload.codes import (
    MULTIPLIERS,
    SECOND,
    SIGNED_CODES,
    SIGNED_SHIFT,
    UNSIGNED_CODES,
    UNSIGNED_SHIFT,
    RoundingKey,
)
from offload.kernel_calls import Kept, UpdateCalls
from offload.kernels import BLOCK_NUMEL, LANE_COUNT
from offload.kernels_device import (
    PartsAndGradients,
    check_device_update,
    check_fp16,
    check_join,
    check_norm,
    check_split,
    update_one_by_one,
)
from offload.operands import StateArrays
from offload.rules import UpdateScalars
from offload.update_parts import GroupParts

_CHUNK_NUMEL = 1 << 22
_SIGN_BIT = -0x8000_0000
_MAGNITUDE_BITS = 0x7FFF_FFFF
_INFINITY_BITS = 0x7F80_0000
_QUIET_NAN_BITS = 0x7FC0_0000
_FP16_QUIET_NAN = 0x7E00
_FP16_SIGN_BIT = -0x8000


def _chunks(numel: int) -> Iterator[slice]:
    for start in range(0, numel, _CHUNK_NUMEL):
        yield slice(start, min(start + _CHUNK_NUMEL, numel))


def _divided(values: Tensor, divisor: float) -> Tensor:
    return values / torch.full((), divisor, dtype=torch.float32, device=values.device)


def _root(values: Tensor) -> Tensor:
    return values.double().sqrt_().float()


def _with_one_nan(values: Tensor) -> Tensor:
    """Return results, each NaN as the one pattern that all kernels store."""
    bits = torch.where(torch.isnan(values), _QUIET_NAN_BITS, values.view(torch.int32))
    return bits.view(torch.float32)


def _quiet_bits(master: Tensor) -> Tensor:
    bits = master.view(torch.int32)
    is_nan = (bits & _MAGNITUDE_BITS) > _INFINITY_BITS
    return torch.where(is_nan, (bits & _SIGN_BIT) | _QUIET_NAN_BITS, bits)


def _split(bits: Tensor, param: Tensor, residual: Tensor) -> None:
    param.view(torch.int16).copy_((bits + 0x8000) >> 16)
    residual.copy_((bits << 16) >> 16)


def _joined(param: Tensor, residual: Tensor) -> Tensor:
    bits = (param.view(torch.int16).int() << 16) + residual.int()
    return bits.view(torch.float32)


def _round_to_fp16(master: Tensor, out: Tensor) -> None:
    """Round as IEEE does; what a device makes of a NaN differs, so that is written as bits."""
    sign = (master.view(torch.int32) >> 16) & _FP16_SIGN_BIT
    quiet_nan = (sign | _FP16_QUIET_NAN).to(torch.int16)
    rounded = master.to(torch.float16).view(torch.int16)
    out.view(torch.int16).copy_(torch.where(torch.isnan(master), quiet_nan, rounded))


def _adam(m: Tensor, v: Tensor, g: Tensor, scalars: UpdateScalars) -> tuple[Tensor, ...]:
    m = m * scalars.beta1 + g * scalars.one_minus_beta1
    v = v * scalars.beta2 + (g * g) * scalars.one_minus_beta2
    denominator = _divided(_root(v), scalars.bias_correction2_sqrt) + scalars.eps
    return m, v, m / denominator


def _sign(values: Tensor) -> Tensor:
    one = torch.copysign(torch.ones_like(values), values)
    return torch.where(values.abs() > 0, one, values)


def _moved(p: Tensor, m: Tensor, v: Tensor, g: Tensor, scalars: UpdateScalars) -> list[Tensor]:
    """Return masters and moments after an update; see [Note: update rules]."""
    match scalars.rule:
        case UpdateRule.ADAMW:
            p = p * scalars.decay_factor
            m, v, change = _adam(m, v, g, scalars)
        case UpdateRule.ADAM:
            m, v, change = _adam(m, v, g + p * scalars.l2, scalars)
        case UpdateRule.LION:
            c = m * scalars.beta1 + g * scalars.one_minus_beta1
            m = m * scalars.beta2 + g * scalars.one_minus_beta2
            p = p * scalars.decay_factor
            change = _sign(c)
        case UpdateRule.ADAGRAD:
            g = g + p * scalars.l2
            v = v + g * g
            change = g / (_root(v + scalars.initial) + scalars.eps)
        case UpdateRule.SGD:
            g = g + p * scalars.l2
            m = m * scalars.beta1 + g * scalars.one_minus_beta1
            change = g + m * scalars.beta1 if scalars.nesterov else m
        case _:
            assert_never(scalars.rule)
    return [p - change * scalars.step_size, m, v]


def _step(
    master: Tensor, grad: Tensor, state: StateArrays, scalars: UpdateScalars
) -> tuple[Tensor, StateArrays]:
    """Return masters and moments, in fp32, after an update of a chunk; one NaN is stored."""
    g = grad.float() * scalars.grad_scale
    absent = master  # a rule does not read a moment that it does not keep
    m = state.exp_avg if state.exp_avg is not None else absent
    v = state.exp_avg_sq if state.exp_avg_sq is not None else absent
    p, m, v = (_with_one_nan(each) for each in _moved(master, m, v, g, scalars))
    keeps = scalars.rule.moments
    return p, StateArrays(
        m if StateField.EXP_AVG in keeps else None, v if StateField.EXP_AVG_SQ in keeps else None
    )


def _mixed(words: Tensor) -> Tensor:
    """Mix words below 2^32, held as int64 so that no product overflows."""
    words = words ^ (words >> 16)
    words = _product(words, MULTIPLIERS[0])
    words = words ^ (words >> 13)
    words = _product(words, MULTIPLIERS[1])
    return words ^ (words >> 16)


def _product(words: Tensor, factor: int) -> Tensor:
    """Return the lower 32 bits of a product, from halves whose products int64 holds."""
    low = (words & 0xFFFF) * factor
    high = (((words >> 16) * factor) & 0xFFFF) << 16
    return (low + high) & 0xFFFF_FFFF


def _random_words(key: RoundingKey, like: Tensor) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    numbers = (numbers + key.first + key.low) & 0xFFFF_FFFF
    first = _mixed(_mixed(numbers) ^ key.high)
    return first, _mixed((first + SECOND) & 0xFFFF_FFFF)


def _wide_bits(values: Tensor) -> Tensor:
    """Return the bits of fp32 values, whose NaNs are the stored one, as int64."""
    return values.view(torch.int32).long() & 0xFFFF_FFFF


def _update_bf16(
    param: Tensor, grad: Tensor, state: StateArrays, scalars: UpdateScalars, key: RoundingKey
) -> None:
    moments = StateArrays.of({each: state.get(each).float() for each in scalars.rule.moments})
    master, moved = _step(_joined(param, state.residual), grad, moments, scalars)
    noise, _ = _random_words(key, param)
    for target, values, bits in (
        (state.exp_avg, moved.exp_avg, noise & 0xFFFF),
        (state.exp_avg_sq, moved.exp_avg_sq, noise >> 16),
    ):
        if values is not None:
            target.view(torch.int16).copy_((_wide_bits(values) + bits) >> 16)
    _split(master.view(torch.int32), param, state.residual)


def _blocks(upper: Tensor) -> Tensor:
    missing = -upper.numel() % CODE_BLOCK_NUMEL
    return torch.nn.functional.pad(upper, (0, missing)).view(-1, CODE_BLOCK_NUMEL)


def _spread(bases: Tensor, numel: int) -> Tensor:
    wide = bases.view(torch.int16).int() & 0xFFFF
    return wide.repeat_interleave(CODE_BLOCK_NUMEL)[:numel]


def _decoded_signed(codes: Tensor, bases: Tensor) -> Tensor:
    wide = codes.int()
    magnitude = wide & SIGNED_CODES
    upper = torch.where(magnitude != 0, _spread(bases, codes.numel()) + magnitude, 0)
    return ((upper << SIGNED_SHIFT) | ((wide & 0x80) << 24)).view(torch.float32)


def _decoded_unsigned(codes: Tensor, bases: Tensor) -> Tensor:
    wide = codes.int()
    upper = torch.where(wide != 0, _spread(bases, codes.numel()) + wide, 0)
    return (upper << UNSIGNED_SHIFT).view(torch.float32)


def _encode_signed(values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor) -> None:
    bits = _wide_bits(values)
    blocks = _blocks(((bits & _MAGNITUDE_BITS) + noise) >> SIGNED_SHIFT)
    base = (blocks.amax(dim=1) - SIGNED_CODES).clamp(min=0)
    chosen = (blocks - base[:, None]).clamp(min=0).flatten()[: values.numel()]
    codes.copy_(chosen | ((bits >> 31) << 7))
    bases.view(torch.int16).copy_(base)


def _encode_unsigned(values: Tensor, noise: Tensor, codes: Tensor, bases: Tensor) -> None:
    bits = _wide_bits(values) & _MAGNITUDE_BITS
    blocks = _blocks((bits + noise) >> UNSIGNED_SHIFT)
    base = (blocks.amax(dim=1) - UNSIGNED_CODES).clamp(min=0)
    least = (_blocks(bits) != 0).long()
    codes.copy_(torch.maximum(blocks - base[:, None], least).flatten()[: values.numel()])
    bases.view(torch.int16).copy_(base)


def _update_compact(
    param: Tensor, grad: Tensor, state: StateArrays, scalars: UpdateScalars, key: RoundingKey
) -> None:
    keeps = scalars.rule.moments
    moments = StateArrays(
        _decoded_signed(state.exp_avg, state.exp_avg_base) if StateField.EXP_AVG in keeps else None,
        _decoded_unsigned(state.exp_avg_sq, state.exp_avg_sq_base)
        if StateField.EXP_AVG_SQ in keeps
        else None,
    )
    kept = (param.view(torch.int16).int() << 16) + (state.residual.int() << 8)
    master, moved = _step(kept.view(torch.float32), grad, moments, scalars)
    noise, other_noise = _random_words(key, param)
    shorter = (_wide_bits(master) + (noise & 0xFF)) >> 8
    param.view(torch.int16).copy_((shorter + 0x80) >> 8)
    state.residual.copy_(shorter)
    if moved.exp_avg is not None:
        bits = noise >> (32 - SIGNED_SHIFT)
        _encode_signed(moved.exp_avg, bits, state.exp_avg, state.exp_avg_base)
    if moved.exp_avg_sq is not None:
        bits = other_noise >> (32 - UNSIGNED_SHIFT)
        _encode_unsigned(moved.exp_avg_sq, bits, state.exp_avg_sq, state.exp_avg_sq_base)


def _write(values: Tensor, target: Tensor) -> None:
    """Copy fp32 values bit by bit."""
    target.view(torch.int32).copy_(values.view(torch.int32))


def _update_chunk(
    kept: Kept,
    operands: tuple[Tensor, Tensor],
    state: StateArrays,
    scalars: UpdateScalars,
    key: RoundingKey | None,
) -> None:
    param, grad = operands
    if kept in (Kept.BF16, Kept.COMPACT):
        lossy = _update_bf16 if kept is Kept.BF16 else _update_compact
        if key is not None:
            lossy(param, grad, state, scalars, key)
        return
    old = {Kept.OWN: param, Kept.MASTER: state.master}.get(kept)
    if old is None:
        old = _joined(param, state.residual)
    master, moved = _step(old, grad, state, scalars)
    for moment in scalars.rule.moments:
        _write(moved.get(moment), state.get(moment))
    if kept is Kept.EXACT:
        _split(master.view(torch.int32), param, state.residual)
        return
    _write(master, old)
    if kept is Kept.MASTER and param.dtype is torch.float16:
        _round_to_fp16(master, param)
    elif kept is Kept.MASTER:
        param.view(torch.int16).copy_((master.view(torch.int32) + 0x8000) >> 16)


class TorchDeviceKernels(UpdateCalls):
    """The kernels in torch operations, on whatever device the tensors are."""

    name = "torch"

    def _update(
        self,
        kept: Kept,
        param: Tensor,
        grad: Tensor,
        state: StateArrays,
        scalars: UpdateScalars,
        key: RoundingKey | None,
    ) -> None:
        check_device_update(kept, (param, grad), state, scalars, key)
        for chunk in _chunks(param.numel()):
            here = key.after(chunk.start) if key is not None else None
            _update_chunk(kept, (param[chunk], grad[chunk]), state.part(chunk), scalars, here)

    def prepare(
        self, groups: Sequence[PartsAndGradients], device: torch.device
    ) -> Sequence[GroupParts]:
        """Return the parts of sub-groups as they are."""
        del device  # nothing goes there
        return [GroupParts(parts) for parts, _ in groups]

    def update_parts(
        self,
        param: Tensor,
        grads: Sequence[Tensor],
        state: StateArrays,
        scalars: UpdateScalars,
        prepared: GroupParts,
    ) -> None:
        """Update the parts of one sub-group in place by the rule of the scalars."""
        update_one_by_one(self, (param, grads), state, scalars, prepared.parts)

    def split_master(self, master: Tensor, param: Tensor, residual: Tensor) -> None:
        """Write each master as a bf16 parameter and its residual, a NaN made quiet first."""
        check_split(master, param, residual)
        for chunk in _chunks(master.numel()):
            _split(_quiet_bits(master[chunk]), param[chunk], residual[chunk])

    def join_master(self, param: Tensor, residual: Tensor, master: Tensor) -> None:
        """Write the masters that parameters and residuals are together."""
        check_join(param, residual, master)
        for chunk in _chunks(master.numel()):
            bits = _joined(param[chunk], residual[chunk]).view(torch.int32)
            master[chunk].view(torch.int32).copy_(bits)

    def round_to_fp16(self, master: Tensor, out: Tensor) -> None:
        """Write each master as the fp16 nearest to it, a NaN as the quiet one with its sign."""
        check_fp16(master, out)
        for chunk in _chunks(master.numel()):
            _round_to_fp16(master[chunk], out[chunk])

    def block_sums(self, values: Tensor, first_index: int) -> Tensor:
        """Return the fp64 sums of squares of the norm's blocks, shape [block], on the device."""
        check_norm(values, first_index)
        sums = [
            _block_sums(values[start:stop], (first_index + start) % BLOCK_NUMEL)
            for start, stop in _block_ranges(values.numel(), first_index)
        ]
        return torch.cat(sums) if sums else values.new_zeros(0, dtype=torch.float64)

    def block_sums_of(self, pieces: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Return the sums of blocks of several `(values, first index)`, one after another."""
        return torch.cat([self.block_sums(*each) for each in pieces])


def _block_ranges(numel: int, first_index: int) -> Iterator[tuple[int, int]]:
    """Cut values into chunks that end where a block of the norm ends."""
    start = 0
    while start < numel:
        stop = min(start + _CHUNK_NUMEL - (first_index + start) % BLOCK_NUMEL, numel)
        yield start, stop
        start = stop


def _block_sums(values: Tensor, lead: int) -> Tensor:
    """Sum the squares of values of which `lead` elements of the first block come before."""
    block_count = -(-(lead + values.numel()) // BLOCK_NUMEL)
    squares = values.new_zeros(block_count * BLOCK_NUMEL, dtype=torch.float64)
    squares[lead : lead + values.numel()] = values
    rows = (squares * squares).view(block_count, BLOCK_NUMEL // LANE_COUNT, LANE_COUNT)
    lanes = torch.zeros_like(rows[:, 0])
    for row in range(rows.shape[1]):
        lanes += rows[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
