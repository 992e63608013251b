"""What a forward keeps is what autograd keeps, of every family, type and kind of attention."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import ElementType
from estimators.activations import AttentionKind, Batch, activations
from estimators.models import model_of_config, model_of_headers, preset
from tests.estimators.test_models import golden_cases
from tests.support.transformers_models import (
    NO_DROPOUT,
    SAMPLES,
    SEQUENCE,
    VARIATIONS,
    kept_by_autograd,
)

TOLERANCE = 0.025
"""Of tiny models, where masks, buckets and constants of a block still count."""


def predicted(config: dict[str, Any], name: str) -> int:
    element, kind = name.split()
    batch = Batch(SAMPLES, SEQUENCE, AttentionKind(kind))
    found = activations(model_of_config({**config, **NO_DROPOUT}), batch, ElementType(element))
    assert found is not None
    return found.kept_bytes


@pytest.mark.parametrize("name", VARIATIONS)
def test_golden_activations_are_what_autograd_keeps(name: str) -> None:
    case = golden_cases()[name]
    assert len(case["kept"]) >= 2
    for how, kept in case["kept"].items():
        assert predicted(case["config"], how) == pytest.approx(kept, rel=TOLERANCE), how


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama, biased", "mixtral", "roberta"])
def test_golden_activations_are_what_transformers_keeps_today(name: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; the recorded golden file is compared instead")
    case = golden_cases()[name]
    kept = kept_by_autograd(case["config"], torch.bfloat16, fused=True)
    assert kept == case["kept"]["bf16 fused"]


def test_checkpointing_keeps_inputs_and_runs_one_block_again() -> None:
    model = preset("llama-3-8b")
    plain = activations(model, Batch(2, 1024), ElementType.BF16)
    again = activations(model, Batch(2, 1024, checkpointing=True), ElementType.BF16)
    assert plain is not None
    assert again is not None
    inputs = 32 * 2 * 1024 * 4096 * 2
    assert plain.kept_bytes - again.kept_bytes == 32 * again.recomputed_bytes - inputs
    assert plain.recomputed_bytes == 0 < again.recomputed_bytes
    assert plain.loss_bytes == again.loss_bytes == 2 * 4 * 2 * 1024 * 128256


def test_dropout_keeps_a_byte_an_element() -> None:
    config = VARIATIONS["gpt2, wide"]
    with_dropout = activations(model_of_config(config), Batch(1, 10), ElementType.BF16)
    without = activations(model_of_config({**config, **NO_DROPOUT}), Batch(1, 10), ElementType.BF16)
    assert with_dropout is not None
    assert without is not None
    assert with_dropout.kept_bytes - without.kept_bytes == 10 * 3 * 2 * 48


def test_nothing_is_said_of_a_model_of_which_only_sizes_are_known() -> None:
    assert activations(model_of_headers({"a": (2, 2)}, "m"), Batch(), ElementType.BF16) is None


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(sorted(VARIATIONS)),
    samples=st.integers(1, 64),
    sequence=st.integers(1, 4096),
    kind=st.sampled_from(AttentionKind),
    checkpointing=st.booleans(),
)
def test_more_tokens_keep_more(
    name: str, samples: int, sequence: int, kind: AttentionKind, *, checkpointing: bool
) -> None:
    model = model_of_config(VARIATIONS[name])

    def kept(samples: int, sequence: int) -> tuple[int, ...]:
        batch = Batch(samples, sequence, kind, checkpointing=checkpointing)
        found = activations(model, batch, ElementType.BF16)
        assert found is not None
        return (found.kept_bytes, found.recomputed_bytes, found.working_bytes, found.loss_bytes)

    here = kept(samples, sequence)
    assert all(each >= 0 for each in here)
    assert all(a >= b for a, b in zip(kept(samples + 1, sequence), here, strict=True))
    assert all(a >= b for a, b in zip(kept(samples, sequence + 1), here, strict=True))


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample of one token, got 0 x 5"):
        Batch(0, 5)
