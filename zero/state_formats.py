"""Which parameters keep their state in another format than the rest of the model."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from estimators import FormatOverride, StateFormat, own_format
from offload import NamedPiece, Rounding
from zero.errors import ConfigError
from zero.settings import Settings
from zero.unit import Segment

FormatOf: TypeAlias = Callable[[str, nn.Parameter], StateFormat | None]


def choose_formats(model: nn.Module, settings: Settings) -> FormatOf:
    """Return what tells how the state of a parameter is stored, None being as `state_format` says.

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
        is_embedding = id(parameter) in embeddings
        return own_format(usual, overrides, name, parameter.ndim, is_embedding=is_embedding)

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
