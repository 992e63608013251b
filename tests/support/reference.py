"""The bit reference: AdamW and the global norm on whole, unsharded parameters.

It imports nothing of the product and is written to be read, not to be fast. Every tier, format,
budget and thread count must give exactly these bits.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Fp32 = npt.NDArray[np.float32]
Fp16 = npt.NDArray[np.float16]
Bf16Bits = npt.NDArray[np.uint16]
Floats = Fp32 | Fp16 | Bf16Bits
Gradients = Mapping[str, Floats]
Pieces = Mapping[str, Sequence[tuple[int, int]]]  # name -> one (start, stop) a rank, in rank order
PerName = float | Mapping[str, float]  # one value for all parameters, or one for each

ROW = 64  # lanes of the norm: element i of a parameter belongs to lane i % 64
BLOCK = 64 * ROW  # elements of the norm's blocks: element i belongs to block i // 4096


def widen_bf16(bits: Bf16Bits) -> Fp32:
    """A bf16 is the upper half of an fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def as_fp32(values: Floats) -> Fp32:
    """Return fp32 values as they are, fp16 values and bf16 bits (uint16) widened."""
    if values.dtype == np.uint16:
        return widen_bf16(values.view(np.uint16))
    if values.dtype == np.float16:
        with np.errstate(invalid="ignore"):
            return values.astype(np.float32)
    return values.view(np.float32)


def quieted(values: Fp32) -> Fp32:
    """Make each NaN the quiet one with its sign, so that no rounding turns it into a number."""
    bits = values.view(np.uint32)
    quiet = np.uint32(0x7FC00000) | (bits & np.uint32(0x80000000))
    return np.where(np.isnan(values), quiet, bits).view(np.float32)


def round_to_bf16(values: Fp32) -> Bf16Bits:
    """Round to the nearest bf16, ties away from zero: add half a unit to the bits, cut below."""
    bits = quieted(values).view(np.uint32).astype(np.uint64)
    return ((bits + 0x8000) >> 16).astype(np.uint16)


def round_to_fp16(values: Fp32) -> Fp16:
    """Round to the nearest fp16, ties to even, as IEEE and numpy do it."""
    with np.errstate(all="ignore"):
        return quieted(values).astype(np.float16)


def residual_of(values: Fp32) -> npt.NDArray[np.int16]:
    """What the rounded bf16 lacks to be `values`: the low half of the bits, read as signed."""
    return (quieted(values).view(np.uint32) & 0xFFFF).astype(np.uint16).view(np.int16)


def with_one_nan(values: npt.NDArray[np.floating[Any]]) -> Fp32:
    """Give every computed NaN one pattern, as IEEE does not say which it has."""
    return np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32)).view(
        np.float32
    )


def piece_sum_squares(piece: Floats, first_index: int) -> float:
    """Sum the squares of elements `first_index` on of one parameter, by blocks and lanes, in fp64.

    The zeros put around the piece, to fill its first and last block, change no sum.
    """
    values = as_fp32(piece)
    before = first_index % BLOCK
    after = -(before + values.size) % BLOCK
    blocks = np.pad(values.astype(np.float64), (before, after)).reshape(-1, BLOCK // ROW, ROW)
    total = 0.0
    for block in blocks:
        lanes = np.zeros(ROW)
        for row in block:
            lanes = lanes + row * row
        while lanes.size > 1:
            half = lanes.size // 2
            lanes = lanes[:half] + lanes[half:]
        total = total + float(lanes[0])
    return total


def global_norm(gradients: Gradients, pieces: Pieces | None = None) -> float:
    """Return the norm of all gradients, cut as the ranks hold them (by default not cut).

    Each rank's piece of a parameter is summed on its own; the sums are added in parameter order,
    then rank order.
    """
    total = 0.0
    with np.errstate(all="ignore"):
        for name, gradient in gradients.items():
            flat = gradient.reshape(-1)
            for start, stop in [(0, flat.size)] if pieces is None else pieces[name]:
                total = total + piece_sum_squares(flat[start:stop], start)
    return math.sqrt(total)


def clip_coefficient(norm: float, clip: float) -> float:
    """Return what gradients are multiplied by to have at most the norm `clip` (0: no limit)."""
    if clip == 0.0:
        return 1.0
    coefficient = clip / (norm + 1e-6)
    return coefficient if coefficient < 1.0 else 1.0


class ReferenceAdamW:
    """AdamW on whole parameters: fp32 masters, of which some are seen by the model as 16-bit.

    `masters` gives the fp32 values in parameter order; `bf16` and `fp16` name those that the model
    holds in these types. Their gradients have the type of the parameter or are fp32.
    """

    def __init__(
        self,
        masters: Mapping[str, Fp32],
        bf16: Collection[str] = (),
        fp16: Collection[str] = (),
    ) -> None:
        unknown = {*bf16, *fp16} - set(masters)
        if unknown:
            raise ValueError(f"bf16 and fp16 name no parameters: {sorted(unknown)}")
        if set(bf16) & set(fp16):
            raise ValueError(f"both bf16 and fp16 name {sorted(set(bf16) & set(fp16))}")
        self.bf16 = frozenset(bf16)
        self.fp16 = frozenset(fp16)
        self.masters = {
            name: quieted(master) if name in self.bf16 else master.copy()
            for name, master in masters.items()
        }
        self.exp_avg = {name: np.zeros_like(master) for name, master in masters.items()}
        self.exp_avg_sq = {name: np.zeros_like(master) for name, master in masters.items()}
        self.step_count = 0

    def param(self, name: str) -> Floats:
        """Return what the model sees: fp32 or fp16 values, or bf16 bits."""
        master = self.masters[name]
        if name in self.fp16:
            return round_to_fp16(master)
        return round_to_bf16(master) if name in self.bf16 else master

    def gradient_types(self, name: str) -> list[type[np.generic]]:
        """Return the types that gradients of this parameter may have."""
        if name in self.fp16:
            return [np.float16, np.float32]
        return [np.uint16, np.float32] if name in self.bf16 else [np.float32]

    def residual(self, name: str) -> npt.NDArray[np.int16]:
        """Return what the exact format stores beside a bf16 parameter."""
        return residual_of(self.masters[name])

    def step(
        self,
        gradients: Gradients,
        *,
        lr: PerName,
        betas: tuple[float, float],
        eps: float,
        weight_decay: PerName,
        clip: float = 0.0,
        pieces: Pieces | None = None,
        loss_scale: float = 1.0,
    ) -> float:
        """Update every parameter once and return the norm of the gradients before clipping.

        The gradients are those of a loss times `loss_scale`; the norm is that of the loss itself.
        """
        in_order = {name: gradients[name] for name in self.masters}
        norm = global_norm(in_order, pieces) / loss_scale
        self.step_count += 1
        # All scalars are computed in fp64 and rounded to fp32 once.
        fp32 = np.float32
        beta1, beta2 = betas
        grad_scale = fp32(clip_coefficient(norm, clip) / loss_scale)
        bias_correction1 = 1.0 - beta1**self.step_count
        bias_correction2_sqrt = fp32(math.sqrt(1.0 - beta2**self.step_count))
        for name, gradient in in_order.items():
            lr_here = lr[name] if isinstance(lr, Mapping) else lr
            decay_here = weight_decay[name] if isinstance(weight_decay, Mapping) else weight_decay
            decay_factor = fp32(1.0 - lr_here * decay_here)
            step_size = fp32(lr_here / bias_correction1)
            wanted = self.gradient_types(name)
            if gradient.dtype not in wanted:
                raise TypeError(f"gradient of {name} must be of {wanted}, got {gradient.dtype}")
            # Each operator below is one IEEE fp32 operation on arrays, in the written order.
            with np.errstate(all="ignore"):
                g = as_fp32(gradient) * grad_scale
                p = self.masters[name] * decay_factor
                m = self.exp_avg[name] * fp32(beta1) + g * fp32(1.0 - beta1)
                v = self.exp_avg_sq[name] * fp32(beta2) + (g * g) * fp32(1.0 - beta2)
                denom = np.sqrt(v) / bias_correction2_sqrt + fp32(eps)
                p = p - step_size * (m / denom)
            self.masters[name] = with_one_nan(p)
            self.exp_avg[name] = with_one_nan(m)
            self.exp_avg_sq[name] = with_one_nan(v)
        return norm
