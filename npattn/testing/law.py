"""What a law is: a named statement about every attention, checked on one problem at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from npattn.testing.candidates import Answer, Candidate
from npattn.testing.precision import coarsest, float_info
from npattn.testing.problems import AttentionProblem
from npattn.testing.scales import attention_scales, autodiff_bound

Law: TypeAlias = Callable[[Candidate, AttentionProblem], None]

LAWS: dict[str, Law] = {}

# Hold to their tolerance where scores are of order 1: elsewhere differences are blind, and the naive formula right by luck.
ORDINARY = frozenset({"gradients_are_derivatives", "is_as_precise_as_the_naive_formula"})


class LawBroken(AssertionError):
    """A law does not hold: which, on which problem, what was expected and what came out.

    ``law`` is its name.
    """

    law: str = ""


def law(check: Law) -> Law:
    """Add a function to ``LAWS`` under its name."""
    LAWS[check.__name__] = check
    return check


def broken(check: Law, candidate: Candidate, problem: AttentionProblem, what: str) -> LawBroken:
    """The one wording of a failure."""
    statement = (check.__doc__ or "").partition("\n")[0]
    error = LawBroken(f"{candidate.name} breaks {check.__name__}: {statement}\n{what}\nproblem: {problem!r}")
    error.law = check.__name__
    return error


def tolerances(*problems: AttentionProblem, of: Candidate | None = None) -> Answer:
    """Bounds on the difference between two ways to the same answer, in the problems' precision; several problems' are added.

    The problems' answers have the same shapes, but for the ones that a law does not compare.
    """
    each, (factor, products) = [], (1.0, None) if of is None else (of.tolerance, of.products)
    for problem in problems:
        scales = attention_scales(problem)
        info = float_info(coarsest(problem.precision, products))
        tiny = info.smallest_subnormal  # what a rounded result may be off by, however small it is
        own = [
            None if value is None else factor * (autodiff_bound(scales, name, info.name) + tiny)
            for name, value in scales.of._asdict().items()
        ]
        each.append(own)
    if len(each) == 1:
        return Answer(*each[0])
    return Answer(*(None if any(x is None for x in xs) else _added(xs) for xs in zip(*each, strict=True)))


def _added(bounds: Any) -> Any:
    return sum(bounds) if len({np.shape(b) for b in bounds}) == 1 else None


def agree(
    check: Law,
    candidate: Candidate,
    problem: AttentionProblem,
    got: dict[str, Any],
    expected: dict[str, Any],
    bounds: Answer | None = None,
) -> None:
    """Raise unless every expected array is there, has its shape, and differs by no more than its bound (not at all without)."""
    for name, wanted in expected.items():
        found = got.get(name)
        if wanted is None and found is None:
            continue
        if found is None or np.shape(found) != np.shape(wanted):
            shape = None if found is None else np.shape(found)
            raise broken(check, candidate, problem, f"{name} has shape {shape}, expected is {np.shape(wanted)}")
        bound = np.zeros(()) if bounds is None else getattr(bounds, name) + candidate.noise * _size(wanted)
        wrong = _differ(np.asarray(found), np.asarray(wanted), bound)
        if candidate.watch is not None:
            candidate.watch(check.__name__, *_largest(np.asarray(found), np.asarray(wanted), bound))
        if wrong.any():
            raise broken(check, candidate, problem, _worst(name, np.asarray(found), np.asarray(wanted), wrong, bound))


def _size(x: Any) -> float:
    """The largest absolute value that is finite."""
    x = np.abs(np.asarray(x, dtype=np.float64))
    return float(np.where(np.isfinite(x), x, 0).max(initial=0))


def _differ(found: Any, wanted: Any, bound: Any) -> Any:
    """Where two arrays differ by more than ``bound``; what is not finite must be the same."""
    with np.errstate(all="ignore"):
        found, wanted = np.asarray(found, dtype=np.float64), np.asarray(wanted, dtype=np.float64)
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        close = np.abs(found - wanted) <= bound
        return ~(same | (close & np.isfinite(wanted)))


def _largest(found: Any, wanted: Any, bound: Any) -> tuple[float, float]:
    """The largest difference of finite numbers, and the largest share of its bound that one has."""
    with np.errstate(all="ignore"):
        off = np.abs(np.asarray(found, dtype=np.float64) - wanted)
        off = np.where(np.isfinite(off), off, 0.0)
        share = np.where(off > 0, off / bound, 0.0)
    return float(off.max(initial=0)), float(share.max(initial=0))


def _worst(name: str, found: Any, wanted: Any, wrong: Any, bound: Any) -> str:
    with np.errstate(all="ignore"):
        off = np.where(wrong, np.abs(np.asarray(found, dtype=np.float64) - wanted), -1.0)
    off = np.where(wrong & np.isnan(off), np.inf, off)
    at = np.unravel_index(int(off.argmax()), off.shape)
    place = f"{name}[{', '.join(str(int(n)) for n in at)}]" if at else name
    allowed = float(np.broadcast_to(bound, off.shape)[at])
    return (
        f"{place}: expected {wanted[at]!s}, got {found[at]!s}; they may differ by {allowed:.3g}; "
        f"{int(wrong.sum())} of {wrong.size} elements are wrong"
    )


def given_by(answer: Answer, expected: dict[str, Any]) -> dict[str, Any]:
    """Of what is expected, only what the candidate gives."""
    return {name: value for name, value in expected.items() if getattr(answer, name) is not None}
