"""Full fp32 weights out of a checkpoint, under the field's names; `zero_to_fp32.py` is this."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aio_ops import open_engine
from zero.checkpoint.export_files import ExportEntry, parse_size, write_weights
from zero.checkpoint.fill import BlockKey
from zero.checkpoint.inspection import locate
from zero.checkpoint.load import CheckpointFiles, PieceIndex
from zero.checkpoint.manifest import (
    DTYPES,
    STATE,
    WEIGHT,
    Manifest,
    TensorEntry,
    read_manifest,
)
from zero.errors import CheckpointError
from zero.loading import load_weights
from zero.run_state import RunState
from zero.weight_files import WeightReader

_READS_AHEAD = 3


class CheckpointWeights(WeightReader):
    """The weights of a checkpoint, read by ranges; what is read was compared with its checksum."""

    def __init__(self, folder: Path, *, exclude_frozen: bool = False) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self._engine = open_engine("threads", thread_count=2)
        weakref.finalize(self, self._engine.close)
        self._files = CheckpointFiles(folder, self.manifest)
        self._index = PieceIndex(self.manifest)
        self._tensors = {
            name: tensor
            for tensor in self.manifest.tensors
            if tensor.trained or not exclude_frozen
            for name in (tensor.name, *tensor.aliases)
        }
        self._others = self._read_others()
        self._cached: tuple[tuple[int, int], torch.Tensor] | None = None

    @property
    def tensors(self) -> Sequence[TensorEntry]:
        """The parameters that are given, each once."""
        return list({id(each): each for each in self._tensors.values()}.values())

    @property
    def others(self) -> Mapping[str, torch.Tensor]:
        """Persistent buffers, and parameters that no engine sharded."""
        return self._others

    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each tensor, under each of its names."""
        return {
            **{name: tensor.shape for name, tensor in self._tensors.items()},
            **{name: tuple(tensor.shape) for name, tensor in self._others.items()},
        }

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a tensor, flat."""
        if name in self._others:
            return self._others[name].reshape(-1)[start:stop].clone()
        tensor = self._tensors[name]
        found = list(self._index.blocks(tensor.name, WEIGHT, start, stop))
        if not found:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        dtype = DTYPES[found[0][0][0].dtype]
        return torch.cat([self._block(block, dtype)[a : a + n] for block, a, n in found])

    def parts(self, tensor: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield the values of a parameter in order, flat; memory is used again."""
        blocks = (each[0] for each in self._index.blocks(tensor.name, WEIGHT, 0, tensor.numel))
        for (piece, _), span in self._files.read(self._engine, blocks, _READS_AHEAD):
            yield torch.frombuffer(span.view(), dtype=DTYPES[piece.dtype])

    def close(self) -> None:
        """Give files and engine up."""
        self._files.__exit__()
        self._engine.close()

    def _block(self, block: BlockKey, dtype: torch.dtype) -> torch.Tensor:
        """Return a block; the last one is kept, because ranges come in order."""
        key = (id(block[0]), block[1])
        if self._cached is None or self._cached[0] != key:
            for _, span in self._files.read(self._engine, iter([block]), 1):
                self._cached = key, torch.frombuffer(span.view(), dtype=dtype).clone()
        if self._cached is None:
            raise CheckpointError(f"{self.folder}: {block[0].key} gave nothing")
        return self._cached[1]

    def _read_others(self) -> dict[str, torch.Tensor]:
        rank = self.manifest.ranks[0]
        tensors = {}
        for piece in rank.file.pieces:
            if piece.section == STATE:
                blocks = ((piece, number) for number in range(len(piece.checksums)))
                parts = [
                    torch.frombuffer(span.view(), dtype=DTYPES[piece.dtype]).clone()
                    for _, span in self._files.read(self._engine, blocks, 1)
                ]
                empty = torch.empty(0, dtype=DTYPES[piece.dtype], device="cpu")
                tensors[piece.name] = torch.cat([empty, *parts]).view(piece.shape)
        buffers = RunState.from_json(json.dumps(rank.run), tensors).value("buffers")
        return {name: value for name, value in buffers.items() if isinstance(value, torch.Tensor)}


def open_checkpoint(path: Path, tag: str | None = None) -> CheckpointWeights:
    """Open a checkpoint, or the one of a folder that a tag or `latest` names.

    Raises:
        CheckpointError: if it cannot be used.
    """
    return CheckpointWeights(locate(path, tag))


class LazyTensor:
    """A tensor of a checkpoint that is read when `contiguous()` asks for it."""

    def __init__(self, weights: CheckpointWeights, name: str, shape: Sequence[int]) -> None:
        self._weights = weights
        self._name = name
        self.shape = torch.Size(shape)
        self.dtype = torch.float32

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """Return the values."""
        return self._weights.read(self._name, 0, self.numel()).view(self.shape).float()


def get_fp32_state_dict_from_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the full weights of a checkpoint in fp32, all names of tied ones included.

    Args:
        checkpoint_dir: a folder of checkpoints, or one of them.
        tag: which one; by default `latest`.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: return objects that read their values at `contiguous()`.

    Raises:
        CheckpointError: if it is damaged.
    """
    folder = locate(Path(checkpoint_dir), tag)
    weights = CheckpointWeights(folder, exclude_frozen=exclude_frozen_parameters)
    found: dict[str, Any] = {
        name: buffer.float() if buffer.is_floating_point() else buffer
        for name, buffer in weights.others.items()
    }
    for tensor in weights.tensors:
        value: Any = LazyTensor(weights, tensor.name, tensor.shape)
        if not lazy_mode:
            value = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            start = 0
            for part in weights.parts(tensor):
                value.view(-1)[start : start + part.numel()] = part
                start += part.numel()
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), value))
    if not lazy_mode:
        weights.close()
    return found


def convert_checkpoint_to_fp32(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[Path]:
    """Write the full fp32 weights of a checkpoint into files; memory is a few blocks.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        OSError: if there is no room.
    """
    folder = locate(Path(checkpoint_dir), tag)
    with CheckpointWeights(folder, exclude_frozen=exclude_frozen_parameters) as weights:
        entries = [
            ExportEntry((each.name, *each.aliases), each.shape, torch.float32)
            for each in weights.tensors
        ]
        saved = {each.name: each for each in weights.tensors}
        for name, buffer in weights.others.items():
            dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
            entries.append(ExportEntry((name,), tuple(buffer.shape), dtype))

        def values(entry: ExportEntry) -> Iterator[torch.Tensor]:
            name = entry.names[0]
            if name in saved:
                for part in weights.parts(saved[name]):
                    yield part.float()
            else:
                yield weights.others[name].to(entry.dtype).contiguous().reshape(-1)

        return write_weights(
            Path(output_dir),
            entries,
            values,
            safetensors=safe_serialization,
            max_shard_bytes=parse_size(max_shard_size),
        )


def load_state_dict_from_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a model, plain or sharded, and return it.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        RuntimeError: listing what does not fit the model.
    """
    with CheckpointWeights(locate(Path(checkpoint_dir), tag)) as weights:
        load_weights(model, weights)
    return model


get_fp32_state_dict_from_zero_checkpoint = get_fp32_state_dict_from_checkpoint
convert_zero_checkpoint_to_fp32_state_dict = convert_checkpoint_to_fp32
load_state_dict_from_zero_checkpoint = load_state_dict_from_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zero_to_fp32.py`: 0 if the files were written, 1 if not."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32.py", description=__doc__)
    parser.add_argument("checkpoint_dir", type=Path, help="a folder of checkpoints, or one of them")
    parser.add_argument("output_dir", type=Path, help="where the weights go")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of one file")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="write safetensors instead of torch files"
    )
    parser.add_argument("-t", "--tag", help="which checkpoint; by default `latest`")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what was not trained"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="say more")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if given.debug else logging.INFO)
    try:
        paths = convert_checkpoint_to_fp32(
            given.checkpoint_dir,
            given.output_dir,
            given.max_shard_size,
            given.safe_serialization,
            given.tag,
            given.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError, ValueError) as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    for path in paths:
        logging.getLogger(__name__).info("%s: %d bytes", path, path.stat().st_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
