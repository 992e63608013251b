"""The random words of [Note: random bits] in Triton's language."""

# Triton's language has no annotations that mypy could check.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined"
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

import triton
import triton.language as tl

from offload import codes

GROUP = tl.constexpr(codes.GROUP_NUMEL)
_FACTORS = tl.constexpr(codes.FACTORS)
_MULTIPLIERS = tl.constexpr(codes.MULTIPLIERS + codes.OTHER_MULTIPLIERS)


@triton.jit
def _product(words, FACTOR: tl.constexpr):
    return words * tl.full((), FACTOR, tl.uint32)


@triton.jit
def group_words(groups, high):
    """Return the two mixed words of each group, given as its number plus the lower key."""
    x = groups ^ (groups >> 16)
    x = _product(x, _MULTIPLIERS[0])
    x = x ^ (x >> 15) ^ high
    x = _product(x, _MULTIPLIERS[1])
    x = x ^ (x >> 16)
    x = _product(x, _MULTIPLIERS[2])
    x = x ^ (x >> 15)
    y = _product(x, _MULTIPLIERS[3])
    y = y ^ (y >> 14)
    y = _product(y, _MULTIPLIERS[4])
    return x, y ^ (y >> 16)


@triton.jit
def factors(place):
    """Return the factor of each place in a group, known to the compiler where the place is."""
    found = tl.zeros_like(place).to(tl.uint32)
    for at in tl.static_range(GROUP):
        found = tl.where(place == at, tl.full((), _FACTORS[at], tl.uint32), found)
    return found
