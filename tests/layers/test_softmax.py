"""Softmax, log-softmax and log-sum-exp: values, masks, rows where nothing counts, extremes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from npattn.layers import (
    log_softmax,
    log_softmax_backward,
    log_softmax_forward,
    logsumexp,
    logsumexp_backward,
    logsumexp_forward,
    softmax,
    softmax_backward,
    softmax_forward,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import to_numpy

DATA = Path(__file__).parent.parent / "data"
INF, NAN = math.inf, math.nan

OPS: dict[str, Any] = {
    "softmax": (softmax, softmax_forward, softmax_backward),
    "log_softmax": (log_softmax, log_softmax_forward, log_softmax_backward),
    "logsumexp": (logsumexp, logsumexp_forward, logsumexp_backward),
}
every_op = pytest.mark.parametrize("op", OPS)


def twin(x: np.ndarray, axis: int, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All three by plain loops, with sums that do not round."""
    moved, seen = np.moveaxis(x, axis, -1), np.moveaxis(np.broadcast_to(mask, x.shape), axis, -1)
    weights, logs, lse = np.zeros(moved.shape), np.full(moved.shape, -INF), np.full(moved.shape[:-1], -INF)
    for row in np.ndindex(*lse.shape):
        counting = [j for j in range(moved.shape[-1]) if seen[(*row, j)]]
        if counting:
            top = max(moved[(*row, j)] for j in counting)
            total = math.fsum(math.exp(moved[(*row, j)] - top) for j in counting)
            lse[row] = top + math.log(total)
            for j in counting:
                weights[(*row, j)] = math.exp(moved[(*row, j)] - top) / total
                logs[(*row, j)] = moved[(*row, j)] - top - math.log(total)
    return np.moveaxis(weights, -1, axis), np.moveaxis(logs, -1, axis), lse


@st.composite
def problems(draw: Any, least: int = 0) -> tuple[np.ndarray, int, np.ndarray]:
    """x, an axis, and a mask in some shape that broadcasts to x."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=least, max_side=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    kept = draw(st.integers(0, len(shape)))
    of_mask = tuple(n if draw(st.booleans()) else 1 for n in shape[kept:])
    return rng.standard_normal(shape) * draw(st.sampled_from([0.0, 1.0, 30.0])), axis, np.asarray(rng.random(of_mask) < 0.7)


@given(problems())
def test_values_are_those_of_plain_loops(problem):
    x, axis, mask = problem
    weights, logs, lse = twin(x, axis, mask)
    np.testing.assert_allclose(softmax(x, axis=axis, mask=mask), weights, rtol=1e-14)
    np.testing.assert_allclose(log_softmax(x, axis=axis, mask=mask), logs, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(logsumexp(x, axis=axis, mask=mask), lse, rtol=1e-14, atol=1e-15)


@every_op
@given(problem=problems())
@settings(max_examples=50)
def test_backward_over_random_shapes_and_masks(op, problem):
    x, axis, mask = problem
    _, forward, backward = OPS[op]

    def call(x: np.ndarray) -> Any:
        out, saved = forward(x / 15, axis=axis, mask=mask)  # steps of the differences are small beside scores of order 1
        return np.where(out == -INF, 0.0, out), saved

    check_backward(call, lambda dout, saved: (backward(dout, saved).dx / 15,), [x])


@every_op
@given(problem=problems(least=1), stray=st.sampled_from([NAN, INF, -INF, 1e300, -1e300]))
@settings(max_examples=50)
def test_what_does_not_count_has_no_influence(op, problem, stray):
    x, axis, mask = problem
    _, forward, backward = OPS[op]
    masked = np.broadcast_to(~mask, x.shape)
    out, saved = forward(x, axis=axis, mask=mask)
    dout = np.cos(np.arange(out.size)).reshape(out.shape)
    dx = backward(dout, saved).dx
    other_out, other_saved = forward(np.where(masked, stray, x), axis=axis, mask=mask)
    dead = masked.all(axis=axis) if op == "logsumexp" else masked
    other_dx = backward(np.where(dead, stray, dout), other_saved).dx
    np.testing.assert_array_equal(other_out, out)
    np.testing.assert_array_equal(other_dx, dx)
    assert not dx[masked].any()


@every_op
def test_minus_infinity_is_as_good_as_masked(op):
    _, forward, backward = OPS[op]
    rng = np.random.default_rng(0)
    x, mask = rng.standard_normal((7, 5)), rng.random((7, 5)) < 0.5
    mask[3] = False
    out, saved = forward(x, mask=mask)
    dout = rng.standard_normal(out.shape)
    for rest in (None, rng.random((7, 5)) < 2, mask | (np.arange(5) < 2)):  # all by -inf, or some of it by a mask
        other_out, other_saved = forward(np.where(mask, x, -INF), mask=rest)
        np.testing.assert_array_equal(out, other_out)
        np.testing.assert_array_equal(backward(dout, saved).dx, backward(dout, other_saved).dx)


@every_op
def test_a_mask_that_hides_nothing_changes_no_bit(op):
    _, forward, backward = OPS[op]
    x = np.random.default_rng(0).standard_normal((3, 5))
    out, saved = forward(x, mask=np.ones(5, bool))
    plain_out, plain_saved = forward(x)
    np.testing.assert_array_equal(out, plain_out)
    np.testing.assert_array_equal(backward(out, saved).dx, backward(out, plain_saved).dx)


def test_nothing_counts(to_xp):
    x, mask = to_xp([[NAN, INF], [1.0, 2.0]]), to_xp([[False, False], [True, True]])
    assert to_numpy(softmax(x, mask=mask))[0].tolist() == [0, 0]
    assert to_numpy(log_softmax(x, mask=mask))[0].tolist() == [-INF, -INF]
    assert to_numpy(logsumexp(x, mask=mask))[0] == -INF
    for op, (_, forward, backward) in OPS.items():
        dout = to_xp([NAN, 1.0] if op == "logsumexp" else [[NAN, INF], [1.0, 3.0]])
        dx = to_numpy(backward(dout, forward(x, mask=mask)[1]).dx)
        assert dx[0].tolist() == [0, 0]
        assert np.isfinite(dx).all()
        assert dx[1].any()


@pytest.mark.parametrize(
    ("shape", "axis", "reduced"), [((2, 0), -1, (2,)), ((0, 3), -1, (0,)), ((2, 0, 3), 0, (0, 3)), ((0,), 0, ())]
)
def test_empty(shape, axis, reduced, to_xp):
    x = to_xp(np.zeros(shape))
    for op, (value, forward, backward) in OPS.items():
        out, saved = forward(x, axis=axis)
        assert tuple(out.shape) == (reduced if op == "logsumexp" else shape)
        assert tuple(value(x, axis=axis).shape) == tuple(out.shape)
        assert tuple(backward(out, saved).dx.shape) == shape
    lse = to_numpy(logsumexp(x, axis=axis))
    assert (lse == -INF).all()


# Numbers that nobody here computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax_axis1", "softmax_large"])
def test_gradients_by_pytorch(name):
    case = next(c for c in json.loads((DATA / "torch_gradients.json").read_text())["cases"] if c["name"] == name)
    with np.load(DATA / "torch_gradients.npz") as arrays:
        x, out, dout, dx = (arrays[f"{name}/{part}"] for part in ("in_x", "out", "g_out", "d_x"))
    got, saved = softmax_forward(x, axis=case["axis"])
    np.testing.assert_allclose(got, out, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(softmax_backward(dout, saved).dx, dx, rtol=1e-13, atol=1e-15)


def test_published_empty_mask():
    examples = json.loads((DATA / "published_examples.json").read_text())
    example = next(e for e in examples if e["id"] == "jax_softmax_empty_mask")
    out = softmax(np.asarray(example["inputs"]["x"]), mask=np.asarray(example["inputs"]["keep"]))
    assert out.tolist() == example["expected"]


def test_known_cases():
    assert softmax(np.asarray([-1000.0, -1001.0])).round(4).tolist() == [0.7311, 0.2689]
    x = np.asarray([0.1, 0.9])
    assert softmax_backward(np.ones(2), softmax_forward(x)[1]).dx == pytest.approx([0, 0], abs=1e-16)
    assert log_softmax_backward(np.ones(2), log_softmax_forward(x)[1]).dx == pytest.approx([0.3799, -0.3799], abs=5e-5)


def test_a_large_masked_element_overflows_nowhere():
    x, mask = np.asarray([36.0, 1e4]), np.asarray([True, False])
    with np.errstate(all="raise"):
        for out_cotangent in ([1.0, 0.0], [0.0, 1.0]):
            out, saved = softmax_forward(x, mask=mask)
            assert out.tolist() == [1, 0]
            assert softmax_backward(np.asarray(out_cotangent), saved).dx.tolist() == [0, 0]


# Extremes ----------------------------------------------------------------------------------------------------------------------


def test_large_and_far_apart():
    assert logsumexp(np.asarray([1e308, 1e308])) == 1e308
    assert softmax(np.asarray([1e308, -1e308])).tolist() == [1, 0]
    assert log_softmax(np.asarray([0.0, -1e5])).tolist() == [0, -1e5]
    assert logsumexp(np.asarray([-1000.0, -1000.0])) == pytest.approx(-1000 + math.log(2), rel=1e-15)


@pytest.mark.parametrize("stray", [INF, NAN])
def test_a_row_with_a_visible_infinity_is_nan(stray):
    x = np.asarray([[1.0, stray, -INF], [1.0, 2.0, 3.0]])
    for value in (softmax, log_softmax):
        assert np.isnan(value(x)[0, :2]).all()
        assert np.isfinite(value(x)[1]).all()
    assert softmax(x)[0, 2] == 0
    assert log_softmax(x)[0, 2] == -INF
    np.testing.assert_array_equal(logsumexp(x)[0], stray)


def test_shift_changes_nothing_and_weights_sum_to_one():
    x = np.random.default_rng(0).standard_normal((7, 11))
    np.testing.assert_allclose(softmax(x + 100), softmax(x), rtol=1e-13)
    np.testing.assert_allclose(softmax(x).sum(-1), 1, rtol=1e-15)
    np.testing.assert_allclose(logsumexp(x + 100), logsumexp(x) + 100, rtol=1e-15)
    np.testing.assert_allclose(np.exp(log_softmax(x)), softmax(x), rtol=1e-14)


def test_float16_is_computed_in_float32():
    x = np.linspace(0, 8, 4096, dtype=np.float16)
    weights = softmax(x.astype(np.float64))
    np.testing.assert_array_equal(softmax(x), weights.astype(np.float16))  # a sum in float16 would be off by percents
    np.testing.assert_array_equal(logsumexp(x), logsumexp(x.astype(np.float64)).astype(np.float16))
    saved = softmax_forward(x)[1]
    assert saved.row_max.dtype == saved.row_sum.dtype == np.float32


def test_saved_holds_two_numbers_a_row_and_borrows_the_rest():
    x, mask = np.ones((3, 5)), np.ones(5, bool)
    saved = softmax_forward(x, mask=mask)[1]
    assert saved.x is x
    assert saved.mask is mask
    assert saved.row_max.shape == saved.row_sum.shape == (3, 1)
    assert repr(saved) == "SoftmaxSaved(x=float64[3, 5], mask=bool[5], axis=1, row_max=float64[3, 1], row_sum=float64[3, 1])"


def test_a_result_without_axes_is_an_array_and_takes_a_number_as_cotangent():
    out, saved = logsumexp_forward(np.zeros(3, np.float32))
    assert isinstance(out, np.ndarray)
    assert out.shape == ()
    for dout in (3, 3.0, np.float64(3), np.asarray(3.0, np.float32)):
        dx = logsumexp_backward(dout, saved).dx
        assert dx.dtype == np.float32
        np.testing.assert_allclose(dx, [1, 1, 1], rtol=1e-6)


# Errors ------------------------------------------------------------------------------------------------------------------------


@every_op
def test_errors(op):
    call = OPS[op][0]
    x = np.zeros((2, 3))
    with pytest.raises(
        TypeError, match=f"^{op}: mask must be boolean, True where an element counts, got int64; add numbers to x"
    ):
        call(x, mask=np.ones(3, np.int64))
    with pytest.raises(ValueError, match=rf"^{op}: mask must broadcast to the shape of x = \(2, 3\), got shape \(2,\)"):
        call(x, mask=np.ones(2, bool))
    with pytest.raises(ValueError, match=rf"^{op}: mask must broadcast to the shape of x = \(2, 3\), got shape \(1, 2, 3\)"):
        call(x, mask=np.ones((1, 2, 3), bool))
    with pytest.raises(ValueError, match=rf"^{op}: axis must be one of the 2 axes of x with shape \(2, 3\), got 2"):
        call(x, axis=2)
    with pytest.raises(ValueError, match=f"^{op}: axis must be one of the 0 axes"):
        call(np.asarray(1.0))
    for axis in (True, 1.0, None, (0, 1)):
        with pytest.raises(TypeError, match=f"^{op}: axis must be an integer, got"):
            call(x, axis=axis)
    for dtype in ("int64", "complex128", "bool"):
        with pytest.raises(TypeError, match=f"^{op}: x must have a floating dtype .*, got {dtype}"):
            call(x.astype(dtype))
    for thing in ([1.0], 1.0, np.float64(1)):
        with pytest.raises(TypeError, match=f"^{op}: x must be an array"):
            call(thing)
    with pytest.raises(TypeError, match="mask must be an array"):
        call(x, mask=True)
    with pytest.raises(TypeError):
        call(x=x)


def test_axis_may_be_a_numpy_integer():
    x = np.arange(6.0).reshape(2, 3)
    for axis in (np.int64(0), np.asarray(0)):
        np.testing.assert_array_equal(softmax(x, axis=axis), softmax(x, axis=0))
