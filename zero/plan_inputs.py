"""From a command line and a configuration to the plain inputs of a plan."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from estimators import DriveRates, ElementType, Persistence, StateFormat, Tier
from estimators.activations import AttentionKind, Batch
from estimators.command import is_function
from estimators.fit import budget_of
from estimators.hardware import Bandwidths, Gpu, bandwidths_of, measured, parse_gpu
from estimators.inputs import DeviceKind, Node, PlanInputs
from estimators.models import ModelShape, load_model
from estimators.words import parse_bytes
from zero import machine
from zero.config import ConfigError, load_config
from zero.config.loading import ConfigWarning
from zero.config.zero_models import ZeroOptimization
from zero.model_functions import build_on_meta, shape_of
from zero.optimizer import rule_of, whole_tensors_of
from zero.planning import updates_on_device
from zero.settings import NvmeSettings, Settings
from zero.swap_paths import nvme_budget

ELEMENTS = {"bf16": ElementType.BF16, "fp16": ElementType.FP16, "fp32": ElementType.FP32}
TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
FORMATS = {each.value: each for each in StateFormat}


@dataclass(frozen=True)
class Asked:
    """A model, and what the command line says of the machine."""

    model: ModelShape
    node: Node
    host_memory_bytes: int
    """All memory of the node."""
    host_source: str


def find_model(source: str) -> ModelShape:
    """Return the model that a command names.

    Raises:
        ModelError: if there is none.
    """
    if is_function(source):
        return shape_of(build_on_meta(source), source)
    return load_model(source)


def ask(options: argparse.Namespace) -> Asked:
    """Return the model and the machine that the options describe.

    Raises:
        ValueError: if a size, a GPU or a file of rates cannot be read.
    """
    model = find_model(options.model)
    gpu = _gpu(options)
    given = parse_bytes(options.host) if options.host else None
    available = machine.available_host_bytes() if given is None else given
    source = "--host" if given is not None else "this machine's available memory"
    node = Node(
        device=DeviceKind.CPU if gpu is None else DeviceKind.CUDA,
        gpus=options.gpus,
        count=options.nodes,
        device_bytes=gpu.memory_bytes or None if gpu is not None else None,
        host_memory_bytes=given,
        nvme_bytes=parse_bytes(options.nvme) if options.nvme else None,
        bandwidths=_bandwidths(options, gpu),
        drive_bytes=_size(options.drive_size, "--drive-size"),
        rated_written_bytes=_size(options.tbw, "--tbw"),
    )
    return Asked(model, node, available, source)


def _size(text: str | None, option: str) -> int | None:
    """Return a size that cannot be nothing."""
    if text is None:
        return None
    size = parse_bytes(text)
    if not size:
        raise ValueError(f"{option} {text} is no size; leave it out if it is not known")
    return size


def _gpu(options: argparse.Namespace) -> Gpu | None:
    if options.gpu is None:
        return replace(parse_gpu("0"), name="unnamed GPU")
    if options.gpu.lower() == "cpu":
        return None
    gpu = parse_gpu(options.gpu)
    if not gpu.memory_bytes:
        raise ValueError(f"--gpu {options.gpu} has no memory; leave it out if it is not known")
    return gpu


def _bandwidths(options: argparse.Namespace, gpu: Gpu | None) -> Bandwidths:
    found = bandwidths_of(gpu)
    if options.measured is not None:
        found = measured(found, Path(options.measured))
    if options.nvme_read or options.nvme_write:
        read = parse_bytes(options.nvme_read or options.nvme_write)
        written = parse_bytes(options.nvme_write or options.nvme_read)
        drive = DriveRates(float(read), float(written), "given")
        found = replace(found, drive=drive, mixed_bytes_per_s=None)
    return found


def default_persistence() -> Persistence:
    """Return which parameters stay where no configuration says it."""
    usual = ZeroOptimization()
    return Persistence(
        usual.stage3_param_persistence_threshold, usual.stage3_model_persistence_threshold
    )


def read_settings(path: str, world_size: int, hidden: int) -> Settings:
    """Return the settings of a configuration file, without its warnings.

    Raises:
        ConfigError: if it is not valid.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return load_config(path, hidden_size=hidden or None).settings(world_size)


def plan_inputs(options: argparse.Namespace, asked: Asked) -> PlanInputs:
    """Return the inputs of a plan: a configuration's where there is one, options before it.

    Raises:
        ConfigError: if the configuration is not valid.
        ValueError: if options do not go together.
    """
    batch = Batch(
        1 if options.batch is None else options.batch,
        options.seq,
        AttentionKind(options.attention),
        options.checkpointing,
    )
    inputs = PlanInputs(
        asked.model,
        asked.node,
        batch,
        element=ELEMENTS[options.dtype or "bf16"],
        persistence=default_persistence(),
    )
    given = None
    if options.config is not None:
        settings = read_settings(options.config, asked.node.world_size, asked.model.hidden)
        inputs = _configured(inputs, settings, options)
        given = settings.element
    if options.dtype is None and given is None:
        inputs = _as_built(inputs)
    inputs = _overridden(inputs, options)
    if inputs.node.host_bytes is None:
        budget = budget_of(asked.host_memory_bytes, inputs.node.gpus)
        memory = asked.host_memory_bytes
        node = replace(inputs.node, host_bytes=budget, host_memory_bytes=memory)
        inputs = replace(inputs, node=node)
    return inputs


def _as_built(inputs: PlanInputs) -> PlanInputs:
    """Return inputs that keep the types of a built model, as `zero.initialize` does."""
    numels: dict[ElementType, int] = {}
    for each in inputs.model.parameters:
        if each.element is not None:
            numels[each.element] = numels.get(each.element, 0) + each.numel
    if not numels:
        return inputs
    usual = max(numels, key=lambda element: numels[element])
    return replace(inputs, element=usual, keeps_elements=True)


def _configured(inputs: PlanInputs, settings: Settings, options: argparse.Namespace) -> PlanInputs:
    tiers = settings.tiers
    node = inputs.node
    capacity = nvme_budget(tiers.nvme, 1, 4096) if tiers.nvme else None
    node = replace(
        node,
        host_bytes=tiers.host_memory_bytes,
        nvme_bytes=node.nvme_bytes if node.nvme_bytes is not None else capacity,
        bandwidths=_with_given(node.bandwidths, tiers.nvme, options),
    )
    rule = rule_of(settings.optimizer)
    world_size, shapes = node.world_size, inputs.model.parameters
    whole, groups = whole_tensors_of(settings.optimizer, shapes, world_size)
    samples = settings.batch.micro_batch_size if options.batch is None else options.batch
    return replace(
        inputs,
        node=node,
        batch=replace(inputs.batch, samples=samples),
        accumulation_steps=settings.batch.accumulation_steps,
        element=ELEMENTS[options.dtype] if options.dtype else settings.element or inputs.element,
        gradient_element=settings.gradient_element,
        reduction_element=settings.reduction_element,
        parameter_tier=settings.parameter_offload.tier,
        optimizer_tier=settings.optimizer_offload.tier,
        state_format=tiers.state_format,
        sub_group_numel=settings.sub_group_numel,
        slot_count=tiers.slot_count,
        holds_all=tiers.double_backward,
        max_host_parameter_numel=settings.parameter_offload.max_host_numel,
        device_budget_bytes=None
        if tiers.device_memory_bytes is None
        else tiers.device_memory_bytes // node.gpus,
        updates_on_device=updates_on_device(settings, rule),
        shares_update=tiers.update_device == "auto",
        stage=settings.stage,
        persistence=settings.persistence,
        rule=rule,
        whole=whole,
        parameter_groups=groups,
        format_overrides=tuple(
            (each.pattern, each.state_format) for each in tiers.format_overrides
        ),
        placement_rates=_placement_rates(settings, node),
        prefetch_limit=settings.prefetch_limit,
        live_limit=settings.live_limit,
        reuse_numel=settings.reuse_numel,
        is_durable=tiers.durable is not None,
        commit_steps=tiers.durable.every_steps if tiers.durable is not None else 1,
    )


def _placement_rates(settings: Settings, node: Node) -> DriveRates | None:
    """Return what `zero.initialize` will know of the drive when it places: a rank's share."""
    given = _given_rates(settings.tiers.nvme)
    if given is None:
        return node.bandwidths.drive if settings.tiers.measures_bandwidth else None
    read, written = given.read_bytes_per_s, given.write_bytes_per_s
    return DriveRates(read / node.gpus, written / node.gpus, "given")


def _given_rates(nvme: tuple[NvmeSettings, ...]) -> DriveRates | None:
    """Return the rates of all drives together, if the configuration gives all of them."""
    rates = [
        (each.read_bytes_per_s, each.write_bytes_per_s)
        for each in nvme
        if each.read_bytes_per_s is not None and each.write_bytes_per_s is not None
    ]
    if not rates or len(rates) < len(nvme):
        return None
    read, written = (float(sum(column)) for column in zip(*rates, strict=True))
    return DriveRates(read, written, "given")


def _with_given(
    found: Bandwidths, nvme: tuple[NvmeSettings, ...], options: argparse.Namespace
) -> Bandwidths:
    """Return rates with those that the configuration gives, unless the command line does."""
    given = _given_rates(nvme)
    if given is None or options.measured or options.nvme_read or options.nvme_write:
        return found
    return replace(found, drive=given)


def _overridden(inputs: PlanInputs, options: argparse.Namespace) -> PlanInputs:
    if options.accumulation is not None:
        inputs = replace(inputs, accumulation_steps=options.accumulation)
    if options.offload_param is not None:
        inputs = replace(inputs, parameter_tier=TIERS[options.offload_param])
    if options.offload_optimizer is not None:
        inputs = replace(inputs, optimizer_tier=TIERS[options.offload_optimizer])
    if options.format is not None:
        inputs = replace(inputs, state_format=FORMATS[options.format])
    return inputs


__all__ = ["Asked", "ConfigError", "ask", "find_model", "plan_inputs", "read_settings"]
