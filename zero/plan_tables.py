"""Plans and fits for people: tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from estimators import Tier
from estimators.estimate import Estimate
from estimators.fit import Choice, Purchase
from estimators.inputs import DeviceKind, PlanInputs
from estimators.models import ModelShape
from estimators.summary import spares_nvme
from estimators.words import NVME_IS_SPARED, bytes_text, count_text, seconds_text

_DEVICE_NAMES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.NVME: "nvme"}


def describe_model(model: ModelShape) -> str:
    """Return one line on a model."""
    active = ""
    if model.active_numel != model.numel:
        active = f" ({count_text(model.active_numel)} active)"
    return (
        f"{model.name}: {count_text(model.numel)} parameters{active} in"
        f" {1 + len(model.blocks)} units"
    )


def describe_job(inputs: PlanInputs) -> str:
    """Return one line on how a model is trained, and on what."""
    node, batch = inputs.node, inputs.batch
    devices = f"{node.gpus} x {node.bandwidths.device_name}"
    nodes = f" on each of {node.count} nodes" if node.count > 1 else ""
    steps = f" x {inputs.accumulation_steps} micro-batches" if inputs.accumulation_steps > 1 else ""
    how = "checkpointing" if batch.checkpointing else "no checkpointing"
    tokens = inputs.model.tokens(batch.sequence)
    return (
        f"{devices}{nodes}; {batch.samples} x {tokens} tokens{steps} a rank, {how},"
        f" {batch.attention.value} attention; parameters {inputs.element.value}, state"
        f" {inputs.state_format.value}; stage {inputs.stage}, lowest tiers: parameters"
        f" {_DEVICE_NAMES[inputs.parameter_tier]}, optimizer"
        f" {_DEVICE_NAMES[inputs.optimizer_tier]}"
    )


def plan_view(estimate: Estimate) -> RenderableType:
    """Return the whole answer for people."""
    return Group(
        escape(describe_model(estimate.inputs.model)),
        escape(describe_job(estimate.inputs)),
        _memory_table(estimate),
        *(escape(line) for line in (*_verdict(estimate), *time_lines(estimate), *_notes(estimate))),
    )


def _memory_table(estimate: Estimate) -> Table:
    table = Table(title="Each rank", title_justify="left")
    table.add_column("tier")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("")
    previous = None
    for line in estimate.lines():
        if previous not in (None, line.tier):
            table.add_section()
        name = line.tier.value if line.tier is not previous else ""
        note = "" if line.at_peak else "at another moment"
        table.add_row(name, line.what, bytes_text(line.size_bytes), note)
        previous = line.tier
    table.add_section()
    for what, size, limit in _totals(estimate):
        of = "" if limit is None else f"of {bytes_text(limit)}"
        table.add_row("", what, bytes_text(size), of, style="bold")
    return table


def _totals(estimate: Estimate) -> Iterator[tuple[str, int, int | None]]:
    node = estimate.inputs.node
    if node.device is DeviceKind.CUDA:
        peak = f"device at its peak ({estimate.peak_moment})"
        yield peak, estimate.device_bytes, node.device_bytes
    share = "" if node.gpus == 1 else f", {node.gpus} ranks"
    yield f"host arena of a node{share}", estimate.memory.host_bytes * node.gpus, node.host_bytes
    yield f"host of a node{share}", estimate.host_bytes * node.gpus, None
    if estimate.nvme_bytes:
        yield f"swap files of a node{share}", estimate.nvme_bytes * node.gpus, node.nvme_bytes


def _verdict(estimate: Estimate) -> list[str]:
    problems = estimate.problems()
    if problems:
        return [f"It does not fit: {each}." for each in problems]
    conditions = _conditions(estimate)
    fits = f"It fits if {' and '.join(conditions)}." if conditions else "It fits."
    return [fits, NVME_IS_SPARED] if spares_nvme(estimate.memory) else [fits]


def _conditions(estimate: Estimate) -> list[str]:
    """Return what must be so where a size of the machine was not given."""
    node, conditions = estimate.inputs.node, []
    if node.device is DeviceKind.CUDA and node.device_bytes is None:
        conditions.append(f"each GPU has {bytes_text(estimate.device_bytes)} (--gpu was not given)")
    if estimate.nvme_bytes and node.nvme_bytes is None:
        needed = bytes_text(estimate.nvme_bytes * node.gpus)
        conditions.append(f"the drives of a node have {needed} (--nvme was not given)")
    return conditions


def time_lines(estimate: Estimate) -> list[str]:
    """Return what is said of time, bytes moved and wear."""
    time, node = estimate.time, estimate.inputs.node
    pace = estimate.tokens_per_second
    least = f"A step takes at least {seconds_text(time.lower_bound)} ({time.binding} binds)"
    if pace is None:
        lines = [f"{least}, and what the model computes, which is not known: no pace is told."]
    else:
        lines = [
            f"{least}, about {seconds_text(time.expected)} as things usually go:"
            f" {count_text(pace)} tokens/s."
        ]
    parts = [f"{what} {seconds_text(seconds)}" for what, seconds in time.parts.items() if seconds]
    if parts:
        lines.append(f"Least time by resource: {', '.join(parts)}.")
    read = estimate.traffic.total_read_bytes * node.gpus
    if read or estimate.wear.written_bytes_per_step:
        written = estimate.wear.written_bytes_per_step
        lines.append(
            f"Drives of a node, a step: {bytes_text(read)} read, {bytes_text(written)} written."
        )
        lines += _wear_lines(estimate)
    return lines


def _wear_lines(estimate: Estimate) -> Iterator[str]:
    worn = estimate.wear
    if worn.drive_writes_per_day is not None:
        yield f"Wear: {worn.drive_writes_per_day:.3g} drive writes a day while it trains."
    if worn.steps_until_worn is not None and worn.days_until_worn is not None:
        yield (
            f"The rated {bytes_text(estimate.inputs.node.rated_written_bytes or 0)} are written"
            f" after {count_text(worn.steps_until_worn)} steps,"
            f" {worn.days_until_worn:.3g} days of training."
        )


def _notes(estimate: Estimate) -> Iterator[str]:
    rates = estimate.inputs.node.bandwidths
    mixed = rates.mixed_bytes_per_s
    at_once = "" if mixed is None else f", {mixed / 1e9:.2f} GB/s of both at once"
    yield (
        f"Rates: {rates.device_name} {rates.flops / 1e12:.0f} TFLOP/s, link"
        f" {rates.link_bytes_per_s / 1e9:.0f} GB/s each way, host memory"
        f" {rates.host_bytes_per_s / 1e9:.0f} GB/s; drive {rates.drive.describe()}{at_once}."
    )
    if rates.drive.source == "assumed":
        yield (
            "Measure the drive with `tierzero-nvme-tune DIR --json tune.json` and pass --measured"
            " tune.json."
        )
    if estimate.activations is None:
        spare = estimate.spare_device_bytes
        room = "" if spare is None else f" Each GPU has {bytes_text(max(spare, 0))} left for them."
        yield (
            "Activations and compute are not counted: only sizes are known of this model; give"
            f" its config.json.{room}"
        )


def fit_view(
    model: ModelShape, found: Sequence[Choice], bought: Sequence[Purchase], more: Sequence[str]
) -> RenderableType:
    """Return what fits, the fastest in detail, and what more would buy."""
    parts: list[RenderableType] = [
        escape(describe_model(model)),
        escape(_answer(found)),
    ]
    if found:
        parts.append(_choice_table(found))
        best = found[0].estimate
        parts.append(escape(f"The fastest: {describe_job(best.inputs)}."))
        parts += [escape(line) for line in (*time_lines(best), *_notes(best))]
    if bought:
        parts.append(_purchase_table(found[0] if found else None, bought))
    parts += [escape(line) for line in more]
    return Group(*parts)


def _answer(found: Sequence[Choice]) -> str:
    if not found:
        return "No: nothing of what could be tried fits."
    best = found[0].estimate
    if best.activations is None:
        return (
            "Yes, as far as parameters, gradients and state go; what its forward keeps is unknown."
        )
    conditions = _conditions(best)
    if_so = f", if {' and '.join(conditions)}" if conditions else ""
    return (
        f"Yes, it can be trained here{if_so}: a step of {best.tokens_per_step:,} tokens takes about"
        f" {seconds_text(best.time.expected)} (at least {seconds_text(best.time.lower_bound)})."
    )


def _choice_table(found: Sequence[Choice]) -> Table:
    table = Table(title="What fits, fastest first", title_justify="left")
    for heading in ("stage", "parameters", "optimizer", "state", "checkpointing"):
        table.add_column(heading)
    headings = ("batch", "sub-group", "device", "host", "nvme", "step", "bound by", "tokens/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for choice in found:
        inputs, estimate = choice.inputs, choice.estimate
        gpus = inputs.node.gpus
        table.add_row(
            str(inputs.stage),
            _DEVICE_NAMES[inputs.parameter_tier],
            _DEVICE_NAMES[inputs.optimizer_tier],
            inputs.state_format.value,
            "yes" if inputs.batch.checkpointing else "no",
            str(inputs.batch.samples),
            count_text(max(group.numel for group in estimate.memory.sub_groups)),
            bytes_text(estimate.device_bytes),
            bytes_text(estimate.host_bytes * gpus),
            bytes_text(estimate.nvme_bytes * gpus) if estimate.nvme_bytes else "-",
            *_paces(estimate),
        )
    return table


def _paces(estimate: Estimate) -> tuple[str, str, str]:
    """Return time of a step, what binds, and tokens a second, for the table."""
    pace, time = estimate.tokens_per_second, estimate.time
    if pace is None:
        return f"> {seconds_text(time.lower_bound)}", time.binding, "not known"
    return seconds_text(time.expected), time.binding, count_text(pace)


def _purchase_table(best: Choice | None, bought: Sequence[Purchase]) -> Table:
    table = Table(title="What one more resource buys", title_justify="left")
    for heading in ("with", "parameters", "optimizer", "batch", "tokens/s", "speed"):
        table.add_column(heading)
    for each in bought:
        if each.best is None:
            table.add_row(each.what, "does not fit either")
            continue
        inputs, pace = each.best.inputs, each.best.estimate.tokens_per_second
        speed = "not known" if best is not None else "fits"
        if best is not None and pace is not None:
            speed = f"{pace / best.tokens_per_second:.2f} x"
        table.add_row(
            each.what,
            _DEVICE_NAMES[inputs.parameter_tier],
            _DEVICE_NAMES[inputs.optimizer_tier],
            str(inputs.batch.samples),
            "not known" if pace is None else count_text(pace),
            speed,
        )
    return table
