"""How the formats that do not keep every bit round and store numbers; the numpy kernels use it.

[Note: codes] `bf16` keeps the 16-bit residual of [Note: exact split] and moments in bf16.
`compact` keeps a master of 24 bits, a bf16 parameter and an 8-bit residual, by the same rule:
`bits = (param << 16) + (sign_extend(residual) << 8)`. Its moments keep the exponent of fp32 and a
few bits below: the upper bits `u` of the magnitude, 3 bits of fraction for exp_avg and 4 for
exp_avg_sq. A block of 32 elements stores `base`, the greatest `u` less the greatest code (or 0),
and for each element `u - base` in 7 bits and a sign, or in 8 bits. So a code is logarithmic, 16
octaves lie between the least and the greatest, and what a block's codes stand for does not depend
on its other elements. Code 0 is a zero of exp_avg, which stands for all below the least; of
exp_avg_sq it is the least, `base` itself, which is zero only where `base` is: a zero there would
make the step of a small gradient huge.

An update rounds stochastically: the random bits of the element are added below what is kept, and
the sum is cut, so that on average nothing is lost (nothing is added to what is already kept
exactly). Values set by a user are rounded to nearest.

[Note: random bits] They are a function of a key and the element's number in its parameter, in
32-bit arithmetic. Eight elements, from a multiple of 8 on, share two mixed words, `x` of
`number >> 3` and the key, and `y` of `x`; the word of an element is `x * FACTORS[number & 7] + y`.
Any two of the eight words are as good as independent, because no two factors are equal modulo 8,
but for the lowest bits: two of them are alike in elements 4 apart, one in those 2 or 6 apart. So
roundings of two masters 4 apart, each once in 256 times, are correlated by 1 %, more likely ones by
less. Three words are not independent: the lowest 8 bits of all eight depend on those of `x` and `y`
alone. The key is a hash of seed, step and the parameter's name. So a replay, on any number of
ranks, gives the same bits. `bf16` rounds exp_avg with the lower 16 bits of the word and exp_avg_sq
with the upper. `compact` rounds the master with bits 0 to 7, exp_avg with bits 0 to 19, and
exp_avg_sq with bits 13 to 31: bits that two of them share are the lowest of one, where they decide
one rounding in 4,096.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from estimators import CODE_BLOCK_NUMEL

Words = npt.NDArray[np.uint32]
Fp32Array = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Bases = npt.NDArray[np.uint16]

SIGNED_SHIFT, SIGNED_CODES = 20, 0x7F
UNSIGNED_SHIFT, UNSIGNED_CODES = 19, 0xFF
MASTER_BITS = 8
UNSIGNED_LOWEST = 13
"""First of the bits of a word that exp_avg_sq is rounded with; of the others it is 0."""

GROUP_NUMEL = 8
"""Elements that share two mixed words."""
FACTORS = (
    *(0x9E37_79B8, 0x85EB_CA69, 0xC2B2_AE3A, 0x27D4_EB2B),
    *(0x1656_67BC, 0xD3A2_646D, 0xFD70_46C6, 0xB55A_4F0F),
)
MULTIPLIERS = (0x7FEB_352D, 0x846C_A68B, 0x3184_8BAB)
OTHER_MULTIPLIERS = (0xAC4C_1B51, 0x9E37_79B1)
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_QUIET_NAN = np.uint32(0x7FC0_0000)


@dataclass(frozen=True, slots=True)
class RoundingKey:
    """What the random bits of one update of some elements depend on."""

    low: int
    high: int
    first: int
    """Number, in its parameter, of the first element updated, modulo 2^32."""

    @classmethod
    def derive(cls, seed: int, step: int, name: str, first: int) -> RoundingKey:
        """Return the key of the elements of a parameter from `first` on, in one step."""
        text = f"{seed}/{step}/{first >> 32}/{name}".encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return cls(digest & 0xFFFF_FFFF, digest >> 32, first & 0xFFFF_FFFF)

    @property
    def group_word(self) -> int:
        """Return what the words of the first group of elements are mixed from, besides `high`."""
        return (self.first // GROUP_NUMEL + self.low) & 0xFFFF_FFFF

    def after(self, count: int) -> RoundingKey:
        """Return the key of the elements that come `count` later, with the same upper half."""
        return RoundingKey(self.low, self.high, (self.first + count) & 0xFFFF_FFFF)


def _group_words(groups: Words, high: int) -> tuple[Words, Words]:
    """Return the two mixed words of each group, given as its number plus the lower key."""
    x = groups ^ (groups >> np.uint32(16))
    x *= np.uint32(MULTIPLIERS[0])
    x ^= (x >> np.uint32(15)) ^ np.uint32(high)
    x *= np.uint32(MULTIPLIERS[1])
    x ^= x >> np.uint32(16)
    x *= np.uint32(MULTIPLIERS[2])
    x ^= x >> np.uint32(15)
    y = x * np.uint32(OTHER_MULTIPLIERS[0])
    y ^= y >> np.uint32(14)
    y *= np.uint32(OTHER_MULTIPLIERS[1])
    y ^= y >> np.uint32(16)
    return x, y


def random_words(key: RoundingKey, numel: int) -> Words:
    """Return the random word of each element."""
    lead = key.first % GROUP_NUMEL
    groups = np.arange(-(-(lead + numel) // GROUP_NUMEL), dtype=np.uint32)
    groups += np.uint32(key.group_word)
    x, y = _group_words(groups, key.high)
    words: Words = x[:, None] * np.array(FACTORS, np.uint32) + y[:, None]
    return words.reshape(-1)[lead : lead + numel]


def _bits_of(values: Fp32Array) -> Words:
    """Return the bits of values, each NaN as the one that kernels store."""
    return np.where(np.isnan(values), _QUIET_NAN, values.view(np.uint32))


def quieted(values: Fp32Array) -> Fp32Array:
    """Return values whose NaNs are the quiet ones with their signs."""
    bits = values.view(np.uint32)
    quiet = (bits & np.uint32(0x8000_0000)) | _QUIET_NAN
    return np.where(np.isnan(values), quiet, bits).view(np.float32)


def to_bf16(values: Fp32Array, noise: Words | int = 0x8000) -> npt.NDArray[np.uint16]:
    """Round to bf16 with 16 random bits for each element, or to nearest."""
    return ((_bits_of(values) + np.uint32(noise)) >> np.uint32(16)).astype(np.uint16)


def split_short(
    master: Fp32Array, noise: Words | int = 0x80
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int8]]:
    """Return each master as a bf16 parameter and an 8-bit residual; NaNs must be quiet."""
    shorter = (master.view(np.uint32) + np.uint32(noise)) >> np.uint32(8)
    param = ((shorter + np.uint32(0x80)) >> np.uint32(8)).astype(np.uint16)
    return param, shorter.astype(np.uint8).view(np.int8)


def join_short(param: npt.NDArray[np.uint16], residual: npt.NDArray[np.int8]) -> Fp32Array:
    """Return the masters that parameters and 8-bit residuals are together."""
    bits = param.astype(np.uint32) << np.uint32(16)
    bits += residual.astype(np.int32).view(np.uint32) << np.uint32(8)
    return bits.view(np.float32)


def _by_block(upper: Words) -> Words:
    """Return values as rows of one block each, the last filled with zeros."""
    missing = -upper.size % CODE_BLOCK_NUMEL
    return np.pad(upper, (0, missing)).reshape(-1, CODE_BLOCK_NUMEL)


def encode_signed(
    values: Fp32Array, noise: Words | int = 1 << (SIGNED_SHIFT - 1)
) -> tuple[Codes, Bases]:
    """Return codes and bases of exp_avg, rounded with 20 random bits each or to nearest."""
    bits = _bits_of(values)
    blocks = _by_block(((bits & _MAGNITUDE) + np.uint32(noise)) >> np.uint32(SIGNED_SHIFT))
    greatest = blocks.max(axis=1, initial=0)
    base = greatest - np.minimum(greatest, np.uint32(SIGNED_CODES))
    codes = (np.maximum(blocks, base[:, None]) - base[:, None]).reshape(-1)[: values.size]
    return (codes | bits >> np.uint32(31) << np.uint32(7)).astype(np.uint8), base.astype(np.uint16)


def encode_unsigned(
    values: Fp32Array, noise: Words | int = 1 << (UNSIGNED_SHIFT - 1)
) -> tuple[Codes, Bases]:
    """Return codes and bases of exp_avg_sq, rounded with 19 random bits each or to nearest."""
    bits = _bits_of(values) & _MAGNITUDE
    blocks = _by_block((bits + np.uint32(noise)) >> np.uint32(UNSIGNED_SHIFT))
    greatest = blocks.max(axis=1, initial=0)
    base = greatest - np.minimum(greatest, np.uint32(UNSIGNED_CODES))
    codes = (np.maximum(blocks, base[:, None]) - base[:, None]).reshape(-1)[: values.size]
    return codes.astype(np.uint8), base.astype(np.uint16)


def decode_signed(codes: Codes, bases: Bases) -> Fp32Array:
    """Return the exp_avg that codes and bases stand for."""
    wide = codes.astype(np.uint32)
    magnitude = wide & np.uint32(SIGNED_CODES)
    upper = np.where(magnitude != 0, _spread(bases, codes.size) + magnitude, np.uint32(0))
    sign = (wide & np.uint32(0x80)) << np.uint32(24)
    return ((upper << np.uint32(SIGNED_SHIFT)) | sign).view(np.float32)


def decode_unsigned(codes: Codes, bases: Bases) -> Fp32Array:
    """Return the exp_avg_sq that codes and bases stand for."""
    upper = _spread(bases, codes.size) + codes
    return (upper << np.uint32(UNSIGNED_SHIFT)).view(np.float32)


def _spread(bases: Bases, numel: int) -> Words:
    spread: np.ndarray[Any, Any] = np.repeat(bases.astype(np.uint32), CODE_BLOCK_NUMEL)[:numel]
    return spread
