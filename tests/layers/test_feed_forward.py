"""Feed-forward networks: values by plain loops, every activation, parameters, libraries, memory, errors."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import tree_map
from npattn._arrays.trees import tree_items, tree_leaves
from npattn.layers import (
    FeedForwardParams,
    GatedFeedForwardParams,
    feed_forward,
    feed_forward_backward,
    feed_forward_forward,
    gated_feed_forward,
    gated_feed_forward_backward,
    gated_feed_forward_forward,
    gelu,
    gelu_tanh,
    relu,
    silu,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import asarray, open_library, to_numpy

ACTIVATIONS: dict[str, Any] = {"relu": relu, "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
OPS: dict[str, Any] = {
    "feed_forward": (FeedForwardParams, feed_forward, feed_forward_forward, feed_forward_backward),
    "gated_feed_forward": (
        GatedFeedForwardParams,
        gated_feed_forward,
        gated_feed_forward_forward,
        gated_feed_forward_backward,
    ),
}
every_op = pytest.mark.parametrize("op", OPS)


def drawn(op: str, rng: np.random.Generator, width: int, hidden: int, out_width: int, biases: tuple[bool, ...]) -> Any:
    """Parameters whose output may be of another width than the input."""
    shapes: dict[str, tuple[int, ...]] = {"w_gate": (width, hidden), "w_in": (width, hidden), "w_out": (hidden, out_width)}
    shapes |= {"b_gate": (hidden,), "b_in": (hidden,), "b_out": (out_width,)}
    fields = OPS[op][0]._fields
    wanted = dict(zip([n for n in fields if n.startswith("b")], biases, strict=False))
    return OPS[op][0](*(rng.standard_normal(shapes[n]) if wanted.get(n, True) else None for n in fields))


def plain(op: str, params: Any, x: np.ndarray, activation: str) -> np.ndarray:
    """Row by row, feature by feature."""
    curve = ACTIVATIONS[activation]
    out = np.zeros((*x.shape[:-1], params.w_out.shape[1]))
    for at in np.ndindex(*x.shape[:-1]):
        for f in range(params.w_in.shape[1]):

            def linear(w: Any, b: Any, f: int = f, row: np.ndarray = x[at]) -> np.ndarray:
                return np.asarray(sum(row[c] * w[c, f] for c in range(len(row))) + (0 if b is None else b[f]))

            hidden = linear(params.w_in, params.b_in)
            if op == "feed_forward":
                feature = curve(hidden)
            else:
                feature = curve(linear(params.w_gate, params.b_gate)) * hidden
            out[at] += feature * params.w_out[f]
        out[at] += 0 if params.b_out is None else params.b_out
    return out


sides = st.integers(1, 4)


@every_op
@given(
    st.lists(st.integers(0, 3), max_size=2),
    sides,
    sides,
    sides,
    st.tuples(*[st.booleans()] * 3),
    st.sampled_from(list(ACTIVATIONS)),
    st.integers(0, 99),
)
def test_values_and_gradients(op, lead, width, hidden, out_width, biases, activation, seed):
    rng = np.random.default_rng(seed)
    params, x = drawn(op, rng, width, hidden, out_width, biases), rng.standard_normal((*lead, width))
    _, value, forward, backward = OPS[op]
    np.testing.assert_allclose(value(params, x, activation=activation), plain(op, params, x, activation), rtol=1e-12, atol=1e-13)
    if activation == "relu":  # differences that step over its corner are no derivatives
        return
    check_backward(
        lambda params, x: forward(params, x, activation=activation), backward, {"params": params, "x": x}, directions=1
    )


@every_op
def test_relu_away_from_its_corner(op):
    rng = np.random.default_rng(0)
    params, x = drawn(op, rng, 3, 5, 2, (True,) * 3), rng.standard_normal((7, 3))
    _, _, forward, backward = OPS[op]
    check_backward(lambda params, x: forward(params, x, activation="relu"), backward, {"params": params, "x": x}, step=1e-5)


@every_op
def test_autodiff_of_our_forward(op, autodiff):
    rng = np.random.default_rng(0)
    params, x = drawn(op, rng, 3, 5, 2, (True,) * 3), rng.standard_normal((2, 7, 3))
    kind, _, forward, backward = OPS[op]
    out, saved = forward(params, x)
    dout = rng.standard_normal(out.shape)
    grads = backward(dout, saved)
    expected = autodiff(lambda x, *leaves: forward(kind(*leaves), x)[0], {"x": x, **params._asdict()}, dout)
    np.testing.assert_allclose(grads.dx, expected.pop("x"), rtol=1e-12, atol=1e-13)
    assert set(expected) == set(params._fields)
    for name, wanted in expected.items():
        np.testing.assert_allclose(getattr(grads.dparams, name), wanted, rtol=1e-12, atol=1e-13, err_msg=name)


def test_pytorch_beside():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    params, x, dout = drawn("feed_forward", rng, 5, 7, 5, (True,) * 3), rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
    one, two = torch.nn.Linear(5, 7, dtype=torch.float64), torch.nn.Linear(7, 5, dtype=torch.float64)
    with torch.no_grad():
        for layer, w, b in ((one, params.w_in, params.b_in), (two, params.w_out, params.b_out)):
            layer.weight.copy_(torch.tensor(w.T))
            layer.bias.copy_(torch.tensor(b))
    t = torch.tensor(x, requires_grad=True)
    expected = two(torch.nn.functional.gelu(one(t)))
    expected.backward(torch.tensor(dout))
    out, saved = feed_forward_forward(params, x)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-12, atol=1e-13)
    grads = feed_forward_backward(dout, saved)
    np.testing.assert_allclose(grads.dx, t.grad.numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(grads.dparams.w_in, one.weight.grad.numpy().T, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(grads.dparams.b_in, one.bias.grad.numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(grads.dparams.w_out, two.weight.grad.numpy().T, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(grads.dparams.b_out, two.bias.grad.numpy(), rtol=1e-12, atol=1e-13)


def test_defaults():
    """GELU without a gate, SwiGLU with one."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3))
    for op, activation in (("feed_forward", "gelu"), ("gated_feed_forward", "silu")):
        params = drawn(op, rng, 3, 5, 3, (False,) * 3)
        np.testing.assert_array_equal(OPS[op][1](params, x), OPS[op][1](params, x, activation=activation))


# Parameters ------------------------------------------------------------------------------------------------------------------


@every_op
def test_init_is_xavier_uniform(op):
    kind = OPS[op][0]
    params = kind.init(np.random.default_rng(0), width=40, hidden=90, bias=True)
    limit = math.sqrt(6 / 130)
    for name, x in params._asdict().items():
        if name.startswith("w"):
            assert x.shape == ((90, 40) if name == "w_out" else (40, 90))
            assert 0.99 * limit < np.abs(x).max() <= limit
            assert x.std() == pytest.approx(limit / math.sqrt(3), rel=0.05)
            assert abs(x.mean()) < 5 * limit / math.sqrt(3 * x.size)
        else:
            np.testing.assert_array_equal(x, np.zeros(40 if name == "b_out" else 90))
    assert len({x.tobytes() for x in tree_leaves(params) if x.ndim == 2}) == len([n for n in kind._fields if n[0] == "w"])
    same = [kind.init(np.random.default_rng(3), width=4, hidden=6) for _ in range(2)]
    for a, b in zip(*map(tree_leaves, same), strict=True):
        np.testing.assert_array_equal(a, b)
    assert FeedForwardParams.init(np.random.default_rng(0), width=4, hidden=6).b_in is not None
    assert GatedFeedForwardParams.init(np.random.default_rng(0), width=4, hidden=6).b_in is None
    assert all(
        b is None for n, b in kind.init(np.random.default_rng(0), width=4, hidden=6, bias=False)._asdict().items() if n[0] == "b"
    )


@every_op
def test_init_on_every_library(op, library, xp):
    device = {} if library.device is None else {"device": library.device}
    make = functools.partial(OPS[op][0].init, width=4, hidden=6, bias=True)
    plain_params = make(np.random.default_rng(0))
    for dtype in (None, "float16", "float32", "float64"):
        if dtype is not None and not library.has(dtype):
            continue
        wanted = xp.zeros(1).dtype if dtype is None else xp.zeros(1, dtype=getattr(xp, dtype)).dtype
        params = make(np.random.default_rng(0), xp=xp, dtype=None if dtype is None else getattr(xp, dtype), **device)
        for x, expected in zip(tree_leaves(params), tree_leaves(plain_params), strict=True):
            assert x.dtype == wanted
            assert library.device is None or x.device == library.device
            np.testing.assert_allclose(to_numpy(x), expected, rtol=1e-3, atol=1e-3)


@every_op
@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"width": 0, "hidden": 3}, ValueError, "width must be at least 1, got 0"),
        ({"width": 3, "hidden": -1}, ValueError, "hidden must be at least 1, got -1"),
        ({"width": 3.0, "hidden": 1}, TypeError, "width must be an integer, got float"),
    ],
)
def test_sizes_that_make_no_parameters(op, sizes, error, message):
    kind = OPS[op][0]
    with pytest.raises(error, match=f"^{kind.__name__}.init: {message}"):
        kind.init(np.random.default_rng(0), **sizes)


@every_op
def test_gradients_have_the_parameters_type(op):
    rng = np.random.default_rng(0)
    params, x = drawn(op, rng, 3, 5, 3, (True, False, False)), rng.standard_normal((2, 3))
    kind, _, forward, backward = OPS[op]
    out, saved = forward(params, x)
    grads = backward(out, saved)
    assert type(grads.dparams) is kind
    moved = tree_map(lambda p, d: p - 0.1 * d, params, grads.dparams)
    assert [None if p is None else p.shape for p in moved] == [None if p is None else p.shape for p in params]
    assert repr(grads).startswith(f"{type(grads).__name__}(dparams={kind.__name__}(w_")
    assert "array" not in repr(saved)


# Libraries, precision, memory --------------------------------------------------------------------------------------------------


def _call(op: str, convert: Any, dtype: str | None = None) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = tree_map(lambda x: convert(x, dtype), drawn(op, rng, 3, 5, 2, (True,) * 3))
    x, dout = convert(rng.standard_normal((2, 7, 3)), dtype), convert(rng.standard_normal((2, 7, 2)), dtype)
    _, _, forward, backward = OPS[op]
    out, saved = forward(params, x)
    return out, backward(dout, saved)


@every_op
def test_every_library(op, library, to_xp):
    expected = _call(op, lambda x, dtype: x)
    got = _call(op, to_xp)
    for (name, g), e in zip(tree_items(got), tree_leaves(expected), strict=True):
        assert library.device is None or g.device == library.device
        np.testing.assert_allclose(to_numpy(g), e, rtol=1e-12, atol=1e-13, err_msg=name)


@every_op
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-6), ("float16", 2e-3)])
def test_dtype(op, dtype, rtol):
    library = open_library("numpy")
    expected = _call(op, lambda x, dtype: x)
    got = _call(op, lambda x, dtype: asarray(x, library, dtype=dtype), dtype)
    for (name, g), e in zip(tree_items(got), tree_leaves(expected), strict=True):
        assert g.dtype == np.dtype(dtype)
        np.testing.assert_allclose(to_numpy(g), e, rtol=rtol, atol=rtol * np.abs(e).max(), err_msg=name)


@every_op
def test_inside_jit(op):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    library = open_library("jax")
    expected = _call(op, lambda x, dtype: x)
    got = jax.jit(lambda: _call(op, lambda x, dtype: asarray(x, library)))()
    for g, e in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(g), e, rtol=1e-12, atol=1e-13)


@every_op
def test_nothing_is_written_or_shared(op):
    rng = np.random.default_rng(0)
    params, x, dout = drawn(op, rng, 3, 5, 3, (True,) * 3), rng.standard_normal((2, 3)), rng.standard_normal((2, 3))
    inputs = [*tree_leaves(params), x, dout]
    for array in inputs:
        array.flags.writeable = False
    _, _, forward, backward = OPS[op]
    out, saved = forward(params, x)
    grads = backward(dout, saved)
    results = [out, *tree_leaves(grads)]
    kept = [a for a in tree_leaves(saved) if isinstance(a, np.ndarray)]
    for n, result in enumerate(results):
        assert not any(np.shares_memory(result, other) for other in [*inputs, *kept, *results[n + 1 :]])
    out += x
    for got, expected in zip(tree_leaves(backward(dout, saved)), tree_leaves(grads), strict=True):
        np.testing.assert_array_equal(got, expected)


@every_op
@pytest.mark.parametrize("lead", [(0,), (2, 0), ()])
def test_no_rows(op, lead):
    params = drawn(op, np.random.default_rng(0), 3, 5, 2, (True,) * 3)
    _, _, forward, backward = OPS[op]
    out, saved = forward(params, np.ones((*lead, 3)))
    grads = backward(out, saved)
    assert out.shape == (*lead, 2)
    assert grads.dx.shape == (*lead, 3)
    assert all(d.shape == p.shape for d, p in zip(tree_leaves(grads.dparams), tree_leaves(params), strict=True))
    assert lead == () or not any(d.any() for d in tree_leaves(grads.dparams))


# Errors ----------------------------------------------------------------------------------------------------------------------

X = np.ones((2, 3))


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"),
    [
        ("feed_forward", {"x": np.ones((2, 4))}, ValueError, r"w_in must have shape \(C, F\) with C = 4 as x has, got \(3, 5\)"),
        ("feed_forward", {"x": np.asarray(1.0)}, ValueError, r"x must have shape \(..., C\), got \(\)"),
        ("feed_forward", {"w_in": np.ones(5)}, ValueError, r"w_in must have shape \(C, F\), got \(5,\)"),
        ("feed_forward", {"w_out": np.ones((4, 2))}, ValueError, r"w_out must have shape \(F, C\) with F = 5 as w_in has, got"),
        ("feed_forward", {"b_in": np.ones(4)}, ValueError, r"b_in must have shape \(F,\) with F = 5 as w_in has, got \(4,\)"),
        ("feed_forward", {"b_out": np.ones(3)}, ValueError, r"b_out must have shape \(C,\) with C = 2 as w_out has, got \(3,\)"),
        ("feed_forward", {"x": X.astype(np.float32)}, TypeError, "x is float32 but w_in is float64"),
        ("feed_forward", {"w_in": np.ones((3, 5), int)}, TypeError, "w_in must have a floating dtype"),
        ("feed_forward", {"x": X.tolist()}, TypeError, "x must be an array"),
        ("gated_feed_forward", {"w_in": np.ones((3, 4))}, ValueError, r"w_in must have shape \(C, F\) with F = 5 as w_gate has"),
        ("gated_feed_forward", {"b_gate": np.ones(2)}, ValueError, r"b_gate must have shape \(F,\) with F = 5 as w_gate has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit(op, changes, error, message):
    x = changes.get("x", X)
    params = drawn(op, np.random.default_rng(0), 3, 5, 2, (True,) * 3)
    params = params._replace(**{n: a for n, a in changes.items() if n != "x"})
    for call in OPS[op][1:3]:
        with pytest.raises(error, match=f"^{op}: {message}"):
            call(params, x)


@every_op
def test_no_such_activation(op):
    params = drawn(op, np.random.default_rng(0), 3, 5, 2, (True,) * 3)
    with pytest.raises(ValueError, match=f"^{op}: activation must be one of relu, silu, gelu, gelu_tanh, got 'swish'"):
        OPS[op][1](params, X, activation="swish")


@every_op
def test_cotangents_that_do_not_fit(op):
    params = drawn(op, np.random.default_rng(0), 3, 5, 2, (True,) * 3)
    _, _, forward, backward = OPS[op]
    saved = forward(params, X)[1]
    with pytest.raises(ValueError, match=r"^linear_backward: dout must have shape \(..., C_out\) = \(2, 2\) as the result"):
        backward(X, saved)
    with pytest.raises(TypeError, match="^linear_backward: dout must be float64 as the result, got float32"):
        backward(np.ones((2, 2), np.float32), saved)
