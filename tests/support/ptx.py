"""Runs the PTX that our Triton kernels hold, on arrays of lanes, with the results IEEE fixes.

`rsqrt.approx` and `rcp.approx` are the numbers nearest to the true ones, moved by `wobble` units in
the last place at most: what a device returns is within one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

Lanes = np.ndarray[Any, np.dtype[np.uint32]]


def _float(bits: Lanes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return bits.view(np.float32)


def _bits(values: Any) -> Lanes:
    return np.asarray(values, np.float32).view(np.uint32)


def fused(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Return a * b + c, rounded once: the sum in fp64 is rounded to odd, then to fp32."""
    product = _float(a).astype(np.float64) * _float(b).astype(np.float64)
    addend = _float(c).astype(np.float64)
    total = product + addend
    back = total - product
    rest = (product - (total - back)) + (addend - back)
    is_inexact = np.isfinite(total) & (rest != 0)
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    odd = np.nextafter(total, np.where(rest > 0, np.inf, -np.inf))
    return _bits(np.where(is_inexact & even, odd, total))


def permuted(a: Lanes, b: Lanes, selector: int) -> Lanes:
    """Return bytes of a (0 to 3) and b (4 to 7), each chosen by 4 bits; 8 replicates a sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        byte = (both >> np.uint64(8 * (choice & 7))).astype(np.uint32) & np.uint32(0xFF)
        if choice & 8:
            byte = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        result |= byte.astype(np.uint32) << np.uint32(8 * place)
    return result


def _lookup(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            term = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            result |= term
    return result


class Machine:
    """Registers of lanes, and the instructions that our kernels use."""

    def __init__(self, lane_count: int, wobble: int = 0, seed: int = 0) -> None:
        self._registers: dict[str, Lanes] = {}
        self._predicates: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}
        self._lane_count = lane_count
        self._wobble = wobble
        self._random = np.random.default_rng(seed)
        self.branched = np.zeros(lane_count, bool)
        """Lanes that did not jump over the careful path."""

    def run(self, text: str, inputs: list[Lanes], output_count: int) -> list[Lanes]:
        """Run a block on its numbered operands, outputs first."""
        for number, lanes in enumerate(inputs):
            self._registers[f"${output_count + number}"] = lanes
        active = np.ones(self._lane_count, bool)
        body = re.sub(r"\.reg [^;]*;", "", text.strip()[1:-1])
        for statement in (each.strip() for each in re.split(r";|(?<=STORED:)", body)):
            if statement == "STORED:":
                active[:] = True
            elif (jump := re.fullmatch(r"@!(\w+) bra STORED", statement)) is not None:
                active = self._predicates[jump[1]].copy()
                self.branched = active.copy()
            elif statement:
                self._execute(statement, active)
        return [self._registers[f"${number}"] for number in range(output_count)]

    def _operand(self, name: str) -> Any:
        if name in self._predicates:
            return self._predicates[name]
        if name in self._registers:
            return self._registers[name]
        value = int(name[2:], 16) if name.startswith("0f") else int(name, 0) & 0xFFFF_FFFF
        return np.full(self._lane_count, value, np.uint32)

    def _execute(self, statement: str, active: np.ndarray[Any, Any]) -> None:
        code, _, rest = statement.partition(" ")
        target, *names = (each.strip() for each in rest.split(","))
        if code == "prmt.b32":
            result: Any = permuted(*map(self._operand, names[:2]), int(names[2], 0))
        elif code == "lop3.b32":
            result = _lookup(*map(self._operand, names[:3]), int(names[3], 0))
        else:
            result = _INSTRUCTIONS[code](self, *map(self._operand, names))
        kept = self._predicates if code.startswith("setp") else self._registers
        old: Any = kept.get(target)
        kept[target] = result if old is None else np.where(active, result, old)

    def near(self, values: Any) -> Lanes:
        """Return results of an approximation."""
        bits = _bits(values.astype(np.float32))
        moved = self._random.integers(-self._wobble, self._wobble + 1, self._lane_count)
        usual = (bits & np.uint32(0x7FFF_FFFF)) - np.uint32(0x0100_0000) < np.uint32(0x7E00_0000)
        return np.where(usual, bits + moved.astype(np.uint32), bits)


def _signed(operation: Callable[[Any, Any], Any]) -> Callable[..., Lanes]:
    return lambda _, a, b: operation(a.view(np.int32), b.view(np.int32)).view(np.uint32)


def _rounded(operation: Callable[..., Any]) -> Callable[..., Lanes]:
    return lambda _, *operands: _bits(operation(*map(_float, operands)))


def _approximate(operation: Callable[[Any], Any]) -> Callable[..., Lanes]:
    return lambda machine, a: machine.near(operation(_float(a).astype(np.float64)))


def _in_halves(
    operation: Callable[[Any, Any], Any], kind: type[np.generic]
) -> Callable[..., Lanes]:
    """Return an operation on pairs: on both halves of each lane."""

    def run(_: Machine, a: Lanes, b: Lanes) -> Lanes:
        with np.errstate(all="ignore"):
            halves = operation(a.view(kind), b.view(kind))
        return np.ascontiguousarray(halves.astype(kind)).view(np.uint32)

    return run


_INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.f32": lambda _, a: a,
    "mov.b32": lambda _, a: a,
    "neg.f32": lambda _, a: a ^ np.uint32(0x8000_0000),
    "mul.rn.f32": _rounded(np.multiply),
    "add.rn.f32": _rounded(np.add),
    "sub.rn.f32": _rounded(np.subtract),
    "div.rn.f32": _rounded(np.divide),
    "sqrt.rn.f32": _rounded(np.sqrt),
    "fma.rn.f32": lambda _, a, b, c: fused(a, b, c),
    "rsqrt.approx.ftz.f32": _approximate(lambda a: 1 / np.sqrt(a)),
    "rcp.approx.ftz.f32": _approximate(lambda a: 1 / a),
    "setp.nan.f32": lambda _, a, b: np.isnan(_float(a)) | np.isnan(_float(b)),
    "setp.lt.or.u32": lambda _, a, b, c: (a < b) | c,
    "selp.f32": lambda _, a, b, c: np.where(c, a, b),
    "and.b32": lambda _, a, b: a & b,
    "xor.b32": lambda _, a, b: a ^ b,
    "shr.u32": lambda _, a, b: a >> b,
    "shr.s32": lambda _, a, b: (a.view(np.int32) >> b.view(np.int32)).view(np.uint32),
    "neg.s32": lambda _, a: np.uint32(0) - a,
    "set.ne.f16x2.f16x2": _in_halves(np.not_equal, np.float16),
    "mul.rn.f16x2": _in_halves(np.multiply, np.float16),
    "add.s16x2": _in_halves(np.add, np.int16),
    "min.s16x2": _in_halves(np.minimum, np.int16),
    "max.s16x2": _in_halves(np.maximum, np.int16),
    "max.u16x2": _in_halves(np.maximum, np.uint16),
    "add.u32": lambda _, a, b: a + b,
    "sub.s32": lambda _, a, b: a - b,
    "min.u32": lambda _, a, b: np.minimum(a, b),
    "max.s32": _signed(np.maximum),
    "mul.lo.u32": lambda _, a, b: a * b,
    "mad.lo.u32": lambda _, a, b, c: a * b + c,
}
