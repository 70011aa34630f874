"""Inputs that broke other implementations, as their public bug reports have them, and what npattn gives; numbered by kind."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from npattn import (
    Dropout,
    attention,
    attention_backward,
    attention_forward,
    attention_weights,
    causal_mask,
    causal_mask_end,
    window_mask,
)
from npattn.layers.softmax import softmax_backward, softmax_forward
from npattn.testing.libraries import asarray, to_numpy
from npattn.testing.problems import attention_problem
from npattn.testing.state_laws import shares_memory

EYE = np.eye(2)
HALF = np.array([[True, False], [False, False]])
ROWS = np.array([[1.0, 2.0], [3.0, 4.0]])


def forward_backward(q, k, v, dout=None, **options):
    out, saved = attention_forward(q, k, v, **options)
    return out, saved, attention_backward(np.ones_like(out) if dout is None else dout, saved)


def column(*numbers):
    """Values with E = 1."""
    return np.array(numbers, dtype=np.float64)[:, None]


def zeros(*shape):
    return np.zeros(shape)


def finite(*arrays):
    return all(np.isfinite(x).all() for x in arrays)


# Nothing to attend to -----------------------------------------------------------------------------------------------------------


def test_a_query_that_sees_nothing(library, to_xp):
    out, saved = attention_forward(to_xp(EYE), to_xp(EYE), to_xp(ROWS), mask=to_xp(HALF))
    np.testing.assert_array_equal(to_numpy(out), [[1, 2], [0, 0]])
    assert np.isfinite(to_numpy(saved.lse)[0])
    assert to_numpy(saved.lse)[1] == -np.inf
    np.testing.assert_array_equal(to_numpy(attention_weights(saved)), [[1, 0], [0, 0]])


def test_its_gradients_are_zero(library, to_xp):
    _, saved = attention_forward(to_xp(EYE), to_xp(EYE), to_xp(ROWS), mask=to_xp(HALF))
    grads = attention_backward(to_xp(np.ones((2, 2))), saved)
    np.testing.assert_array_equal(to_numpy(grads.dq), zeros(2, 2))
    np.testing.assert_array_equal(to_numpy(grads.dk), zeros(2, 2))
    np.testing.assert_array_equal(to_numpy(grads.dv), [[1, 1], [0, 0]])


def test_causal_to_the_end_with_more_queries_than_keys():
    dout = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    out, _, grads = forward_backward(ROWS[[0, 1, 0]], EYE[:1], ROWS[:1], dout, mask=causal_mask_end())
    np.testing.assert_array_equal(out[:2], zeros(2, 2))
    np.testing.assert_array_equal(grads.dq[:2], zeros(2, 2))
    np.testing.assert_array_equal(grads.dv, dout[2:])


def test_a_mask_without_axes():
    whole = attention(EYE, EYE, ROWS)
    np.testing.assert_array_equal(attention(EYE, EYE, ROWS, mask=np.array(False)), zeros(2, 2))
    np.testing.assert_allclose(attention(EYE, EYE, ROWS, mask=np.array(True)), whole, rtol=1e-15)


# Masked things that leak --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e10])
@pytest.mark.parametrize("where", ["k", "v", "both"])
def test_what_stands_at_a_masked_key(library, to_xp, where, poison):
    q = np.arange(8.0).reshape(1, 2, 4)
    k, v = q.copy(), q.copy()
    if where != "v":
        k[0, 1, 0] = poison
    if where != "k":
        v[0, 1, 0] = poison
    out, saved = attention_forward(to_xp(q), to_xp(k), to_xp(v), mask=to_xp(np.array([[True, False], [True, False]])))
    np.testing.assert_array_equal(to_numpy(out), [[[0, 1, 2, 3], [0, 1, 2, 3]]])
    grads = attention_backward(to_xp(np.ones((1, 2, 4))), saved)
    assert finite(*map(to_numpy, (grads.dq, grads.dk, grads.dv)))


def test_softmax_of_a_large_masked_score_has_no_gradient_and_no_warning():
    x, mask = np.array([36.0, 1e4]), np.array([True, False])
    with np.errstate(all="raise"):
        out, saved = softmax_forward(x, mask=mask)
        dx = softmax_backward(np.array([1.0, 0.0]), saved).dx
        # the same through attention: q k = x
        attended, _, grads = forward_backward(np.ones((1, 1)), x[:, None], column(1, 0), mask=mask, scale=1.0)
    np.testing.assert_array_equal(out, [1, 0])
    np.testing.assert_array_equal(dx, [0, 0])
    np.testing.assert_array_equal(attended, [[1]])
    np.testing.assert_array_equal(grads.dk, [[0], [0]])


# Causal, caches, windows --------------------------------------------------------------------------------------------------------


def test_where_the_diagonal_is():
    q, k, v = zeros(2, 1), zeros(4, 1), column(0, 1, 2, 3)
    np.testing.assert_array_equal(attention(q, k, v, mask=causal_mask()), column(0, 0.5))
    np.testing.assert_array_equal(attention(q, k, v, mask=causal_mask_end()), column(1, 1.5))
    q, k, v = zeros(4, 1), zeros(2, 1), column(10, 20)
    np.testing.assert_array_equal(attention(q, k, v, mask=causal_mask()), column(10, 15, 15, 15))
    np.testing.assert_array_equal(attention(q, k, v, mask=causal_mask_end()), column(0, 0, 10, 15))


@pytest.mark.parametrize("steps", [(6,), (4, 2), (0, 6), (1,) * 6, (3, 1, 2), (5, 1)])
def test_any_split_into_cached_and_new_tokens(steps):
    problem = attention_problem((2, 6, 3), (2, 6, 3), (2, 6, 5))
    together = attention(problem.q, problem.k, problem.v, mask=causal_mask())
    past, rows = 0, []
    for new in steps:
        seen = slice(0, past + new)
        own = problem.q[:, past : past + new]
        rows.append(attention(own, problem.k[:, seen], problem.v[:, seen], mask=causal_mask(offset=past)))
        past += new
    np.testing.assert_allclose(np.concatenate(rows, axis=1), together, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lead", [(), (2,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("dropout", [None, Dropout(0.3, 5)])
def test_nothing_above_the_diagonal(lead, dropout):
    problem = attention_problem((*lead, 5, 3), (*lead, 5, 3), (*lead, 5, 2), mask=causal_mask(), dropout=dropout)
    out, saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
    weights = attention_weights(saved)
    assert weights.shape == (*lead, 5, 5)
    np.testing.assert_array_equal(weights, np.tril(weights))
    np.testing.assert_array_equal(out, attention(problem.q, problem.k, problem.v, **problem.options()))


def test_a_window():
    out = attention(zeros(5, 1), zeros(5, 1), column(0, 1, 2, 3, 4), mask=window_mask(1, 2))
    np.testing.assert_allclose(out, column(1, 1.5, 2.5, 3, 3.5), rtol=1e-15)


def test_causal_and_an_explicit_mask_both_hold():
    allowed = np.ones((4, 4), dtype=bool)
    allowed[2, 3] = allowed[3, 1] = False
    saved = attention_forward(zeros(4, 1), zeros(4, 1), column(0, 1, 2, 3), mask=causal_mask() & allowed)[1]
    np.testing.assert_array_equal(attention_weights(saved) > 0, np.tril(np.ones((4, 4), dtype=bool)) & allowed)


# Sign, dtype, shape, order ------------------------------------------------------------------------------------------------------


def test_true_means_may_attend():
    q, k, v = zeros(1, 1), zeros(2, 1), column(1, 2)
    np.testing.assert_array_equal(attention(q, k, v, mask=np.array([[True, False]])), [[1]])
    np.testing.assert_array_equal(attention(q, k, v, bias=np.array([[0, -np.inf]])), [[1]])


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint8", "float32"])
def test_a_mask_of_numbers(dtype):
    with pytest.raises(TypeError, match="bias="):
        attention(zeros(1, 1), zeros(2, 1), column(1, 2), mask=np.array([[1, 0]], dtype=dtype))


def test_a_mask_of_three_axes_is_by_head():
    q, k = zeros(2, 2, 1, 1), zeros(2, 2, 2, 1)
    v = np.broadcast_to(column(1, 2), (2, 2, 2, 1))
    out = attention(q, k, v, mask=np.array([[[True, False]], [[False, True]]]))
    np.testing.assert_array_equal(out, [[[[1]], [[2]]], [[[1]], [[2]]]])


def test_a_mask_of_the_targets_for_cross_attention():
    q, k = zeros(3, 2), zeros(5, 2)
    with pytest.raises(ValueError, match=r"mask must broadcast to \(\.\.\., H, T, S\) = \(1, 3, 5\), got shape \(3, 3\)"):
        attention(q, k, k, mask=np.ones((3, 3), dtype=bool))


def test_the_cap_comes_before_the_bias():
    out = attention(zeros(1, 1), zeros(2, 1), column(0, 1), softcap=0.5, bias=np.array([[0, -np.inf]]))
    np.testing.assert_array_equal(out, [[0]])
    out = attention(zeros(1, 1), zeros(2, 1), column(0, 1), softcap=0.5, mask=np.array([[True, False]]))
    np.testing.assert_array_equal(out, [[0]])


def test_a_bias_of_another_dtype():
    q = zeros(2, 2).astype(np.float32)
    with pytest.raises(TypeError, match="bias is float64"):
        attention(q, q, q, bias=zeros(2, 2))


# Precision ----------------------------------------------------------------------------------------------------------------------


def test_scores_beyond_float16(library, to_xp):
    if not library.has("float16"):
        pytest.skip(f"{library.name} has no float16")
    x = to_xp(np.full((1, 1, 2, 64), 40.0), "float16")
    out, saved = attention_forward(x, x, x)
    grads = attention_backward(out, saved)
    np.testing.assert_array_equal(to_numpy(out), np.full((1, 1, 2, 64), 40))
    assert finite(*map(to_numpy, (grads.dq, grads.dk, grads.dv)))


@pytest.mark.parametrize("scale", [0.5, 1 / np.sqrt(4), np.float64(0.5), np.float32(0.5), np.array(0.5), np.float16(0.5)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_scale_changes_no_dtype(scale, dtype):
    x = np.ones((2, 4), dtype=dtype)
    bias, sinks = np.zeros((2, 2), dtype=dtype), np.zeros(1, dtype=dtype)
    out, _, grads = forward_backward(x, x, x, scale=scale, softcap=np.float64(2), bias=bias, sinks=sinks)
    assert {out.dtype, *(dx.dtype for dx in grads)} == {np.dtype(dtype)}


# Grouped heads ------------------------------------------------------------------------------------------------------------------


def test_query_heads_read_key_heads_in_turn():
    v = np.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    out, _, grads = forward_backward(zeros(1, 4, 1, 1), zeros(1, 2, 1, 1), v)
    np.testing.assert_array_equal(out.ravel(), [10, 10, 20, 20])
    np.testing.assert_array_equal(grads.dv, np.full((1, 2, 1, 1), 2.0))


# Empty --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k", "v", "out"),
    [
        ((3, 2), (0, 2), (0, 4), (3, 4)),
        ((2, 3, 2), (2, 0, 2), (2, 0, 4), (2, 3, 4)),
        ((2, 0, 2), (2, 3, 2), (2, 3, 4), (2, 0, 4)),
        ((0, 2, 3, 2), (0, 2, 5, 2), (0, 2, 5, 4), (0, 2, 3, 4)),
        ((2, 0, 3, 2), (2, 0, 5, 2), (2, 0, 5, 4), (2, 0, 3, 4)),
        ((2, 3, 2), (2, 5, 2), (2, 5, 0), (2, 3, 0)),
        ((0, 4, 3, 2), (1, 2, 5, 2), (1, 2, 5, 4), (0, 4, 3, 4)),
    ],
    ids=["S = 0", "S = 0 by head", "T = 0", "B = 0", "H = K = 0", "E = 0", "B = 0, broadcast"],
)
@pytest.mark.parametrize(
    "options", [{}, {"mask": causal_mask()}, {"dropout": Dropout(0.5, 1)}], ids=["bare", "causal", "dropout"]
)
def test_empty(library, to_xp, q, k, v, out, options):
    result, saved = attention_forward(to_xp(np.ones(q)), to_xp(np.ones(k)), to_xp(np.ones(v)), **options)
    grads = attention_backward(to_xp(np.ones(out)), saved)
    np.testing.assert_array_equal(to_numpy(result), np.zeros(out) if 0 in out or 0 in k else np.ones(out))
    assert [tuple(dx.shape) for dx in grads[:3]] == [q, k, v]
    assert tuple(saved.lse.shape) == out[:-1]
    assert finite(*(to_numpy(dx) for dx in grads[:3]))


def test_no_features_give_the_mean():
    out, _, grads = forward_backward(zeros(1, 0), zeros(3, 0), column(0, 1, 2))
    np.testing.assert_allclose(out, [[1]], rtol=1e-15)
    assert grads.dq.shape == (1, 0)
    assert grads.dk.shape == (3, 0)
    np.testing.assert_allclose(grads.dv, np.full((3, 1), 1 / 3), rtol=1e-15)


# Array libraries ----------------------------------------------------------------------------------------------------------------


def test_scores_far_below_zero(library, to_xp):
    out = attention(to_xp([[1.0]]), to_xp([[-1000.0], [-1001.0]]), to_xp(np.eye(2)), scale=1.0)
    np.testing.assert_allclose(to_numpy(out), [[0.7311, 0.2689]], atol=1e-4)


def test_arrays_on_another_device_stay_there():
    strict = pytest.importorskip("array_api_strict")
    device = strict.Device("device1")
    x = strict.asarray(ROWS, device=device)
    out, saved = attention_forward(
        x, x, x, mask=causal_mask(), dropout=Dropout(0.5, 1), sinks=strict.zeros(1, dtype=x.dtype, device=device)
    )
    grads = attention_backward(strict.ones_like(x), saved)
    assert {y.device for y in (out, saved.lse, grads.dq, grads.dk, grads.dv, grads.dsinks)} == {device}


def test_arrays_on_two_devices():
    strict = pytest.importorskip("array_api_strict")
    here, there = strict.asarray(ROWS), strict.asarray(ROWS, device=strict.Device("device1"))
    for arrays in ((here, there, there), (here, here, there)):
        with pytest.raises(
            TypeError, match="attention: q is on device .* but . is on device .*; move all arrays of a call to one device"
        ):
            attention(*arrays)
    mask = strict.asarray(HALF, device=strict.Device("device1"))
    with pytest.raises(TypeError, match="mask"):
        attention(here, here, here, mask=mask)
    with pytest.raises(TypeError, match="dout"):
        attention_backward(there, attention_forward(here, here, here)[1])


def test_integers(library, to_xp):
    x, whole = to_xp(ROWS), to_xp(np.ones((2, 2), dtype=np.int32))
    for arrays in ((whole, x, x), (x, whole, x), (x, x, whole), (whole, whole, whole)):
        with pytest.raises(TypeError, match="floating"):
            attention(*arrays)


# State, aliasing, memory layout -------------------------------------------------------------------------------------------------


def test_threads_that_call_at_the_same_time():
    problems = [
        attention_problem((2, 2, 40, 8), (2, 1, 50, 8), (2, 1, 50, 8), mask=causal_mask(), sinks=True, seed=n) for n in range(8)
    ]

    def answer(problem):
        out, saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
        return [out, *attention_backward(problem.dout, saved)]

    serial = [answer(p) for p in problems]
    wrong, start = [], threading.Barrier(8)

    def work(n):
        start.wait()
        for _ in range(50):
            for got, expected in zip(answer(problems[n]), serial[n], strict=True):
                if expected is not None and not np.array_equal(got, expected):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_backward_of_the_first_of_two_calls():
    one, two = (attention_problem((3, 2), (5, 2), (5, 2), seed=n) for n in (1, 2))
    expected = forward_backward(one.q, one.k, one.v, one.dout)[2]
    _, saved = attention_forward(one.q, one.k, one.v)
    attention_forward(two.q, two.k, two.v)
    for got, wanted in zip(attention_backward(one.dout, saved), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_one_read_only_array_for_everything():
    x = np.random.default_rng(0).standard_normal((2, 4, 4))
    x.flags.writeable = False
    out, saved, grads = forward_backward(x, x, x, x, mask=causal_mask(), bias=x, sinks=x[:, 0, 0])
    again = attention_backward(x, saved)
    for results in ([out, *grads], [saved.out, saved.row_max, saved.row_sum]):
        assert not any(shares_memory(y, x) for y in results)
    for one, two in zip(grads, again, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("size", [3, 70])
def test_writing_into_out_before_backward(size):
    problem = attention_problem((2, size, 4), (2, size, 4), (2, size, 4), mask=causal_mask())
    expected = forward_backward(problem.q, problem.k, problem.v, problem.dout, mask=causal_mask())[2]
    out, saved = attention_forward(problem.q, problem.k, problem.v, mask=causal_mask())
    out += 1e6
    for got, wanted in zip(attention_backward(problem.dout, saved), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_writing_into_a_gradient_changes_no_other():
    problem = attention_problem((2, 5, 4), (2, 5, 4), (2, 5, 4), bias=(2, 5, 5), sinks=True)
    _, saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
    first = attention_backward(problem.dout, saved)
    for gradient in first:
        gradient[...] += 1e6
    second = attention_backward(problem.dout, saved)
    for one, two in zip(first, second, strict=True):
        np.testing.assert_allclose(one - 1e6, two, atol=1e-9)


def test_the_gradient_of_a_broadcast_input_has_its_broadcast_shape():
    x = np.broadcast_to(np.arange(4.0), (2, 3, 4))
    _, _, grads = forward_backward(x, x, x)
    assert [dx.shape for dx in grads[:3]] == [(2, 3, 4)] * 3


def test_layouts_of_a_caller():
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, 3, 10))
    views = {
        "strided": wide[..., ::2],
        "reversed": wide[:, ::-1, 4::-1],
        "transposed": np.swapaxes(rng.standard_normal((2, 5, 3)), -1, -2),
        "broadcast": np.broadcast_to(rng.standard_normal((1, 3, 5)), (2, 3, 5)),
        "fortran": np.asfortranarray(wide[..., :5]),
        "heads last": np.moveaxis(rng.standard_normal((3, 2, 5)), 1, 0),
    }
    for name, x in views.items():
        copy = np.ascontiguousarray(x)
        plain, other = (forward_backward(y, y, y, y, mask=causal_mask()) for y in (copy, x))
        for one, two in zip((plain[0], *plain[2][:3]), (other[0], *other[2][:3]), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-14, err_msg=name)


def test_what_is_no_array(library):
    x = asarray(ROWS, library)
    for arrays in (([[1.0]], x, x), (x, 1.0, x), (x, x, None), (None, x, x)):
        with pytest.raises(TypeError, match="attention: . must be an array"):
            attention(*arrays)
