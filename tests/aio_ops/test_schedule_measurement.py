"""Measuring a device's schedule: it moves real bytes and takes the faster one."""

import contextlib
import itertools
from pathlib import Path

import pytest

from aio_ops import Engine, HostArena, Schedule, Span, measure_schedule
from aio_ops.schedule_measurement import MIXED, Traffic
from tests.aio_ops.disks import storage_bytes
from tests.aio_ops.support import SECTOR, contents, make_engine, pattern

SPAN_BYTES = 4 * SECTOR


def spans_of(arena: HostArena, count: int = 8) -> list[Span]:
    whole = arena.carve(count * SPAN_BYTES)
    whole.view()[:] = pattern(1, whole.size_bytes)
    return [whole.sub(index * SPAN_BYTES, SPAN_BYTES) for index in range(count)]


def test_it_reads_and_writes_the_disk(real_engine: Engine, scratch: Path, arena: HostArena) -> None:
    with contextlib.closing(real_engine.create_file(scratch, 65 * SPAN_BYTES)) as file:
        before = storage_bytes()
        outcome = measure_schedule(real_engine, file, spans_of(arena), seconds=0.2)
        after = storage_bytes()
        assert real_engine.in_flight == 0
        assert real_engine.schedule == outcome.best
        assert contents(file, 64 * SPAN_BYTES, SPAN_BYTES) == bytes(SPAN_BYTES)  # outside both
    assert after[0] - before[0] >= 3 * 3 * 4 * SPAN_BYTES  # each round reads half of the spans
    assert after[1] - before[1] >= 32 * SPAN_BYTES + 3 * 3 * 4 * SPAN_BYTES
    bursts = [schedule.burst_bytes for schedule in outcome.bytes_per_s]
    assert bursts == [None, 4 * SPAN_BYTES, 2 * SPAN_BYTES]
    assert min(outcome.bytes_per_s.values()) > 0
    assert outcome.best.describe() in outcome.describe()


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ([2.0, 1.0, 1.0], MIXED),
        ([1.0, 1.04, 1.0], MIXED),
        ([1.0, 1.2, 1.1], Schedule(burst_bytes=4 * SPAN_BYTES)),
        ([1.0, 1.1, 1.2], Schedule(burst_bytes=2 * SPAN_BYTES)),
    ],
)
def test_the_faster_schedule_wins(
    rates: list[float],
    best: Schedule,
    scratch: Path,
    arena: HostArena,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_engine("python") as engine, engine.create_file(scratch, 1 << 20) as file:
        told = dict(zip([None, 4 * SPAN_BYTES, 2 * SPAN_BYTES], rates, strict=True))
        # A device whose rates are known: the noise of a real one must not decide a test.
        monkeypatch.setattr(Traffic, "go", lambda *_: told[engine.schedule.burst_bytes])
        assert measure_schedule(engine, file, spans_of(arena)).best == best
        assert engine.schedule == best


def test_too_little_to_measure_with_is_refused(scratch: Path, arena: HostArena) -> None:
    with make_engine("python") as engine, engine.create_file(scratch, SPAN_BYTES) as file:
        with pytest.raises(ValueError, match="at least four spans of one size"):
            measure_schedule(engine, file, spans_of(arena, 3))
        uneven = list(itertools.chain(spans_of(arena), [arena.carve(SECTOR)]))
        with pytest.raises(ValueError, match="at least four spans of one size"):
            measure_schedule(engine, file, uneven)
        with pytest.raises(ValueError, match="takes at least"):
            measure_schedule(engine, file, spans_of(arena))
