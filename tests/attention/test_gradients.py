"""The hand-derived backward against finite differences, and against PyTorch's and JAX's derivative of our own forward."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npattn import Dropout, attention_backward, attention_forward, causal_mask
from npattn.testing.candidates import npattn_candidate
from npattn.testing.gradients import check_backward
from npattn.testing.law import agree
from npattn.testing.laws import gradients_are_derivatives, is_what_the_loops_say
from npattn.testing.libraries import Unavailable, asarray, open_library
from npattn.testing.parts import whole
from npattn.testing.problems import EXTREMES, Alibi, attention_problem
from npattn.testing.scales import attention_scales, autodiff_bound
from npattn.testing.strategies import attention_problems
from tests.attention.autodiff import autodiff_candidate
from tests.attention.every_option import EVERY_OPTION
from tests.attention.paths import CANDIDATES

OURS = CANDIDATES["as chosen"]


def library_or_skip(name):
    try:
        return open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))


def agrees_with_autodiff(candidate, problem):
    """Ours and theirs differ by 1e-14·(1 + largest |biased|)·scale at most; nothing is compared with a third."""
    ours, theirs, scales = OURS.answer(problem), candidate.answer(problem), attention_scales(problem)
    bounds = theirs._replace(**{name: autodiff_bound(scales, name) for name in theirs.given()})
    agree(is_what_the_loops_say, OURS, problem, ours._asdict(), theirs._asdict(), bounds)


@given(problem=attention_problems(), path=st.sampled_from(sorted(CANDIDATES)))
def test_finite_differences(problem, path):
    gradients_are_derivatives(CANDIDATES[path], problem)


@given(problem=attention_problems(max_side=12))
@settings(max_examples=1000)
@pytest.mark.night
@pytest.mark.slow
def test_finite_differences_of_many(problem):
    gradients_are_derivatives(OURS, problem)


@given(problem=attention_problems(masks=[], bias=[], softcap=False, sinks=False, grouped=False))
def test_finite_differences_of_a_bare_problem(problem):
    """One small tile where nothing is hidden has a shorter way."""
    gradients_are_derivatives(OURS, problem)


# here the derivatives of all keys would meet at the largest score and cancel, but for a rounding that is larger than dq
CANCELLING = attention_problem(
    (3, 6, 8, 1),
    (3, 2, 2, 1),
    (3, 2, 2, 1),
    values="integers",
    bias=Alibi(heads=1, offset=0),
    sinks=True,
    dropout=Dropout(rate=0.5, seed=0),
)


@given(problem=attention_problems())
@example(problem=CANCELLING)
@settings(max_examples=60)
def test_pytorch_differentiates_our_forward(problem):
    agrees_with_autodiff(autodiff_candidate(library_or_skip("torch")), problem)


@given(problem=attention_problems(extreme=EXTREMES))
@settings(max_examples=60)
def test_pytorch_differentiates_our_forward_at_extremes(problem):
    agrees_with_autodiff(autodiff_candidate(library_or_skip("torch")), problem)


@given(problem=attention_problems(max_side=12))
@settings(max_examples=1000)
@pytest.mark.night
@pytest.mark.slow
def test_pytorch_differentiates_our_forward_of_many(problem):
    agrees_with_autodiff(autodiff_candidate(library_or_skip("torch")), problem)


every_option = pytest.mark.parametrize("case", EVERY_OPTION)


@every_option
def test_pytorch_differentiates_every_option(case):
    agrees_with_autodiff(autodiff_candidate(library_or_skip("torch")), EVERY_OPTION[case])


@every_option
def test_jax_differentiates_every_option(case):
    agrees_with_autodiff(autodiff_candidate(library_or_skip("jax")), EVERY_OPTION[case])


@given(problem=attention_problems(max_side=4))
@settings(max_examples=25)
@pytest.mark.night
@pytest.mark.slow
def test_jax_differentiates_our_forward_of_many(problem):
    agrees_with_autodiff(autodiff_candidate(library_or_skip("jax")), problem)


@every_option
@pytest.mark.parametrize("path", CANDIDATES)
def test_every_path_has_the_gradients_of_every_other(path, case):
    problem = EVERY_OPTION[case]
    plain, other, scales = OURS.answer(problem), CANDIDATES[path].answer(problem), attention_scales(problem)
    bounds = plain._replace(**{name: autodiff_bound(scales, name) for name in plain.given()})
    agree(is_what_the_loops_say, CANDIDATES[path], problem, other._asdict(), plain._asdict(), bounds)


@every_option
def test_one_direction_an_input_at_a_time(case):
    """The checker as a stranger calls it, with its own tolerance: every input alone, the others fixed."""
    problem = whole(EVERY_OPTION[case])
    options = problem.options()
    inputs = {"q": problem.q, "k": problem.k, "v": problem.v, "bias": problem.bias, "sinks": problem.sinks}

    for name, x in inputs.items():
        if x is None:
            continue

        def forward(x, name=name):
            here = inputs | {name: x}
            given = options | {n: here[n] for n in ("bias", "sinks") if here[n] is not None}
            return attention_forward(here["q"], here["k"], here["v"], **given)

        check_backward(forward, attention_backward, {name: x})


def test_a_gradient_that_was_not_asked_for_is_none():
    problem = EVERY_OPTION["bare"]
    out, saved = attention_forward(problem.q, problem.k, problem.v)
    grads = attention_backward(np.ones_like(out), saved)
    assert grads.dbias is None
    assert grads.dsinks is None


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 7), (2, 1, 5, 7), (1, 3, 5, 7), (5, 1), (7,), (), (3, 5, 7), (2, 3, 5, 7), (3, 1, 1)]
)
def test_a_bias_has_a_gradient_of_its_own_shape(shape):
    problem = attention_problem((2, 3, 5, 2), (2, 3, 7, 2), (2, 3, 7, 2), bias=shape, seed=5)
    for candidate in CANDIDATES.values():
        got = candidate.answer(problem)
        assert got.dbias.shape == shape
        is_what_the_loops_say(candidate, problem)
        gradients_are_derivatives(candidate, problem)


def test_the_same_array_as_queries_keys_and_values():
    """Their gradients are three, and only their sum is the gradient of the one."""
    problem = attention_problem((2, 5, 3), (2, 5, 3), (2, 5, 3), mask=causal_mask())

    def forward(x):
        return attention_forward(x, x, x, mask=causal_mask())

    def backward(dout, saved):
        grads = attention_backward(dout, saved)
        return {"x": grads.dq + grads.dk + grads.dv}

    check_backward(forward, backward, {"x": problem.q})


@pytest.mark.parametrize("name", ["strict", "strict-device1", "torch", "jax"])
def test_the_checker_takes_arrays_of_any_library(name):
    library = library_or_skip(name)
    problem = attention_problem((3, 2), (4, 2), (4, 2), mask=causal_mask())
    args = {name: asarray(getattr(problem, name), library) for name in "qkv"}
    check_backward(lambda q, k, v: attention_forward(q, k, v, mask=causal_mask()), attention_backward, args)
    wrong = npattn_candidate(library).answer(problem).dq  # the gradient at another cotangent

    def backward(dout, saved):
        return attention_backward(dout, saved)._replace(dq=asarray(wrong, library))

    with pytest.raises(AssertionError, match="worst element"):
        check_backward(lambda q, k, v: attention_forward(q, k, v, mask=causal_mask()), backward, args)
