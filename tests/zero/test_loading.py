"""Weights stream from files straight into shards, and the report names everything (B1, B10)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.observe import as_bits, full_parameters
from tests.support.tiny import make_model
from zero import loading

pytestmark = pytest.mark.nvme


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return a full state with a buffer, without the second name of the tied parameter."""
    state = {key: value.to(dtype) for key, value in model().state_dict().items()}
    generator = torch.Generator().manual_seed(11)
    for key, value in state.items():
        state[key] = torch.randn(value.shape, generator=generator).to(dtype)
    del state["head.weight"]
    return state


def model() -> Any:
    made = make_model()
    made.register_buffer("scale", torch.ones(3))
    return made


def one_file(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded_folder(state: dict[str, torch.Tensor], folder: Path) -> Path:
    names = list(state)
    parts = [names[::2], names[1::2]]
    files = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def torch_file(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def torch_index(state: dict[str, torch.Tensor], folder: Path) -> Path:
    names = list(state)
    files = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: state[name] for name in part}, folder / file)
        files.update(dict.fromkeys(part, file))
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return index


def dictionary(state: dict[str, torch.Tensor], _folder: Path) -> dict[str, torch.Tensor]:
    return state


FORMS: list[Callable[..., Any]] = [one_file, sharded_folder, torch_file, torch_index, dictionary]


@pytest.fixture(params=["nvme", "none"])
def config(request: pytest.FixtureRequest, scratch: Path) -> dict[str, Any]:
    return make_config(
        parameters=request.param,
        optimizer=request.param,
        nvme_path=str(scratch),
        host_memory="48KB" if request.param == "nvme" else "1GB",
        sub_group_size=1024,
        dtype="bf16",
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_loads_every_form_and_keeps_the_low_bits(
    config: dict[str, Any], tmp_path: Path, form: Any, dtype: torch.dtype
) -> None:
    engine, _, _, _ = zero.initialize(model=model(), config=config)
    state = weights(dtype)
    report = zero.load_weights(engine.module, form(state, tmp_path))
    assert set(report.loaded) == set(state)
    assert report.missing == report.unexpected == ()
    assert report.loaded_numel == sum(value.numel() for value in state.values())
    for name, parameter in engine.module.named_parameters():
        master = zero.safe_get_full_fp32_param(parameter)
        assert np.array_equal(as_bits(master), as_bits(state[name].float())), name
    shown = full_parameters(engine)
    if dtype is torch.bfloat16:
        assert all(np.array_equal(shown[name], as_bits(state[name])) for name in shown)
    assert torch.equal(engine.module.scale, state["scale"].float())
    engine.destroy()


def test_a_model_under_init_loads_before_there_is_an_engine(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "PIECE_NUMEL", 100)  # several pieces a tensor
    with zero.Init(config_dict_or_path=config):
        made = model()
    state = weights()
    zero.load_weights(made, sharded_folder(state, tmp_path))
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, state[name])
    engine, _, _, _ = zero.initialize(model=made, config=config)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(zero.safe_get_full_fp32_param(parameter), state[name])
    engine.destroy()


def test_a_lazy_state_of_another_sharded_model_loads() -> None:
    with zero.Init():
        first, second = model(), model()
    state = weights()
    zero.load_weights(first, state)
    zero.load_weights(second, first.state_dict())
    assert torch.equal(second.head.weight, state["embedding.weight"])


def test_what_does_not_fit_is_listed_and_nothing_is_loaded() -> None:
    with zero.Init():
        made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    state = weights()
    state["blocks.0.up.weight"] = torch.zeros(3, 16)
    state["blocks.9.up.weight"] = torch.zeros(3)
    del state["norm.bias"]
    with pytest.raises(RuntimeError, match="nothing was loaded") as caught:
        zero.load_weights(made, state)
    for part in (
        "blocks.0.up.weight has shape (33, 16), the weights (3, 16)",
        "missing in the weights: norm.bias",
        "not in the model: blocks.9.up.weight",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    del state["blocks.0.up.weight"]
    report = zero.load_weights(made, state, strict=False)
    assert set(report.missing) == {"norm.bias", "blocks.0.up.weight"}
    assert report.unexpected == ("blocks.9.up.weight",)
    assert "norm.bias" in str(report)
    assert torch.equal(made.norm.weight, state["norm.weight"])


def test_names_are_renamed_or_left_out() -> None:
    made = model()
    state = {f"model.{name}": value for name, value in weights().items()}
    state["optimizer.step"] = torch.ones(1)
    report = zero.load_weights(
        made,
        state,
        rename=lambda name: name.removeprefix("model.") if name.startswith("model.") else None,
    )
    assert not report.missing
    assert torch.equal(made.norm.weight, state["model.norm.weight"])


def test_tied_weights_load_under_either_name_and_must_agree() -> None:
    with zero.Init():
        made = model()
    state = weights()
    state["head.weight"] = state.pop("embedding.weight")
    zero.load_weights(made, state)
    assert torch.equal(made.embedding.weight, state["head.weight"])
    state["embedding.weight"] = state["head.weight"].clone()
    zero.load_weights(made, state)
    state["embedding.weight"][0, 0] += 1
    with pytest.raises(RuntimeError, match=r"embedding\.weight and head\.weight are one parameter"):
        zero.load_weights(made, state)


def test_a_model_on_meta_is_refused_with_the_fix() -> None:
    with torch.device("meta"):
        made = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"weight is on meta.*zero\.Init\(module=model"):
        zero.load_weights(made, {})


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-5])
    elif how == "header":
        path.write_bytes(b"\xff" * 8 + data[8:])
    elif how == "json":
        path.write_bytes(data[:8] + b"x" + data[9:])
    else:
        path.write_bytes(b"abc")


@pytest.mark.parametrize("how", ["cut", "header", "json", "short"])
def test_damaged_files_are_named(tmp_path: Path, how: str) -> None:
    path = one_file(weights(), tmp_path)
    damaged(path, how)
    with pytest.raises(zero.WeightFileError, match=r"model\.safetensors"):
        zero.load_weights(model(), path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(zero.WeightFileError, match="has none of"):
        zero.load_weights(model(), tmp_path)
    with pytest.raises(zero.WeightFileError, match="nowhere"):
        zero.load_weights(model(), tmp_path / "nowhere.safetensors")
    sharded_folder(weights(), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(zero.WeightFileError, match="not there: model-00002-of-00002"):
        zero.load_weights(model(), tmp_path)
