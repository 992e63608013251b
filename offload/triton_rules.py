"""The update rules in Triton's language; see [Note: update rules] and [Note: quick division]."""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR1714, RET505, SIM109

from __future__ import annotations

import triton
import triton.language as tl

from offload import triton_adam
from offload.triton_numbers import sign_of, with_one_nan

# The rules, as `UpdateScalars.rule_number` counts them.
ADAMW = tl.constexpr(0)
ADAM = tl.constexpr(1)
LION = tl.constexpr(2)
ADAGRAD = tl.constexpr(3)
SGD = tl.constexpr(4)

# How many elements have one check.
FEW = tl.constexpr(4)
MANY = tl.constexpr(8)

_ADAMW_FEW = tl.constexpr(triton_adam.update_asm(FEW.value, is_adamw=True))
_ADAM_FEW = tl.constexpr(triton_adam.update_asm(FEW.value, is_adamw=False))
_FEW_CONSTRAINTS = tl.constexpr(triton_adam.constraints(FEW.value))
_ADAMW_MANY = tl.constexpr(triton_adam.update_asm(MANY.value, is_adamw=True))
_ADAM_MANY = tl.constexpr(triton_adam.update_asm(MANY.value, is_adamw=False))
_MANY_CONSTRAINTS = tl.constexpr(triton_adam.constraints(MANY.value))


@triton.jit
def one_of(scalars):
    """Return a 1 that the compiler does not know; see [Note: one]."""
    return scalars[12].to(tl.uint32)


@triton.jit
def _adam_moved(p, m, v, g, scalars, RULE: tl.constexpr, PACK: tl.constexpr):
    """Return master and moments after AdamW or Adam; see [Note: quick division]."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, step_size = scalars[:6]
    correction, eps, grad_scale, l2, _initial, _nesterov = scalars[6:12]
    _one, divisor, inverse, is_usual = scalars[12:]
    all_ones = tl.where(is_usual > 0, -1, 0)
    operands = [
        p,
        m,
        v,
        g,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        decay_factor,
        step_size,
        correction,
        eps,
        grad_scale,
        l2,
        divisor,
        inverse,
        all_ones,
    ]
    if PACK == MANY:
        return tl.inline_asm_elementwise(
            _ADAMW_MANY if RULE == ADAMW else _ADAM_MANY,
            _MANY_CONSTRAINTS,
            operands,
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=MANY,
        )
    else:
        return tl.inline_asm_elementwise(
            _ADAMW_FEW if RULE == ADAMW else _ADAM_FEW,
            _FEW_CONSTRAINTS,
            operands,
            dtype=(tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=FEW,
        )


@triton.jit
def moved(p, m, v, g, scalars, RULE: tl.constexpr, PACK: tl.constexpr):
    """Return master and moments after an update, each NaN as one; see [Note: update rules]."""
    if RULE == ADAMW or RULE == ADAM:
        return _adam_moved(p, m, v, g, scalars, RULE, PACK)
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay_factor, step_size = scalars[:6]
    _correction, eps, grad_scale, l2, initial, nesterov = scalars[6:12]
    g = g * grad_scale
    if RULE == ADAGRAD or RULE == SGD:
        g = g + p * l2
    change = g
    if RULE == LION:
        p = p * decay_factor
        change = sign_of(m * beta1 + g * one_minus_beta1)
        m = m * beta2 + g * one_minus_beta2
    if RULE == ADAGRAD:
        v = v + g * g
        change = tl.div_rn(g, tl.sqrt_rn(v + initial) + eps)
    if RULE == SGD:
        m = m * beta1 + g * one_minus_beta1
        change = tl.where(nesterov != 0, g + m * beta1, m)
    return with_one_nan(p - step_size * change), with_one_nan(m), with_one_nan(v)
