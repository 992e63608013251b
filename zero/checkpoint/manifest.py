"""What a checkpoint holds, as one JSON file: tensors by their logical names, pieces, checksums.

[Note: manifest] A tensor is saved in pieces, one a rank that has some of it, in up to a few
sections: its weight (the fp32 master if it is trained, else its own type), the states of its
optimizer by name, and its gradient if a window is half accumulated. A piece is a range of logical
elements and lies whole in one file. For every tensor and section the pieces tile all elements;
there is nothing in a manifest that depends on world size or tiers. States are in fp32, or, if that
was asked for, as they were stored: in bf16, or as 8-bit codes, whose bases are a section of their
own, one for each `CODE_BLOCK_NUMEL` logical elements. Every
`CHECKSUM_NUMEL` elements of a piece have a checksum; the manifest has one of itself.

All that is read here was written by somebody else: names lead out of no folder, sizes are compared
with what is there before anything is allocated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from estimators import CODE_BLOCK_NUMEL
from zero.errors import CheckpointError

FORMAT = "tierzero checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
CHECKSUM_NUMEL = 1 << 18
"""Elements under one checksum."""

BASE = ".base"
"""What the section of the bases of codes is called, after the section of the codes."""

WEIGHT = "weight"
GRADIENT = "gradient"
STATE = "run"
CLIENT = "client"
SMALL_SECTIONS = (STATE, CLIENT)
"""Sections of a rank's own small tensors: they belong to no parameter."""

_MAX_MANIFEST_BYTES = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}\.safetensors")

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """The type that it was trained in, as safetensors calls it."""
    trained: bool
    steps: int | None = None
    """Updates that its optimizer state has had; None if it has none."""
    aliases: tuple[str, ...] = ()
    """Its other names in the model: it is tied."""
    unit: str = ""

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A range of one section of one tensor, in one file."""

    name: str
    section: str
    dtype: str
    first: int
    shape: tuple[int, ...]
    """The tensor's own shape if the piece is all of it, else flat."""
    offset: int
    """Where it begins in its file, in bytes."""
    key: str
    """Its name in the file."""
    checksums: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return torch.Size(self.shape).numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of the piece."""
        return self.numel * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of one rank."""

    name: str
    size_bytes: int
    pieces: tuple[PieceEntry, ...]


@dataclass(frozen=True, slots=True)
class RankEntry:
    """What one rank saved."""

    file: FileEntry
    run: Mapping[str, Any]
    """Its run state as plain data; tensors are in the file."""
    client: Any
    """Its client state, likewise."""
    frozen: FileEntry | None = None
    """Its shards of frozen parameters, if they are in a file of their own."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All of its files."""
        return (self.file,) if self.frozen is None else (self.file, self.frozen)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint."""

    tensors: tuple[TensorEntry, ...]
    ranks: tuple[RankEntry, ...]
    configuration: Any = None
    tag: str = ""
    states: tuple[str, ...] = ()
    """Names of the optimizer states."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return len(self.ranks)

    @property
    def global_steps(self) -> int:
        """Steps that the run had made."""
        return int(self.ranks[0].run["counters"]["global_steps"])

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for rank in self.ranks for file in rank.files)

    def pieces(self) -> Iterator[tuple[FileEntry, PieceEntry]]:
        """Yield all pieces, with their files."""
        for rank in self.ranks:
            for file in rank.files:
                for piece in file.pieces:
                    yield file, piece


def rank_data(rank: RankEntry) -> dict[str, Any]:
    """Return what one rank saved as JSON data."""
    found = {"file": asdict(rank.file), "run": rank.run, "client": rank.client}
    return found if rank.frozen is None else {**found, "frozen": asdict(rank.frozen)}


def manifest_text(manifest: Manifest) -> str:
    """Return the JSON text of a manifest, with its checksum."""
    body = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "tag": manifest.tag,
        "world_size": manifest.world_size,
        "states": list(manifest.states),
        "checksum_numel": CHECKSUM_NUMEL,
        "configuration": manifest.configuration,
        "tensors": [asdict(each) for each in manifest.tensors],
        "ranks": [rank_data(each) for each in manifest.ranks],
        **manifest.extra,
    }
    lines = [f"{json.dumps(key)}: {_entry_lines(value)}" for key, value in body.items()]
    return "{\n" + ",\n".join([f'"checksum": "{_digest(body)}"', *lines]) + "\n}\n"


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, and check it in itself and against the files that are there.

    Raises:
        CheckpointError: saying what is missing, damaged or forbidden; no data were read.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = _parse(path)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} cannot be used: {type(error).__name__}: {error}; take another checkpoint"
        ) from error
    _check_files(folder, manifest)
    _check_tiles(path, manifest)
    return manifest


def _parse(path: Path) -> Manifest:
    if not path.is_file() or path.is_symlink():
        raise CheckpointError(
            f"{path.parent} is no checkpoint: it has no {MANIFEST_NAME}" + _foreign(path.parent)
        )
    size = path.stat().st_size
    if size > _MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, more than any manifest")
    body = json.loads(path.read_bytes())
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of a tierzero checkpoint")
    if body.get("version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has version {body.get('version')!r}, and this version of tierzero reads"
            f" {FORMAT_VERSION}; load it with the version that wrote it"
        )
    checksum = body.pop("checksum", None)
    if checksum != _digest(body):
        raise CheckpointError(
            f"{path} has the checksum {checksum} and should have {_digest(body)}: it was damaged"
            " or changed; take another checkpoint"
        )
    if body["checksum_numel"] != CHECKSUM_NUMEL:
        raise CheckpointError(f"{path} has checksums of {body['checksum_numel']} elements each")
    tensors = tuple(_tensor(each) for each in body["tensors"])
    ranks = tuple(_rank(each) for each in body["ranks"])
    if not ranks or len(ranks) != body["world_size"]:
        raise CheckpointError(f"{path} has {len(ranks)} ranks and says {body['world_size']!r}")
    return Manifest(
        tensors,
        ranks,
        body["configuration"],
        str(body["tag"]),
        tuple(_text(each) for each in body["states"]),
    )


def parse_rank(data: Any) -> RankEntry:
    """Return what a rank wrote with `rank_data`."""
    return _rank(data)


def _tensor(data: Mapping[str, Any]) -> TensorEntry:
    steps = data["steps"]
    return TensorEntry(
        _text(data["name"]),
        _shape(data["shape"]),
        _dtype(data["dtype"]),
        bool(data["trained"]),
        None if steps is None else _count(steps),
        tuple(_text(each) for each in data["aliases"]),
        _text(data["unit"]),
    )


def _rank(data: Mapping[str, Any]) -> RankEntry:
    file = _file(data["file"])
    if not isinstance(data["run"], dict):
        raise CheckpointError(f"{file.name} comes without a run state")
    frozen = _file(data["frozen"]) if "frozen" in data else None
    return RankEntry(file, data["run"], data["client"], frozen)


def _file(data: Mapping[str, Any]) -> FileEntry:
    name = _text(data["name"])
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"a manifest names the file {name!r}; files of a checkpoint are plain names in its own"
            " folder: this one is forged"
        )
    entry = FileEntry(
        name, _count(data["size_bytes"]), tuple(_piece(each) for each in data["pieces"])
    )
    end = 0
    for piece in sorted(entry.pieces, key=lambda each: (each.offset, each.size_bytes)):
        if piece.offset < end or piece.offset + piece.size_bytes > entry.size_bytes:
            raise CheckpointError(
                f"{name}: {piece.key} has bytes {piece.offset} to"
                f" {piece.offset + piece.size_bytes} of {entry.size_bytes}, which overlaps another"
                " piece or lies outside"
            )
        end = piece.offset + piece.size_bytes
    return entry


def _piece(data: Mapping[str, Any]) -> PieceEntry:
    piece = PieceEntry(
        _text(data["name"]),
        _text(data["section"]),
        _dtype(data["dtype"]),
        _count(data["first"]),
        _shape(data["shape"]),
        _count(data["offset"]),
        _text(data["key"]),
        tuple(_text(each) for each in data["checksums"]),
    )
    if len(piece.checksums) != -(-piece.numel // CHECKSUM_NUMEL):
        raise CheckpointError(f"{piece.key} has {len(piece.checksums)} checksums")
    return piece


def _check_files(folder: Path, manifest: Manifest) -> None:
    files = [file for rank in manifest.ranks for file in rank.files]
    if len({file.name for file in files}) != len(files):
        raise CheckpointError(f"{folder}: two ranks name the same file")
    for file in files:
        path = folder / file.name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"{folder} lacks {file.name}; copy the whole folder, or take another checkpoint"
            )
        size = path.stat().st_size
        if size != file.size_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes, and {file.size_bytes} were written; it was cut"
                " short or changed: copy it again, or take another checkpoint"
            )


def _check_tiles(path: Path, manifest: Manifest) -> None:
    """Refuse a manifest unless the pieces of each tensor and section cover it exactly once."""
    known = {tensor.name: tensor for tensor in manifest.tensors}
    if len(known) != len(manifest.tensors):
        raise CheckpointError(f"{path} names a tensor twice")
    found: dict[tuple[str, str], list[PieceEntry]] = {}
    for _, piece in manifest.pieces():
        if piece.section in SMALL_SECTIONS:
            continue
        if piece.name not in known:
            raise CheckpointError(f"{path}: {piece.key} belongs to no tensor")
        found.setdefault((piece.name, piece.section), []).append(piece)
    for name, section in found:
        _check_section(path, known[name], section, found)
        if section in manifest.states:
            _check_state(path, name, section, found)
    for name, tensor in known.items():
        if tensor.numel and (name, WEIGHT) not in found:
            raise CheckpointError(f"{path}: tensor {name} has no values")


Sections = Mapping[tuple[str, str], Sequence[PieceEntry]]


def _check_section(path: Path, tensor: TensorEntry, section: str, found: Sections) -> None:
    numel = tensor.numel
    if section.endswith(BASE):
        numel = -(-numel // CODE_BLOCK_NUMEL)
    if not _is_tiled(found[tensor.name, section], numel):
        raise CheckpointError(
            f"{path}: the pieces of {section} of {tensor.name} do not make up its {numel}"
            " elements; take another checkpoint"
        )


def _check_state(path: Path, name: str, section: str, found: Sections) -> None:
    """Refuse types that no state is stored in, and codes that nothing says how to decode."""
    dtype = found[name, section][0].dtype
    if dtype not in ("F32", "BF16", "U8"):
        raise CheckpointError(
            f"{path}: {section} of {name} has the type {dtype}, which no state has"
        )
    bases = found.get((name, section + BASE), ())
    if (dtype == "U8") != bool(bases) or (bases and bases[0].dtype != "U16"):
        raise CheckpointError(
            f"{path}: {section} of {name} has codes without bases, or the reverse"
        )


def _is_tiled(pieces: Sequence[PieceEntry], numel: int) -> bool:
    """Tell whether pieces make up all elements, each once, in one type."""
    end = 0
    for piece in sorted(pieces, key=lambda each: each.first):
        if piece.first != end:
            return False
        end += piece.numel
    return end == numel and len({piece.dtype for piece in pieces}) == 1


def _entry_lines(value: Any) -> str:
    """Return JSON text with a line for each entry of a list, for people and for `diff`."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(each) for each in value) + "\n]"
    return json.dumps(value)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _foreign(folder: Path) -> str:
    """Say what else a folder may be, for the message."""
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        return "; it looks like a checkpoint of DeepSpeed"
    if ".metadata" in names:
        return "; torch.distributed.checkpoint wrote it: load it with zero.checkpoint.load_dcp"
    if not folder.exists():
        return "; there is no such folder"
    return ""


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 10_000:
        raise CheckpointError(f"a manifest has {str(value)[:40]!r} where a text is needed")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(f"a manifest has {str(value)[:40]!r} where a count is needed")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 64:
        raise CheckpointError(f"a manifest has {str(value)[:40]!r} where a shape is needed")
    shape = tuple(_count(each) for each in value)
    numel = 1
    for each in shape:
        numel *= each
    if numel >= 1 << 60:
        raise CheckpointError(f"a manifest has a tensor of {numel} elements, which cannot be")
    return shape


def _dtype(value: Any) -> str:
    if value not in DTYPES:
        raise CheckpointError(f"a manifest has the type {value!r}; known are {', '.join(DTYPES)}")
    return str(value)


def names_of(tensors: Sequence[TensorEntry]) -> dict[str, TensorEntry]:
    """Return tensors by every name that they have."""
    return {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}
