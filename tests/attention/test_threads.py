"""The same bits from one thread and from many, whatever is computed and however small the tiles are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npattn import Dropout, causal_mask, get_num_threads, length_mask, set_num_threads
from npattn._arrays import threads as pool
from npattn.testing.candidates import npattn_candidate
from npattn.testing.problems import Alibi, attention_problem
from npattn.testing.strategies import attention_problems
from tests.attention.paths import CANDIDATES, no_problem_too_small

COUNTS = (1, 2, 5)


@pytest.fixture(autouse=True)
def _the_default_count():
    yield
    set_num_threads(None)


def answers(candidate, problem):
    """The answer with every thread count."""
    found = []
    for count in COUNTS:
        set_num_threads(count)
        assert get_num_threads() == count
        found.append(candidate.answer(problem))
    return found


def assert_same_bits(answers):
    first, *others = answers
    for other in others:
        for name, x in first.given().items():
            np.testing.assert_array_equal(getattr(other, name), x, err_msg=name)


LARGE = {
    "bare": {},
    "causal, sinks": {"mask": causal_mask(), "sinks": True},
    "lengths, wide bias": {"mask": length_mask([300, 17]), "bias": (1, 4, 300, 300)},
    "bias of keys, dropout": {"bias": (4, 1, 300), "dropout": Dropout(0.2, 3), "dlse": True},
    "alibi": {"bias": Alibi(4), "softcap": 3.0, "mask": causal_mask()},
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_large_problems(kind, dtype):
    problem = attention_problem((2, 4, 300, 8), (2, 2, 300, 8), (2, 2, 300, 8), dtype=dtype, **LARGE[kind])
    assert_same_bits(answers(npattn_candidate(), problem))


def test_they_do_use_several_threads(monkeypatch):
    used = []
    run = pool.run
    monkeypatch.setattr(
        pool, "run", lambda worker, jobs, *, threads: (used.append((threads, len(jobs))), run(worker, jobs, threads=threads))
    )
    set_num_threads(5)
    npattn_candidate().answer(attention_problem((2, 4, 300, 8), (2, 2, 300, 8), (2, 2, 300, 8)))
    assert len(used) == 2
    assert all(1 < threads == min(jobs, 5) for threads, jobs in used)


@given(problem=attention_problems(empty=True, max_side=7), path=st.sampled_from(sorted(CANDIDATES)))
@settings(max_examples=60)
def test_small_problems_in_tiny_tiles(problem, path):
    with no_problem_too_small():
        found = answers(CANDIDATES[path], problem)
    set_num_threads(None)
    assert_same_bits([*found, CANDIDATES[path].answer(problem)])


def test_many_callers_with_threads_of_their_own():
    problems = [
        attention_problem((4, 20, 8), (2, 30, 8), (2, 30, 8), mask=causal_mask(), bias=(4, 1, 30), seed=n) for n in range(6)
    ]
    candidate = CANDIDATES["scratch"]
    expected = [candidate.answer(p) for p in problems]
    set_num_threads(3)
    with no_problem_too_small(), ThreadPoolExecutor(6) as callers:
        for _ in range(3):
            for got, wanted in zip(callers.map(candidate.answer, problems), expected, strict=True):
                assert_same_bits([wanted, got])
