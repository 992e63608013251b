"""Errors that a user's configuration can cause; each says what, the value and the fix."""

from estimators import PlanError


class ConfigError(ValueError):
    """A configuration that cannot mean what it says."""


class ShardedAccessError(RuntimeError):
    """The values of a sharded parameter cannot be had, or not in the way they were asked for."""


class RunStateError(ConfigError):
    """A saved state that does not belong to this model or this version; nothing was changed."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or cannot be read as a whole; says which and why."""


class ResumeWarning(UserWarning):
    """What differs between the run that was saved and the one that resumes."""


__all__ = [
    "CheckpointError",
    "ConfigError",
    "PlanError",
    "ResumeWarning",
    "RunStateError",
    "ShardedAccessError",
]
