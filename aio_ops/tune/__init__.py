"""Finds the fastest way to move bytes between memory and a disk, in a minute and one process.

settings.py     what can be tuned, and the grid that fits a budget
bench.py        one measurement, with a scratch file that has no name
checks.py       what can be tuned at all
statistics.py   how rates that drift are compared [Note: neighbours]
halving.py      all settings a little, the better half again, the last few until it is clear
tuner.py        the order of things: directories alone, together, long writes, the whole grid
together.py     several directories at once
gpu.py          the same through a GPU's memory
lock.py         whether another tuner disturbs [Note: two tuners]
results.py, words.py, show.py, report.py   what was found, in words, live, as curves
apply.py        the choice in a configuration
command.py      the command line
"""

from aio_ops.tune.apply import ApplyError, apply, fragment
from aio_ops.tune.checks import TuneError
from aio_ops.tune.results import Result
from aio_ops.tune.tuner import Request, tune

__all__ = ["ApplyError", "Request", "Result", "TuneError", "apply", "fragment", "tune"]
