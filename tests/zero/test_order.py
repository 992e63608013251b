"""The recorded order predicts as far as it is known, and never past an update."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import zero
from tests.support.configs import make_config
from tests.support.tiny import make_batch, make_model
from zero.order import NextUse, Phase, RecordedOrder, Use
from zero.prefetch import READ_AHEAD

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
PASS = [(FORWARD, 0), (FORWARD, 1), (FORWARD, 2), (BACKWARD, 0), (BACKWARD, 2), (BACKWARD, 1)]


def visited(order: RecordedOrder, use: Use) -> list[Use]:
    order.visit(*use)
    return list(order.following())


def test_a_recorded_pass_is_predicted_to_its_end() -> None:
    order = RecordedOrder()
    assert [visited(order, use) for use in PASS] == [[], [], [], [], [], []]
    assert [visited(order, use) for use in PASS] == [
        PASS[position + 1 :] for position in range(len(PASS))
    ]


def test_the_next_use_tells_what_comes_before_and_of_which_pass_it_is() -> None:
    order = RecordedOrder()
    for use in (*PASS, *PASS[:3]):
        order.visit(*use)
    sizes = (100, 10, 1)
    for unit, between in enumerate((0, 101, 100)):
        use = order.next_use(unit, sizes.__getitem__, 101)
        assert use == NextUse(between, is_after_loss=True)
    assert order.next_use(1, sizes.__getitem__, 100) is None
    order.visit(BACKWARD, 0)
    assert order.next_use(1, sizes.__getitem__, 100) == NextUse(1, is_after_loss=False)


def test_nothing_follows_the_end_of_a_pass() -> None:
    """Two forwards, of which one has its backward after it, and then another backward."""
    passes = (
        [(FORWARD, 0), (FORWARD, 1)],
        [(FORWARD, 2), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, 2)],
        [(BACKWARD, 1), (BACKWARD, 0)],
    )
    order = RecordedOrder()
    found: list[list[Use]] = []
    for is_known in (False, True):
        for uses in passes:
            order.end_pass()
            found.clear()
            for use in uses:
                order.visit(*use)
                found.append([*order.following(in_pass=True)])
            if is_known:
                assert found == [uses[at:] for at in range(1, len(uses) + 1)]
    order.end_pass()
    order.visit(FORWARD, 0)
    assert visited(order, (FORWARD, 1)) == passes[1] + passes[2]  # to read a drive ahead
    assert order.next_use(1, lambda _: 0, 1) is None


def test_a_changed_order_is_learnt_and_a_cycle_ends() -> None:
    order = RecordedOrder()
    for use in PASS:
        order.visit(*use)
    order.visit(FORWARD, 0)
    order.visit(FORWARD, 2)
    assert visited(order, (FORWARD, 1))[0] == (FORWARD, 2)
    order = RecordedOrder()
    for _ in range(3):
        order.visit(FORWARD, 7)
    assert visited(order, (FORWARD, 7)) == [(FORWARD, 7)]


@pytest.mark.nvme
def test_spare_slots_hold_more_than_the_next_unit(scratch: Path) -> None:
    """While a block is used, the parameters of several following ones are read ahead."""
    config = make_config(
        parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="500KB"
    )
    config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
    config["tiers"]["slot_count"] = 8
    engine, _, _, _ = zero.initialize(model=make_model(layers=6), config=config)
    store = engine._runtime.store
    ahead: list[int] = []
    for block in engine.module.blocks:
        block.register_forward_hook(
            lambda *_: ahead.append(sum(slot.is_read_ahead for slot in store.slots))
        )
    for step in range(2):
        ahead.clear()
        engine.backward(engine(*make_batch(step)))
        engine.step()
    assert len(ahead) == 6
    assert max(ahead) >= 3
    before = engine.ledger.snapshot()
    engine.backward(engine(*make_batch(2)))
    moved = engine.ledger.snapshot().minus(before).bytes_by_class["nvme read parameter"]
    parameters = sum(
        size
        for group in engine.plan.memory.sub_groups
        if group.extent is not None
        for kind, _, size in group.extent.sections
        if kind.name == "PARAMETER"
    )
    assert moved == 2 * parameters  # forward and backward, nothing read twice
    engine.destroy()


@pytest.mark.nvme
@pytest.mark.parametrize(
    ("key", "blocks", "expected"),
    [
        ("stage3_prefetch_bucket_size", 0, 0),
        ("stage3_prefetch_bucket_size", 1, 1),
        ("stage3_prefetch_bucket_size", 2, 2),
        ("stage3_prefetch_bucket_size", "auto", 1),
        ("stage3_max_live_parameters", 0, 0),
        ("stage3_max_live_parameters", 2, 2),
    ],
)
def test_reading_ahead_ends_where_the_keys_say(
    scratch: Path, key: str, blocks: int | str, expected: int
) -> None:
    """The ledger shows how much was read ahead at once; the results do not change."""
    losses = []
    for limited in (True, False):
        config = make_config(
            parameters="nvme", optimizer="nvme", nvme_path=str(scratch), host_memory="500KB"
        )
        config["zero_optimization"]["offload_param"]["max_in_cpu"] = 0
        config["tiers"]["slot_count"] = 8
        model = make_model(layers=6)
        numel = sum(each.numel() for each in model.blocks[0].parameters())
        root = sum(each.numel() for each in model.parameters()) - 6 * numel
        if limited and isinstance(blocks, str):  # 0.9 x hidden size squared is less than a block
            model.config = SimpleNamespace(hidden_size=16)
            assert 16 * 16 < numel > root
            config["zero_optimization"][key] = blocks
        elif limited:
            extra = root if "live" in key and blocks else 0
            config["zero_optimization"][key] = blocks * numel + extra
        engine, _, _, _ = zero.initialize(model=model, config=config)
        for step in range(3):
            loss = engine(*make_batch(step))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        unit = next(each for each in engine._runtime.units if each.name == "blocks.0")
        ahead = engine.ledger.peaks.get(READ_AHEAD, 0)
        if limited:
            assert ahead == expected * unit.shard_bytes
        else:
            assert ahead >= 3 * unit.shard_bytes
        engine.destroy()
    assert losses[0] == losses[1]
