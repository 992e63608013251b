"""The files of torch.distributed.checkpoint (DCP): ranges of tensors by name, out of any chunks.

[Note: DCP pickles] A DCP folder has a pickle of its own, `.metadata`, and a pickle can run
anything. It is read by an unpickler that knows the names in `_SAFE` and refuses every other one by
its name; for the classes among them records of ours stand in, which keep what they are given and do
nothing. Chunks and plain values are what `torch.save` wrote; they are read by torch's restricted
reader (`weights_only=True`), after their sizes were compared with what is there.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from zero.checkpoint.dcp_boxes import Box, boxes_of_range
from zero.errors import CheckpointError

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_MAX_VALUE_BYTES = 1 << 26
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_CACHED_CHUNKS = 4
_MOST_COMPARED = 2048
"""Chunks of one tensor up to which each is compared with each other."""


class _Record:
    """Stands in for a class of torch: keeps what it is given."""

    def __init__(self, *values: Any) -> None:
        self.values = values
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, position: int = -1) -> Any:
        """Return an attribute, by name or, where the class is pickled as a tuple, by position."""
        if isinstance(self.state, Mapping):
            return self.state.get(name)
        if isinstance(self.state, tuple) and 0 <= position < len(self.state):
            return self.state[position]
        return None


class _TensorMetadata(_Record):
    pass


class _BytesMetadata(_Record):
    pass


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _member(kind: Any, name: Any) -> _Record:
    """Stand in for `getattr`, by which Python 3.11.0 to 3.11.3 pickle members of enumerations."""
    if kind is not _Record or not isinstance(name, str):
        raise pickle.UnpicklingError("it names builtins.getattr")
    return _Record(name)


def _path(*parts: Any) -> str:
    return str(PurePosixPath(*(str(each) for each in parts)))


_OF_METADATA: dict[str, Any] = {
    **dict.fromkeys(
        (
            "Metadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        _Record,
    ),
    "TensorStorageMetadata": _TensorMetadata,
    "BytesStorageMetadata": _BytesMetadata,
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_SAFE: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): it for name, it in _OF_METADATA.items()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _size,
    ("builtins", "getattr"): _member,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""All that a `.metadata` may name [Note: DCP pickles]."""


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _SAFE.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where bytes lie."""

    file: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where it lies."""

    box: Box
    place: Place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a DCP checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class DcpFiles:
    """A DCP checkpoint, open for reading."""

    def __init__(self, folder: Path) -> None:
        """Read what it holds, and check it in itself and against the files; no data are read.

        Raises:
            CheckpointError: saying what is missing, damaged or forbidden.
        """
        self.folder = folder
        self.path = folder / METADATA_NAME
        root = self._read_metadata()
        try:
            self.tensors, self.values = self._parse(root)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path} cannot be used: {error!r}") from error
        self._cache: OrderedDict[Place, torch.Tensor] = OrderedDict()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a tensor, flat, in its own type.

        Raises:
            CheckpointError: if a file is damaged.
        """
        tensor = self.tensors[name]
        found = torch.empty(stop - start, dtype=tensor.dtype, device="cpu")
        for first, box in boxes_of_range(tensor.shape, start, stop):
            values = found[first - start : first - start + box.numel].view(box.sizes)
            for chunk in tensor.chunks:
                shared = box.common(chunk.box)
                if shared is not None:
                    source = self._chunk(tensor, chunk)
                    box.of(values, shared).copy_(chunk.box.of(source, shared))
        return found

    def value(self, name: str) -> Any:
        """Return a value that is no tensor: numbers, text and containers.

        Raises:
            CheckpointError: if it is anything else.
        """
        if name in self.tensors:
            shape = self.tensors[name].shape
            return self.read(name, 0, math.prod(shape)).view(shape)
        place = self.values[name]
        if place.size_bytes > _MAX_VALUE_BYTES:
            raise CheckpointError(f"{self.path}: {name} has {place.size_bytes} bytes")
        return self._load(place, name)

    def _chunk(self, tensor: StoredTensor, chunk: Chunk) -> torch.Tensor:
        kept = self._cache.pop(chunk.place, None)
        if kept is None:
            kept = self._load(chunk.place, tensor.name)
            shape = chunk.box.sizes
            if not isinstance(kept, torch.Tensor) or tuple(kept.shape) != shape:
                what = tuple(kept.shape) if isinstance(kept, torch.Tensor) else type(kept).__name__
                raise CheckpointError(
                    f"{self.folder / chunk.place.file}: {tensor.name} from {chunk.box.offsets} on"
                    f" is {what}, and {self.path.name} says {shape}: one of them was changed"
                )
            if kept.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{self.folder / chunk.place.file}: {tensor.name} is {kept.dtype}, and"
                    f" {self.path.name} says {tensor.dtype}: one of them was changed"
                )
        self._cache[chunk.place] = kept
        while len(self._cache) > _CACHED_CHUNKS:
            self._cache.popitem(last=False)
        return kept

    def _load(self, place: Place, name: str) -> Any:
        path = self.folder / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.size_bytes)
            if len(data) != place.size_bytes:
                raise CheckpointError(f"{path} ends within {name}; it was cut short")
            _refuse_bombs(path, name, data)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            unsafe = re.search(r"GLOBAL (\S+)", str(error))
            what = f"names {unsafe[1]}" if unsafe else "is not what torch.save wrote"
            raise CheckpointError(
                f"{path}: {name} {what}: nothing of it was used; only tensors, numbers, text and"
                " containers are read"
            ) from error
        except (RuntimeError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error

    def _read_metadata(self) -> _Record:
        if not self.path.is_file() or self.path.is_symlink():
            raise CheckpointError(
                f"{self.folder} has no {METADATA_NAME}: it is no checkpoint of"
                " torch.distributed.checkpoint, or was never finished"
            )
        size = self.path.stat().st_size
        if size > _MAX_METADATA_BYTES:
            raise CheckpointError(f"{self.path} has {size} bytes, more than any metadata")
        try:
            root = _Restricted(io.BytesIO(self.path.read_bytes())).load()
        except Exception as error:
            raise CheckpointError(
                f"{self.path} is not what torch.distributed.checkpoint writes: {error}; nothing of"
                " it was used"
            ) from error
        if not isinstance(root, _Record):
            raise CheckpointError(f"{self.path} holds {type(root).__name__}, not metadata")
        return root

    def _parse(self, root: _Record) -> tuple[dict[str, StoredTensor], dict[str, Place]]:
        sizes: dict[str, int] = {}
        places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for index, info in _mapping(root.get("storage_data")).items():
            place = self._place(info, sizes)
            offset = index.get("offset")
            places[str(index.get("fqn")), None if offset is None else _counts(offset)] = place
        tensors, values = {}, {}
        for name, entry in _mapping(root.get("state_dict_metadata")).items():
            if isinstance(entry, _BytesMetadata):
                values[str(name)] = places[name, None]
            elif isinstance(entry, _TensorMetadata):
                tensors[str(name)] = self._tensor(name, entry, places)
            else:
                raise CheckpointError(f"{self.path}: {name} is of an unknown kind")
        return tensors, values

    def _place(self, info: Any, sizes: dict[str, int]) -> Place:
        file = info.get("relative_path")
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointError(
                f"{self.path} names the file {file!r}; files of a checkpoint are plain names in"
                " its own folder: this one is forged"
            )
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{self.path}: {file} was written through an extension"
                f" ({info.get('transform_descriptors')}); save it without one"
            )
        path = self.folder / file
        if file not in sizes:
            if path.is_symlink() or not path.is_file():
                raise CheckpointError(f"{self.folder} lacks {file}; copy the whole folder")
            sizes[file] = path.stat().st_size
        offset, length = _counts((info.get("offset"), info.get("length")))
        if offset + length > sizes[file]:
            raise CheckpointError(
                f"{path} has {sizes[file]} bytes, and {self.path.name} names those up to"
                f" {offset + length}; it was cut short: copy it again"
            )
        return Place(file, offset, length)

    def _tensor(
        self,
        name: str,
        entry: _Record,
        places: Mapping[tuple[str, tuple[int, ...] | None], Place],
    ) -> StoredTensor:
        shape = _counts(entry.get("size"))
        dtype = entry.get("properties").get("dtype", 0)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.path}: {name} has no type")
        chunks = []
        for each in entry.get("chunks"):
            box = Box(_counts(each.get("offsets")), _counts(each.get("sizes")))
            place = places.get((name, box.offsets)) or places.get((name, None))
            if place is None:
                raise CheckpointError(f"{self.path}: {name} from {box.offsets} on lies nowhere")
            chunks.append(Chunk(box, place))
        _check_tiles(f"{self.path}: {name}", shape, [chunk.box for chunk in chunks])
        return StoredTensor(name, shape, dtype, tuple(chunks))


def _check_tiles(what: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Refuse chunks unless they cover all elements of a tensor, each once."""
    for box in boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            start + size <= whole
            for start, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{what}: a chunk {box} lies outside of {shape}")
    covered = sum(box.numel for box in boxes)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{what}: its chunks hold {covered} of {math.prod(shape)} elements: a rank's part is"
            " missing or there twice"
        )
    if len(boxes) <= _MOST_COMPARED:
        for position, box in enumerate(boxes):
            if any(box.common(other) is not None for other in boxes[:position] if other.numel):
                raise CheckpointError(f"{what}: two of its chunks overlap")


def _refuse_bombs(path: Path, name: str, data: bytes) -> None:
    """Refuse what would take more memory than its bytes: torch.save compresses nothing."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > len(data):
        raise CheckpointError(
            f"{path}: {name} has {len(data)} bytes and would take {total}: it is forged"
        )


def _mapping(found: Any) -> Mapping[Any, Any]:
    if not isinstance(found, Mapping):
        raise TypeError(f"{type(found).__name__} where a dictionary is needed")
    return found


def _counts(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) > 64 or any(type(each) is not int or not 0 <= each < 1 << 62 for each in found):
        raise ValueError(f"{str(found)[:60]} where counts are needed")
    if math.prod(found) >= 1 << 62:
        raise ValueError(f"{str(found)[:60]} is a shape that cannot be")
    return found


def names_ending(names: Iterator[str], ending: str) -> Iterator[str]:
    """Yield what comes before `ending` in names that end with it, at a dot or at the start."""
    for name in names:
        if name.endswith(ending):
            prefix = name[: len(name) - len(ending)]
            if not prefix or prefix.endswith("."):
                yield prefix
