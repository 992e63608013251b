"""The native thread engine. Addresses and descriptors are integers; `owner` keeps both alive."""

from aio_ops.transfer import Transfer as Owner

class Result:
    """What came of a transfer."""

    @property
    def moved_bytes(self) -> int: ...
    @property
    def error_number(self) -> int: ...
    @property
    def ended_early(self) -> bool: ...

class Transfer:
    """The core's record of a transfer."""

class ThreadEngine:
    """A pool of threads that move blocks of transfers, in the order of submission."""

    def __init__(self, thread_count: int, block_bytes: int, queue_depth: int) -> None: ...
    @property
    def in_flight(self) -> int: ...
    def submit(
        self,
        *,
        owner: Owner,
        writes: bool,
        descriptor: int,
        offset: int,
        address: int,
        size_bytes: int,
        alignment_bytes: int,
    ) -> Transfer: ...
    def wait(self, transfer: Transfer, timeout_s: float | None) -> Result | None: ...
    def take_finished(self) -> list[tuple[Owner, Result]]: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
