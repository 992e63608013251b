"""The state of optimizers without a kernel: saved, loaded on any ranks, planned anew, shown."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.generic import OPTIMIZERS
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model
from zero.carried import describe_carried
from zero.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.nvme


def config(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"parameters": tier, "optimizer": tier, **more}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 1024, "host_memory": "150KB"}
    found = make_config(**options)
    del found["optimizer"]
    return found


def start(name: str, tier: str, folder: Path, **more: Any) -> zero.ZeroEngine:
    model = make_model()
    given = OPTIMIZERS[name](model.parameters())
    return zero.initialize(model=model, optimizer=given, config=config(tier, folder, **more))[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


def digest(engine: zero.ZeroEngine) -> str:
    """Return a hash of masters and of all states by their names; a collective."""
    total = hashlib.sha256()
    for state in sorted(zero.iterate_states(engine.module), key=lambda each: each.name):
        kept = {"value": state.value, "master": state.fp32_param, **state.states}
        for key, tensor in sorted(kept.items()):
            if tensor is not None:
                total.update(f"{state.name} {key} {tuple(tensor.shape)}".encode())
                total.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def carried(engine: zero.ZeroEngine) -> str:
    known = describe_carried(engine.optimizer, engine._groups, engine._runtime, engine._history)
    return repr(known)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, name: str) -> None:
    """Across the step in which state is made late."""
    engine = start(name, "none", tmp_path)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "ck")
    half, numbers = digest(engine), carried(engine)
    train(engine, 1, 4)
    whole = digest(engine)
    engine.destroy()
    engine = start(name, "none", tmp_path)
    engine.load_checkpoint(tmp_path / "ck")
    assert digest(engine) == half
    assert carried(engine) == numbers
    train(engine, 1, 4)
    assert digest(engine) == whole
    engine.destroy()


def grouped(model: nn.Module) -> optim.Optimizer:
    """Two groups that carry different products; one is a single element, so most ranks lack it."""
    gain = model.blocks[0].gain
    rest = [each for each in model.parameters() if each is not gain]
    return optim.NAdam(
        [{"params": [gain], "momentum_decay": 0.1}, {"params": rest}], lr=1e-3, eps=1e-4
    )


def test_state_moves_between_world_sizes_and_tiers(scratch: Path) -> None:
    """Every rank sees the same batches, so every world size is what unsharded torch is."""
    wanted = make_model()
    optimizer = grouped(wanted)
    for step in range(5):
        wanted(*make_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def work_of(tier: str, source: Path | None, target: Path, steps: tuple[int, int]) -> Any:
        def work(_rank: int) -> list[Any]:
            model = make_model()
            options = config(tier, scratch, dtype="fp32")
            engine = zero.initialize(model=model, optimizer=grouped(model), config=options)[0]
            if source is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    engine.load_checkpoint(source)
            loaded = digest(engine)
            engine.save_checkpoint(target)
            train(engine, *steps)
            after = digest(engine)
            with zero.GatheredParameters(list(model.parameters())):
                pairs = list(zip(model.parameters(), wanted.parameters(), strict=True))
                far = max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())
            engine.save_checkpoint(target.with_name(f"{target.name}-after"))
            engine.destroy()
            return [loaded, after, far]

        return work

    first = on_ranks(work_of("nvme", None, scratch / "a", (0, 3)), 2, scratch)
    source = scratch / "a-after"
    for tier, ranks in (("cpu", 1), ("none", 3), ("nvme", 2)):
        target = scratch / f"{tier}{ranks}"
        found = on_ranks(work_of(tier, source, target, (3, 5)), ranks, scratch)
        assert {each[0] for each in found} == {first[0][1]}, f"{tier} on {ranks}"
        assert max(each[2] for each in found) <= 1e-6, f"{tier} on {ranks}"
        source = target


def test_states_are_read_and_set_by_the_names_of_torch(scratch: Path) -> None:
    engine = start("amsgrad", "nvme", scratch)
    model = make_model()
    given = OPTIMIZERS["amsgrad"](model.parameters())
    for step in range(2):
        model(*make_batch(step)).backward()
        given.step()
        given.zero_grad()
    train(engine, 0, 2)
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    ours, theirs = engine.module.blocks[0].up.weight, model.blocks[0].up.weight
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        found = zero.safe_get_full_optimizer_state(ours, name)
        assert found is not None
        assert float(found.abs().max()) > 0
        assert torch.allclose(found, given.state[theirs][name], rtol=1e-4, atol=1e-9), name
    new = torch.rand(ours.shape)
    zero.safe_set_full_optimizer_state(ours, new, "max_exp_avg_sq")
    assert torch.equal(zero.safe_get_full_optimizer_state(ours, "max_exp_avg_sq"), new)
    with pytest.raises(KeyError, match=r"momentum.*max_exp_avg_sq"):
        zero.safe_get_full_optimizer_state(ours, "momentum")
    with pytest.raises(KeyError, match=r"'step' of AdamW is one number for all.*max_exp_avg_sq"):
        zero.safe_get_full_optimizer_state(ours, "step")
    engine.destroy()


@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("saves", [False, True])
def test_freezing_and_unfreezing_goes_on_as_in_torch(scratch: Path, tier: str, saves: Any) -> None:
    """Saved and loaded while the state of a frozen parameter waits, or not."""
    frozen = range(2, 4)
    model = make_model()
    given = OPTIMIZERS["nadam"](model.parameters())
    for step in range(6):
        model.blocks[0].requires_grad_(step not in frozen)
        model(*make_batch(step)).backward()
        given.step()
        given.zero_grad()
    engine = start("nadam", tier, scratch)
    for step in range(6):
        if saves and step == 3:
            engine.save_checkpoint(scratch / "ck")
            before = digest(engine)
            engine.destroy()
            engine = start("nadam", tier, scratch)
            engine.module.blocks[0].requires_grad_(requires_grad=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                train(engine, 90, 91)
                engine.load_checkpoint(scratch / "ck")
            assert digest(engine) == before
        engine.module.blocks[0].requires_grad_(step not in frozen)
        train(engine, step, step + 1)
    with zero.GatheredParameters(list(engine.module.parameters())):
        for ours, wanted in zip(engine.module.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-6)
    engine.destroy()


def test_a_group_that_is_added_may_keep_more(tmp_path: Path) -> None:
    """The first group keeps one tensor, the one that is added keeps two."""

    def run(module: nn.Module, forward: Any, optimizer: Any, step: Any) -> None:
        for index in range(4):
            if index == 2:
                late = module.blocks[0].up.weight
                late.requires_grad_(requires_grad=True)
                optimizer.add_param_group({"params": [late], "momentum": 0.9})
            step(forward(*make_batch(index)))

    def made() -> tuple[nn.Module, optim.Optimizer]:
        model = make_model()
        late = model.blocks[0].up.weight.requires_grad_(requires_grad=False)
        rest = [each for each in model.parameters() if each is not late]
        return model, optim.RMSprop(rest, lr=1e-3, eps=1e-4)

    model, given = made()

    def torch_step(loss: torch.Tensor) -> None:
        loss.backward()
        given.step()
        given.zero_grad()

    run(model, model, given, torch_step)
    ours, own = made()
    engine, optimizer, _, _ = zero.initialize(
        model=ours, optimizer=own, config=config("none", tmp_path)
    )

    def engine_step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    run(ours, engine, optimizer, engine_step)
    with zero.GatheredParameters(list(ours.parameters())):
        for one, other in zip(ours.parameters(), model.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("kind", ["SGD", "Lion", "Adagrad"])
def test_the_only_moment_of_an_optimizer_survives_a_new_plan(tmp_path: Path, kind: str) -> None:
    """Of what stays trained, and of what is frozen for a while."""
    options = make_config()
    values = {"lr": 1e-3, "momentum": 0.9} if kind == "SGD" else {"lr": 1e-3}
    options["optimizer"] = {"type": kind, "params": values}
    engine = zero.initialize(model=make_model(), config=options)[0]
    train(engine, 0, 2)
    before = {state.name: state.states for state in zero.iterate_states(engine.module)}
    engine.module.norm.weight.requires_grad_(requires_grad=False)
    engine(*make_batch(2))
    engine.module.norm.weight.requires_grad_(requires_grad=True)
    engine(*make_batch(2))
    after = {state.name: state.states for state in zero.iterate_states(engine.module)}
    assert before.keys() == after.keys()
    for name, states in before.items():
        assert len(states) == 1
        for key, tensor in states.items():
            assert torch.equal(after[name][key], tensor), f"{name} {key}"
    assert float(before["norm.weight"][next(iter(before["norm.weight"]))].abs().max()) > 0
    engine.destroy()


def test_a_durable_run_resumes(scratch: Path) -> None:
    def begin(name: str = "nadam", *, durable: bool = True) -> zero.ZeroEngine:
        options = config("nvme", scratch)
        options["tiers"]["nvme"] = [{"path": str(scratch)}]
        if durable:
            options["tiers"]["durable"] = {"name": "generic", "every_steps": 1}
        model = make_model()
        given = OPTIMIZERS[name](model.parameters())
        return zero.initialize(model=model, optimizer=given, config=options)[0]

    engine = begin(durable=False)
    train(engine, 0, 4)
    whole = digest(engine)
    engine.destroy()
    engine = begin()
    train(engine, 0, 2)
    engine.destroy()
    with pytest.raises(zero.DurableError, match=r"saved with NAdam, and RAdam"):
        begin("radam")
    engine = begin()
    assert engine.global_steps == 2
    train(engine, 2, 4)
    assert digest(engine) == whole
    engine.destroy()


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    engine = zero.initialize(model=make_model(), config=make_config())[0]
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = start("rmsprop", "none", tmp_path)
    train(engine, 5, 6)
    before = digest(engine)
    with pytest.raises(CheckpointError, match=r"saved with AdamW, and RMSprop.*load_optimizer_st"):
        engine.load_checkpoint(tmp_path)
    assert digest(engine) == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    train(engine, 6, 7)  # its own state goes on
    engine.destroy()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedDevice]]:
    made: list[SimulatedDevice] = []

    def open_simulated(_wanted: str) -> SimulatedDevice:
        made.append(SimulatedDevice(len(made)))
        return made[-1]

    monkeypatch.setattr(zero.planning, "open_device", open_simulated)
    yield made


def test_an_update_on_the_device_without_a_kernel_is_refused(
    tmp_path: Path, devices: list[SimulatedDevice]
) -> None:
    model = make_model()
    options = config("cpu", tmp_path)
    options["tiers"]["update_device"] = "device"
    with pytest.raises(ConfigError, match=r'update_device is "device".*no kernel.*"auto" or "cpu"'):
        zero.initialize(
            model=model, optimizer=OPTIMIZERS["rmsprop"](model.parameters()), config=options
        )
    assert devices
    options["tiers"]["update_device"] = "auto"
    model = make_model()
    engine = zero.initialize(
        model=model, optimizer=OPTIMIZERS["rmsprop"](model.parameters()), config=options
    )[0]
    assert not engine.plan.memory.request.update_on_device
    train(engine, 0, 1)
    engine.destroy()
