"""The field's estimates as commands: `estimate_zero3_model_states_mem_needs --model llama-3-8b`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from estimators import field
from estimators.field import ModelSize
from estimators.models import PRESETS, ModelError, load_model, model_families
from estimators.words import parse_count

Measure = Callable[[str], ModelSize]
"""Builds the model that `module:function` names and returns its size."""

_EPILOG = f"""\
A model is a Hugging Face style config.json, a folder with one or with safetensors files,
module:function that returns a torch model, or a name.

model_type: {", ".join(model_families())}

names: {", ".join(PRESETS)}

The numbers are the field's: parameters, gradients and Adam's state, nothing else. What this library
allocates, activations, buffers and NVMe included, and how long a step is, says
`python -m zero plan MODEL`.
"""


def main(stage: int, arguments: Sequence[str] | None = None, measure: Measure | None = None) -> int:
    """Run the command of stage 2 or 3 and return its exit status."""
    parser = _parser(stage)
    options = parser.parse_args(arguments)
    try:
        size = _size(options, stage, measure)
        if options.json:
            sys.stdout.write(json.dumps(_numbers(stage, size, options), indent=1) + "\n")
            return 0
        where = (options.gpus, options.nodes, options.buffer_factor)
        if stage == 2:
            field.estimate_zero2_model_states_mem_needs_all_cold(size.total_params, *where)
        else:
            field.estimate_zero3_model_states_mem_needs_all_cold(
                size.total_params, size.largest_layer_params, *where
            )
    except (ModelError, ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    return 0


def _parser(stage: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"estimate_zero{stage}_model_states_mem_needs",
        description=f"Memory of parameters, gradients and optimizer state in ZeRO stage {stage}.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = made.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="NAME_OR_CONFIG", help="see below")
    model.add_argument("--params", type=count_option, metavar="N", help="all parameters: 7e9, 7B")
    if stage == 3:
        made.add_argument(
            "--largest-layer",
            type=count_option,
            metavar="N",
            help="parameters of the largest layer",
        )
    made.add_argument("--gpus", type=count_option, default=1, metavar="N", help="GPUs of a node")
    made.add_argument("--nodes", type=count_option, default=1, metavar="N")
    made.add_argument("--buffer-factor", type=float, default=1.5, metavar="F")
    made.add_argument("--json", action="store_true", help="print JSON, in bytes")
    return made


def count_option(text: str) -> int:
    """Return a count of a command line, written as `4`, `7e9` or `7B`; for `argparse`."""
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_option(text: str) -> Path:
    """Return a file of a command line that can be written when the work is done; for `argparse`."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}: make it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: you have no right to")
    return path


def _size(options: argparse.Namespace, stage: int, measure: Measure | None) -> ModelSize:
    if options.model is None:
        if stage == 3 and options.largest_layer is None:
            raise ValueError("--params needs --largest-layer in stage 3; or name a --model")
        return ModelSize(options.params, options.largest_layer if stage == 3 else 0)
    if is_function(options.model):
        if measure is None:
            raise ValueError(f"{options.model} builds a torch model; run the installed command")
        return measure(options.model)
    model = load_model(options.model)
    return ModelSize(model.numel, model.largest_layer_numel)


def is_function(source: str) -> bool:
    """Tell whether a model is named as `module:function`."""
    module, _, function = source.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _numbers(stage: int, size: ModelSize, options: argparse.Namespace) -> dict[str, object]:
    where = {"num_gpus_per_node": options.gpus, "num_nodes": options.nodes}
    factor = {"additional_buffer_factor": options.buffer_factor}
    rows: list[dict[str, object]] = []
    if stage == 2:
        for offload in (True, False):
            cpu, gpu = field.estimate_zero2_model_states_mem_needs(
                size.total_params, cpu_offload=offload, **where, **factor
            )
            rows.append({"offload_optimizer": offload, "cpu_bytes": cpu, "gpu_bytes": gpu})
    else:
        for optimizer, params in ((True, True), (True, False), (False, False)):
            for zero_init in (True, False):
                cpu, gpu, _ = field.estimate_zero3_model_states_mem_needs(
                    size.total_params,
                    size.largest_layer_params,
                    cpu_offload=optimizer,
                    cpu_offload_params=params,
                    zero_init=zero_init,
                    **where,
                    **factor,
                )
                rows.append(
                    {
                        "offload_param": params,
                        "offload_optimizer": optimizer,
                        "zero_init": zero_init,
                        "cpu_bytes": cpu,
                        "gpu_bytes": gpu,
                    }
                )
    return {
        "total_params": size.total_params,
        "largest_layer_params": size.largest_layer_params,
        **where,
        "rows": rows,
    }
