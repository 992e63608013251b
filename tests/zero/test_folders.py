"""Folders that cannot be written are named, with the reason and what to do, before work starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero
from tests.support.configs import make_config
from tests.zero.test_other_values import Net, make_engine
from zero.checkpoint import export_engine_dcp
from zero.errors import CheckpointError

pytestmark = pytest.mark.nvme


def places(folder: Path) -> dict[Path, str]:
    """Return folders that nobody can write, whoever it is, and what is to be said of them."""
    file = folder / "thesis.txt"
    file.write_text("years of work")
    return {
        Path("/proc"): "/proc cannot be written: No such file or directory; ",
        file: f"{file} (is not a directory; name|cannot be written: File exists; a file is in)",
        file / "inside": f"{file}/inside(:| cannot be written:) Not a directory; (name|a file is)",
    }


def initialized(config: dict[str, Any]) -> None:
    zero.initialize(model=Net(), config=config)


def built(config: dict[str, Any]) -> None:
    with zero.Init(config_dict_or_path=config):
        Net()


def durable(config: dict[str, Any]) -> None:
    config["tiers"]["durable"] = {"name": "run"}
    zero.initialize(model=Net(), config=config)


@pytest.mark.parametrize("begin", [initialized, built, durable])
def test_swap_files_go_nowhere_else(
    begin: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    for place, reason in places(tmp_path).items():
        config = make_config(
            parameters="nvme", optimizer="nvme", nvme_path=str(place), host_memory="64KB"
        )
        with pytest.raises(OSError, match=reason):
            begin(config)
    missing = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(tmp_path / "none"), host_memory="64KB"
    )
    with pytest.raises(FileNotFoundError, match=f"mkdir -p {tmp_path / 'none'}"):
        begin(missing)


SAVES: dict[str, Callable[[zero.ZeroEngine, Path], Any]] = {
    "checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "in the background": lambda engine, folder: engine.save_checkpoint(folder, blocking=False),
    "16 bit": lambda engine, folder: engine.save_16bit_model(folder),
    "dcp": lambda engine, folder: export_engine_dcp(engine, folder / "dcp"),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_save_names_the_folder(name: str, tmp_path: Path, scratch: Path) -> None:
    engine = make_engine("nvme", scratch)
    for place, reason in places(tmp_path).items():
        with pytest.raises(CheckpointError, match=reason):
            SAVES[name](engine, place)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    SAVES[name](engine, tmp_path / "new" / "folder")
    engine.wait_for_checkpoint()
    assert list((tmp_path / "new").rglob("*.*"))
    assert {each.name for each in tmp_path.iterdir()} == {"thesis.txt", "new"}
    engine.destroy()
