"""A Ctrl-C waits for the step that is under way: half a step is of no use to whoever saves then.

[Note: Ctrl-C] An update that is torn leaves some sub-groups a step ahead of others, so the engine
refuses all further work, a checkpoint too. The handler only notes that the signal came, and
KeyboardInterrupt is raised where `engine.step()` ends. A second Ctrl-C is not held back. Python
lets only the main thread install handlers, and one that a program has installed itself is left
alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Hold one Ctrl-C back until the block ends.

    Raises:
        KeyboardInterrupt: at the end, if it came.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # the block may have installed another one
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
