"""Activations and gates: values against the standard library and 50-digit numbers, tails, infinities, slopes."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn._arrays import blocks
from npattn.layers import (
    gate,
    gate_backward,
    gate_forward,
    gelu,
    gelu_backward,
    gelu_forward,
    gelu_tanh,
    gelu_tanh_backward,
    gelu_tanh_forward,
    relu,
    relu_backward,
    relu_forward,
    silu,
    silu_backward,
    silu_forward,
)
from npattn.layers._curves import CURVES
from npattn.layers._normal import QUOTIENTS
from npattn.testing.libraries import to_numpy
from npattn.testing.vectors import torch_gradients

DATA = Path(__file__).parent.parent / "data"
INF, NAN = math.inf, math.nan

OPS: dict[str, Any] = {
    "relu": (relu, relu_forward, relu_backward),
    "silu": (silu, silu_forward, silu_backward),
    "gelu": (gelu, gelu_forward, gelu_backward),
    "gelu_tanh": (gelu_tanh, gelu_tanh_forward, gelu_tanh_backward),
}
every_op = pytest.mark.parametrize("op", OPS)


def _phi(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else math.exp(x)


def _u(x: float) -> float:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


TWINS: dict[str, Any] = {  # value and slope by the standard library
    "relu": (lambda x: max(x, 0.0), lambda x: float(x > 0)),
    "silu": (lambda x: x * _sigma(x), lambda x: _sigma(x) * (1 + x * _sigma(-x))),
    "gelu": (lambda x: x * math.erfc(-x / math.sqrt(2)) / 2, lambda x: math.erfc(-x / math.sqrt(2)) / 2 + x * _phi(x)),
    "gelu_tanh": (
        lambda x: x * _sigma(2 * _u(x)),
        lambda x: (
            _sigma(2 * _u(x)) + 2 * x * _sigma(2 * _u(x)) * _sigma(-2 * _u(x)) * math.sqrt(2 / math.pi) * (1 + 0.134145 * x**2)
        ),
    ),
}


def slopes(op: str, x: Any) -> Any:
    _, forward, backward = OPS[op]
    out, saved = forward(x)
    return backward(np.ones_like(out), saved).dx


# Values ------------------------------------------------------------------------------------------------------------------------


@every_op
@given(x=st.floats(-36, 36))
def test_values_and_slopes(op, x):
    """The rounding of an exponent of size e costs e units in the last place, on both sides."""
    value, slope = TWINS[op]
    allowed = 1e-15 * (2 + x * x * (1 + 0.1 * x * x * (op == "gelu_tanh")))
    smallest = 1e-305  # nothing is promised of numbers that are not normal
    assert abs(OPS[op][0](np.asarray(x)) - value(x)) <= allowed * abs(value(x)) + smallest
    size = max(abs(value(x)) * (1 + x * x), abs(slope(x)))  # the terms of the slope, which may cancel
    assert abs(slopes(op, np.asarray([x]))[0] - slope(x)) <= allowed * size + smallest


def _table(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(DATA / "normal_tail.npz") as table:
        return table[f"{dtype}_x"], table[f"{dtype}_cdf"]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gelu_is_as_exact_as_promised(dtype, to_xp):
    """Against numbers of 50 digits, as relative errors, wherever Φ(x) is normal."""
    x, cdf = _table(dtype)
    assert len(x) > 1000
    assert x.min() < {"float64": -37.4, "float32": -12.9}[dtype]
    assert 0 < cdf.min() / float(np.finfo(dtype).tiny) < {"float64": 3, "float32": 2}[dtype]
    expected = x * cdf
    wrong = np.abs(to_numpy(gelu(to_xp(x, dtype))).astype(np.float64) - expected) + 2.0**-52 * np.abs(expected)
    bound = {"float64": 1e-15, "float32": 5e-7}[dtype] * (1 + x * x)
    assert (wrong <= bound * np.abs(expected)).all(), f"by up to {np.nanmax(wrong / (bound * np.abs(expected))):.3g} of the bound"


def test_the_table_is_right():
    """Where the argument of the standard library's erfc is not rounded too coarsely, they agree."""
    for dtype in ("float64", "float32"):
        x, cdf = _table(dtype)
        for number, value in zip(x, cdf, strict=True):
            assert value == pytest.approx(math.erfc(-number / math.sqrt(2)) / 2, rel=1e-15 * (1 + number * number))


def test_gelu_on_a_dense_grid():
    """With the standard library's own error added to ours."""
    x = np.linspace(-37.5, 9, 100_003)
    expected = x * np.asarray([math.erfc(-n / math.sqrt(2)) / 2 for n in x.tolist()])
    assert (np.abs(gelu(x) - expected) <= 1.5e-15 * (1 + x * x) * np.abs(expected)).all()
    single = gelu(x[x > -12.9].astype(np.float32))
    assert (
        np.abs(single - gelu(x[x > -12.9].astype(np.float32).astype(np.float64)))
        <= 5e-7 * (1 + x[x > -12.9] ** 2) * np.abs(single)
    ).all()


def test_the_coefficients_are_the_best():
    """They are found again, and their error is what npattn/layers/_normal.py says."""
    pytest.importorskip("mpmath", reason="mpmath is not installed")
    spec = importlib.util.spec_from_file_location("normal_tail", DATA / "normal_tail.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for dtype, degrees, worst in (("float64", (9, 10), 5.15e-17), ("float32", (4, 5), 6.31e-9)):
        p, q, end = QUOTIENTS[dtype]
        found_p, found_q, found_worst = module.quotient(*degrees, end)
        assert found_worst < worst
        np.testing.assert_allclose([*p, *q], [*found_p, *found_q], rtol=1e-12)
        assert min(*p, *q) > 0
    x, cdf = _table("float64")
    np.testing.assert_array_equal(module.distribution(x[::97]), cdf[::97])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_beyond_the_end_nothing_is_left(dtype):
    p, q, end = QUOTIENTS[dtype]
    assert np.exp(np.asarray(-end * end / 2, dtype)) == 0
    assert gelu(np.asarray([-end], dtype))[0] == 0
    assert len(p) + 1 == len(q)  # so that the quotient falls like 1/t


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@every_op
def test_extremes(op, dtype, to_xp):
    """The limits, where a formula would give infinity times 0; and NaN stays NaN."""
    largest = float(np.finfo(dtype).max)
    x = to_xp([-INF, -largest, -1e4, -0.0, 0.0, 1e4, largest, INF, NAN], dtype)
    out = to_numpy(OPS[op][0](x))
    np.testing.assert_array_equal(out[:5], 0)
    np.testing.assert_array_equal(out[5:], np.asarray([1e4, largest, INF, NAN], dtype))
    slope = to_numpy(OPS[op][1](x)[1].slope)
    np.testing.assert_array_equal(slope[:3], 0)
    np.testing.assert_array_equal(slope[3:5], 0 if op == "relu" else 0.5)
    np.testing.assert_array_equal(slope[5:8], 1)


def test_tails_are_accurate():
    """Where 1 + tanh and 1 - Φ have no digit left."""
    assert gelu_tanh(np.asarray(-8.0)) == pytest.approx(-8 / (1 + math.exp(-2 * _u(-8.0))), rel=1e-13)
    assert silu(np.asarray(-700.0)) == pytest.approx(-700 * math.exp(-700), rel=1e-12)
    assert gelu(np.asarray(-30.0)) == pytest.approx(-30 * 4.90671392714819e-198, rel=1e-12)  # Abramowitz, Stegun: table 26.2
    assert slopes("gelu", np.asarray([-30.0]))[0] == pytest.approx(4.90671392714819e-198 - 30 * _phi(30), rel=1e-12)


# Numbers that nobody here computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["silu", "gelu_tanh"])
def test_gradients_by_pytorch(op):
    (vector,) = torch_gradients(DATA, op)
    _, forward, backward = OPS[op]
    out, saved = forward(vector.inputs["x"])
    np.testing.assert_allclose(out, vector.expected["out"], rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(backward(vector.cotangent, saved).dx, vector.expected["dx"], rtol=1e-13, atol=1e-14)


@every_op
def test_pytorch_beside(op):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    theirs = {"gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}.get(op) or getattr(functional, op)
    rng = np.random.default_rng(0)
    x, dout = 4 * rng.standard_normal((2, 50, 40))
    t = torch.tensor(x, requires_grad=True)
    expected = theirs(t)
    expected.backward(torch.tensor(dout))
    _, forward, backward = OPS[op]
    out, saved = forward(x)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(backward(dout, saved).dx, t.grad.numpy(), rtol=1e-12, atol=1e-13)  # it cancels in 1 + tanh


# Gates -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", OPS)
def test_a_gate_is_the_product_with_an_activation(activation):
    rng = np.random.default_rng(0)
    x, gates, dout = rng.standard_normal((3, 4, 5))
    value, forward, backward = OPS[activation]
    out, saved = gate_forward(x, gates, activation=activation)
    np.testing.assert_array_equal(out, x * value(gates))
    np.testing.assert_array_equal(gate(x, gates, activation=activation), out)
    grads = gate_backward(dout, saved)
    np.testing.assert_array_equal(grads.dx, dout * value(gates))
    np.testing.assert_allclose(grads.dgates, backward(dout * x, forward(gates)[1]).dx, rtol=1e-14)


# Memory, shapes, errors --------------------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 2, 3)])
def test_every_shape(op, shape, to_xp):
    x = to_xp(np.zeros(shape))
    _, forward, backward = OPS[op]
    out, saved = forward(x)
    dx = backward(out, saved).dx
    assert tuple(out.shape) == tuple(dx.shape) == shape
    assert type(out) is type(dx) is type(x)


@every_op
@pytest.mark.parametrize("count", [1, 7, 64, 65, 200])
def test_in_blocks_as_in_one(op, count, monkeypatch):
    """Where blocks end changes no bit, in any layout."""
    value, forward, backward = OPS[op]
    x = np.random.default_rng(0).standard_normal((count, 3))[:, ::2]
    out, saved = forward(x)
    dx = backward(x, saved).dx
    monkeypatch.setattr(blocks, "BLOCK", 64 * 8)
    cut, saved = forward(x)
    for got, expected in ((cut, out), (value(x), out), (backward(x, saved).dx, dx)):
        np.testing.assert_array_equal(got, expected)


@every_op
def test_the_slope_is_all_that_is_saved(op):
    x = np.random.default_rng(0).standard_normal((2, 3))
    saved = OPS[op][1](x)[1]
    assert saved._fields == ("slope", "dtype")
    assert not np.shares_memory(saved.slope, x)
    half = OPS[op][1](x.astype(np.float16))[1]
    assert half.slope.dtype == np.float32  # not rounded
    assert half.dtype == np.float16


@every_op
def test_errors(op):
    value = OPS[op][0]
    for dtype in ("int64", "complex128", "bool"):
        with pytest.raises(TypeError, match=f"^{op}: x must have a floating dtype .*, got {dtype}"):
            value(np.ones(3, dtype))
    with pytest.raises(TypeError, match=f"^{op}: x must be an array"):
        value(1.0)


def test_errors_of_gates():
    x = np.ones((2, 3))
    with pytest.raises(ValueError, match=r"^gate: gates must have shape \(...\) = \(2, 3\) as x has, got \(3,\)"):
        gate(x, np.ones(3))
    with pytest.raises(ValueError, match="^gate: activation must be one of relu, silu, gelu, gelu_tanh, got 'tanh'"):
        gate(x, x, activation="tanh")
    with pytest.raises(TypeError, match="^gate: x is float64 but gates is float32"):
        gate(x, x.astype(np.float32))
    assert set(CURVES) == set(OPS)
