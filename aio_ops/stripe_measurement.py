"""How fast each directory of a striped file is, so that each gets a share that fits."""

import contextlib
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from aio_ops.engine import Engine
from aio_ops.memory import HostArena, align_up
from aio_ops.schedule_measurement import Traffic

_SPAN_COUNT = 8
_LARGEST_SPAN_BYTES = 1 << 20
_ROUNDS = 3
_PART_SPANS = 32  # read over and over; as many more are written


def measure_weights(
    engine: Engine,
    directories: Sequence[Path],
    *,
    seconds: float = 1.0,
    most_bytes: Sequence[int | None] | None = None,
) -> list[float]:
    """Return the bytes a second that each directory moves, half of them read and half written.

    Each is measured alone, three times in turn for `seconds` in all, after what is read was
    written; the median counts. It takes unnamed files of 64 MiB or about `most_bytes`, which are
    gone afterwards. Raises what making a file or moving bytes there raises.
    """
    if not seconds > 0:
        raise ValueError(f"measuring takes a positive number of seconds, got {seconds}")
    limits = [None] * len(directories) if most_bytes is None else list(most_bytes)
    if len(limits) != len(directories):
        raise ValueError(f"{len(limits)} sizes were given for {len(directories)} directories")
    with contextlib.ExitStack() as stack:
        runs = [
            _prepare(engine, directory, limit, stack)
            for directory, limit in zip(directories, limits, strict=True)
        ]
        for run in runs:
            run.fill()
        rounds = [[run.go(seconds / _ROUNDS) for run in runs] for _ in range(_ROUNDS)]
    return [statistics.median(rates) for rates in zip(*rounds, strict=True)]


def shared_alignment(engine: Engine, directories: Sequence[Path]) -> int:
    """Return what transfers have to be multiples of to be direct in every directory."""
    alignments = []
    for directory in directories:
        with contextlib.closing(engine.create_file(directory, 1)) as file:
            alignments.append(file.alignment_bytes)
    return math.lcm(*alignments)


def _prepare(
    engine: Engine, directory: Path, limit: int | None, stack: contextlib.ExitStack
) -> Traffic:
    """Make what a directory is measured with; `stack` takes it away."""
    alignment_bytes = shared_alignment(engine, [directory])
    span_bytes = _LARGEST_SPAN_BYTES
    if limit is not None:
        span_bytes = max(min(span_bytes, limit // (2 * _PART_SPANS)), 1)
    span_bytes = align_up(span_bytes, alignment_bytes)
    part_bytes = _PART_SPANS * span_bytes
    file = stack.enter_context(contextlib.closing(engine.create_file(directory, 2 * part_bytes)))
    arena = stack.enter_context(HostArena(_SPAN_COUNT * span_bytes + alignment_bytes))
    whole = arena.carve(_SPAN_COUNT * span_bytes, alignment_bytes=alignment_bytes)
    spans = [whole.sub(index * span_bytes, span_bytes) for index in range(_SPAN_COUNT)]
    return Traffic(engine, file, spans, part_bytes, part_bytes)
