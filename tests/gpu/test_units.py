"""What stays on a GPU, and what is kept there between uses, changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.zero import test_persistence, test_reuse

pytestmark = [pytest.mark.gpu, pytest.mark.nvme]


@pytest.fixture(autouse=True)
def same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("reruns", [False, True])
def test_a_kept_unit_is_not_copied_again(scratch: Path, reruns: bool) -> None:  # noqa: FBT001
    never, always = (
        test_reuse.trained(scratch, 0, each, reruns=reruns) for each in (0, test_reuse.FAR)
    )
    assert always["bits"] == never["bits"]
    assert always["copied"] < never["copied"]
    assert always["kept"]["<root>"] == 1
    assert always["room"] >= 0 and always["left"] == 0


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_what_stays_is_not_copied(scratch: Path, tier: str) -> None:
    none, some, everything = (
        test_persistence.trained(scratch, 0, each, tier=tier, update_device="device")
        for each in (0, 800, 10**5)
    )
    for each in (some, everything):
        assert (each["bits"], each["state"]) == (none["bits"], none["state"])
        assert none["copied"][0] - each["copied"][0] == (2 * 2 + 1) * each["values"] > 0
