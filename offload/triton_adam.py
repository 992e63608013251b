"""AdamW and Adam in PTX: a few instructions an element instead of checked divisions and roots.

[Note: quick division] `div.rn` and `sqrt.rn` are short sequences of approximation and correction,
each behind a check whether its operands are ordinary, and a branch. Here the same sequences run
without, four or eight elements at a time, and one check looks at all of them: the least magnitude
of the new exp_avg that is not zero, and a sum that is NaN once anything was infinite or NaN. If it
fails, they are computed again with `div.rn` and `sqrt.rn`. The bits are the same either way:

- The second moment is scaled by 2^94 before its root, so that the least is in range and more than
  2^34 is infinite. 2^-100 is added, which a float not zero does not see and which makes a root of 0
  a number far below eps.
- So the divisor of the change lies between 2^-60 and 2^25. A first moment of 0 or at least 2^-100
  then gives an exact remainder and a quotient that is not subnormal.
- The signs of remainders are such that a quotient of -0 stays -0.

Scalars for which this does not hold (`is_usual`) take the other path always.
"""

from __future__ import annotations

import struct

import numpy as np

LEAST_EPS = 2.0**-60
GREATEST_EPS = 2.0**20
LEAST_CORRECTION = 2.0**-7
ROOT_SCALE = 2.0**47

_SCALARS = (
    *("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "decay_factor", "step_size"),
    *("correction", "eps", "grad_scale", "l2", "divisor", "inverse", "all_ones"),
)
_LEAST_MOMENT = 2.0**-100


def _hex(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def _doubled_bits(value: float) -> int:
    (bits,) = struct.unpack(">I", struct.pack(">f", value))
    return int(bits) * 2


def _moments(i: int, old: dict[str, str], *, is_adamw: bool) -> str:
    """Return the lines that make gradient, master and moments of an element."""
    coupled = "mul.rn.f32 h, {p}, {l2}; add.rn.f32 g, g, h; mov.f32 p{i}, {p};"
    decoupled = "mul.rn.f32 p{i}, {p}, {decay_factor};"
    return f"""
        mul.rn.f32 g, {{g}}, {{grad_scale}};
        {decoupled if is_adamw else coupled}
        mul.rn.f32 m{{i}}, {{m}}, {{beta1}};
        mul.rn.f32 h, g, {{one_minus_beta1}};
        add.rn.f32 m{{i}}, m{{i}}, h;
        mul.rn.f32 v{{i}}, {{v}}, {{beta2}};
        mul.rn.f32 h, g, g;
        mul.rn.f32 h, h, {{one_minus_beta2}};
        add.rn.f32 v{{i}}, v{{i}}, h;
    """.format(i=i, **old)


def _quick(i: int, scalar: dict[str, str]) -> str:
    """Return the lines that move a master, and add what the check looks at."""
    return f"""
        fma.rn.f32 d, v{i}, {_hex(ROOT_SCALE**2)}, {_hex(2.0**-100)};
        rsqrt.approx.ftz.f32 y, d;
        mul.rn.f32 q, d, y;
        mul.rn.f32 h, y, {_hex(0.5)};
        neg.f32 r, q;
        fma.rn.f32 r, r, q, d;
        fma.rn.f32 q, r, h, q;
        mul.rn.f32 h, q, {scalar["inverse"]};
        neg.f32 r, h;
        fma.rn.f32 r, r, {scalar["divisor"]}, q;
        fma.rn.f32 h, r, {scalar["inverse"]}, h;
        add.rn.f32 d, h, {scalar["eps"]};
        rcp.approx.ftz.f32 y, d;
        neg.f32 e, d;
        fma.rn.f32 e, e, y, {_hex(1.0)};
        fma.rn.f32 y, y, e, y;
        mul.rn.f32 q, m{i}, y;
        neg.f32 r, m{i};
        fma.rn.f32 r, d, q, r;
        neg.f32 r, r;
        fma.rn.f32 q, r, y, q;
        mul.rn.f32 h, {scalar["step_size"]}, q;
        sub.rn.f32 p{i}, p{i}, h;
        fma.rn.f32 sum, p{i}, {_hex(0.0)}, sum;
        mov.b32 u{i}, m{i};
        add.u32 u{i}, u{i}, u{i};
        add.u32 u{i}, u{i}, -1;
    """


def _careful(i: int, scalar: dict[str, str]) -> str:
    """Return the lines that move a master whatever there is, and store one NaN."""
    one_nan = "".join(
        f"setp.nan.f32 is_nan, {name}{i}, {name}{i};"
        f"selp.f32 {name}{i}, 0f7FC00000, {name}{i}, is_nan;"
        for name in "pmv"
    )
    return f"""
        sqrt.rn.f32 d, v{i};
        div.rn.f32 d, d, {scalar["correction"]};
        add.rn.f32 d, d, {scalar["eps"]};
        div.rn.f32 q, m{i}, d;
        mul.rn.f32 h, {scalar["step_size"]}, q;
        sub.rn.f32 p{i}, p{i}, h;
        {one_nan}
    """


def update_asm(pack: int, *, is_adamw: bool) -> str:
    """Return PTX that makes new masters and moments of old ones, gradients and scalars."""
    first = 3 * pack
    operand = {name: first + pack * at for at, name in enumerate(("p", "m", "v", "g", *_SCALARS))}
    scalar = {name: f"${operand[name]}" for name in _SCALARS}

    def old(i: int) -> dict[str, str]:
        return {**scalar, **{name: f"${operand[name] + i}" for name in "pmvg"}}

    every = range(pack)
    moments = "".join(_moments(i, old(i), is_adamw=is_adamw) for i in every)
    again = "".join(_moments(i, old(i), is_adamw=is_adamw) + _careful(i, scalar) for i in every)
    results = "".join(
        f"mov.f32 ${pack * at + i}, {name}{i};" for at, name in enumerate("pmv") for i in every
    )
    return f"""{{
        .reg .pred is_rare, is_nan;
        .reg .f32 p<{pack}>, m<{pack}>, v<{pack}>, g, h, d, y, q, r, e, sum;
        .reg .u32 u<{pack}>, least;
        mov.f32 sum, {_hex(0.0)};
        mov.b32 least, {scalar["all_ones"]};
        {moments}
        {"".join(_quick(i, scalar) for i in every)}
        {" ".join(f"min.u32 least, least, u{i};" for i in every)}
        setp.nan.f32 is_rare, sum, sum;
        setp.lt.or.u32 is_rare, least, {_doubled_bits(_LEAST_MOMENT) - 1}, is_rare;
        @!is_rare bra STORED;
        {again}
    STORED:
        {results}
    }}"""


def constraints(pack: int) -> str:
    """Return the registers of its operands, as Triton wants them."""
    floats = (4 + len(_SCALARS) - 1) * pack
    return ",".join(["=f"] * 3 * pack + ["f"] * floats + ["r"] * pack)


def derived_scalars(correction: float, eps: float) -> tuple[float, float, float]:
    """Return scaled divisor, its reciprocal, and 1 if the quick way may be taken, 0 if not."""
    usual = LEAST_CORRECTION <= correction <= 1.0 and LEAST_EPS <= eps <= GREATEST_EPS
    if not usual:
        return 0.0, 0.0, 0.0
    divisor = np.float32(correction) * np.float32(ROOT_SCALE)
    return float(divisor), float(np.float32(1) / divisor), 1.0
