"""Lists in messages: the first few, and how many more there are."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 8


def some(items: Sequence[str], separator: str = ", ") -> str:
    """Return the first items in words, and the number of the rest."""
    more = f" and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return separator.join(items[:_MOST]) + more
