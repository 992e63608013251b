"""Run one update of an engine: by kernels or an optimizer's own step, on slices or on wholes."""

from __future__ import annotations

from collections.abc import Sequence

from offload import update
from zero.audit import accept_updated
from zero.optimizer import UpdateGroup, ZeroOptimizer
from zero.runtime import Runtime
from zero.state_formats import rounding_of
from zero.whole import WholeOptimizer, update_whole


def run_update(
    runtime: Runtime,
    optimizer: ZeroOptimizer,
    groups: Sequence[UpdateGroup],
    step: int,
    grad_scale: float,
    rounding_seed: int,
) -> None:
    """Run step `step`, the first is 1, over all that is trained; a collective.

    Raises:
        ValueError: naming a hyper-parameter that cannot be used; nothing has changed.
        PageError: if a transfer failed.
    """
    segments, store, reducer = runtime.segments, runtime.store, runtime.reducer
    whole = optimizer.fused if isinstance(optimizer.fused, WholeOptimizer) else None
    scalars = optimizer.scalars(step, grad_scale, groups) if whole is None else []
    runtime.scheduler.prefetcher.ahead.drop(store)
    for segment in segments:
        segment.commit(store)
    if whole is not None:
        update_whole(runtime, whole, optimizer.param_groups, grad_scale)
    else:
        update(
            store,
            scalars,
            lambda index: segments[index].forget_values(),
            lambda index: reducer.kept.pieces(segments[index]) if reducer is not None else None,
            rounding_of(segments, rounding_seed, step),
        )
    accept_updated([each for each in segments if each.spec.trainable], store.ledger)
