"""What the tiling computes, what it keeps, and the memory that it takes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from npattn import (
    attention,
    attention_backward,
    attention_forward,
    causal_mask,
    causal_mask_end,
    length_mask,
    segment_mask,
    set_num_threads,
    window_mask,
)
from npattn._arrays.block_products import Limits
from npattn._attention import formula, shades, tiling
from npattn._attention.problem import make_problem
from npattn._attention.scratch import BUFFER, Scratch
from tests.attention.peaks import peak

SIDE = 2048
SEGMENTS = np.repeat(np.arange(8), SIDE // 8)
# A tile has 256 rows: along an edge it computes at most that much more than the edge itself, on either side of a band.
EDGE = 256 * SIDE
MASKS = {
    "causal": (causal_mask(), EDGE),
    "causal from the end": (causal_mask_end(), EDGE),
    "window": (window_mask(128, 0), 2 * EDGE),
    "window and causal": (window_mask(300, 300) & causal_mask(), 2 * EDGE),
    "length": (length_mask(500), 0),
    "segments": (segment_mask(SEGMENTS), 0),
    "array of a triangle": (np.tri(SIDE, dtype=bool), EDGE),
    "array of blocks": (SEGMENTS[:, None] == SEGMENTS, 0),
    "nothing": (length_mask(0), 0),
}


@pytest.fixture
def computed(monkeypatch):
    """Pairs that each pass makes scores or gradients of, and pairs of which the mask was written out."""
    pairs = {"forward": 0, "backward": 0, "mask": 0}

    def counted(module, name, key, size):
        function = getattr(module, name)

        def wrapped(*args, **kwargs):
            pairs[key] += size(*args)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapped)

    def matrix(ops, q, k, *_):
        return q[..., 0].size // max(k[..., 0, 0].size, 1) * k[..., 0].size

    def written(problem, place):
        return place.rows * (place.keys.stop - place.keys.start)

    counted(formula, "forward_tile", "forward", matrix)
    counted(formula, "backward_tile", "backward", matrix)
    counted(shades, "_visible", "mask", written)
    set_num_threads(1)
    yield pairs
    set_num_threads(None)


@pytest.mark.parametrize("kind", MASKS)
def test_what_a_mask_forbids_is_not_computed(computed, kind):
    mask, edge = MASKS[kind]
    visible = int(np.sum(mask if isinstance(mask, np.ndarray) else mask.to_array(SIDE, SIDE)))
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, SIDE, 4)).astype(np.float32)
    _, saved = attention_forward(q, k, v, mask=mask)
    attention_backward(dout, saved)
    for n in ("forward", "backward"):
        assert visible <= computed[n] <= visible + edge, n
    assert computed["mask"] <= 2 * 2 * edge  # both passes write out what lies along the edge, seen or not, and nothing else


def test_without_a_mask_every_pair_once(computed):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, SIDE, 4)).astype(np.float32)
    attention_backward(dout, attention_forward(q, k, v)[1])
    assert computed == {"forward": 2 * SIDE * SIDE, "backward": 2 * SIDE * SIDE, "mask": 0}


# What is kept -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_head", "remembered", "times"), [(False, shades.REMEMBERED, 1), (True, shades.REMEMBERED, 8), (False, 0, 8)]
)
def test_a_mask_is_written_out_once_for_all_heads_that_share_it(computed, monkeypatch, by_head, remembered, times):
    monkeypatch.setattr(shades, "REMEMBERED", remembered)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 512, 4)).astype(np.float32)
    mask = np.tri(512, dtype=bool) if by_head else causal_mask()
    attention(q, k, v, mask=mask)
    once, computed["mask"] = computed["mask"], 0
    if by_head:
        mask = np.broadcast_to(mask, (8, 512, 512))
    with tiling.forced(tiling.Sizes(rows=256, keys=512, pairs=256 * 512, plain=False, keep=False)):
        out = attention(*(np.broadcast_to(x, (8, 512, 4)) for x in (q, k, v)), mask=mask)
    assert computed["mask"] == times * once > 0
    assert (out == out[0]).all()


def blocks_of_heads(problem_mask, *, length, backward, batch=1):
    q = np.empty((batch, 8, length, 64), np.float32)
    problem = make_problem("attention", q, q, q, problem_mask, None, None, None, None, None)
    sizes = tiling.choose_sizes(problem, backward=backward)
    assert sizes is not tiling.ONE_TILE
    return [len(block) for block in tiling.cut_units(problem, sizes)]


def test_a_unit_takes_as_many_heads_as_a_band_leaves_room_for():
    assert blocks_of_heads(window_mask(128, 0), length=4096, backward=False) == [16]  # of all 8 heads, with 16 runs of 256 rows
    # in backward every further job on the same heads has a copy of dk and dv
    assert blocks_of_heads(window_mask(128, 0), length=4096, backward=True) == [16] * 4
    assert blocks_of_heads(causal_mask(), length=4096, backward=False) == [16] * 8
    assert blocks_of_heads(length_mask([100, 1024]), length=1024, backward=False, batch=2) == [4] * 3  # of 8 heads and of 4
    assert blocks_of_heads(length_mask([100, 1024]), length=1024, backward=True, batch=2) == [4] * 4
    # without a mask: whole rows
    assert blocks_of_heads(None, length=1024, backward=False) == [1] * 8
    assert blocks_of_heads(None, length=4096, backward=True) == [16] * 8


def test_results_are_remembered_until_their_memory_goes():
    ops = Scratch(np, np.dtype("float32"), 32, {})
    small = ops.take("x", (2, 8))
    assert ops.take("x", (2, 8)) is small
    assert ops.to_the_end(small).shape == (2, 24)  # 8 numbers take 32 bytes: there is space after them
    large = ops.take("x", (4, 8))
    again = ops.take("x", (2, 8))
    assert again is not small
    assert np.shares_memory(again, large)
    assert set(ops.whole) == {id(large), id(again)}
    ops.lend("x", None)
    assert ops.whole == {}


def test_nothing_waits_for_the_garbage_collector():
    ops = Scratch(np, np.dtype("float32"), 32, {}, Limits(bytes=1, columns=4))
    ops.matmul(ops.load(np.ones((1, 8, 4), np.float32), "q", scale=2.0), ops.load(np.ones((1, 4, 8), np.float32), "k"), "scores")
    held = weakref.ref(ops)
    gc.disable()
    try:
        del ops
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("dtype", "turned"), [("float64", True), ("float32", False)])
def test_a_product_of_columns_may_be_made_turned(dtype, turned):
    ops = Scratch(np, np.dtype(dtype), 32, {}, Limits(bytes=1, columns=4))
    p, d = (np.random.default_rng(0).standard_normal(shape).astype(dtype) for shape in ((2, 9, 16), (2, 9, 4)))
    ops.take("p", p.shape)[...] = p
    found = ops.matmul(ops.transpose(ops.take("p", p.shape)), d, "dv")
    assert (found.strides[-2] == found.itemsize) == turned
    expected = np.einsum("bij,bie->bje", p, d)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ops.multiply(found, 2.0), 2 * expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(ops.take("p", p.shape), p, rtol=0, atol=0)  # of which nothing was written


@pytest.mark.parametrize(("keys", "inside"), [(BUFFER, BUFFER), (BUFFER - 1, 4096)])
def test_numpys_buffers_are_short_while_a_column_meets_a_matrix(keys, inside):
    ops, seen = Scratch(np, np.dtype("float32"), 1024, {}), []

    def function(a, b, out):
        seen.append(np.getbufsize())
        raise MemoryError

    with np.errstate():
        np.setbufsize(4096)
        with pytest.raises(MemoryError):
            ops.elementwise(function, np.ones((2, keys), np.float32), np.ones((2, 1), np.float32), None)
        assert seen == [inside]
        assert np.getbufsize() == 4096


def kept_bytes(saved):
    return sum(p.nbytes for unit in saved.tiling.done.kept or () for p, _ in unit)


@pytest.mark.parametrize(("room", "kept"), [("8", True), ("7", False), ("0", False)])
def test_the_variable_says_how_much_is_kept(monkeypatch, room, kept):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 1024, 4)).astype(np.float32)
    default = attention_backward(dout, attention_forward(q, k, v)[1])
    monkeypatch.setenv("NPATTN_KEEP_MIB", room)
    _, saved = attention_forward(q, k, v)
    assert kept_bytes(saved) == (2 * 1024 * 1024 * 4 if kept else 0)
    for got, expected in zip(attention_backward(dout, saved)[:3], default[:3], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_no_more_than_the_default_is_kept():
    q, k, v = np.zeros((3, 8, 2944, 1), dtype=np.float32)
    assert tiling.KEEP_MIB << 20 < 8 * 2944 * 2944 * 4
    assert kept_bytes(attention_forward(q, k, v)[1]) == 0


@pytest.mark.parametrize("room", ["-1", "many", "1.5"])
def test_a_variable_that_is_no_number(monkeypatch, room):
    monkeypatch.setenv("NPATTN_KEEP_MIB", room)
    q = np.zeros((1, 300, 2))
    with pytest.raises(ValueError, match=f"NPATTN_KEEP_MIB must be a number of MiB, got '{room}'"):
        attention_forward(q, q, q)


# Memory -----------------------------------------------------------------------------------------------------------------------


def peak_mib(work):
    return peak(work)[0] / 2**20


@pytest.mark.slow
def test_long_sequences_take_the_memory_of_their_results_and_of_the_tiles():
    T, H, D = 16384, 8, 64
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, H, T, D), dtype=np.float32)

    def forward_and_backward():
        out, saved = attention_forward(q, k, v)
        return out, attention_backward(dout, saved)

    results = 4 * q.nbytes / 2**20  # out, dq, dk, dv
    extra = peak_mib(forward_and_backward) - results
    assert extra <= 96


@pytest.mark.slow
def test_the_extra_memory_of_forward_does_not_grow():
    def extra(T):
        # values that begin with a line of the cache are not copied: here none do, at any length
        memory = np.empty(3 * T * 64 + 20, np.float32)
        start = -(memory.ctypes.data // 4) % 16 + 4
        q, k, v = memory[start : start + 3 * T * 64].reshape(3, 1, 1, T, 64)
        memory[...] = np.random.default_rng(0).standard_normal(memory.size, dtype=np.float32)
        return peak_mib(lambda: attention(q, k, v)) - q.nbytes / 2**20

    extra(512)  # what is imported once
    assert extra(32768) <= extra(8192) + 1
