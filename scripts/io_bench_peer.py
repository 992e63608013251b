"""Measured runs of DeepSpeed's aio_handle on existing files: started by io_bench.py.

It runs in the interpreter of an environment that has DeepSpeed, and needs nothing of ours. Any
module with an `aio_handle` of that shape can take its place. Each line of its input asks for a run,
each line of its output that is JSON answers; the slow import is paid once.
"""

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def load(name: str) -> Any:
    """Return the module that has `aio_handle`."""
    if name != "deepspeed":
        return importlib.import_module(name)
    return importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load()


class Mover:
    """Moves pieces of a file, or whole small files, several at once, on one handle a direction."""

    def __init__(self, module: Any, block_bytes: int, queue_depth: int, threads: int) -> None:
        self.torch = importlib.import_module("torch")
        settings = (block_bytes, queue_depth, False, True, threads)
        self.handles = {writes: module.aio_handle(*settings) for writes in (False, True)}
        self.memory: Any = None

    def buffers(self, count: int, size_bytes: int) -> list[Any]:
        """Return locked memory in pieces, replacing what an earlier run had."""
        if self.memory is None or self.memory.numel() != count * size_bytes:
            if self.memory is not None:
                self.handles[False].free_cpu_locked_tensor(self.memory)
            example = self.torch.empty(0, dtype=self.torch.uint8)
            self.memory = self.handles[False].new_cpu_locked_tensor(count * size_bytes, example)
            self.memory.fill_(7)
        return [
            self.memory[index * size_bytes : (index + 1) * size_bytes] for index in range(count)
        ]

    def run(self, moves: list[tuple[bool, str, int]], buffers: list[Any]) -> None:
        """Move everything: this kind of handle can only wait for all that it has under way."""
        free = deque(buffers)
        busy = {False: 0, True: 0}
        for writes, path, offset in moves:
            if not free:
                self.wait(busy)
                free.extend(buffers)
            handle = self.handles[writes]
            start = handle.async_pwrite if writes else handle.async_pread
            if start(free.popleft(), path, offset) != 0:
                raise SystemExit(f"a transfer of {path} at {offset} was refused")
            busy[writes] += 1
        self.wait(busy)

    def wait(self, busy: dict[bool, int]) -> None:
        """Wait for what both handles have under way."""
        for writes, count in busy.items():
            if count:
                self.handles[writes].wait()
            busy[writes] = 0


def plan(
    path: Path, workload: str, moved_bytes: int, transfer_bytes: int
) -> list[tuple[bool, str, int]]:
    """Return (writes, path, offset) of every transfer; a directory is a file a transfer."""
    count = moved_bytes // transfer_bytes
    if path.is_dir():
        names = sorted(str(name) for name in path.iterdir())[:count]
        return [(workload == "write", name, 0) for name in names]
    offsets = [index * transfer_bytes for index in range(count)]
    if workload in ("read", "write"):
        return [(workload == "write", str(path), offset) for offset in offsets]
    half = count // 2
    pairs = zip(offsets[:half], offsets[half : 2 * half], strict=True)
    return [
        move
        for read, write in pairs
        for move in ((False, str(path), read), (True, str(path), write))
    ]


def main() -> None:
    """Run what the command line sets and the input asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("block_bytes", type=int)
    parser.add_argument("queue_depth", type=int)
    parser.add_argument("threads", type=int)
    options = parser.parse_args()
    mover = Mover(load(options.module), options.block_bytes, options.queue_depth, options.threads)
    for line in sys.stdin:
        asked = json.loads(line)
        moves = plan(
            Path(asked["path"]), asked["workload"], asked["moved_bytes"], asked["transfer_bytes"]
        )
        buffers = mover.buffers(asked["in_flight"], asked["transfer_bytes"])
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        mover.run(moves, buffers)
        after, stop = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"cpu_s": cpu_s, "wall_s": stop - start}), flush=True)


if __name__ == "__main__":
    main()
