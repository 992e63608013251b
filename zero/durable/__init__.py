"""Durable runs: committed every so many steps, resumed after any crash, bit for bit."""

from zero.durable.protocol import DurableError
from zero.durable.run import CommitReport, DurableRun, Resumed

__all__ = ["CommitReport", "DurableError", "DurableRun", "Resumed"]
