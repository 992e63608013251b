"""Where a shard is cut into sub-groups."""

from hypothesis import given
from hypothesis import strategies as st

from estimators import SHARD_ALIGNMENT_NUMEL
from estimators.layout import TILE_NUMEL, split_evenly_bounded


@given(st.integers(0, 1 << 28), st.integers(1, 1 << 20))
def test_cuts_are_few_aligned_and_cover_all(numel, units) -> None:
    most = units * SHARD_ALIGNMENT_NUMEL
    if numel // most > 5000:
        numel %= 5000 * most
    ranges = split_evenly_bounded(numel, most)
    assert len(ranges) <= -(-numel // most)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges)][: len(ranges)]
    assert sum(stop - start for start, stop in ranges) == numel
    assert all(0 < stop - start <= most for start, stop in ranges)
    assert all(start % SHARD_ALIGNMENT_NUMEL == 0 for start, _ in ranges)


def test_long_sub_groups_are_cut_at_whole_tiles() -> None:
    ranges = split_evenly_bounded(51_380_224, 12_900_000)
    assert len(ranges) == 4
    assert all(start % TILE_NUMEL == 0 for start, _ in ranges)
