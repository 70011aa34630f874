"""Values and gradients are what plain loops say, on every path, for whatever can be combined."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npattn import Dropout, attention, attention_forward, causal_mask, length_mask
from npattn.testing import attention_problem, attention_problems
from npattn.testing.laws import is_what_the_loops_say
from npattn.testing.layouts import LAYOUTS
from npattn.testing.problems import Alibi, Relative
from tests.attention.paths import CANDIDATES

some_paths = pytest.mark.parametrize("path", ["as chosen", "scratch, kept", "scratch, many heads"])
every_path = pytest.mark.parametrize("path", CANDIDATES)


@given(problem=attention_problems(layouts=LAYOUTS, empty=True, max_side=7), path=st.sampled_from(sorted(CANDIDATES)))
@settings(max_examples=200)
def test_random_problems(problem, path):
    is_what_the_loops_say(CANDIDATES[path], problem)


@given(problem=attention_problems(layouts=LAYOUTS, empty=True, max_side=12), path=st.sampled_from(sorted(CANDIDATES)))
@settings(max_examples=5000)
@pytest.mark.night
@pytest.mark.slow
def test_many_random_problems(problem, path):
    is_what_the_loops_say(CANDIDATES[path], problem)


LEADING = [((2,), (), ()), ((), (2,), ()), ((), (), (2,)), ((3, 1), (2,), (1, 1)), ((1,), (1,), (3,)), ((2, 1), (1, 3), ())]
OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "mask": {"mask": causal_mask(1)},
    "lengths": {"mask": length_mask(3, 4)},
    "bias": {"bias": (4, 1, 6), "hidden": 0.3},
    "dropout, cap, sinks": {"dropout": Dropout(0.4, 2), "softcap": 1.0, "sinks": True, "dlse": True},
}  # fmt: skip


@some_paths
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_leading_axes_broadcast(path, leading, options):
    """Each of q, k, v may bring leading axes that the others do not have."""
    q, k, v = ((*lead, *own) for lead, own in zip(leading, ((4, 5, 3), (2, 6, 3), (2, 6, 2)), strict=True))
    is_what_the_loops_say(CANDIDATES[path], attention_problem(q, k, v, **OPTIONS[options]))


@every_path
@pytest.mark.parametrize(
    "heads", [(4, 2, 2), (4, 1, 1), (4, 4, 4), (4, 2, 1), (4, 1, 2), (6, 3, 1), (4, None, None), (4, 2, None), (1, None, 1)]
)
def test_heads(path, heads):
    """H, and K of keys and of values; None is no head axis at all."""
    q, k, v = ((*(() if n is None else (n,)), *own) for n, own in zip(heads, ((5, 3), (6, 3), (6, 2)), strict=True))
    problem = attention_problem(
        q, k, v, mask=causal_mask(1), bias=(heads[0], 1, 6), dropout=Dropout(0.4, 2), sinks=True, dlse=True
    )
    is_what_the_loops_say(CANDIDATES[path], problem)


PAIRS: dict[str, dict[str, Any]] = {
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.8},
    "mask": {"mask": causal_mask(1) | length_mask(2)},
    "sinks": {"sinks": True},
    "dropout": {"dropout": Dropout(0.3, 9)},
    "dlse": {"dlse": True},
    "wide bias": {"bias": (6, 5, 7), "hidden": 0.2},
    "bias of keys": {"bias": (1, 7), "hidden": 0.2},
    "bias of queries": {"bias": (6, 5, 1)},
    "alibi": {"bias": Alibi(6, 1)},
    "relative": {"bias": Relative(8, 1)},
}  # fmt: skip


@some_paths
@pytest.mark.parametrize(
    "pair", [p for p in itertools.combinations(PAIRS, 2) if sum("bias" in PAIRS[n] for n in p) < 2], ids="-".join
)
def test_every_two_options_together(path, pair):
    one, two = (PAIRS[name] for name in pair)
    is_what_the_loops_say(CANDIDATES[path], attention_problem((2, 6, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), seed=1, **one, **two))


@given(problem=attention_problems(empty=True))
@settings(max_examples=60)
def test_attention_is_the_first_result_of_its_forward(problem):
    args, options = (problem.q, problem.k, problem.v), problem.options()
    np.testing.assert_array_equal(attention(*args, **options), attention_forward(*args, **options)[0])
