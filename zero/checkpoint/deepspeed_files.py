"""The files of a DeepSpeed checkpoint: full tensors by name, out of the shards of its ranks.

[Note: pickles] These files are pickles, and a pickle can run anything. They are read by torch's
restricted reader (`weights_only=True`), which builds tensors, numbers, text and containers, and of
everything else only the four classes named below, for which harmless ones of ours stand in. Any
other name is an error that gives the name; nothing of DeepSpeed is imported.

Layouts: with ZeRO-3 each rank has an equal part of every parameter, rounded up, in the order of
`param_shapes`. With ZeRO-1 and 2 each rank has an equal part of each group, of which
`param_slice_mappings` tells what lies where. A universal checkpoint has whole tensors.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from zero.errors import CheckpointError

WEIGHT, EXP_AVG, EXP_AVG_SQ = "fp32", "exp_avg", "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_UNIVERSAL = "zero"
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    }
)
"""What DeepSpeed writes beside the client state."""


class ZeroStage(IntEnum):
    """Stands in for `ZeroStageEnum`."""

    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


class PeerScaler:
    """Stands in for the loss scalers: only their attributes count."""


@dataclass
class Fragment:
    """Stands in for `fragment_address`: where a part of a parameter lies in a partition."""

    numel: int
    start: int


SAFE_GLOBALS: tuple[tuple[Any, str], ...] = (
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (PeerScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (PeerScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
)
"""The classes that a file may name beside what torch builds anyway [Note: pickles]."""


def read_pickle(path: Path) -> Any:
    """Return what a file of DeepSpeed holds, its tensors mapped rather than read.

    Raises:
        CheckpointError: if it is damaged, or names a class that is not safe.
    """
    with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            unsafe = re.search(r"GLOBAL (\S+)", str(error))
            what = f"names {unsafe[1]}" if unsafe else "is not what torch.save wrote"
            raise CheckpointError(
                f"{path} {what}: nothing of it was used. Only tensors, plain data and"
                f" {', '.join(name for _, name in SAFE_GLOBALS)} are read; if that is of a client"
                " state of your own, save it without"
            ) from error
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; copy it again") from error


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a parameter in the flat tensors of one rank."""

    first: int
    numel: int
    rank: int
    group: int | None
    """Which flat tensor; None if all of them count as one."""
    start: int


class PeerCheckpoint:
    """One checkpoint, open."""

    def __init__(self, path: Path) -> None:
        """Open and check it; tensors are read when they are asked for.

        Raises:
            CheckpointError: if a file is missing, damaged or of a kind that is not known.
        """
        self.path = path
        models = _numbered(path, _MODEL_FILE)
        if not models:
            raise CheckpointError(f"{path} has no *_model_states.pt: it is no DeepSpeed checkpoint")
        self._models = [_mapping(each, read_pickle(each)) for each in models]
        self.model: Mapping[str, Any] = self._models[0]
        self.is_universal = (path / _UNIVERSAL).is_dir()
        self._pieces: dict[str, list[Piece]] = {}
        self._flat: list[dict[str, list[torch.Tensor]]] = []
        self.groups: list[dict[str, torch.Size]] = [
            dict(each) for each in self._required(self.model, "param_shapes")
        ]
        self.shapes = {name: tuple(shape) for group in self.groups for name, shape in group.items()}
        self.aliases: dict[str, str] = dict(self.model.get("shared_params") or {})
        if self.is_universal:
            self.optimizer = _mapping(path, read_pickle(path / _UNIVERSAL / "optimizer_state.pt"))
        else:
            self.optimizer = self._open_shards()
        self.frozen_shapes = self._frozen()

    @property
    def stage(self) -> int:
        """The ZeRO stage that wrote it."""
        return int(self._required(self.optimizer, "zero_stage"))

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers by name."""
        names = self.model.get("buffer_names") or []
        return {name: self.model["module"][name] for name in names}

    @property
    def client_state(self) -> dict[str, Any]:
        """What the user had saved beside."""
        return {key: value for key, value in self.model.items() if key not in _OWN_KEYS}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters of the parameter groups."""
        base = self.optimizer.get("optimizer_state_dict") or self.optimizer.get(
            "base_optimizer_state"
        )
        found = base if isinstance(base, Mapping) else self.optimizer
        return list(found.get("param_groups") or [])

    def steps_of(self, name: str) -> int:
        """Return the updates that a parameter has had."""
        if self.is_universal and (self._folder(name) / "step.pt").exists():
            return int(read_pickle(self._folder(name) / "step.pt"))
        steps = [int(state["step"]) for state in self._base_states(self.optimizer) if state]
        if not steps:
            return 0
        if len(steps) == len(self.groups):
            return next(s for s, group in zip(steps, self.groups, strict=True) if name in group)
        return max(steps)

    def has(self, name: str, section: str) -> bool:
        """Tell whether a section of a trained parameter is there; moments come with a step."""
        if self.is_universal:
            return (self._folder(name) / f"{section}.pt").exists()
        return name in self._pieces and all(rank[section] for rank in self._flat)

    def read(self, name: str, section: str) -> torch.Tensor:
        """Return one section of a trained parameter, flat, fp32.

        Raises:
            CheckpointError: if the files do not hold all of it.
        """
        numel = torch.Size(self.shapes[name]).numel()
        if self.is_universal:
            found = read_pickle(self._folder(name) / f"{section}.pt")
            tensor: torch.Tensor = found["param"] if isinstance(found, Mapping) else found
            found_numel, values = tensor.numel(), tensor.detach().reshape(-1).float()
        else:
            values = torch.empty(numel, dtype=torch.float32, device="cpu")
            found_numel = 0
            for piece in self._pieces[name]:
                _copy(
                    self._parts(piece, section), piece.start, values[piece.first :][: piece.numel]
                )
                found_numel += piece.numel
        if found_numel != numel:
            raise CheckpointError(
                f"{self.path} has {found_numel} of the {numel} elements of {section} of {name}: a"
                " file of a rank is missing or of another run"
            )
        return values

    def read_frozen(self, name: str) -> torch.Tensor:
        """Return a frozen parameter, flat, in its own type."""
        numel = torch.Size(self.frozen_shapes[name]).numel()
        if self.stage < ZeroStage.WEIGHTS:
            return torch.Tensor.reshape(self.model["module"][name], (-1,))
        fragments = [model["frozen_param_fragments"][name] for model in self._models]
        flat = torch.cat([fragment.reshape(-1) for fragment in fragments])
        if flat.numel() < numel:
            raise CheckpointError(
                f"{self.path} has {flat.numel()} of the {numel} elements of {name}, which is frozen"
                " (DeepSpeed does not save frozen parameters that rest on NVMe)"
            )
        return flat[:numel]

    def _frozen(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters that were not trained."""
        if self.stage == ZeroStage.WEIGHTS:
            found = self.model.get("frozen_param_shapes") or {}
            return {name: tuple(shape) for name, shape in found.items()}
        others = {*self.shapes, *self.aliases, *self.buffers}
        return {
            name: tuple(value.shape)
            for name, value in self._required(self.model, "module").items()
            if isinstance(value, torch.Tensor) and name not in others
        }

    def _open_shards(self) -> Mapping[str, Any]:
        """Read what every rank has of the optimizer; return the first rank's own."""
        files = _numbered(self.path, _OPTIMIZER_FILE)
        if not files:
            raise CheckpointError(
                f"{self.path} has no zero_pp_rank_*_optim_states.pt; load its weights alone with"
                " load_module_only=True into DeepSpeed, or save it with ZeRO"
            )
        ranks = [
            self._required(_mapping(each, read_pickle(each)), "optimizer_state_dict")
            for each in files
        ]
        count = self._required(ranks[0], "partition_count")
        wanted = max(count) if isinstance(count, list) else int(count)
        if len(files) != wanted:
            raise CheckpointError(
                f"{self.path} has {len(files)} files of the optimizer and was saved by {wanted}"
                " ranks; copy all of them"
            )
        first: Mapping[str, Any] = ranks[0]
        stage = int(self._required(first, "zero_stage"))
        weights = (
            "fp32_flat_groups"
            if stage == ZeroStage.WEIGHTS
            else ("single_partition_of_fp32_groups")
        )
        for rank in ranks:
            states = self._base_states(rank)
            self._flat.append(
                {
                    WEIGHT: list(self._required(rank, weights)),
                    **{key: [each[key] for each in states if key in each] for key in MOMENTS},
                }
            )
        pieces = _pieces_of_stage_3(self.groups, len(ranks))
        if stage != ZeroStage.WEIGHTS:
            pieces = _pieces_of_groups(self.groups, ranks)
        for name, piece in pieces:
            self._pieces.setdefault(name, []).append(piece)
        return first

    def _base_states(self, rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        base = rank.get("optimizer_state_dict") or rank.get("base_optimizer_state")
        if base is None:
            return []
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{self.path} is an elastic checkpoint of an old DeepSpeed; convert it with"
                " ds_to_universal and load that"
            )
        return [base["state"][key] for key in sorted(base["state"])]

    def _parts(self, piece: Piece, section: str) -> Sequence[torch.Tensor]:
        flat = self._flat[piece.rank][section]
        return flat if piece.group is None else flat[piece.group : piece.group + 1]

    def _folder(self, name: str) -> Path:
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{name!r} cannot be the name of a parameter")
        return self.path / _UNIVERSAL / name

    def _required(self, found: Mapping[str, Any], key: str) -> Any:
        if key not in found:
            raise CheckpointError(
                f"{self.path} lacks {key!r}: it is of another kind than ZeRO-1, 2, 3 or universal"
            )
        return found[key]


def find_peer(folder: Path, tag: str | None) -> Path | None:
    """Return the DeepSpeed checkpoint that a folder and a tag mean, or None if it is none."""
    for name in ("latest", "latest_universal"):
        if tag is None and (folder / name).is_file():
            tag = (folder / name).read_text(encoding="utf-8").strip()
    path = folder / tag if tag is not None else folder
    try:
        if not path.is_dir() or not path.resolve().is_relative_to(folder.resolve()):
            return None
    except (OSError, ValueError):  # a tag that cannot be a name
        return None
    return path if any(_MODEL_FILE.fullmatch(each.name) for each in path.iterdir()) else None


def _pieces_of_stage_3(
    groups: Sequence[Mapping[str, torch.Size]], ranks: int
) -> Iterator[tuple[str, Piece]]:
    """Yield where each rank has its part of each parameter."""
    offset = 0
    for group in groups:
        for name, shape in group.items():
            numel = torch.Size(shape).numel()
            part = -(-numel // ranks)
            for rank in range(ranks):
                count = min(part, numel - rank * part)
                if count > 0:
                    yield name, Piece(rank * part, count, rank, None, offset)
            offset += part


def _pieces_of_groups(
    groups: Sequence[Mapping[str, torch.Size]], ranks: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Piece]]:
    """Yield what each rank's partition of each group has of which parameter."""
    done: dict[str, int] = {}
    for number in range(len(groups)):
        for rank, state in enumerate(ranks):
            for name, fragment in state["param_slice_mappings"][number].items():
                first = done.get(name, 0)
                yield name, Piece(first, fragment.numel, rank, number, fragment.start)
                done[name] = first + fragment.numel


def _copy(parts: Sequence[torch.Tensor], start: int, target: torch.Tensor) -> None:
    """Fill `target` from element `start` on of tensors that follow each other."""
    filled = 0
    for part in parts:
        size = part.numel()
        if start < size and filled < target.numel():
            count = min(size - start, target.numel() - filled)
            target[filled : filled + count] = part.detach().reshape(-1)[start : start + count]
            filled, start = filled + count, 0
        else:
            start -= size
    if filled != target.numel():
        raise CheckpointError(
            f"a rank's flat tensors end {target.numel() - filled} elements early: the file is cut,"
            " or its optimizer rested on NVMe, whose state DeepSpeed keeps elsewhere"
        )


def _numbered(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a kind in the order of their ranks."""
    found = [(match, each) for each in path.iterdir() if (match := pattern.fullmatch(each.name))]
    return [each for _, each in sorted(found, key=lambda pair: int(pair[0][1] or 0))]


def _mapping(path: Path, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, and a dictionary is needed")
    return found
