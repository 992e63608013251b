"""What is damaged, cut short, foreign or hostile gives one clear error and touches nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import zero
from tests.support.configs import make_config
from tests.support.observe import as_bits, state_digest
from tests.support.tiny import make_batch, make_model
from zero.checkpoint import can_resume
from zero.checkpoint.__main__ import main
from zero.checkpoint.manifest import _digest, read_manifest
from zero.errors import CheckpointError

pytestmark = pytest.mark.nvme


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one checkpoint, made once."""
    folder = tmp_path_factory.mktemp("saved")
    engine = make_engine()
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="one", client_state={"tensor": torch.arange(3)})
    engine.destroy()
    return folder


@pytest.fixture(scope="module")
def target() -> Iterator[zero.ZeroEngine]:
    """Return one engine that has trained, for all loads that must not touch it."""
    engine = make_engine()
    train(engine, 5, 6)
    yield engine
    engine.destroy()


def make_engine() -> zero.ZeroEngine:
    return zero.initialize(model=make_model(), config=make_config(dtype="bf16"))[0]


def train(engine: zero.ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*make_batch(step)))
        engine.step()


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as somebody would who knows how its checksum is made."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("checksum")
    change(body)
    path.write_text(json.dumps({"checksum": _digest(body), **body}))


def data(folder: Path) -> Path:
    return folder / "rank00000.safetensors"


def flip_a_bit(folder: Path) -> None:
    raw = bytearray(data(folder).read_bytes())
    raw[len(raw) // 2] ^= 4
    data(folder).write_bytes(raw)


def cut(folder: Path) -> None:
    os.truncate(data(folder), data(folder).stat().st_size - 5)


def flip_in_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"first": 0', '"first": 1', 1))


def no_json(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\x80\x04\x95 no json")


def lacks_a_file(folder: Path) -> None:
    data(folder).unlink()


def link(folder: Path) -> None:
    data(folder).rename(folder.parent / "elsewhere")
    data(folder).symlink_to(folder.parent / "elsewhere")


def leads_out(folder: Path) -> None:
    edit(folder, lambda body: body["ranks"][0]["file"].update(name="../../etc/passwd"))


def absurd(folder: Path) -> None:
    edit(folder, lambda body: body["tensors"][0].update(shape=[1 << 40, 1 << 40]))


def absurd_piece(folder: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["ranks"][0]["file"]["pieces"][0].update(shape=[1 << 38], checksums=["0"] * (1 << 20))

    edit(folder, change)


def beyond_the_end(folder: Path) -> None:
    edit(folder, lambda body: body["ranks"][0]["file"]["pieces"][0].update(offset=1 << 40))


def overlapping(folder: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        pieces = body["ranks"][0]["file"]["pieces"]
        pieces[1]["offset"] = pieces[0]["offset"]

    edit(folder, change)


def untiled(folder: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        pieces = body["ranks"][0]["file"]["pieces"]
        pieces.remove(next(each for each in pieces if each["section"] == "exp_avg"))
        pieces[:] = [each for each in pieces if each["name"] != body["tensors"][0]["name"]]

    edit(folder, change)


def moments_as(folder: Path, dtype: str) -> None:
    def change(body: dict[str, Any]) -> None:
        for piece in body["ranks"][0]["file"]["pieces"]:
            if piece["section"] == "exp_avg":
                piece["dtype"] = dtype

    edit(folder, change)


def codes_without_bases(folder: Path) -> None:
    moments_as(folder, "U8")


def moments_of_integers(folder: Path) -> None:
    moments_as(folder, "I32")


def newer(folder: Path) -> None:
    edit(folder, lambda body: body.update(version=99))


def other_names(folder: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        old = body["tensors"][0]["name"]
        body["tensors"][0].update(name="other", aliases=[])
        for piece in body["ranks"][0]["file"]["pieces"]:
            if piece["name"] == old:
                piece["name"] = "other"

    edit(folder, change)


def tagged_code(folder: Path) -> None:
    edit(folder, lambda body: body["ranks"][0].update(client={"$module": "os.system"}))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def of_deepspeed(folder: Path) -> None:
    empty(folder)
    (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(pickle.dumps({}))


DAMAGES = {
    flip_a_bit: "was damaged; take another",
    cut: "and .* were written; it was cut short",
    flip_in_manifest: "has the checksum .* and should have",
    no_json: "cannot be used",
    lacks_a_file: "lacks rank00000.safetensors",
    link: "lacks rank00000.safetensors",
    leads_out: "forged",
    absurd: "which cannot be",
    absurd_piece: "lies outside|overlaps",
    beyond_the_end: "lies outside",
    overlapping: "overlaps another",
    untiled: "has no values",
    codes_without_bases: "exp_avg of .* has codes without bases",
    moments_of_integers: "exp_avg of .* has the type I32, which no state has",
    newer: "version 99",
    other_names: "missing in the checkpoint: .*; not in the model: other",
    tagged_code: r"no kind of value '\$module'",
    empty: "has no manifest.json",
    of_deepspeed: "model_states.pt cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_damage_is_told_and_touches_nothing(
    damage: Callable[[Path], None], saved: Path, target: zero.ZeroEngine, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "ck")
    damage(tmp_path / "ck" / "one")
    before = state_digest(target), target.global_steps
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        target.load_checkpoint(tmp_path / "ck")
    assert (state_digest(target), target.global_steps) == before
    train(target, 6, 7)


def test_a_fresh_engine_refuses_to_train_on_half_a_load(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "ck")
    flip_a_bit(tmp_path / "ck" / "one")
    engine = make_engine()
    with pytest.raises(CheckpointError, match="was damaged"):
        engine.load_checkpoint(tmp_path / "ck")
    with pytest.raises(RuntimeError, match="load that or another checkpoint"):
        engine(*make_batch(0))
    engine.load_checkpoint(saved)
    train(engine, 2, 3)
    engine.destroy()


@pytest.mark.parametrize("tag", ["../one", "one/..", "", ".hidden", "a\x00b", "x" * 300])
def test_a_tag_is_a_name_and_no_path(tag: str, target: zero.ZeroEngine, tmp_path: Path) -> None:
    for call in (target.save_checkpoint, target.load_checkpoint):
        with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
            call(tmp_path, tag)
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        target.load_checkpoint(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["latest"]


def test_no_latest_is_a_warning_as_in_the_field(target: zero.ZeroEngine, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="has no file 'latest'"):
        assert target.load_checkpoint(tmp_path) == (None, None)


def test_a_folder_says_whether_it_can_be_resumed_from(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (saved, saved / "one"):
        assert can_resume(path) == (True, f"{saved / 'one'}: step 2, saved by 1 ranks")
    assert can_resume(saved, "two")[1].startswith(f"{saved / 'two'} is no checkpoint")
    assert "there is no such folder" in can_resume(tmp_path / "nowhere", "x")[1]
    shutil.copytree(saved / "one", tmp_path / "ck" / "one")
    good, why = can_resume(tmp_path / "ck")
    assert not good
    assert "it has the checkpoints one: give a tag" in why

    assert main(["inspect", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "step 2, saved by 1 ranks" in shown
    assert "embedding.weight = head.weight" in shown
    assert main(["inspect", "--json", str(saved)]) == 0
    told = json.loads(capsys.readouterr().out)
    weights = sum(each.numel() for each in make_model().parameters())
    assert told["sections"]["weight"][1:] == [weights, 4 * weights]
    assert told["optimizer"] == "AdamW"
    assert main(["verify", str(saved)]) == 0
    assert "whole" in capsys.readouterr().out
    flip_a_bit(tmp_path / "ck" / "one")
    assert main(["verify", str(tmp_path / "ck" / "one")]) == 1
    assert "was damaged" in capsys.readouterr().err


def test_plain_safetensors_reads_the_same_weights(saved: Path) -> None:
    engine = make_engine()
    engine.load_checkpoint(saved)
    manifest = read_manifest(saved / "one")
    assert {each.name for each in manifest.tensors} == {
        name for name, _ in engine.module.named_parameters()
    }
    assert [each.aliases for each in manifest.tensors if each.aliases] == [("head.weight",)]
    with safe_open(data(saved / "one"), "pt") as file:
        keys = set(file.keys())
        for state in zero.iterate_states(engine.module):
            if not state.value.numel():
                continue
            for section, tensor in (
                ("weight", state.fp32_param),
                ("exp_avg", state.exp_avg),
                ("exp_avg_sq", state.exp_avg_sq),
            ):
                found = file.get_tensor(f"{section}/{state.name}")
                assert found.shape == state.value.shape
                assert (as_bits(found) == as_bits(tensor)).all()
                keys.discard(f"{section}/{state.name}")
    assert all(key.startswith(("run/", "client/")) for key in keys)
    engine.destroy()


def test_what_cannot_be_written_is_refused_by_name(target: zero.ZeroEngine, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"client_state\['callback'\] is a builtins.function"):
        target.save_checkpoint(tmp_path / "ck", client_state={"callback": lambda: None})
    assert not (tmp_path / "ck").exists()
    (tmp_path / "ck" / "mine").mkdir(parents=True)
    (tmp_path / "ck" / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="no checkpoint of tierzero; it will not be replaced"):
        target.save_checkpoint(tmp_path / "ck", "mine")
    assert (tmp_path / "ck" / "mine" / "thesis.txt").exists()
    with pytest.raises(CheckpointError, match=r"thesis.txt cannot be written: File exists"):
        target.save_checkpoint(tmp_path / "ck" / "mine" / "thesis.txt")
    assert (tmp_path / "ck" / "mine" / "thesis.txt").read_text() == "years of work"
    for tag in ("latest", "zero_to_fp32.py"):
        with pytest.raises(CheckpointError, match=f"'{tag}' cannot name a checkpoint: a file"):
            target.save_checkpoint(tmp_path / "ck", tag)
    target.save_checkpoint(tmp_path / "ck")
    assert (tmp_path / "ck" / "latest").is_file()
