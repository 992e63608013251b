"""Kernels in a queue: the bits of a call, arrays that live as long as they are needed, errors."""

from __future__ import annotations

import gc
import os
import weakref

import numpy as np
import pytest

from offload.codes import RoundingKey
from offload.kernel_queue import open_queue
from offload.kernels import NativeKernels, load_kernels
from offload.operands import StateArrays
from offload.rules import AdamWScalars
from tests.support.kernels import require_native

NUMEL = 200_000
LONG_SECONDS = 60.0
SCALARS = AdamWScalars.from_hyperparameters(
    lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=1, grad_scale=0.5
)


@pytest.fixture(autouse=True)
def native() -> None:
    """Skip where the kernels could not be built, and fail where they should have been."""
    require_native()


class Owned(np.ndarray):
    """An array that can be watched."""


def operands(state_format: str, seed: int) -> tuple[np.ndarray, np.ndarray, StateArrays]:
    chance = np.random.default_rng(seed)
    grad = chance.standard_normal(NUMEL, np.float32)
    if state_format == "own":
        moments = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
        return chance.standard_normal(NUMEL, np.float32), grad, StateArrays(*moments)
    param = (chance.standard_normal(NUMEL, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if state_format == "exact":
        moments = np.zeros(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
        return param, grad, StateArrays(*moments, residual=np.zeros(NUMEL, np.int16))
    bases = np.zeros((2, -(-NUMEL // 32)), np.uint16)
    return (
        param,
        grad,
        StateArrays(
            np.zeros(NUMEL, np.uint8),
            np.zeros(NUMEL, np.uint8),
            residual=np.zeros(NUMEL, np.int8),
            exp_avg_base=bases[0],
            exp_avg_sq_base=bases[1],
        ),
    )


@pytest.mark.parametrize("state_format", ["own", "exact", "compact"])
def test_a_queue_has_the_bits_of_calls(state_format: str) -> None:
    key = RoundingKey.derive(1, 2, "w", 0) if state_format == "compact" else None
    called = [operands(state_format, seed) for seed in range(6)]
    queued = [operands(state_format, seed) for seed in range(6)]
    for param, grad, state in called:
        NativeKernels(2).update(param, grad, state, SCALARS, key)
    with open_queue(NativeKernels(2), spares_a_core=True) as queue:
        for param, grad, state in queued:
            queue.kernels.update(param, grad, state, SCALARS, key)
        assert queue.last_ticket == 6
        is_done = queue.wait(6, LONG_SECONDS)
        assert is_done
        begin, end = queue.times(1, 6) or (0.0, 0.0)
        assert 0.0 < begin < end
    for ours, theirs, start in zip(queued, called, range(6), strict=True):
        assert (ours[0] == theirs[0]).all()
        assert (ours[0] != operands(state_format, start)[0]).any()
        assert (ours[2].exp_avg == theirs[2].exp_avg).all()
        assert (ours[2].exp_avg_sq == theirs[2].exp_avg_sq).all()


def test_arrays_live_until_their_ticket_is_done() -> None:
    with open_queue(NativeKernels(1), spares_a_core=False) as queue:
        param, grad, state = operands("own", 0)
        owned = grad.view(Owned)
        watched = weakref.ref(owned)
        queue.kernels.update(param, owned, state, SCALARS)
        del owned, grad
        gc.collect()
        assert watched() is not None
        while not queue.wait(1, LONG_SECONDS):
            pass
        gc.collect()
        assert watched() is None


def test_what_may_not_be_updated_is_refused_before_it_is_queued() -> None:
    with open_queue(NativeKernels(1), spares_a_core=False) as queue:
        param, grad, state = operands("own", 0)
        with pytest.raises(TypeError, match="grad must hold float32"):
            queue.kernels.update(param, grad.astype(np.float64), state, SCALARS)
        assert queue.last_ticket == 0
        assert queue.times(1, 0) is None


def test_the_thread_of_a_queue_ends_with_its_block() -> None:
    before = set(os.listdir("/proc/self/task"))  # noqa: PTH208
    with (
        pytest.raises(KeyboardInterrupt),
        open_queue(NativeKernels(2), spares_a_core=False) as queue,
    ):
        for seed in range(20):
            queue.kernels.update(*operands("exact", seed), SCALARS)
        assert len(set(os.listdir("/proc/self/task")) - before) >= 1  # noqa: PTH208
        raise KeyboardInterrupt
    for _ in range(100_000):  # a thread that was joined is listed a moment longer
        left = set(os.listdir("/proc/self/task")) - before  # noqa: PTH208
        if not left:
            break
        os.sched_yield()
    assert not left
    with pytest.raises(RuntimeError, match="a queue that is closed"):
        queue.kernels.update(*operands("exact", 0), SCALARS)


def test_numpy_kernels_update_at_once() -> None:
    kernels = load_kernels("numpy")
    with open_queue(kernels, spares_a_core=True) as queue:
        param, grad, state = operands("own", 0)
        before = param.copy()
        queue.kernels.update(param, grad, state, SCALARS)
        assert (param != before).any()
        is_done = queue.wait(queue.last_ticket)
        assert is_done
        assert queue.times(1, queue.last_ticket) is None
