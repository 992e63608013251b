"""The command line and the JSON configuration of train_lm.py, checked before torch is imported."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SCRIPTS = Path(__file__).resolve().parent
DEFAULT_CONFIG = SCRIPTS / "configs" / "zero3_nvme.json"
# A folder of the repository, which lies on a disk, while /tmp may be in memory.
DEFAULT_SWAP = ".swap"
DEFAULT_BATCH = 8


class UsageError(ValueError):
    """Something the user gave cannot be used; the message is one line that says what to change."""


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, or end with one line on what is wrong with it."""
    parser = _OneLineParser(
        prog="train_lm.py",
        description="Train a byte-level transformer with ZeRO-3 while its state lives on NVMe.",
        epilog="Where no default is named, the configuration's value is taken. Example:"
        " bash scripts/demo.sh --dtype bf16 --steps 100 --nvme-path FOLDER",
    )
    _add_model_options(parser)
    _add_training_options(parser)
    _add_tier_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a summary there")
    return parser.parse_args(arguments)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    positive = _whole_number(minimum=1)
    add("--hidden", type=positive, default=256, metavar="N", help="width (default: 256)")
    add("--layers", type=positive, default=4, metavar="N", help="blocks (default: 4)")
    add("--heads", type=positive, default=4, metavar="N", help="heads a block (default: 4)")
    add("--tied", action="store_true", help="share the embedding with the head")
    meta_help = "never hold the whole model: let the engine fill it unit by unit"
    add("--meta", action="store_true", help=meta_help)
    add("--dtype", choices=("fp32", "bf16"), help="what the parameters are stored in")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    positive = _whole_number(minimum=1)
    text_help = "a file or folder to learn from (default: the standard library of this Python)"
    add("--text", type=Path, metavar="PATH", help=text_help)
    add("--steps", type=positive, default=30, metavar="N", help="(default: 30)")
    add("--batch", type=positive, metavar="N", help="sequences a rank and micro-batch")
    add("--sequence", type=positive, default=64, metavar="N", help="bytes (default: 64)")
    add("--lr", type=float, metavar="RATE", help="learning rate")
    add("--seed", type=_whole_number(minimum=0), default=0, metavar="N", help="(default: 0)")
    generate_help = "bytes of sample text at the end (default: 200)"
    add("--generate", type=_whole_number(0), default=200, metavar="N", help=generate_help)


def _add_tier_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tiers").add_argument
    config_help = "JSON (default: configs/zero3_nvme.json beside this script)"
    add("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help=config_help)
    add("--nvme-path", type=Path, metavar="FOLDER", help="where the swap file goes")
    add("--host-memory", metavar="SIZE", help='budget, such as "64MB"')
    ledger_help = "a line of JSON a step: bytes by tier, GB/s, stalls, wear, residency"
    add("--ledger", type=Path, metavar="FILE", help=ledger_help)
    trace_help = "a time line of transfers and waits of rank 0 that Perfetto reads"
    add("--trace", type=Path, metavar="FILE", help=trace_help)


def _whole_number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number from {minimum}, got {text}")
        return value

    return parse


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line changes in a configuration; None leaves its value."""

    batch: int | None = None
    lr: float | None = None
    dtype: str | None = None
    nvme_path: Path | None = None
    host_memory: str | None = None

    @classmethod
    def from_arguments(cls, options: argparse.Namespace) -> Overrides:
        """Take the options that are settings of the configuration."""
        return cls(
            batch=options.batch,
            lr=options.lr,
            dtype=options.dtype,
            nvme_path=options.nvme_path,
            host_memory=options.host_memory,
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"--config {path} does not exist") from error
    except OSError as error:
        raise UsageError(f"cannot read --config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"--config {path} is not valid JSON: {place}: {error.msg}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"--config {path} must hold a JSON object, not {type(settings).__name__}")
    return settings


def override(settings: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return a copy of the settings with what the command line changes."""
    changed: dict[str, Any] = json.loads(json.dumps(settings))
    if overrides.batch is not None:
        # The third of the batch sizes follows from the other two.
        changed.pop("train_batch_size", None)
        changed["train_micro_batch_size_per_gpu"] = overrides.batch
    elif "train_batch_size" not in changed:
        changed.setdefault("train_micro_batch_size_per_gpu", DEFAULT_BATCH)
    if overrides.lr is not None:
        optimizer = _section(changed, "optimizer")
        optimizer.setdefault("type", "AdamW")
        _section(optimizer, "params")["lr"] = overrides.lr
    if overrides.dtype is not None:
        _section(changed, "bf16")["enabled"] = overrides.dtype == "bf16"
    if overrides.host_memory is not None:
        _section(changed, "tiers")["host_memory"] = overrides.host_memory
    places = _nvme_places(changed)
    if overrides.nvme_path is not None:
        if not places:
            raise UsageError("--nvme-path is given, but the configuration puts nothing on nvme")
        for place, key in places:
            place[key] = str(overrides.nvme_path)
        disks = _section(changed, "tiers").get("nvme")
        if isinstance(disks, list):
            del disks[1:]  # one folder, so one disk
    return changed


def prepare_swap_folders(settings: dict[str, Any]) -> None:
    """Put the default swap folder into the repository, and make it; any other must exist."""
    for place, key in _nvme_places(settings):
        name = place.get(key)
        if name == DEFAULT_SWAP:
            place[key] = str(_make_default_swap())
        elif isinstance(name, str) and not Path(name).is_dir():
            raise UsageError(
                f"the swap folder {name} is not an existing folder; make it, or name another with "
                "--nvme-path"
            )


def _make_default_swap() -> Path:
    folder = SCRIPTS.parent / DEFAULT_SWAP
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the swap folder {folder}: {error.strerror}; name another with --nvme-path"
        ) from error
    return folder


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    section = settings.setdefault(name, {})
    if not isinstance(section, dict):
        raise UsageError(f'"{name}" of the configuration must be an object, got {section!r}')
    return section


def _nvme_places(settings: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return each place of the settings that names a folder on NVMe, as an object and a key."""
    places: list[tuple[dict[str, Any], str]] = []
    zero_optimization = _section(settings, "zero_optimization")
    for name in ("offload_param", "offload_optimizer"):
        section = zero_optimization.get(name)
        if isinstance(section, dict) and section.get("device") == "nvme":
            places.append((section, "nvme_path"))
    disks = _section(settings, "tiers").get("nvme")
    if isinstance(disks, list):
        places.extend((disk, "path") for disk in disks if isinstance(disk, dict))
    return places


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that could not be written at the end."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write {option} {path}: {error.strerror}") from error
