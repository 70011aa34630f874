"""Laws of the gradients: derivatives of the output, linear in the cotangent, and the identities that softmax leaves in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn.testing.candidates import Answer, Candidate
from npattn.testing.gradients import check_backward
from npattn.testing.inputs import bias_with
from npattn.testing.law import agree, broken, given_by, law, tolerances
from npattn.testing.parts import whole
from npattn.testing.problems import AttentionProblem
from npattn.testing.scales import attention_scales, difference_bound, difference_step
from npattn.testing.vector_trees import Vectors


def inputs_that_move(problem: AttentionProblem) -> dict[str, Any]:
    """Every input with a gradient, by name."""
    return {name: x for name, x in problem.inputs().arrays().items() if name not in ("dout", "dlse")}


def moved(problem: AttentionProblem, inputs: dict[str, Any]) -> AttentionProblem:
    """The problem with other inputs; a lazy bias is given by its parameters."""
    changes = dict(inputs)
    if "bias" in changes:
        changes["bias"] = bias_with(problem.bias, changes["bias"])
    return problem.replace(**changes)


@law
def gradients_are_derivatives(candidate: Candidate, problem: AttentionProblem) -> None:
    """⟨g, J t⟩ = ⟨t, backward(g)⟩ for random t and g, with J t by finite differences: out and lse along every input at once.

    Catches a missing term, a sign, an axis, a scale or a group sum that is missing. For ordinary draws in float64: elsewhere
    differences are blind.
    """
    if problem.dtype.itemsize < 8:
        return
    given = candidate.answer(problem)
    optional = [name for name in ("bias", "sinks") if getattr(given, f"d{name}") is None]  # a candidate may leave them out
    inputs = {name: x for name, x in inputs_that_move(problem).items() if name not in optional}
    names, with_lse = list(inputs), given.lse is not None and problem.dlse is not None

    def forward(*values: Any) -> tuple[Any, AttentionProblem]:
        here = moved(problem, dict(zip(names, values, strict=True)))
        got = candidate.answer(here, backward=False)
        out = {"out": got.out}
        if with_lse:
            out["lse"] = np.where(got.lse == -np.inf, 0, got.lse)  # a row that sees nothing stays that way
        return out, here

    def with_cotangents(here: AttentionProblem, g: dict[str, Any]) -> AttentionProblem:
        return here.replace(dout=g["out"], dlse=g.get("lse"))

    def backward(g: dict[str, Any], here: AttentionProblem) -> dict[str, Any]:
        grads = candidate.answer(with_cotangents(here, g))
        return {name: getattr(grads, f"d{name}") for name in names}

    def bound(t: Vectors, g: Vectors) -> float:
        return candidate.tolerance * difference_bound(attention_scales(with_cotangents(problem, g)), t)

    def watch(off: float, allowed: float) -> None:
        if candidate.watch is not None and math.isfinite(off):
            candidate.watch(gradients_are_derivatives.__name__, off, off / allowed if allowed else 0.0)

    try:
        check_backward(
            forward,
            backward,
            inputs,
            directions=2,
            step=lambda t: difference_step(problem, t),
            bound=bound,
            seed=problem.seed,
            watch=watch,
        )
    except AssertionError as error:
        raise broken(gradients_are_derivatives, candidate, problem, str(error)) from None


@law
def cotangents_enter_linearly(candidate: Candidate, problem: AttentionProblem) -> None:
    """backward(a·g + b·h) = a·backward(g) + b·backward(h).

    Catches a cotangent that is assumed to be one, and memory of an earlier call.
    """
    rng, dtype = problem.rng("cotangents"), problem.dtype
    other = problem.replace(
        dout=rng.standard_normal(problem.dout.shape).astype(dtype),
        dlse=None if problem.dlse is None else rng.standard_normal(problem.dlse.shape).astype(problem.dlse.dtype),
    )
    a, b = 0.5, -2.0

    def mix(x: Any, y: Any) -> Any:
        wide = None if x is None else a * np.asarray(x, dtype=np.float64) + b * np.asarray(y, dtype=np.float64)
        return None if x is None else np.asarray(wide, dtype=x.dtype)

    mixed = problem.replace(dout=mix(problem.dout, other.dout), dlse=mix(problem.dlse, other.dlse))
    one, two, got = (candidate.answer(p) for p in (problem, other, mixed))
    expected = {name: mix(getattr(one, name), getattr(two, name)) for name in one._fields[2:]}
    bounds = tolerances(problem, other, other, mixed, of=candidate)
    agree(cotangents_enter_linearly, candidate, problem, got._asdict(), given_by(one, expected), bounds)


@law
def score_gradients_of_a_row_sum_to_zero(candidate: Candidate, problem: AttentionProblem) -> None:
    """Σ_j dbiased_ij = dlse_i for a row that sees a key: the gradient of a bias for every pair, summed along its rows.

    Catches a backward of softmax without its second term -weights·Σ_l weights_l dweights_l.
    """
    full = whole(problem.replace(sinks=None))
    full = full.replace(bias=np.zeros(full.pairs, dtype=full.dtype) if full.bias is None else full.bias)
    got = candidate.answer(full)
    if got.dbias is None:
        return
    live = full.visible().any(axis=-1)
    expected = np.zeros(full.pairs[:-1], dtype=got.dbias.dtype) if full.dlse is None else np.where(live, full.dlse, 0)
    bounds = Answer(None, dbias=tolerances(full, of=candidate).dbias.sum(axis=-1))
    agree(
        score_gradients_of_a_row_sum_to_zero, candidate, problem, {"dbias": got.dbias.sum(axis=-1)}, {"dbias": expected}, bounds
    )  # fmt: skip


@law
def keys_moved_together_have_no_gradient(candidate: Candidate, problem: AttentionProblem) -> None:
    """Σ_j dk_j = 0: the gradient of a vector added to all keys, as a key projection's bias is. Not with a softcap or dlse.

    Catches what the law of rows does, through the keys, and a dk that belongs to other keys.
    """
    full = whole(problem.replace(sinks=None, softcap=None, dlse=None))
    got = candidate.answer(full)
    if got.dk is None:
        return
    total = got.dk.sum(axis=-2)
    bounds = Answer(None, dk=tolerances(full, of=candidate).dk.sum(axis=-2))
    agree(keys_moved_together_have_no_gradient, candidate, problem, {"dk": total}, {"dk": np.zeros_like(total)}, bounds)


@law
def products_with_gradients_agree(candidate: Candidate, problem: AttentionProblem) -> None:
    """⟨dv, v⟩ = ⟨dout, out⟩ since out is linear in v, and ⟨dq, q⟩ = ⟨dk, k⟩ since scores are bilinear in q and k.

    Catches a factor in one of the gradients: a scale, a dropout factor, a sum over a group or over broadcast axes.
    """
    full = whole(problem)
    got, bounds, live = candidate.answer(full), tolerances(full, of=candidate), full.visible().any(axis=-1)[..., None]
    if got.dv is None:
        return
    sums = {"dv": (got.dv * full.v).sum(), "dk": (got.dk * full.k).sum()}
    expected = {"dv": (np.where(live, full.dout, 0) * got.out).sum(), "dk": (got.dq * full.q).sum()}
    allowed = Answer(
        None,
        dv=(bounds.dv * np.abs(full.v)).sum() + (bounds.out * np.abs(full.dout)).sum(),
        dk=(bounds.dk * np.abs(full.k)).sum() + (bounds.dq * np.abs(full.q)).sum(),
    )
    agree(products_with_gradients_agree, candidate, problem, sums, expected, allowed)
