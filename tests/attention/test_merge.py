"""Attention over parts of the keys, joined, is attention over all of them; forward and backward."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import (
    Dropout,
    attention,
    attention_backward,
    attention_forward,
    causal_mask,
    merge_attention,
    merge_attention_backward,
    merge_attention_forward,
)
from npattn.testing.candidates import Answer
from npattn.testing.gradients import check_backward
from npattn.testing.law import tolerances
from npattn.testing.libraries import Library, Unavailable, asarray, open_library, to_numpy
from npattn.testing.problems import AttentionProblem, attention_problem
from npattn.testing.strategies import attention_problems

Parts = list[tuple[Any, Any]]

# Any cut is the whole ----------------------------------------------------------------------------------------------------------


def by_parts(problem: AttentionProblem, cuts: list[slice], nested: bool) -> Answer:
    """The problem's answer from attention over each run of keys: all merged at once, or one after another."""
    mask, bias, origin = problem.dense_mask(), problem.bias, problem.dropout
    pieces = []
    for keys in cuts:
        options: dict[str, Any] = {
            "scale": problem.scale,
            "softcap": problem.softcap,
            "mask": None if mask is None else mask[..., keys],
        }
        options["bias"] = bias if bias is None or bias.ndim == 0 or bias.shape[-1] == 1 else bias[..., keys]
        options["dropout"] = None if origin is None else origin._replace(origin=(keys.start,))
        pieces.append(attention_forward(problem.q, problem.k[..., keys, :], problem.v[..., keys, :], **options))
    parts = [(out, saved.lse) for out, saved in pieces]
    sinks = problem.sinks
    if sinks is not None:
        out, lse = parts[0]
        parts.append((np.zeros_like(out), np.broadcast_to(sinks[:, None] if problem.has_heads else sinks, lse.shape)))

    if nested:
        steps, whole = [], parts[0]
        for part in parts[1:]:
            whole, saved = merge_attention_forward([whole, part])
            steps.append(saved)
        down, dparts = (problem.dout, problem.dlse), []
        for saved in reversed(steps):
            down, last = merge_attention_backward(down[0], saved, dlse=down[1]).dparts
            dparts.append(last)
        dparts.append(down)
        dparts.reverse()
    else:
        whole, saved = merge_attention_forward(parts)
        dparts = list(merge_attention_backward(problem.dout, saved, dlse=problem.dlse).dparts)

    grads = [attention_backward(d, saved, dlse=dl) for (d, dl), (_, saved) in zip(dparts, pieces, strict=False)]
    dbias: Any = None
    if bias is not None:
        shares: list[Any] = [g.dbias for g in grads]
        dbias = sum(shares) if bias.ndim == 0 or bias.shape[-1] == 1 else np.concatenate(shares, axis=-1)
    dsinks = None
    if sinks is not None:
        dlse = dparts[-1][1]
        dsinks = dlse.sum(axis=tuple(n for n in range(dlse.ndim) if n != dlse.ndim - 2)).reshape(sinks.shape)
    dk, dv = (np.concatenate([getattr(g, name) for g in grads], axis=-2) for name in ("dk", "dv"))
    return Answer(*whole, sum(g.dq for g in grads), dk, dv, dbias, dsinks)


@given(attention_problems(bias=["dense"], empty=True), st.data())
def test_any_cut_is_the_whole(problem, data):
    """Parts may be empty, or hidden altogether; and a merge merges again."""
    keys = problem.k.shape[-2]
    edges = sorted(data.draw(st.lists(st.integers(0, keys), max_size=3)))
    cuts = [slice(a, b) for a, b in itertools.pairwise([0, *edges, keys])]
    got = by_parts(problem, cuts, nested=data.draw(st.booleans()))
    out, saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
    expected = Answer(out, saved.lse, *attention_backward(problem.dout, saved, dlse=problem.dlse))
    assert got.given().keys() == expected.given().keys()
    for name, bound in tolerances(problem).given().items():
        found, wanted = getattr(got, name), getattr(expected, name)
        assert found.shape == wanted.shape
        gone = wanted == -np.inf
        np.testing.assert_array_equal(found == -np.inf, gone)
        assert (np.abs(np.where(gone, 0, found) - np.where(gone, 0, wanted)) <= 2 * bound).all(), name


def test_order_does_not_matter():
    parts = _parts(np.random.default_rng(0), 4)
    out, lse = merge_attention(parts)
    for order in itertools.permutations(range(4)):
        other, other_lse = merge_attention([parts[n] for n in order])
        np.testing.assert_allclose(other, out, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(other_lse, lse, rtol=1e-14)


def test_by_hand():
    """lse = log Σ exp lse_j; out is the mean of the parts' with those weights."""
    parts = [(np.asarray([[1.0]]), np.log([2.0])), (np.asarray([[4.0]]), np.log([1.0])), (np.asarray([[9.0]]), np.log([3.0]))]
    out, lse = merge_attention(parts)
    np.testing.assert_allclose(out, [[(2 * 1 + 4 + 3 * 9) / 6]], rtol=1e-15)
    np.testing.assert_allclose(lse, np.log([6.0]), rtol=1e-15)


def test_far_apart():
    """A part that outweighs the others by more than exp can say, whatever the size of lse."""
    out = np.asarray([[1.0], [2.0]])
    for shift in (0.0, 1e5, -1e5, 1e300):
        merged, lse = merge_attention([(out, np.asarray([0.0, -3000.0]) + shift), (2 * out, np.asarray([-3000.0, 0.0]) + shift)])
        expected = [[1.0], [4.0]] if shift != 1e300 else [[1.5], [3.0]]  # there both are the same number
        np.testing.assert_array_equal(merged, expected)
        np.testing.assert_allclose(lse, [shift, shift], rtol=1e-15, atol=0 if shift else 1e-300)


# Nothing to merge --------------------------------------------------------------------------------------------------------------


def test_parts_without_keys():
    """What stands where lse is -inf does not matter, not even if it is NaN."""
    parts = _parts(np.random.default_rng(0), 3)
    lses = [np.array(lse) for _, lse in parts]
    lses[0][0] = lses[1][0] = lses[2][0] = lses[1][1] = -np.inf  # row 0: everywhere; row 1: in one part
    empty = [(out, lse) for (out, _), lse in zip(parts, lses, strict=True)]
    poison = [(np.where(lse[:, None] == -np.inf, np.nan, out), lse) for out, lse in empty]
    dout, dlse = np.random.default_rng(1).standard_normal((4, 2)), np.random.default_rng(2).standard_normal(4)
    expected_out, expected_lse = merge_attention(empty)
    assert (expected_out[0] == 0).all()
    assert expected_lse[0] == -np.inf
    assert np.isfinite(expected_lse[1:]).all()
    np.testing.assert_array_equal(merge_attention([empty[0], empty[2]])[0][1], expected_out[1])  # the other is not there
    bad = np.where(np.arange(4)[:, None] == 0, np.nan, dout)
    for given_dout, given_parts in itertools.product((dout, bad), (empty, poison)):
        (out, lse), saved = merge_attention_forward(given_parts)
        np.testing.assert_array_equal(out, expected_out)
        np.testing.assert_array_equal(lse, expected_lse)
        grads = merge_attention_backward(given_dout, saved, dlse=np.where(np.arange(4) == 0, np.inf, dlse)).dparts
        for (_, part_lse), (d, dl) in zip(given_parts, grads, strict=True):
            gone = part_lse == -np.inf
            assert (d[gone] == 0).all()
            assert (dl[gone] == 0).all()
            assert np.isfinite(d).all()
            assert np.isfinite(dl).all()
            assert (d[~gone] != 0).all()


def test_empty_shapes():
    for shape in ((0, 3), (2, 0), (0, 2, 3), (2, 0, 3)):
        part = (np.zeros(shape), np.zeros(shape[:-1]))
        (out, lse), saved = merge_attention_forward([part, part])
        assert out.shape == shape
        assert lse.shape == shape[:-1]
        for d, dl in merge_attention_backward(out, saved, dlse=lse).dparts:
            assert d.shape == shape
            assert dl.shape == shape[:-1]


# Sinks and precision -----------------------------------------------------------------------------------------------------------


def test_a_sink_is_a_part():
    problem = attention_problem(
        (2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 2), sinks=True, mask=causal_mask(-1), dlse=True, dropout=Dropout(0.3, 1)
    )
    whole, whole_saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
    options = problem.options()
    sinks = options.pop("sinks")
    out, saved = attention_forward(problem.q, problem.k, problem.v, **options)
    sink = (np.zeros_like(out), np.broadcast_to(sinks[:, None], saved.lse.shape))
    (merged, lse), merge_saved = merge_attention_forward([(out, saved.lse), sink])
    np.testing.assert_allclose(merged, whole, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, whole_saved.lse, rtol=1e-14)
    np.testing.assert_array_equal(lse[:, :, 0], np.broadcast_to(sinks, (2, 3)))  # a query that sees its sink only
    (dout, dlse), (_, dsink) = merge_attention_backward(problem.dout, merge_saved, dlse=problem.dlse).dparts
    expected = attention_backward(problem.dout, whole_saved, dlse=problem.dlse)
    np.testing.assert_allclose(dsink.sum(axis=(0, 2)), expected.dsinks, rtol=1e-12)
    for name, got in attention_backward(dout, saved, dlse=dlse)._asdict().items():
        if got is not None:
            np.testing.assert_allclose(got, getattr(expected, name), rtol=1e-12, atol=1e-14, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_have_lse_in_float32(library, to_xp, dtype):
    if not library.has(dtype):
        pytest.skip(f"{library.name} has no {dtype}")
    parts = [
        (to_numpy(to_xp(out, dtype)).astype(float), lse.astype(np.float32)) for out, lse in _parts(np.random.default_rng(0), 3)
    ]
    given = [(to_xp(out, dtype), to_xp(lse)) for out, lse in parts]
    (out, lse), saved = merge_attention_forward(given)
    assert out.dtype == given[0][0].dtype
    assert lse.dtype == given[0][1].dtype
    exact_out, exact_lse = merge_attention([(out, lse.astype(float)) for out, lse in parts])
    half_ulp = 2**-11 if dtype == "float16" else 2**-8
    np.testing.assert_allclose(to_numpy(lse), exact_lse, rtol=1e-6)
    np.testing.assert_allclose(to_numpy(out), exact_out, rtol=1.01 * half_ulp, atol=1e-7)
    dout = to_xp(np.ones((4, 2)), dtype)
    for d, dl in merge_attention_backward(dout, saved, dlse=to_xp(np.ones(4, np.float32))).dparts:
        assert d.dtype == out.dtype
        assert dl.dtype == lse.dtype


# The derivative ----------------------------------------------------------------------------------------------------------------


def _parts(rng: np.random.Generator, count: int, shape: tuple[int, ...] = (4, 2)) -> Parts:
    return [(rng.standard_normal(shape), 2 * rng.standard_normal(shape[:-1])) for _ in range(count)]


def _gaps(parts: Parts, rng: np.random.Generator) -> Parts:
    """Rows without keys in some parts, but not in all of them."""
    return [parts[0], *[(out, np.where(rng.random(lse.shape) < 0.3, -np.inf, lse)) for out, lse in parts[1:]]]


@given(st.integers(1, 4), st.sampled_from([(3, 2), (2, 3, 4, 1), (1, 1)]), st.integers(0, 999), st.booleans())
def test_finite_differences(count, shape, seed, with_lse):
    rng = np.random.default_rng(seed)
    parts = _gaps(_parts(rng, count, shape), rng)

    def forward(parts: Parts) -> Any:
        (out, lse), saved = merge_attention_forward(parts)
        return ((out, lse) if with_lse else (out,)), saved

    def backward(cotangents: Any, saved: Any) -> Any:
        return merge_attention_backward(cotangents[0], saved, dlse=cotangents[1] if with_lse else None)

    check_backward(forward, backward, {"parts": parts})


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_autodiff_of_our_forward(name):
    try:
        library = open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    rng = np.random.default_rng(0)
    parts = _gaps(_parts(rng, 3, (2, 3, 2)), rng)
    dout, dlse = rng.standard_normal((2, 3, 2)), rng.standard_normal((2, 3))
    flat = [x for part in parts for x in part]
    expected = _vjp(library, flat, (dout, dlse))
    (_, _), saved = merge_attention_forward(parts)
    got = [x for pair in merge_attention_backward(dout, saved, dlse=dlse).dparts for x in pair]
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-12, atol=1e-14)


def _vjp(library: Library, flat: list[np.ndarray], cotangents: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    def merged(*xs: Any) -> Any:
        return merge_attention(list(zip(xs[::2], xs[1::2], strict=True)))

    inputs, outer = ([asarray(x, library) for x in xs] for xs in (flat, cotangents))
    if library.name == "jax":
        import jax

        return [to_numpy(x) for x in jax.jit(lambda *xs: jax.vjp(merged, *xs)[1](tuple(outer)))(*inputs)]
    import torch

    for x in inputs:
        x.requires_grad_()
    return [to_numpy(x) for x in torch.autograd.grad(merged(*inputs), inputs, outer)]


# Libraries and state -----------------------------------------------------------------------------------------------------------


def test_every_library(library, to_xp):
    rng = np.random.default_rng(0)
    parts = _gaps(_parts(rng, 3), rng)
    dout, dlse = rng.standard_normal((4, 2)), rng.standard_normal(4)
    whole, saved = merge_attention_forward(parts)
    grads = merge_attention_backward(dout, saved, dlse=dlse).dparts
    got, got_saved = merge_attention_forward([(to_xp(out), to_xp(lse)) for out, lse in parts])
    got_grads = merge_attention_backward(to_xp(dout), got_saved, dlse=to_xp(dlse)).dparts
    for g, e in zip(itertools.chain(got, *got_grads), itertools.chain(whole, *grads), strict=True):
        assert library.device is None or g.device == library.device
        np.testing.assert_allclose(to_numpy(g), e, rtol=1e-13, atol=1e-15)


def test_nothing_is_written_or_shared():
    parts = _parts(np.random.default_rng(0), 2)
    dout, dlse = np.ones((4, 2)), np.ones(4)
    inputs = [*itertools.chain(*parts), dout, dlse]
    for x in inputs:
        x.flags.writeable = False
    for count in (1, 2):
        (out, lse), saved = merge_attention_forward(parts[:count])
        grads = merge_attention_backward(dout, saved, dlse=dlse).dparts
        again = merge_attention_backward(dout, saved).dparts
        results = [out, lse, *itertools.chain(*grads), *itertools.chain(*again)]
        for n, x in enumerate(results):
            assert x.flags.writeable
            assert not any(np.shares_memory(x, y) for y in [*inputs, *results[n + 1 :]])
        out += 7  # results are the caller's own
        lse += 7
        for g, e in zip(
            itertools.chain(*merge_attention_backward(dout, saved, dlse=dlse).dparts), itertools.chain(*grads), strict=True
        ):
            np.testing.assert_array_equal(g, e)


def test_byte_order_and_layout():
    parts = _parts(np.random.default_rng(0), 2)
    odd = [(np.asfortranarray(out.astype(">f8")), np.repeat(lse, 2)[::2].astype(">f8")) for out, lse in parts]
    for got, expected in zip(merge_attention(odd), merge_attention(parts), strict=True):
        assert got.dtype.isnative
        np.testing.assert_array_equal(got, expected)


def test_repr():
    _, saved = merge_attention_forward(_parts(np.random.default_rng(0), 2))
    assert repr(saved) == (
        "MergeAttentionSaved(parts=[[float64[4, 2], float64[4]], [float64[4, 2], float64[4]]], out=float64[4, 2], lse=float64[4])"
    )
    grads = merge_attention_backward(np.ones((4, 2)), saved)
    assert repr(grads) == "MergeAttentionGrads(dparts=[[float64[4, 2], float64[4]], [float64[4, 2], float64[4]]])"


# Errors ------------------------------------------------------------------------------------------------------------------------

OUT, LSE = np.zeros((2, 3, 4)), np.zeros((2, 3))


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, r"parts must hold at least one pair \(out, lse\)"),
        ([(OUT, LSE), (OUT[:, :2], LSE)], ValueError, r"out of part 1 must have shape \(..., T, E\) = \(2, 3, 4\) as the first"),
        ([(OUT, LSE), (OUT[:1], LSE[:1])], ValueError, r"out of part 1 must have shape"),  # nothing is broadcast
        ([(OUT, LSE[..., None])], ValueError, r"lse of part 0 must have shape \(..., T\) = \(2, 3\) as out has, got \(2, 3, 1\)"),
        ([(OUT, LSE), (OUT, LSE[:, :1])], ValueError, r"lse of part 1 must have shape \(..., T\) = \(2, 3\)"),
        ([(np.zeros(3), np.zeros(()))], ValueError, r"out of part 0 must have shape \(..., T, E\)"),
        ([(OUT, LSE), (OUT.astype(np.float32), LSE)], TypeError, "out of part 0 is float64 but out of part 1 is float32"),
        ([(OUT.astype(np.float32), LSE)], TypeError, "lse must be float32 beside out in float32, got float64"),
        ([(OUT.astype(np.float16), LSE.astype(np.float16))], TypeError, "lse must be float32 beside out in float16, got float16"),
        ([(OUT, LSE.astype(int))], TypeError, "lse of part 0 must have a floating dtype"),
        ([(OUT.tolist(), LSE)], TypeError, "out of part 0 must be an array"),
        (
            [(OUT, LSE), (OUT, asarray(LSE, open_library("strict")))],
            TypeError,
            "out of part 0 is an array of numpy but lse of part 1",
        ),
    ],
)
def test_parts_that_do_not_fit(parts, error, message):
    for op in (merge_attention, merge_attention_forward):
        with pytest.raises(error, match=f"^merge_attention: {message}"):
            op(parts)


@pytest.mark.parametrize(
    ("dout", "dlse", "error", "message"),
    [
        (OUT[:1], None, ValueError, r"dout must have shape \(2, 3, 4\), got \(1, 3, 4\)"),
        (OUT, LSE[..., None], ValueError, r"dlse must have shape \(2, 3\), got \(2, 3, 1\)"),
        (OUT.astype(np.float32), None, TypeError, "dout is float32 but out is float64"),
        (OUT, LSE.astype(np.float32), TypeError, "dlse is float32 but lse is float64"),
        (asarray(OUT, open_library("strict")), None, TypeError, "out is an array of numpy but dout is one of array_api_strict"),
    ],
)
def test_cotangents_that_do_not_fit(dout, dlse, error, message):
    _, saved = merge_attention_forward([(OUT, LSE)])
    with pytest.raises(error, match=f"^merge_attention_backward: {message}"):
        merge_attention_backward(dout, saved, dlse=dlse)


def test_a_cached_prefix():
    """Keys seen before, merged with new ones: what a cache does."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 6, 2))
    prefix, prefix_saved = attention_forward(q[4:], k[:4], v[:4])
    new, new_saved = attention_forward(q[4:], k[4:], v[4:], mask=causal_mask())
    merged, _ = merge_attention([(prefix, prefix_saved.lse), (new, new_saved.lse)])
    np.testing.assert_allclose(merged, attention(q, k, v, mask=causal_mask())[4:], rtol=1e-13)
