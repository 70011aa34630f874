"""The naive loops, held against numbers of others, against arithmetic by hand, and against their own finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from npattn import Dropout, causal_mask, length_mask, segment_mask, window_mask
from npattn.testing import attention_problem, naive, naive_backward, naive_candidate, naive_forward
from npattn.testing.dense import dense_bias, dense_mask, t5_bucket
from npattn.testing.laws import LAWS
from npattn.testing.oracle import sum_to_shape
from npattn.testing.problems import Alibi
from npattn.testing.strategies import attention_problems


def test_two_keys_by_hand():
    """q = 2, k = 2 and 1, v = 10 and 4: scores 4 and 2, weights 1 / (1 + e⁻²) and the rest."""
    p = 1 / (1 + math.exp(-2))
    done = naive_forward([[2.0]], [[2.0], [1.0]], [[10.0], [4.0]])
    np.testing.assert_allclose(done.weights, [[p, 1 - p]], rtol=1e-14)
    np.testing.assert_allclose(done.out, [[10 * p + 4 * (1 - p)]], rtol=1e-14)
    np.testing.assert_allclose(done.lse, [4 + math.log(1 + math.exp(-2))], rtol=1e-14)
    # d out / d scores = p (1 - p) (10 - 4) for the first key, minus that for the second
    slope = p * (1 - p) * 6
    grads = naive_backward([[1.0]], [[2.0]], [[2.0], [1.0]], [[10.0], [4.0]], dlse=[1.0])
    np.testing.assert_allclose(grads.dbiased, [[slope + p, -slope + 1 - p]], rtol=1e-14)
    np.testing.assert_allclose(grads.dq, [[2 * (slope + p) + 1 * (-slope + 1 - p)]], rtol=1e-14)
    np.testing.assert_allclose(grads.dk, [[2 * (slope + p)], [2 * (-slope + 1 - p)]], rtol=1e-14)
    np.testing.assert_allclose(grads.dv, [[p], [1 - p]], rtol=1e-14)


def test_options_by_hand():
    q, k, v = [[1.0]], [[3.0], [1.0]], [[1.0], [0.0]]
    first = {"mask": [[True, False]]}  # of one key, the log-sum-exp is its score
    assert naive_forward(q, k, v, scale=0.5, **first).lse == [1.5]
    assert naive_forward(q, k, v, softcap=2.0, **first).lse == pytest.approx(2 * math.tanh(1.5))
    assert naive_forward(q, k, v, bias=[[-3.0, 5.0]], **first).lse == [0]
    np.testing.assert_allclose(naive_forward(q, k, v, mask=[[False, True]]).out, [[0.0]])
    np.testing.assert_allclose(naive_forward(q, k, v, sinks=[3.0]).weights.sum(), 1 - 1 / (2 + math.exp(-2)))
    np.testing.assert_allclose(naive_forward(q, k, v, factors=[[2.0, 0.0]]).out, [[2 / (1 + math.exp(-2))]])


def test_dead_rows():
    done = naive_forward(np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)), mask=[[False, False], [True, True]])
    np.testing.assert_array_equal(done.out, [[0], [1]])
    assert done.lse[0] == -np.inf
    done = naive_forward(np.ones((1, 1)), np.ones((2, 1)), np.ones((2, 1)), bias=[[-np.inf, -np.inf]], sinks=[0.5])
    np.testing.assert_array_equal(done.out, [[0]])
    np.testing.assert_array_equal(done.lse, [0.5])


def test_grouped_heads_by_hand():
    v = np.array([10.0, 20.0]).reshape(2, 1, 1)
    np.testing.assert_array_equal(naive_forward(np.zeros((4, 1, 1)), np.zeros((2, 1, 1)), v).out.ravel(), [10, 10, 20, 20])


@pytest.mark.parametrize("name", LAWS)
@given(problem=attention_problems(empty=True, max_side=4))
@settings(max_examples=15)
def test_the_loops_keep_every_law(name, problem):
    """Finite differences among them: its backward is that of its forward."""
    LAWS[name](naive_candidate, problem)


def test_the_precision_of_every_step():
    problem = attention_problem(
        (2, 5, 7), (2, 9, 7), (2, 9, 3), bias=(5, 9), sinks=True, softcap=2.0, dropout=Dropout(0.5, 1), dlse=True
    )
    exact, rounded = naive(problem), naive(problem, np.float32)
    for name, x in rounded.given().items():
        assert x.dtype == np.float32, name
        error = np.abs(x - getattr(exact, name)).max()
        assert 1e-9 < error < 1e-4, name


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (causal_mask(), "#....  ##...  ###.."),
        (causal_mask(-1), ".....  #....  ##..."),
        (window_mask(1, 0, offset=1), "##...  .##..  ..##."),
        (window_mask(None, 0), "#....  ##...  ###.."),
        (length_mask(2), "##...  ##...  ##..."),
        (length_mask(2, 1), "##...  .....  ....."),
        (segment_mask([0, 1, 0], [0, 0, 1, 1, 2]), "##...  ..##.  ##..."),
        (~causal_mask(), ".####  ..###  ...##"),
        (causal_mask() | window_mask(0, 1), "##...  ###..  ####."),
        (causal_mask() & (np.arange(5) != 1), "#....  #....  #.#.."),
        (np.arange(5) == 2, "..#..  ..#..  ..#.."),
    ],
)
def test_masks_by_their_definition(mask, picture):
    wanted = np.array([[c == "#" for c in row] for row in picture.split()])
    np.testing.assert_array_equal(dense_mask(mask, (), 1, 3, 5)[0], wanted)


def test_lengths_of_every_batch_entry():
    dense = dense_mask(length_mask([1, 3]) & np.array([[[True]], [[False]]]), (2,), 2, 1, 3)
    np.testing.assert_array_equal(dense[0, 0], [[True, False, False]])
    np.testing.assert_array_equal(dense[1, 0], [[True, True, True]])
    assert not dense[:, 1].any()


def test_alibi_by_its_definition():
    bias = attention_problem((2, 2, 1), (2, 3, 1), (2, 3, 1), bias=Alibi(2, offset=1)).bias
    expected = -bias.parameters[:, None, None] * np.array([[1, 0, 1], [2, 1, 0]])
    np.testing.assert_array_equal(dense_bias(bias, 2, 2, 3), expected)


def test_buckets_of_t5():
    """As transformers' T5 has them for 32 buckets up to 128."""
    assert [t5_bucket(d, 32, True, 128) for d in (0, -1, -7, -8, -15, -16, -127, -128, -1000)] == [0, 1, 7, 8, 9, 10, 15, 15, 15]
    assert [t5_bucket(d, 32, True, 128) for d in (1, 7, 8, 15, 16, 1000)] == [17, 23, 24, 25, 26, 31]
    assert [t5_bucket(d, 32, False, 128) for d in (5, 0, -1, -15, -16, -31, -128)] == [0, 0, 1, 15, 16, 21, 31]


def test_sum_to_shape():
    x = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(sum_to_shape(x, (3, 1)), x.sum(axis=(0, 2))[:, None])
    np.testing.assert_array_equal(sum_to_shape(x, ()), x.sum())
