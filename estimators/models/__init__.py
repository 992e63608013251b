"""What a model consists of, told from its configuration or its files, without building it."""

from estimators.models.draft import ModelError
from estimators.models.presets import PRESETS
from estimators.models.shapes import (
    Attention,
    HeadKind,
    Mlp,
    ModelShape,
    NormKind,
    ParameterShape,
    Stack,
)
from estimators.models.sources import (
    load_model,
    model_families,
    model_of_config,
    model_of_headers,
    preset,
)

__all__ = [
    "PRESETS",
    "Attention",
    "HeadKind",
    "Mlp",
    "ModelError",
    "ModelShape",
    "NormKind",
    "ParameterShape",
    "Stack",
    "load_model",
    "model_families",
    "model_of_config",
    "model_of_headers",
    "preset",
]
