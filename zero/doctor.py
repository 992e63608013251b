"""What the doctor looks at above the I/O layer: torch, kernels, memory, ranks, a configuration."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import offload
from aio_ops import open_engine
from aio_ops.doctor import command
from aio_ops.doctor.rows import Check, Row, fail, ok, warn
from estimators import Tier
from estimators.words import bytes_text
from zero import machine
from zero.config import ConfigError, PreflightWarning, load_config, preflight
from zero.config.__main__ import implied_world_size
from zero.config.loading import ConfigWarning
from zero.settings import Settings

_LEAST_HOST_BYTES = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `tierzero-doctor`."""
    return command.main(arguments)


def checks(config: Path | None, directories: list[Path]) -> list[tuple[str, Check]]:
    """Return the checks of this module; the directories of a configuration are added to the list.

    They are looked at with the others, unless they are there already.
    """
    found: list[tuple[str, Check]] = [
        ("packages", packages),
        ("torch", torch_build),
        ("native kernels", kernels),
        ("host memory", host_memory),
        ("threads", threads),
        ("distributed", distributed),
    ]
    if config is not None:
        found.append(("configuration", functools.partial(configuration, config)))
        known = {each.resolve() for each in directories}
        directories += [path for path in _swap_directories(config) if path.resolve() not in known]
    return found


def packages() -> Row:
    """Say which versions of the packages that we need are here."""
    names = ("numpy", "pydantic", "rich")
    return ok("packages", ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names))


def torch_build() -> Row:
    """Say which torch this is and whether it can use the GPU that the driver has."""
    from aio_ops.pinned import open_cuda

    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    found = f"{torch.__version__}, built with {toolkit}"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory / 1e9
        return ok(
            "torch", f"{found}; {torch.cuda.device_count()} x {properties.name}, {memory:.0f} GB"
        )
    if open_cuda(0)[0] is not None:
        return warn(
            "torch",
            f"{found}; it does not see the GPU that the driver has",
            "install a torch that is built with CUDA, and not newer than the driver",
        )
    return ok("torch", found)


def kernels() -> Row:
    """Say whether the native update kernels load, and why not."""
    if offload.native_available():
        return ok("native kernels", "load")
    reason = offload.native_unavailable_reason()
    remedy = "reinstall with a C++20 compiler; until then numpy updates, several times slower"
    if os.environ.get("TIERZERO_REQUIRE_NATIVE") == "1":
        return fail("native kernels", f"{reason}, and TIERZERO_REQUIRE_NATIVE=1", remedy)
    return warn("native kernels", str(reason), remedy)


def host_memory() -> Row:
    """Say how much host memory can still be used, and which cgroup bounds it."""
    available = machine.available_host_bytes()
    bounds = machine.memory_limits()
    found = f"{available / 1e9:.1f} GB can be used"
    if bounds:
        tightest = min(bounds, key=lambda bound: bound.limit_bytes - bound.usage_bytes)
        found += (
            f"; {tightest.version} allows {tightest.limit_bytes / 1e9:.1f} GB, "
            f"{tightest.usage_bytes / 1e9:.1f} GB of it in use ({tightest.path})"
        )
    else:
        found += "; no cgroup bounds it"
    if available < _LEAST_HOST_BYTES:
        return warn(
            "host memory", found, "raise the container's limit (-m), or end other processes"
        )
    return ok("host memory", found)


def threads() -> Row:
    """Say how many threads a rank takes."""
    wanted = os.environ.get("OMP_NUM_THREADS")
    count = machine.thread_count(1)
    cores = len(os.sched_getaffinity(0))
    found = f"one rank takes {count} of {cores} cores"
    if wanted is not None and count < cores:
        return warn("threads", f"{found}: OMP_NUM_THREADS={wanted}", "unset it, or raise it")
    return ok("threads", found)


def distributed() -> Row:
    """Say which backends there are for several ranks."""
    if not dist.is_available():
        return warn("distributed", "not in this torch", "one rank works; install another torch")
    names = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(),
             "mpi": dist.is_mpi_available()}  # fmt: skip
    found = ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in names.items())
    if not names["gloo"]:
        return warn("distributed", found, "several ranks need gloo; install another torch")
    if torch.cuda.is_available() and not names["nccl"]:
        return warn("distributed", found, "several ranks on GPUs need NCCL; install another torch")
    return ok("distributed", found)


def configuration(path: Path) -> Iterator[Row]:
    """Say whether a configuration is valid, and whether this machine has what it asks for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConfigWarning)
        try:
            config = load_config(path)
            world_size = implied_world_size(config)
            settings = config.settings(world_size)
        except ConfigError as error:
            yield fail("configuration", str(error), "correct the file")
            return
    text = f"{path}: valid, for world size {world_size}"
    notices = [str(entry.message) for entry in caught]
    if notices:
        yield warn("configuration", text, "; ".join(notices))
    else:
        yield ok("configuration", text)
    yield from _budgets(settings)
    if pages(settings):
        yield from _swap_rows(settings)


def _budgets(settings: Settings) -> Iterator[Row]:
    wanted, available = settings.tiers.host_memory_bytes, machine.available_host_bytes()
    if wanted is None:
        share = machine.HOST_MEMORY_MARGIN * available
        yield ok("host budget", f"auto: up to {bytes_text(share)}")
    elif wanted > available:
        yield fail(
            "host budget",
            f"tiers.host_memory is {bytes_text(wanted)}, and {bytes_text(available)} can be used",
            "lower it, or raise the container's limit",
        )
    else:
        yield ok("host budget", f"{bytes_text(wanted)} of {bytes_text(available)}")


def pages(settings: Settings) -> bool:
    """Return whether anything rests on NVMe."""
    return Tier.NVME in (settings.parameter_offload.tier, settings.optimizer_offload.tier)


def _swap_rows(settings: Settings) -> Iterator[Row]:
    for entry in settings.tiers.nvme:
        what = f"swap {entry.path}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PreflightWarning)
            try:
                report = preflight(
                    entry.path,
                    entry.capacity_bytes or 0,
                    allow_any_file_system=entry.allow_any_file_system,
                )
            except (ConfigError, OSError) as error:
                found, _, remedy = (getattr(error, "strerror", None) or str(error)).partition("; ")
                yield fail(what, found, remedy or "name another directory")
                continue
        yield _engine_row(settings, entry.path)
        notices = [str(notice.message) for notice in caught]
        if notices:
            found, _, remedy = notices[0].partition("; ")
            yield warn(what, found, remedy)
            continue
        yield ok(what, f"preflight passes, {report.free_bytes / 1e9:.1f} GB free")


def _engine_row(settings: Settings, directory: Path) -> Row:
    aio = settings.aio
    try:
        with open_engine(
            aio.engine,
            directory=directory,
            thread_count=aio.thread_count,
            block_bytes=aio.block_bytes,
            queue_depth=aio.queue_depth,
        ) as engine:
            return ok("engine", f"{engine.name}, {engine.reason}")
    except (OSError, RuntimeError, ValueError) as error:
        found, _, remedy = (getattr(error, "strerror", None) or str(error)).partition("; ")
        return fail("engine", found, remedy or 'write "aio": {"engine": "auto"}')


def _swap_directories(path: Path) -> list[Path]:
    """Return where a configuration puts swap files, as far as it can be used at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        try:
            config = load_config(path)
            settings = config.settings(implied_world_size(config))
        except ConfigError:
            return []
    return [entry.path for entry in settings.tiers.nvme] if pages(settings) else []


if __name__ == "__main__":
    sys.exit(main())
