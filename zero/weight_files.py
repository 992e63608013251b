"""Weights at rest in files or dictionaries, read one range of one tensor at a time.

The safetensors format is eight bytes of header length, a JSON header, then the tensors back to
back; so a rank can read exactly its piece. The format's own library maps the whole file, privately
and writable, which fails where memory is limited (RLIMIT_DATA): that is why it is not used here.
"""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from offload import tensor_span

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class WeightFileError(ValueError):
    """A file of weights that cannot be read; names the file and what is wrong."""


class WeightReader(abc.ABC):
    """Named tensors that are read by ranges of flat elements."""

    @abc.abstractmethod
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor."""

    @abc.abstractmethod
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a tensor, flat, in its own type."""

    def close(self) -> None:  # noqa: B027  most readers hold nothing
        """Give files up."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor] | WeightReader


class _Safetensors(WeightReader):
    """One file; each range is one pread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._entries, self._base = self._read_header(os.fstat(self._descriptor).st_size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: entry["shape"] for name, entry in self._entries.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        entry = self._entries[name]
        target = torch.empty(stop - start, dtype=_DTYPES[entry["dtype"]], device="cpu")
        if not target.numel():
            return target
        size = target.element_size()
        memory = tensor_span(target).view()
        offset = self._base + entry["data_offsets"][0] + start * size
        moved = 0
        while moved < len(memory):
            count = os.preadv(self._descriptor, [memory[moved:]], offset + moved)
            if count == 0:
                raise WeightFileError(f"{self._path} ends inside tensor {name}; copy it again")
            moved += count
        return target

    def close(self) -> None:
        os.close(self._descriptor)

    def _read_header(self, size: int) -> tuple[dict[str, Any], int]:
        head = os.pread(self._descriptor, 8, 0)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise WeightFileError(
                f"{self._path} ({size} bytes) is no safetensors file: its header would have"
                f" {length} bytes"
            )
        try:
            entries = json.loads(os.pread(self._descriptor, length, 8))
        except ValueError as error:
            raise WeightFileError(f"{self._path}: the header is not JSON ({error})") from error
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            self._check(name, entry, size - 8 - length)
        return entries, 8 + length

    def _check(self, name: str, entry: Mapping[str, Any], data_bytes: int) -> None:
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise WeightFileError(
                f"{self._path}: tensor {name} is {entry['dtype']}; known are {', '.join(_DTYPES)}"
            )
        first, end = entry["data_offsets"]
        wanted = torch.Size(entry["shape"]).numel() * dtype.itemsize
        if not 0 <= first <= end <= data_bytes or end - first != wanted:
            raise WeightFileError(
                f"{self._path}: tensor {name} of shape {entry['shape']} needs {wanted} bytes, but"
                f" has bytes {first} to {end} of {data_bytes}; the file is damaged or cut short"
            )


class _Dictionary(WeightReader):
    """Tensors in memory, or lazy ones of a sharded model."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {
            name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)
        }

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        with torch.no_grad():
            return self._tensors[name].detach().reshape(-1)[start:stop].clone()


class _Files(WeightReader):
    """Several files; one is open at a time, so names come file by file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._open: tuple[Path, WeightReader] | None = None
        self._shapes: dict[str, Sequence[int]] = {}
        self._path_of: dict[str, Path] = {}
        for path in paths:
            for name, shape in self._reader(path).shapes().items():
                self._shapes[name] = shape
                self._path_of[name] = path

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._reader(self._path_of[name]).read(name, start, stop)

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def _reader(self, path: Path) -> WeightReader:
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, _open_file(path)
        return self._open[1]


def open_weights(weights: Weights) -> WeightReader:
    """Open a state dictionary, a file, an index of files, or a folder with one of them.

    Raises:
        WeightFileError: if there is nothing that can be read.
    """
    if isinstance(weights, WeightReader):
        return weights
    if isinstance(weights, Mapping):
        return _Dictionary(weights)
    path = Path(weights)
    if (path / "manifest.json").is_file() or (path / "latest").is_file():
        from zero.checkpoint.convert import open_checkpoint

        return open_checkpoint(path)
    if path.is_dir():
        path = _in_folder(path)
    if path.name.endswith(".index.json"):
        return _Files(_indexed(path))
    return _open_file(path)


def _open_file(path: Path) -> WeightReader:
    if not path.is_file():
        raise WeightFileError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        return _Safetensors(path)
    loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(loaded, Mapping):
        raise WeightFileError(f"{path} holds a {type(loaded).__name__}, not a state dictionary")
    return _Dictionary(loaded)


def _in_folder(folder: Path) -> Path:
    names = (
        "model.safetensors.index.json",
        "model.safetensors",
        "pytorch_model.bin.index.json",
        "pytorch_model.bin",
    )
    for name in names:
        if (folder / name).is_file():
            return folder / name
    found = sorted([*folder.glob("*.index.json"), *folder.glob("*.safetensors")])
    if len(found) != 1:
        raise WeightFileError(
            f"{folder} has none of {', '.join(names)}, and {len(found)} other files of weights;"
            " name the file or index to load"
        )
    return found[0]


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names, each once, and check that all are there."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightFileError(f"{index} is no index of weights: {error!r}") from error
    paths = [index.parent / name for name in dict.fromkeys(names)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise WeightFileError(f"{index} names files that are not there: {', '.join(missing)}")
    return paths
