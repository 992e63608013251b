"""Which parameters keep their state in another format than the rest of the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from estimators import StateFormat
from offload import NamedPiece, Rounding
from zero.errors import ConfigError
from zero.settings import FormatOverride, Settings
from zero.unit import Segment

FormatOf: TypeAlias = Callable[[str, nn.Parameter], StateFormat | None]


def choose_formats(model: nn.Module, settings: Settings) -> FormatOf:
    """Return what tells how the state of a parameter is stored, None being as `state_format` says.

    The first override whose pattern matches the parameter's name decides. Without one, `compact`
    keeps embeddings and parameters of one dimension (norms and biases) exact.

    Raises:
        ConfigError: if a pattern matches no parameter.
    """
    usual = settings.tiers.state_format
    overrides = settings.tiers.format_overrides
    _check_patterns(model, overrides)
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }

    def format_of(name: str, parameter: nn.Parameter) -> StateFormat | None:
        chosen = usual
        if usual is StateFormat.COMPACT and (parameter.ndim < 2 or id(parameter) in embeddings):
            chosen = StateFormat.EXACT
        for override in overrides:
            if fnmatch.fnmatchcase(name, override.pattern):
                chosen = override.state_format
                break
        return None if chosen is usual else chosen

    return format_of


def _check_patterns(model: nn.Module, overrides: Sequence[FormatOverride]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for override in overrides:
        if not any(fnmatch.fnmatchcase(name, override.pattern) for name in names):
            raise ConfigError(
                f"tiers.state_formats: the pattern {override.pattern!r} matches no parameter of"
                f" the model; its names are like {names[0] if names else 'none'!r}"
            )


def rounding_of(segments: Sequence[Segment], seed: int, step: int) -> Rounding:
    """Return what an update rounds by: the parameters that lie in this rank's shards."""
    return Rounding(
        seed,
        step,
        [
            [
                NamedPiece(segment.spec.names[piece.index], piece.first, piece.start, piece.numel)
                for piece in segment.pieces
            ]
            for segment in segments
        ],
    )
