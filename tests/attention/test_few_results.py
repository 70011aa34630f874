"""Products with few results and long sums, one query's weights times thousands of values: right, and no thread waits for them."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

from npattn import set_num_threads
from npattn._arrays.products import FEW_RESULTS, LONG_SUM
from npattn._attention.scratch import Scratch
from npattn.testing.candidates import npattn_candidate
from npattn.testing.problems import attention_problem
from tests.attention.test_threads import answers, assert_same_bits


@pytest.fixture
def product():
    return lambda a, b: Scratch(np, a.dtype, 1024, {}).matmul(a, b, "out")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((1, LONG_SUM), (LONG_SUM, 1)),
        ((3, 1, LONG_SUM), (3, LONG_SUM, 64)),
        ((1, LONG_SUM), (LONG_SUM, 256)),  # the rows of its results are set apart
        ((2, 1, LONG_SUM), (2, LONG_SUM, FEW_RESULTS // 2)),  # neither few nor short
        ((4, 3, 1500), (1, 1500, 7)),
        ((2, 1, 2, 1500), (1, 3, 1500, 5)),
        ((0, 1, 1500), (1, 1500, 5)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values(product, a, b, dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape) for shape in (a, b))
    found = product(a.astype(dtype), b.astype(dtype))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, a @ b, rtol=0, atol=100 * float(np.finfo(dtype).eps) * a.shape[-1] ** 0.5)


def test_other_threads_go_on(product):
    """As long as nobody is asked for Python's lock, a thread runs only while it has been given back."""
    a, b = np.ones((1, 1 << 18), np.float32), np.ones((1 << 18, 64), np.float32)
    turns, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(1e-5)

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(60)
        for _ in range(100):  # on a busy machine the other thread does not get a CPU every time
            before = turns[0]
            product(a, b)
            during = turns[0] - before
            if during > 1:
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert during > 1


@pytest.mark.parametrize("options", [{}, {"bias": (20_000,), "softcap": 4.0, "sinks": True}], ids=["bare", "options"])
def test_one_query_and_thousands_of_keys(options):
    """The right numbers, and the same bits from any number of threads."""
    problem = attention_problem((1, 4, 1, 8), (1, 2, 20_000, 8), (1, 2, 20_000, 8), **options)
    try:
        found = answers(npattn_candidate(), problem)
    finally:
        set_num_threads(None)
    assert_same_bits(found)
    scores = np.einsum("bkgd,bksd->bkgs", problem.q.reshape(1, 2, 2, 8), problem.k).reshape(1, 4, 1, -1) / np.sqrt(8)
    if options:
        scores = 4 * np.tanh(scores / 4) + problem.bias
    numerators = np.exp(scores)
    total = numerators.sum(axis=-1, keepdims=True) + (np.exp(problem.sinks)[:, None, None] if options else 0)
    weights = (numerators / total).reshape(1, 2, 2, -1)
    np.testing.assert_allclose(
        found[0].out, np.einsum("bkgs,bkse->bkge", weights, problem.v).reshape(1, 4, 1, 8), rtol=0, atol=1e-13
    )
