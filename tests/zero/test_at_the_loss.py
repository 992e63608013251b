"""What is on a device at the loss, and what is copied to it in a forward and its backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.at_the_loss import BLOCKS, Net, Returns, trained
from tests.support.fork_ranks import on_ranks

pytestmark = pytest.mark.nvme


def both() -> Net:
    return Net(Returns.BOTH)


@pytest.mark.parametrize("returns", Returns)
def test_at_the_loss_the_root_unit_alone_is_there(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, returns: Returns
) -> None:
    """Nothing is copied that is not used, and each block comes ahead where that costs no memory."""
    found = trained(scratch, monkeypatch, lambda: Net(returns))
    root, *blocks = (found["full"][name] for name in ("<root>", *BLOCKS))
    assert min(root, *blocks) > 0
    assert found["at the loss"] == 2 * [[root, ["<root>"]]]
    assert found["planned"] == root
    assert found["copied"] == root + 2 * sum(blocks)
    late = {BLOCKS[-1]: 1} if returns is Returns.LOSS else {}  # nothing tells when the loss is over
    assert found["kept"] == {"<root>": 1} and found["gather"] == {"<root>": 1} | late
    assert found["prefetch"] == dict.fromkeys(BLOCKS, 2) | late
    assert found["live"][0] == found["live"][1]


def test_ranks_agree_on_what_is_there(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gathers a block once in each pass, and nothing that it does not use."""

    def work(rank: int) -> list[dict[str, Any]]:
        keys: list[dict[str, int]] = [{}, {"stage3_max_reuse_distance": 0}]
        return [trained(scratch / str(rank), monkeypatch, both, **each) for each in keys]

    for default, never in on_ranks(work, 2, scratch):
        root = default["full"]["<root>"]
        assert default["at the loss"] == never["at the loss"] == 2 * [[root, ["<root>"]]]
        assert default["planned"] == never["planned"] == root
        assert default["prefetch"] == dict.fromkeys(BLOCKS, 2)
        assert default["kept"] == {"<root>": 1} and not never["kept"]
        assert default["bits"] == never["bits"]


@pytest.mark.parametrize("written", [False, True])
def test_what_a_drive_holds_is_kept_over_the_loss(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, *, written: bool
) -> None:
    keys = {"stage3_max_reuse_distance": 10**9} if written else {}
    found = trained(scratch, monkeypatch, both, "nvme", **keys)
    never = trained(scratch, monkeypatch, both, "nvme", stage3_max_reuse_distance=0)
    sizes, kept = found["full"], BLOCKS[-3:]
    there = sum(sizes[name] for name in ("<root>", *kept))
    assert found["kept"] == dict.fromkeys(("<root>", *kept), 1)
    assert found["at the loss"] == 2 * [[there, ["<root>", *kept]]]
    assert found["planned"] == there == found["live"][1]
    assert never["at the loss"] == 2 * [[sizes["<root>"], ["<root>"]]]
    assert never["planned"] == sizes["<root>"]
    assert never["copied"] - found["copied"] == there
    assert found["bits"] == never["bits"]
