"""The gradient checker: what it passes, what it catches, and what it says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn.testing import check_backward, check_jvp, check_symmetric, complex_step, numerical_jacobian, to_numpy

RNG = np.random.default_rng(0)
X, W, B = RNG.standard_normal((3, 4)), RNG.standard_normal((4, 2)), RNG.standard_normal(2)


class Layer(NamedTuple):
    w: np.ndarray
    b: np.ndarray | None


class LayerGrads(NamedTuple):
    dx: np.ndarray
    dlayer: Layer


def forward(x, layer):
    """tanh(x w + b)."""
    xw = x @ layer.w
    out = np.tanh(xw if layer.b is None else xw + layer.b)
    return out, (x, layer, out)


def backward(dout, saved, *, slip=0.0):
    x, layer, out = saved
    d = dout * (1 - out * out)
    db = None if layer.b is None else d.sum(axis=0) * (1 + slip)
    return LayerGrads(d @ layer.w.T, Layer(x.T @ d, db))


@pytest.mark.parametrize("layer", [Layer(W, B), Layer(W, None)])
def test_a_right_backward_of_a_tree(layer):
    check_backward(forward, backward, {"x": X, "layer": layer})


@pytest.mark.parametrize("slip", [1e-2, -1e-4, 1e-6, np.nan, np.inf])
def test_a_slip_is_caught_and_named(slip):
    with pytest.raises(AssertionError, match="check_backward: along a random direction") as caught:
        check_backward(forward, lambda dout, saved: backward(dout, saved, slip=slip), {"x": X, "layer": Layer(W, B)})
    lines = {line.split()[0]: line for line in str(caught.value).splitlines()[2:]}
    assert set(lines) == {"x", "layer.w", "layer.b"}
    assert "(3, 4)" in lines["x"]

    def numbers(name):
        *_, expected, got, off, ratio = lines[name].split()
        return float(expected), float(got), float(off), float(ratio)

    assert numbers("x")[3] < 1e-8
    assert numbers("layer.w")[3] < 1e-8
    expected, got, off, ratio = numbers("layer.b")
    if np.isfinite(slip):
        assert ratio == pytest.approx(abs(slip), rel=1e-2)
        assert off == pytest.approx(abs(got - expected), rel=1e-2)
    else:
        assert not np.isfinite(got)


def test_the_report_gives_the_index():
    def wrong(dout, x):
        dx = 2 * x * dout
        dx[2, 1] += 1
        return (dx,)

    with pytest.raises(AssertionError, match=r"0 +\(3, 4\) +\[2, 1\]"):
        check_backward(lambda x: (x * x, x), wrong, [X])


def test_the_report_of_a_large_input_looks_at_some_elements():
    with pytest.raises(AssertionError, match="of 400 tried"):
        check_backward(lambda x: (x * x, x), lambda dout, x: (3 * x * dout,), [np.ones((30, 30))])


def test_a_gradient_that_is_exactly_zero():
    """Softmax does not change when all of its arguments do: rounding is all that is left."""

    def softmax(shift, x):
        e = np.exp(x + shift - (x + shift).max())
        return e / e.sum(), None

    check_backward(lambda s: softmax(s, B), lambda dout, saved: (np.zeros(1),), [np.ones(1)])
    with pytest.raises(AssertionError):
        check_backward(lambda s: softmax(s, B), lambda dout, saved: (np.full(1, 1e-6),), [np.ones(1)])


def test_a_missing_gradient():
    with pytest.raises(AssertionError, match="there is no gradient of w"):
        check_backward(lambda x, w: (x @ w, (x, w)), lambda dout, s: {"dx": dout @ s[1].T}, {"x": X, "w": W})
    with pytest.raises(AssertionError, match="there is no gradient of 1"):
        check_backward(lambda x, w: (x @ w, (x, w)), lambda dout, s: (dout @ s[1].T, None), [X, W])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda dx: dx[:1], r"the gradient of 0 should be float64 of shape \(3, 4\) as 0 is, got float64 of shape \(1, 4\)"),
        (lambda dx: dx[None], r"got float64 of shape \(1, 3, 4\)"),
        (lambda dx: dx.astype(np.float32), r"got float32 of shape \(3, 4\)"),
    ],
)
def test_a_gradient_of_another_form(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check_backward(lambda x: (x * x, x), lambda dout, x: (wrong(2 * x * dout),), [X])


def test_lower_precisions_are_refused():
    with pytest.raises(TypeError, match=r"must be float64, got x \(float32\)"):
        check_backward(lambda x: (x * x, x), lambda dout, x: (2 * x * dout,), {"x": X.astype(np.float32)})


def test_what_is_not_floating_is_passed_on():
    def take(x, ids, times):
        return times * x[ids], (x, ids, times)

    def back(dout, saved):
        x, ids, times = saved
        dx = np.zeros_like(x)
        np.add.at(dx, ids, times * dout)
        return (dx,)

    check_backward(take, back, [X, np.array([2, 0, 2]), 3])


def test_outputs_may_be_a_tree():
    def both(x):
        return {"sum": x.sum(axis=0), "square": x * x}, x

    check_backward(both, lambda d, x: (d["sum"] + 2 * x * d["square"],), [X])
    with pytest.raises(AssertionError):
        check_backward(both, lambda d, x: (2 * x * d["square"],), [X])


def test_a_bound_and_a_step_of_the_callers():
    seen = []

    def bound(t, g):
        seen.append((sorted(t), sorted(g)))
        return 1.0

    check_backward(lambda x: (x * x, x), lambda dout, x: (2.001 * x * dout,), {"x": X}, bound=bound, step=lambda t: 1e-4)
    assert seen == [(["x"], [""])] * 3


def test_an_all_ones_cotangent_would_not_do():
    """The rows of softmax sum to one: with a cotangent of ones any multiple of its gradient passes."""

    def softmax(x):
        e = np.exp(x)
        return e / e.sum(), e / e.sum()

    def right(dout, p):
        return (p * (dout - (p * dout).sum()),)

    np.testing.assert_allclose(right(np.ones(2), softmax(B)[0])[0], 0, atol=1e-16)
    check_backward(softmax, right, [B])
    with pytest.raises(AssertionError):
        check_backward(softmax, lambda dout, p: (3 * right(dout, p)[0],), [B])


def test_any_library(library, to_xp):
    x, w = to_xp(X), to_xp(W)
    xp = library.xp

    def product(x, w):
        return x @ w, (x, w)

    def back(dout, saved):
        x, w = saved
        return dout @ xp.matrix_transpose(w), xp.matrix_transpose(x) @ dout

    check_backward(product, back, [x, w])
    with pytest.raises(AssertionError, match="worst element"):
        check_backward(product, lambda dout, saved: (back(dout, saved)[0], 2 * back(dout, saved)[1]), [x, w])
    np.testing.assert_allclose(to_numpy(x), X)


# Jacobian-vector products, second derivatives, and other ways to a derivative ---------------------------------------------------


def test_jvp():
    def f(x, w):
        return np.sin(x) @ w

    def jvp(args, tangents):
        (x, w), (tx, tw) = args, tangents
        return (np.cos(x) * tx) @ w + np.sin(x) @ tw

    def vjp(dout):
        return np.cos(X) * (dout @ W.T), np.sin(X).T @ dout

    check_jvp(f, jvp, [X, W], backward=vjp)
    with pytest.raises(AssertionError, match="by finite differences"):
        check_jvp(f, lambda args, t: 1.0001 * jvp(args, t), [X, W])
    with pytest.raises(AssertionError, match=r"<u, jvp\(v\)>"):
        check_jvp(f, jvp, [X, W], backward=lambda dout: (vjp(dout)[0] * (1 + 1e-9), vjp(dout)[1]))


def test_a_jvp_that_is_nan():
    with pytest.raises(AssertionError, match="got nan"):
        check_jvp(np.sin, lambda args, t: np.where(X > 1, np.nan, np.cos(X) * t[0]), [X])


def test_symmetric_second_derivatives():
    a = RNG.standard_normal((4, 4))
    check_symmetric(lambda x: (a + a.T) @ x, RNG.standard_normal(4))
    with pytest.raises(AssertionError, match="gradient of no function"):
        check_symmetric(lambda x: a @ x, RNG.standard_normal(4))


def test_numerical_jacobian():
    jacobian = numerical_jacobian(lambda x: x @ W, X)
    assert jacobian.shape == (3, 2, 3, 4)
    np.testing.assert_allclose(jacobian, np.einsum("ij,kl->iljk", np.eye(3), W), atol=1e-9)
    assert numerical_jacobian(lambda x: x.sum(axis=0), np.zeros((0, 2))).shape == (2, 0, 2)


@given(st.integers(0, 999))
def test_differences_and_complex_steps_agree(seed):
    """Two ways to a derivative that share nothing: the check of the checker."""
    rng = np.random.default_rng(seed)
    x, t, w = rng.standard_normal((3, 4)), rng.standard_normal((3, 4)), rng.standard_normal((4, 2))

    def f(x):
        return np.tanh(np.exp(x) @ w) / (1 + x[:, :2] ** 2)

    exact = complex_step(f, x, t)
    by_differences = np.tensordot(numerical_jacobian(f, x), t, axes=2)
    np.testing.assert_allclose(by_differences, exact, atol=1e-9 * np.abs(np.exp(x) @ w).max() ** 3)
