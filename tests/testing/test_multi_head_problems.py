"""Problems of multi-head attention: npattn passes their check, wrong wiring does not, and their repr rebuilds them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings

import npattn
import npattn.testing
from npattn import causal_mask, tree_map
from npattn.testing import Unavailable, check_multi_head, multi_head_problem, multi_head_problems, naive_multi_head, open_library

NAMES = {**vars(npattn), **{name: getattr(npattn.testing, name) for name in npattn.testing.__all__}, "np": np}


@given(multi_head_problems())
@settings(max_examples=30)
def test_npattn_passes(problem):
    check_multi_head(problem)


@pytest.mark.parametrize("name", ["strict", "torch", pytest.param("jax", marks=pytest.mark.slow)])  # JAX compiles every operation
def test_on_other_libraries(name):
    try:
        library = open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    problem = multi_head_problem((2, 3, 4), (2, 5, 3), heads=4, kv_heads=2, mask=causal_mask(), bias=(4, 3, 5), sinks=True)
    check_multi_head(problem, library)


@given(multi_head_problems())
@settings(max_examples=30)
def test_the_repr_is_code_that_rebuilds_it(problem):
    again = eval(repr(problem), NAMES)
    assert repr(again) == repr(problem)
    np.testing.assert_array_equal(again.dout, problem.dout)
    np.testing.assert_array_equal(naive_multi_head(again), naive_multi_head(problem))


def test_by_hand():
    """One head whose projections do nothing is attention itself."""
    problem = multi_head_problem((3, 2), (4, 2), heads=1, biased=False)
    eye = tree_map(lambda x: np.eye(2).reshape(x.shape), problem.params)
    plain = npattn.attention(problem.x_q, problem.x_kv, problem.x_kv)
    np.testing.assert_allclose(naive_multi_head(problem._replace(params=eye)), plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda out, saved: (out[..., ::-1], saved), "multi_head_attention: expected"),
        (lambda out, saved: (out, saved._replace(q=saved.q._replace(x=2 * saved.q.x))), "worst element"),
    ],
)
def test_wrong_wiring_is_caught(wrong, message, monkeypatch):
    right = npattn.multi_head_attention_forward
    module = __import__("npattn.testing.multi_head", fromlist=["x"])
    monkeypatch.setattr(module, "multi_head_attention_forward", lambda *a, **o: wrong(*right(*a, **o)))
    with pytest.raises(AssertionError, match=message) as caught:
        check_multi_head(multi_head_problem((3, 4), (5, 3), heads=2, seed=4))
    assert str(caught.value).endswith("problem: multi_head_problem((3, 4), (5, 3), heads=2, seed=4)")


@pytest.mark.parametrize(
    "feature",
    [
        lambda p: p.params.w_q.shape[1] > p.params.w_k.shape[1] > 1,
        lambda p: p.params.sinks is not None and "mask" in p.options and "bias" in p.options,
        lambda p: p.x_q.shape[-1] != p.x_kv.shape[-1] != p.dout.shape[-1],
        lambda p: p.x_q.ndim == 4 and "dropout" in p.options,
    ],
)
def test_everything_is_drawn(feature):
    find(
        multi_head_problems(),
        feature,
        settings=settings(max_examples=500, database=None, derandomize=True, phases=[Phase.generate]),
    )


def test_no_projection_bias_is_zero():
    assert all(np.abs(x).min() > 0 for x in multi_head_problem((3, 4), (5, 3), heads=2, sinks=True).params)
