"""Hooks that can hang on a user's modules: they keep no engine alive, and copy as nothing."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn


class ModuleHook:
    """Calls a method of an engine's part as long as that part lives.

    A model that is copied or pickled takes no engine along: the hook of the copy does nothing.
    """

    def __init__(self, method: Callable[..., Any], *arguments: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self._arguments = arguments

    def __call__(self, *arguments: Any) -> Any:
        """Call the method with the bound arguments, then these."""
        method = self._method()
        if method is None:
            raise RuntimeError(
                "the engine of this model is gone, and with it the values of its sharded"
                " parameters; keep the engine as long as the model is used"
            )
        return method(*self._arguments, *arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nothing_hook, ()


class LastHooks:
    """Hooks that take gradients away, kept behind those that a user registers later.

    torch runs the hooks of a parameter in the order in which they were registered.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[dict[int, Any], int]] = []

    def add(
        self, parameter: torch.Tensor, hook: Callable[..., None]
    ) -> torch.utils.hooks.RemovableHandle:
        """Call `hook` once the gradient of a parameter was accumulated; return its handle."""
        handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            hook
        )
        with torch._C.DisableTorchFunctionSubclass():
            hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        self._kept.append((hooks, handle.id))
        return handle

    def move_back(self) -> None:
        """Be behind what was registered since."""
        for hooks, number in self._kept:
            if number in hooks and next(reversed(hooks)) != number:
                hooks[number] = hooks.pop(number)


def is_in_forward(module: nn.Module, thread: int | None) -> bool:
    """Tell, in a hook of a call of `module`, whether another call of it runs on a thread.

    Args:
        module: what is called.
        thread: identifier of the thread, the own one perhaps.
    """
    calls = 0
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is module:
            calls += 1
        frame = frame.f_back
    return calls > (thread == threading.get_ident())


def do_nothing(*_: Any) -> None:
    """Be the hook of a copied model."""


def _nothing_hook() -> Callable[..., None]:
    return do_nothing
