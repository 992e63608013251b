"""The field's estimates: its own numbers, and what it gets wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from estimators import field

GOLDENS = Path(os.environ.get("TIERZERO_GOLDENS", Path(__file__).parents[1] / "goldens"))
NUMBERS = {
    2: field.estimate_zero2_model_states_mem_needs,
    3: field.estimate_zero3_model_states_mem_needs,
}


def cases(name: str) -> list[dict]:
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))["cases"]


class Root(torch.nn.Module):
    """A module with parameters of its own beside those of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(100, 10))
        self.shift = torch.nn.Parameter(torch.zeros(7))
        self.child = torch.nn.Linear(10, 10)


def tied_embedding() -> torch.nn.Module:
    embedding = torch.nn.Embedding(1000, 64)
    head = torch.nn.Linear(64, 1000, bias=False)
    head.weight = embedding.weight
    middle = [torch.nn.Linear(64, 256), torch.nn.Linear(256, 64, bias=False)]
    return torch.nn.Sequential(embedding, *middle, head)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear_10x20_bias": lambda: torch.nn.Linear(10, 20),
    "seq_3_linears": lambda: torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Linear(64, 128), torch.nn.Linear(128, 8, bias=False)
    ),
    "tied_embedding": tied_embedding,
    "root_params": Root,
    "encoder_layer": lambda: torch.nn.TransformerEncoderLayer(64, 4, 256),
}


@pytest.mark.parametrize("stage", [2, 3])
def test_golden_numbers(stage: int) -> None:
    mine = [case for case in cases("estimators") if case["fn"] == f"zero{stage}"]
    assert len(mine) > 30
    for case in mine:
        assert NUMBERS[stage](**case["in"]) == tuple(case["out"].values()), case


def expected_rows(case: dict) -> list[str]:
    return [
        f"  {out['out'][0] / 2**30:7.2f}GB | {out['out'][1] / 2**30:6.2f}GB | "
        for out in case["out"]
    ]


@pytest.mark.parametrize("index", range(len(cases("estimators_live_cold"))))
def test_golden_tables(index: int, capsys: pytest.CaptureFixture[str]) -> None:
    case = cases("estimators_live_cold")[index]
    arguments = dict(case["in"])
    stage = arguments.pop("stage")
    for row in case["out"]:
        assert list(NUMBERS[stage](**row["in"])) == row["out"]
    name = f"estimate_zero{stage}_model_states_mem_needs_{case['fn']}"
    if case["fn"] == "all_live":
        arguments["model"] = MODELS[arguments["model"]]()
        size = field.size_of(arguments["model"])
        assert size.total_params == case["out"][0]["in"]["total_params"]
        assert (
            stage == 2
            or size.largest_layer_params == (case["out"][0]["in"]["largest_layer_params"])
        )
    getattr(field, name)(**arguments)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + len(case["out"])
    for line, start in zip(lines[4:], expected_rows(case), strict=True):
        assert line.startswith(start)


def test_the_tables_of_the_fields_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    field.estimate_zero3_model_states_mem_needs_all_cold(int(2851e6), int(32e6), 8, 1)
    assert capsys.readouterr().out.splitlines() == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params, 32M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "    71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "   127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "    63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "   127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "     1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "   127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]
    field.estimate_zero2_model_states_mem_needs_all_cold(int(2851e6), 8, 1)
    assert capsys.readouterr().out.splitlines()[4:] == [
        "   127.45GB |   5.31GB | offload_optimizer=cpu ",
        "   127.45GB |  11.28GB | offload_optimizer=none",
    ]


@pytest.mark.parametrize("name", MODELS)
def test_meta_models_count_like_real_ones(name: str) -> None:
    with torch.device("meta"):
        on_meta = field.size_of(MODELS[name]())
    assert on_meta == field.size_of(MODELS[name]())


def test_a_setup_without_gpus_is_refused() -> None:
    for stage, sizes in ((2, (10,)), (3, (10, 5))):
        with pytest.raises(ValueError, match="at least one GPU on at least one node"):
            NUMBERS[stage](*sizes, num_gpus_per_node=0)


@given(
    st.integers(1, 10**13),
    st.integers(1, 10**9),
    st.integers(1, 64),
    st.integers(1, 200),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_more_parameters_never_need_less(
    total: int, largest: int, gpus: int, nodes: int, switches: tuple[bool, bool, bool]
) -> None:
    smaller = NUMBERS[3](total, largest, gpus, nodes, *switches)
    larger = NUMBERS[3](2 * total, 2 * largest, gpus, nodes, *switches)
    assert all(0 <= less <= more for less, more in zip(smaller, larger, strict=True))
