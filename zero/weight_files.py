"""Weights at rest in files or dictionaries, read one range of one tensor at a time.

A rank reads its piece alone: of a safetensors file the rows that hold it, of others what they give.
"""

from __future__ import annotations

import abc
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

Weights = str | os.PathLike[str] | Mapping[str, torch.Tensor]


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


def _open_safetensors(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


class _Safetensors(WeightReader):
    """One file, mapped; only the rows that hold a range are copied."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            raise WeightFileError(f"{path} is not there")
        try:
            self._file = _open_safetensors(path)
            self._slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
            self._shapes = {name: each.get_shape() for name, each in self._slices.items()}
        except (SafetensorError, OSError) as error:
            raise WeightFileError(
                f"{path} is no safetensors file, or is damaged or cut short: {error}"
            ) from error

    def shapes(self) -> Mapping[str, Sequence[int]]:
        return self._shapes

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = self._shapes[name]
        try:
            if not shape:
                return self._whole(name)[start:stop]
            row_numel = math.prod(shape[1:])
            if start == stop or not row_numel:
                return self._whole(name)[:0]
            first, last = start // row_numel, -(-stop // row_numel)
            rows: torch.Tensor = self._slices[name][first:last].reshape(-1)
        except SafetensorError as error:
            raise WeightFileError(f"{self._path}: tensor {name}: {error}") from error
        return rows[start - first * row_numel : stop - first * row_numel]

    def _whole(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor.reshape(-1)

    def close(self) -> None:
        self._slices.clear()
        del self._file


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
    if isinstance(weights, Mapping):
        return _Dictionary(weights)
    path = Path(weights)
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
