"""Layer norm and RMS norm: values by plain loops, large means, half precision, absent parameters, PyTorch's gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from npattn._arrays import blocks
from npattn.layers import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import to_numpy
from npattn.testing.vectors import published_examples, torch_gradients

DATA = Path(__file__).parent.parent / "data"
PUBLISHED = {vector.name: (vector, atol) for vector, atol, _ in published_examples(DATA)}


@st.composite
def problems(draw: Any) -> tuple[np.ndarray, Any, tuple[int, ...], Any, Any]:
    """x, the axes as they are given and in order, a weight and a bias or None."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    axes = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, len(shape)))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    order = tuple(sorted(axes))
    features = tuple(shape[axis] for axis in order)
    weight, bias = (rng.standard_normal(features) if draw(st.booleans()) else None for _ in range(2))
    given_axes = axes[0] - len(shape) * draw(st.booleans()) if len(axes) == 1 and draw(st.booleans()) else tuple(axes)
    return rng.standard_normal(shape) + 3 * rng.standard_normal(), given_axes, order, weight, bias


def twin(x: np.ndarray, order: tuple[int, ...], weight: Any, bias: Any, eps: float, *, centre: bool) -> np.ndarray:
    """By plain loops, with sums that do not round."""
    others = [axis for axis in range(x.ndim) if axis not in order]
    moved = np.transpose(x, (*others, *order))
    out = np.zeros(moved.shape)
    for at in np.ndindex(*moved.shape[: len(others)]):
        row = moved[at]
        mean = math.fsum(row.ravel()) / row.size if centre else 0.0
        size = math.sqrt(math.fsum((row.ravel() - mean) ** 2) / row.size + eps)
        out[at] = (row - mean) / size * (1 if weight is None else weight) + (0 if bias is None else bias)
    return np.transpose(out, np.argsort((*others, *order)))


@given(problems(), st.sampled_from([1e-5, 0.5]))
def test_values_are_those_of_plain_loops(problem, eps):
    x, axes, order, weight, bias = problem
    expected = twin(x, order, weight, bias, eps, centre=True)
    np.testing.assert_allclose(layer_norm(x, weight, bias, eps=eps, axes=axes), expected, rtol=1e-12, atol=1e-12)
    expected = twin(x, order, weight, None, eps, centre=False)
    np.testing.assert_allclose(rms_norm(x, weight, eps=eps, axes=axes), expected, rtol=1e-13, atol=1e-14)


@given(problems())
@settings(max_examples=50)
def test_backward_over_random_shapes_and_axes(problem):
    x, axes, _, weight, bias = problem
    check_backward(
        lambda x, weight, bias: layer_norm_forward(x, weight, bias, eps=0.1, axes=axes),
        layer_norm_backward,
        {"x": x, "weight": weight, "bias": bias},
    )
    check_backward(
        lambda x, weight: rms_norm_forward(x, weight, eps=0.1, axes=axes), rms_norm_backward, {"x": x, "weight": weight}
    )


def test_what_is_not_given_has_no_gradient():
    x, feature = np.random.default_rng(0).standard_normal((3, 5)), np.ones(5)
    for weight, bias in ((None, None), (feature, None), (None, feature), (feature, feature)):
        out, saved = layer_norm_forward(x, weight, bias)
        grads = layer_norm_backward(out, saved)
        assert [g is None for g in grads] == [False, weight is None, bias is None]
    assert rms_norm_backward(x, rms_norm_forward(x)[1]).dweight is None


# Numbers that nobody here computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", list(torch_gradients(DATA, "layer_norm")), ids=lambda vector: vector.name)
def test_gradients_by_pytorch(vector):
    x = vector.inputs["x"]
    last = len(vector.settings["normalized_shape"])
    out, saved = layer_norm_forward(
        x, vector.inputs["weight"], vector.inputs.get("bias"), eps=vector.settings["eps"], axes=tuple(range(-last, 0))
    )
    np.testing.assert_allclose(out, vector.expected["out"], rtol=1e-12, atol=1e-14)
    grads = layer_norm_backward(vector.cotangent, saved)
    assert {"dx", "dweight"} <= set(vector.expected)
    for name in set(vector.expected) - {"out"}:
        size = np.abs(vector.expected[name]).max() + 1
        np.testing.assert_allclose(getattr(grads, name), vector.expected[name], rtol=1e-11, atol=1e-13 * size, err_msg=name)


@pytest.mark.parametrize("name", ["torch84356_layernorm", "jax37281_large_mean"])
def test_published(name):
    vector, atol = PUBLISHED[name]
    x = vector.inputs["x"].astype(np.float32)
    parameters = [vector.inputs[n].astype(np.float32) for n in ("gamma", "beta") if n in vector.inputs]
    got = layer_norm(x, *parameters, eps=vector.settings["eps"])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, vector.expected["out"], rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_pytorch_beside(dtype):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, weight, bias, dout = (rng.standard_normal(s).astype(dtype) for s in ((3, 5, 7), (5, 7), (5, 7), (3, 5, 7)))
    theirs = [torch.tensor(a, requires_grad=True) for a in (x, weight, bias)]
    rtol = 1e-12 if dtype == "float64" else 2e-5
    for forward, backward, expected in (
        (layer_norm_forward, layer_norm_backward, torch.nn.functional.layer_norm(theirs[0], (5, 7), theirs[1], theirs[2])),
        (rms_norm_forward, rms_norm_backward, torch.nn.functional.rms_norm(theirs[0], (5, 7), theirs[1], eps=1e-6)),
    ):
        given_arrays = (x, weight, bias) if forward is layer_norm_forward else (x, weight)
        out, saved = forward(*given_arrays, axes=(-2, -1))
        np.testing.assert_allclose(out, expected.detach().numpy(), rtol=rtol, atol=rtol)
        for got, wanted in zip(
            backward(dout, saved),
            torch.autograd.grad(expected, theirs[: len(given_arrays)], torch.tensor(dout)),
            strict=True,
        ):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=rtol, atol=rtol)


def test_known_cases():
    np.testing.assert_allclose(layer_norm(np.asarray([1.0, 0, 0, 0])), [1.7320, -0.5773, -0.5773, -0.5773], atol=1e-4)
    saved = layer_norm_forward(np.asarray([1.0, 2, 4]), np.ones(3), eps=1e-5)[1]
    dx = layer_norm_backward(np.asarray([1.0, 2, 3]), saved).dx
    np.testing.assert_allclose(dx, [-0.1145446, 0.1718091, -0.0572646], atol=5e-8)
    assert np.abs(layer_norm_backward(np.ones(3), saved).dx).max() < 1e-16
    assert np.isfinite(layer_norm(np.full(3, -11, np.float32) + np.float32(3e-6))).all()


def test_half_precision(to_xp, library):
    if not library.has("float16"):
        pytest.skip(f"{library.name} has no float16")
    zeros, large = to_xp(np.zeros((1, 4)), "float16"), to_xp([6e4, -6e4, 6e4, -6e4], "float16")
    for norm in (layer_norm, rms_norm):
        np.testing.assert_array_equal(to_numpy(norm(zeros, eps=1e-12)), np.zeros((1, 4)))
        np.testing.assert_array_equal(to_numpy(norm(large)), [1, -1, 1, -1])


# Precision -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.0, 1e2, -1e4, 1e6])
@pytest.mark.parametrize("count", [5, 300, 9000])
def test_a_large_mean_costs_nothing(mean, count, to_xp):
    """The float32 result is that of the same numbers in float64, as near as for a mean of 0; forward and backward."""
    rng = np.random.default_rng(count)
    x, dout = (rng.standard_normal((3, count)) + shift for shift in (mean, 0))
    x, dout = x.astype(np.float32), dout.astype(np.float32)
    exact, exact_saved = layer_norm_forward(x.astype(np.float64))
    out, saved = layer_norm_forward(to_xp(x))
    np.testing.assert_allclose(to_numpy(out), exact, rtol=1e-6, atol=2e-6)
    dx = to_numpy(layer_norm_backward(to_xp(dout), saved).dx)
    np.testing.assert_allclose(dx, layer_norm_backward(dout.astype(np.float64), exact_saved).dx, rtol=1e-6, atol=4e-6)


def test_rows_have_mean_0_and_variance_1():
    x = np.random.default_rng(0).standard_normal((7, 50)) * 30 + 1000
    out = layer_norm(x, eps=0)
    np.testing.assert_allclose(out.mean(-1), 0, atol=1e-15)
    np.testing.assert_allclose((out**2).mean(-1), 1, rtol=1e-14)
    np.testing.assert_allclose((rms_norm(x, eps=0) ** 2).mean(-1), 1, rtol=1e-14)
    np.testing.assert_allclose(layer_norm(5 * x - 3, eps=0), out, rtol=1e-11)


def test_constant_rows():
    """Their distance to the mean is exactly 0."""
    x = np.full((2, 7), 0.1, np.float32)
    assert not layer_norm(x).any()
    assert np.isfinite(layer_norm_backward(x, layer_norm_forward(x)[1]).dx).all()
    assert np.isnan(layer_norm(x, eps=0)).all()


@pytest.mark.parametrize("eps", [0.5, 1 / np.sqrt(4), np.float64(0.5), np.float16(0.5), np.asarray(0.5)], ids=repr)
def test_eps_never_changes_a_dtype(eps, to_xp):
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    for norm, forward, backward in (
        (layer_norm, layer_norm_forward, layer_norm_backward),
        (rms_norm, rms_norm_forward, rms_norm_backward),
    ):
        weight = to_xp(np.ones(3, np.float32))
        out, saved = forward(to_xp(x), weight, eps=eps)
        grads = backward(out, saved)
        assert {str(a.dtype) for a in (out, grads.dx, grads.dweight)} == {str(weight.dtype)}
        np.testing.assert_allclose(to_numpy(out), norm(x, eps=0.5), rtol=1e-6)


# Memory ----------------------------------------------------------------------------------------------------------------------


def test_saved_holds_a_few_numbers_a_row_and_borrows_the_rest():
    x, weight = np.ones((2, 3, 5)), np.ones(5)
    saved = layer_norm_forward(x, weight)[1]
    assert saved.x is x
    assert saved.weight is weight
    assert saved.mean.shape == saved.rstd.shape == (2, 3, 1)
    assert layer_norm_forward(x, axes=(0, 2))[1].mean.shape == (1, 3, 1)
    assert rms_norm_forward(x)[1].rrms.shape == (2, 3, 1)
    assert layer_norm_forward(x.astype(np.float16))[1].rstd.dtype == np.float32
    rstd = layer_norm_forward(np.asarray([1.0, 3.0]), eps=0.0)[1].rstd
    np.testing.assert_allclose(rstd, [1.0])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_in_blocks_as_in_one(rows, monkeypatch):
    """Where blocks end changes nothing but the rounding of sums over rows."""
    rng = np.random.default_rng(0)
    x, dout, weight, bias = (rng.standard_normal(s) for s in ((11, 3), (11, 3), (3,), (3,)))
    for norm, forward, backward, args in (
        (layer_norm, layer_norm_forward, layer_norm_backward, (x, weight, bias)),
        (rms_norm, rms_norm_forward, rms_norm_backward, (x, weight)),
    ):
        out, grads = norm(*args), backward(dout, forward(*args)[1])
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "BLOCK", rows * 3 * 8)
            cut, saved = forward(*args)
            cut_grads = backward(dout, saved)
        np.testing.assert_array_equal(cut, out)
        np.testing.assert_array_equal(cut_grads.dx, grads.dx)
        for got, expected in zip(cut_grads[1:], grads[1:], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0), (2, 0, 3)])
def test_empty(shape, to_xp):
    x, weight = to_xp(np.zeros(shape)), to_xp(np.ones(shape[-1]))
    for forward, backward in ((layer_norm_forward, layer_norm_backward), (rms_norm_forward, rms_norm_backward)):
        out, saved = forward(x, weight)
        grads = backward(out, saved)
        assert tuple(out.shape) == tuple(grads.dx.shape) == shape
        np.testing.assert_array_equal(to_numpy(grads.dweight), np.zeros(shape[-1]))


# Errors ----------------------------------------------------------------------------------------------------------------------


def test_errors():
    x, weight = np.ones((2, 3)), np.ones(3)
    for name, norm in (("layer_norm", layer_norm), ("rms_norm", rms_norm)):
        with pytest.raises(ValueError, match=rf"^{name}: weight must have shape \(C,\) with C = 3 as x has, got \(2,\)"):
            norm(x, np.ones(2))
        with pytest.raises(
            ValueError, match=rf"^{name}: weight must have shape \(2, 3\) as x has along axes \(0, 1\), got \(6,\)"
        ):
            norm(x, np.ones(6), axes=(0, 1))
        for axes in ((), (0, 0), (1, -1)):
            with pytest.raises(ValueError, match=f"^{name}: axes must be one axis or several different ones, got "):
                norm(x, axes=axes)
        with pytest.raises(ValueError, match=f"^{name}: axis must be one of the 2 axes of x"):
            norm(x, axes=2)
        with pytest.raises(TypeError, match=f"^{name}: axis must be an integer, got float"):
            norm(x, axes=(1.0,))
        with pytest.raises(ValueError, match=f"^{name}: eps must be at least 0, got -1.0"):
            norm(x, eps=-1)
        for eps, error in ((np.nan, ValueError), (None, TypeError), (np.ones(1), TypeError)):
            with pytest.raises(error, match=f"^{name}: eps must be"):
                norm(x, eps=eps)
        with pytest.raises(TypeError, match=f"^{name}: x is float64 but weight is float32"):
            norm(x, weight.astype(np.float32))
        with pytest.raises(TypeError, match=f"^{name}: x must have a floating dtype"):
            norm(x.astype(int))
    with pytest.raises(ValueError, match=r"^layer_norm: bias must have shape \(C,\) with C = 3 as x has, got \(1, 3\)"):
        layer_norm(x, weight, np.ones((1, 3)))
    with pytest.raises(TypeError, match="^layer_norm: x is float64 but bias is float32"):
        layer_norm(x, None, weight.astype(np.float32))
