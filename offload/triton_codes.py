"""Masters and codes of `compact` in PTX: eight elements at a time, because they share registers.

See [Note: codes] in offload/codes.py. Codes and what they are made of lie in pairs, an element in
each half of a register, where instructions for pairs work on both. The processor of a device adds
and multiplies at twice the rate of its shifts, selections and comparisons; so where a product does,
there is a product. Factors are operands, because the compiler would make shifts of known ones.
"""

from __future__ import annotations

from dataclasses import dataclass

PACK = 8
_PAIRS = PACK // 2
_FOURS = PACK // 4
_UPPER = 0xFFFF_0000
_SIGNS = 0x8080_8080
_MAGNITUDES = 0x7FFF_7FFF
"""Of a pair."""
_CHOOSE = 0xE4
"""For lop3: bits of the first where the third has ones, of the second elsewhere."""
_MASTER_NOISE, _SIGNED_NOISE = 0xFF, 0xF_FFFF


@dataclass(frozen=True, slots=True)
class Asm:
    """PTX, and the registers of its operands as Triton wants them: results first."""

    text: str
    constraints: str


def _asm(lines: list[str], registers: str, results: str, operand_count: int) -> Asm:
    """Join lines; `results` has a letter for each register of a result."""
    constraints = [f"={each}" for each in results] + ["r"] * operand_count
    return Asm(f"{{ .reg .b32 {registers}; {' '.join(lines)} }}", ",".join(constraints))


def _join() -> Asm:
    """Return PTX: parameters and 8-bit residuals to masters.

    Operands are parameters, residuals, 65536 and 1.
    """
    residuals = PACK + _PAIRS
    factor, one = residuals + _FOURS, residuals + _FOURS + PACK
    lines = []
    for i in range(PACK):
        param, byte = f"${PACK + i // 2}", i % 4
        selector = 0x8804 | byte << 4 | byte << 8 | byte << 12
        lines.append(f"prmt.b32 residual, ${residuals + i // 4}, 0, {selector};")
        if i % 2 == 0:
            lines.append(f"mad.lo.u32 bits, {param}, ${factor + i}, residual;")
        else:
            lines.append(f"and.b32 bits, {param}, {_UPPER};")
            lines.append(f"mad.lo.u32 bits, bits, ${one + i}, residual;")
        lines.append(f"mov.b32 ${i}, bits;")
    return _asm(lines, "residual, bits", "f" * PACK, _PAIRS + _FOURS + 2 * PACK)


def _widen() -> Asm:
    """Return PTX: bf16 to fp32. Operands are bf16 and 65536."""
    lines = []
    for i in range(PACK):
        pair = f"${PACK + i // 2}"
        if i % 2 == 0:
            lines.append(f"mul.lo.u32 bits, {pair}, ${PACK + _PAIRS + i};")
        else:
            lines.append(f"and.b32 bits, {pair}, {_UPPER};")
        lines.append(f"mov.b32 ${i}, bits;")
    return _asm(lines, "bits", "f" * PACK, _PAIRS + PACK)


def _decode() -> Asm:
    """Return PTX: codes of exp_avg and exp_avg_sq to values.

    Operands are both codes; the base of exp_avg, shifted by 4, in both halves; that of exp_avg_sq,
    shifted by 19; and 16, 65536 and 2^19. A pair of exp_avg becomes the upper halves of two floats.
    """
    codes = 2 * PACK
    other_codes = codes + _FOURS
    base, other_base, by_16, by_65536, by_2_19 = (
        other_codes + _FOURS + PACK * at for at in range(5)
    )
    lines = ["mov.b32 zero, 0;"]
    for i in range(0, PACK, 2):
        code, byte = f"${codes + i // 4}", i % 4
        lines.append(
            f"""and.b32 low, {code}, {~_SIGNS & 0xFFFF_FFFF};
            prmt.b32 pair, low, 0, {0x4040 | (byte + 1) << 8 | byte};
            prmt.b32 signs, {code}, 0, {0x0404 | (byte + 1) << 12 | byte << 4};
            set.ne.f16x2.f16x2 ones, pair, zero;
            mul.rn.f16x2 ones, ones, ${base + i};
            mad.lo.u32 pair, pair, ${by_16 + i}, ones;
            lop3.b32 pair, pair, signs, {_MAGNITUDES}, {_CHOOSE};
            mul.lo.u32 bits, pair, ${by_65536 + i}; mov.b32 ${i}, bits;
            and.b32 bits, pair, {_UPPER}; mov.b32 ${i + 1}, bits;"""
        )
    for i in range(PACK):
        lines.append(
            f"""prmt.b32 bits, ${other_codes + i // 4}, 0, {0x4440 | i % 4};
            mad.lo.u32 bits, bits, ${by_2_19 + i}, ${other_base + i}; mov.b32 ${PACK + i}, bits;"""
        )
    registers = "low, pair, signs, ones, zero, bits"
    return _asm(lines, registers, "f" * 2 * PACK, 2 * _FOURS + 5 * PACK)


def _round() -> Asm:
    """Return PTX: words and updated values to what is cut of them.

    Operands are master, exp_avg and exp_avg_sq as bits; the words of the group and the factors of
    [Note: random bits]; and 1. Results are masters with noise and 2^15 added, and the upper halves
    of the moments with noise added.
    """
    results = PACK + 2 * _PAIRS
    lines = []
    for i in range(PACK):
        p, m, v, x, y, factor, one = (f"${results + PACK * at + i}" for at in range(7))
        lines.append(
            f"""mad.lo.u32 word, {x}, {factor}, {y};
            and.b32 noise, word, {_MASTER_NOISE}; add.u32 noise, noise, {p};
            add.u32 noise, noise, {0x8000}; mov.b32 ${i}, noise;
            and.b32 noise, word, {_SIGNED_NOISE}; mad.lo.u32 m{i}, noise, {one}, {m};
            shr.u32 noise, word, 13; add.u32 v{i}, noise, {v};"""
        )
    for at in range(_PAIRS):
        for name, result in (("m", PACK + at), ("v", PACK + _PAIRS + at)):
            lines.append(f"prmt.b32 ${result}, {name}{2 * at}, {name}{2 * at + 1}, {0x7632};")
    registers = f"word, noise, m<{PACK}>, v<{PACK}>"
    return _asm(lines, registers, "r" * results, 7 * PACK)


def _split() -> Asm:
    """Return PTX: masters with noise and 2^15 added to parameters and residuals."""
    results = _PAIRS + _FOURS
    lines = [f"mov.b32 t{i}, ${results + i};" for i in range(PACK)]
    for at in range(_PAIRS):
        lines.append(f"prmt.b32 ${at}, t{2 * at}, t{2 * at + 1}, {0x7632};")
    for at in range(_FOURS):
        first, second, third, fourth = (f"t{4 * at + i}" for i in range(4))
        lines.append(
            f"""prmt.b32 two, {first}, {second}, {0x51}; prmt.b32 other, {third}, {fourth}, {0x51};
            prmt.b32 two, two, other, {0x5410}; xor.b32 two, two, {_SIGNS};
            mov.b32 ${_PAIRS + at}, two;"""
        )
    return _asm(lines, f"two, other, t<{PACK}>", "r" * results, PACK)


def _encode(*, is_signed: bool) -> Asm:
    """Return PTX: upper halves of moments to codes.

    Operands are the halves; the base, shifted as they are, less than 0, in both halves; and the
    factor that brings codes to the upper bytes of halves.
    """
    halves, base, factor = _FOURS, _FOURS + _PAIRS, _FOURS + _PAIRS + PACK
    lines = ["mov.b32 zero, 0;"]
    for at in range(_PAIRS):
        pair = f"${halves + at}"
        magnitudes = (
            f"and.b32 pair, {pair}, {_MAGNITUDES};" if is_signed else f"mov.b32 pair, {pair};"
        )
        lines.append(
            f"""{magnitudes}
            add.s16x2 pair, pair, ${base + 2 * at}; max.s16x2 pair, pair, zero;
            mul.lo.u32 t{at}, pair, ${factor + 2 * at};"""
        )
        if is_signed:
            lines.append(f"lop3.b32 t{at}, t{at}, {pair}, {_MAGNITUDES}, {_CHOOSE};")
    for at in range(_FOURS):
        lines.append(f"prmt.b32 ${at}, t{2 * at}, t{2 * at + 1}, {0x7531};")
    return _asm(lines, f"pair, zero, t<{_PAIRS}>", "r" * _FOURS, _PAIRS + 2 * PACK)


def _bases() -> Asm:
    """Return PTX, for one block: the greatest upper halves to bases.

    The operand has that of exp_avg below that of exp_avg_sq. Results are both bases, shifted as the
    halves are, less than 0, each in both halves; and both bases.
    """
    limits = (0xFF << 3) + 1 << 16 | (0x7F << 4) + 1
    lines = [
        f"""mov.b32 zero, 0; mov.b32 mask, {0xFFF8_FFF0}; mov.b32 limits, {limits};
        lop3.b32 both, $4, mask, zero, {0x3F};
        add.s16x2 both, both, limits; min.s16x2 both, both, zero;
        prmt.b32 low, both, both, {0x1010}; prmt.b32 high, both, both, {0x3232};
        mov.b32 $0, low; mov.b32 $1, high;
        shr.s32 low, low, 20; neg.s32 $2, low; shr.s32 high, high, 19; neg.s32 $3, high;"""
    ]
    return _asm(lines, "zero, mask, limits, both, low, high", "rrrr", 1)


JOIN, WIDEN, DECODE, ROUND, SPLIT = _join(), _widen(), _decode(), _round(), _split()
ENCODE_SIGNED, ENCODE_UNSIGNED = _encode(is_signed=True), _encode(is_signed=False)
BASES = _bases()
GREATEST = Asm("{ max.u16x2 $0, $1, $2; }", "=r,r,r")
BOTH_GREATEST = _asm(
    [
        f"""prmt.b32 low, $1, $2, {0x5410}; prmt.b32 high, $1, $2, {0x7632};
        max.u16x2 $0, low, high;"""
    ],
    "low, high",
    "r",
    2,
)
"""Of pairs of exp_avg and of exp_avg_sq, to the greatest of each in one pair."""
OPAQUE = Asm("{ mov.b32 $0, $1; }", "=r,r")
"""The same number, of which the compiler knows nothing."""
