"""Errors that a user's configuration can cause; each says what, the value and the fix."""

from estimators import PlanError


class ConfigError(ValueError):
    """A configuration that cannot mean what it says."""


__all__ = ["ConfigError", "PlanError"]
