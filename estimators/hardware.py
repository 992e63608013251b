"""What a machine can do: rates that are given, measured, or assumed for a known GPU."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimators.rates import DriveRates
from estimators.words import bytes_text, parse_bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its data sheet has it."""

    name: str
    memory_bytes: int
    flops: float
    """Dense bf16 operations a second, fp16 where there is no bf16."""
    link_bytes_per_s: float
    """To the host, each way."""
    memory_bytes_per_s: float


_GIB = 1 << 30
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("t4", 16 * _GIB, 65e12, 12e9, 300e9),
        Gpu("v100-16gb", 16 * _GIB, 125e12, 12e9, 900e9),
        Gpu("v100-32gb", 32 * _GIB, 125e12, 12e9, 900e9),
        Gpu("rtx3060", 12 * _GIB, 51e12, 25e9, 360e9),
        Gpu("rtx3090", 24 * _GIB, 71e12, 25e9, 936e9),
        Gpu("rtx4090", 24 * _GIB, 165e12, 25e9, 1008e9),
        Gpu("rtx5090", 32 * _GIB, 210e12, 50e9, 1792e9),
        Gpu("a10", 24 * _GIB, 125e12, 25e9, 600e9),
        Gpu("l4", 24 * _GIB, 121e12, 25e9, 300e9),
        Gpu("l40s", 48 * _GIB, 362e12, 25e9, 864e9),
        Gpu("a6000", 48 * _GIB, 155e12, 25e9, 768e9),
        Gpu("a100-40gb", 40 * _GIB, 312e12, 25e9, 1555e9),
        Gpu("a100-80gb", 80 * _GIB, 312e12, 25e9, 2039e9),
        Gpu("h100", 80 * _GIB, 989e12, 55e9, 3350e9),
        Gpu("h200", 141 * 10**9, 989e12, 55e9, 4800e9),
        Gpu("b200", 180 * _GIB, 2250e12, 55e9, 8000e9),
    )
}

_UNNAMED = Gpu("unnamed GPU", 0, 165e12, 25e9, 1000e9)
_CPU = Gpu("cpu", 0, 2e12, 100e9, 100e9)


def parse_gpu(text: str) -> Gpu:
    """Return a GPU by name, or one of a memory size of which the rest is assumed.

    Raises:
        ValueError: if it is neither.
    """
    found = GPUS.get(text.lower().replace(" ", "").replace("nvidia", ""))
    if found is not None:
        return found
    try:
        size = parse_bytes(text)
    except ValueError:
        near = difflib.get_close_matches(text.lower(), GPUS, 2, 0.4)
        known = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(GPUS)}"
        raise ValueError(
            f"{text!r} is neither a memory size such as 24GB nor a GPU: {known}"
        ) from None
    if 0 < size < 1 << 20:
        raise ValueError(
            f"{text!r} is {size} bytes of GPU memory (a number without a unit is bytes: 24GB,"
            " not 24)"
        )
    return replace(_UNNAMED, name=f"{bytes_text(size)} GPU", memory_bytes=size)


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Rates of one node; those of a device are for each."""

    flops: float
    device_bytes_per_s: float
    link_bytes_per_s: float
    """Between host and each device, each way at once."""
    host_bytes_per_s: float
    """Of the node's memory, read and written together."""
    network_bytes_per_s: float
    """Of collectives, each device."""
    drive: DriveRates
    """Of all drives of the node together."""
    mixed_bytes_per_s: float | None = None
    """Of the drives when they read and write at once, both counted; None where not known."""
    device_name: str = ""

    def drive_seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the least time for bytes of a step: in turns, or mixed where that is faster."""
        turns = self.drive.seconds(read_bytes, written_bytes)
        if self.mixed_bytes_per_s is None:
            return turns
        both = min(read_bytes, written_bytes)
        mixed = 2 * both / self.mixed_bytes_per_s
        return min(turns, mixed + self.drive.seconds(read_bytes - both, written_bytes - both))


ASSUMED_DRIVE = DriveRates(3.0e9, 2.0e9, "assumed")
ASSUMED_HOST_BYTES_PER_S = 100e9
ASSUMED_NETWORK_BYTES_PER_S = 100e9


def bandwidths_of(gpu: Gpu | None, drive: DriveRates = ASSUMED_DRIVE) -> Bandwidths:
    """Return the rates of a node with a GPU (None: computing on the CPU), the rest assumed."""
    device = gpu or _CPU
    return Bandwidths(
        device.flops,
        device.memory_bytes_per_s,
        device.link_bytes_per_s,
        ASSUMED_HOST_BYTES_PER_S,
        ASSUMED_NETWORK_BYTES_PER_S,
        drive,
        device_name=device.name,
    )


def measured(bandwidths: Bandwidths, path: Path) -> Bandwidths:
    """Return rates with those that a JSON file has in place of the assumed ones.

    It is what `tierzero-nvme-tune --json` wrote, or an object with any of `read_bytes_per_s`,
    `write_bytes_per_s`, `mixed_bytes_per_s`, `flops`, `link_bytes_per_s`, `host_bytes_per_s`,
    `device_bytes_per_s` and `network_bytes_per_s`.

    Raises:
        ValueError: if it is neither.
        OSError: if it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise type(error)(
            f"the rates in {path} cannot be read: {error.strerror}; make the file with"
            f" `tierzero-nvme-tune DIR --json {path}`"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds {type(document).__name__}, not an object of rates")
    rates = _tuned(document, path) if "directories" in document else _plain(document, path)
    drive = DriveRates(
        rates.get("read_bytes_per_s", bandwidths.drive.read_bytes_per_s),
        rates.get("write_bytes_per_s", bandwidths.drive.write_bytes_per_s),
        f"measured: {path}",
    )
    return Bandwidths(
        flops=rates.get("flops", bandwidths.flops),
        device_bytes_per_s=rates.get("device_bytes_per_s", bandwidths.device_bytes_per_s),
        link_bytes_per_s=rates.get("link_bytes_per_s", bandwidths.link_bytes_per_s),
        host_bytes_per_s=rates.get("host_bytes_per_s", bandwidths.host_bytes_per_s),
        network_bytes_per_s=rates.get("network_bytes_per_s", bandwidths.network_bytes_per_s),
        drive=drive,
        mixed_bytes_per_s=rates.get("mixed_bytes_per_s", bandwidths.mixed_bytes_per_s),
        device_name=bandwidths.device_name,
    )


_PLAIN = (
    "read_bytes_per_s",
    "write_bytes_per_s",
    "mixed_bytes_per_s",
    "flops",
    "link_bytes_per_s",
    "host_bytes_per_s",
    "device_bytes_per_s",
    "network_bytes_per_s",
)


def _plain(document: dict[str, Any], path: Path) -> dict[str, float]:
    unknown = sorted(set(document) - set(_PLAIN))
    if unknown:
        raise ValueError(f"{path}: {unknown[0]} is no rate; known are {', '.join(_PLAIN)}")
    for name, rate in document.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
            raise ValueError(f"{path}: {name} must be a positive number, got {rate!r}")
    return {name: float(rate) for name, rate in document.items()}


def _tuned(document: dict[str, Any], path: Path) -> dict[str, float]:
    """Return the drive's rates: the fastest directory's, the highest that were seen.

    The highest, because the time that follows is a lower bound.
    """
    found: list[dict[str, float]] = []
    for directory in document["directories"]:
        workloads = directory.get("workloads", {})
        highs = {
            name: entry["rate"]["high"] for name, entry in workloads.items() if entry.get("rate")
        }
        if "read" in highs and "write" in highs:
            found.append(highs)
    if not found:
        raise ValueError(
            f"{path}: no directory has rates of both reads and writes; its notes say why: tune one"
            " for longer, or with a larger --max-write"
        )
    best = max(found, key=lambda highs: highs["read"] + highs["write"])
    rates = {"read_bytes_per_s": best["read"], "write_bytes_per_s": best["write"]}
    if "mix" in best:
        rates["mixed_bytes_per_s"] = best["mix"]
    return rates
