"""The codes of `compact` in PTX: four elements at a time, because their bytes share a register.

See [Note: codes] in offload/codes.py. The processor of a device adds and multiplies at twice the
rate of its shifts, selections and comparisons; so where a product does, there is a product.
"""

from __future__ import annotations

PACK = 4
_SIGN = 0x8000_0000
_SIGNS = 0x8080_8080


def _decode(*, is_signed: bool) -> str:
    """Return PTX: codes and bases, already shifted, to values. A code of 0 is a zero."""
    lines = [f"and.b32 low, ${PACK}, {~_SIGNS & 0xFFFF_FFFF};" if is_signed else ""]
    codes = "low" if is_signed else f"${PACK}"
    for i in range(PACK):
        lines.append(
            f"""prmt.b32 code, {codes}, 0, {0x4440 | i};
            min.u32 one, code, 1;
            mul.lo.u32 base, one, ${PACK + 1 + i};
            mad.lo.u32 bits, code, ${2 * PACK + 1 + i}, base;"""
        )
        if is_signed:
            lines.append(
                f"""prmt.b32 sign, ${PACK}, 0, {0x0444 | i << 12};
                lop3.b32 bits, bits, sign, {_SIGN}, 0xF8;"""
            )
        lines.append(f"mov.b32 ${i}, bits;")
    return f"{{ .reg .u32 low, code, one, base, bits, sign; {' '.join(lines)} }}"


def _join() -> str:
    """Return PTX: parameters, as their bits, and 8-bit residuals to masters."""
    lines = []
    for i in range(PACK):
        param = f"${PACK + i // 2}"
        lines.append(f"prmt.b32 residual, ${PACK + 2}, 0, {0x8804 | i << 4 | i << 8 | i << 12};")
        if i % 2 == 0:
            lines.append(f"mad.lo.u32 bits, {param}, 65536, residual;")
        else:
            lines.append(f"and.b32 bits, {param}, {0xFFFF_0000}; add.u32 bits, bits, residual;")
        lines.append(f"mov.b32 ${i}, bits;")
    return f"{{ .reg .u32 residual, bits; {' '.join(lines)} }}"


def _packed(name: str, byte: int, result: str) -> str:
    """Return the lines that gather one byte of four words."""
    two = byte | (4 + byte) << 4
    return f"""prmt.b32 {result}, {name}0, {name}1, {two};
        prmt.b32 other, {name}2, {name}3, {two};
        prmt.b32 {result}, {result}, other, {0x5410};"""


def _split() -> str:
    """Return PTX: masters with noise added to parameters, as their bits, and residuals."""
    lines = [f"mov.b32 w{i}, ${3 + PACK + i};" for i in range(PACK)]
    lines += [f"mov.b32 t{i}, ${3 + i};" for i in range(PACK)]
    lines.append(f"prmt.b32 $0, w0, w1, {0x7632}; prmt.b32 $1, w2, w3, {0x7632};")
    lines.append(_packed("t", 1, "all"))
    return f"{{ .reg .u32 w<{PACK}>, t<{PACK}>, other, all; {' '.join(lines)} mov.b32 $2, all; }}"


def _encode(*, is_signed: bool) -> str:
    """Return PTX: values, their upper bits after rounding, and bases to codes."""
    lines = []
    for i in range(PACK):
        value, upper, base = (f"${1 + PACK * at + i}" for at in range(3))
        lines.append(f"mov.b32 w{i}, {value}; sub.s32 t{i}, {upper}, {base};")
        if is_signed:
            lines.append(f"max.s32 t{i}, t{i}, 0;")
        else:
            lines.append(f"min.u32 w{i}, w{i}, 1; max.s32 t{i}, t{i}, w{i};")
    lines.append(_packed("t", 0, "all"))
    if is_signed:
        lines.append(_packed("w", 3, "signs"))
        lines.append(f"lop3.b32 all, all, signs, {_SIGNS}, 0xF8;")
    return (
        f"{{ .reg .u32 w<{PACK}>, other, all, signs; .reg .s32 t<{PACK}>;"
        f" {' '.join(lines)} mov.b32 $0, all; }}"
    )


DECODE_SIGNED, DECODE_UNSIGNED = _decode(is_signed=True), _decode(is_signed=False)
DECODE_CONSTRAINTS = "=f,=f,=f,=f," + ",".join(["r"] * 9)
JOIN, JOIN_CONSTRAINTS = _join(), "=f,=f,=f,=f,r,r,r"
SPLIT, SPLIT_CONSTRAINTS = _split(), "=r,=r,=r," + ",".join(["r"] * 8)
ENCODE_SIGNED, ENCODE_UNSIGNED = _encode(is_signed=True), _encode(is_signed=False)
ENCODE_CONSTRAINTS = "=r," + ",".join(["r"] * 12)
