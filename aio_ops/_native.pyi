"""The native engines. Addresses and descriptors are integers; `owner` keeps both alive.

A file slot or edge descriptor of -1 is none.
"""

from collections.abc import Callable

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

class Activity:
    """What an engine is doing."""

    @property
    def in_flight(self) -> int: ...
    @property
    def blocks_taken(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def since_progress_s(self) -> float: ...

class Engine:
    """What every native engine does."""

    @property
    def in_flight(self) -> int: ...
    @property
    def activity(self) -> Activity: ...
    def watch(self, stall_s: float, on_stall: Callable[[Activity], None]) -> None:
        """Call `on_stall`, which must not refer to this engine, while a wait sees no progress."""

    def set_schedule(
        self, *, read_window_bytes: int, write_window_bytes: int, burst_bytes: int
    ) -> None: ...
    def submit(
        self,
        owners: list[Owner],
        pieces: list[tuple[int, int, int]],
        *,
        writes: bool,
        descriptor: int,
        alignment_bytes: int,
        file_slot: int = -1,
        edge_descriptor: int = -1,
        further: bool = False,
    ) -> list[Transfer]:
        """Take transfers between a file and pieces of memory: (offset, address, size in bytes)."""

    def wait(self, transfer: Transfer, timeout_s: float | None) -> Result | None: ...
    def take_finished(self) -> list[tuple[Owner, Result]]: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...

class ThreadEngine(Engine):
    """A pool of threads that move blocks of transfers, in the order of submission."""

    def __init__(self, thread_count: int, block_bytes: int, queue_depth: int) -> None: ...

class UringEngine(Engine):
    """One io_uring; OSError when the kernel refuses it."""

    def __init__(
        self,
        block_bytes: int,
        queue_depth: int,
        submission_polling: bool = False,
        completion_polling: bool = False,
    ) -> None: ...
    def add_file(self, descriptor: int) -> int:
        """Return the slot of a registered file, or the negated errno."""

    def remove_file(self, slot: int) -> None: ...
    def add_memory(self, address: int, size_bytes: int) -> int:
        """Return 0 once the memory is registered, or the errno."""

    def remove_memory(self, address: int) -> None: ...

class AioEngine(Engine):
    """Linux kernel AIO, a context for reads and one for writes; OSError when it is refused."""

    def __init__(self, block_bytes: int, queue_depth: int) -> None: ...

class Cuda:
    """A CUDA device by its primary context; answers are the driver's numbers, 0 for all is well."""

    @property
    def pci_bus_id(self) -> str: ...
    def register_host(self, address: int, size_bytes: int) -> int: ...
    def unregister_host(self, address: int) -> int: ...
    def describe(self, error: int) -> str: ...

def open_cuda(device: int) -> tuple[Cuda | None, str]:
    """Return a device, or None and why it cannot be used."""

class DeviceTransfer:
    """The core's record of a transfer of device memory."""

class DeviceMover:
    """Moves bytes between files and a device through slots of registered host memory."""

    def __init__(
        self,
        engine: Engine,
        cuda: Cuda,
        *,
        memory_owner: object,
        memory: int,
        slot_bytes: int,
        slots_each: int,
    ) -> None: ...
    def submit(
        self,
        owner: Owner,
        piece: tuple[int, int, int],
        *,
        writes: bool,
        descriptor: int,
        alignment_bytes: int,
        edge_descriptor: int = -1,
        after: int = 0,
    ) -> DeviceTransfer: ...
    def wait(self, transfer: DeviceTransfer, timeout_s: float | None) -> bool: ...
    def take_finished(self) -> list[tuple[Owner, Result, str]]: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
