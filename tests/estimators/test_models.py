"""Models told from their configuration are those that transformers builds."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from estimators.models import (
    PRESETS,
    ModelError,
    load_model,
    model_families,
    model_of_config,
    model_of_headers,
    preset,
)
from tests.support.transformers_models import (
    VARIATIONS,
    build,
    every_config,
    facts_of_module,
    facts_of_shape,
)

GOLDENS = Path(os.environ.get("TIERZERO_GOLDENS", Path(__file__).parents[1] / "goldens"))
GOLDEN = Path(__file__).parents[1] / "goldens" / "model_shapes.json"


def golden_cases() -> dict[str, dict[str, Any]]:
    file = GOLDENS / GOLDEN.name
    found = json.loads((file if file.is_file() else GOLDEN).read_text(encoding="utf-8"))
    assert found["meta"]["source"].startswith("transformers ")
    return {case["name"]: case for case in found["cases"]}


def test_golden_models_have_every_preset_and_family() -> None:
    cases = golden_cases()
    assert set(cases) == set(PRESETS) | set(VARIATIONS)
    assert all(cases[name]["config"] == config for name, config in every_config().items())
    assert {case["config"]["model_type"] for case in cases.values()} == set(model_families())


@pytest.mark.parametrize("name", [*PRESETS, *VARIATIONS])
def test_golden_models_names_shapes_order_and_blocks(name: str) -> None:
    """Counts are equal, and so is all that flat buffers follow from."""
    case = golden_cases()[name]
    assert facts_of_shape(model_of_config(case["config"])) == case["out"]


@pytest.mark.full
@pytest.mark.parametrize("name", VARIATIONS)
def test_golden_models_are_what_transformers_builds_today(name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; the recorded golden file is compared instead")
    assert facts_of_module(build(VARIATIONS[name])) == golden_cases()[name]["out"]


def test_active_parameters_are_those_of_the_routed_experts() -> None:
    model = preset("mixtral-8x7b")
    one_expert = 3 * 4096 * 14336
    assert model.numel - model.active_numel == 32 * 6 * one_expert
    assert preset("llama-3-8b").active_numel == preset("llama-3-8b").numel


def test_equal_blocks_are_one_stack() -> None:
    assert [stack.count for stack in preset("llama-3-8b").stacks] == [32]
    assert [stack.count for stack in preset("t5-base").stacks] == [1, 11, 1, 11]
    mixed = model_of_config(VARIATIONS["qwen2_moe, mixed layers"])
    assert [bool(stack.mlp.experts) for stack in mixed.stacks] == [False, True, False]


def test_the_largest_layer_is_counted_as_the_field_counts_it() -> None:
    assert preset("llama-3-8b").largest_layer_numel == 128256 * 4096


def test_a_folder_with_a_configuration_or_headers(tmp_path: Path) -> None:
    config = VARIATIONS["qwen3"]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert load_model(str(tmp_path)).parameters == model_of_config(config).parameters
    assert load_model(str(tmp_path / "config.json")).numel == model_of_config(config).numel
    unknown = {**config, "model_type": "something-new"}
    (tmp_path / "config.json").write_text(json.dumps(unknown), encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"model_type 'something-new' is not known; known are bert"
    ):
        load_model(str(tmp_path))
    tensors = {each.name: torch.zeros(each.shape) for each in model_of_config(config).parameters}
    half = dict(list(tensors.items())[::2])
    save_file(half, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: each for name, each in tensors.items() if name not in half}
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    found = load_model(str(tmp_path))
    assert found.numel == model_of_config(config).numel
    assert found.blocks == model_of_config(config).blocks
    assert found.stacks == ()
    one = load_model(str(tmp_path / "model-00001-of-00002.safetensors"))
    assert {each.name for each in one.parameters} == set(half)


def test_blocks_of_headers_are_told_by_their_names() -> None:
    shapes = {f"layers.{index}.w": (4,) for index in range(12)} | {"head.0.w": (3,), "e": (2, 2)}
    found = model_of_headers(shapes, "m")
    assert found.blocks == tuple(f"layers.{index}" for index in range(12))
    assert {each.name for each in found.parameters if not each.block} == {"head.0.w", "e"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer of at least 0, got -1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be an integer of at least 0, got 'many'"),
        ({"num_attention_heads": 5}, "hidden_size 48 is not a multiple of num_attention_heads 5"),
        ({"mlp_bias": 1}, "mlp_bias must be true or false, got 1"),
        ({"model_type": None}, "model_type None is not known"),
    ],
)
def test_a_configuration_that_is_wrong_says_where(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_of_config({**VARIATIONS["llama, biased"], **changes})


def test_other_heads_of_bert_are_refused() -> None:
    config = {**VARIATIONS["bert, bare"], "architectures": ["BertForQuestionAnswering"]}
    with pytest.raises(ModelError, match="BertForQuestionAnswering is not known"):
        model_of_config(config)


@pytest.mark.parametrize(
    ("source", "message"),
    [("llama-3-8", "did you mean llama-3-8b"), ("zzz", "known are llama-2-7b")],
)
def test_a_name_that_is_unknown_gets_a_suggestion(source: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model(source)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither a config.json nor safetensors"):
        load_model(str(tmp_path))
    bad = tmp_path / "config.json"
    bad.write_text("[1]", encoding="utf-8")
    with pytest.raises(ModelError, match="holds list, not an object"):
        load_model(str(bad))
    bad.write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_model(str(bad))
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"\xff" * 20)
    with pytest.raises(ModelError, match="no safetensors file"):
        load_model(str(file))
    file.write_bytes((6).to_bytes(8, "little") + b'{"a":1')
    with pytest.raises(ModelError, match="header that cannot be read"):
        load_model(str(file))
