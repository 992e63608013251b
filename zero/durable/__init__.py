"""Durable runs: committed every so many steps, resumed after any crash, bit for bit."""

from zero.durable.protocol import DurableError
from zero.durable.reports import CommitReport, Resumed
from zero.durable.run import DurableRun

__all__ = ["CommitReport", "DurableError", "DurableRun", "Resumed"]
