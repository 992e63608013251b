"""Sizes and counts as people write them, and as they read them."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_NUMBER = re.compile(r"^\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*$", re.IGNORECASE)
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BYTES = {
    **{f"{key}b": factor for key, factor in _DECIMAL.items()},
    **{f"{key}ib": 1 << (10 * index) for index, key in enumerate(("", *"kmgtp"))},
    **_DECIMAL,
}
_MOST = 1e30
_COUNTS = {**_DECIMAL, "b": 10**9}

NVME_IS_SPARED = "Nothing rests on NVMe: memory holds all of it, and no swap file is made."


def parse_bytes(text: str) -> int:
    """Return bytes written as `24GB` (powers of ten), `24GiB` (of two), or a number.

    Raises:
        ValueError: if it is none of these.
    """
    return round(_parse(text, _BYTES, "a size such as 24GB or 64GiB"))


def parse_count(text: str) -> int:
    """Return a count written as `7e9`, `7B`, `131M` or a number.

    Raises:
        ValueError: if it is none of these.
    """
    number = _parse(text, _COUNTS, "a count such as 7e9, 7B or 131M")
    if number != int(number):
        raise ValueError(f"{text!r} is not a whole number; {math.ceil(number)} is the next one")
    return int(number)


def _parse(text: str, units: dict[str, int], wanted: str) -> Decimal:
    match = _NUMBER.match(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {wanted}")
    number = Decimal(match[1].replace("_", ""))
    if number > _MOST or number * factor > _MOST:
        raise ValueError(f"{text!r} is more than anything has")
    return number * factor


def bytes_text(size_bytes: float) -> str:
    """Return bytes for people, in powers of ten."""
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return (
                f"{size_bytes / factor:.3g} {unit}"
                if size_bytes < 1000 * factor
                else (f"{size_bytes / factor:,.0f} {unit}")
            )
    return f"{size_bytes:.0f} B"


def count_text(count: float) -> str:
    """Return a count for people."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f}"


def seconds_text(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172800 else f"{seconds / 86400:.3g} days"
