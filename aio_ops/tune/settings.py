"""What can be tuned, and the grid of settings that a budget of time can measure."""

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass

MOST_POOL_BYTES = 64 << 20
"""Memory in flight, the same for every setting; less on slow disks."""

LEAST_POOL_BYTES = 8 << 20
_FIELD_THREADS = 4  # what the configuration has where threads do not matter


class Workload(enum.StrEnum):
    """What is moved: one kind, or as much of each as a training step's pages."""

    MIX = "mix"
    READ = "read"
    WRITE = "write"

    @property
    def writes(self) -> bool:
        """Whether any of it is written."""
        return self is not Workload.READ

    @property
    def written_share(self) -> float:
        """How much of what is moved is written."""
        return {Workload.MIX: 0.5, Workload.READ: 0.0, Workload.WRITE: 1.0}[self]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One way to move bytes.

    `depth` is the number of blocks that move at once: the queue depth of the engines on the
    kernel's queues, the threads of the others. `alternates`: bursts of reads and of writes.
    """

    engine: str
    block_bytes: int
    depth: int
    registered: bool = False
    alternates: bool = False

    @property
    def on_threads(self) -> bool:
        """Whether threads move the blocks."""
        return self.engine in ("threads", "python")

    @property
    def thread_count(self) -> int:
        """Threads to open the engine with."""
        return self.depth if self.on_threads else _FIELD_THREADS

    @property
    def queue_depth(self) -> int:
        """Transfers that the engine is asked to hold."""
        return max(32, 2 * self.depth) if self.on_threads else self.depth

    @property
    def configured(self) -> "Setting":
        """The setting as far as a configuration has keys for it."""
        return Setting(self.engine, self.block_bytes, self.depth)

    def describe(self) -> str:
        """Return the setting in words."""
        what = "threads" if self.on_threads else "deep"
        extras = [
            *(["registered buffers"] if self.registered else []),
            *(["alternating bursts"] if self.alternates else []),
        ]
        return ", ".join(
            [
                self.engine,
                f"blocks of {size_text(self.block_bytes)}",
                f"{self.depth} {what}",
                *extras,
            ]
        )


def size_text(size_bytes: int) -> str:
    """Return a size of a binary kind in its largest whole unit."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} bytes"


@dataclass(frozen=True, slots=True)
class _Level:
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    threads: tuple[int, ...]
    engines: int
    """How many of the engines that work here are tried, the best first."""
    extras: bool
    """Whether registered buffers and alternating bursts are tried."""


_K, _M = 1 << 10, 1 << 20
_LEVELS = (
    _Level((256 * _K, 512 * _K, _M, 2 * _M, 4 * _M, 8 * _M, 16 * _M),
           (2, 4, 8, 16, 32, 64, 128), (2, 4, 8, 16, 32), 4, extras=True),
    _Level((256 * _K, _M, 4 * _M, 16 * _M), (4, 8, 16, 32, 64), (4, 8, 16), 4, extras=True),
    _Level((256 * _K, _M, 4 * _M), (8, 32), (4, 16), 2, extras=True),
    _Level((256 * _K, _M, 4 * _M), (8, 32), (4, 16), 1, extras=False),
    _Level((_M, 4 * _M), (2, 8, 32), (2, 4), 1, extras=False),
)  # fmt: skip


def grid(
    engines: Collection[str], workload: Workload, *, pool_bytes: int, registers: bool, most: int
) -> list[Setting]:
    """Return the finest grid of at most `most` settings, or else the coarsest.

    `engines` are those that work here, the best first; `registers`: io_uring may pin memory;
    `pool_bytes`: what may be in flight.
    """
    settings: list[Setting] = []
    pins = [False, True] if registers else [False]
    for level in _LEVELS:
        settings = list(_settings_of(level, list(engines), workload, pool_bytes, pins))
        if len(settings) <= most:
            break
    return settings


def _settings_of(
    level: _Level, engines: list[str], workload: Workload, pool_bytes: int, pins: list[bool]
) -> Iterator[Setting]:
    for engine in engines[: level.engines]:
        on_threads = engine in ("threads", "python")
        bursts = [False, True] if workload is Workload.MIX and level.extras else [False]
        yield from (
            Setting(engine, block_bytes, depth, pinned, alternates)
            for block_bytes in level.blocks
            for depth in (level.threads if on_threads else level.depths)
            # Fewer bytes than one large request keep no drive busy; more do not fit the pool.
            if _M <= block_bytes * depth <= pool_bytes
            for pinned in (pins if engine == "io_uring" and level.extras else [False])
            for alternates in bursts
        )
