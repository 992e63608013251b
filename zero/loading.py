"""Load weights straight into shards, a piece of one tensor at a time, and say what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from offload import Field
from zero.parameter import reference_of
from zero.source import ShardSource, share_pieces
from zero.weight_files import WeightReader, Weights, open_weights
from zero.wording import some

PIECE_NUMEL = 4 << 20
"""Elements that are in memory at a time."""

Rename = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did: every parameter and buffer of the model is loaded or missing."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    """Names in the weights that the model does not have."""
    loaded_numel: int

    def __str__(self) -> str:
        text = f"loaded {len(self.loaded)} tensors with {self.loaded_numel:,} elements"
        for what, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                text += f"; {what}: {', '.join(names)}"
        return text


@dataclass(frozen=True, slots=True)
class _Target:
    """A parameter or buffer with all its names; tied ones have several."""

    tensor: torch.Tensor
    names: tuple[str, ...]


def load_weights(
    model: nn.Module, weights: Weights, *, strict: bool = True, rename: Rename | None = None
) -> LoadReport:
    """Load weights into a sharded (or plain) model; each rank reads its own pieces.

    fp32 values keep their low bits in the masters of 16-bit parameters. Nothing is written before
    all names and shapes are known to fit.

    Args:
        model: the model, before or after `zero.initialize`; an engine works as well.
        weights: a state dictionary; a safetensors or torch file; an index of several; or a folder
            with one of them.
        strict: refuse missing and unexpected names.
        rename: gives the model's name for a name in the weights, or None to leave it out.

    Raises:
        RuntimeError: listing names that are missing or unexpected, and shapes that differ.
        WeightFileError: if a file cannot be read.
    """
    reader = open_weights(weights)
    try:
        targets = _targets(model)
        sources = _name_sources(reader, rename)
        report, found = _compare(targets, reader, sources, strict=strict)
        _join(targets, report)
        for target, names in found:
            _load(target, names, reader)
        return report
    finally:
        reader.close()


def _targets(model: nn.Module) -> list[_Target]:
    """Return parameters and persistent buffers, each once, in the order of `state_dict()`."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    kept = model.state_dict(keep_vars=True)
    for name, tensor in kept.items():
        if isinstance(tensor, torch.Tensor):
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    on_meta = [own[0] for key, own in names.items() if tensors[key].is_meta]
    if on_meta:
        raise RuntimeError(
            f"{on_meta[0]} is on meta and has no memory to load into; shard the model first:"
            " zero.Init(module=model, init_fn=...), or zero.initialize"
        )
    return [_Target(tensors[key], tuple(own)) for key, own in names.items()]


def _name_sources(reader: WeightReader, rename: Rename | None) -> dict[str, str]:
    """Return the name in the weights for each name that they give to the model."""
    sources: dict[str, str] = {}
    for name in reader.shapes():
        wanted = name if rename is None else rename(name)
        if wanted is None:
            continue
        if wanted in sources:
            raise RuntimeError(f"{sources[wanted]} and {name} are both renamed to {wanted}")
        sources[wanted] = name
    return sources


def _compare(
    targets: list[_Target], reader: WeightReader, sources: dict[str, str], *, strict: bool
) -> tuple[LoadReport, list[tuple[_Target, list[str]]]]:
    shapes = reader.shapes()
    found, loaded, missing, problems = [], [], [], []
    known: set[str] = set()
    for target in targets:
        known.update(target.names)
        names = [sources[name] for name in target.names if name in sources]
        if not names:
            missing.append(target.names[0])
            continue
        for name in names:
            if tuple(shapes[name]) != tuple(target.tensor.shape):
                problems.append(
                    f"{target.names[0]} has shape {tuple(target.tensor.shape)}, the weights"
                    f" {tuple(shapes[name])}"
                )
        found.append((target, names))
        loaded.append(target.names[0])
    unexpected = [name for name in sources if name not in known]
    numel = sum(target.tensor.numel() for target, _ in found)
    report = LoadReport(tuple(loaded), tuple(missing), tuple(unexpected), numel)
    advice = ["zero.resize_parameter for other shapes"] if problems else []
    problems = [some(list(dict.fromkeys(problems)), "; ")] if problems else []
    if strict and (missing or unexpected):
        problems += [f"missing in the weights: {some(missing)}"] if missing else []
        problems += [f"not in the model: {some(unexpected)}"] if unexpected else []
        advice += ["rename= for other names", "strict=False to load what is there"]
    if problems:
        raise RuntimeError(
            "the weights do not fit the model, and nothing was loaded: "
            + "; ".join(problems)
            + f". Use {', '.join(advice)}"
        )
    return report, found


def _join(targets: list[_Target], report: LoadReport) -> None:
    for target in targets:
        reference = reference_of(target.tensor)
        if reference is not None:
            reference.source.communicator.join(f"loading weights: {report}")
            return


def _load(target: _Target, names: list[str], reader: WeightReader) -> None:
    reference = reference_of(target.tensor)
    numel = target.tensor.numel()
    own = [(0, numel)] if numel else []
    if reference is not None:
        source = reference.source
        own = [
            (first, count)
            for rank, first, count in source.pieces()
            if rank == source.communicator.rank
        ]
    for other in names[1:]:
        if not _same(reader, names[0], other, own):
            raise RuntimeError(
                f"{' and '.join(target.names)} are one parameter of the model, but {names[0]} and"
                f" {other} differ in the weights; untie them before, or leave one out with rename="
            )
    if reference is None or reference.source.live() is not None:
        values = reader.read(names[0], 0, numel).view(target.tensor.shape)
        with torch.no_grad():
            target.tensor.copy_(values)
        return
    _load_pieces(reference.source, names[0], own, reader)


def _load_pieces(
    source: ShardSource, name: str, own: list[tuple[int, int]], reader: WeightReader
) -> None:
    """Write this rank's pieces; the master where there is one, so that low bits are kept."""
    field = Field.MASTER if source.has(Field.MASTER) else Field.PARAMETER
    for first, count in own:
        for start, stop in _cut(count):
            values = reader.read(name, first + start, first + stop)
            source.write_own(field, values.to(source.dtype(field)), start)
    source.after_write(field)
    share_pieces(source)


def _same(reader: WeightReader, first: str, second: str, own: list[tuple[int, int]]) -> bool:
    for offset, count in own:
        for start, stop in _cut(count):
            one, other = (
                reader.read(name, offset + start, offset + stop) for name in (first, second)
            )
            if not torch.equal(one, other):
                return False
    return True


def _cut(numel: int) -> Iterator[tuple[int, int]]:
    for start in range(0, numel, PIECE_NUMEL):
        yield start, min(start + PIECE_NUMEL, numel)
