"""The capability table: each row refuses exactly what it names, and all the rest is settings."""

import itertools
import random
import warnings
from typing import Any

import pytest

from estimators import ElementType, StateFormat, Tier
from zero.config import ConfigError, ConfigWarning, load_config
from zero.config.capabilities import AXES, OTHER, REFUSALS, SAME, WIDER, Combination, refusals
from zero.config.names import OPTIMIZERS, SUPPORTED_OPTIMIZERS

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
ELEMENTS = {
    "model": None,
    "fp32": ElementType.FP32,
    "bf16": ElementType.BF16,
    "fp16": ElementType.FP16,
}


def document_of(combination: Combination) -> dict[str, Any]:
    """Return a document that asks for a combination."""
    precision = combination.precision
    document: dict[str, Any] = {
        "zero_optimization": {
            "stage": int(combination.stage),
            "offload_param": {"device": combination.offload_param},
            "offload_optimizer": {"device": combination.offload_optimizer},
        },
        "tiers": {"state_format": combination.state_format},
        "data_types": {},
    }
    if precision in {"bf16", "fp16"}:
        document[precision] = {"enabled": True}
    elif precision != "model":
        document["data_types"]["param_dtype"] = precision
    other = {"fp32": "bf16"}.get(precision, "fp32")
    own = None if precision == "model" else precision
    gradients = {SAME: own, WIDER: "fp32", OTHER: "fp16" if precision != "fp16" else "bf16"}
    document["data_types"]["grad_accum_dtype"] = gradients[combination.gradients]
    document["communication_data_type"] = own if combination.collectives == SAME else other
    if combination.optimizer != "object":
        document["optimizer"] = {"type": combination.optimizer, "params": {"lr": 0.1}}
    count = AXES["directories"].index(combination.directories)
    if count:
        document["tiers"]["nvme"] = [{"path": f"/nvme{index}"} for index in range(count)]
    return document


def every_single_change() -> list[Combination]:
    """Return a combination that works, and all that differ from it in one axis or in two."""
    base = dict(
        zip(AXES, ("3", "none", "none", "model", "object", "exact", SAME, SAME, "one"), strict=True)
    )
    found = [base]
    for first, second in itertools.combinations(AXES, 2):
        found += [base | {first: a, second: b} for a in AXES[first] for b in AXES[second]]
    generator = random.Random(3)
    found += [{axis: generator.choice(values) for axis, values in AXES.items()} for _ in range(300)]
    unique = {tuple(entry.items()): entry for entry in found}
    return [Combination(**entry) for entry in unique.values()]


def test_the_table_is_the_truth() -> None:
    seen: dict[str, int] = {}
    works = 0
    for combination in every_single_change():
        uses_nvme = "nvme" in {combination.offload_param, combination.offload_optimizer}
        if uses_nvme and combination.directories == "none":
            continue  # an error of its own, before anything is combined
        if combination.precision == "fp32" and combination.gradients == WIDER:
            continue  # the same type
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConfigWarning)
            config = load_config(document_of(combination))
        assert config.combination() == combination
        expected = [row for row in REFUSALS if row.applies(combination)]
        if expected:
            with pytest.raises(ConfigError) as caught:
                config.settings(1)
            lines = str(caught.value).splitlines()
            assert lines == refusals(combination)
            for row, line in zip(expected, lines, strict=True):
                assert line.startswith(f"{row.key}: ")
                assert row.why in line
                assert row.instead in line
                seen[row.key] = seen.get(row.key, 0) + 1
            continue
        works += 1
        settings = config.settings(1)
        assert settings.stage == int(combination.stage)
        wider = ElementType.FP32 if combination.gradients == WIDER else None
        assert settings.gradient_element is wider
        assert settings.element is ELEMENTS[combination.precision]
        named = config.communication_data_type or "model"
        assert settings.reduction_element is ELEMENTS[named]
        assert settings.parameter_offload.tier is TIERS[combination.offload_param]
        assert settings.optimizer_offload.tier is TIERS[combination.offload_optimizer]
        assert settings.tiers.state_format is StateFormat(combination.state_format)
        assert len(settings.tiers.nvme) == AXES["directories"].index(combination.directories)
    assert works > 50
    assert seen.keys() == {row.key for row in REFUSALS}


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.key)
def test_rows_name_axes_and_values_that_exist(row) -> None:
    for axis, values in row.where.items():
        assert set(values) <= set(AXES[axis])
        assert set(values) != set(AXES[axis]), "a row that refuses everything"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_in_any_case(name: str) -> None:
    config = load_config(
        {"zero_optimization": {"stage": 3}, "optimizer": {"type": name.upper(), "params": {}}}
    )
    assert config.optimizer.type == name
    if name in SUPPORTED_OPTIMIZERS:
        made = config.settings(1).optimizer
        assert made.type_name == ("AdamW" if name == "Adam" else name)
    else:
        with pytest.raises(ConfigError, match=f"optimizer.type: optimizer {name} is not available"):
            config.settings(1)


def test_another_type_is_refused_only_where_it_differs() -> None:
    assert OTHER != SAME
    config = load_config(
        {
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "communication_data_type": "bf16",
            "data_types": {"grad_accum_dtype": "bf16"},
        }
    )
    assert config.settings(1).element is ElementType.BF16
