"""Checkpoints: atomic, elastic, streamed, readable by everyone."""

from zero.checkpoint.dcp import export_dcp, export_engine_dcp, load_dcp
from zero.checkpoint.inspection import Summary, can_resume, inspect, verify
from zero.checkpoint.manifest import Manifest, read_manifest

__all__ = [
    "Manifest",
    "Summary",
    "can_resume",
    "export_dcp",
    "export_engine_dcp",
    "inspect",
    "load_dcp",
    "read_manifest",
    "verify",
]
