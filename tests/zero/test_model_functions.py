"""The field's estimates as commands, and models that a function builds on meta."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from estimators import estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs
from estimators.models import ModelError, model_of_config, preset
from scripts import plan_models
from tests.support.tiny import make_model
from zero.model_functions import build_on_meta, main_zero2, main_zero3, shape_of

FUNCTION = "tests.support.tiny:make_model"


@pytest.mark.parametrize("stage", [2, 3])
def test_commands_of_the_field_s_names_are_installed(stage: int) -> None:
    name = f"estimate_zero{stage}_model_states_mem_needs"
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    assert entry.load() is (main_zero2 if stage == 2 else main_zero3)


def test_the_table_of_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_zero3(["--model", "llama-3-8b", "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    model = preset("llama-3-8b")
    from estimators import estimate_zero3_model_states_mem_needs_all_cold

    estimate_zero3_model_states_mem_needs_all_cold(model.numel, model.largest_layer_numel, 8)
    assert capsys.readouterr().out == printed
    assert "8030M total params, 525M largest layer params" in printed


def test_numbers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params", "7e9", "--largest-layer", "131e6", "--gpus", "4", "--nodes", "2"]
    main_zero3([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    cpu, gpu, _ = estimate_zero3_model_states_mem_needs(7_000_000_000, 131_000_000, 4, 2)
    assert found["rows"][0] == {
        "offload_param": True,
        "offload_optimizer": True,
        "zero_init": True,
        "cpu_bytes": cpu,
        "gpu_bytes": gpu,
    }
    assert len(found["rows"]) == 6
    main_zero2(["--params", "7B", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    expected = estimate_zero2_model_states_mem_needs(7_000_000_000)
    assert (rows[0]["cpu_bytes"], rows[0]["gpu_bytes"]) == expected


def test_a_function_builds_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    main_zero3(["--model", FUNCTION, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["total_params"] == sum(each.numel() for each in make_model().parameters())


def test_the_shape_of_a_built_model_has_its_blocks() -> None:
    model = build_on_meta(FUNCTION)
    assert all(each.is_meta for each in model.parameters())
    shape = shape_of(model, FUNCTION)
    assert shape.numel == sum(each.numel() for each in make_model().parameters())
    assert shape.blocks == ("blocks.0", "blocks.1")
    (embedding,) = [each for each in shape.parameters if each.name == "embedding.weight"]
    assert embedding.block == ""


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip


class Described:
    """A configuration as transformers has it at a model."""

    def __init__(self, **changes: object) -> None:
        self._values = {**CONFIG, **changes}

    def to_dict(self) -> dict[str, object]:
        return dict(self._values)


def test_a_configuration_at_the_model_tells_what_it_computes_if_it_is_true() -> None:
    with torch.device("meta"):
        model = plan_models.build(CONFIG)
    assert not shape_of(model, "bare").stacks
    model.config = Described()  # type: ignore[assignment]
    found = shape_of(model, "described")
    assert found.stacks == model_of_config(CONFIG).stacks
    assert found.name == "described"
    model.config = Described(intermediate_size=256)  # type: ignore[assignment]
    assert not shape_of(model, "false").stacks
    model.config = Described(model_type="nobody")  # type: ignore[assignment]
    assert not shape_of(model, "unknown").stacks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nosuch.module:make"], "No module named 'nosuch'"),
        (["--model", "tests.support.tiny:nothing"], "no attribute 'nothing'"),
        (["--model", "lama-3-8b"], "did you mean llama-3-8b"),
        (["--params", "7e9"], "--params needs --largest-layer"),
        (["--params", "seven"], "'seven' is not a count"),
        (["--model", "gpt2", "--gpus", "0"], "at least one GPU"),
    ],
)
def test_what_is_wrong_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main_zero3(arguments)
    assert message in capsys.readouterr().err


def test_a_function_that_returns_no_module(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="returned dict, not a torch"):
        build_on_meta("tests.support.configs:make_config")
