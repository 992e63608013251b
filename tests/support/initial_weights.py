"""Digests of initial weights by how the model is built. Run under torchrun for more ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero
from tests.support.configs import make_config
from tests.support.hf_like import LateModel, init_weights, make_tokens
from tests.support.observe import as_bits, digest, full_parameters


@dataclass(frozen=True)
class Case:
    """What is built: initialised late or not, tied or not."""

    late: bool
    tied: bool
    config: dict[str, Any]


def unsharded(case: Case) -> nn.Module:
    """Build as without this library."""
    model = LateModel(tied=case.tied)
    if case.late:
        torch.manual_seed(7)
        model.apply(init_weights)
    return model


def under_init(case: Case) -> nn.Module:
    """Build under zero.Init."""
    with zero.Init(config_dict_or_path=case.config):
        return unsharded(case)


def under_init_then_apply(case: Case) -> nn.Module:
    """Build under zero.Init, and initialise after it."""
    with zero.Init(config_dict_or_path=case.config):
        model = LateModel(tied=case.tied)
    if case.late:
        torch.manual_seed(7)
        model.apply(init_weights)
    return model


def converted(case: Case) -> nn.Module:
    """Build, then convert."""
    model = unsharded(case)
    zero.Init(module=model, config_dict_or_path=case.config)
    return model


def meta_converted(case: Case) -> nn.Module:
    """Build on meta, then convert module by module."""
    model = on_meta(case)
    zero.Init(
        module=model, config_dict_or_path=case.config, init_fn=init_weights if case.late else None
    )
    return model


def on_meta(case: Case) -> nn.Module:
    """Build on meta; zero.initialize does the rest."""
    with torch.device("meta"):
        model = LateModel(tied=case.tied)
    if case.late:
        torch.manual_seed(7)
    return model


WAYS: dict[str, Callable[[Case], nn.Module]] = {
    way.__name__: way
    for way in (
        unsharded,
        under_init,
        under_init_then_apply,
        converted,
        meta_converted,
        on_meta,
    )
}


FEW = ("unsharded", "under_init", "on_meta")
CASES = (("fp32", True, False), ("bf16", True, True), ("fp32", False, False))


def digests(path: str, ways: Sequence[str] = tuple(WAYS)) -> dict[str, str]:
    """Return the digests of initial weights, of masters and of weights a step later."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    found = {}
    for dtype, late, tied in CASES:
        config = make_config(
            parameters="nvme",
            optimizer="nvme",
            nvme_path=path,
            host_memory="192KB",
            sub_group_size=1024,
            dtype=dtype,
        )
        for name in ways:
            torch.manual_seed(3 + rank if late else 3)  # with a late initialiser rank 0 decides
            model = WAYS[name](Case(late, tied, config))
            engine, _, _, _ = zero.initialize(
                model=model, config=config, init_fn=init_weights if late else None
            )
            weights = digest(full_parameters(engine))
            masters = {
                each.name: as_bits(each.fp32_param) for each in zero.iterate_states(engine.module)
            }
            engine.backward(engine(make_tokens()))
            engine.step()
            found[f"{dtype} late={late} {name}"] = (
                f"{weights[:12]} {digest(dict(sorted(masters.items())))[:12]}"
                f" {digest(full_parameters(engine))[:12]}"
            )
            engine.destroy()
    return found


def main() -> None:
    """Write the digests of this rank."""
    torch.set_num_threads(1)
    zero.init_distributed()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    found = digests(sys.argv[2])
    (Path(sys.argv[1]) / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
