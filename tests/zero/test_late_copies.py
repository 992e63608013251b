"""Training beside a device gives the bits of training on the processor, however late copies are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zero
import zero.planning
from estimators import Section, StateFormat, Tier, UpdateRates
from estimators.summary import LIVE_PARAMETERS
from offload import DeviceMemory, measure_update
from offload.measure_update import host_rate
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.grid import CLIP, cells, run_cell
from tests.support.observe import digest, full_parameters
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import TinyTransformer, make_batch, make_model


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedDevice]:
    """Let engines compute on simulated devices, which are listed as they are made."""
    devices: list[SimulatedDevice] = []

    def open_simulated(_wanted: str) -> SimulatedDevice:
        devices.append(SimulatedDevice(len(devices)))
        return devices[-1]

    monkeypatch.setattr(zero.planning, "open_device", open_simulated)
    return devices


def cell_name(cell: dict[str, Any]) -> str:
    what = "all" if cell["with_parameters"] else "optimizer"
    name = f"{cell['device']}-{what}-x{cell['accumulation']}-{cell['clip']}-{cell['dtype']}"
    return f"{name}-{cell.get('update_device', 'auto')}"


QUICK = [
    cell
    for cell in cells()
    if cell["clip"]
    and (cell["device"], cell["with_parameters"]) != ("none", True)
    and (
        cell["accumulation"] == (4 if cell["device"] == "nvme" else 1)
        if cell["dtype"] == "bf16"
        else (cell["accumulation"], cell["device"]) == (1, "nvme")
    )
]
QUICK += [
    {**cell, "update_device": "cpu"}
    for cell in QUICK
    if cell["dtype"] == "bf16" and (cell["device"] == "none" or cell["with_parameters"])
]
OTHERS = [{**cell, "update_device": each} for cell in cells() for each in ("device", "cpu")]
_ON_THE_PROCESSOR: dict[tuple[Any, ...], dict[str, Any]] = {}


def on_the_processor(cell: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Return the outcome of a cell with everything on the processor's own tier."""
    key = (cell["dtype"], cell["accumulation"], cell["clip"])
    if key not in _ON_THE_PROCESSOR:
        plain = {**cell, "device": "none", "with_parameters": False, "update_device": "auto"}
        plain.pop("device_memory", None)
        with pytest.MonkeyPatch.context() as undo:
            undo.setattr(zero.planning, "open_device", zero.devices.open_device)
            _ON_THE_PROCESSOR[key] = run_cell(plain, str(scratch))
    return _ON_THE_PROCESSOR[key]


@pytest.mark.nvme
@pytest.mark.parametrize(
    "cell",
    [*QUICK, *(pytest.param(cell, marks=pytest.mark.full) for cell in OTHERS)],
    ids=cell_name,
)
def test_bits_are_those_of_the_processor(
    cell: dict[str, Any], made: list[SimulatedDevice], module_scratch: Path
) -> None:
    expected = on_the_processor(cell, module_scratch)
    found = run_cell(cell, str(module_scratch))
    is_all_there = cell["device"] == "none" and cell.get("update_device", "auto") != "cpu"
    assert is_all_there or min(made[-1].copied_bytes.values()) > 0
    assert found["mismatches"] == []
    assert all(ours == reference > 0 for reference, ours in found["norms"])
    assert found["digest"] == expected["digest"]
    assert found["losses"] == expected["losses"]
    for step in found["ledger"]:
        assert step["read"] == step["planned_read"]
        assert step["written"] == step["planned_written"]
        assert (step["read"] > 0) == (cell["device"] == "nvme")


RANK_CELLS = [
    {
        "device": device,
        "with_parameters": stage == 3 and device != "none",
        "accumulation": accumulation,
        "clip": CLIP,
        "dtype": "bf16",
        "update_device": update_device,
        "stage": stage,
    }
    for device, accumulation, update_device, stage in (
        ("nvme", 2, "auto", 3),
        ("cpu", 2, "cpu", 3),
        ("cpu", 2, "auto", 2),
        ("none", 2, "auto", 3),
    )
]


def rank_outcomes(rank: int, world_size: int, scratch: Path) -> dict[str, Any]:
    """Run cells on this rank, one on the processor and the others beside late devices."""
    outcomes = [run_cell({**RANK_CELLS[-1], "update_device": "auto"}, str(scratch))]
    changed = [digest_with_changes()]
    devices = []

    def open_simulated(_wanted: str) -> SimulatedDevice:
        devices.append(SimulatedDevice(10 * rank + len(devices)))
        return devices[-1]

    zero.planning.open_device = open_simulated  # this process is the rank's own
    for cell in RANK_CELLS[: 4 if world_size == 2 else 1]:
        outcomes.append(run_cell(cell, str(scratch)))
        outcomes[-1]["copied"] = dict(devices[-1].copied_bytes)
    changed.append(digest_with_changes())
    return {"outcomes": outcomes, "changed": changed, "refusal": refusal_of_a_shared_device()}


class Changing(TinyTransformer):
    """Changes a parameter that one rank has alone, just before its block runs."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        with torch.no_grad():
            self.blocks[1].gain.mul_(0.5)
        logits = self.head(self.norm(self.blocks[1](x)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def digest_with_changes() -> str:
    torch.manual_seed(0)
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="1GB")
    engine, _, _, _ = zero.initialize(model=Changing(), config=config)
    for step in range(4):
        engine.backward(engine(*make_batch(step, engine.global_rank)))
        engine.step()
    if not engine._runtime.store.device.is_host:
        assert ("prefetch", engine._runtime.segments[-1].spec.name) in engine.ledger.events
    found = digest(full_parameters(engine))
    engine.destroy()
    return found


def refusal_of_a_shared_device() -> str:
    def open_shared(_wanted: str) -> SimulatedDevice:
        device = SimulatedDevice()
        device.identity = "GPU-7"
        return device

    zero.planning.open_device = open_shared
    try:
        zero.initialize(model=make_model(), config=make_config(host_memory="1GB"))
    except zero.ConfigError as error:
        return str(error)
    return "none"


@pytest.mark.nvme
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_several_ranks_have_the_bits_of_the_processor(world_size: int, scratch: Path) -> None:
    ranks = on_ranks(lambda rank: rank_outcomes(rank, world_size, scratch), world_size, scratch)
    for rank in ranks:
        expected, *others = rank["outcomes"]
        assert len(others) == (4 if world_size == 2 else 1)
        for found in others:
            assert found["world_size"] == world_size
            assert min(found["copied"].values()) > 0 or found["cell"]["device"] == "none"
            is_ahead = found["cell"]["stage"] == 3 and found["cell"]["device"] != "nvme"
            assert (found["came_ahead"] > 0) == is_ahead
            assert found["mismatches"] == []
            assert all(ours == reference > 0 for reference, ours in found["norms"])
            assert found["digest"] == expected["digest"] == ranks[0]["outcomes"][0]["digest"]
            assert found["losses"] == expected["losses"]
        assert len({*rank["changed"], *ranks[0]["changed"]}) == 1
        assert "ranks [0, 1" in rank["refusal"]
        assert "compute on the same GPU (GPU-7)" in rank["refusal"]


@pytest.mark.nvme
@pytest.mark.parametrize("state_format", ["bf16", "compact"])
def test_lossy_formats_round_alike_on_device_and_processor(
    state_format: str, made: list[SimulatedDevice], module_scratch: Path
) -> None:
    def train(device: str, update_device: str) -> dict[str, torch.Tensor]:
        config = make_config(
            parameters=device,
            optimizer=device,
            nvme_path=str(module_scratch),
            dtype="bf16",
            host_memory="400KB" if device == "nvme" else "1GB",
            sub_group_size=4096,
            state_format=state_format,
        )
        config["tiers"]["update_device"] = update_device
        model = make_model(dtype=torch.bfloat16)
        engine, _, _, _ = zero.initialize(model=model, config=config)
        for step in range(3):
            engine.backward(engine(*make_batch(step)))
            engine.step()
        found = {name: each.detach().clone() for name, each in model.named_parameters()}
        engine.destroy()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.planning, "open_device", zero.devices.open_device)
        expected = train("none", "auto")
    for device, update_device in (("cpu", "device"), ("nvme", "device"), ("cpu", "cpu")):
        found = train(device, update_device)
        assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert len(made) == 3


@pytest.mark.nvme
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_spare_device_memory_is_used(
    device: str, made: list[SimulatedDevice], module_scratch: Path
) -> None:
    cell = next(
        each
        for each in QUICK
        if each["dtype"] == "bf16" and each["with_parameters"] and each["device"] == device
    )
    engines = []
    with pytest.MonkeyPatch.context() as patch:
        initialize = zero.initialize

        def remember(**kwargs: Any) -> Any:
            made_engine = initialize(**kwargs)
            engines.append(made_engine[0])
            return made_engine

        patch.setattr(zero, "initialize", remember)
        found = run_cell({**cell, "device_memory": "12MB"}, str(module_scratch))
    plan = engines[-1].plan.memory
    tiers = {
        (section, plan.segment_tier(index, section))
        for index in range(len(plan.request.segments))
        for section in Section
    }
    below = Tier.HOST if device == "cpu" else Tier.NVME
    assert {(Section.PARAMETER, Tier.DEVICE), (Section.GRADIENT, Tier.DEVICE)} <= tiers
    assert {(Section.STATE, Tier.DEVICE), (Section.STATE, below)} <= tiers
    assert plan.device_bytes <= 12_000_000
    of_segments = [{each.tier(Section.STATE) for each in groups} for groups in plan.by_segment]
    assert {Tier.DEVICE, below} in of_segments  # state of one segment rests on both
    assert made[-1].copied_bytes["out"] > 0
    expected = on_the_processor(cell, module_scratch)
    assert found["mismatches"] == []
    assert found["digest"] == expected["digest"]
    assert found["losses"] == expected["losses"]


@pytest.mark.parametrize("tiers", list(itertools.product(("none", "cpu"), repeat=2)), ids="-".join)
def test_memory_lies_where_the_plan_says(
    tiers: tuple[str, str], made: list[SimulatedDevice]
) -> None:
    parameters, optimizer = tiers
    config = make_config(parameters=parameters, optimizer=optimizer, host_memory="1GB")
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    store = engine._runtime.store
    assert store.device is made[-1]
    names = {"none": Tier.DEVICE, "cpu": Tier.HOST}
    for group in store.plan.sub_groups:
        for section in Section:
            tier = names[parameters if section is Section.PARAMETER else optimizer]
            assert group.tier(section) is tier
            memory = store.section_memory(group, section, None)
            assert isinstance(memory, DeviceMemory) == (tier is Tier.DEVICE)
    assert all(segment.is_in_place == (parameters == "none") for segment in _segments(engine))
    engine.backward(engine(*make_batch(0)))
    engine.step()
    for line in engine.memory_report()["lines"]:
        if line["actual_bytes"] is not None:
            assert line["actual_bytes"] <= line["planned_bytes"] or line["tier"] == "host", line
    engine.destroy()


def test_parameters_are_read_and_written_outside_their_windows(made: list[SimulatedDevice]) -> None:
    config = make_config(parameters="cpu", optimizer="none", host_memory="1GB", dtype="bf16")
    model = make_model(dtype=torch.bfloat16)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine, _, _, _ = zero.initialize(model=model, config=config)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.clone(), before[name])
    weight = model.blocks[0].up.weight
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(weight.clone(), before["blocks.0.up.weight"] * 2)
    masters = zero.safe_get_full_fp32_param(weight)
    assert torch.equal(masters, (before["blocks.0.up.weight"] * 2).float())
    engine.backward(engine(*make_batch(0)))
    gradient = zero.safe_get_full_grad(weight)
    assert gradient is not None
    assert gradient.abs().sum() > 0
    zero.safe_set_full_grad(weight, torch.zeros_like(gradient))
    assert not zero.safe_get_full_grad(weight).any()
    engine.step()
    assert made[-1].copied_bytes["out"] > 0
    engine.destroy()


class Checkpointed(TinyTransformer):
    """Runs each block again in its backward."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_no_more_than_planned_is_unsharded_while_blocks_run_again(
    made: list[SimulatedDevice],
) -> None:
    torch.manual_seed(0)
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="1GB")
    engine, _, _, _ = zero.initialize(model=Checkpointed(layers=8), config=config)
    for step in range(3):
        engine.backward(engine(*make_batch(step)))
        engine.step()
    memory = engine.plan.memory
    assert 0 < engine.ledger.peaks[LIVE_PARAMETERS] <= memory.live_parameter_bytes
    whole = 4 * sum(each.numel() for each in engine.module.parameters())
    assert memory.live_parameter_bytes < 0.6 * whole
    # The last block does not come ahead of its backward: the model gives its loss alone.
    assert sum(event == "prefetch" for event, _ in engine.ledger.events) == 2 * (8 + 7)
    assert made[-1].copied_bytes["in"] > 0
    engine.destroy()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("update_device", "device", 'tiers.update_device is "device", but'),
        ("device", "cuda", 'tiers.device is "cuda", but torch'),
    ],
)
def test_a_device_that_is_not_there_is_refused(key: str, value: str, message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch finds a CUDA device")
    config = make_config(host_memory="1GB")
    config["tiers"][key] = value
    with pytest.raises(zero.ConfigError, match=message):
        zero.initialize(model=make_model(), config=config)


def test_a_write_that_moves_no_counter_reaches_the_master(made: list[SimulatedDevice]) -> None:
    def train(*, on_device: bool) -> dict[str, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            if not on_device:
                patch.setattr(zero.planning, "open_device", zero.devices.open_device)
            config = make_config(optimizer="cpu", host_memory="1GB", dtype="bf16")
            config["tiers"]["state_format"] = "fp32"
            model = make_model(dtype=torch.bfloat16)
            engine, _, _, _ = zero.initialize(model=model, config=config)
        for step in range(6):
            if step == 4:
                model.blocks[0].up.weight.data.mul_(2)
            engine.backward(engine(*make_batch(step)))
            if step == 5:
                model.blocks[1].up.weight.data.zero_()
            engine.step()
        found = {name: each.detach().clone() for name, each in model.named_parameters()}
        engine.destroy()
        return found

    expected, found = train(on_device=False), train(on_device=True)
    assert len(made) == 1
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_next_unit_is_copied_while_one_computes(
    accumulation: int, made: list[SimulatedDevice]
) -> None:
    config = make_config(
        parameters="cpu", optimizer="cpu", host_memory="1GB", accumulation=accumulation
    )
    engine, _, _, _ = zero.initialize(model=make_model(layers=4), config=config)
    for step in range(3):
        for _ in range(accumulation):
            engine.backward(engine(*make_batch(step)))
        engine.step()
    blocks = [unit for unit in engine._runtime.units if unit.index]
    ahead = [name for event, name in engine.ledger.events if event == "prefetch"]
    # The first micro-batch records the order; from then on every block comes ahead, both ways, but
    # the last in its backward, because the model gives its loss alone: [Note: at the loss].
    assert len(ahead) == (2 * len(blocks) - 1) * (3 * accumulation - 1)
    assert not any(segment.coming.is_coming for segment in _segments(engine))
    assert all(not unit.live_bytes for unit in engine._runtime.units)
    weight = engine.module.blocks[1].up.weight
    engine(*make_batch(9))  # a forward alone leaves nothing behind that a change could not reach
    with torch.no_grad():
        weight.zero_()
    assert not weight.clone().any()
    loss = engine(*make_batch(9))
    with zero.GatheredParameters([weight]):
        assert not weight.any()
    assert torch.isfinite(loss)
    assert made[-1].copied_bytes["in"] > 0
    engine.destroy()


def _segments(engine: zero.ZeroEngine) -> Any:
    return engine._runtime.segments


@pytest.mark.parametrize("link", [1e12, 1e6])
@pytest.mark.parametrize("wanted", ["auto", "device"])
def test_auto_updates_where_it_was_measured_to_be_sooner_over(
    wanted: str, link: float, made: list[SimulatedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    back = link if link == 1e12 else 1e4  # else parameters that come back are as slow
    rates = UpdateRates(host_numel_per_s=1e9, in_bytes_per_s=link, out_bytes_per_s=back)
    monkeypatch.setattr(zero.planning, "measure_update", lambda *_: rates)
    config = make_config(optimizer="cpu", host_memory="64MB", dtype="bf16")
    config["tiers"]["update_device"] = wanted
    engine, _, _, _ = zero.initialize(model=make_model(dtype=torch.bfloat16), config=config)
    is_on_device = wanted == "device" or link == 1e12
    assert engine.plan.memory.request.update_on_device is is_on_device
    sharing = engine._runtime.store.sharing
    assert (sharing is not None) is (is_on_device and wanted == "auto")
    if sharing is not None:
        sharing.host_count = 0
    engine.backward(engine(*make_batch(0)))
    engine.step()
    copied = made[-1].copied_bytes["in"]
    state = sum(group.numel for group in engine.plan.memory.sub_groups) * 10
    assert (copied > state) is is_on_device  # else only parameters come back
    engine.destroy()


def test_rates_of_the_host_are_measured() -> None:
    for state_format in StateFormat:
        assert 1e6 < host_rate(state_format, 1, 1 << 20) < 1e12
    assert measure_update(SimulatedDevice(), StateFormat.EXACT, 1) is None


@pytest.mark.parametrize("tiers", [("none", "cpu"), ("cpu", "cpu"), ("none", "none")], ids="-".join)
def test_the_host_waits_once_a_step(made: list[SimulatedDevice], tiers: tuple[str, str]) -> None:
    parameters, optimizer = tiers
    config = make_config(
        parameters=parameters, optimizer=optimizer, host_memory="1GB", dtype="bf16"
    )
    config["tiers"]["update_device"] = "device"
    engine, _, _, _ = zero.initialize(model=make_model(dtype=torch.bfloat16), config=config)
    waits = []
    for step in range(3):
        engine.backward(engine(*make_batch(step)))
        before = made[-1].wait_count
        engine.step()
        waits.append(made[-1].wait_count - before)
    assert waits == [1, 1, 1]
    engine.destroy()


def test_a_step_that_is_refused_leaves_no_answers_of_its_audit(made: list[SimulatedDevice]) -> None:
    config = make_config(parameters="cpu", optimizer="cpu", host_memory="1GB", dtype="bf16")
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 40
    engine, _, _, _ = zero.initialize(model=make_model(dtype=torch.bfloat16), config=config)
    block = engine.module.blocks[0]
    engine.backward(engine(*make_batch(0)))
    engine.step()

    def write(layer: torch.nn.Linear, _: object) -> None:
        layer.weight.data.mul_(2)

    with block.up.register_forward_pre_hook(write):
        loss = engine(*make_batch(1))
    engine.backward(loss)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight were changed .* is lost"):
        engine.step()
    assert any(segment.is_in_place for segment in _segments(engine))
    block.norm1.weight.data.mul_(3)  # shown by checksums alone
    masters = zero.safe_get_full_fp32_param(block.norm1.weight)
    assert masters is not None
    assert torch.equal(masters, block.norm1.weight.detach().float())
    assert made[-1].copied_bytes["out"] > 0
    engine.destroy()
