"""`python -m zero plan` and `python -m zero fit`: will it fit, where, and how fast?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from estimators import PlanError, Tier
from estimators.command import count_option, output_option
from estimators.estimate import estimate
from estimators.fit import (
    EXACT_FORMATS,
    Choice,
    Wanted,
    budget_of,
    choices,
    deepest,
    largest_preset,
    nearest_problem,
    purchases,
)
from estimators.inputs import Node
from estimators.models import ModelError
from estimators.words import count_text
from zero.errors import ConfigError
from zero.plan_chart import write_chart
from zero.plan_inputs import ELEMENTS, FORMATS, TIERS, Asked, ask, plan_inputs
from zero.plan_tables import fit_view, plan_view

_WIDTH_OF_A_FILE = 150
_ERRORS = (ModelError, ConfigError, PlanError, ValueError, OSError, ImportError, AttributeError)

_EPILOG = """\
MODEL is a Hugging Face style config.json, a folder with one or with safetensors files,
module:function that returns a torch model, or a name such as llama-3-8b
(`estimate_zero3_model_states_mem_needs --help` lists them).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 where it does not fit, and 2 where it cannot be told."""
    options = _parser().parse_args(arguments)
    try:
        asked = ask(options)
        return _plan(options, asked) if options.command == "plan" else _fit(options, asked)
    except _ERRORS as error:
        Console(stderr=True, emoji=False).print(
            escape(f"{options.command}: {error}"), highlight=False
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m zero", description="ZeRO with tiered storage.")
    commands = made.add_subparsers(dest="command", required=True)
    for name, text in (
        ("plan", "what a model takes of each tier, and how long a step is"),
        ("fit", "what of a model fits a machine, fastest first, with a ready configuration"),
    ):
        command = commands.add_parser(
            name, help=text, description=text, epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        _add_common(command)
        if name == "plan":
            _add_plan(command)
        else:
            _add_fit(command)
    return made


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="MODEL")
    add("--gpu", metavar="NAME|SIZE", help="rtx4090, h100, 24GB ...; cpu computes on the CPU")
    add("--gpus", type=count_option, default=1, metavar="N", help="GPUs of a node")
    add("--nodes", type=count_option, default=1, metavar="N")
    add("--host", metavar="SIZE", help="memory of a node; this machine's where left out")
    add("--nvme", metavar="SIZE", help="room for swap files on a node's drives")
    add("--seq", type=count_option, default=4096, metavar="N", help="tokens of a sample")
    add("--batch", type=count_option, metavar="N", help="samples of a micro-batch of a rank")
    add("--dtype", choices=sorted(ELEMENTS), help="type of the parameters; bf16 where left out")
    add("--measured", metavar="FILE", help="rates: JSON of `tierzero-nvme-tune --json FILE`")
    add("--nvme-read", metavar="SIZE", help="bytes a second that the drives read")
    add("--nvme-write", metavar="SIZE", help="bytes a second that they write")
    add("--drive-size", metavar="SIZE", help="size of the drives, for drive writes a day")
    add("--tbw", metavar="SIZE", help="bytes that the drives are rated to write, 600TB")
    add("--json", action="store_true", help="print JSON")


def _add_plan(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--config", metavar="FILE", help="ZeRO configuration; options come before it")
    add("--accumulation", type=count_option, metavar="N", help="micro-batches of a step")
    add("--offload-param", choices=sorted(TIERS))
    add("--offload-optimizer", choices=sorted(TIERS))
    add("--format", choices=sorted(FORMATS), help="how optimizer state is stored")
    add("--checkpointing", action="store_true", help="activation checkpointing of each block")
    add("--attention", choices=("fused", "eager"), default="fused")
    add("--plot", type=output_option, metavar="FILE", help="chart of memory by tier: .png or .html")


def _add_fit(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--train-batch-size", type=count_option, metavar="N", help="samples of a step of all ranks")
    add("--lossy", action="store_true", help="also formats that do not keep every bit")
    add("--write", type=output_option, metavar="FILE", help="write the fastest one's configuration")
    add("--nvme-path", default="/tmp", metavar="DIR", help="directory for it")
    add("--largest", action="store_true", help="also the largest models that fit (slower)")
    add("--plot", type=output_option, metavar="FILE", help="its chart: .png or .html")


def _plan(options: argparse.Namespace, asked: Asked) -> int:
    made = estimate(plan_inputs(options, asked))
    if options.plot is not None:
        write_chart(made, options.plot)
    if options.json:
        _write(json.dumps(made.to_dict(), indent=1) + "\n")
    else:
        _console().print(plan_view(made), highlight=False)
    return 1 if made.problems() else 0


def _fit(options: argparse.Namespace, asked: Asked) -> int:
    if options.gpu is None:
        raise ValueError(
            "what fits depends on the GPU: name one with --gpu (24GB, h100 ... or cpu)"
        )
    budget = budget_of(asked.host_memory_bytes, options.gpus)
    node = replace(asked.node, host_bytes=budget, host_memory_bytes=asked.host_memory_bytes)
    if node.nvme_bytes is None:
        node = replace(node, nvme_bytes=0)
    wanted = Wanted(
        sequence=options.seq,
        samples=options.batch,
        train_batch_size=options.train_batch_size,
        element=ELEMENTS[options.dtype or "bf16"],
        formats=tuple(FORMATS.values()) if options.lossy else EXACT_FORMATS,
    )
    found = choices(asked.model, node, wanted)
    bought = purchases(asked.model, node, wanted)
    more = _remarks(options, asked, node, wanted, found)
    config = configuration(found[0], options.nvme_path) if found else None
    if config is not None and options.write is not None:
        options.write.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        more.append(f"Its configuration is in {options.write}.")
    if found and options.plot is not None:
        write_chart(found[0].estimate, options.plot)
    if options.json:
        document = {
            "choices": [choice.estimate.to_dict() for choice in found],
            "configuration": config,
            "notes": more,
        }
        _write(json.dumps(document, indent=1) + "\n")
        return 0 if found else 1
    _console().print(fit_view(asked.model, found, bought, more), highlight=False)
    if config is not None and options.write is None:
        _console().print("Its configuration (--write FILE keeps it):")
        _write(json.dumps(config, indent=2) + "\n")
    return 0 if found else 1


def _remarks(
    options: argparse.Namespace,
    asked: Asked,
    node: Node,
    wanted: Wanted,
    found: Sequence[Choice],
) -> list[str]:
    """Return what is said beside the tables."""
    budget = (found[0].inputs.node if found else node).host_bytes
    more = [f"Host memory: {asked.host_source}, {budget} bytes of it for tiers.host_memory."]
    if not found:
        more.append(f"Nothing fits: {nearest_problem(asked.model, node, wanted)}.")
        if options.nvme is None:
            more.append("No drive was tried: --nvme SIZE says how much room one has.")
    if found and found[0].inputs.batch.checkpointing:
        more.append(
            "Checkpointing is switched on in the model: with transformers by"
            " model.gradient_checkpointing_enable()."
        )
    if options.largest and not asked.model.stacks:
        more.append("Of a model of which only sizes are known no deeper one can be told.")
    elif options.largest:
        largest = (deepest(asked.model, node, wanted), largest_preset(node, wanted))
        more += [
            f"The largest {what}: {each.name}, {count_text(each.numel)} parameters in"
            f" {1 + len(each.blocks)} units."
            for what, each in zip(("of these widths", "by name"), largest, strict=True)
            if each is not None
        ]
    return more


def configuration(choice: Choice, nvme_path: str) -> dict[str, Any]:
    """Return a configuration that trains as a choice says; `zero.config check` accepts it."""
    inputs = choice.inputs
    names = {tier: name for name, tier in TIERS.items()}
    zero: dict[str, Any] = {
        "stage": inputs.stage,
        "stage3_param_persistence_threshold": inputs.persistence.numel,
        "stage3_model_persistence_threshold": inputs.persistence.total_numel,
    }
    for key, tier in (
        ("offload_param", inputs.parameter_tier),
        ("offload_optimizer", inputs.optimizer_tier),
    ):
        if tier is not Tier.DEVICE:
            zero[key] = {"device": names[tier]}
            if tier is Tier.NVME:
                zero[key]["nvme_path"] = nvme_path
    tiers: dict[str, Any] = {
        "host_memory": inputs.node.host_bytes,
        "state_format": inputs.state_format.value,
    }
    if Tier.NVME in (inputs.parameter_tier, inputs.optimizer_tier):
        tiers["nvme"] = [{"path": nvme_path, "capacity": inputs.node.nvme_bytes}]
    precision = {key: {"enabled": inputs.element is ELEMENTS[key]} for key in ("bf16", "fp16")}
    return {
        "train_micro_batch_size_per_gpu": inputs.batch.samples,
        "gradient_accumulation_steps": inputs.accumulation_steps,
        "gradient_clipping": 1.0,
        **precision,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": zero,
        "tiers": tiers,
    }


def _console() -> Console:
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_FILE
    return console


def _write(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    sys.exit(main())
