"""The state of a run beside its shards: plain data, exact, and every difference is told."""

from __future__ import annotations

import collections
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.errors import RunStateError
from zero.loader import ResumableLoader, ResumableSampler
from zero.plain import NotPlainError, PlainDataError, dump_plain, from_plain, to_plain
from zero.run_state import RestoreParts, RunState, capture, restore

MEMORY = "400KB"


def through_json(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = dump_plain(to_plain(value, "value", tensors))
    return from_plain(json.loads(text), tensors)


def make_engine(**changes: Any) -> zero.ZeroEngine:
    config = {**make_config(host_memory=MEMORY), **changes}
    data = TensorDataset(torch.arange(10))
    return zero.initialize(model=make_model(), config=config, training_data=data)[0]


def test_plain_values_come_back_with_type_and_bits() -> None:
    value = {
        "numbers": [1, 2.5, 0.1 + 0.2, -0.0, math.inf, True, None, "text"],
        "tuple": ((1, (2,)), b"bytes\x00", {3, 1, 2}),
        5: {"$tensor": "a name that is a tag"},
        "counter": collections.Counter({10: 1, 30: 2}),
        "types": [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
    }
    back = through_json(value)
    assert back == value
    assert repr(back) == repr(value)
    assert math.isnan(through_json([math.nan])[0])
    for tensor in (torch.randn(3, 4).t(), torch.tensor(1.5), torch.empty(0), torch.ones(2).bool()):
        found = through_json([tensor])[0]
        assert torch.equal(found, tensor)
        assert found.dtype is tensor.dtype
    for array in (np.arange(6.0).reshape(2, 3)[:, ::2], np.float32(0.1), np.array(7), np.empty(0)):
        found = through_json({"array": array})["array"]
        assert np.array_equal(found, array)
        assert type(found) is type(array)


def test_what_is_no_plain_data_is_refused_by_its_place() -> None:
    class Mine:
        pass

    looped: list[Any] = []
    looped.append(looped)
    for value, words in (
        ({"a": [1, {"b": Mine()}]}, r"state\['a'\]\[1\]\['b'\] is a .*Mine, which cannot be"),
        (lambda: None, "state is a builtins.function"),
        (looped, "holds itself"),
        (collections.defaultdict(list), "defaultdict"),
        (torch.empty(3, device="meta"), "on meta"),
        (np.array(["text"]), "ndarray"),
    ):
        with pytest.raises(NotPlainError, match=words):
            to_plain(value, "state", {})
    for bad in (
        {"$module": "os"},
        {"$tensor": "missing"},
        {"$dtype": "nn"},
        {"$array": ["a", "O", [1]]},
    ):
        with pytest.raises(PlainDataError):
            from_plain(bad, {"a": torch.zeros(8, dtype=torch.uint8)})


def test_a_state_comes_back_into_another_engine() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    engine = make_engine(scheduler=schedule)
    loader = engine.training_dataloader
    assert loader is not None
    engine.module.register_buffer("seen", torch.arange(3.0))
    position = iter(loader)
    for step in range(2):
        next(position)
        engine.backward(engine(*make_batch(step)))
        engine.step()
    random.random(), np.random.rand(), torch.rand(1)
    state = capture(engine)
    drawn = (random.random(), np.random.rand(), torch.rand(4))
    rest = [batch.tolist() for (batch,) in position]
    lr = engine.get_lr()
    engine.destroy()

    other = make_engine(scheduler=schedule)
    other.module.register_buffer("seen", torch.zeros(3))
    assert other.get_lr() != lr
    back = RunState.from_json(state.to_json(), state.tensors)
    assert restore(other, back) == []
    assert (other.global_steps, other.micro_steps, other.global_samples) == (2, 2, 4)
    assert other.get_lr() == lr
    assert other.module.seen.tolist() == [0.0, 1.0, 2.0]
    assert other.training_dataloader is not None
    assert [batch.tolist() for (batch,) in other.training_dataloader] == rest
    assert random.random() == drawn[0]
    assert np.random.rand() == drawn[1]
    assert torch.equal(torch.rand(4), drawn[2])
    assert capture(other).to_json() != back.to_json()  # the loader has moved on
    other.destroy()


def test_every_difference_is_told_with_what_was_done() -> None:
    warm = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}
    engine = make_engine(scheduler=warm, gradient_accumulation_steps=2, train_batch_size=4)
    for step in range(3):
        engine.backward(engine(*make_batch(step)))
        engine.step()
    state = capture(engine)
    state.data["world_size"] = 4
    engine.destroy()

    cosine = {"type": "CosineAnnealingLR", "params": {"T_max": 9}}
    adam = {"type": "AdamW", "params": {"lr": 0.5, "eps": 1e-5}}
    other = make_engine(scheduler=cosine, optimizer=adam)
    notes = restore(other, state)
    text = "\n".join(notes)
    assert "world size: saved 4, now 1" in text
    assert "schedule: saved WarmupLR, now CosineAnnealingLR: the new one starts from its" in text
    assert "lr 0." not in text
    assert "eps 0.0001 -> 1e-05" in text
    assert "the saved values are used" in text
    assert "accumulation_steps 2 -> 1" in text
    assert "the 1 micro-batches accumulated so far were weighed" in text
    assert other.get_lr() == [0.5]
    assert other.micro_steps == 3
    assert not other._micro_batches
    other.destroy()

    longer = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 9}}
    other = make_engine(scheduler=longer)
    notes = restore(other, state, RestoreParts(scheduler=False))
    assert any("WarmupLR was not loaded, as asked" in note for note in notes)
    assert other.get_lr() == [0.0]
    other.destroy()

    other = make_engine(scheduler=longer)
    assert "schedule WarmupLR: warmup_num_steps 5 -> 9: the new value is used" in "\n".join(
        restore(other, state)
    )
    other.destroy()


def test_buffers_of_another_model_are_refused_and_nothing_changes() -> None:
    engine = make_engine()
    state = capture(engine)
    engine.module.register_buffer("seen", torch.ones(3))
    engine.global_steps = 7
    with pytest.raises(RunStateError, match="lacks seen"):
        restore(engine, state)
    assert engine.global_steps == 7
    with pytest.raises(RunStateError, match="format version 99"):
        RunState.from_json('{"format_version": 99}', {})
    with pytest.raises(RunStateError, match="no run state"):
        RunState.from_json("[]", {})
    engine.destroy()


def loader_of(world_size: int, rank: int, samples: int = 23) -> ResumableLoader:
    data = TensorDataset(torch.arange(samples))
    return ResumableLoader(data, batch_size=2, sampler=ResumableSampler(data, world_size, rank))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1)])
def test_another_number_of_ranks_reads_what_is_left(before: int, after: int) -> None:
    seen: list[int] = []
    states = []
    for rank in range(before):
        loader = loader_of(before, rank)
        position = iter(loader)
        seen += [each for _ in range(3) for each in next(position)[0].tolist()]
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(after):
        loader = loader_of(after, rank)
        loader.load_state_dict(states[0])
        rest = [each for (batch,) in loader for each in batch.tolist()]
        seen += rest
        assert loader.state_dict()["epoch"] == 1
        second = [each for (batch,) in loader for each in batch.tolist()]
        assert second != rest
    assert set(seen) == set(range(23))
    assert len(seen) < 23 + before + after


def test_beginning_a_pass_draws_from_no_shared_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    next(iter(loader_of(1, 0)))
    assert torch.equal(torch.rand(2), expected)
