"""The formats that round: equal bits everywhere, and one step's error bounded by the oracle."""

from __future__ import annotations

import collections.abc
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimators import (
    ElementType,
    StateFormat,
    UpdateRule,
    flat_layout,
    record_fields,
    shard_pieces,
)
from offload import (
    AdagradScalars,
    AdamScalars,
    AdamWScalars,
    LionScalars,
    NamedPiece,
    Rounding,
    RoundingKey,
    SgdScalars,
    StateArrays,
)
from offload.arrays import numpy_dtype
from offload.codes import (
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    join_short,
    random_words,
    split_short,
)
from offload.kernels import Kernels
from tests.support import lossy, reference_rules
from tests.support.kernels import (
    HYPERPARAMETERS,
    PATTERNS,
    assert_same_bits,
    hostile,
    make_kernels,
    ordinary,
)
from tests.support.reference import quieted, round_to_bf16

LOSSY = [StateFormat.BF16, StateFormat.COMPACT]
RULES = {
    UpdateRule.ADAMW: (AdamWScalars, HYPERPARAMETERS),
    UpdateRule.ADAM: (AdamScalars, reference_rules.HYPERPARAMETERS["adam"]),
    UpdateRule.LION: (LionScalars, reference_rules.HYPERPARAMETERS["lion"]),
    UpdateRule.ADAGRAD: (AdagradScalars, reference_rules.HYPERPARAMETERS["adagrad"]),
    UpdateRule.SGD: (SgdScalars, reference_rules.HYPERPARAMETERS["sgd"]),
}
KEY = RoundingKey.derive(5, 1, "layer.weight", 0)


def scalars_of(rule: UpdateRule, step: int):
    made, hyperparameters = RULES[rule]
    return made.from_hyperparameters(step=step, grad_scale=0.5, **hyperparameters)


def fresh(
    state_format: StateFormat, rule: UpdateRule, master: np.ndarray
) -> tuple[np.ndarray, StateArrays]:
    """Return a parameter and its state, moments zero."""
    fields = record_fields(state_format, ElementType.BF16, rule)
    blocks = -(-master.size // lossy.BLOCK)
    state = StateArrays.of(
        {
            field: np.zeros(blocks if "base" in field.value else master.size, numpy_dtype(element))
            for field, element in fields
        }
    )
    master = quieted(master)
    if state_format is StateFormat.COMPACT:
        param, state.residual[:] = split_short(master)
    else:
        param = round_to_bf16(master)
        state.residual[:] = (master.view(np.uint32) & 0xFFFF).astype(np.uint16).view(np.int16)
    return param, state


def copied(param: np.ndarray, state: StateArrays) -> tuple[np.ndarray, StateArrays]:
    views = {
        field.name: getattr(state, field.name).copy()
        for field in dataclasses.fields(state)
        if getattr(state, field.name) is not None
    }
    return param.copy(), StateArrays(**views)


def assert_same_state(one: StateArrays, other: StateArrays, what: str) -> None:
    for field in dataclasses.fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_same_bits(ours, theirs, f"{what} {field.name}")


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.value)
@pytest.mark.parametrize("state_format", LOSSY, ids=lambda each: each.value)
def test_every_implementation_has_equal_bits(
    any_kernels: Kernels, state_format, rule, pattern
) -> None:
    for numel in (1, 1000, 65536 + 40) if rule is UpdateRule.ADAMW else (31, 1000):
        param, state = fresh(state_format, rule, pattern(numel, 1))
        expected_param, expected = copied(param, state)
        numpy_kernels = make_kernels("numpy", 1)
        for step in (1, 2, 3):
            grad = (pattern(numel, 10 + step).view(np.uint32) >> 16).astype(np.uint16)
            key = RoundingKey.derive(5, step, "layer.weight", 96)
            any_kernels.update(param, grad, state, scalars_of(rule, step), key)
            numpy_kernels.update(expected_param, grad, expected, scalars_of(rule, step), key)
            assert_same_bits(param, expected_param, f"step {step} param")
            assert_same_state(state, expected, f"step {step}")


@pytest.mark.parametrize("state_format", LOSSY, ids=lambda each: each.value)
def test_parts_of_a_parameter_are_updated_as_the_whole(kernels: Kernels, state_format) -> None:
    """A replay on another number of ranks: the cuts move, the bits do not."""
    numel = 4096 + 40
    grad, scalars = ordinary(numel, 2), scalars_of(UpdateRule.ADAMW, 1)
    whole, state = fresh(state_format, UpdateRule.ADAMW, ordinary(numel, 1))
    param, parts = copied(whole, state)
    kernels.update(whole, grad, state, scalars, RoundingKey.derive(5, 7, "w", 0))
    for start, stop in ((0, 64), (64, 1984), (1984, numel)):
        inside = slice(start, stop)
        key = RoundingKey.derive(5, 7, "w", start)
        kernels.update(param[inside], grad[inside], parts.part(inside), scalars, key)
    assert_same_bits(param, whole, "param")
    assert_same_state(parts, state, "parts")
    other, other_state = fresh(state_format, UpdateRule.ADAMW, ordinary(numel, 1))
    kernels.update(other, grad, other_state, scalars, RoundingKey.derive(6, 7, "w", 0))
    assert not np.array_equal(other_state.exp_avg, state.exp_avg), "the seed had no effect"


def test_random_bits_do_not_depend_on_the_number_of_ranks() -> None:
    numels = (100, 5000, 64)
    layouts = [flat_layout(numels, 2, world_size) for world_size in (1, 2, 3)]
    found = []
    for layout in layouts:
        words = {index: np.zeros(numel, np.uint32) for index, numel in enumerate(numels)}
        for rank in range(layout.world_size):
            pieces = shard_pieces(layout, rank)
            named = [NamedPiece(str(p.index), p.first, p.start, p.numel) for p in pieces]
            rounding = Rounding(1, 2, [named])
            for piece in pieces:
                middle = piece.start + piece.numel // 128 * 64
                for low, high in ((piece.start, middle), (middle, piece.start + piece.numel)):
                    for start, stop, name, number in rounding.parts(0, low, high):
                        key = rounding.key(name, number)
                        at = piece.first + start - piece.start
                        words[piece.index][at : at + stop - start] = random_words(key, stop - start)
        found.append(words)
    assert all(words[index].all() for words in found for index in words)
    for words in found[1:]:
        assert all(np.array_equal(words[index], found[0][index]) for index in words)


class Counted(collections.abc.Sequence):
    """Counts how often a piece is looked at."""

    def __init__(self, pieces: list[NamedPiece]) -> None:
        self.pieces, self.count = pieces, 0

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, at: int) -> NamedPiece:
        self.count += 1
        return self.pieces[at]


def test_few_parameters_are_looked_at_for_a_few_elements() -> None:
    """A unit may have thousands of tiny ones, and each is asked for."""
    pieces = Counted([NamedPiece(str(at), 0, 64 * at, 40) for at in range(5000)])
    rounding = Rounding(1, 2, [pieces])
    assert list(rounding.parts(0, 64 * 3000 + 10, 64 * 3002 + 20)) == [
        (64 * 3000 + 10, 64 * 3000 + 40, "3000", 10),
        (64 * 3001, 64 * 3001 + 40, "3001", 0),
        (64 * 3002, 64 * 3002 + 20, "3002", 0),
    ]
    assert list(rounding.parts(0, 40, 64)) == []
    assert list(rounding.parts(0, 64 * 5000, 64 * 5001)) == []
    assert pieces.count < 100


def test_one_call_never_crosses_two_to_the_32_elements() -> None:
    edge = (1 << 32) - 64
    rounding = Rounding(1, 2, [[NamedPiece("huge", edge, 0, 128)]])
    (low, middle, *below), (start, stop, *beyond) = rounding.parts(0, 0, 128)
    assert (low, middle, start, stop) == (0, 64, 64, 128)
    one, other = rounding.key(*below), rounding.key(*beyond)
    assert one == RoundingKey.derive(1, 2, "huge", edge)
    assert other == RoundingKey.derive(1, 2, "huge", 1 << 32)
    assert (one.low, one.first) != (other.low, other.first)


def spread(numel: int, seed: int) -> np.ndarray:
    """Gradients whose sizes lie several octaves apart within a block."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(numel) * 2.0 ** rng.uniform(-6, 2, numel)).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 31), scale=st.integers(-60, 20), steps=st.integers(1, 4))
@pytest.mark.parametrize("state_format", LOSSY, ids=lambda each: each.value)
def test_the_error_of_one_step_is_bounded(state_format, seed, scale, steps) -> None:
    kernels, numel = make_kernels("native", 1), 1000
    param, state = fresh(state_format, UpdateRule.ADAMW, spread(numel, seed))
    for step in range(1, steps + 1):
        grad = spread(numel, seed + step) * np.float32(2.0) ** np.float32(scale)
        scalars = scalars_of(UpdateRule.ADAMW, step)
        old = (
            lossy.master_of(param, state.residual),
            lossy.moment_of(state, "exp_avg"),
            lossy.moment_of(state, "exp_avg_sq"),
        )
        p, m, v = lossy.adamw(*old, grad.astype(np.float64), scalars)
        key = RoundingKey.derive(seed, step, "w", 0)
        kernels.update(param, grad, state, scalars, key)
        new_p = lossy.master_of(param, state.residual)
        new_m, new_v = (lossy.moment_of(state, each) for each in ("exp_avg", "exp_avg_sq"))
        bits = (3, 4, 15) if state_format is StateFormat.COMPACT else (7, 7, 23)
        slack = 1e-6
        low_m, low_v = np.zeros(numel), np.zeros(numel)
        if state_format is StateFormat.COMPACT:
            low_m = lossy.least_of_block(m, 3, 127 / 8)
            low_v = lossy.least_of_block(v, 4, 255 / 16)
        size_m = np.abs(old[1]) + np.abs(grad)
        assert np.all(
            np.abs(new_m - m) <= np.maximum(lossy.unit(m, bits[0]), low_m) * 1.001 + slack * size_m
        )
        assert np.all(np.abs(new_v - v) <= np.maximum(lossy.unit(v, bits[1]), low_v) * 1.001)
        size_p = np.abs(old[0]) + 10 * scalars.step_size
        assert np.all(np.abs(new_p - p) <= lossy.unit(p, bits[2]) * 1.001 + slack * size_p)
        assert np.all((new_v > 0) | (v < 2.0**-126)), "a zero exp_avg_sq makes steps explode"


@pytest.mark.parametrize("state_format", LOSSY, ids=lambda each: each.value)
def test_rounding_loses_nothing_on_average(state_format) -> None:
    kernels, numel, repeats = make_kernels("native", 1), 512, 600
    grad, scalars = spread(numel, 3), scalars_of(UpdateRule.ADAMW, 1)
    sums = np.zeros((3, numel))
    for repeat in range(repeats):
        param, state = fresh(state_format, UpdateRule.ADAMW, ordinary(numel, 1))
        old = lossy.master_of(param, state.residual)
        kernels.update(param, grad, state, scalars, RoundingKey.derive(repeat, 1, "w", 0))
        sums[0] += lossy.master_of(param, state.residual)
        sums[1] += lossy.moment_of(state, "exp_avg")
        sums[2] += lossy.moment_of(state, "exp_avg_sq")
    zeros = np.zeros(numel)
    exact = lossy.adamw(old, zeros, zeros, grad.astype(np.float64), scalars)
    bits = (15, 3, 4) if state_format is StateFormat.COMPACT else (23, 7, 7)
    for mean, wanted, fraction in zip(sums / repeats, exact, bits, strict=True):
        # The deviation of one rounding is at most half a unit; six of those of the mean.
        fp32 = 4e-7 * np.abs(wanted) + 1e-9
        tolerance = 3 * lossy.unit(wanted, fraction) / repeats**0.5 + fp32
        below = np.abs(wanted) < lossy.least_of_block(wanted, fraction, 14)
        assert np.count_nonzero(~below) > numel // 4
        assert np.all((np.abs(mean - wanted) <= tolerance)[~below])


def test_codes_come_back_as_they_were() -> None:
    for pattern in PATTERNS:
        values = pattern(10_007, 4)
        codes, bases = encode_signed(values)
        again = encode_signed(decode_signed(codes, bases))
        assert np.array_equal(again[0] & 0x7F, codes & 0x7F)
        assert np.array_equal(again[1], bases)
        codes, bases = encode_unsigned(abs(values) if pattern is not hostile else values)
        again = encode_unsigned(decode_unsigned(codes, bases))
        assert np.array_equal(again[0], codes)
        assert np.array_equal(again[1], bases)
        param, residual = split_short(quieted(values))
        joined = join_short(param, residual)
        assert_same_bits(split_short(joined)[0], param, "param")
        assert_same_bits(split_short(joined)[1], residual, "residual")


def test_random_words_look_random_and_differ_by_step_name_and_seed() -> None:
    words = random_words(KEY, 1 << 16)
    shares = [(words >> np.uint32(bit) & np.uint32(1)).mean() for bit in range(32)]
    assert max(abs(share - 0.5) for share in shares) < 0.01
    assert len(np.unique(words)) > 0.99 * words.size
    others = [
        RoundingKey.derive(6, 1, "layer.weight", 0),
        RoundingKey.derive(5, 2, "layer.weight", 0),
        RoundingKey.derive(5, 1, "layer.bias", 0),
        RoundingKey.derive(5, 1, "layer.weight", 1 << 32),
    ]
    for other in others:
        assert np.mean(random_words(other, 1 << 16) == words) < 0.001


def fields_of(words: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each stored number is rounded with, scaled to [0, 1)."""
    return {
        "master": (words & 0xFF) / 2**8,
        "exp_avg": (words & 0xFFFFF) / 2**20,
        "exp_avg_sq": (words >> 13) / 2**19,
        "bf16 exp_avg": (words & 0xFFFF) / 2**16,
    }


def test_what_is_rounded_together_is_rounded_independently() -> None:
    """Of one element, of elements that share mixed words, and of those that follow."""
    count, span = 1 << 17, 16
    words = random_words(KEY, count * span).reshape(count, span)
    columns = [
        field[:, at] < share
        for field in fields_of(words).values()
        for at in range(span)
        for share in (0.5, 0.1)
    ]
    whose = [(name, at) for name in fields_of(words) for at in range(span) for _ in (0.5, 0.1)]
    normal = np.array([(each - each.mean()) / each.std() for each in columns])
    found = normal @ normal.T / count
    for row, one in enumerate(whose):
        for column, other in enumerate(whose):
            overlaps = "bf16 exp_avg" in (one[0], other[0]) and one[1] == other[1]
            if one != other and not overlaps:
                assert abs(found[row, column]) < 6 / count**0.5, (one, other)
    groups = words.reshape(-1, 8)
    for apart, alike in ((1, 0), (2, 1), (3, 0), (4, 2), (5, 0), (6, 1), (7, 0)):
        differ = groups[:, apart:] ^ groups[:, :-apart]
        assert not (differ & np.uint32((1 << alike) - 1)).any()
        shares = [((differ >> np.uint32(bit)) & np.uint32(1)).mean() for bit in range(alike, 32)]
        assert max(abs(share - 0.5) for share in shares) < 0.01
    rare = (groups & np.uint32(0xFF)) == 0xFF
    found = np.corrcoef(rare.T)
    np.fill_diagonal(found, 0.0)
    assert np.abs(found).max() < 3 / 256 + 6 / len(groups) ** 0.5
    for field in fields_of(words).values():
        counts = np.histogram(field, 256, (0.0, 1.0))[0]
        expected = field.size / 256
        assert np.sum((counts - expected) ** 2 / expected) < 255 + 6 * (2 * 255) ** 0.5


def test_a_lossy_update_without_a_key_or_with_wrong_bases_is_refused(any_kernels: Kernels) -> None:
    scalars = scalars_of(UpdateRule.ADAMW, 1)
    param, state = fresh(StateFormat.COMPACT, UpdateRule.ADAMW, ordinary(64, 1))
    grad = ordinary(64, 2)
    with pytest.raises(TypeError, match="key must be a RoundingKey"):
        any_kernels.update(param, grad, state, scalars)
    with pytest.raises(ValueError, match=r"start at a multiple of 32 .* got key.first 8"):
        any_kernels.update(param, grad, state, scalars, RoundingKey(1, 2, 8))
    short = dataclasses.replace(state, exp_avg_base=state.exp_avg_base[:1])
    with pytest.raises(ValueError, match=r"one length|must hold 2 bases"):
        any_kernels.update(param, grad, short, scalars, KEY)
    with pytest.raises(ValueError, match="start inside a block"):
        state.part(slice(16, 64))
