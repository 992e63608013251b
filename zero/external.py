"""Calls of the field that this library accepts and does not need."""

from __future__ import annotations

from torch import nn


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing but check: a weight is gathered wherever it is touched.

    Raises:
        RuntimeError: if the arguments are not a module and a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            "register_external_parameter takes a module and a parameter, got"
            f" {type(module).__name__} and {type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing but check, as `register_external_parameter` does.

    Raises:
        RuntimeError: if the arguments are not a module and a parameter.
    """
    register_external_parameter(module, parameter)
