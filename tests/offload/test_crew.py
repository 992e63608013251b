"""Threads that fill blocks of a file, or hold bytes that were read, side by side."""

from __future__ import annotations

import itertools
import random
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from aio_ops import DataFile, open_engine
from offload.block_reader import BlockReader, ReadBytes, ReadRequest
from offload.crew import Crew
from offload.span_writer import SpanWriter

pytestmark = pytest.mark.nvme

BLOCK_BYTES = 8192
SIZE_BYTES = 37 * BLOCK_BYTES + 1234


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(SIZE_BYTES)


def parts_of(seed: int) -> list[tuple[int, int]]:
    """Return ranges that make up the file, cut anywhere, in an order that is nearly ascending."""
    chance = random.Random(seed)
    cuts = sorted({0, SIZE_BYTES, *(chance.randrange(SIZE_BYTES) for _ in range(60))})
    parts = list(itertools.pairwise(cuts))
    return sorted(parts, key=lambda part: part[0] + chance.randrange(4 * BLOCK_BYTES))


@pytest.mark.parametrize("block_count", [2, 5, 32])
def test_threads_fill_one_file(scratch: Path, block_count: int) -> None:
    """Fewer blocks than threads, and more; what is evicted half full comes right as well."""
    data = content(block_count)
    with (
        open_engine("auto", directory=scratch) as engine,
        DataFile.create_new(scratch / "file", SIZE_BYTES) as file,
    ):
        writer = SpanWriter(engine, file, block_bytes=BLOCK_BYTES, block_count=block_count)
        crew = Crew(6)
        seen: set[str] = set()

        def fill(start: int, stop: int) -> None:
            seen.add(threading.current_thread().name)
            for span in writer.spans(start, stop - start):
                span.view()[:] = data[start : start + span.size_bytes]
                start += span.size_bytes

        for start, stop in parts_of(block_count):
            crew.give(partial(fill, start, stop))
        crew.wait()
        assert len(seen) > 1, "one thread did all of it"
        assert threading.current_thread().name not in seen
        writer.flush()
        file.finish()
        crew.close()
        writer.close()
    assert (scratch / "file").read_bytes() == data


def test_a_part_that_fails_holds_nobody_up(scratch: Path) -> None:
    """A block is never filled, and others wait for its memory."""
    with (
        open_engine("auto", directory=scratch) as engine,
        DataFile.create_new(scratch / "file", SIZE_BYTES) as file,
    ):
        writer = SpanWriter(engine, file, block_bytes=BLOCK_BYTES, block_count=1)
        crew = Crew(3)
        holds, waits = threading.Event(), threading.Event()

        def fail() -> None:
            try:
                for _ in writer.spans(0, 10):
                    holds.set()
                    waits.wait(60)
                    raise ValueError("cannot be decoded")
            except ValueError as error:
                writer.fail(error)
                raise

        def wait() -> None:
            holds.wait(60)
            waits.set()
            for span in writer.spans(5 * BLOCK_BYTES, 10):
                span.view()[:] = bytes(10)

        crew.give(fail)
        crew.give(wait)
        with pytest.raises(ValueError, match="cannot be decoded"):
            crew.wait()
        crew.close()
        writer.close()


@pytest.mark.parametrize("thread_count", [1, 4])
def test_bytes_are_held_until_they_are_released(scratch: Path, thread_count: int) -> None:
    """Memory for a few reads serves all of them, whoever releases what first."""
    data = content(7)
    (scratch / "file").write_bytes(data)
    found = np.zeros(SIZE_BYTES, np.uint8)
    with (
        open_engine("auto", directory=scratch) as engine,
        DataFile.open_existing(scratch / "file") as file,
    ):
        parts = parts_of(7)
        cut = [
            (first, min(first + BLOCK_BYTES, stop))
            for start, stop in parts
            for first in range(start, stop, BLOCK_BYTES)
        ]
        requests = [ReadRequest(file, start, stop - start, start) for start, stop in cut]
        reader = BlockReader(engine, requests, block_bytes=BLOCK_BYTES, block_count=6)
        crew = Crew(thread_count)

        def take(read: ReadBytes) -> None:
            first = read.request.offset
            found[first : first + read.span.size_bytes] = np.frombuffer(read.span.view(), np.uint8)
            reader.release(read)

        reads: list[ReadBytes] = []
        for read in reader.read():
            reads.append(read)
            if len(reads) > 3:  # some are held while others are read
                crew.give(partial(take, reads.pop(random.Random(len(cut)).randrange(3))))
        for read in reads:
            crew.give(partial(take, read))
        crew.wait()
        crew.close()
        reader.close()
    assert found.tobytes() == data


def test_the_first_failure_of_many_is_raised() -> None:
    crew = Crew(4)
    gate = threading.Event()

    def fail(number: int) -> None:
        gate.wait(60)
        raise ValueError(f"number {number}")

    for number in range(8):
        crew.give(partial(fail, number))
    gate.set()
    with pytest.raises(ValueError, match="number 0"):
        crew.wait()
    crew.wait()  # told once
    crew.close()
