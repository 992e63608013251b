"""The calling habits of the field, accumulation, clipping, groups, meta models, inference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import zero
from aio_ops import open_engine
from estimators import Tier
from tests.support.configs import BETAS, EPS, LR, WEIGHT_DECAY, make_config
from tests.support.observe import digest, full_gradients, full_parameters
from tests.support.tiny import TinyTransformer, make_batch, make_model

MEMORY = "1GB"


def paged(scratch: Path, **changes: Any) -> dict[str, Any]:
    return make_config(
        **{
            "parameters": "nvme",
            "optimizer": "nvme",
            "nvme_path": str(scratch),
            "host_memory": "40KB",
            "sub_group_size": 1024,
            **changes,
        }
    )


def train(engine: zero.ZeroEngine, steps: int, accumulation: int = 1, *, per_window: bool) -> str:
    for step in range(steps):
        for micro in range(accumulation):
            engine.backward(engine(*make_batch(step * accumulation + micro)))
            if not per_window:
                assert engine.is_gradient_accumulation_boundary() == (micro == accumulation - 1)
                engine.step()
        if per_window:
            engine.step()
    assert engine.global_steps == steps
    return digest(full_parameters(engine))


@pytest.mark.nvme
def test_stepping_per_micro_batch_and_per_window_are_the_same(scratch: Path) -> None:
    results = []
    for per_window in (False, True):
        engine, _, _, _ = zero.initialize(model=make_model(), config=paged(scratch, accumulation=3))
        results.append(train(engine, 2, 3, per_window=per_window))
        engine.destroy()
    assert results[0] == results[1]


def test_a_plain_backward_with_the_loss_divided_is_the_same() -> None:
    results = []
    for plain in (False, True):
        engine, optimizer, _, _ = zero.initialize(
            model=make_model(), config=make_config(host_memory=MEMORY, accumulation=2)
        )
        for step in range(2):
            for micro in range(2):
                loss = engine(*make_batch(2 * step + micro))
                if plain:
                    (loss / 2).backward()
                else:
                    engine.backward(loss)
            if plain:
                optimizer.step()
            else:
                engine.step()
        results.append(digest(full_parameters(engine)))
        engine.destroy()
    assert results[0] == results[1]


def test_two_losses_of_one_forward_are_one_micro_batch() -> None:
    engine, _, _, _ = zero.initialize(
        model=make_model(), config=make_config(host_memory=MEMORY, accumulation=2)
    )
    loss = engine(*make_batch(0))
    loss.backward(retain_graph=True)
    once = full_gradients(engine)
    loss.backward()
    twice = full_gradients(engine)
    assert all(np.array_equal(2 * once[name], twice[name]) for name in once)
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert engine.global_steps == 0
    engine.backward(engine(*make_batch(1)))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.nvme
def test_accumulated_gradients_equal_one_large_batch(scratch: Path) -> None:
    """Field report G3: micro-batches after the first were dropped for 18 months."""
    config = paged(scratch, accumulation=4)
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    for micro in range(4):
        engine.backward(engine(*make_batch(micro)))
    ours = full_gradients(engine)
    assert engine.ledger.snapshot().bytes_by_class["nvme read gradient"] > 0
    model = make_model()
    for micro in range(4):
        (model(*make_batch(micro)) / 4).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert np.array_equal(ours[name], parameter.grad.reshape(-1).numpy()), name
    engine.destroy()


def test_the_norm_is_reported_before_and_after_clipping() -> None:
    engine, _, _, _ = zero.initialize(
        model=make_model(), config=make_config(host_memory=MEMORY, clip=0.01)
    )
    assert engine.get_global_grad_norm() is None
    engine.backward(engine(*make_batch(0)))
    model = make_model()
    model(*make_batch(0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()
    engine.step()
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm == pytest.approx(expected, rel=1e-5)
    assert norm > 0.01
    assert engine.get_clipped_grad_norm() == pytest.approx(0.01, rel=1e-4)
    with pytest.warns(RuntimeWarning, match="is skipped"):
        engine.backward(engine(*make_batch(0)) * float("nan"))
        engine.step()
    assert engine.get_clipped_grad_norm() is None
    engine.destroy()


@pytest.mark.nvme
def test_a_norm_that_is_not_finite_skips_the_update(scratch: Path) -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=paged(scratch))
    engine.backward(engine(*make_batch(0)))
    engine.step()
    before = full_parameters(engine)
    engine.backward(engine(*make_batch(1)) * float("inf"))
    words = "step 2: the gradient norm is nan, because of position, embedding.weight"
    with pytest.warns(RuntimeWarning, match=words):
        engine.step()
    assert engine.skipped_steps == 1
    assert digest(full_parameters(engine)) == digest(before)
    engine.backward(engine(*make_batch(1)))
    engine.step()
    assert digest(full_parameters(engine)) != digest(before)
    engine.destroy()


def test_param_groups_are_kept_and_read_at_each_step() -> None:
    model, plain = make_model(), make_model()

    def groups(each: nn.Module) -> list[dict[str, Any]]:
        named = list(each.named_parameters())
        return [
            {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0, "name": "small"},
            {"params": []},
            {"params": [p for n, p in named if p.ndim >= 2], "lr": 3e-3},
        ]

    config = make_config(host_memory=MEMORY)
    with warnings.catch_warnings():
        engine, optimizer, _, _ = zero.initialize(
            model=model, model_parameters=groups(model), config=config
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert len(optimizer.param_groups) == 3
    assert optimizer.param_groups[0]["name"] == "small"
    reference = torch.optim.AdamW(
        groups(plain), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    for step in range(4):
        for group in (optimizer.param_groups[2], reference.param_groups[2]):
            group["lr"] = 3e-3 / (step + 1)
        engine.backward(engine(*make_batch(step)))
        engine.step()
        plain(*make_batch(step)).backward()
        reference.step()
        reference.zero_grad()
    for name, values in full_parameters(engine).items():
        theirs = dict(plain.named_parameters())[name].detach().reshape(-1).numpy()
        assert np.abs(values - theirs).max(initial=0) < 1e-6, name
    engine.destroy()


def test_a_torch_optimizer_and_a_scheduler_bound_to_it_work() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    config = make_config(host_memory=MEMORY)
    del config["optimizer"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        engine, ours, _, returned = zero.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
        )
        assert returned is scheduler
        rates = []
        for step in range(3):
            rates.append(engine.get_lr()[0])
            engine.backward(engine(*make_batch(step)))
            engine.step()
    assert rates == pytest.approx([0.1 * LR, 0.325 * LR, 0.55 * LR])
    assert ours.param_groups is optimizer.param_groups
    engine.destroy()


def test_other_optimizers_are_refused_by_name() -> None:
    model = make_model()
    config = make_config(host_memory=MEMORY)
    del config["optimizer"]
    for optimizer, words in (
        (torch.optim.LBFGS(model.parameters(), lr=0.1), "LBFGS"),
        (torch.optim.SparseAdam(model.parameters()), "SparseAdam"),
    ):
        with pytest.raises(zero.ConfigError, match=words):
            zero.initialize(model=model, optimizer=optimizer, config=config)


@pytest.mark.nvme
def test_without_an_optimizer_the_engine_only_runs_forward(scratch: Path) -> None:
    config = paged(scratch, optimizer="none", host_memory="20KB")
    del config["optimizer"]
    engine, optimizer, _, _ = zero.initialize(model=make_model(), config=config)
    assert optimizer is None
    with torch.no_grad():
        loss = engine(*make_batch(0))
    assert engine.ledger.snapshot().nvme_read_bytes > 0
    assert loss.item() == make_model()(*make_batch(0)).item()
    with pytest.raises(zero.ConfigError, match="no optimizer"):
        engine.backward(engine(*make_batch(0)))
    with pytest.raises(zero.ConfigError, match="no optimizer"):
        engine.step()
    engine.destroy()


@pytest.mark.nvme
def test_frozen_parameters_are_clean_pages(scratch: Path) -> None:
    results = []
    for config in (paged(scratch), make_config(host_memory=MEMORY)):
        model = make_model()
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(requires_grad=False)
        engine, _, _, _ = zero.initialize(model=model, config=config)
        before = full_parameters(engine)
        train(engine, 3, per_window=False)
        after = full_parameters(engine)
        for name, values in before.items():
            frozen = name.startswith("blocks.0.")
            assert not values.size or np.array_equal(values, after[name]) == frozen, name
        results.append(digest(after))
        engine.destroy()
    assert results[0] == results[1]


def init_module(module: nn.Module) -> None:
    """Initialise one module so that the same model comes out wherever it is built."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > 1:
            parameter.normal_(0, 0.05, generator=generator)
        else:
            parameter.fill_(0.5)


@pytest.mark.nvme
def test_a_meta_model_is_built_unit_by_unit(scratch: Path) -> None:
    with torch.device("meta"):
        model = TinyTransformer()
    model.head.weight = model.embedding.weight
    parameters = list(model.parameters())
    engine, _, _, _ = zero.initialize(model=model, config=paged(scratch), init_fn=init_module)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    plain = make_model()
    with torch.no_grad():
        for module in plain.modules():
            init_module(module)
    theirs = {name: each.detach().reshape(-1).numpy() for name, each in plain.named_parameters()}
    assert all(np.array_equal(values, theirs[n]) for n, values in full_parameters(engine).items())
    assert engine(*make_batch(0)).item() == plain(*make_batch(0)).item()
    engine.backward(engine(*make_batch(0)))
    engine.step()
    engine.destroy()


def test_a_meta_module_without_an_initialiser_is_named() -> None:
    with torch.device("meta"):
        model = TinyTransformer()
    with pytest.raises(zero.ConfigError, match=r"init_fn"):
        zero.initialize(model=model, config=make_config(host_memory=MEMORY))
    with torch.device("meta"):
        forgotten = TinyTransformer()
    with pytest.raises(zero.ConfigError, match="left unset"):
        zero.initialize(
            model=forgotten, config=make_config(host_memory=MEMORY), init_fn=lambda module: None
        )


def test_training_data_makes_a_loader() -> None:
    data = TensorDataset(torch.arange(10))
    _, _, loader, _ = zero.initialize(
        model=make_model(), config=make_config(host_memory=MEMORY), training_data=data
    )
    assert loader is not None
    batches = [batch for (batch,) in loader]
    assert [len(batch) for batch in batches] == [2] * 5
    assert sorted(torch.cat(batches).tolist()) == list(range(10))


@pytest.mark.nvme
def test_checkpointed_and_reused_blocks_train_to_the_same_bits(scratch: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(TinyTransformer):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            x = self.blocks[0](x)
            logits = self.head(self.norm(x))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    results = []
    for config in (paged(scratch), make_config(host_memory=MEMORY)):
        torch.manual_seed(1)
        engine, _, _, _ = zero.initialize(model=Checkpointed(), config=config)
        results.append(train(engine, 3, per_window=False))
        engine.destroy()
    assert results[0] == results[1]


@pytest.mark.nvme
def test_the_arena_is_exactly_the_plan(scratch: Path) -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=paged(scratch))
    store, plan = engine._runtime.store, engine.plan.memory
    used = store.residents.arena_bytes(Tier.HOST) + store.slot_arena.used_bytes
    assert used == plan.host_bytes <= plan.host_budget_bytes
    assert plan.slots.total_bytes > 0
    report = engine.memory_report()
    assert report["host_bytes"] == plan.host_bytes
    assert sum(row["bytes"] for row in report["rows"] if row["tier"] == "nvme") == (
        plan.swap_file_bytes
    )
    engine.destroy()


def test_no_launcher_and_no_environment_is_world_size_one() -> None:
    engine, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory=MEMORY))
    assert (engine.world_size, engine.global_rank) == (1, 0)
    assert not torch.distributed.is_initialized()
    engine.destroy()


def test_parts_of_the_model_that_are_called_alone_count_as_micro_batches() -> None:
    engine, _, _, _ = zero.initialize(
        model=make_model(), config=make_config(host_memory=MEMORY, accumulation=2)
    )
    for _ in range(2):
        engine.module.blocks[0](torch.randn(1, 4, 16)).square().mean().backward()
        engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_writes_between_steps_are_trained_from_wherever_the_state_rests() -> None:
    """A plain write to a parameter that rests in place resets its low bits too."""
    results = []
    for rounded in (False, True):
        engine, _, _, _ = zero.initialize(
            model=make_model(), config=make_config(host_memory=MEMORY, dtype="bf16")
        )
        weight = engine.module.blocks[0].up.weight
        engine.backward(engine(*make_batch(0)))
        engine.step()
        if rounded:
            with zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.fill_(0.125)
        else:
            with torch.no_grad():
                weight.fill_(0.125)
        engine.backward(engine(*make_batch(1)))
        engine.step()
        engine.backward(engine(*make_batch(2)))
        engine.step()
        results.append(full_parameters(engine)["blocks.0.up.weight"])
        engine.destroy()
    assert np.array_equal(*results)


def test_a_model_of_another_type_or_device_is_refused() -> None:
    with pytest.raises(zero.ConfigError, match=r"float64.*float32, bfloat16"):
        zero.initialize(model=make_model().double(), config=make_config(host_memory=MEMORY))
    with pytest.raises(zero.ConfigError, match="no parameter of the model requires a gradient"):
        zero.initialize(model=nn.ReLU(), config=make_config(host_memory=MEMORY))


def test_a_model_without_parameters_runs_forward() -> None:
    config = make_config(host_memory=MEMORY)
    del config["optimizer"]
    engine, _, _, _ = zero.initialize(model=nn.ReLU(), config=config)
    assert engine(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    engine.destroy()


@pytest.mark.nvme
@pytest.mark.parametrize("kind", ["io_uring", "kernel_aio", "threads", "python"])
def test_every_engine_trains_to_the_same_bits(scratch: Path, kind: str) -> None:
    try:
        open_engine(kind).close()
    except OSError as error:
        pytest.skip(f"{kind} cannot be had here: {error}")
    engine, _, _, _ = zero.initialize(model=make_model(), config=paged(scratch, engine=kind))
    assert engine.plan.engine_name == kind
    paged_digest = train(engine, 3, per_window=False)
    assert engine.ledger.snapshot().nvme_write_bytes > 0
    engine.destroy()
    plain, _, _, _ = zero.initialize(model=make_model(), config=make_config(host_memory=MEMORY))
    assert train(plain, 3, per_window=False) == paged_digest
    plain.destroy()


def test_the_engine_counts_and_tells_under_the_names_of_the_field() -> None:
    config = make_config(host_memory=MEMORY, accumulation=2)
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    applied = []
    for index in range(4):
        loss = engine(*make_batch(index))
        assert loss.device == engine.device
        engine.backward(loss if index < 3 else loss * float("inf"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, False]
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 4, 1)
    assert engine.global_samples == 2 * engine.train_batch_size()
    assert (engine.local_rank, engine.dp_world_size) == (0, 1)
    assert engine.zero_optimization_stage() == 3
    engine.destroy()


def test_what_neither_engine_nor_model_has_is_said_so() -> None:
    model = make_model()
    model.tag = "mine"
    engine, _, _, _ = zero.initialize(model=model, config=make_config(host_memory=MEMORY))
    assert engine.tag == "mine"
    assert not hasattr(engine, "nothing")
    words = "the engine has no attribute 'nothing', nor has the model .TinyTransformer."
    with pytest.raises(AttributeError, match=words):
        _ = engine.nothing
    engine.destroy()
