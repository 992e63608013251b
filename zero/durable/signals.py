"""SIGTERM, held back until the step that is under way is committed.

[Note: termination] The handler only sets a flag. `engine.step()` looks at it once the step is done;
then the run is committed, the handler that was there before is put back, and the signal is sent
again, so the process ends as it would have. A second SIGTERM is not held back. Python lets only
the main thread install handlers: engines of other threads leave the signal as it is.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class TerminationWatch:
    """Remembers that SIGTERM came, while it is installed."""

    def __init__(self) -> None:
        self.is_requested = False
        self._previous: Any = None
        self._is_installed = False

    def install(self) -> None:
        """Hold SIGTERM back from now on, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._is_installed = True

    def remove(self) -> None:
        """Put the handler back that was there before; a signal that was held back stays noted."""
        if not self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before())
        self._is_installed = False

    def deliver(self) -> None:
        """Put the handler back and send the signal again."""
        self.remove()
        os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_installed and not self.is_requested:
            self.is_requested = True
            return
        was_installed = self._is_installed
        self.remove()
        if was_installed:
            os.kill(os.getpid(), number)
        elif callable(self._previous):  # another engine still has this handler as its previous one
            self._previous(number, frame)
        elif self._previous is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _before(self) -> Any:
        return signal.SIG_DFL if self._previous is None else self._previous
