"""Tangents of results and gradients: against differences, whole matrices, and the forward mode of PyTorch and JAX."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from npattn import (
    AttentionGrads,
    AttentionTangents,
    attention_backward,
    attention_backward_backward,
    attention_backward_jvp,
    attention_forward,
    attention_hvp,
    attention_jvp,
    causal_mask,
)
from npattn._attention import jvp_passes
from npattn._attention.tiling import forced
from npattn.testing.gradients import check_jvp, check_symmetric
from npattn.testing.libraries import Unavailable, open_library
from npattn.testing.problems import EXTREMES, attention_problem
from npattn.testing.strategies import attention_problems
from tests.attention.every_option import EVERY_OPTION
from tests.attention.paths import PATHS
from tests.attention.tangent_laws import (
    agrees_to_rounding,
    are_derivatives,
    inner,
    rounding,
    symmetric,
    transpose_of_backward,
)
from tests.attention.tangent_matrices import TERMS, Results, matrix_tangents
from tests.attention.tangents import INPUTS, attention_tangents, autodiff, directions, ours

shares = st.sampled_from([1.0, 0.6])  # of the inputs, how many have a tangent
paths = st.sampled_from(sorted(PATHS))


def on(path):
    return lambda problem, along: ours(problem, along, sizes=PATHS[path])


def library_or_skip(name):
    try:
        return open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))


# Right ---------------------------------------------------------------------------------------------------------------------


@given(problem=attention_problems(empty=True), path=paths, share=shares)
def test_they_are_what_whole_matrices_say(problem, path, share):
    along = directions(problem, share=share)
    agrees_to_rounding(on(path), problem, along, matrix_tangents(problem, along))


@given(problem=attention_problems(extreme=EXTREMES), path=paths)
@settings(max_examples=60)
def test_at_extremes(problem, path):
    along = directions(problem)
    agrees_to_rounding(on(path), problem, along, matrix_tangents(problem, along))


@given(problem=attention_problems(), path=paths, share=shares)
@settings(max_examples=60)
def test_finite_differences(problem, path, share):
    are_derivatives(on(path), problem, directions(problem, share=share))


@given(problem=attention_problems(), path=paths, share=shares)
@settings(max_examples=60)
def test_a_jvp_is_the_transpose_of_backward(problem, path, share):
    transpose_of_backward(on(path), problem, directions(problem, share=share))


@given(problem=attention_problems(), path=paths, share=shares)
@settings(max_examples=60)
def test_a_hessian_is_symmetric(problem, path, share):
    symmetric(on(path), problem, directions(problem, "a", share=share), directions(problem, "b", share=share))


@given(problem=attention_problems())
@settings(max_examples=30)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, when its forward mode is first used
def test_pytorch_forward_mode_of_our_forward_and_backward(problem):
    along = directions(problem)
    agrees_to_rounding(ours, problem, along, autodiff(problem, along, library_or_skip("torch")))


@pytest.mark.parametrize(
    "case", [case if n == 0 else pytest.param(case, marks=pytest.mark.slow) for n, case in enumerate(EVERY_OPTION)]
)
def test_jax_forward_mode_of_our_forward_and_backward(case):
    problem = EVERY_OPTION[case]
    along = directions(problem)
    agrees_to_rounding(ours, problem, along, autodiff(problem, along, library_or_skip("jax")))


@given(problem=attention_problems(max_side=10, empty=True), share=shares, path=paths)
@settings(max_examples=600)
@pytest.mark.night
@pytest.mark.slow
def test_many(problem, share, path):
    along = directions(problem, share=share)
    agrees_to_rounding(on(path), problem, along, matrix_tangents(problem, along))
    are_derivatives(on(path), problem, along)
    transpose_of_backward(on(path), problem, along)
    symmetric(on(path), problem, directions(problem, "a", share=share), directions(problem, "b", share=share))


@given(problem=attention_problems(max_side=10))
@settings(max_examples=600)
@pytest.mark.night
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_pytorch_forward_mode_of_many(problem):
    along = directions(problem)
    agrees_to_rounding(ours, problem, along, autodiff(problem, along, library_or_skip("torch")))


@given(problem=attention_problems(max_side=4))
@settings(max_examples=20)
@pytest.mark.night
@pytest.mark.slow
def test_jax_forward_mode_of_many(problem):
    along = directions(problem)
    agrees_to_rounding(ours, problem, along, autodiff(problem, along, library_or_skip("jax")))


LARGE = attention_problem(
    (2, 20, 8), (1, 1100, 8), (1, 1100, 8), mask=causal_mask(1085), sinks=True, bias=(2, 1, 1100), dlse=True
)


@pytest.mark.parametrize("whole_rows", [True, False])
def test_sizes_that_a_caller_gets(monkeypatch, whole_rows):
    """Keys that are cut, and the two ways of the second order."""
    if not whole_rows:
        monkeypatch.setattr(jvp_passes, "WHOLE_ROWS", 0)
    along = directions(LARGE)
    agrees_to_rounding(ours, LARGE, along, matrix_tangents(LARGE, along))


# The kit's own checks, as a stranger calls them -----------------------------------------------------------------------------


def test_the_kits_check_of_a_jvp():
    problem = EVERY_OPTION["causal, grouped, capped, with a sink"]
    options = {name: value for name, value in problem.options().items() if name != "sinks"}

    def forward(q, k, v, sinks):
        out, saved = attention_forward(q, k, v, sinks=sinks, **options)
        return {"out": out, "lse": saved.lse}

    def jvp(args, tangents):
        *qkv, sinks = args
        tq, tk, tv, tsinks = tangents
        _, _, tout, tlse = attention_jvp(*qkv, AttentionTangents(tq, tk, tv, None, tsinks), sinks=sinks, **options)
        return {"out": tout, "lse": tlse}

    def backward(g):
        return attention_backward(
            g["out"], attention_forward(problem.q, problem.k, problem.v, **problem.options())[1], dlse=g["lse"]
        )

    check_jvp(forward, jvp, {name: getattr(problem, name) for name in ("q", "k", "v", "sinks")}, backward=backward)


def test_the_kits_check_of_symmetry():
    problem = EVERY_OPTION["bare"]

    def gradient(q):
        return attention_backward(problem.dout, attention_forward(q, problem.k, problem.v)[1]).dq

    check_symmetric(gradient, problem.q)


# Hessians and the backward of backward --------------------------------------------------------------------------------------


@given(problem=attention_problems(), path=paths, share=shares)
@settings(max_examples=60)
def test_the_backward_of_backward_is_its_transpose(problem, path, share):
    """⟨c, backward_jvp(t, tdout, tdlse)⟩ = ⟨ddout, tdout⟩ + ⟨ddlse, tdlse⟩ + Σ ⟨dx, tx⟩, for cotangents c of the gradients."""
    along, c = directions(problem, share=share), directions(problem, "c", share=share)
    inputs = problem.inputs()
    c_only = {name: x for name, x in c.items() if name in INPUTS}
    if PATHS[path] is None:
        got = _backward_backward(inputs, c_only)
    else:
        with forced(PATHS[path]):
            got = _backward_backward(inputs, c_only)
    forwards = ours(problem, along, sizes=PATHS[path])
    left = inner(c_only, {name: getattr(forwards, f"td{name}") for name in c_only})
    right = inner(along, {name: getattr(got, f"dd{name[1:]}" if name in ("dout", "dlse") else f"d{name}") for name in along})
    sizes = rounding(problem, along)
    allowed = inner({name: np.abs(x) for name, x in c_only.items()}, {name: getattr(sizes, f"td{name}") for name in c_only})
    assert abs(left - right) <= 2 * allowed
    assert (got.ddlse is None) == (problem.dlse is None)


def _backward_backward(inputs, c):
    _, saved = attention_forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    cotangents = AttentionGrads(*(c.get(name) for name in INPUTS))
    return attention_backward_backward(cotangents, inputs.dout, saved, dlse=inputs.dlse)


def _second_order(problem):
    inputs, along = problem.inputs(), directions(problem)
    _, saved = attention_forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    return inputs, along, saved, attention_tangents(along)


@pytest.mark.parametrize("case", EVERY_OPTION)
def test_the_parts_of_the_backward_of_backward(case):
    """Its part in dout is the JVP's tout, that in dlse is tlse, and all else is a Hessian-vector product."""
    problem = EVERY_OPTION[case]
    inputs, along, saved, t = _second_order(problem)
    got = attention_backward_backward(AttentionGrads(*t), inputs.dout, saved, dlse=inputs.dlse)
    product = attention_hvp(inputs.dout, saved, t, dlse=inputs.dlse)
    _, _, tout, tlse = attention_jvp(inputs.q, inputs.k, inputs.v, t, **inputs.options)
    sizes = rounding(problem, along)
    assert (np.abs(got.ddout - tout) <= sizes.tout).all()
    assert problem.dlse is None or (np.abs(got.ddlse - tlse) <= sizes.tlse).all()
    for name, x in product._asdict().items():
        assert x is getattr(got, name) is None or np.array_equal(x, getattr(got, name))


def test_a_hessian_vector_product_holds_the_cotangents_fixed():
    problem = EVERY_OPTION["causal, grouped, capped, with a sink"]
    inputs, _, saved, t = _second_order(problem)
    zero = np.zeros_like(inputs.dout), np.zeros_like(inputs.dlse)
    fixed = attention_backward_jvp(inputs.dout, saved, t, dlse=inputs.dlse, tdout=zero[0], tdlse=zero[1])
    for name, x in attention_hvp(inputs.dout, saved, t, dlse=inputs.dlse)._asdict().items():
        assert x is getattr(fixed, name) is None or np.allclose(x, getattr(fixed, name), rtol=0, atol=1e-14)


@given(problem=attention_problems(), path=paths, share=st.sampled_from([0.3, 0.7]))
@settings(max_examples=40)
def test_no_tangent_is_one_of_zeros(problem, path, share):
    some = directions(problem, share=share)
    zeros = {name: some.get(name, np.zeros_like(t)) for name, t in directions(problem).items()}
    expected = ours(problem, zeros, sizes=PATHS[path])
    agrees_to_rounding(on(path), problem, some, expected)


# Wrong ---------------------------------------------------------------------------------------------------------------------

FAULTS = {
    "a weight's tangent forgets the log-sum-exp": {"tlse": np.zeros_like},
    "the log-sum-exp's tangent has the wrong sign": {"tlse": np.negative},
    "out forgets the tangent of v": {"tout": lambda x: 0.5 * x},
    "delta is taken for a constant": {"tdelta": np.zeros_like},
    "the slope of the cap is taken for a constant": {"tslope": np.zeros_like},
    "the slope's tangent has the wrong sign": {"tslope": np.negative},
    "the weights are taken for constants in dv": {"tdv": lambda x: 0 * x},
    "tdq has the scale twice": {"tdq": lambda x: x / np.sqrt(max(x.shape[-1], 1))},
    "tdk belongs to the neighbouring key": {"tdk": lambda x: np.roll(x, 1, axis=-2)},
    "the sink's gradient has no tangent": {"tdsinks": np.zeros_like},
    "the bias's gradient has the wrong sign": {"tdbias": np.negative},
}


def holds_of(check, tweaks, examples=50, **drawn):
    """A check of matrices with a fault, on ordinary draws; no shrinking."""

    def tangents(problem, along):
        return matrix_tangents(problem, along, tweaks=tweaks)

    @settings(
        max_examples=examples, phases=[Phase.generate], database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(attention_problems(max_side=4, **drawn))
    def holds(problem):
        along = directions(problem)
        if check is agrees_to_rounding:
            check(tangents, problem, along, ours(problem, along))
        else:
            check(tangents, problem, along)

    holds()


@pytest.mark.parametrize("check", [agrees_to_rounding, are_derivatives, transpose_of_backward])
def test_right_matrices_pass_every_check(check):
    holds_of(check, {}, examples=15)


@pytest.mark.parametrize("fault", FAULTS)
def test_finite_differences_catch_a_fault(fault):
    with pytest.raises(AssertionError, match="by differences"):
        holds_of(are_derivatives, FAULTS[fault])


@pytest.mark.parametrize("term", TERMS)
def test_a_slip_of_1e_4_is_caught(term):
    slip = {term: lambda x: x * (1 + 1e-4)}
    with pytest.raises(AssertionError, match="of attention_problem"):
        holds_of(agrees_to_rounding, slip)
    with pytest.raises(AssertionError, match="by differences"):
        holds_of(are_derivatives, slip)


@pytest.mark.parametrize("term", ["tbiased", "tlse", "tweights", "tout"])
def test_a_slip_in_the_jvp_breaks_the_transpose(term):
    with pytest.raises(AssertionError, match="by backward"):
        holds_of(transpose_of_backward, {term: lambda x: x * (1 + 1e-4)})


@pytest.mark.parametrize("term", ["tdelta", "tweights", "tdbiased"])
def test_a_slip_breaks_the_symmetry(term):
    @settings(max_examples=50, phases=[Phase.generate], database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(attention_problems(max_side=4))
    def holds(problem):
        def tangents(p, along):
            return matrix_tangents(p, along, tweaks={term: lambda x: x * (1 + 1e-4)})

        symmetric(tangents, problem, directions(problem, "a"), directions(problem, "b"))

    with pytest.raises(AssertionError, match="of attention_problem"):
        holds()


def test_every_result_is_compared():
    problem = EVERY_OPTION["windows or an array, relative bias, without heads"]
    assert set(ours(problem, directions(problem)).given()) == set(Results._fields)
