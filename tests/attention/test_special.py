"""Infinities and NaN where they mean something: in biases, in sinks, at keys that are seen."""

from __future__ import annotations

import numpy as np
import pytest

from npattn import Dropout, attention_backward, attention_forward, causal_mask, length_mask
from npattn.testing import attention_problem, naive
from npattn.testing.libraries import asarray, to_numpy
from npattn.testing.parts import whole
from tests.attention.paths import CANDIDATES

INF, NAN = np.inf, np.nan

every_path = pytest.mark.parametrize("path", CANDIDATES)


def dense(**options):
    """A problem of two heads, five queries and seven keys, nothing broadcast."""
    return whole(attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), dlse=True, **options))


def rows_of(answer):
    return {"out": answer.out, "lse": answer.lse[..., None], "dq": answer.dq}


@every_path
@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"softcap": 1.0}, {"dropout": Dropout(0.5, 1)}], ids=str)
def test_a_bias_of_infinity_or_nan_at_a_visible_pair_makes_its_row_nan(path, bad, options):
    problem = dense(bias=(2, 5, 7), **options)
    bias = problem.bias.copy()
    bias[1, 0, 3, 4] = bad
    plain, got = (CANDIDATES[path].answer(p) for p in (problem, problem.replace(bias=bias)))
    for name, x in rows_of(got).items():
        assert np.isnan(x[1, 0, 3]).all(), name
        others = np.ones(x.shape[:-1], dtype=bool)
        others[1, 0, 3] = False
        np.testing.assert_array_equal(x[others], rows_of(plain)[name][others], err_msg=name)
    for name in ("dk", "dv"):  # of the other heads and batch entries
        x, y = getattr(got, name), getattr(plain, name)
        np.testing.assert_array_equal(x[0], y[0], err_msg=name)
        np.testing.assert_array_equal(x[1, 1], y[1, 1], err_msg=name)


@every_path
@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_bias_of_infinity_or_nan_at_a_masked_pair_is_nothing(path, bad):
    problem = dense(bias=(2, 5, 7), mask=causal_mask(1), sinks=True)
    bias = problem.bias.copy()
    bias[~problem.dense_mask()] = bad
    plain, got = (CANDIDATES[path].answer(p) for p in (problem, problem.replace(bias=bias)))
    for name, x in got.given().items():
        np.testing.assert_array_equal(x, getattr(plain, name), err_msg=name)


@every_path
def test_a_bias_that_hides_everything(path):
    problem = dense(bias=(2, 5, 7))
    bias = problem.bias.copy()
    bias[1, 0, 3] = -INF
    bias[0, :, :, 2] = -INF
    q, k, v, dout = (x.copy() for x in (problem.q, problem.k, problem.v, problem.dout))
    q[1, 0, 3] = dout[1, 0, 3] = k[0, :, 2] = v[0, :, 2] = NAN
    got = CANDIDATES[path].answer(problem.replace(bias=bias, q=q, k=k, v=v, dout=dout))
    for name, x in got.given().items():
        assert np.isfinite(x).all() or name == "lse", name
    assert (got.out[1, 0, 3] == 0).all()
    assert (got.dbias[1, 0, 3] == 0).all()
    assert (got.dbias[0, :, :, 2] == 0).all()
    assert got.lse[1, 0, 3] == -INF
    assert np.isfinite(np.delete(got.lse, 3, axis=-1)).all()


@every_path
def test_a_sink_of_minus_infinity_is_none(path):
    problem = dense(mask=causal_mask(-1))
    without = CANDIDATES[path].answer(problem)
    got = CANDIDATES[path].answer(problem.replace(sinks=np.array([-INF, -INF])))
    for name, x in without.given().items():
        np.testing.assert_allclose(getattr(got, name), x, rtol=0, atol=1e-14, err_msg=name)
    np.testing.assert_array_equal(got.dsinks, [0, 0])


@every_path
def test_a_sink_takes_all_of_a_row_that_sees_nothing(path):
    problem = dense(mask=causal_mask(-1), sinks=True)
    got = CANDIDATES[path].answer(problem)
    np.testing.assert_array_equal(got.out[:, :, 0], np.zeros((2, 2, 2)))
    np.testing.assert_array_equal(got.lse[:, :, 0], np.broadcast_to(problem.sinks, (2, 2)))
    np.testing.assert_allclose(got.dsinks, naive(problem).dsinks, rtol=0, atol=1e-14)


@every_path
@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_at_a_key_reaches_the_queries_that_see_it(path, where):
    problem = dense(mask=causal_mask(1))
    x = getattr(problem, where).copy()
    x[1, 0, 4] = NAN
    got = CANDIDATES[path].answer(problem.replace(**{where: x}), backward=False).out
    plain = CANDIDATES[path].answer(problem, backward=False).out
    assert np.isnan(got[1, 0, 3:]).all()
    np.testing.assert_array_equal(got[0], plain[0])
    np.testing.assert_array_equal(got[1, 1], plain[1, 1])


@every_path
def test_a_row_that_sees_nothing_is_zero_whatever_others_see(path):
    problem = dense(mask=causal_mask(-1), dropout=Dropout(0.5, 1))
    k, v = problem.k.copy(), problem.v.copy()
    k[1, 0, 0] = v[0, 1, 2] = NAN
    got = CANDIDATES[path].answer(problem.replace(k=k, v=v))
    assert (got.out[:, :, 0] == 0).all()
    assert (got.lse[:, :, 0] == -INF).all()
    assert (got.dq[:, :, 0] == 0).all()


@every_path
def test_nan_in_a_query_stays_in_its_row(path):
    problem = dense()
    q = problem.q.copy()
    q[1, 0, 3, 2] = NAN
    got, plain = (CANDIDATES[path].answer(p) for p in (problem.replace(q=q), problem))
    for name, x in rows_of(got).items():
        assert np.isnan(x[1, 0, 3]).all(), name
        keep = [0, 1, 2, 4]
        np.testing.assert_array_equal(x[1, 0, keep], rows_of(plain)[name][1, 0, keep], err_msg=name)


@every_path
@pytest.mark.parametrize("hidden", ["by a mask", "by an array", "by a bias"])
@pytest.mark.parametrize("nan", ["q", "dout"])
def test_a_row_that_is_nan_gives_nothing_to_keys_that_no_row_sees(path, hidden, nan):
    seen = np.arange(7) < 4
    bias = np.where(seen, 0.5, -INF)
    problem = dense(**{"by a mask": {"mask": length_mask(4)}, "by an array": {"mask": seen}, "by a bias": {"bias": (7,)}}[hidden])
    if hidden == "by a bias":
        problem = problem.replace(bias=bias)
    if hidden == "by a mask":  # not written out, so that it is known to show every query a key
        problem = problem.replace(mask=length_mask(4))
    rows = getattr(problem, nan).copy()
    rows[1, 0, 3] = NAN
    got = CANDIDATES[path].answer(problem.replace(**{nan: rows}))
    for name, x in (("dk", got.dk), ("dv", got.dv)):
        assert (x[..., ~seen, :] == 0).all(), name
        assert np.isfinite(x[0]).all(), name
        assert np.isfinite(x[1, 1]).all(), name
    assert np.isnan(got.dk[1, 0, seen]).any()


@every_path
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"bias": (2, 5, 7)}], ids=str)
def test_a_hidden_score_that_overflows_is_nothing(path, options):
    """Sums of finite numbers, of which some lanes are inf and others -inf: the score is NaN, and so is the slope of a cap."""
    problem = attention_problem((2, 5, 32), (2, 7, 32), (2, 7, 2), mask=causal_mask(1), dlse=True, **options)
    q, k = np.abs(problem.q) + 1, problem.k.copy()
    k[:, 3:] = np.where(np.arange(32) % 2, 1, -1) * 1.5e308
    plain, got = (CANDIDATES[path].answer(problem.replace(q=q, k=x)) for x in (problem.k, k))
    for name, x in rows_of(got).items():
        np.testing.assert_array_equal(x[:, :2], rows_of(plain)[name][:, :2], err_msg=name)


def test_other_libraries(library):
    """A row of NaN, a dead row and a row as always, in one problem."""
    bias = np.array([[0.0, INF, 0.0], [-INF, -INF, -INF], [0.0, -INF, 1.0]])
    v = np.array([[1.0], [2.0], [3.0]])
    zeros, out = asarray(np.zeros((3, 2)), library), asarray(np.ones((3, 1)), library)
    result, saved = attention_forward(zeros, zeros, asarray(v, library), bias=asarray(bias, library))
    grads = attention_backward(out, saved)
    result, lse, dq, dbias = (to_numpy(x) for x in (result, saved.lse, grads.dq, grads.dbias))
    share = 1 / (1 + np.e)
    np.testing.assert_allclose(result, [[NAN], [0], [share + 3 * (1 - share)]], rtol=1e-15)
    np.testing.assert_allclose(lse, [NAN, -INF, np.log(1 + np.e)], rtol=1e-15)
    assert np.isnan(dbias[0]).any()
    np.testing.assert_array_equal(dbias[1], [0, 0, 0])
    assert dbias[2, 1] == 0
    np.testing.assert_array_equal(dq[1:], np.zeros((2, 2)))
