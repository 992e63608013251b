"""Spellings of older files: each works, with a notice that gives the new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zero.config.values import shown
from zero.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Alias:
    """An old key of one section and the key that it became."""

    section: str
    old: str
    new: str


ALIASES = (
    Alias("", "bfloat16", "bf16"),
    Alias("aio", "thread_count", "intra_op_parallelism"),
    *(
        Alias("zero_optimization", f"stage3_gather_fp16_weights_on_model_save{suffix}", new)
        for suffix, new in (("", "stage3_gather_16bit_weights_on_model_save"),)
    ),
    *(
        Alias("zero_optimization", name.removeprefix("stage3_"), name)
        for name in (
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
        )
    ),
    Alias("optimizer.params", "adamw_mode", "adam_w_mode"),
)

OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_params": "offload_param",
    "cpu_offload_param": "offload_param",
}
PIN_MEMORY = "cpu_offload_use_pin_memory"


def modernise(document: dict[str, Any]) -> list[str]:
    """Rewrite old spellings in place and return a notice for each."""
    notices: list[str] = []
    for alias in ALIASES:
        section = _section(document, alias.section)
        if section is not None and alias.old in section:
            prefix = f"{alias.section}." if alias.section else ""
            _rename(section, alias.old, alias.new, prefix, notices)
    _modernise_zero(document, notices)
    return notices


def _section(document: dict[str, Any], path: str) -> dict[str, Any] | None:
    section: Any = document
    for name in path.split(".") if path else []:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _rename(section: dict[str, Any], old: str, new: str, prefix: str, notices: list[str]) -> None:
    if new in section:
        raise ConfigError(
            f"{prefix}{old} is the old spelling of {prefix}{new}, and both are written "
            f"({shown(section[old])} and {shown(section[new])}); keep {prefix}{new}"
        )
    section[new] = section.pop(old)
    notices.append(f"{prefix}{old} is an old spelling; write {prefix}{new}")


def _modernise_zero(document: dict[str, Any], notices: list[str]) -> None:
    zero = document.get("zero_optimization")
    if isinstance(zero, bool):
        document["zero_optimization"] = {"stage": int(zero)}
        notices.append(
            f"zero_optimization: {shown(zero)} is an old spelling; write "
            f'"zero_optimization": {{"stage": {int(zero)}}}'
        )
        return
    if not isinstance(zero, dict):
        return
    for old, new in OLD_OFFLOAD.items():
        if old in zero:
            _modernise_offload(zero, old, new, notices)
    if PIN_MEMORY in zero:
        _modernise_pin_memory(zero, notices)


def _modernise_offload(zero: dict[str, Any], old: str, new: str, notices: list[str]) -> None:
    value = zero.pop(old)
    path = f"zero_optimization.{old}"
    if value is not None and not isinstance(value, bool):
        raise ConfigError(
            f'{path}: must be true or false, got {shown(value)}; write "{new}": {{"device": "cpu"}}'
        )
    if value and zero.get(new) is not None:
        raise ConfigError(
            f"{path} is the old spelling of zero_optimization.{new}, and both are written; keep "
            f"zero_optimization.{new}"
        )
    if value:
        zero[new] = {"device": "cpu"}
    device = "cpu" if value else "none"
    notices.append(
        f'{path} is an old spelling; write zero_optimization.{new}: {{"device": "{device}"}}'
    )


def _modernise_pin_memory(zero: dict[str, Any], notices: list[str]) -> None:
    value = zero.pop(PIN_MEMORY)
    path = f"zero_optimization.{PIN_MEMORY}"
    if value is not None and not isinstance(value, bool):
        raise ConfigError(
            f'{path}: must be true or false, got {shown(value)}; write "pin_memory" in '
            "offload_optimizer and offload_param"
        )
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        if isinstance(section, dict) and value is not None:
            if section.get("pin_memory", value) != value:
                raise ConfigError(
                    f"{path} = {shown(value)} contradicts zero_optimization.{name}.pin_memory = "
                    f"{shown(section['pin_memory'])}; keep the latter"
                )
            section["pin_memory"] = value
    notices.append(
        f"{path} is an old spelling; write pin_memory in offload_optimizer and offload_param"
    )
