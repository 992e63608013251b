"""Checkpoints: atomic, elastic, streamed, readable by everyone."""

from zero.checkpoint.inspection import Summary, can_resume, inspect, verify
from zero.checkpoint.manifest import Manifest, read_manifest

__all__ = ["Manifest", "Summary", "can_resume", "inspect", "read_manifest", "verify"]
