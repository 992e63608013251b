"""Host memory that stays in RAM, so that a device and the kernel may move bytes by themselves."""

import contextlib
import errno
import functools
import os
import platform
import resource
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from aio_ops.linux import last_error, libc
from aio_ops.memory import HostArena, Mapping

if TYPE_CHECKING:
    from aio_ops import _native
    from aio_ops.engine import Engine

_MBIND_CALLS = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_LONG_BITS = 64


class PinnedArena(HostArena):
    """An arena whose pages are locked in RAM and, with a device, registered with CUDA.

    The size is exact, to the page. With `device` the memory prefers the NUMA node of that GPU, and
    copies between both run at the speed of the link and without the processor. Where the CUDA
    driver refuses, the arena stays locked, copies are slower, and one warning says so;
    `cuda_refusal` says why. Raises OSError when the memory may not be locked. A HostArena locks
    nothing.
    """

    def __init__(
        self, size_bytes: int, *, hugepages: bool = True, device: int | None = None
    ) -> None:
        super().__init__(size_bytes, hugepages=hugepages)
        mapping = self._require_open()
        self.numa_node: int | None = None
        self.cuda_refusal: str | None = "no device was asked for"
        cuda = None
        if device is not None:
            cuda, self.cuda_refusal = open_cuda(device)
        if cuda is not None:
            self.numa_node = _numa_node_of(cuda.pci_bus_id)
            if self.numa_node is not None:
                _prefer_node(mapping, self.numa_node)
        _lock(mapping)
        if cuda is not None:
            self.cuda_refusal = _register(mapping, cuda)
        if device is not None and self.cuda_refusal is not None:
            warnings.warn(
                f"{self.size_bytes} bytes of host memory are not registered with CUDA device "
                f"{device} ({self.cuda_refusal}); copies to and from it are slower",
                RuntimeWarning,
                stacklevel=2,
            )

    def register_with(self, engine: "Engine") -> str | None:
        """Register all of the arena with an engine that can do it; return None, or why not.

        Transfers of it then cost less; where it is refused they are as right.
        """
        from aio_ops.kernel_engines import IoUringEngine  # it loads what most users never need

        if not isinstance(engine, IoUringEngine):
            return f"the engine {engine.name} registers no memory"
        return engine.register(self.whole())

    @property
    def cuda_registered(self) -> bool:
        """Whether the device may move bytes to and from this memory by itself."""
        return self.cuda_refusal is None


def open_cuda(device: int) -> "tuple[_native.Cuda | None, str | None]":
    """Return a CUDA device, or None and why there is none."""
    try:
        from aio_ops import _native
    except ImportError as error:
        return None, f"the native module does not load: {error}"
    cuda, refusal = _native.open_cuda(device)
    return cuda, None if cuda is not None else refusal


def _lock(mapping: Mapping) -> None:
    """Lock the pages, which also brings them into RAM now."""
    if libc().mlock(mapping.address, mapping.size_bytes) == 0:
        return
    error = last_error("mlock")
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if limit_bytes == resource.RLIM_INFINITY else f"{limit_bytes} bytes"
    raise OSError(
        error.errno or errno.ENOMEM,
        f"cannot lock {mapping.size_bytes} bytes of host memory: {os.strerror(error.errno or 0)}; "
        f"this process may lock {limit} and has locked {locked_bytes()}. Raise `ulimit -l` "
        "(LimitMEMLOCK= of a service, --ulimit memlock=-1 of a container), lock less (a lower host "
        "memory budget, smaller or fewer locked tensors), or set pin_memory to false",
    )


def locked_bytes() -> int:
    """Return how many bytes of this process are on locked pages."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    return 0


def _register(mapping: Mapping, cuda: "_native.Cuda") -> str | None:
    """Register the memory with CUDA and return None, or why it is refused.

    All of it at once: CUDA refuses copies that touch two registrations.
    """
    error = cuda.register_host(mapping.address, mapping.size_bytes)
    if error:
        return f"{cuda.describe(error)}, for {mapping.size_bytes} bytes"
    mapping.before_unmap.append(functools.partial(_unregister, cuda, mapping.address))
    return None


def _unregister(cuda: "_native.Cuda", address: int) -> None:
    cuda.unregister_host(address)


def _numa_node_of(pci_bus_id: str) -> int | None:
    """Return the NUMA node of a device, or None where there is one node or none is stated."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/sys/bus/pci/devices") / pci_bus_id / "numa_node"
        node = int(path.read_text(encoding="ascii"))
        if node >= 0 and Path("/sys/devices/system/node/node1").exists():
            return node
    return None


def _prefer_node(mapping: Mapping, node: int) -> None:
    """Ask for pages of one node; the kernel takes others where that one is full."""
    import ctypes  # only here: memory.py has no need of arrays

    number = _MBIND_CALLS.get(platform.machine())
    if number is None or node >= _LONG_BITS:
        return
    mask = ctypes.c_ulong(1 << node)
    libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(mapping.address),
        ctypes.c_ulong(mapping.size_bytes),
        ctypes.c_long(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(_LONG_BITS + 1),
        ctypes.c_uint(0),
    )
