"""What measurements that drift still say: rates beside their neighbours', intervals, survivors.

[Note: neighbours]
A disk's speed changes by the second: caches fill, other tenants come and go. So all settings of a
round are measured one after another, in a new order each round, and each rate is divided by the
median of the rates measured just before and after it. Only these relative rates are compared.
"""

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

NEIGHBOURS = 4
"""How many measurements on each side a rate is compared with."""

_BOOTSTRAP_ROUNDS = 400
_Key = TypeVar("_Key")


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the median."""
    if len(values) < 2:
        return (min(values), max(values))
    source = random.Random(1)
    medians = sorted(
        statistics.median(source.choices(values, k=len(values))) for _ in range(_BOOTSTRAP_ROUNDS)
    )
    cut = int((1 - share) / 2 * _BOOTSTRAP_ROUNDS)
    return medians[cut], medians[-1 - cut]


def relative_rates(rates: Sequence[float]) -> list[float]:
    """Return the rates of one round, in the order of measurement, beside their neighbours'."""
    relative = []
    for index, rate in enumerate(rates):
        around = rates[max(0, index - NEIGHBOURS) : index + NEIGHBOURS + 1]
        relative.append(rate / max(statistics.median(around), 1e-9))
    return relative


def medians(samples: Mapping[_Key, Sequence[float]]) -> dict[_Key, float]:
    """Return the median of each."""
    return {key: statistics.median(values) for key, values in samples.items()}


def survivors(samples: Mapping[_Key, Sequence[float]], keep: int) -> list[_Key]:
    """Return the best `keep`, the best first."""
    scores = medians(samples)
    return sorted(scores, key=scores.__getitem__, reverse=True)[:keep]


def is_tight(values: Sequence[float], half_width: float, least: int) -> bool:
    """Say whether the interval of the median is within `half_width` of it, as a share."""
    if len(values) < least:
        return False
    low, high = interval(values)
    middle = statistics.median(values)
    return middle > 0 and max(high - middle, middle - low) <= half_width * middle


def percentile(values: Iterable[float], share: float) -> float:
    """Return a percentile by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
