"""Dropout is replayed: which elements are kept is a pure function of the seed and of where an element stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import Dropout, attention, attention_backward, attention_forward, merge_attention
from npattn._attention.tiling import Sizes, forced
from npattn.layers import dropout, dropout_backward, dropout_forward
from npattn.testing.libraries import to_numpy

anything: Any = Dropout  # a NamedTuple takes anything; its users check
INT64 = st.integers(-(2**63), 2**63 - 1)
INDICES = st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 4)


def kept(rule: Dropout, *shape: int) -> np.ndarray:
    """Which elements of (leading, head, i, j) are kept."""
    index = np.indices(shape, dtype=np.int32)
    return np.asarray(rule.factors(*index, xp=np, dtype=np.float64) != 0)


# The hash ----------------------------------------------------------------------------------------------------------------------


def _finaliser(x: int) -> int:
    """MurmurHash3's, on unsigned numbers, as it is published."""
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _splitmix(seed: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def _kept_by_hand(rate: float, seed: int, index: tuple[int, ...]) -> bool:
    words = _splitmix(seed)
    low, high = words % 2**32, words >> 32
    *rows, j = index
    for n in rows:
        low = _finaliser((n * 0x27D4EB2F + low) % 2**32)
        high = _finaliser((n * 0x165667B1 + high) % 2**32)
    hashed = _finaliser((j * (high | 1) + low) % 2**32)
    return (hashed + 2**31) % 2**32 >= min(round(rate * 2**32), 2**32 - 1)


@given(st.floats(0, 1, exclude_max=True), INT64, INDICES)
def test_the_hash_against_whole_numbers_of_any_size(rate, seed, index):
    place = [np.full((1,), n, dtype=np.int32) for n in index]
    assert bool(Dropout(rate, seed).factors(*place, xp=np, dtype=np.float64)[0]) == _kept_by_hand(rate, seed, index)


def test_these_bits_stay():
    """A seed in somebody's notes means the same next year."""
    drawn = "".join(".#"[int(bit)] for bit in kept(Dropout(0.5, seed=7), 1, 2, 2, 12).ravel())
    assert drawn == "##.####..##..#..##.##..#..#.##..###.#..#...#..##"


def test_same_bits_on_every_library(library, xp, to_xp):
    x = np.ones((3, 5, 8))
    for rule in (Dropout(0.4, seed=-3), Dropout(0.9, seed=2**70, origin=(5, 2**40, -7, 3)), Dropout(1 - 1e-12, seed=1)):
        np.testing.assert_array_equal(to_numpy(dropout(to_xp(x), rule)), dropout(x, rule))


# What a seed, an index and an origin mean --------------------------------------------------------------------------------------


def test_factors():
    np.testing.assert_array_equal(np.unique(dropout(np.ones((40, 40)), Dropout(0.2, 0))), [0, 1.25])
    np.testing.assert_array_equal(dropout(np.arange(6.0), Dropout(0.0, 0)), np.arange(6.0))
    np.testing.assert_array_equal(dropout(np.arange(6.0), None), np.arange(6.0))


@given(INT64, INDICES, st.integers(0, 4))
def test_an_origin_places_a_part_in_its_whole(seed, origin, given_axes):
    origin = origin[4 - given_axes :]  # right-aligned
    start = np.asarray((0,) * (4 - given_axes) + origin, dtype=np.int64)
    shape = (2, 3, 2, 4)
    whole = [np.asarray(n, dtype=np.int32) for n in _wrap(np.indices(shape) + start[:, None, None, None, None])]
    expected = Dropout(0.5, seed).factors(*whole, xp=np, dtype=np.float64) != 0
    np.testing.assert_array_equal(kept(Dropout(0.5, seed, origin), *shape), expected)


def _wrap(n: np.ndarray) -> np.ndarray:
    return (n + 2**31) % 2**32 - 2**31


@given(INT64, st.integers(0, 2**31), st.integers(0, 2**31))
def test_fold_gives_seeds_of_their_own(seed, n, m):
    rule = Dropout(0.5, seed, origin=(1, 2))
    assert rule.fold(n) == rule.fold(n)
    assert rule.fold(n).rate == 0.5
    assert rule.fold(n).origin == (1, 2)
    assert (rule.fold(n).seed == rule.fold(m).seed) == (n == m)
    assert rule.fold(n).seed != seed


def test_folding_is_no_sum():
    """Layer 1 of step 2 is not layer 2 of step 1, and seed 1 is no shifted seed 0."""
    assert Dropout(0.5, 0).fold(1).fold(2).seed != Dropout(0.5, 0).fold(2).fold(1).seed
    assert Dropout(0.5, 0).fold(1).seed != Dropout(0.5, 1).fold(0).seed


def test_indices_count_modulo_two_to_the_32():
    np.testing.assert_array_equal(kept(Dropout(0.5, 1, (2**32 + 5,)), 1, 1, 2, 9), kept(Dropout(0.5, 1, (5,)), 1, 1, 2, 9))


# Statistics: a fair coin, thrown anew for every element ------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_rate(rate, seed):
    shares = 1 - kept(Dropout(rate, seed), 4, 4, 128, 128)
    deviation = np.sqrt(rate * (1 - rate))
    for axes in ((0, 1, 2, 3), (0, 1, 2), (1, 2, 3), (0, 2, 3)):  # everywhere, in every column, leading index, head
        mean = shares.mean(axis=axes)
        assert np.abs(mean - rate).max() < 5 * deviation / np.sqrt(shares.size / mean.size)


def test_no_element_knows_another():
    bits = 2.0 * kept(Dropout(0.5, seed=3), 8, 8, 64, 64) - 1
    limit = 5 / np.sqrt(bits.size)
    for axis in range(4):
        for by in (1, 2, 3, bits.shape[axis] // 2):
            assert abs((bits * np.roll(bits, by, axis)).mean()) < limit
    for other in (Dropout(0.5, seed=4), Dropout(0.5, seed=3 + 2**32), Dropout(0.5, seed=-3), Dropout(0.5, seed=3).fold(0)):
        assert abs((bits * (2.0 * kept(other, 8, 8, 64, 64) - 1)).mean()) < limit


def test_no_two_rows_hold_one_pattern_shifted():
    rows = kept(Dropout(0.5, seed=0), 1, 4, 64, 160)[0].reshape(-1, 160)
    windows = np.lib.stride_tricks.sliding_window_view(rows, 48, axis=1).reshape(-1, 48)
    assert len(np.unique(np.packbits(windows, axis=1), axis=0)) == len(windows)


# In attention ------------------------------------------------------------------------------------------------------------------

TINY = [Sizes(rows=2, keys=3, pairs=12, plain=plain, keep=False) for plain in (False, True)]


@pytest.mark.parametrize("sizes", TINY, ids=["scratch", "plain"])
def test_attention_drops_the_same_in_any_tiling(sizes):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4, 7, 3)), rng.standard_normal((2, 2, 8, 3))
    v = np.broadcast_to(np.eye(8), (2, 2, 8, 8))  # out is the dropped weights themselves
    rule = Dropout(0.4, seed=5)
    dout = rng.standard_normal((2, 4, 7, 8))
    out, saved = attention_forward(q, k, v, dropout=rule)
    np.testing.assert_array_equal(out != 0, kept(rule, 2, 4, 7, 8))
    with forced(sizes):
        tiled, tiled_saved = attention_forward(q, k, v, dropout=rule)
        tiled_grads = attention_backward(dout, tiled_saved)
    np.testing.assert_array_equal(tiled != 0, out != 0)
    np.testing.assert_allclose(tiled, out, rtol=1e-13)
    for name, got, expected in zip(tiled_grads._fields, tiled_grads, attention_backward(dout, saved), strict=True):
        if expected is not None:
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13, err_msg=name)


def test_leading_axes_count_as_one_index():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 3, 1, 4, 3)), rng.standard_normal((1, 3, 1, 5, 3))
    out = attention(q, k, np.broadcast_to(np.eye(5), (3, 1, 5, 5)), dropout=Dropout(0.5, 1))
    np.testing.assert_array_equal(out.reshape(6, 1, 4, 5) != 0, kept(Dropout(0.5, 1), 6, 1, 4, 5))


def test_parts_with_their_origins_are_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 2, 6, 3))
    whole = attention(q, k, v, dropout=Dropout(0.5, 9))
    np.testing.assert_array_equal(attention(q[1:], k[1:], v[1:], dropout=Dropout(0.5, 9, origin=(1, 0, 0, 0))), whole[1:])
    np.testing.assert_array_equal(
        attention(q[:, 1:], k[:, 1:], v[:, 1:], dropout=Dropout(0.5, 9, origin=(1, 0, 0))), whole[:, 1:]
    )
    part = attention(q[:, :, 4:], k, v, dropout=Dropout(0.5, 9, origin=(4, 0)))
    np.testing.assert_allclose(part, whole[:, :, 4:], rtol=1e-14)
    halves = [
        attention_forward(q, k[:, :, s], v[:, :, s], dropout=Dropout(0.5, 9, origin=(s.start,)))
        for s in (slice(0, 2), slice(2, 6))
    ]
    merged, _ = merge_attention([(out, saved.lse) for out, saved in halves])
    np.testing.assert_allclose(merged, whole, rtol=1e-13)


# The layer ---------------------------------------------------------------------------------------------------------------------


def test_the_layer_counts_rows():
    rule = Dropout(0.5, seed=2)
    np.testing.assert_array_equal(dropout(np.ones((2, 3, 5)), rule) != 0, kept(rule, 1, 1, 6, 5).reshape(2, 3, 5))
    np.testing.assert_array_equal(dropout(np.ones(5), rule), dropout(np.ones((1, 5)), rule)[0])
    assert dropout(np.asarray(3.0), rule) in (0, 6)


def test_backward_drops_the_same():
    x, dout = np.random.default_rng(0).standard_normal((2, 4, 6))
    out, saved = dropout_forward(x, Dropout(0.3, 1))
    assert saved.dropout == Dropout(0.3, 1)
    np.testing.assert_array_equal(dropout_backward(dout, saved).dx, dout * np.where(out == 0, 0, 1 / (1 - 0.3)))
    np.testing.assert_array_equal(dropout_backward(dout, dropout_forward(x, None)[1]).dx, dout)


@pytest.mark.parametrize("rule", [None, Dropout(0.0, 1), Dropout(0.5, 1)], ids=["none", "rate 0", "rate .5"])
def test_nothing_is_shared_or_written(rule):
    x = np.random.default_rng(0).standard_normal((3, 4))
    x.flags.writeable = False
    out, saved = dropout_forward(x, rule)
    dx = dropout_backward(x, saved).dx
    assert out.flags.writeable
    assert dx.flags.writeable
    assert not np.shares_memory(out, x)
    assert not np.shares_memory(dx, x)


@pytest.mark.parametrize("rule", [None, Dropout(0.5, 1)], ids=["none", "rate .5"])
def test_dtype(library, to_xp, rule):
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        if library.has(dtype):
            x = to_xp(np.ones((3, 4)), dtype)
            assert dropout(x, rule).dtype == x.dtype
    assert dropout(np.ones((3, 4), ">f8"), rule).dtype.isnative


def test_float16_is_rounded_once_and_overflows_in_silence():
    x = np.random.default_rng(0).standard_normal((30, 40)).astype(np.float16)
    rule = Dropout(0.1, 1)
    np.testing.assert_array_equal(dropout(x, rule), dropout(x.astype(np.float32), rule).astype(np.float16))
    assert np.isinf(dropout(np.full(40, 6e4, np.float16), Dropout(0.5, 1))).any()
    assert np.isinf(dropout(np.full(40, 1e308), Dropout(0.5, 1))).any()


def test_empty():
    assert dropout(np.zeros((0, 3)), Dropout(0.5, 1)).shape == (0, 3)
    assert dropout(np.zeros((2, 0)), Dropout(0.5, 1)).shape == (2, 0)


def test_rates_and_seeds_may_be_numpy_numbers():
    assert Dropout(np.float32(0.5), np.int64(3)).checked("op") == Dropout(0.5, 3)
    assert dropout(np.ones(4, np.float32), Dropout(np.float64(0.5), np.uint64(3))).dtype == np.float32


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (Dropout(1.0, 0), ValueError, "dropout: the rate of dropout must be at least 0 and less than 1, got 1.0"),
        (Dropout(-0.1, 0), ValueError, "dropout: the rate of dropout must be at least 0 and less than 1, got -0.1"),
        (Dropout(float("nan"), 0), ValueError, "dropout: the rate of dropout must be a finite number, got nan"),
        (anything(np.ones(2), 0), TypeError, "dropout: the rate of dropout must be a number on the host, got ndarray"),
        (anything(0.5, 0.5), TypeError, "dropout: the seed of dropout must be an integer, got float"),
        (Dropout(0.5, 0, (0,) * 5), ValueError, "dropout: the origin of dropout must be a tuple"),
        (anything(0.5, 0, 3), ValueError, "dropout: the origin of dropout must be a tuple .leading index, head, i, j., got 3"),
        (anything(0.5, 0, (0.5,)), TypeError, "dropout: the origin of dropout must be an integer, got float"),
        (0.5, TypeError, "dropout: dropout must be a Dropout.rate, seed., got float"),
    ],
)
def test_errors(rule, error, message):
    with pytest.raises(error, match=f"^{message}"):
        dropout(np.ones(3), rule)
    with pytest.raises(error, match=f"^{message.replace('dropout:', 'attention:', 1)}"):
        attention(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)), dropout=rule)


def test_fold_takes_integers():
    with pytest.raises(TypeError, match="^Dropout.fold: n must be an integer, got float"):
        Dropout(0.5, 0).fold(0.5)


def test_x_is_floating():
    with pytest.raises(TypeError, match="^dropout: x must have a floating dtype"):
        dropout(np.ones(3, np.int64), Dropout(0.5, 0))
