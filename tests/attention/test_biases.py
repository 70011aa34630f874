"""Biases: written out in every shape that broadcasts, or made tile by tile from the distance of key and query."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import (
    alibi_bias,
    attention,
    attention_backward,
    attention_forward,
    attention_weights,
    causal_mask,
    length_mask,
    relative_bias,
)
from npattn._attention.biases import relative_buckets
from npattn._attention.place import Place
from npattn._attention.tiling import forced
from npattn.testing.dense import dense_bias, t5_bucket
from npattn.testing.gradients import check_backward
from npattn.testing.inputs import bias_with
from npattn.testing.laws import is_what_the_loops_say
from npattn.testing.libraries import asarray, open_library, to_numpy
from npattn.testing.problems import Alibi, Relative, attention_problem
from npattn.testing.strategies import attention_problems, broadcastable_shapes
from tests.attention.peaks import peak

from .paths import CANDIDATES, PATHS

# Against the loops -------------------------------------------------------------------------------------------------------------


@given(attention_problems(bias=["dense"]), st.sampled_from(list(PATHS)))
def test_dense(problem, path):
    is_what_the_loops_say(CANDIDATES[path], problem)


@given(attention_problems(bias=["alibi", "relative"]), st.sampled_from(list(PATHS)))
def test_lazy(problem, path):
    is_what_the_loops_say(CANDIDATES[path], problem)


@given(st.data(), st.sampled_from(list(PATHS)))
def test_a_dense_bias_of_every_shape(data, path):
    lead = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    H = data.draw(st.sampled_from([1, 2, 4]))
    K = data.draw(st.sampled_from([n for n in (1, 2, 4) if H % n == 0]))
    T, S = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    shape = data.draw(broadcastable_shapes((*lead, H, T, S)))
    problem = attention_problem(
        (*lead, H, T, 3),
        (*lead, K, S, 3),
        (*lead, K, S, 2),
        bias=shape,
        hidden=data.draw(st.sampled_from([0, 0.3])),
        seed=data.draw(st.integers(0, 999)),
        dlse=True,
    )
    assert problem.bias.shape == shape
    is_what_the_loops_say(CANDIDATES[path], problem)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (2, 1, 3, 5), (1, 4, 3, 5), (3, 1), (4, 1, 1), (5,), (), (1,)], ids=str)
def test_gradients_have_the_shape_of_the_bias(shape, path):
    problem = attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), bias=shape)
    with forced(PATHS[path]):
        _, saved = attention_forward(problem.q, problem.k, problem.v, bias=problem.bias)
        dbias = attention_backward(problem.dout, saved).dbias
    assert dbias.shape == shape
    is_what_the_loops_say(CANDIDATES[path], problem)


@given(attention_problems(sinks=False, dlse=False, hidden=False, broadcast=False, max_side=4, ranks=(2, 3, 4)))
def test_finite_differences(problem):
    """Also of the slopes and the table."""
    options = problem.options()
    parameters = None if problem.bias is None else getattr(problem.bias, "parameters", problem.bias)

    def forward(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        given = options | ({} if bias is None else {"bias": bias_with(problem.bias, bias)})
        return attention_forward(q, k, v, **given)

    args = {"q": problem.q, "k": problem.k, "v": problem.v} | ({} if parameters is None else {"bias": parameters})
    check_backward(forward, attention_backward, args, directions=1, rtol=1e-7)


# The tiles of a lazy bias ------------------------------------------------------------------------------------------------------


@st.composite
def lazy_biases(draw: st.DrawFn, heads: int) -> Any:
    columns, offset = draw(st.sampled_from([1, heads])), draw(st.integers(-30, 30))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    if draw(st.booleans()):
        return alibi_bias(rng.standard_normal(columns), offset=offset)
    bidirectional = draw(st.booleans())
    buckets = draw(st.sampled_from([4, 6, 8, 32] if bidirectional else [2, 3, 5, 8, 32]))
    far = draw(st.integers(max(buckets // (4 if bidirectional else 2) + 1, 2), 200))
    return relative_bias(rng.standard_normal((buckets, columns)), offset=offset, bidirectional=bidirectional, max_distance=far)


@given(st.data())
def test_a_tile_is_a_part_of_the_whole(data):
    K, G = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    T, S = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    bias = data.draw(lazy_biases(K * G))
    whole = dense_bias(bias, K * G, T, S).reshape(K, G, T, S)
    parts = []
    for n in (K, G, T, S):
        start = data.draw(st.integers(0, n - 1))
        parts.append(slice(start, data.draw(st.integers(start + 1, n))))
    tile = bias.tile(Place((), *parts, whole=whole.shape), np, np.float64)
    np.testing.assert_allclose(np.broadcast_to(tile, whole[tuple(parts)].shape), whole[tuple(parts)], rtol=1e-15)


@given(st.data())
def test_the_gradient_of_a_tile_is_its_transpose(data):
    """<tile(p), x> = <p, tile_gradient(x)>."""
    K, G = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    bias = data.draw(lazy_biases(K * G))
    T, S = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    place = Place((slice(0, 2),), slice(0, K), slice(0, G), slice(3, 3 + T), slice(5, 5 + S), (2, K, G, 40, 40))
    x = np.random.default_rng(0).standard_normal((2, K, G, T, S))
    gradient = bias.gradient(bias.tile_gradient(x, place, np).reshape(K * G, -1), np)
    assert gradient.shape == bias.parameters.shape
    left, right = (bias.tile(place, np, np.float64) * x).sum(), (bias.parameters * gradient).sum()
    assert left == pytest.approx(right, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("bias", [alibi_bias(np.ones(1)), relative_bias(np.ones((32, 1)))], ids=repr)
def test_memory_grows_with_the_tile(bias, monkeypatch):
    monkeypatch.setenv("NPATTN_KEEP_MIB", "0")  # else forward keeps what backward would compute again
    small, large = (_peak(n, bias) for n in (2048, 4096))
    assert large < 1.25 * small  # four times the pairs


def _peak(n, bias):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, n, 2))
    return peak(lambda: attention_backward(dout, attention_forward(q, k, v, bias=bias)[1]))[0]


# What they are -----------------------------------------------------------------------------------------------------------------


def test_alibi_as_in_the_paper():
    bias = alibi_bias(np.asarray([0.5, 0.25]))
    zeros = np.zeros((2, 3, 1))
    weights = attention_weights(attention_forward(zeros, zeros, zeros, bias=bias, mask=causal_mask())[1])
    expected = np.exp(np.asarray([[0, -np.inf, -np.inf], [-1, 0, -np.inf], [-2, -1, 0]]) * np.asarray([0.5, 0.25])[:, None, None])
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True), rtol=1e-14)


def _t5_bucket(distance: int, count: int, bidirectional: bool, max_distance: int) -> int:
    """As T5's code has it, with its float32 logarithm."""
    first = 0
    if bidirectional:
        count //= 2
        first = count if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = count // 2
    if far < exact:
        return first + far
    step = np.log(np.float32(far) / np.float32(exact)) / np.float32(math.log(max_distance / exact)) * np.float32(count - exact)
    return first + min(exact + int(step), count - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "far"), [(32, 128), (32, 20), (8, 5), (4, 2000), (64, 1000), (6, 16), (128, 512)])
def test_buckets(count, far, bidirectional):
    distances = np.arange(-2500, 2501)
    if far <= count // (4 if bidirectional else 2):
        pytest.skip("the far distance lies among the near ones")
    got = relative_buckets(distances, count, bidirectional=bidirectional, max_distance=far)
    np.testing.assert_array_equal(got, [t5_bucket(int(d), count, bidirectional, far) for d in distances])
    np.testing.assert_array_equal(got, [_t5_bucket(int(d), count, bidirectional, far) for d in distances])


def test_buckets_one_by_one():
    """T5's own: 32 for encoders, up to distance 128."""
    got = relative_buckets(
        np.asarray([0, -1, -7, -8, -11, -12, -15, -16, -23, -127, -128, -9999, 1, 7, 8, 128]),
        32,
        bidirectional=True,
        max_distance=128,
    )
    np.testing.assert_array_equal(got, [0, 1, 7, 8, 8, 9, 9, 10, 11, 15, 15, 15, 17, 23, 24, 31])
    got = relative_buckets(np.asarray([5, 1, 0, -1, -15, -16, -127, -128]), 32, bidirectional=False, max_distance=128)
    np.testing.assert_array_equal(got, [0, 0, 0, 1, 15, 16, 31, 31])


@pytest.mark.parametrize(
    "make", [lambda **o: alibi_bias(np.asarray([0.3]), **o), lambda **o: relative_bias(np.arange(8.0)[:, None], **o)]
)
def test_an_offset_continues_after_cached_keys(make):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 6, 2))
    whole = attention(q, k, v, bias=make(), mask=causal_mask())
    for past in range(6):
        step = attention(q[past:], k, v, bias=make(offset=past), mask=causal_mask(past))
        np.testing.assert_allclose(step, whole[past:], rtol=1e-13)


# Infinities --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_an_entry_of_minus_infinity_hides(path):
    """A distance, or all of them; what no query sees may be NaN."""
    table = np.asarray(
        [[0.3, -np.inf], [-np.inf, -np.inf], [0.1, -np.inf], [0.7, -np.inf]]
    )  # hides distance -1 from head 0, all from head 1
    problem = attention_problem((2, 5, 3), (2, 5, 3), (2, 5, 2), dlse=True).replace(bias=relative_bias(table, max_distance=3))
    assert not problem.visible()[1].any()
    assert problem.visible()[0].any()
    k, v = np.array(problem.k), np.array(problem.v)
    k[1], v[1] = np.nan, np.inf
    poisoned = problem.replace(k=k, v=v)
    is_what_the_loops_say(CANDIDATES[path], poisoned)
    with forced(PATHS[path]):
        out, saved = attention_forward(poisoned.q, k, v, bias=poisoned.bias)
        dbias = attention_backward(poisoned.dout, saved).dbias
    assert (out[1] == 0).all()
    assert (dbias[:, 1] == 0).all()
    assert (dbias[1] == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_bias_that_is_no_number_spoils_its_row_alone(path, value):
    problem = attention_problem((2, 4, 3), (2, 5, 3), (2, 5, 2), bias=(2, 4, 5), mask=causal_mask(1))
    bias = np.array(problem.bias)
    bias[0, 1, 2] = value  # visible
    bias[1, 1, 4] = value  # hidden by the mask
    with forced(PATHS[path]):
        out, expected = (attention(problem.q, problem.k, problem.v, bias=b, mask=problem.mask) for b in (bias, problem.bias))
    spoilt = np.zeros((2, 4), bool)
    spoilt[0, 1] = True
    assert np.isnan(out[spoilt]).all()
    np.testing.assert_allclose(out[~spoilt], expected[~spoilt], rtol=1e-14)


# Other judges ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("columns", [1, 4])
def test_torch_differentiates_the_table_and_the_slopes(columns, bidirectional):
    torch = pytest.importorskip("torch")
    T, S = 7, 9
    made = relative_bias(
        np.random.default_rng(1).standard_normal((8, columns)), offset=2, bidirectional=bidirectional, max_distance=6
    )
    slopes = alibi_bias(np.random.default_rng(2).random(columns), offset=-1)
    for bias in (made, slopes):
        problem = attention_problem((2, 4, T, 3), (2, 2, S, 3), (2, 2, S, 2), mask=causal_mask(2)).replace(bias=bias)
        parameters = torch.tensor(bias.parameters, requires_grad=True)
        distances = np.arange(S)[None, :] - np.arange(T)[:, None] - bias.offset
        if bias is made:
            buckets = torch.tensor([[t5_bucket(int(d), 8, bidirectional, 6) for d in row] for row in distances])
            pairs = parameters[buckets].permute(2, 0, 1)
        else:
            pairs = -parameters[:, None, None] * torch.tensor(np.abs(distances))
        k, v = (torch.tensor(np.repeat(x, 2, axis=1)) for x in (problem.k, problem.v))
        scores = torch.tensor(np.array(problem.q)) @ k.mT / math.sqrt(3) + pairs
        seen = torch.tensor(causal_mask(2).to_array(T, S))
        out = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        (expected,) = torch.autograd.grad((out * torch.tensor(np.array(problem.dout))).sum(), parameters)
        _, saved = attention_forward(problem.q, problem.k, problem.v, bias=bias, mask=problem.mask)
        got = attention_backward(problem.dout, saved).dbias
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-11, atol=1e-12)


BIASES = {
    "alibi": Alibi(4, 1),
    "relative": Relative(8, 4, -1, True, 6),
    "one column": Relative(8, 1, 0, False, 7),
    "dense": (4, 1, 5),
}


@pytest.mark.parametrize("kind", BIASES)
def test_every_library(library, kind):
    problem = attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), bias=BIASES[kind], mask=length_mask([3, 5]))
    for dtype, rtol in (("float64", 1e-12), ("float16", 1e-2), ("bfloat16", 8e-2)):
        if not library.has(dtype) or (library.name == "jax" and dtype != "float64"):  # JAX compiles everything anew
            continue
        given = problem.inputs(library, dtype)
        out, saved = attention_forward(given.q, given.k, given.v, **given.options)
        dbias = attention_backward(given.dout, saved).dbias
        parameters = given.arrays()["bias"]
        assert dbias.dtype == parameters.dtype
        assert dbias.shape == parameters.shape
        expected_out, expected = attention_forward(problem.q, problem.k, problem.v, **problem.options())
        np.testing.assert_allclose(to_numpy(out), expected_out, rtol=rtol, atol=rtol)
        wanted = attention_backward(problem.dout, expected).dbias
        np.testing.assert_allclose(to_numpy(dbias), wanted, rtol=rtol, atol=rtol * np.abs(wanted).max())


def test_inside_jit():
    jax = pytest.importorskip("jax")
    library = open_library("jax")
    problem = attention_problem((4, 3, 2), (2, 5, 2), (2, 5, 3))
    table, slopes = np.random.default_rng(0).standard_normal((8, 4)), np.random.default_rng(0).random(4)

    def run(q, k, v, dout, parameters):
        bias = relative_bias(parameters) if parameters.ndim == 2 else alibi_bias(parameters)
        out, saved = attention_forward(q, k, v, bias=bias)
        return out, attention_backward(dout, saved)

    for parameters in (table, slopes):
        args = (problem.q, problem.k, problem.v, problem.dout, parameters)
        got = jax.jit(run)(*(asarray(x, library) for x in args))
        for g, e in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(run(*args)), strict=True):
            np.testing.assert_allclose(np.asarray(g), e, rtol=1e-12, atol=1e-13)


# Errors and words --------------------------------------------------------------------------------------------------------------


HALF: Any = 0.5
MANY: Any = [0, 1]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: alibi_bias(np.ones((2, 2))), ValueError, r"alibi_bias: slopes must have shape \(H,\), got \(2, 2\)"),
        (lambda: alibi_bias(np.ones(2, int)), TypeError, "alibi_bias: slopes must have a floating dtype"),
        (lambda: alibi_bias([1.0, 2.0]), TypeError, "alibi_bias: slopes must be an array"),
        (lambda: alibi_bias(np.ones(2), offset=HALF), TypeError, "alibi_bias: offset must be an integer, got float"),
        (lambda: alibi_bias(np.ones(2), offset=MANY), TypeError, "alibi_bias: offset must be an integer, got list"),
        (
            lambda: relative_bias(np.ones(8)),
            ValueError,
            r"relative_bias: table must have shape \(N, H\) with an even N >= 4, got \(8,\)",
        ),
        (
            lambda: relative_bias(np.ones((7, 2))),
            ValueError,
            r"relative_bias: table must have shape \(N, H\) with an even N >= 4",
        ),
        (
            lambda: relative_bias(np.ones((2, 2))),
            ValueError,
            r"relative_bias: table must have shape \(N, H\) with an even N >= 4",
        ),
        (
            lambda: relative_bias(np.ones((1, 2)), bidirectional=False),
            ValueError,
            r"relative_bias: table .* with N >= 2, got \(1, 2\)",
        ),
        (lambda: relative_bias(np.ones((8, 2), int)), TypeError, "relative_bias: table must have a floating dtype"),
        (
            lambda: relative_bias(np.ones((32, 2)), max_distance=8),
            ValueError,
            "relative_bias: max_distance must be at least 9, got 8",
        ),
        (lambda: relative_bias(np.ones((32, 2)), max_distance=HALF), TypeError, "relative_bias: max_distance must be an integer"),
    ],
)
def test_what_makes_no_bias(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()


X = np.zeros((2, 4, 3, 5))


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (alibi_bias(np.ones(3)), ValueError, r"the parameter of alibi_bias must have shape \(..., H\) with H = 4, got \(3,\)"),
        (relative_bias(np.ones((8, 2))), ValueError, r"the parameter of relative_bias must have shape \(..., H\) with H = 4"),
        (alibi_bias(np.ones(4, np.float32)), TypeError, "q is float64 but bias is float32; all float arrays of a call"),
        (np.ones((3, 3), np.float32), TypeError, "q is float64 but bias is float32; all float arrays of a call"),
        (np.ones((3, 3), bool), TypeError, "bias must have a floating dtype"),
        (np.ones((3, 3), int), TypeError, "bias must have a floating dtype"),
        (np.ones((3, 4)), ValueError, r"bias must broadcast to \(..., H, T, S\) = \(2, 4, 3, 3\), got shape \(3, 4\)"),
        (np.ones((1, 2, 4, 3, 3)), ValueError, r"bias must broadcast to \(..., H, T, S\)"),
        (1.0, TypeError, "bias must be an array"),
        (causal_mask(), TypeError, "bias must be an array"),
    ],
    ids=str,
)
def test_what_does_not_fit(bias, error, message):
    with pytest.raises(error, match=f"^attention: {message}"):
        attention(X, X, X, bias=bias)


def test_repr():
    assert repr(alibi_bias(np.ones(4))) == "alibi_bias((4,))"
    assert repr(relative_bias(np.ones((8, 4)), offset=3)) == "relative_bias((8, 4), offset=3)"
