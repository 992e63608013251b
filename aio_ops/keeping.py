"""Files and directories that stay when an engine is closed."""

import abc
from collections.abc import Sequence
from pathlib import Path

from aio_ops.run_directory import RunClaim
from aio_ops.striped_file import StripedFile
from aio_ops.swapfile import SwapFile
from aio_ops.transfer import TransferFile


class FileKeeper(abc.ABC):
    """What an engine does with files that have names."""

    def open_named_file(self, path: Path, size_bytes: int, *, create: bool) -> TransferFile:
        """Return a file that stays when it is closed: a new one of zero bytes, or an earlier one.

        Raises:
            OSError: if it cannot be made, or is not there with that size.
        """
        self._require_usable()
        if create:
            return SwapFile.create_named(path, size_bytes)
        return SwapFile.open_named(path, size_bytes)

    def claim_directory(self, path: Path) -> RunClaim:
        """Make a directory of a run if need be, and have it for oneself until it is released.

        Raises:
            RunInUseError: if a living run has it.
            OSError: if it cannot be used.
        """
        return RunClaim(path)

    def open_striped_file(
        self, paths: Sequence[Path], member_bytes: Sequence[int], unit_bytes: int
    ) -> StripedFile:
        """Return a striped file again whose members have names, from what its layout said."""
        from aio_ops.stripe_creation import open_named

        self._require_usable()
        return open_named(self, paths, member_bytes, unit_bytes)

    @abc.abstractmethod
    def _require_usable(self) -> None:
        """Raise unless the engine can work."""
