"""The linear map, into heads and out of them: values by plain loops, shapes, memory, errors."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from npattn.layers import (
    linear,
    linear_backward,
    linear_forward,
    merge_heads,
    merge_heads_backward,
    merge_heads_forward,
    project_heads,
    project_heads_backward,
    project_heads_forward,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import to_numpy

sizes = st.integers(0, 4)
leading = st.lists(st.integers(0, 3), max_size=2).map(tuple)


def integers(*shape: int) -> np.ndarray:
    """Small whole numbers, whose sums of products are exact."""
    return np.random.default_rng(shape).integers(-4, 5, shape).astype(np.float64)


@given(leading, sizes, sizes, st.booleans())
def test_linear_is_the_sum_of_products(lead, width, out_width, with_b):
    x, w, b = integers(*lead, width), integers(width, out_width), integers(out_width) if with_b else None
    expected = np.zeros((*lead, out_width))
    for at in np.ndindex(*lead):
        for c, d in itertools.product(range(width), range(out_width)):
            expected[(*at, d)] += x[(*at, c)] * w[c, d]
        expected[at] += 0 if b is None else b
    out, saved = linear_forward(x, w, b)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(linear(x, w, b), expected)
    assert (linear_backward(out, saved).db is None) == (b is None)


@given(leading, sizes, sizes, sizes, sizes, st.booleans())
def test_heads_are_the_sums_of_products(lead, length, width, heads, size, with_b):
    x, w = integers(*lead, length, width), integers(width, heads, size)
    b = integers(heads, size) if with_b else None
    projected = np.zeros((*lead, heads, length, size))
    for at in np.ndindex(*lead):
        for h, t, c in itertools.product(range(heads), range(length), range(width)):
            projected[(*at, h, t)] += x[(*at, t, c)] * w[c, h]
        projected[at] += 0 if b is None else b[:, None, :]
    np.testing.assert_array_equal(project_heads(x, w, b), projected)

    w, b = integers(heads, size, width), integers(width) if with_b else None
    merged = np.zeros((*lead, length, width))
    for at in np.ndindex(*lead):
        for h, t, e in itertools.product(range(heads), range(length), range(size)):
            merged[(*at, t)] += projected[(*at, h, t, e)] * w[h, e]
        merged[at] += 0 if b is None else b
    np.testing.assert_array_equal(merge_heads(projected, w, b), merged)


@given(leading, sizes, sizes, sizes, sizes, st.booleans())
@settings(max_examples=50)
def test_backward_over_random_shapes(lead, length, width, heads, size, with_b):
    args = {"x": integers(*lead, width), "w": integers(width, size), "b": integers(size)}
    ops = [(linear_forward, linear_backward, args)]
    args = {"x": integers(*lead, length, width), "w": integers(width, heads, size), "b": integers(heads, size)}
    ops += [(project_heads_forward, project_heads_backward, args)]
    args = {"x": integers(*lead, heads, length, size), "w": integers(heads, size, width), "b": integers(width)}
    ops += [(merge_heads_forward, merge_heads_backward, args)]
    for forward, backward, given_args in ops:
        if not with_b:
            del given_args["b"]
        check_backward(forward, backward, given_args)


def test_gradients_are_exact_on_whole_numbers(to_xp):
    x, w, b = integers(2, 3, 5), integers(5, 7), integers(7)
    out, saved = linear_forward(to_xp(x), to_xp(w), to_xp(b))
    np.testing.assert_array_equal(to_numpy(out), x @ w + b)
    grads = linear_backward(to_xp(integers(2, 3, 7)), saved)
    dout = integers(2, 3, 7)
    np.testing.assert_array_equal(to_numpy(grads.dx), np.einsum("btd,cd->btc", dout, w))
    np.testing.assert_array_equal(to_numpy(grads.dw), np.einsum("btd,btc->cd", dout, x))
    np.testing.assert_array_equal(to_numpy(grads.db), dout.sum((0, 1)))


def test_projecting_and_merging_by_the_identity_gives_x_back():
    x = integers(2, 5, 6)
    eye = np.eye(6)
    heads = project_heads(x, eye.reshape(6, 3, 2))
    np.testing.assert_array_equal(heads[:, 1], x[:, :, 2:4])  # head h has the features h·D to (h + 1)·D
    np.testing.assert_array_equal(merge_heads(heads, eye.reshape(3, 2, 6)), x)


def test_merging_is_concatenation_times_w_o():
    x, w = integers(3, 5, 2), integers(3, 2, 7)
    concatenated = np.concatenate(list(x), axis=-1)
    np.testing.assert_array_equal(merge_heads(x, w), concatenated @ w.reshape(6, 7))


def test_several_heads_are_one_product_seen_otherwise():
    """No copy: the heads are columns of one product, and the gradient of the heads comes from one product too."""
    out = project_heads(integers(2, 5, 7), integers(7, 3, 2))
    assert np.swapaxes(out, -2, -3).flags.c_contiguous
    x, w = integers(2, 3, 5, 2), integers(3, 2, 7)
    dx = merge_heads_backward(integers(2, 5, 7), merge_heads_forward(x, w)[1]).dx
    assert np.swapaxes(dx, -2, -3).flags.c_contiguous


def test_saved_borrows_and_holds_nothing_else():
    x, w, b = integers(3, 5), integers(5, 7), integers(7)
    saved = linear_forward(x, w, b)[1]
    assert saved.x is x
    assert saved.w is w
    assert repr(saved) == "LinearSaved(x=float64[3, 5], w=float64[5, 7], has_b=True)"
    assert repr(linear_backward(integers(3, 7), saved)) == "LinearGrads(dx=float64[3, 5], dw=float64[5, 7], db=float64[7])"
    assert project_heads_forward(x, integers(5, 2, 3))[1].has_b is False


def test_float16_is_summed_in_float32():
    x, w = np.ones((1, 4096), np.float16), np.ones((4096, 1), np.float16)
    out = linear(x, w)
    assert out.dtype == np.float16
    assert out[0, 0] == 4096  # a sum in float16 stops at 2048
    dw = linear_backward(
        np.ones((4096, 1), np.float16), linear_forward(np.ones((4096, 1), np.float16), np.ones((1, 1), np.float16))[1]
    ).dw
    assert dw[0, 0] == 4096


def test_linear_errors():
    x, w, b = np.ones((2, 3)), np.ones((3, 5)), np.ones(5)
    with pytest.raises(
        ValueError, match=r"^linear: w must have shape \(C_in, C_out\) with C_in = 3 as x has, got \(5, 3\); .*transpose w$"
    ):
        linear(x, w.T)
    with pytest.raises(ValueError, match=r"^linear: w must have shape .* got \(3,\)$"):
        linear(x, np.ones(3))
    with pytest.raises(ValueError, match=r"^linear: b must have shape \(C_out,\) with C_out = 5 as w has, got \(3,\)"):
        linear(x, w, np.ones(3))
    with pytest.raises(ValueError, match=r"^linear: x must have shape \(..., C_in\), got \(\)"):
        linear(np.asarray(1.0), w)
    with pytest.raises(TypeError, match="^linear: x is float64 but b is float32; all float arrays"):
        linear(x, w, b.astype(np.float32))
    with pytest.raises(TypeError, match="^linear: w must have a floating dtype"):
        linear(x, w.astype(int))
    with pytest.raises(TypeError):
        linear(x, w, b=b)


def test_heads_errors():
    x, w = np.ones((5, 3)), np.ones((3, 2, 4))
    with pytest.raises(ValueError, match=r"^project_heads: x must have shape \(..., T, C\), got \(3,\)"):
        project_heads(x[0], w)
    for wrong in (np.ones((4, 2, 3)), np.ones((3, 8))):
        with pytest.raises(ValueError, match=r"^project_heads: w must have shape \(C, H, D\) with C = 3 as x has, got"):
            project_heads(x, wrong)
    with pytest.raises(ValueError, match=r"^project_heads: b must have shape \(H, D\) = \(2, 4\) as w has, got \(8,\)"):
        project_heads(x, w, np.ones(8))
    heads, w = np.ones((2, 5, 4)), np.ones((2, 4, 3))
    with pytest.raises(ValueError, match=r"^merge_heads: x must have shape \(..., H, T, E\), got \(5, 4\)"):
        merge_heads(heads[0], w)
    for wrong in (np.ones((4, 2, 3)), np.ones((8, 3))):
        with pytest.raises(ValueError, match=r"^merge_heads: w must have shape \(H, E, C\) with H, E = 2, 4 as x has, got"):
            merge_heads(heads, wrong)
    with pytest.raises(ValueError, match=r"^merge_heads: b must have shape \(C,\) with C = 3 as w has, got \(2, 4\)"):
        merge_heads(heads, w, np.ones((2, 4)))
    with pytest.raises(TypeError, match="^merge_heads: x is float64 but w is float32"):
        merge_heads(heads, w.astype(np.float32))
