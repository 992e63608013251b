"""What a checkpoint holds, for people, and whether it is whole."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from aio_ops import open_engine
from zero.checkpoint.directory import LATEST, find, list_checkpoints, read_latest
from zero.checkpoint.load import CheckpointFiles, verify_blocks
from zero.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from zero.checkpoint.safetensors_files import check_header
from zero.errors import CheckpointError

_TYPE_NAMES = {"F32": "fp32", "BF16": "bf16", "U8": "8-bit codes"}


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds."""

    path: Path
    tag: str
    world_size: int
    global_steps: int
    size_bytes: int
    file_count: int
    sections: dict[str, tuple[int, int, int]]
    """By section: tensors, elements, bytes."""
    trained_numel: int
    frozen_numel: int
    tied: tuple[tuple[str, ...], ...]
    run: dict[str, Any]

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(
            {
                "path": str(self.path),
                "tag": self.tag,
                "world_size": self.world_size,
                "global_steps": self.global_steps,
                "size_bytes": self.size_bytes,
                "sections": self.sections,
                "trained_numel": self.trained_numel,
                "frozen_numel": self.frozen_numel,
                "tied": self.tied,
                **self.run,
            },
            indent=1,
        )

    def table(self) -> Table:
        """Return it as a table."""
        table = Table(title=f"{self.path}", title_justify="left")
        for name in ("section", "tensors", "elements", "bytes"):
            table.add_column(name, justify="left" if name == "section" else "right")
        for section, counts in self.sections.items():
            table.add_row(section, *(f"{count:,}" for count in counts))
        table.add_section()
        table.add_row("files", str(self.file_count), "", f"{self.size_bytes:,}")
        lines = [
            f"step {self.global_steps}, saved by {self.world_size} ranks",
            f"{self.trained_numel:,} trained and {self.frozen_numel:,} frozen parameters",
            *(f"tied: {' = '.join(names)}" for names in self.tied),
            *(f"{key}: {value}" for key, value in self.run.items()),
        ]
        table.caption = "\n".join(lines)
        table.caption_justify = "left"
        return table


def locate(path: Path, tag: str | None = None) -> Path:
    """Return the folder of one checkpoint: the one given, or that of a tag, or of `latest`.

    Raises:
        CheckpointError: if there is none, naming those that there are.
    """
    if tag is None and (path / MANIFEST_NAME).is_file():
        return path
    tag = tag or read_latest(path)
    if tag is not None:
        return find(path, tag)
    known = ", ".join(name for _, name in list_checkpoints(path))
    raise CheckpointError(
        f"{path} is no checkpoint and has no file {LATEST!r}"
        + (f"; it has the checkpoints {known}: give a tag" if known else "")
    )


def inspect(path: str | Path, tag: str | None = None) -> Summary:
    """Return what a checkpoint holds; its files are looked at, their data are not read.

    Raises:
        CheckpointError: if it cannot be used.
    """
    folder = locate(Path(path), tag)
    manifest = read_manifest(folder)
    for rank in manifest.ranks:
        for file in rank.files:
            check_header(folder / file.name, file)
    return summarise(folder, manifest)


def summarise(folder: Path, manifest: Manifest) -> Summary:
    """Return what a manifest says."""
    sections: dict[str, tuple[int, int, int]] = {}
    counted: dict[str, set[str]] = {}
    for _, piece in manifest.pieces():
        counted.setdefault(piece.section, set()).add(piece.name)
        _, numel, size = sections.get(piece.section, (0, 0, 0))
        sections[piece.section] = (
            len(counted[piece.section]),
            numel + piece.numel,
            size + piece.size_bytes,
        )
    run = manifest.ranks[0].run
    optimizer, schedule = run.get("optimizer"), run.get("scheduler")
    return Summary(
        folder,
        manifest.tag,
        manifest.world_size,
        manifest.global_steps,
        manifest.size_bytes,
        sum(len(rank.files) for rank in manifest.ranks),
        sections,
        sum(each.numel for each in manifest.tensors if each.trained),
        sum(each.numel for each in manifest.tensors if not each.trained),
        tuple((each.name, *each.aliases) for each in manifest.tensors if each.aliases),
        {
            "optimizer": optimizer["type"] if optimizer else None,
            "optimizer state": _state_types(manifest),
            "schedule": schedule["type"] if schedule else None,
            "batch": run.get("batch"),
            "micro-batches of the window": run["window"]["micro_batches"],
        },
    )


def _state_types(manifest: Manifest) -> str | None:
    """Say in which types the states of the optimizer were saved."""
    found = {
        _TYPE_NAMES.get(piece.dtype, piece.dtype)
        for _, piece in manifest.pieces()
        if piece.section in manifest.states
    }
    return " and ".join(sorted(found)) or None


def can_resume(path: str | Path, tag: str | None = None) -> tuple[bool, str]:
    """Tell whether there is a checkpoint to go on from, and which, or why not; reads no data."""
    try:
        found = inspect(path, tag)
    except (CheckpointError, OSError) as error:
        return False, str(error)
    return True, f"{found.path}: step {found.global_steps}, saved by {found.world_size} ranks"


def verify(path: str | Path, tag: str | None = None) -> int:
    """Read a whole checkpoint and compare it with its checksums; return the bytes read.

    Raises:
        CheckpointError: naming what is damaged first.
    """
    folder = locate(Path(path), tag)
    inspect(folder)
    manifest = read_manifest(folder)
    io = open_engine("auto")
    try:
        with CheckpointFiles(folder, manifest) as files:
            return verify_blocks(files, io, len(os.sched_getaffinity(0)))
    finally:
        io.close()
