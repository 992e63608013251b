"""Safetensors files, by their headers: checked against a manifest, or written from a list."""

from __future__ import annotations

import json
from pathlib import Path

from zero.checkpoint.manifest import FileEntry
from zero.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def check_header(path: Path, entry: FileEntry) -> None:
    """Compare the header of a file with what a manifest says of it.

    Raises:
        CheckpointError: if they differ.
    """
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(entry.size_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is no safetensors file: its header would have {length} bytes"
            )
        text = file.read(length)
    try:
        found = json.loads(text)
        found.pop("__metadata__", None)
        tensors = {
            key: (each["dtype"], tuple(each["shape"]), 8 + length + each["data_offsets"][0])
            for key, each in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the header cannot be read ({error!r})") from error
    expected = {piece.key: (piece.dtype, piece.shape, piece.offset) for piece in entry.pieces}
    if tensors != expected:
        different = sorted(
            key for key in {*tensors, *expected} if tensors.get(key) != expected.get(key)
        )
        raise CheckpointError(
            f"{path}: its header and the manifest differ in {', '.join(different[:8])}"
        )
