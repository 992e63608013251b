"""Write full weights into files that everybody reads, from values that come part by part.

Files appear under their names when they are whole. Memory is a few blocks, whatever the model has.
A tied parameter is under each of its names: in torch files they share memory, in safetensors files,
which cannot do that, each name has its own bytes.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import secrets
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aio_ops import DataFile, open_engine
from offload import tensor_span
from offload.span_writer import SpanWriter
from zero.checkpoint.directory import sync_folder
from zero.checkpoint.folders import make_folder
from zero.checkpoint.layout import safetensors_header
from zero.checkpoint.manifest import DTYPE_CODES, PieceEntry
from zero.errors import CheckpointError

_BLOCK_BYTES = 4 << 20
_BLOCK_COUNT = 3
_ZIP_ALIGNMENT_BYTES = 64
_LOCAL_HEADER_BYTES = 30 + 20  # and what zipfile adds for files beyond 4 GiB
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
_UNITS["GIB"] = 1 << 30


@dataclass(frozen=True, slots=True)
class ExportEntry:
    """One tensor to write, with all its names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return torch.Size(self.shape).numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize


Values = Callable[[ExportEntry], Iterator[torch.Tensor]]
"""Yields the values of an entry in order, flat, in its type."""


def parse_size(text: str | int) -> int:
    """Return the bytes of "5GB" and the like.

    Raises:
        ValueError: if it is no size.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+)\s*([KMG]I?B|)\s*", text.upper())
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no size; write 5GB, 500MB or a number of bytes")
    return int(found[1]) * _UNITS[found[2]]


def split_shards(entries: Sequence[ExportEntry], max_bytes: int) -> list[list[ExportEntry]]:
    """Put entries into the fewest files of at most `max_bytes`, in order; one may be larger."""
    shards: list[list[ExportEntry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size_bytes
    return shards


def write_weights(
    folder: Path,
    entries: Sequence[ExportEntry],
    values: Values,
    *,
    safetensors: bool,
    max_shard_bytes: int,
) -> list[Path]:
    """Write a model under the field's names, with an index if it takes several files.

    Raises:
        CheckpointError: if the folder cannot be written.
        OSError: if there is no room, or a write failed.
    """
    make_folder(folder)
    stem, suffix = ("model", "safetensors") if safetensors else ("pytorch_model", "bin")
    shards = split_shards(entries, max_shard_bytes)
    if len(shards) == 1:
        path = folder / f"{stem}.{suffix}"
        write_file(path, entries, values)
        return [path]
    paths = []
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05}-of-{len(shards):05}.{suffix}"
        write_file(folder / name, shard, values)
        paths.append(folder / name)
        weight_map.update({each: name for entry in shard for each in entry.names})
    index = folder / f"{stem}.{suffix}.index.json"
    total = sum(entry.size_bytes for entry in entries)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    temporary = _temporary(index)
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(index)
    return [*paths, index]


def write_file(path: Path, entries: Sequence[ExportEntry], values: Values) -> None:
    """Write one file: safetensors by its name, else what `torch.load` reads.

    Raises:
        OSError: if there is no room, or a write failed; nothing is left.
    """
    temporary = _temporary(path)
    try:
        if path.suffix == ".safetensors":
            _write_safetensors(temporary, entries, values)
        else:
            _write_torch_in_room(temporary, entries, values)
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _write_torch_in_room(path: Path, entries: Sequence[ExportEntry], values: Values) -> None:
    """Write what `torch.load` reads; a full disk is named, as where space is reserved."""
    try:
        _write_torch(path, entries, values)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        size_bytes = sum(entry.size_bytes for entry in entries)
        raise OSError(
            error.errno,
            f"there is no room for {size_bytes} bytes in {path.parent}: {error.strerror}; free some"
            " space, or name a folder on another drive",
        ) from error


def _write_safetensors(path: Path, entries: Sequence[ExportEntry], values: Values) -> None:
    """Write header and tensors, the largest types first."""
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    pieces: list[tuple[PieceEntry, int]] = []
    end = 0
    for entry in ordered:
        for name in entry.names:
            code = DTYPE_CODES.get(entry.dtype)
            if code is None:
                raise CheckpointError(f"{name} is {entry.dtype}, which safetensors cannot hold")
            pieces.append((PieceEntry(name, "", code, 0, entry.shape, 0, name), end))
            end += entry.size_bytes
    header = safetensors_header(pieces)
    engine = open_engine("threads", thread_count=2)
    try:
        with DataFile.create_new(path, len(header) + end) as file:
            writer = SpanWriter(engine, file, block_bytes=_BLOCK_BYTES, block_count=_BLOCK_COUNT)
            try:
                writer.write(0, header)
                _stream(writer, ordered, values, len(header))
                writer.flush()
            finally:
                writer.close()
            file.finish()
    finally:
        engine.close()


def _stream(
    writer: SpanWriter, entries: Sequence[ExportEntry], values: Values, offset: int
) -> None:
    for entry in entries:
        starts = [offset + index * entry.size_bytes for index in range(len(entry.names))]
        for part in values(entry):
            source = tensor_span(part).view() if part.numel() else memoryview(b"")
            for index, start in enumerate(starts):
                taken = 0
                for span in writer.spans(start, len(source)):
                    span.view()[:] = source[taken : taken + span.size_bytes]
                    taken += span.size_bytes
                starts[index] += len(source)
        offset += entry.size_bytes * len(entry.names)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor in the pickle of a torch file: its bytes are a record of the archive."""

    entry: ExportEntry
    key: str


@dataclass(frozen=True, slots=True)
class _StorageId:
    value: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    """Writes what torch writes of a dictionary of tensors."""

    def reducer_override(self, value: Any) -> Any:
        """Let a tensor be rebuilt from its record."""
        if not isinstance(value, _StoredTensor):
            return NotImplemented
        entry = value.entry
        strides = torch.empty(entry.shape, dtype=entry.dtype, device="meta").stride()
        kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[entry.dtype])
        identity = _StorageId(("storage", kind, value.key, "cpu", entry.numel))
        arguments: tuple[Any, ...] = (identity, 0, entry.shape, strides, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, value: Any) -> Any:
        """Name a record."""
        return value.value if isinstance(value, _StorageId) else None


def _write_torch(path: Path, entries: Sequence[ExportEntry], values: Values) -> None:
    """Write the archive that `torch.save` writes, record by record."""
    stored = {
        name: tensor
        for number, entry in enumerate(entries)
        for tensor in [_StoredTensor(entry, str(number))]
        for name in entry.names
    }
    text = io.BytesIO()
    _Pickler(text, protocol=2).dump(OrderedDict(stored))
    with path.open("xb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr("archive/data.pkl", text.getvalue())
            archive.writestr("archive/byteorder", "little")
            for number, entry in enumerate(entries):
                with archive.open(_record(file.tell(), number), "w", force_zip64=True) as record:
                    for part in values(entry):
                        if part.numel():
                            record.write(tensor_span(part).view())
            archive.writestr("archive/version", "3\n")
        file.flush()
        os.fsync(file.fileno())


def _record(position: int, number: int) -> zipfile.ZipInfo:
    """Return a record whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"archive/data/{number}")
    start = position + _LOCAL_HEADER_BYTES + len(info.filename) + 4
    padding = -start % _ZIP_ALIGNMENT_BYTES
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.stem}-{secrets.token_hex(4)}{path.suffix}")
