"""How every cell of every step is put into words: text with gaps, the same for all cells.

`explain` fills the gaps in Python, one cell at a time; the page of `npattn.explore` fills the same gaps in a browser, from
numbers that npattn computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.problem import Problem

TERMS = 6  # of a sum, written out

Factor = tuple[str, str, str]  # an array, its row and its column: i and j are the cell's, n runs


class Sum(NamedTuple):
    """A sum of products of two factors, over ``n`` up to the axis of length ``axis``.

    The gradient of an input (``shared``) is summed over the heads and leading indices that share it, too.
    """

    left: Factor
    right: Factor
    axis: str
    shared: str | None = None


class Recipe(NamedTuple):
    """A line of letters and a line of numbers; the first recipe of a step whose ``when`` holds for a cell is the cell's.

    In braces: ``{i}`` and ``{j}``, ``{sum}``, or the name of a number that belongs to the problem, the row or the cell.
    """

    letters: str
    numbers: str
    sum: Sum | None = None
    when: str | None = None


def recipes(problem: Problem, *, dlse: bool = False) -> dict[str, tuple[Recipe, ...]]:
    """The recipes of every step of a problem with these options; ``dlse`` if its log-sum-exp has a cotangent."""
    options = problem.options
    return {
        "scores": (Recipe("scale * sum_d q[{i}, d] * k[{j}, d]", "{scale} * {sum}", Sum(("q", "i", "n"), ("k", "j", "n"), "D")),),
        "capped": (
            Recipe("scores, as there is no softcap", "{scores}")
            if options.softcap is None
            else Recipe("softcap * tanh(scores[{i}, {j}] / softcap)", "{softcap} * tanh({scores} / {softcap})"),
        ),
        "biased": (
            *(() if options.mask is None else (Recipe("-inf where masked", "{reason}", when="masked"),)),
            Recipe("capped, as there is no bias and no mask hides it", "{capped}")
            if options.bias is None
            else Recipe("capped[{i}, {j}] + bias[{i}, {j}]", "{capped} + {bias}"),
        ),
        "weights": (
            Recipe("0 where a query sees nothing", "no key to attend to", when="blind"),
            Recipe("exp(biased[{i}, {j}] - row_max[{i}]) / row_sum[{i}]", "exp({biased} - {row_max}) / {row_sum}"),
        ),
        "dropped": (
            (Recipe("weights, as there is no dropout", "{weights}"),)
            if options.dropout is None
            else (
                Recipe("weights * 0, as dropout drops it", "{weights} * {factor}", when="cut"),
                Recipe("weights / (1 - rate), as dropout keeps it", "{weights} * {factor}"),
            )
        ),
        "out": (Recipe("sum_j dropped[{i}, j] * v[j, {j}]", "{sum}", Sum(("dropped", "i", "n"), ("v", "n", "j"), "S")),),
        "dv": (_over_queries(problem, "v", "dropped", "dout"),),
        "ddropped": (Recipe("sum_e dout[{i}, e] * v[{j}, e]", "{sum}", Sum(("dout", "i", "n"), ("v", "j", "n"), "E")),),
        "dweights": (
            Recipe("ddropped, as there is no dropout", "{ddropped}")
            if options.dropout is None
            else Recipe("ddropped * the factor that dropout gave the weight", "{ddropped} * {factor}"),
        ),
        "dbiased": (
            Recipe("0 where masked", "a pair that is hidden has no influence", when="hidden"),
            Recipe(
                f"weights * (dweights - delta{' + dlse[{i}]' if dlse else ''}), "
                "delta = sum_j weights[{i}, j] * dweights[{i}, j]",
                f"{{weights}} * ({{dweights}} - {{delta}}{' + {dlse}' if dlse else ''})",
            ),
        ),
        "dcapped": (Recipe("dbiased: the bias is only added", "{dbiased}"),),
        "dscores": (
            Recipe("dcapped, as there is no softcap", "{dcapped}")
            if options.softcap is None
            else Recipe("dcapped * (1 - (capped[{i}, {j}] / softcap)**2)", "{dcapped} * (1 - ({capped} / {softcap})**2)"),
        ),
        "dq": (
            Recipe(
                "scale * sum_j dscores[{i}, j] * k[j, {j}]",
                "{scale} * {sum}",
                Sum(("dscores", "i", "n"), ("k", "n", "j"), "S", "q"),
            ),
        ),
        "dk": (_over_queries(problem, "k", "dscores", "q"),),
    }


def _over_queries(problem: Problem, own: str, pairs: str, rows: str) -> Recipe:
    """The gradient of keys or values."""
    scale = ("scale * ", "{scale} * ") if own == "k" else ("", "")
    x: Array = getattr(problem, own)
    alone = math.prod(x.shape[:-2]) == math.prod(problem.out_shape()[:-1])
    over = "sum_i" if alone else "sum over the heads that share it and i,"
    terms = Sum((pairs, "n", "i"), (rows, "n", "j"), "T", own)
    return Recipe(f"{scale[0]}{over} {pairs}[i, {{i}}] * {rows}[i, {{j}}]", f"{scale[1]}{{sum}}", terms)


def shown_terms(count: int) -> tuple[int, str]:
    """How many terms of a sum of ``count`` are written out, and what stands for the others."""
    return (count, "") if count <= TERMS else (TERMS - 1, f"... ({count - TERMS + 1} more)")


# Whose numbers they are ------------------------------------------------------------------------------------------------------


def own_index(problem: Problem, outer: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
    """The index into the leading axes and heads ``outer`` of an array, for the leading index and query head ``at``."""
    at = at[len(at) - len(outer) :]
    if outer and outer[-1] != 1:
        # query head h reads key/value head h // (H / K)
        at = (*at[:-1], at[-1] * outer[-1] // (problem.kv_heads * problem.group))
    return tuple(0 if n == 1 else a for a, n in zip(at, outer, strict=True))


def sharers(problem: Problem, outer: tuple[int, ...], own: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The leading indices and query heads that use an array with axes ``outer`` at its index ``own``."""
    for at in np.ndindex(*problem.out_shape()[:-1]):
        if own_index(problem, outer, at) == own:
            yield at
