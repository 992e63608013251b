"""What is on a device at the loss, and what is copied to it in a forward and its backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_ranks import on_ranks
from tests.support.turns import BLOCKS, Net, Returns, trained

pytestmark = pytest.mark.nvme
FAR = 10**9


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
    assert found["turn"] == root
    assert found["copied"] == root + 2 * sum(blocks)
    late = {BLOCKS[-1]: 1} if returns is Returns.LOSS else {}  # nothing tells when the loss is over
    assert found["kept"] == {"<root>": 1} and found["gather"] == {"<root>": 1} | late
    assert found["prefetch"] == dict.fromkeys(BLOCKS, 2) | late
    assert found["live"][0] == found["live"][1]


def test_units_are_kept_over_the_loss_where_a_key_says_so(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unit that is used later makes one leave that is used sooner."""
    written = trained(scratch, monkeypatch, both, stage3_max_reuse_distance=FAR)
    default = trained(scratch, monkeypatch, both)
    never = trained(scratch, monkeypatch, both, stage3_max_reuse_distance=0)
    kept = BLOCKS[-3:]
    sizes = written["full"]
    there = sum(sizes[name] for name in ("<root>", *kept))
    assert written["at the loss"] == 2 * [[there, ["<root>", *kept]]]
    assert written["turn"] == there == written["live"][1]
    assert written["kept"] == dict.fromkeys(("<root>", *kept), 1)
    assert written["prefetch"] == {name: 1 if name in kept else 2 for name in BLOCKS}
    assert written["copied"] == default["copied"] - sum(sizes[name] for name in kept)
    assert never["turn"] == sizes["<root>"]
    assert never["copied"] == default["copied"] + sizes["<root>"]
    assert written["bits"] == default["bits"] == never["bits"]


def test_ranks_agree_on_what_is_there(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gathers a block once in each pass, and nothing that it does not use."""

    def work(rank: int) -> list[dict[str, Any]]:
        keys: list[dict[str, int]] = [{}, {"stage3_max_reuse_distance": FAR}]
        return [trained(scratch / str(rank), monkeypatch, both, **each) for each in keys]

    for default, written in on_ranks(work, 2, scratch):
        there = sum(default["full"][name] for name in ("<root>", *BLOCKS[-3:]))
        assert default["at the loss"] == 2 * [[default["full"]["<root>"], ["<root>"]]]
        assert written["at the loss"] == 2 * [[there, ["<root>", *BLOCKS[-3:]]]]
        assert default["prefetch"] == dict.fromkeys(BLOCKS, 2)
        assert default["bits"] == written["bits"]


def test_what_a_drive_holds_is_kept_over_the_loss(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trained(scratch, monkeypatch, both, "nvme")
    kept = BLOCKS[-3:]
    assert found["kept"] == dict.fromkeys(("<root>", *kept), 1)
    there = sum(found["full"][name] for name in ("<root>", *kept))
    assert found["at the loss"] == 2 * [[there, ["<root>", *kept]]]
    assert found["turn"] == there
