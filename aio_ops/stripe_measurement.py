"""How fast each directory of a striped file is, so that each gets a share that fits."""

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from aio_ops.engine import Engine
from aio_ops.memory import HostArena, align_up
from aio_ops.schedule_measurement import Traffic

_SPAN_COUNT = 8
_LARGEST_SPAN_BYTES = 1 << 20
_PART_SPANS = 32  # read over and over; as many more are written


def measure_weights(
    engine: Engine,
    directories: Sequence[Path],
    *,
    seconds: float = 0.5,
    most_bytes: Sequence[int | None] | None = None,
) -> list[float]:
    """Return the bytes a second that each directory moves, half of them read and half written.

    Each is measured alone, for `seconds` after what is read was written, in an unnamed file of
    64 MiB or about `most_bytes`, which is gone afterwards. Raises what making a file or moving
    bytes there raises.
    """
    if not seconds > 0:
        raise ValueError(f"measuring takes a positive number of seconds, got {seconds}")
    limits = [None] * len(directories) if most_bytes is None else list(most_bytes)
    if len(limits) != len(directories):
        raise ValueError(f"{len(limits)} sizes were given for {len(directories)} directories")
    return [
        _measure(engine, directory, seconds, limit)
        for directory, limit in zip(directories, limits, strict=True)
    ]


def shared_alignment(engine: Engine, directories: Sequence[Path]) -> int:
    """Return what transfers have to be multiples of to be direct in every directory."""
    alignments = []
    for directory in directories:
        with contextlib.closing(engine.create_file(directory, 1)) as file:
            alignments.append(file.alignment_bytes)
    return math.lcm(*alignments)


def _measure(engine: Engine, directory: Path, seconds: float, limit: int | None) -> float:
    alignment_bytes = shared_alignment(engine, [directory])
    span_bytes = _LARGEST_SPAN_BYTES
    if limit is not None:
        span_bytes = max(min(span_bytes, limit // (2 * _PART_SPANS)), 1)
    span_bytes = align_up(span_bytes, alignment_bytes)
    part_bytes = _PART_SPANS * span_bytes
    with (
        contextlib.closing(engine.create_file(directory, 2 * part_bytes)) as file,
        HostArena(_SPAN_COUNT * span_bytes + alignment_bytes) as arena,
    ):
        whole = arena.carve(_SPAN_COUNT * span_bytes, alignment_bytes=alignment_bytes)
        spans = [whole.sub(index * span_bytes, span_bytes) for index in range(_SPAN_COUNT)]
        traffic = Traffic(engine, file, spans, part_bytes, part_bytes)
        traffic.fill()
        return traffic.go(seconds)
