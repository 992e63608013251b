"""Checkpoints: atomic, elastic, streamed, readable by everyone."""

from zero.checkpoint.manifest import Manifest, read_manifest

__all__ = ["Manifest", "read_manifest"]
