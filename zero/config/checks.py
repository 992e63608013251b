"""What must agree between keys, whatever this version can do."""

from __future__ import annotations

from zero.config.config import ZeroConfig
from zero.config.values import shown


def cross_check(config: ZeroConfig, notices: list[str]) -> list[str]:
    """Return the contradictions of a configuration; append what is merely worth knowing."""
    return [*_precision(config), *_nvme(config, notices)]


def _precision(config: ZeroConfig) -> list[str]:
    fp16 = config.fp16 is not None and config.fp16.enabled
    bf16 = config.bf16 is not None and config.bf16.enabled
    if fp16 and bf16:
        return [
            "fp16.enabled: true contradicts bf16.enabled = true; keep one of the two, bf16 where "
            "the hardware has it"
        ]
    types = config.data_types
    written = types.param_dtype if types is not None else None
    enabled = "fp16" if fp16 else "bf16" if bf16 else None
    if enabled is not None and config.torch_autocast is not None and config.torch_autocast.enabled:
        return [
            f"torch_autocast.enabled: true contradicts {enabled}.enabled = true; autocast keeps the"
            " parameters in fp32: keep one of the two"
        ]
    if written is not None and enabled is not None and written != enabled:
        return [
            f"data_types.param_dtype: {shown(written)} contradicts {enabled}.enabled = true; "
            "remove one of the two"
        ]
    return []


def _nvme(config: ZeroConfig, notices: list[str]) -> list[str]:
    zero = config.zero
    problems = []
    paths = config.nvme_paths()
    tiers_given = config.tiers is not None and bool(config.tiers.nvme)
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        if section is None or section.device != "nvme":
            continue
        path = f"zero_optimization.{name}.nvme_path"
        if not tiers_given and section.nvme_path is None:
            other = f', as in "nvme_path": {shown(str(paths[0].path))}' if paths else ""
            problems.append(
                f"{path}: null with device nvme; write the directory of the swap file{other}, or "
                'tiers.nvme = [{"path": ...}]'
            )
        if tiers_given and section.nvme_path not in {None, *(entry.path for entry in paths)}:
            notices.append(
                f"{path} = {shown(str(section.nvme_path))} has no effect: tiers.nvme names the "
                "directories; remove one of the two"
            )
    durable = config.tiers.durable if config.tiers is not None else None
    if durable and not paths:
        problems.append(
            f"tiers.durable: {shown(durable)} without a directory to keep the run in; write"
            ' tiers.nvme = [{"path": ...}]'
        )
    if len({entry.path for entry in paths}) != len(paths):
        problems.append("tiers.nvme: names one directory twice; keep one entry for each")
    weighted = [entry.weight is not None for entry in paths]
    if any(weighted) and not all(weighted):
        missing = weighted.index(False)
        problems.append(
            f"tiers.nvme[{missing}].weight: left out although another directory has one; give all "
            "of them a weight, or none to have their rates measured"
        )
    return problems
