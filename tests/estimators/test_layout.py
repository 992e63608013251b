"""Layout is arithmetic: shards tile, padding is bounded, nothing overlaps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimators import (
    ElementType,
    StateFormat,
    align_up,
    flat_layout,
    record_layout,
    shard_bounds,
    shard_pieces,
    split_evenly_bounded,
)
from estimators.layout import SHARD_ALIGNMENT_NUMEL, TENSOR_ALIGNMENT_BYTES

NUMELS = st.lists(
    st.one_of(st.integers(0, 5), st.integers(0, 3_000_000), st.integers(262143, 262145)), max_size=8
)
WORLD_SIZES = st.sampled_from([1, 2, 3, 4, 7, 64])


@given(NUMELS, st.sampled_from([2, 4]), WORLD_SIZES)
def test_shards_tile_and_padding_is_bounded(
    numels: list[int], element_bytes: int, world_size: int
) -> None:
    layout = flat_layout(numels, element_bytes, world_size)
    bounds = [shard_bounds(layout, rank) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == layout.padded_numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert len({stop - start for start, stop in bounds}) == 1
    per_tensor = TENSOR_ALIGNMENT_BYTES // element_bytes
    limit = len(numels) * per_tensor + SHARD_ALIGNMENT_NUMEL * world_size
    assert layout.numel <= layout.padded_numel < layout.numel + limit
    for offset in layout.offsets:
        assert offset * element_bytes % TENSOR_ALIGNMENT_BYTES == 0


@given(NUMELS, WORLD_SIZES)
def test_every_element_lies_in_exactly_one_piece(numels: list[int], world_size: int) -> None:
    layout = flat_layout(numels, 4, world_size)
    covered: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(numels))}
    for rank in range(world_size):
        end = 0
        for piece in shard_pieces(layout, rank):
            assert piece.start >= end
            end = piece.start + piece.numel
            covered[piece.index].append((piece.first, piece.first + piece.numel))
        assert end <= layout.shard_numel
    for index, numel in enumerate(numels):
        edges = covered[index]
        assert sum(stop - start for start, stop in edges) == numel
        assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))


@given(st.integers(0, 10_000_000), st.integers(64, 1_000_000))
def test_sub_groups_tile_within_their_limit(numel: int, limit: int) -> None:
    numel = align_up(numel, SHARD_ALIGNMENT_NUMEL)
    bounds = split_evenly_bounded(numel, limit)
    assert sum(stop - start for start, stop in bounds) == numel
    assert all(0 < stop - start <= limit for start, stop in bounds)
    assert all(start % SHARD_ALIGNMENT_NUMEL == 0 for start, _ in bounds)
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]


@pytest.mark.parametrize(
    ("state_format", "element", "bytes_each"),
    [
        (StateFormat.FP32, ElementType.BF16, 12),
        (StateFormat.EXACT, ElementType.BF16, 10),
        (StateFormat.EXACT, ElementType.FP32, 8),
        (StateFormat.FP32, ElementType.FP32, 8),
    ],
)
@given(numel=st.integers(1, 100_000))
def test_records_hold_what_their_format_says(
    state_format: StateFormat, element: ElementType, bytes_each: int, numel: int
) -> None:
    numel = align_up(numel, SHARD_ALIGNMENT_NUMEL)
    layout = record_layout(state_format, element, numel)
    assert layout.size_bytes == bytes_each * numel
    end = 0
    for field in layout.fields:
        assert field.offset_bytes >= end
        assert field.offset_bytes % 64 == 0
        end = field.offset_bytes + field.size_bytes
    assert end <= layout.size_bytes


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size"):
        flat_layout([1], 4, 0)
    with pytest.raises(ValueError, match="-1 elements"):
        flat_layout([-1], 4, 1)
    with pytest.raises(ValueError, match="rank 2"):
        shard_bounds(flat_layout([1], 4, 2), 2)
    with pytest.raises(ValueError, match="at least 64"):
        split_evenly_bounded(100, 63)
