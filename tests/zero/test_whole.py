"""Optimizers of whole tensors: on every tier and world size as unsharded torch, saved, loaded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero
import zero.planning
from tests.support.configs import make_config
from tests.support.fork_ranks import on_ranks
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiny import make_batch, make_model
from zero.errors import ConfigError, PlanError
from zero.lamb import Lamb
from zero.whole import needs_whole_tensors

pytestmark = pytest.mark.nvme

CLIP = 0.5
STEPS = 4
LAMB = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.01}


class Declared(optim.Optimizer):
    """Subtracts the mean of each row of the gradient, and says that it sees the whole."""

    needs_whole_tensors = True

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                state = self.state[p]
                means = p.grad.flatten(1).mean(1) if p.dim() > 1 else p.grad.mean(0, keepdim=True)
                state["rows"] = state.get("rows", 0.0) + means
                shape = [-1] + [1] * (p.dim() - 1)
                p.sub_(group["lr"] * (p.grad + state["rows"].view(shape)))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return two matrices and freeze all else: Muon takes no others, and of 3 ranks 2 own one."""
    chosen = [model.blocks[1].attention.weight, model.blocks[1].up.weight]
    for each in model.parameters():
        each.requires_grad_(any(each is one for one in chosen))
    return chosen


def filled(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.numel()]


OPTIMIZERS: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "adafactor": lambda m: optim.Adafactor(filled(m), lr=1e-2, weight_decay=0.01, eps=(1e-4, 1e-3)),
    "lamb": lambda m: Lamb(filled(m), **LAMB),
    "declared": lambda m: Declared(filled(m)),
    "muon": lambda m: optim.Muon(matrices(m), lr=1e-3),
}


def config(tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"parameters": tier, "optimizer": tier, "clip": CLIP, **more}
    if tier == "nvme":
        options |= {"nvme_path": str(folder), "sub_group_size": 1024}
    found = make_config(**options)
    del found["optimizer"]
    return found


BUDGETS = {
    "adafactor": ("32KB", "60KB", "90KB"),
    "lamb": ("76KB", "90KB", "114KB"),
    "declared": ("30KB", "60KB", "90KB"),
    "muon": ("44KB", "62KB", "82KB"),
}
"""For one rank, for two and for three: the whole tensors fit, the rest does not."""


def start(name: str, tier: str, folder: Path, ranks: int = 1, **more: Any) -> zero.ZeroEngine:
    if tier == "nvme":
        more = {"host_memory": BUDGETS[name][ranks - 1], **more}
    model = make_model()
    given = OPTIMIZERS[name](model)
    return zero.initialize(model=model, optimizer=given, config=config(tier, folder, **more))[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


def far_from(engine: zero.ZeroEngine, wanted: list[torch.Tensor]) -> float:
    with zero.GatheredParameters(list(engine.module.parameters())):
        pairs = list(zip(engine.module.parameters(), wanted, strict=True))
        return max(float((a.detach() - b).abs().max()) for a, b in pairs if a.numel())


@pytest.fixture(scope="module")
def unsharded() -> Iterator[Callable[[str], list[torch.Tensor]]]:
    made: dict[str, list[torch.Tensor]] = {}

    def trained(name: str) -> list[torch.Tensor]:
        if name not in made:
            model = make_model()
            optimizer = OPTIMIZERS[name](model)
            start = copy.deepcopy(model)
            for step in range(STEPS):
                model(*make_batch(step)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            made[name] = [each.detach().clone() for each in model.parameters()]
            moved = list(zip(made[name], start.parameters(), strict=True))
            assert max(float((a - b).detach().abs().max()) for a, b in moved if a.numel()) > 1e-3
        return made[name]

    yield trained


def check_state_moves(engine: zero.ZeroEngine, tier: str) -> None:
    """What rests on NVMe is read and written once a step, to the byte; all else is in memory.

    fp32 parameters keep nothing else as state.
    """
    paged = engine.optimizer.fused.records.paged_bytes
    before = engine.ledger.snapshot()
    train(engine, STEPS, STEPS + 1)
    moved = engine.ledger.snapshot().minus(before)
    assert moved.bytes_by_class["nvme read state"] == paged
    assert moved.bytes_by_class["nvme write state"] == paged
    assert (paged > 0) == (tier == "nvme")
    assert paged <= engine.plan.memory.whole.area_bytes
    if tier != "nvme":
        assert moved.resident_bytes["host state"] > 0


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_unsharded_torch(unsharded, scratch: Path, name: str, tier: str) -> None:
    engine = start(name, tier, scratch)
    train(engine, 0, STEPS)
    if tier == "nvme":
        assert engine.ledger.snapshot().nvme_write_bytes > 0
    assert engine.plan.memory.request.whole.state_bytes > 0
    assert far_from(engine, unsharded(name)) <= 1e-6
    check_state_moves(engine, tier)
    engine.destroy()


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
    with pytest.raises(KeyError, match="'row_var' .*norm.bias; .*'step', 'variance'"):
        get(bias, "row_var")
    bias.requires_grad_(requires_grad=False)
    train(engine, 0, 1)
    assert get(bias, "variance") is None
    assert get(bias, "row_var") is None
    with pytest.raises(zero.ShardedAccessError, match="norm.bias has no variance: it is frozen"):
        set_(bias, torch.ones(16), "variance")
    engine.destroy()


def test_beside_a_device_it_runs_on_the_host(
    unsharded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late copies are."""
    devices: list[SimulatedDevice] = []

    def open_simulated(_wanted: str) -> SimulatedDevice:
        devices.append(SimulatedDevice(len(devices)))
        return devices[-1]

    monkeypatch.setattr(zero.planning, "open_device", open_simulated)
    engine = start("lamb", "cpu", tmp_path)
    assert devices
    train(engine, 0, STEPS)
    assert far_from(engine, unsharded("lamb")) <= 1e-6
    engine.destroy()


class GroupCount(Declared):
    """Counts its steps in its group, which one copy a parameter would count wrongly."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class OwnCount(Declared):
    """Counts its steps on itself."""

    count = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1


class CountedMomentum(optim.SGD):
    """Element-wise, and counts in its group."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.data.sub_(p.grad * group["lr"] / group["k"])


@pytest.mark.parametrize(
    ("kind", "word"), [(GroupCount, "'k'"), (OwnCount, "'count'"), (CountedMomentum, "'k'")]
)
def test_counting_outside_of_the_state_is_refused(kind: Any, word: str, tmp_path: Path) -> None:
    model = make_model()
    given = kind(filled(model), lr=1e-2)
    with pytest.raises(ConfigError, match=rf"changes {word} .*keep it in its state"):
        zero.initialize(model=model, optimizer=given, config=config("none", tmp_path))


def test_masters_of_16_bit_parameters_are_what_is_updated(scratch: Path) -> None:
    """Formats and tiers give the same bits: the arithmetic sees the same masters."""
    found = []
    for tier, state_format in (("none", "fp32"), ("cpu", "exact"), ("nvme", "compact")):
        engine = start("lamb", tier, scratch, dtype="bf16", state_format=state_format)
        train(engine, 0, 3)
        assert bool(engine.ledger.snapshot().nvme_write_bytes) == (tier == "nvme")
        masters = [zero.safe_get_full_fp32_param(each) for each in engine.module.parameters()]
        found.append(torch.cat([each.flatten() for each in masters if each is not None]))
        engine.destroy()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[0].bfloat16().float())


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_freezing_keeps_the_state(scratch: Path, tier: str) -> None:
    model = make_model()
    given = OPTIMIZERS["lamb"](model)
    engine = start("lamb", tier, scratch)
    for step in range(5):
        for each in (model, engine.module):
            each.blocks[0].up.requires_grad_(step not in (1, 2))
        model(*make_batch(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        given.step()
        given.zero_grad()
        train(engine, step, step + 1)
    assert far_from(engine, [each.detach() for each in model.parameters()]) <= 1e-6
    with pytest.raises(RuntimeError, match="Lamb keeps whole tensors"):
        zero.resize_parameter(engine, engine.module.blocks[1].up.weight, (40, 16))
    train(engine, 5, 6)  # nothing has changed
    engine.destroy()


def test_what_does_not_fit_is_refused_with_its_numbers(scratch: Path) -> None:
    with pytest.raises(PlanError, match=r"of them \d+ of an optimizer of whole tensors"):
        start("lamb", "nvme", scratch, host_memory="20KB")


def test_muon_by_name_is_muon_and_adamw(scratch: Path) -> None:
    """Matrices but embeddings and the output layer by Muon, each with its own rate.

    Without clipping gradients have the bits of unsharded torch's. Muon works in bf16, where an ulp
    of difference may grow to a thousandth of an update.
    """
    model = make_model()
    options = config("nvme", scratch, host_memory="62KB", clip=0.0)
    parameters = {"lr": 1e-2, "muon_lr": 1e-3, "momentum": 0.9, "eps": 1e-4, "weight_decay": 0.01}
    options["optimizer"] = {"type": "Muon", "params": parameters}
    model.embedding.weight.use_muon = False
    twin = make_model()
    engine = zero.initialize(model=model, config=options)[0]
    named = dict(twin.named_parameters())
    hidden = [p for n, p in named.items() if p.dim() == 2 and "embed" not in n]
    others = [p for p in filled(twin) if not any(p is each for each in hidden)]
    beside = [
        optim.Muon(hidden, lr=1e-3, momentum=0.9, weight_decay=0.01),
        optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01),
    ]
    for step in range(STEPS):
        twin(*make_batch(step)).backward()
        for each in beside:
            each.step()
            each.zero_grad()
    train(engine, 0, STEPS)
    assert engine.optimizer.fused.records.paged_bytes > 0
    assert far_from(engine, [each.detach() for each in twin.parameters()]) == 0.0
    engine.destroy()


def lamb_in_fp64(model: nn.Module, options: dict[str, Any]) -> tuple[list[torch.Tensor], set[str]]:
    """Return what LAMB makes of a model, by its formula, and at which bounds its ratios were."""
    masters = [each.detach().double() for each in model.parameters()]
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in masters]
    (beta1, beta2), seen = options["betas"], set()
    for step in range(STEPS):
        model(*make_batch(step)).backward()
        factor = 1.0
        if options.get("bias_correction", True):
            factor = (1 - beta2 ** (step + 1)) ** 0.5 / (1 - beta1 ** (step + 1))
        for i, p in enumerate(model.parameters()):
            g, (m, v) = p.grad.double(), moments[i]
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            moments[i] = m, v
            inside = options.get("eps_inside_sqrt", False)
            root = (v + options["eps"]).sqrt() if inside else v.sqrt() + options["eps"]
            move = m / root + options["weight_decay"] * masters[i]
            ratio = 1.0
            if masters[i].norm() > 0 and move.norm() > 0:
                ratio = float(masters[i].norm() / move.norm())
                if ratio > options.get("max_coeff", 10.0):
                    ratio = options.get("max_coeff", 10.0)
                    seen.add("max")
                if ratio < options.get("min_coeff", 0.01):
                    ratio = options.get("min_coeff", 0.01)
                    seen.add("min")
            masters[i] = masters[i] - options["lr"] * factor * ratio * move
            p.grad, p.data = None, masters[i].float()
    return masters, seen


@pytest.mark.parametrize(
    ("more", "bounds"),
    [
        ({}, {"min"}),
        ({"max_coeff": 0.5, "min_coeff": 0.08}, {"max", "min"}),
        ({"bias_correction": False, "eps_inside_sqrt": True, "min_coeff": 0.0}, {"max"}),
    ],
)
def test_lamb_by_name_is_its_formula(scratch: Path, more: dict[str, Any], bounds: set[str]) -> None:
    options = config("nvme", scratch, host_memory=BUDGETS["lamb"][0], clip=0.0)
    params = {**LAMB, "betas": [0.9, 0.99], "max_grad_norm": 0.0, **more}
    options["optimizer"] = {"type": "lamb", "params": params}
    engine = zero.initialize(model=make_model(), config=options)[0]
    train(engine, 0, STEPS)
    assert engine.optimizer.fused.records.paged_bytes > 0
    wanted, seen = lamb_in_fp64(make_model(), {**LAMB, **more})
    assert seen == bounds
    assert far_from(engine, wanted) <= 1e-6
    free, _ = lamb_in_fp64(make_model(), {**LAMB, **more, "max_coeff": 2e9, "min_coeff": 0.0})
    assert far_from(engine, free) > 2e-5  # the bounds count
    engine.destroy()
    options["optimizer"]["params"] = {"lr": 1e-3, "max_coef": 1.0}
    with pytest.raises(ConfigError, match=r'params.max_coef: unknown.*did you mean "max_coeff"'):
        zero.initialize(model=make_model(), config=options)
    options["optimizer"]["params"] = {"max_grad_norm": 1.0}
    with pytest.raises(ConfigError, match=r'max_grad_norm: .*write "gradient_clipping"'):
        zero.initialize(model=make_model(), config=options)


def test_lamb_says_what_it_cannot_use() -> None:
    given = [nn.Parameter(torch.ones(3))]
    for options, words in (
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff 2.0 is above max_coeff 1.0"),
        ({"betas": (0.9, 1.0)}, "below 1 are needed"),
        ({"lr": -1.0}, "a finite number of at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Lamb(given, **options)
    with pytest.raises(TypeError, match=r"\['trust'\] cannot be used with Lamb; known are"):
        Lamb(given, trust=1)
    # A class of that name that says nothing is taken for it.
    assert needs_whole_tensors(type("Lamb", (optim.SGD,), {})(given))
    assert not needs_whole_tensors(optim.SGD(given))


def test_the_norms_of_lamb_are_right_for_large_tensors() -> None:
    """Torch's own, which add up in fp32, are not: here by 2e-5."""
    start = torch.randn(1_000_001, generator=torch.Generator().manual_seed(1))
    given = nn.Parameter(start.clone())
    given.grad = start.sin()
    Lamb([given], lr=1.0, bias_correction=False, betas=(0.0, 0.0), eps=0.0).step()
    # The step is the sign of the gradient, so its norm is a root; its length is the parameter's.
    wanted = start.double().norm() / start.numel() ** 0.5
    assert float(((start - given.detach()).abs() / wanted - 1).abs().median()) < 1e-6
