"""What planning anew leaves behind: no memory of old tiers, and no engine that is half moved."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zero
from aio_ops.memory import Mapping
from offload import Spool, SpooledArray
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.parameter import REFERENCE_ATTRIBUTE, reference_of

pytestmark = pytest.mark.nvme


@pytest.fixture(params=["nvme", "none"])
def config(scratch: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return make_config(
        parameters=request.param,
        optimizer=request.param,
        nvme_path=str(scratch),
        host_memory="60KB" if request.param == "nvme" else "1GB",
        sub_group_size=1024,
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train(engine: zero.ZeroEngine, step: int) -> None:
    engine.backward(engine(*make_batch(step)))
    engine.step()


def locked_bytes() -> int:
    """Return the bytes that this process has locked in RAM."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmLck:")[1].split()[0]) << 10


def mapped_bytes() -> int:
    """Return the bytes of the arenas that are mapped."""
    return sum(_MAPPINGS.values())


_MAPPINGS: dict[int, int] = {}


@pytest.fixture
def watched_mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    start, end = Mapping.__init__, Mapping.__del__

    def begin(self: Mapping, size_bytes: int, alignment_bytes: int) -> None:
        start(self, size_bytes, alignment_bytes)
        _MAPPINGS[self.address] = size_bytes

    def finish(self: Mapping) -> None:
        _MAPPINGS.pop(self.address, None)
        end(self)

    monkeypatch.setattr(Mapping, "__init__", begin)
    monkeypatch.setattr(Mapping, "__del__", finish)
    _MAPPINGS.clear()
    yield
    _MAPPINGS.clear()


@pytest.mark.usefixtures("no_collector", "watched_mappings")
def test_old_tiers_are_given_back_without_the_collector(config: dict[str, Any]) -> None:
    for section in config["zero_optimization"].values():
        if isinstance(section, dict):
            section["pin_memory"] = True
    before = locked_bytes()
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    train(engine, 0)
    mapped, locked = mapped_bytes(), locked_bytes()
    assert mapped > 0
    for step in range(1, 7):
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(step % 2 == 0)
        train(engine, step)
        assert mapped_bytes() <= mapped, step
        assert locked_bytes() <= locked, step
    engine.destroy()
    in_place = sum(each.nbytes for each in model.parameters() if type(each) is nn.Parameter)
    assert mapped_bytes() <= in_place + 4096 * len(list(model.parameters()))
    assert locked_bytes() == before


def moments_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        state.name: state.exp_avg
        for state in zero.iterate_states(model)
        if state.exp_avg is not None
    }


def refuse_init(_new: torch.Tensor) -> None:
    raise ValueError("user bug")


def interrupted_states(model: nn.Module) -> Iterator[zero.ParameterState]:
    for count, state in enumerate(zero.iterate_states(model)):
        if count == 4:
            raise KeyboardInterrupt
        yield state


def full_spool(*_arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "no space left")


@pytest.mark.parametrize("fault", ["init", "interrupt", "disk"])
def test_what_fails_while_copies_are_made_changes_nothing(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model, twin = make_model(), make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    other, _, _, _ = zero.initialize(model=twin, config=config)
    train(engine, 0)
    train(other, 0)
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    moments = moments_of(model)
    norm = dict(model.named_parameters())["norm.weight"]
    with monkeypatch.context() as patch:
        if fault == "init":
            with pytest.raises(ValueError, match="user bug"):
                zero.resize_parameter(engine, model.blocks[1].up.weight, (33, 16), refuse_init)
        else:
            norm.requires_grad_(requires_grad=False)
            if fault == "interrupt":
                patch.setattr("zero.replan.iterate_states", interrupted_states)
            else:
                patch.setattr("zero.nursery.Spool.put", full_spool)
            with pytest.raises((KeyboardInterrupt, OSError)):
                train(engine, 1)
    norm.requires_grad_(requires_grad=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().clone(), values[name]), name
    for name, moment in moments_of(model).items():
        assert torch.equal(moment, moments[name]), name
    for step in range(1, 3):
        train(engine, step)
        train(other, step)
    expected = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("place", ["_take_off", "build_runtime", "_put_back"])
def test_what_fails_while_parameters_move_fails_the_engine(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    train(engine, 0)
    model.blocks[0].up.weight.requires_grad_(requires_grad=False)
    with monkeypatch.context() as patch:
        patch.setattr(f"zero.replan.{place}", full_spool)
        with pytest.raises(OSError, match="no space left"):
            train(engine, 1)
    model.blocks[0].up.weight.requires_grad_(requires_grad=True)
    why = r"planning the engine anew failed while parameters were moved \(OSError: .*no space"
    for use in (
        lambda: engine(*make_batch(1)),
        lambda: model(*make_batch(1)),
        lambda: engine.backward(torch.ones((), requires_grad=True)),
        engine.step,
    ):
        with pytest.raises(RuntimeError, match=why):
            use()
    engine.destroy()


def test_a_parameter_whose_values_are_elsewhere_is_refused(config: dict[str, Any]) -> None:
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    engine.backward(engine(*make_batch(0)))
    weight, other = model.blocks[0].up.weight, make_model()
    second, _, _, _ = zero.initialize(model=other, config=config)
    kept = reference_of(weight)
    setattr(weight, REFERENCE_ATTRIBUTE, reference_of(other.blocks[0].up.weight))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight are not in the store"):
        engine.step()
    setattr(weight, REFERENCE_ATTRIBUTE, kept)
    engine.step()
    second.destroy()
    engine.destroy()


def test_a_frozen_parameter_is_resized_with_the_moments_that_wait(config: dict[str, Any]) -> None:
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    train(engine, 0)
    weight = model.embedding.weight
    old = moments_of(model)["embedding.weight"]
    rows, width = old.shape
    weight.requires_grad_(requires_grad=False)
    train(engine, 1)
    zero.resize_parameter(engine, weight, (rows + 8, width))
    train(engine, 2)
    before = weight.detach().clone()
    weight.requires_grad_(requires_grad=True)
    engine(*make_batch(3))
    moments = moments_of(model)["embedding.weight"]
    assert torch.equal(moments[:rows], old)
    assert (moments[rows:] == 0).all()
    train(engine, 3)
    assert not torch.equal(weight, before)
    engine.destroy()


@pytest.mark.filterwarnings("ignore:.* lie on the same device:RuntimeWarning")
def test_what_waits_takes_the_room_it_needs_where_most_is_free(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [scratch / "little", scratch / "much"]
    for place in places:
        place.mkdir()
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="60KB"
    )
    config["tiers"]["nvme"] = [{"path": str(place), "weight": 1.0} for place in places]
    for section in ("offload_param", "offload_optimizer"):
        del config["zero_optimization"][section]["nvme_path"]
    spools: list[Spool] = []
    sizes: list[int] = []

    class Watched(Spool):
        def put(self, *arguments: Any) -> SpooledArray:
            spools.append(self)
            array = super().put(*arguments)
            sizes.append(sum(chunk.file.size_bytes for chunk in self._chunks))
            return array

    free = {places[0]: 1 << 30, places[1]: 2 << 30}
    usage = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=free[path]))
    monkeypatch.setattr("zero.replan.Spool", Watched)
    monkeypatch.setattr("zero.replan.shutil", usage)
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    train(engine, 0)
    model.blocks[0].up.weight.requires_grad_(requires_grad=False)
    train(engine, 1)
    count = len(list(model.parameters()))
    numel = sum(each.numel() for each in model.parameters())
    assert {spool.directory for spool in spools} == {places[1]}
    assert 0 < max(sizes) <= 2 * (12 * numel + 3 * 4096 * count)
    engine.destroy()


@pytest.mark.parametrize("optimizer", ["Lion", "Adagrad", "SGD"])
def test_rules_of_one_moment_keep_it(config: dict[str, Any], scratch: Path, optimizer: str) -> None:
    params = {"lr": 1e-2} if optimizer != "SGD" else {"lr": 1e-2, "momentum": 0.9}
    config["optimizer"] = {"type": optimizer, "params": params}
    key = "exp_avg_sq" if optimizer == "Adagrad" else "exp_avg"
    model = make_model()
    engine, _, _, _ = zero.initialize(model=model, config=config)
    frozen, other = model.blocks[1].up.weight, model.blocks[0].up.weight

    def state(parameter: nn.Parameter) -> torch.Tensor:
        found = zero.safe_get_full_optimizer_state(parameter, key)
        assert found is not None
        assert found.any()
        return found

    train(engine, 0)
    before, kept = state(frozen), state(other)
    model.blocks[1].requires_grad_(requires_grad=False)
    engine(*make_batch(1))
    assert torch.equal(state(other), kept)
    engine.save_checkpoint(scratch / "ck")
    engine.load_checkpoint(scratch / "ck")
    model.blocks[1].requires_grad_(requires_grad=True)
    engine(*make_batch(1))
    assert torch.equal(state(frozen), before)
    assert torch.equal(state(other), kept)
    engine.destroy()


def test_a_checkpoint_is_saved_right_after_data_of_another_shape_was_set(scratch: Path) -> None:
    config = make_config(host_memory="1GB")
    engine, _, _, _ = zero.initialize(model=make_model(extra=(33,)), config=config)
    train(engine, 0)
    parameter = engine.module.extra[0]
    expected = torch.cat([parameter.detach(), torch.full((17,), 0.5)])
    parameter.data = expected.clone()
    engine.save_checkpoint(scratch / "ck", tag="grown")
    assert torch.equal(parameter, expected)
    train(engine, 1)
    assert not torch.equal(parameter, expected)
    engine.load_checkpoint(scratch / "ck", tag="grown")
    assert torch.equal(parameter, expected)
    train(engine, 1)
    engine.destroy()
