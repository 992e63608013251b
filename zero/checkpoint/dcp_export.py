"""Write a checkpoint as a folder of torch.distributed.checkpoint (DCP), streaming, on all ranks.

[Note: DCP export] torch plans, and writes the metadata; what is given to it is chunks of at most
`CHUNK_BYTES` and a function that reads one of them when its turn comes, so memory is a few chunks
whatever the model has. (torch's own writer would hold all that it has written.) Each rank writes an
equal part of the bytes. The nested dictionary is the one that torch's examples save: `model` with
the fp32 masters under all of their names, `optim` as `get_state_dict` gives it, and `tierzero` with
the counters as JSON text.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zero.checkpoint.convert import CheckpointWeights
from zero.checkpoint.dcp_boxes import boxes_of_range
from zero.checkpoint.dcp_names import MODEL, OPTIMIZER, RUN, RUN_VALUE, torch_names
from zero.checkpoint.manifest import DTYPES, WEIGHT, RankEntry, TensorEntry
from zero.errors import CheckpointError
from zero.plain import PlainDataError, from_plain, to_plain

CHUNK_BYTES = 32 << 20
_READS_AHEAD = 3
_STATE, _STEP, _GROUPS = "state", "step", "param_groups"


class CheckpointSections(CheckpointWeights):
    """All sections of a checkpoint, read by ranges."""

    def has_section(self, tensor: TensorEntry, section: str) -> bool:
        """Tell whether a section of a tensor was saved; one without elements has no pieces."""
        if not tensor.numel:
            return section == WEIGHT or tensor.steps is not None
        return self._index.has(tensor.name, section)

    def section_dtype(self, tensor: TensorEntry, section: str) -> torch.dtype:
        """Return the type of a section."""
        if not tensor.numel:
            return torch.float32 if tensor.trained else DTYPES[tensor.dtype]
        block = next(self._index.blocks(tensor.name, section, 0, 1))[0]
        return DTYPES[block[0].dtype]

    def read_section(
        self, tensor: TensorEntry, section: str, start: int, stop: int
    ) -> torch.Tensor:
        """Return elements `[start, stop)` of a section, flat, in memory of their own."""
        dtype = self.section_dtype(tensor, section)
        found = torch.empty(stop - start, dtype=dtype, device="cpu")
        filled = 0
        ranges = list(self._index.blocks(tensor.name, section, start, stop))
        stream = self._files.read(self._engine, (block for block, _, _ in ranges), _READS_AHEAD)
        for (_, first, count), (_, span) in zip(ranges, stream, strict=True):
            values = torch.frombuffer(span.view(), dtype=dtype)
            found[filled : filled + count] = values[first : first + count]
            filled += count
        if filled != stop - start:
            raise CheckpointError(f"{self.folder} has {filled} elements of {section} of {tensor}")
        return found


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a section that become a chunk of a DCP tensor."""

    path: tuple[str, ...]
    tensor: TensorEntry
    section: str
    dtype: torch.dtype
    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the DCP tensor."""
        return ".".join(self.path)

    @property
    def index(self) -> MetadataIndex:
        """What DCP finds the chunk by."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def numel(self) -> int:
        """Elements of the chunk."""
        return math.prod(self.sizes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk."""
        return self.numel * self.dtype.itemsize

    def write_item(self) -> WriteItem:
        """Return what torch's writer goes by."""
        return WriteItem(
            self.index,
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes)),
                TensorProperties(dtype=self.dtype),
                torch.Size(self.tensor.shape),
            ),
        )


def parts_of(source: CheckpointSections) -> Iterator[Part]:
    """Yield all chunks of all tensors, in the order of the checkpoint."""
    manifest = source.manifest
    names = torch_names(_optimizer(manifest.ranks[0]).get("type", ""))
    for tensor in source.tensors:
        for name in (tensor.name, *tensor.aliases):
            yield from _chunks(source, tensor, WEIGHT, (MODEL, name))
        for state in manifest.states:
            if source.has_section(tensor, state):
                path = (OPTIMIZER, _STATE, tensor.name, names.get(state, state))
                yield from _chunks(source, tensor, state, path)


def _chunks(
    source: CheckpointSections, tensor: TensorEntry, section: str, path: tuple[str, ...]
) -> Iterator[Part]:
    shape, dtype = tensor.shape, source.section_dtype(tensor, section)
    if not tensor.numel:
        yield Part(path, tensor, section, dtype, 0, (0,) * len(shape), shape)
        return
    step = max(CHUNK_BYTES // dtype.itemsize, 1)
    row = math.prod(shape[1:])
    if row <= step:
        step -= step % row  # whole rows
    for start in range(0, tensor.numel, step):
        for first, box in boxes_of_range(shape, start, min(start + step, tensor.numel)):
            yield Part(path, tensor, section, dtype, first, box.offsets, box.sizes)


def small_values(source: CheckpointSections) -> dict[str, Any]:
    """Return what is beside large tensors, as the nested dictionary that DCP flattens."""
    rank = source.manifest.ranks[0]
    optimizer = _optimizer(rank)
    found: dict[str, Any] = {RUN: {RUN_VALUE: _run_text(source)}}
    if source.others:
        found[MODEL] = dict(source.others)
    if optimizer:
        groups = []
        usual = torch_options(str(optimizer.get("type", "")))
        for group in optimizer["groups"]:
            options = from_plain(group["options"], {})
            groups.append({**usual, **options, "params": list(group["names"])})
        steps = {
            tensor.name: {
                _STEP: torch.tensor(float(tensor.steps), dtype=torch.float32, device="cpu")
            }
            for tensor in source.tensors
            if tensor.steps is not None
        }
        found[OPTIMIZER] = {_STATE: steps, _GROUPS: groups}
    return found


def torch_options(name: str) -> dict[str, Any]:
    """Return the options that torch's optimizer of a name has, which DCP asks for one by one."""
    made: Any = getattr(torch.optim, name, None)
    if not isinstance(made, type) or not issubclass(made, torch.optim.Optimizer):
        return {}
    arguments: Any = ([torch.zeros(1, dtype=torch.float32, device="cpu")],)
    try:
        group = made(*arguments).param_groups[0]
    except (TypeError, ValueError):
        return {}
    return {key: value for key, value in group.items() if key != "params"}


def _optimizer(rank: RankEntry) -> Mapping[str, Any]:
    found = rank.run.get("optimizer")
    return found if isinstance(found, Mapping) else {}


def _run_text(source: CheckpointSections) -> str:
    """Return counters, schedule and loss scale as JSON text; a schedule with tensors is left."""
    run = source.manifest.ranks[0].run
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, Any] = {"counters": run["counters"]}
    try:
        scheduler = from_plain(run["scheduler"], {})
        scaler = from_plain(run["loss_scaler"], {})
        if scheduler is not None:
            found["scheduler"] = to_plain(scheduler["state"], "scheduler", tensors)
        found["loss_scaler"] = to_plain(scaler["state"], "loss_scaler", tensors)
        found["dynamic_loss_scale"] = "cur_iter" in scaler["state"]
    except (PlainDataError, KeyError, TypeError) as error:
        warnings.warn(
            f"the schedule holds tensors and is left out of the export: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
    return json.dumps(found)


class _Planner(DefaultSavePlanner):
    """Adds this rank's chunks to what torch plans for small values."""

    def __init__(self, source: CheckpointSections, parts: list[Part]) -> None:
        super().__init__()
        self._source = source
        self._parts = {(part.name, part.offsets): part for part in parts}

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        plan = super().create_local_plan()
        items = [part.write_item() for part in self._parts.values()]
        paths = {part.name: part.path for part in self._parts.values()}
        data = {**(plan.planner_data or {}), **paths}
        self.plan = replace(plan, items=[*plan.items, *items], planner_data=data)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the values of one item; this is when they are read."""
        offset = write_item.index.offset
        key = write_item.index.fqn, tuple(offset) if offset is not None else ()
        part = self._parts.get(key)
        if part is None or write_item.type is not WriteItemType.SHARD:
            return super().resolve_data(write_item)
        stop = part.start + part.numel
        values = self._source.read_section(part.tensor, part.section, part.start, stop)
        return values.view(part.sizes)


class _StreamingWriter(FileSystemWriter):
    """Writes a rank's items one after the other into one file; torch's own keeps all of them."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a rank was told to."""
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        with (Path(self.path) / name).open("wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, torch.Tensor):
                    torch.save(data, stream)
                else:
                    stream.write(data.getbuffer())
                size = stream.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
            stream.flush()
            os.fsync(stream.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def share(parts: list[Part], rank: int, world_size: int) -> list[Part]:
    """Return one rank's part of the chunks: the same number of bytes for each, in order."""
    total = sum(part.size_bytes for part in parts)
    found, done = [], 0
    for part in parts:
        owner = min(done * world_size // max(total, 1), world_size - 1)
        if owner == rank:
            found.append(part)
        done += part.size_bytes
    return found


def write_dcp(source: CheckpointSections, folder: Path, rank: int = 0, world_size: int = 1) -> None:
    """Write a checkpoint into an empty folder; a collective of all ranks."""
    parts = share(list(parts_of(source)), rank, world_size)
    group = None
    if world_size > 1 and dist.get_backend() != "gloo":
        group = dist.new_group(backend="gloo")
    writer = _StreamingWriter(folder)
    values = small_values(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own, about its own types
            save(
                values,
                storage_writer=writer,
                planner=_Planner(source, parts),
                process_group=group,
                no_dist=world_size == 1,
            )
    except CheckpointException as error:
        said = "; ".join(f"rank {rank}: {each[0]!r}" for rank, each in error.failures.items())
        raise CheckpointError(f"{folder} was not written: {said}") from error
