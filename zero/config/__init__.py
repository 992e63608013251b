"""The configuration: DeepSpeed's keys and a section of our own, parsed strictly."""

from zero.config.autos import hidden_size_of
from zero.config.batch import BatchTriple, resolve_batch
from zero.config.config import ZeroConfig
from zero.config.loading import ConfigWarning, load_config
from zero.config.swap_directory import PreflightReport, PreflightWarning, preflight
from zero.errors import ConfigError

__all__ = [
    "BatchTriple",
    "ConfigError",
    "ConfigWarning",
    "PreflightReport",
    "PreflightWarning",
    "ZeroConfig",
    "hidden_size_of",
    "load_config",
    "preflight",
    "resolve_batch",
]
