"""What the kernel says about the disk under a directory: model, link, and what it cannot be."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from aio_ops import file_systems

_LANE_BYTES_PER_S = {  # by the gigatransfers a second that the kernel states, less the encoding
    "2.5": 0.25e9,
    "5.0": 0.5e9,
    "8.0": 0.985e9,
    "16.0": 1.969e9,
    "32.0": 3.938e9,
    "64.0": 7.563e9,
}


@dataclass(frozen=True, slots=True)
class Disk:
    """A directory's file system and the device below it; None: the kernel does not say."""

    path: Path
    file_system: str
    device: str
    models: tuple[str, ...]
    link: str | None
    link_bytes_per_s: float | None
    rotational: bool | None
    free_bytes: int
    identity: int
    """The same for directories on one file system."""

    @property
    def remote(self) -> bool:
        """Whether it lies on a network file system."""
        return self.file_system in file_systems.NETWORK

    @property
    def in_memory(self) -> bool:
        """Whether it lies in memory."""
        return self.file_system in file_systems.MEMORY

    def warning(self) -> str | None:
        """Return what is wrong with the kind of file system, or None."""
        if self.remote:
            return (
                f"{self.path} lies on {self.file_system}, a network file system: what is measured "
                "is the network and its caches; name a directory on a local drive"
            )
        if self.in_memory:
            return (
                f"{self.path} lies on {self.file_system}, which is memory: what is measured is "
                "not a disk, and swap files there save no memory; name a directory on a drive"
            )
        if self.file_system in file_systems.STACKED:
            return (
                f"{self.path} lies on {self.file_system}, a container's layered file system, and "
                "may be slow; mount a drive into the container and name it"
            )
        return None

    def describe(self) -> str:
        """Return it in one line."""
        model = ", ".join(self.models) or "model not stated"
        link = f", {self.link}" if self.link else ""
        return (
            f"{self.file_system} on {self.device} ({model}{link}), "
            f"{self.free_bytes / 1e9:.1f} GB free"
        )


def look_at(directory: Path) -> Disk:
    """Return what the kernel says; raises OSError where the directory cannot be looked at."""
    status = os.statvfs(directory)
    file_system, device = file_systems.mount_of(directory)
    block = block_directory(directory, device)
    link, rate = (None, None) if block is None else pci_link(block)
    return Disk(
        path=directory,
        file_system=file_system,
        device=device,
        models=() if block is None else tuple(_models(block)),
        link=link,
        link_bytes_per_s=rate,
        rotational=None if block is None else _rotational(block),
        free_bytes=status.f_bavail * status.f_frsize,
        identity=directory.stat().st_dev,
    )


def block_directory(directory: Path, device: str) -> Path | None:
    """Return the whole disk's directory in sysfs, also of a partition, or None."""
    for number in _device_numbers(directory, device):
        entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        if entry.exists():
            found = entry.resolve()
            return found.parent if (found / "partition").exists() else found
    return None


def _device_numbers(directory: Path, device: str) -> list[int]:
    numbers = [directory.stat().st_dev]
    with contextlib.suppress(OSError):  # some file systems have a number of their own
        numbers.append(Path(device).stat().st_rdev)
    return numbers


def _models(block: Path) -> list[str]:
    """Return the models of the disk, or of those that a volume is made of."""
    parts = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if parts:
        wholes = [part.resolve() for part in parts]
        wholes = [part.parent if (part / "partition").exists() else part for part in wholes]
        return [model for whole in wholes for model in _models(whole)]
    text = _text(block / "device" / "model")
    return [text] if text else []


def _rotational(block: Path) -> bool | None:
    text = _text(block / "queue" / "rotational")
    return text == "1" if text in ("0", "1") else None


def pci_link(device: Path) -> tuple[str | None, float | None]:
    """Return the PCIe link above a device in sysfs, in words and in bytes a second."""
    for place in (device, *device.parents):
        speed, width = _text(place / "current_link_speed"), _text(place / "current_link_width")
        match = re.match(r"([0-9.]+) GT/s", speed or "")
        if match is None or not (width or "").isdigit() or not int(width or 0):
            continue
        lane = _LANE_BYTES_PER_S.get(match[1])
        text = f"PCIe {match[1]} GT/s x{width}"
        return text, None if lane is None else lane * int(width or 0)
    return None, None


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return None
