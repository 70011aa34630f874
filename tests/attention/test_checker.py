"""Do the checks see anything? Wrong backwards, one fault each, and slips of 1e-4, against every bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from npattn.testing.candidates import Candidate
from npattn.testing.laws import (
    LAWS,
    Law,
    LawBroken,
    gradients_are_derivatives,
    is_as_precise_as_the_naive_formula,
    is_what_the_loops_say,
)
from npattn.testing.strategies import attention_problems
from tests.attention.matrices import TERMS, matrix_candidate, slipped

FAULTS = {
    "the second term of softmax is missing": {"delta": np.zeros_like},
    "the second term of softmax has the wrong sign": {"delta": np.negative},
    "the row sum runs along queries": {"delta": lambda x: x.mean(axis=-2, keepdims=True) + 0 * x},
    "dq has the wrong sign": {"dq": np.negative},
    "dk has the wrong sign": {"dk": np.negative},
    "dk belongs to the neighbouring key": {"dk": lambda x: np.roll(x, 1, axis=-2)},
    "dv belongs to the neighbouring feature": {"dv": lambda x: np.roll(x, 1, axis=-1)},
    "dq has the scale twice": {"dq": lambda x: x / np.sqrt(max(x.shape[-1], 1))},
    "dk has no scale": {"dk": lambda x: x * np.sqrt(max(x.shape[-1], 1))},
    "the group is not summed": {"group": lambda x: x[..., 0, :, :] if x.shape[-3] else x.sum(axis=-3)},
    "the group is averaged": {"group": lambda x: x.mean(axis=-3) if x.shape[-3] else x.sum(axis=-3)},
    "the cotangent is taken for ones": {"dout": np.ones_like},
    "the cap has no slope": {"slope": np.ones_like},
    "the cap's slope is not squared": {"slope": lambda x: 1 - np.sqrt(1 - x)},
    "dropout is forgotten in dv": {"dropped": lambda x: (x != 0) * 0.5},
    "dropout is forgotten in dweights": {"factors": np.ones_like},
    "the log-sum-exp has no gradient": {"dlse": np.zeros_like},
    "the log-sum-exp's gradient has the wrong sign": {"dlse": np.negative},
    "the sink has no gradient": {"dsinks": np.zeros_like},
    "the sink's gradient has the wrong sign": {"dsinks": np.negative},
    "the bias's gradient is averaged over heads": {"dbias": lambda x: x / x.shape[-3]},
    "the bias's gradient includes the slope of the cap": {"dbias": lambda x: x * 0.9},
}


def check(law: Law, candidate: Candidate, examples: int = 60, **drawn: Any) -> None:
    """The law on ordinary draws, as the tests of npattn itself draw them; no shrinking."""

    @settings(
        max_examples=examples, phases=[Phase.generate], database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(attention_problems(**{"max_side": 4, **drawn}))
    def holds(problem):
        law(candidate, problem)

    holds()


@pytest.mark.parametrize("name", LAWS)
def test_right_matrices_keep_every_law(name):
    check(LAWS[name], matrix_candidate(), examples=15)


@pytest.mark.parametrize("fault", FAULTS)
def test_finite_differences_catch_a_wrong_backward(fault):
    with pytest.raises(LawBroken, match="gradients_are_derivatives") as caught:
        check(gradients_are_derivatives, matrix_candidate(fault, **FAULTS[fault]), max_side=3)  # a small table is made quickly
    assert "worst element" in str(caught.value)
    assert "problem: attention_problem(" in str(caught.value)


@pytest.mark.parametrize("term", TERMS)
def test_finite_differences_catch_a_slip(term):
    with pytest.raises(LawBroken):
        check(gradients_are_derivatives, slipped(term))


@pytest.mark.parametrize("term", TERMS)
def test_the_bound_of_autodiff_catches_a_slip(term):
    with pytest.raises(LawBroken):
        check(is_what_the_loops_say, slipped(term))


@pytest.mark.parametrize("term", TERMS)
def test_the_bound_of_float32_catches_a_slip(term):
    many = {"dtypes": ["float32"], "ranks": [3], "H": 16, "examples": 12}  # results of 16 elements and more
    check(is_as_precise_as_the_naive_formula, matrix_candidate(), **many)
    with pytest.raises(LawBroken):
        check(is_as_precise_as_the_naive_formula, slipped(term), **many)
