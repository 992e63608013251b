"""The objects that the field obtains its handles from: `AsyncIOBuilder().load().aio_handle(...)`.

Nothing is built: what the field compiles at the first use is a part of this package.
"""

import ctypes
import importlib
import logging
import sys
from types import ModuleType

_log = logging.getLogger(__name__)


class OpBuilder:
    """What all of them do."""

    NAME = ""

    def load(self, verbose: bool = True) -> ModuleType:  # noqa: ARG002  the field's argument
        """Return the module with the field's names."""
        return importlib.import_module("aio_ops.handles")

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether what the builder stands for works on this machine."""
        reason = self._refusal()
        if reason and verbose:
            _log.warning("%s is not compatible: %s", self.NAME, reason)
        return not reason

    def _refusal(self) -> str:
        """Return why it does not work here, or nothing."""
        return "" if sys.platform == "linux" else f"it needs Linux, and this is {sys.platform}"


class AsyncIOBuilder(OpBuilder):
    """Gives `aio_handle`, `aio_read`, `aio_write` and `deepspeed_memcpy`."""

    NAME = "async_io"


class GDSBuilder(OpBuilder):
    """Gives `gds_handle`; compatible where there is a CUDA driver, with or without GDS."""

    NAME = "gds"

    def _refusal(self) -> str:
        refusal = super()._refusal()
        if refusal:
            return refusal
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            return f"there is no CUDA driver ({error})"
        return ""


class PinMemoryBuilder(OpBuilder):
    """Gives `pin_handle`."""

    NAME = "pin_memory"
