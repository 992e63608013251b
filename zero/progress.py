"""The counts of an engine, as plain data, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.engine import ZeroEngine

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")


def progress(engine: ZeroEngine) -> dict[str, Any]:
    """Return how far an engine is: steps, and micro-batches of the window that is under way.

    "births" has the updates of the engine before the first one of a parameter, where there were
    any; "waiting" the updates of parameters that are frozen at the moment and keep their moments.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    history = engine._history
    return {
        "counters": {
            **{name: getattr(engine, name) for name in _COUNTERS},
            "global_samples": engine._global_samples,
            "updates": history.updates,
        },
        "window": {
            "micro_batches": engine._micro_batches,
            "saw_forward": engine._window_saw_forward,
        },
        "grad_norm": engine._grad_norm,
        "births": {
            names[key]: birth for key, birth in history.births.items() if birth and key in names
        },
        "waiting": {
            names[key]: moments.steps for key, moments in history.dormant.items() if key in names
        },
    }


def set_progress(engine: ZeroEngine, saved: dict[str, Any], *, keeps_window: bool) -> None:
    """Take over counts; what births say is for whoever plans, and not taken from here."""
    counters = saved["counters"]
    for name in _COUNTERS:
        setattr(engine, name, counters[name])
    engine._global_samples = counters["global_samples"]
    engine._history.updates = counters["updates"]
    engine._grad_norm = saved["grad_norm"]
    engine._micro_batches = saved["window"]["micro_batches"] if keeps_window else 0
    engine._window_saw_forward = saved["window"]["saw_forward"] if keeps_window else False
    engine._forward_pending = False
    engine._loss_was_scaled = False
    engine._step_applied = False
