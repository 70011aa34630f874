"""What must hold of tangents, whoever computes them: each check raises on a problem, and names the result that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from npattn.testing.candidates import npattn_candidate
from npattn.testing.gradient_laws import moved
from npattn.testing.law import tolerances
from npattn.testing.problems import AttentionProblem
from npattn.testing.scales import AUTODIFF, DIFFERENCE, attention_scales, difference_bound, difference_step
from npattn.testing.vector_trees import difference_along
from tests.attention.tangent_matrices import Along, Results, largest_score, tangent_scales

Tangents: TypeAlias = Callable[[AttentionProblem, Along], Results]

EPS = float(np.finfo(np.float64).eps)
OURS = npattn_candidate()


def rounding(problem: AttentionProblem, along: Along, dtype: Any = np.float64) -> Results:
    """Two exact ways to the same tangents differ by 1e-14·(1 + largest |biased|)·scale at most, in float64."""
    ratio = AUTODIFF * float(np.finfo(dtype).eps) * (1 + largest_score(problem, along))
    return Results(*(None if x is None else ratio * x + np.finfo(dtype).tiny for x in tangent_scales(problem, along)))


def agree(problem: AttentionProblem, got: Results, expected: Results, bounds: Mapping[str, Any]) -> None:
    """Every tangent differs by no more than its bound, and has its shape."""
    assert got.given().keys() == expected.given().keys()
    for name, wanted in expected.given().items():
        found, bound = np.asarray(getattr(got, name), dtype=np.float64), bounds[name]
        assert found.shape == wanted.shape == np.shape(bound), f"{name} of {problem!r}"
        wrong = ~(np.abs(found - wanted) <= bound)
        assert not wrong.any(), f"{name} is {found[wrong][0]}, not {wanted[wrong][0]} (±{bound[wrong][0]:.2g}), of {problem!r}"


def agrees_to_rounding(tangents: Tangents, problem: AttentionProblem, along: Along, expected: Results) -> None:
    """The same as another exact way."""
    agree(problem, tangents(problem, along), expected, rounding(problem, along).given())


def inner(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The inner product of two trees of arrays."""
    return float(sum(np.sum(np.asarray(a[name], dtype=np.float64) * b[name]) for name in a))


def cotangents(problem: AttentionProblem, like: Results) -> dict[str, Any]:
    """A random cotangent of every tangent."""
    rng = problem.rng("cotangents of tangents")
    return {name: rng.standard_normal(x.shape) for name, x in like.given().items()}


def are_derivatives(tangents: Tangents, problem: AttentionProblem, along: Along) -> None:
    """⟨c, tangents⟩ is what central differences of results and gradients say, for random c."""
    h = difference_step(problem, {**{name: np.zeros(getattr(problem, name).shape) for name in "qk"}, **along})
    got = tangents(problem, along)
    c = cotangents(problem, got)
    names = [*along]
    values = [problem.inputs().arrays()[name] for name in names]

    def answers(*here: Any) -> dict[str, Any]:
        changes = dict(zip(names, here, strict=True))
        answer = OURS.answer(moved(problem, changes))
        lse = np.where(answer.lse == -np.inf, 0, answer.lse)
        return {f"t{name}": x for name, x in {**answer.given(), "lse": lse}.items()}

    change = difference_along(answers, names, values, dict(along), h)
    results, gradients = {"tout", "tlse"}, set(c) - {"tout", "tlse"}
    with_c = problem.replace(dout=c["tout"], dlse=c["tlse"])
    of_inputs = {name: t for name, t in along.items() if name not in ("dout", "dlse")}
    sizes = {
        name: x + getattr(attention_scales(problem).of, name[1:]) for name, x in tangent_scales(problem, along).given().items()
    }
    allowed = DIFFERENCE * sum(float(np.sum(np.abs(c[name]) * sizes[name])) for name in gradients)
    for some, bound in ((results, difference_bound(attention_scales(with_c), of_inputs)), (gradients, allowed)):
        left, right = (inner({name: c[name] for name in some}, x) for x in (got.given(), change))
        assert abs(left - right) <= bound + 64 * EPS / h, f"{some}: {left} by tangents, {right} by differences, of {problem!r}"


def transpose_of_backward(tangents: Tangents, problem: AttentionProblem, along: Along) -> None:
    """⟨c, J t⟩ = ⟨Jᵀ c, t⟩: the JVP is the transpose of the backward."""
    got = tangents(problem, along)
    c = cotangents(problem, got)
    with_c = problem.replace(dout=c["tout"], dlse=c["tlse"])
    gradients, bounds = OURS.answer(with_c), tolerances(with_c)
    of_inputs = {name: t for name, t in along.items() if name not in ("dout", "dlse")}
    left = inner({"tout": c["tout"], "tlse": c["tlse"]}, got.given())
    right = inner(of_inputs, {name: getattr(gradients, f"d{name}") for name in of_inputs})
    size = tangent_scales(problem, along)
    allowed = sum(float(np.sum(np.abs(t) * getattr(bounds, f"d{name}"))) for name, t in of_inputs.items())
    allowed += (
        4 * EPS * (1 + largest_score(problem, along)) * inner({name: np.abs(c[name]) for name in ("tout", "tlse")}, size.given())
    )
    assert abs(left - right) <= allowed, f"{left} by tangents, {right} by backward, of {problem!r}"


def symmetric(tangents: Tangents, problem: AttentionProblem, a: Along, b: Along) -> None:
    """⟨a, H b⟩ = ⟨b, H a⟩ for the Hessian of ⟨dout, out⟩ + ⟨dlse, lse⟩."""
    a, b = ({name: t for name, t in x.items() if name not in ("dout", "dlse")} for x in (a, b))
    sides, allowed = [], 0.0
    for one, other in ((a, b), (b, a)):
        product, bounds = tangents(problem, other), rounding(problem, other)
        sides.append(inner(one, {name: getattr(product, f"td{name}") for name in one}))
        allowed += inner({name: np.abs(t) for name, t in one.items()}, {name: getattr(bounds, f"td{name}") for name in one})
    assert abs(sides[0] - sides[1]) <= allowed, f"{sides[0]} and {sides[1]}, of {problem!r}"
