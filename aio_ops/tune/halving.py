"""Successive halving: all settings a little, the better half again, the last few until it is clear.

Nothing here knows what a setting is; see [Note: neighbours] for how they are compared.
"""

import random
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aio_ops.tune.bench import Sample, WritesSpentError
from aio_ops.tune.statistics import interval, is_tight, relative_rates, survivors

FINALISTS = 4
TIGHT = 0.02
"""How close to the median both ends of the winner's interval must be, as a share."""

LEAST_FINAL_ROUNDS = 9

LEAST_PIECE_S, MOST_PIECE_S = 0.02, 0.06
_OVERHEAD_S = 0.015  # of a measurement: an engine is opened, the last transfers end
_LEAST_RATES = 3

_ROUNDS = (2, 2, 3)
"""Rounds of the first stages; later ones have as many as the last."""

_FIRST_SHARE = 0.3
"""Of the time: all stages together take little more than twice as long as the first."""

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Standing(Generic[KeyT]):
    """Where a search stands, for whoever shows it."""

    stage: int
    alive: int
    leader: KeyT
    rate: float
    low: float
    high: float


@dataclass
class Samples(Generic[KeyT]):
    """What was measured of each setting, in all stages and relative to neighbours in the last."""

    taken: dict[KeyT, list[Sample]] = field(default_factory=dict)
    relative: dict[KeyT, list[float]] = field(default_factory=dict)

    def rates(self, key: KeyT) -> list[float]:
        """Return the rates of a setting in the rounds of the last stage it was in.

        Where these are few, one that was disturbed would be all that is known: earlier ones count.
        """
        samples = self.taken[key]
        last = max(len(self.relative.get(key, ())) or len(samples), _LEAST_RATES)
        return [sample.rate for sample in samples[-last:]]

    def rate(self, key: KeyT) -> float:
        """Return the median of them."""
        return statistics.median(self.rates(key))


@dataclass
class Outcome(Generic[KeyT]):
    """The end of a search: who was left, the best first, and what was measured."""

    finalists: list[KeyT]
    samples: Samples[KeyT]
    tight: bool
    """Whether it ended because the winner's interval was tight, not because time was over."""

    @property
    def best(self) -> KeyT:
        """The winner."""
        return self.finalists[0]


class Search(Generic[KeyT]):
    """Measures settings by turns until one is clearly the best or the time is over."""

    def __init__(
        self,
        measure: Callable[[KeyT, float], Sample],
        watch: Callable[[Standing[KeyT]], None],
        deadline: float,
        *,
        piece_s: float,
    ) -> None:
        self._measure = measure
        self._watch = watch
        self._deadline = deadline
        self._piece_s = piece_s
        self._order = random.Random(2)
        self._spent = False
        self.samples: Samples[KeyT] = Samples()

    def halve(
        self, settings: Sequence[KeyT], finalists: Callable[[list[KeyT]], list[KeyT]]
    ) -> Outcome[KeyT]:
        """Return the outcome; `finalists` may add to the last few, given them best first."""
        alive, stage = list(settings), 0
        while len(alive) > FINALISTS and (not self.over or (stage == 0 and not self._spent)):
            rounds = _ROUNDS[min(stage, len(_ROUNDS) - 1)]
            before = self._so_far()
            self.begin_stage(alive)
            for _ in range(rounds):
                self.round(alive, stage)
            measured = {key: self.samples.relative[key] for key in alive if self._has(key)}
            if len(measured) == len(alive):
                alive = survivors(measured, max(FINALISTS, (len(alive) + 1) // 2))
            else:  # time or writes ended it: what the stage before has told still holds
                self.samples.relative.update(before)
            stage += 1
        return self._finish(finalists(alive), stage)

    def _finish(self, alive: list[KeyT], stage: int) -> Outcome[KeyT]:
        before = self._so_far()
        self.begin_stage(alive)
        tight = False
        rounds = 0
        while not self._spent and not tight and (rounds == 0 or not self.over):
            self.round(alive, stage, whole=rounds == 0)
            rounds += 1
            relative = {key: self.samples.relative[key] for key in alive if self._has(key)}
            leader = survivors(relative, 1)[0] if relative else alive[0]
            tight = (
                is_tight(self.samples.rates(leader), TIGHT, LEAST_FINAL_ROUNDS)
                if self._has(leader)
                else False
            )
        if not all(self._has(key) for key in alive):
            self.samples.relative.update(before)
        known = {key: self.samples.relative[key] for key in alive if self._has(key)}
        return Outcome(survivors(known, len(known)), self.samples, tight)

    def _so_far(self) -> dict[KeyT, list[float]]:
        return {key: list(values) for key, values in self.samples.relative.items()}

    def begin_stage(self, alive: Sequence[KeyT]) -> None:
        """Forget how those still in compare: only like is compared with like."""
        for key in alive:
            self.samples.relative[key] = []

    def round(self, alive: Sequence[KeyT], stage: int, *, whole: bool = False) -> None:
        """Measure each once, in a new order; a round that time cuts short does not count.

        Time does not cut a `whole` one, nor the first: without it there is nothing to say.
        """
        order = self._order.sample(list(alive), len(alive))
        taken: list[Sample] = []
        whole = whole or not self.samples.taken
        for key in order:
            if self._spent or (self.over and not whole):
                return
            try:
                taken.append(self._measure(key, self._piece_s))
            except WritesSpentError:
                self._spent = True
                return
        for key, sample, relative in zip(
            order, taken, relative_rates([sample.rate for sample in taken]), strict=True
        ):
            self.samples.taken.setdefault(key, []).append(sample)
            self.samples.relative[key].append(relative)
        leader = survivors({key: self.samples.relative[key] for key in alive}, 1)[0]
        rates = self.samples.rates(leader)
        self._watch(Standing(stage, len(alive), leader, statistics.median(rates), *interval(rates)))

    @property
    def over(self) -> bool:
        """Whether the time is over, or no more may be written."""
        return self._spent or time.perf_counter() >= self._deadline

    def _has(self, key: KeyT) -> bool:
        return bool(self.samples.relative.get(key))


def piece_seconds(seconds: float, count: int) -> float:
    """Return how long each measurement lasts, so that the finalists have time as well."""
    each = seconds * _FIRST_SHARE / max(count, 1) / _ROUNDS[0] - _OVERHEAD_S
    return min(max(each, LEAST_PIECE_S), MOST_PIECE_S)


def most_settings(seconds: float) -> int:
    """Return how many settings the first stage can measure."""
    return int(seconds * _FIRST_SHARE / _ROUNDS[0] / (LEAST_PIECE_S + _OVERHEAD_S))
