"""Optimizers of whole tensors on several ranks, with the bits of unsharded torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.support.fork_ranks import on_ranks
from tests.support.tiny import make_batch, make_model
from tests.support.whole import OPTIMIZERS, far_from, start, train

pytestmark = pytest.mark.nvme

LEGS = (("nvme", 3, 3), ("cpu", 1, 3), ("none", 2, 1), ("nvme", 3, 3))
"""Tier, ranks and stage of each step of a run that goes on elsewhere after each."""


HALVED = {
    "adafactor": "row_var",
    "lamb": "exp_avg",
    "declared": "rows",
    "muon": "momentum_buffer",
}
"""A state of each that is halved before the last step."""

States = dict[str, dict[str, torch.Tensor]]


def over_ranks(name: str) -> tuple[list[torch.Tensor], States]:
    """Return what unsharded torch makes of the mean of as many equal gradients as there are ranks.

    Three equal numbers, added and divided by three, are not always that number.
    """
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    for step, (_, ranks, _) in enumerate(LEGS):
        if step + 1 == len(LEGS):
            for each in (model.blocks[1].attention.weight, model.blocks[1].up.weight):
                optimizer.state[each][HALVED[name]] *= 0.5
        model(*make_batch(step)).backward()
        for each in model.parameters():
            if each.grad is not None:
                each.grad = sum([each.grad] * ranks, torch.zeros_like(each)) / ranks
        optimizer.step()
        optimizer.zero_grad()
    named = {id(each): key for key, each in model.named_parameters()}
    states = {
        named[id(each)]: {key: torch.as_tensor(value) for key, value in state.items()}
        for each, state in optimizer.state.items()
    }
    return [each.detach() for each in model.parameters()], states


def halve(model: nn.Module, name: str) -> None:
    """Halve a state in full, and another by its owner."""
    up, attention = model.blocks[1].up.weight, model.blocks[1].attention.weight
    full = zero.safe_get_full_optimizer_state(up, name)
    assert full is not None
    zero.safe_set_full_optimizer_state(up, full * 0.5, name)
    own = zero.safe_get_local_optimizer_state(attention, name)
    assert own is not None
    zero.safe_set_local_optimizer_state(attention, own * 0.5, name)


def resize_and_back(engine: zero.ZeroEngine) -> None:
    """What both shapes have keeps its values and its state, so the bits are as if never resized."""
    weight = engine.module.blocks[1].up.weight
    for shape in ((40, 17), (33, 16)):
        zero.resize_parameter(engine, weight, shape)
        assert weight.shape == shape


def check_states_by_name(model: nn.Module, wanted: States) -> None:
    assert wanted
    for name, parameter in model.named_parameters():
        for key, value in wanted.get(name, {}).items():
            found = zero.safe_get_full_optimizer_state(parameter, key)
            assert found is not None
            assert torch.equal(found, value), (name, key)
            own = zero.safe_get_local_optimizer_state(parameter, key)
            assert own is not None
            # The owner's piece is the whole, and other ranks have none.
            assert own.numel() in (0, value.numel())
            assert torch.equal(own, value.reshape(-1)[: own.numel()])


def test_ranks_share_the_work_and_the_state_moves_between_them(scratch: Path) -> None:
    """Every rank sees the same batches; all world sizes have the bits of unsharded torch."""
    wanted = {name: over_ranks(name) for name in OPTIMIZERS}

    def work_of(leg: int) -> Callable[[int], list[Any]]:
        tier, ranks, stage = LEGS[leg]

        def work(_rank: int) -> list[Any]:
            found = []
            for name in OPTIMIZERS:
                engine = start(name, tier, scratch, ranks, stage=stage, clip=0.0)
                if leg:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)  # of another world size
                        engine.load_checkpoint(scratch / f"{name}{leg}")
                is_last = leg + 1 == len(LEGS)
                if is_last:
                    halve(engine.module, HALVED[name])
                    resize_and_back(engine)
                train(engine, leg, leg + 1)
                whole = engine.optimizer.fused
                if tier == "nvme":
                    assert engine.ledger.snapshot().nvme_write_bytes > 0
                    assert (whole.records.paged_bytes > 0) == bool(whole.owned())
                found.append(len(whole.owned()))
                if is_last:
                    assert far_from(engine, wanted[name][0]) == 0.0, name
                    check_states_by_name(engine.module, wanted[name][1])
                else:
                    engine.save_checkpoint(scratch / f"{name}{leg + 1}")
                engine.destroy()
            return found

        return work

    for leg, (_, ranks, _) in enumerate(LEGS):
        found = on_ranks(work_of(leg), ranks, scratch)
        for i, name in enumerate(OPTIMIZERS):
            size = len(OPTIMIZERS[name](make_model()).param_groups[0]["params"])
            counts = [rank[i] for rank in found]
            assert sum(counts) == size  # each parameter has one owner
            assert (min(counts) == 0) == (size < ranks)


def test_states_have_the_names_of_torch_and_no_others(scratch: Path) -> None:
    get, set_ = zero.safe_get_full_optimizer_state, zero.safe_set_full_optimizer_state
    engine = start("lamb", "nvme", scratch)
    weight = engine.module.blocks[0].up.weight
    assert get(weight, "exp_avg") is None
    with pytest.raises(zero.ShardedAccessError, match=r"up.weight has no exp_avg yet: Lamb makes"):
        set_(weight, torch.ones(weight.shape), "exp_avg")
    train(engine, 0, 2)
    assert get(weight, "step") == 2
    set_(weight, torch.tensor(7), "step")
    train(engine, 2, 3)
    assert get(weight, "step") == 8
    assert engine.optimizer.fused.records.paged_bytes > 0
    with pytest.raises(KeyError, match=r"'sum' .*up.weight.*'exp_avg', 'exp_avg_sq', 'fp32_param"):
        get(weight, "sum")
    with pytest.raises(ValueError, match=r"exp_avg of .*up.weight has shape \(33, 16\).*\(3,\)"):
        set_(weight, torch.ones(3), "exp_avg")
    with pytest.raises(ValueError, match=r"\(528,\), the one given has \(3,\)"):
        zero.safe_set_local_optimizer_state(weight, torch.ones(3), "exp_avg")
    engine.destroy()
    engine = start("adafactor", "none", scratch)
    bias = engine.module.norm.bias
    with pytest.raises(KeyError, match=r"'row_var' .*norm.bias; .*'step', 'variance'"):
        get(bias, "row_var")
    bias.requires_grad_(requires_grad=False)
    train(engine, 0, 1)
    assert get(bias, "variance") is None
    assert get(bias, "row_var") is None
    with pytest.raises(zero.ShardedAccessError, match=r"norm.bias has no variance: it is frozen"):
        set_(bias, torch.ones(16), "variance")
    engine.destroy()
