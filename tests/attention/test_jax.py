"""JAX: everything works inside one ``jax.jit``, where arrays have no values to look at; and eagerly, on a few fixed shapes."""

from __future__ import annotations

import numpy as np
import pytest

from npattn import (
    Dropout,
    attention,
    attention_backward,
    attention_forward,
    causal_mask,
    causal_mask_end,
    length_mask,
    window_mask,
)
from npattn.testing.candidates import Answer, Candidate, Run, npattn_candidate
from npattn.testing.laws import LAWS, dtype_and_device_are_kept, is_as_precise_as_the_naive_formula, is_what_the_loops_say
from npattn.testing.libraries import asarray, open_library, to_numpy
from npattn.testing.problems import Alibi, Relative, attention_problem

jax = pytest.importorskip("jax")
JAX = open_library("jax")


def jitted(problem, backward):
    """Forward and backward inside one jit; ``saved`` does not cross its border."""
    inputs = problem.inputs(JAX)

    @jax.jit
    def both(q, k, v, dout, dlse):
        out, saved = attention_forward(q, k, v, **inputs.options)
        return out, saved.lse, *attention_backward(dout, saved, dlse=dlse)

    return Run(inputs.arrays(), Answer(*both(*inputs[:3], inputs.dout, inputs.dlse)))


JITTED = Candidate("npattn in a jit", jitted)

PROBLEMS = {
    "bare": attention_problem((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 2)),
    "causal, grouped, sinks": attention_problem(
        (6, 5, 3), (2, 7, 3), (2, 7, 5), mask=causal_mask_end(), sinks=True, softcap=1.0, dlse=True
    ),
    "dead rows, hiding bias, dropout": attention_problem(
        (2, 2, 5, 3),
        (2, 1, 7, 3),
        (1, 1, 7, 2),
        mask=length_mask([4, 0]),
        bias=(2, 1, 7),
        hidden=0.3,
        dropout=Dropout(0.4, 3),
        seed=1,
    ),
    "window, relative bias": attention_problem(
        (2, 5, 3), (2, 7, 3), (2, 7, 2), mask=window_mask(1, 2), bias=Relative(8, 2), sinks=True
    ),
    "no keys": attention_problem((2, 5, 3), (2, 0, 3), (2, 0, 2), sinks=True),
    "no queries": attention_problem((2, 0, 3), (2, 4, 3), (2, 4, 2), bias=Alibi(2)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_in_a_jit(name):
    is_what_the_loops_say(JITTED, PROBLEMS[name])


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in PROBLEMS if name != "bare"]  # every operation is compiled


@pytest.mark.parametrize("name", ["bare", *SLOW])
def test_without_a_jit(name):
    is_what_the_loops_say(npattn_candidate(JAX), PROBLEMS[name])
    dtype_and_device_are_kept(npattn_candidate(JAX), PROBLEMS[name])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_lower_precisions(dtype):
    problem = attention_problem(
        (6, 5, 3), (2, 7, 3), (2, 7, 5), dtype=dtype, mask=causal_mask(1), bias=(6, 1, 7), sinks=True, softcap=2.0
    )
    for law in (is_as_precise_as_the_naive_formula, dtype_and_device_are_kept):
        law(JITTED, problem)


@pytest.mark.parametrize("law", ["poison_stays_out", pytest.param("unseen_keys_leave_no_trace", marks=pytest.mark.slow)])
def test_laws_of_masks(law):
    LAWS[law](JITTED, PROBLEMS["dead rows, hiding bias, dropout"])


def test_attention_itself_in_a_jit():
    problem = PROBLEMS["bare"]
    q, k, v = (asarray(x, JAX) for x in (problem.q, problem.k, problem.v))
    inside = jax.jit(lambda q, k, v: attention(q, k, v, mask=causal_mask()))(q, k, v)
    np.testing.assert_allclose(
        to_numpy(inside), attention(problem.q, problem.k, problem.v, mask=causal_mask()), rtol=0, atol=1e-14
    )


def test_masks_made_of_traced_arrays():
    """Lengths, offsets and boolean masks that are arguments of the jit: nothing may be read back."""
    problem = attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2))
    allowed = np.random.default_rng(0).random((5, 7)) < 0.7

    def masks(lengths, offset, array):
        return length_mask(lengths) & causal_mask(offset) & array

    @jax.jit
    def both(q, k, v, dout, lengths, offset, array):
        out, saved = attention_forward(q, k, v, mask=masks(lengths, offset, array))
        return out, *attention_backward(dout, saved)[:3]

    host = (np.array([4, 0]), np.array([2, 3]), allowed)
    got = both(*(asarray(x, JAX) for x in (problem.q, problem.k, problem.v, problem.dout, *host)))
    wanted = npattn_candidate().answer(problem.replace(mask=masks(*host)))
    for x, y in zip(got, (wanted.out, wanted.dq, wanted.dk, wanted.dv), strict=True):
        np.testing.assert_allclose(to_numpy(x), y, rtol=0, atol=1e-13)


def test_training_in_a_jit():
    """A function that computes its own gradients, differentiable no further, as an optimiser step has it."""
    problem = attention_problem((3, 4), (3, 4), (3, 4))
    q, k, v = (asarray(x, JAX) for x in (problem.q, problem.k, problem.v))

    @jax.jit
    def step(q, k, v):
        out, saved = attention_forward(q, k, v, mask=causal_mask())
        grads = attention_backward(out, saved)  # of sum(out²) / 2
        return q - 0.5 * grads.dq, k - 0.5 * grads.dk, v - 0.5 * grads.dv, (out * out).sum()

    losses = []
    for _ in range(5):
        q, k, v, loss = step(q, k, v)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
