"""Which parameter is stored how, and what users read and set of state in lossy formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero
from estimators import ElementType, StateFormat, UpdateRule, record_layout
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.errors import ConfigError

MEMORY = "1GB"


def formats_of(config: dict[str, Any]) -> dict[str, str]:
    """Return how the state of each parameter would be stored."""
    request = zero.plan_memory(make_model(extra=(40,)), config).memory.request
    return {
        name: request.format_of(segment).value
        for segment in request.segments
        for name in segment.names
    }


def compact(**tiers: Any) -> dict[str, Any]:
    config = make_config(dtype="bf16", host_memory=MEMORY, state_format="compact")
    config["tiers"].update(tiers)
    return config


def test_compact_keeps_embeddings_norms_and_one_dimension_exact() -> None:
    found = formats_of(compact())
    assert {found[name] for name in ("embedding.weight", "norm.weight", "extra.0")} == {"exact"}
    assert {found[f"blocks.0.{name}"] for name in ("up.bias", "norm1.bias", "gain")} == {"exact"}
    weights = [name for name in found if name.endswith(("up.weight", "attention.weight"))]
    assert len(weights) == 4
    assert {found[name] for name in weights} == {"compact"}


def test_the_first_pattern_that_matches_decides() -> None:
    rules = [
        {"parameters": "blocks.1.up.*", "state_format": "bf16"},
        {"parameters": "blocks.*.up.weight", "state_format": "fp32"},
        {"parameters": "embedding.weight", "state_format": "compact"},
    ]
    found = formats_of(compact(state_formats=rules))
    assert found["blocks.1.up.weight"] == found["blocks.1.up.bias"] == "bf16"
    assert found["blocks.0.up.weight"] == "fp32"
    assert found["embedding.weight"] == "compact"
    assert found["blocks.0.down.weight"] == "compact"


def test_a_pattern_without_a_parameter_is_refused() -> None:
    rules = [{"parameters": "layers.*", "state_format": "exact"}]
    with pytest.raises(ConfigError, match=r"'layers\.\*' matches no parameter"):
        formats_of(compact(state_formats=rules))


@pytest.mark.parametrize(
    ("state_format", "rule", "wanted"),
    [
        ("fp32", UpdateRule.ADAMW, 12),
        ("exact", UpdateRule.ADAMW, 10),
        ("bf16", UpdateRule.ADAM, 6),
        ("compact", UpdateRule.ADAMW, 3.125),
        ("exact", UpdateRule.LION, 6),
        ("compact", UpdateRule.ADAGRAD, 2 + 1 / 16),
        ("bf16", UpdateRule.SGD, 4),
    ],
)
def test_bytes_of_a_parameter(state_format: str, rule: UpdateRule, wanted: float) -> None:
    numel = 1 << 20
    layout = record_layout(StateFormat(state_format), ElementType.BF16, numel, rule)
    assert layout.size_bytes == wanted * numel
    for element, size in ((ElementType.FP32, 4), (ElementType.FP16, 8)):
        other = record_layout(StateFormat(state_format), element, numel, rule)
        assert other.size_bytes == (size + 4 * (len(rule.moments) - 1)) * numel


@pytest.mark.nvme
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("state_format", ["bf16", "compact"])
def test_what_is_read_and_set_again_stays(scratch: Path, device: str, state_format: str) -> None:
    config = make_config(
        parameters=device,
        optimizer=device,
        nvme_path=str(scratch),
        dtype="bf16",
        host_memory=MEMORY if device == "cpu" else 200_000,
        sub_group_size=4096,
        state_format=state_format,
    )
    digests = []
    for sets in (False, True):
        engine, _, _, _ = zero.initialize(model=make_model(), config=config)
        for step in range(3):
            engine.backward(engine(*make_batch(step)))
            engine.step()
            for parameter in engine.module.parameters() if sets else ():
                for name in ("exp_avg", "exp_avg_sq", "fp32_param"):
                    state = zero.safe_get_full_optimizer_state(parameter, name)
                    if name == "exp_avg_sq" and parameter.ndim == 2:
                        assert state.count_nonzero() > 0
                    zero.safe_set_full_optimizer_state(parameter, state, name)
        with zero.GatheredParameters(list(engine.module.parameters())):
            flat = torch.cat([each.detach().flatten() for each in engine.module.parameters()])
            digests.append(flat.clone())
        engine.destroy()
    assert torch.equal(digests[0].view(torch.int16), digests[1].view(torch.int16))


def test_set_masters_keep_the_bits_that_the_format_has() -> None:
    config = make_config(dtype="bf16", host_memory=MEMORY, state_format="compact")
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    parameter = engine.module.blocks[0].up.weight
    given = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    zero.safe_set_full_fp32_param(parameter, given)
    kept = zero.safe_get_full_fp32_param(parameter)
    assert torch.all((kept - given).abs() <= given.abs() * 2.0**-16)
    assert not torch.equal(kept, given.bfloat16().float())
    engine.destroy()


def test_the_seed_decides_the_bits() -> None:
    digests = []
    for seed in (0, 0, 1):
        config = make_config(dtype="bf16", host_memory=MEMORY, state_format="compact")
        config["tiers"]["rounding_seed"] = seed
        engine, _, _, _ = zero.initialize(model=make_model(), config=config)
        for step in range(3):
            engine.backward(engine(*make_batch(step)))
            engine.step()
        moment = zero.safe_get_full_optimizer_state(engine.module.blocks[0].up.weight, "exp_avg")
        digests.append(moment)
        engine.destroy()
    assert torch.equal(digests[0], digests[1])
    assert not torch.equal(digests[0], digests[2])


def test_padding_keeps_nothing_of_values_that_were_set_before() -> None:
    """The last block of a parameter has elements that nobody sets."""
    config = make_config(dtype="bf16", host_memory="1GB", state_format="compact")
    model = nn.Sequential(nn.Linear(11, 3, bias=False)).to(torch.bfloat16)
    engine, _, _, _ = zero.initialize(model=model, config=config)
    weight = model[0].weight
    for name in ("exp_avg", "exp_avg_sq"):
        for value in (1e38, 0.0, 1e38, 1e-25):
            zero.safe_set_full_optimizer_state(weight, torch.full((3, 11), value), name)
            found = zero.safe_get_full_optimizer_state(weight, name)
            assert found is not None
            assert torch.allclose(found, torch.full((3, 11), value), rtol=1 / 16, atol=0.0)
    engine.destroy()


def test_a_moment_that_the_optimizer_does_not_keep_is_absent() -> None:
    config = make_config(dtype="bf16", host_memory=MEMORY)
    config["optimizer"] = {"type": "Lion", "params": {"lr": 1e-4}}
    engine, _, _, _ = zero.initialize(model=make_model(), config=config)
    engine.backward(engine(*make_batch(0)))
    engine.step()
    weight = engine.module.blocks[0].up.weight
    assert zero.safe_get_full_optimizer_state(weight, "exp_avg").abs().max() > 0
    assert zero.safe_get_full_optimizer_state(weight, "exp_avg_sq") is None
    assert zero.safe_get_local_optimizer_state(weight, "exp_avg_sq") is None
    with pytest.raises(KeyError, match=r"'exp_avg_sq' is not kept of .*up.weight; there are"):
        zero.safe_set_full_optimizer_state(weight, torch.zeros(weight.shape), "exp_avg_sq")
    engine.destroy()


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "SGD"])
def test_torch_objects_are_taken_over_and_their_groups_read_each_step(kind: str) -> None:
    made = {
        "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, weight_decay=0.1),
        "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, eps=1e-4),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    }[kind]
    config = make_config(host_memory=MEMORY, clip=0.0)
    del config["optimizer"]
    model, plain = make_model(), make_model()
    given, theirs = made(model.parameters()), made(plain.parameters())
    engine, optimizer, _, _ = zero.initialize(model=model, optimizer=given, config=config)
    for step in range(4):
        for groups in (optimizer.param_groups, theirs.param_groups):
            groups[0]["lr"] = 1e-2 / (step + 1)
        engine.backward(engine(*make_batch(step)))
        engine.step()
        plain(*make_batch(step)).backward()
        theirs.step()
        theirs.zero_grad()
    with zero.GatheredParameters(list(engine.module.parameters())):
        for ours, wanted in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-6)
    engine.destroy()
