"""Checkpoints: atomic, elastic, streamed, readable by everyone."""

from zero.checkpoint.inspection import Summary, inspect, verify
from zero.checkpoint.manifest import Manifest, read_manifest

__all__ = ["Manifest", "Summary", "inspect", "read_manifest", "verify"]
