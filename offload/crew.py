"""Threads that do many pieces of work which need no order among themselves."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Crew:
    """A few threads; with one, whoever gives work does it.

    The work is copying, hashing and kernels on large arrays, all of which run without the
    interpreter lock.
    """

    def __init__(self, thread_count: int) -> None:
        self._pool: ThreadPoolExecutor | None = None
        if thread_count > 1:
            self._pool = ThreadPoolExecutor(thread_count, thread_name_prefix="crew")
        self._given: collections.deque[Future[None]] = collections.deque()

    def give(self, work: Callable[[], None]) -> None:
        """Let somebody do a piece of work; what comes of it is raised here or by `wait`."""
        if self._pool is None:
            work()
            return
        while self._given and self._given[0].done():
            self._given.popleft().result()
        self._given.append(self._pool.submit(work))

    def wait(self) -> None:
        """Return once everything is done that was given.

        Raises:
            BaseException: the failure of what was given first, of all that failed.
        """
        try:
            wait(self._given)
        except BaseException:
            self.close()  # nothing may run on memory that its owner is about to take back
            raise
        found = [error for each in self._given if (error := each.exception()) is not None]
        self._given.clear()
        if found:
            raise found[0]

    def settle(self) -> None:
        """Wait for everything, whatever comes of it: somebody has failed already."""
        wait(self._given)
        self._given.clear()

    def close(self) -> None:
        """Wait for what has begun, drop the rest, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._given.clear()
