"""The layout of a striped file: pure arithmetic, so every property of it is tried at large."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aio_ops.striping import MOST_STRIPES, StripeLayout, plan_stripes

ALIGNMENT = 512
WEIGHTS = st.lists(
    st.floats(min_value=1e-3, max_value=1e12) | st.integers(1, 9), min_size=1, max_size=7
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[StripeLayout, list[float], list[int | None]]:
    weights = draw(WEIGHTS)
    unit_bytes = draw(st.integers(1, 40)) * ALIGNMENT
    size_bytes = draw(st.integers(1, 300 * ALIGNMENT) | st.integers(1 << 40, 1 << 45))
    if size_bytes > 1 << 30:
        unit_bytes = draw(st.integers(1 << 30, 1 << 36)) // ALIGNMENT * ALIGNMENT
    capacities: list[int | None] = [None] * len(weights)
    if draw(st.booleans()):
        parts = draw(st.lists(st.integers(0, 99), min_size=len(weights), max_size=len(weights)))
        room = -(-size_bytes // ALIGNMENT)
        total = sum(parts)
        capacities = [
            (room * part // total + (index == 0) * len(weights) + 1) * ALIGNMENT if total else None
            for index, part in enumerate(parts)
        ]
    layout = plan_stripes(
        size_bytes, weights, alignment_bytes=ALIGNMENT, unit_bytes=unit_bytes, capacities=capacities
    )
    return layout, weights, capacities


@given(layouts(), st.data())
def test_pieces_tile_a_request_and_lie_inside_their_members(
    made: tuple[StripeLayout, list[float], list[int | None]], data: st.DataObject
) -> None:
    layout, _, _ = made
    offset = data.draw(st.integers(0, layout.size_bytes))
    longest = min(layout.size_bytes - offset, 64 * layout.unit_bytes)
    size_bytes = data.draw(st.integers(0, longest))
    position = 0
    pieces = layout.pieces(offset, size_bytes)
    for piece in pieces:
        assert piece.size_bytes > 0
        assert piece.start == position
        assert 0 <= piece.offset <= layout.member_bytes[piece.member] - piece.size_bytes
        position += piece.size_bytes
    assert position == size_bytes
    for before, after in itertools.pairwise(pieces):
        assert before.member != after.member  # else they were one
        assert (offset + after.start) % ALIGNMENT == 0
        assert after.offset % ALIGNMENT == 0


@given(layouts())
def test_a_whole_file_uses_every_byte_of_every_member_once(
    made: tuple[StripeLayout, list[float], list[int | None]],
) -> None:
    layout, _, _ = made
    ends = [0] * len(layout.member_bytes)
    for piece in layout.pieces(0, layout.size_bytes):
        assert piece.offset == ends[piece.member]  # in order and without a gap: disjoint
        ends[piece.member] += piece.size_bytes
    assert tuple(ends) == layout.member_bytes
    assert sum(layout.member_bytes) == layout.size_bytes


@given(layouts(), st.data())
def test_a_part_of_a_request_is_where_the_whole_says(
    made: tuple[StripeLayout, list[float], list[int | None]], data: st.DataObject
) -> None:
    layout, _, _ = made
    at = data.draw(st.integers(0, layout.size_bytes - 1))
    begin = data.draw(st.integers(max(0, at - 9 * layout.unit_bytes), at))
    stop = data.draw(st.integers(at + 1, min(layout.size_bytes, at + 1 + 9 * layout.unit_bytes)))
    [alone] = layout.pieces(at, 1)
    [among] = [
        piece
        for piece in layout.pieces(begin, stop - begin)
        if piece.start <= at - begin < piece.start + piece.size_bytes
    ]
    assert (alone.member, alone.offset) == (among.member, among.offset + at - begin - among.start)


@given(layouts())
def test_shares_follow_the_weights_to_a_sector_and_keep_to_capacities(
    made: tuple[StripeLayout, list[float], list[int | None]],
) -> None:
    layout, weights, capacities = made
    for share, capacity in zip(layout.member_bytes, capacities, strict=True):
        assert capacity is None or share <= capacity
    free = [
        index
        for index, (share, capacity) in enumerate(zip(layout.member_bytes, capacities, strict=True))
        if capacity is None or share + ALIGNMENT <= capacity
    ]
    left_bytes = sum(layout.member_bytes[index] for index in free)
    weight = sum(Fraction(weights[index]) for index in free)
    for index in free:
        ideal = left_bytes * Fraction(weights[index]) / weight
        assert abs(layout.member_bytes[index] - ideal) < (2 + len(weights)) * ALIGNMENT
    if all(capacity is None for capacity in capacities):
        for index, share in enumerate(layout.member_bytes):
            ideal = layout.size_bytes * Fraction(weights[index]) / weight
            assert abs(share - ideal) < 2 * ALIGNMENT  # one, and one for a short last sector


@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(50, 200))
def test_every_part_of_the_file_is_spread_like_the_whole(weights: list[int], count: int) -> None:
    layout = plan_stripes(count * 4096, weights, alignment_bytes=4096, unit_bytes=4096)
    for start in range(0, count - 40, 7):
        used = [0] * len(weights)
        for piece in layout.pieces(start * 4096, 40 * 4096):
            used[piece.member] += piece.size_bytes // 4096
        for own, weight in zip(used, weights, strict=True):
            assert abs(own - 40 * weight / sum(weights)) < len(weights)


def test_a_slow_member_gets_its_stripes_in_turn() -> None:
    layout = plan_stripes(8 * 4096, [3, 1], alignment_bytes=4096, unit_bytes=4096)
    assert list(layout.members) == [0, 0, 1, 0, 0, 0, 1, 0]
    assert layout.member_bytes == (6 * 4096, 2 * 4096)


def test_the_unit_of_an_enormous_file_grows() -> None:
    size_bytes = (1 << 62) - 1
    layout = plan_stripes(size_bytes, [1.5, 1], alignment_bytes=4096, unit_bytes=4096)
    assert len(layout.starts) <= MOST_STRIPES + 2
    assert layout.unit_bytes % 4096 == 0
    assert sum(layout.member_bytes) == size_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": []}, "1 to 1024 members, 0 weights"),
        ({"weights": [1, 0]}, "weight of member 1 must be a positive number, got 0"),
        ({"weights": [-2.0]}, "weight of member 0 must be a positive number, got -2.0"),
        ({"weights": [float("nan")]}, "must be a positive number, got nan"),
        ({"weights": [float("inf")]}, "must be a positive number, got inf"),
        ({"size_bytes": 0}, "cannot have 0 bytes"),
        ({"unit_bytes": 1000}, "multiple of the members' alignment of 512, got 1000"),
        ({"capacities": [1]}, "1 capacities were given for 2 members"),
        ({"capacities": [-1, None]}, "cannot be negative"),
        ({"capacities": [1023, 512]}, "which hold 1024 in whole sectors of 512"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(changes: dict[str, object], said: str) -> None:
    given_values = {
        "size_bytes": 4096,
        "weights": [1, 1],
        "alignment_bytes": 512,
        "unit_bytes": 512,
        **changes,
    }
    with pytest.raises(ValueError, match=said):
        plan_stripes(**given_values)
