"""Asynchronous byte movement between files and host memory, without torch.

Importing does nothing: the native module, the C library and the kernel are first touched when an
engine, an arena or a file is made.
"""

from aio_ops.clones import clone_file
from aio_ops.data_file import DataFile
from aio_ops.device import DeviceMover
from aio_ops.directories import Directory, SyncedDirectory, remove_file, replace_file
from aio_ops.engine import Engine, open_engine
from aio_ops.memory import DeviceSpan, HostArena, Span
from aio_ops.pinned import PinnedArena
from aio_ops.platter import Platter, SimulatedCrash
from aio_ops.run_directory import RunClaim, RunInUseError, RunLock
from aio_ops.schedule import Schedule
from aio_ops.schedule_measurement import ScheduleMeasurement, measure_schedule
from aio_ops.simulated import Fault, SimulatedDisk
from aio_ops.stripe_measurement import measure_weights
from aio_ops.striped_file import StripedFile
from aio_ops.swapfile import SwapFile
from aio_ops.threads_engine import native_available, native_unavailable_reason
from aio_ops.transfer import Ticket, TransferError, TransferFile

__all__ = [
    "DataFile",
    "DeviceMover",
    "DeviceSpan",
    "Directory",
    "Engine",
    "Fault",
    "HostArena",
    "PinnedArena",
    "Platter",
    "RunClaim",
    "RunInUseError",
    "RunLock",
    "Schedule",
    "ScheduleMeasurement",
    "SimulatedCrash",
    "SimulatedDisk",
    "Span",
    "StripedFile",
    "SwapFile",
    "SyncedDirectory",
    "Ticket",
    "TransferError",
    "TransferFile",
    "clone_file",
    "measure_schedule",
    "measure_weights",
    "native_available",
    "native_unavailable_reason",
    "open_engine",
    "remove_file",
    "replace_file",
]
