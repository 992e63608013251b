"""What a tuner's results say, in words and as JSON."""

from collections.abc import Iterator
from typing import Any

from aio_ops.tune.apply import fragment
from aio_ops.tune.results import PERCENTILES, DirectoryResult, Rate, Result, Together
from aio_ops.tune.settings import Setting, Workload, size_text

JSON_VERSION = 1


def verdict(result: Result) -> list[str]:
    """Return what was found out, a sentence a line."""
    lines = [line for each in result.directories for line in _directory_lines(each)]
    if result.together is not None:
        lines.append(result.together.verdict())
    if len(result.directories) > 1:
        lines.append(f"the fastest of them is {result.winner.disk.path}")
        if len(result.drives()) < len(result.directories):
            lines.append(
                "the configuration names one directory of each file system: "
                + ", ".join(map(str, result.drives()))
            )
        if result.together is not None:
            lines.append(
                f"all at once move {result.together.together.text()}; use "
                f"{result.together.setting.describe()} for all"
            )
    lines.append(
        f"{result.written_bytes / 1e9:.1f} GB were written in {result.seconds:.0f} s; "
        "the scratch files are gone"
    )
    return lines


def _directory_lines(result: DirectoryResult) -> Iterator[str]:
    path, chosen = result.disk.path, result.chosen
    if chosen is None:
        return
    rates = [f"{work.value} {rate.text()}" for work in Workload if (rate := result.rate(work))]
    yield f"{path}: {', '.join(rates)}; use {chosen.describe()}"
    yield from (f"{path}: {line}" for line in _comparisons(result))
    yield from (f"{path}: {line}" for line in _best_lines(result, chosen))
    noise = result.noise()
    if noise is not None:
        said = "noisy: trust only what repeats" if noise > 0.25 else "steady"
        yield f"{path}: the same setting varied by {noise:.0%}, which is {said}"
    for workload, outcome in result.gpu.items():
        rate = Rate.of(outcome.samples.rates(outcome.best))
        host = result.rate(workload)
        beside = "" if host is None else f", {rate.median / host.median:.0%} of the host's"
        yield (
            f"{path}: {workload.value} by way of the GPU {rate.text()}{beside}, with "
            f"{outcome.best.describe()}"
        )
    if result.exhausted is not None:
        yield f"{path}: {result.exhausted.verdict()}"
    if result.sustained is not None:
        yield f"{path}: {result.sustained.verdict()}"
    yield from (f"note: {notice}" for notice in result.notices)


def _comparisons(result: DirectoryResult) -> Iterator[str]:
    mix, turns = result.rate(Workload.MIX), result.by_turns()
    if mix is not None and turns is not None:
        yield (
            f"the mix is half read, half written: {mix.median / 2e9:.2f} + {mix.median / 2e9:.2f} "
            f"GB/s, {mix.median / turns:.0%} of what reads and writes give one after the other"
        )
    link = result.disk.link_bytes_per_s
    read = result.rate(Workload.READ)
    if link is not None and read is not None:
        yield f"reads are {read.median / link:.0%} of {result.disk.link}"


def _best_lines(result: DirectoryResult, chosen: Setting) -> Iterator[str]:
    best = result.best
    for workload, outcome in result.outcomes.items():
        own = result.rate(workload)
        top = Rate.of(outcome.samples.rates(outcome.best))
        if workload is next(iter(result.outcomes)):
            if best is not None and best != chosen and own is not None:
                gain = top.median / own.median
                yield f"{best.describe()} gives {gain:.2f} times as much: {_keys_of(best)}"
        elif own is not None and top.low > own.high and min(top.count, own.count) > 2:
            yield f"{workload.value} alone would be {top.text()} with {outcome.best.describe()}"


def _keys_of(best: Setting) -> str:
    """Say what switches on what a setting has beside its plain keys."""
    keys = [
        *(['"pin_memory": true of offload_optimizer registers buffers'] * best.registered),
        *(['"io_schedule": "measure" of tiers finds bursts'] * best.alternates),
    ]
    return "; ".join(keys)


def part_of(result: Result) -> dict[str, Any] | None:
    """Return the fragment of a configuration that the result asks for, or None."""
    if result.setting is None:
        return None
    return fragment(result.setting, result.drives(), bursts=result.bursts)


def to_json(result: Result) -> dict[str, Any]:
    """Return everything as plain data; rates are bytes a second, times are seconds."""
    return {
        "version": JSON_VERSION,
        "seconds": result.seconds,
        "written_bytes": result.written_bytes,
        "verdict": verdict(result),
        "fragment": part_of(result),
        "together": None if result.together is None else _together(result.together),
        "directories": [_directory(each) for each in result.directories],
    }


def _together(together: Together) -> dict[str, Any]:
    return {
        "alone": {str(path): rate_json(rate) for path, rate in together.alone.items()},
        "together": rate_json(together.together),
        "setting": setting_json(together.setting),
        "share_of_sum": together.share,
        "of_the_fastest": together.speedup,
    }


def _directory(result: DirectoryResult) -> dict[str, Any]:
    disk = result.disk
    return {
        "path": str(disk.path),
        "file_system": disk.file_system,
        "device": disk.device,
        "models": list(disk.models),
        "link": disk.link,
        "direct": result.direct,
        "refused_engines": result.refusals,
        "notices": result.notices,
        "chosen": setting_json(result.chosen),
        "best": setting_json(result.best),
        "noise": result.noise(),
        "workloads": {
            workload.value: {
                "rate": rate_json(result.rate(workload)),
                "tight": outcome.tight,
                "finalists": [setting_json(key) for key in outcome.finalists],
                "settings": [
                    {
                        **(setting_json(key) or {}),
                        "rates": [sample.rate for sample in samples],
                    }
                    for key, samples in outcome.samples.taken.items()
                ],
            }
            for workload, outcome in result.outcomes.items()
        },
        "latencies": [
            {
                "workload": latency.workload.value,
                "block_bytes": latency.block_bytes,
                "depth": latency.depth,
                "count": latency.count,
                "seconds": {
                    f"p{share * 100:g}": value
                    for share, value in zip(PERCENTILES, latency.percentiles_s, strict=True)
                },
            }
            for latency in result.latencies
        ],
        **_extras(result),
    }


def _extras(result: DirectoryResult) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if result.gpu:
        extras["gpu"] = {
            workload.value: {
                "slot_bytes": outcome.best.slot_bytes,
                "slot_count": outcome.best.count,
                "rate": rate_json(Rate.of(outcome.samples.rates(outcome.best))),
            }
            for workload, outcome in result.gpu.items()
        }
    if result.sustained is not None:
        extras["sustained"] = {
            "verdict": result.sustained.verdict(),
            "pieces": [list(piece) for piece in result.sustained.pieces],
        }
    if result.exhausted is not None:
        extras["exhausted"] = {
            "verdict": result.exhausted.verdict(),
            "settings": result.exhausted.measured,
            "rounds": result.exhausted.rounds,
            "choice": rate_json(result.exhausted.choice),
            "beaten_by": [
                {"setting": setting_json(key), "of_choice": rate / own}
                for key, rate, own in result.exhausted.beaten_by
            ],
        }
    return extras


def rate_json(rate: Rate | None) -> dict[str, float] | None:
    """Return a rate as plain data."""
    if rate is None:
        return None
    return {"median": rate.median, "low": rate.low, "high": rate.high, "count": rate.count}


def setting_json(setting: Setting | None) -> dict[str, Any] | None:
    """Return a setting as plain data."""
    if setting is None:
        return None
    return {
        "engine": setting.engine,
        "block_bytes": setting.block_bytes,
        "block": size_text(setting.block_bytes),
        "depth": setting.depth,
        "registered": setting.registered,
        "alternates": setting.alternates,
    }
