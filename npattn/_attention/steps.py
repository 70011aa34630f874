"""What happened inside: every intermediate of attention and its gradient, made again from what forward saved.

The same functions of formula.py make them, on the whole problem at once: memory grows with T·S here, as a lesson may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention import explain, formula
from npattn._attention.attention import AttentionSaved, attention_backward
from npattn._attention.ops import Fresh, Hidden
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.shades import hidden_pairs, unit_bias
from npattn._attention.stores import make_rows
from npattn._attention.tiles import dropout_factors, unit_keys, unit_rows
from npattn._attention.tiling import ONE_TILE, cut_units


class AttentionSteps(NamedTuple):
    """The forward intermediates of attention; each (..., H, T, S), out (..., H, T, E).

    ``print`` shows a table; ``explain(name, i, j)`` says in words and numbers how one cell came about.
    """

    scores: Array
    capped: Array
    biased: Array
    weights: Array
    dropped: Array
    out: Array
    saved: AttentionSaved

    def __repr__(self) -> str:
        return explain.table(self)

    def explain(self, name: str, i: int, j: int, *, at: tuple[int, ...] = ()) -> str:
        """Spell out the sum or product behind one cell.

        Parameters
        ----------
        name : str
            A step: ``"scores"``, ``"capped"``, ``"biased"``, ``"weights"``, ``"dropped"`` or ``"out"``.
        i, j : int
            Row and column of the cell.
        at : tuple of int, optional
            Leading index and head; the first by default.

        Returns
        -------
        str
            A line with letters, a line with numbers.

        Raises
        ------
        ValueError
            If there is no such step, or the cell lies outside.
        """
        return explain.cell(self, None, name, i, j, at)


class AttentionStepsBackward(NamedTuple):
    """The gradients of the intermediates, in the order in which backward makes them; and the forward ``steps``."""

    dv: Array
    ddropped: Array
    dweights: Array
    dbiased: Array
    dcapped: Array
    dscores: Array
    dq: Array
    dk: Array
    dout: Array
    dlse: Array | None
    steps: AttentionSteps

    def __repr__(self) -> str:
        return explain.table(self)

    def explain(self, name: str, i: int, j: int, *, at: tuple[int, ...] = ()) -> str:
        """Spell out the sum or product behind one cell, forward or backward; see `AttentionSteps.explain`.

        Parameters
        ----------
        name : str
            A forward step or one of ``"ddropped"``, ``"dweights"``, ``"dbiased"``, ``"dcapped"``, ``"dscores"``, ``"dq"``,
            ``"dk"``, ``"dv"``.
        i, j : int
            Row and column of the cell.
        at : tuple of int, optional
            Leading index and head; the first by default.

        Returns
        -------
        str
            A line with letters, a line with numbers.

        Raises
        ------
        ValueError
            If there is no such step, or the cell lies outside.
        """
        return explain.cell(self.steps, self, name, i, j, at)


def attention_weights(saved: AttentionSaved, /) -> Array:
    """The attention weights of a forward pass, before dropout.

    Parameters
    ----------
    saved : AttentionSaved
        From `attention_forward`.

    Returns
    -------
    array (..., H, T, S)
        In float32 or float64. Rows sum to 1 (to less with a sink), or are 0 where a query sees nothing.
    """
    return attention_steps(saved).weights


def attention_steps(saved: AttentionSaved, /) -> AttentionSteps:
    """Every intermediate of a forward pass.

    Parameters
    ----------
    saved : AttentionSaved
        From `attention_forward`; inside a model's saved tree there is one for every layer.

    Returns
    -------
    AttentionSteps
        In float32 or float64, made as backward makes them, from ``saved.row_max`` and ``saved.row_sum``. Steps that the
        options leave out repeat the step before.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_forward, attention_steps
    >>> q, k, v = np.array([[2.0]]), np.array([[2.0], [1.0]]), np.array([[10.0], [4.0]])
    >>> out, saved = attention_forward(q, k, v)
    >>> steps = attention_steps(saved)
    >>> steps.weights.round(3)
    array([[0.881, 0.119]])
    >>> print(steps.explain("scores", 0, 1))
    scores[0, 1] = scale * sum_d q[0, d] * k[1, d]
                 = 1 * (2*1) = 2
    """

    def unit_steps(whole: _Whole) -> tuple[Array, ...]:
        p = whole.weights()
        dropped = p if whole.factors is None else p * whole.factors
        return whole.scores, whole.capped, whole.hidden_scores(), p, dropped

    problem = saved.problem
    scores, capped, biased, weights, dropped = _collect(saved, problem, unit_steps, 5)
    return AttentionSteps(scores, capped, biased, weights, dropped, problem.xp.astype(saved.out, saved.out.dtype), saved)


def attention_steps_backward(dout: Array, saved: AttentionSaved, /, *, dlse: Array | None = None) -> AttentionStepsBackward:
    """The gradient of every intermediate of a backward pass.

    Parameters
    ----------
    dout : float array (..., H, T, E)
        The cotangent of out.
    saved : AttentionSaved
        From `attention_forward`.
    dlse : float array (..., H, T), optional
        The cotangent of the log-sum-exp.

    Returns
    -------
    AttentionStepsBackward
        ddropped, dweights, dbiased, dcapped, dscores (..., H, T, S); dq, dk, dv as from `attention_backward`.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    """
    grads = attention_backward(dout, saved, dlse=dlse)
    problem = saved.problem
    ops = Fresh(problem.xp, problem.compute)
    cotangent = problem.with_heads(dout)
    of_lse = None if dlse is None else problem.with_heads(dlse[..., None])
    done_out = problem.with_heads(saved.out)

    def unit_steps(whole: _Whole) -> tuple[Array, ...]:
        rows = ops.load(unit_rows(problem, whole.unit, cotangent), "dout")
        delta = formula.row_delta(rows, unit_rows(problem, whole.unit, done_out), problem.xp)
        offset = formula.row_offset(delta, None if of_lse is None else unit_rows(problem, whole.unit, of_lse))
        ddropped = formula.values_backward(ops, rows, whole.v)
        dweights = formula.dropout_backward(ops, ddropped, whole.factors)
        dbiased = formula.softmax_backward(ops, dweights, offset, whole.weights(), whole.hidden)
        slope = None if whole.softcap is None else formula.cap_slope(ops, whole.capped, whole.softcap)
        return ddropped, dweights, dbiased, formula.cap_backward(ops, dbiased, slope, whole.hidden)

    ddropped, dweights, dbiased, dscores = _collect(saved, problem, unit_steps, 4)
    dcapped = problem.xp.astype(dbiased, dbiased.dtype)
    return AttentionStepsBackward(
        grads.dv, ddropped, dweights, dbiased, dcapped, dscores, grads.dq, grads.dk, dout, dlse, attention_steps(saved)
    )


class _Whole:
    """Some heads' whole matrices, up to the biased scores."""

    def __init__(self, saved: AttentionSaved, problem: Problem, unit: Place) -> None:
        self.problem, self.unit = problem, unit
        self.ops = Fresh(problem.xp, problem.compute)
        options = problem.options
        self.softcap = options.softcap
        q = self.ops.load(unit_rows(problem, unit, problem.q), "q", scale=options.scale)
        k, v = unit_keys(problem, unit)
        self.v = self.ops.load(v, "v")
        # what a mask hides is shown as it is: only from biased on is it -inf
        self.scores = formula.score(self.ops, q, self.ops.load(k, "k"))
        self.capped = self.scores if self.softcap is None else formula.cap(self.ops, self.scores, self.softcap)
        bias = None if options.bias is None else unit_bias(problem, unit)
        self.biased = self.capped if bias is None else self.capped + bias
        mixed = [] if options.mask is None else [unit.keys]
        self.hidden: list[Hidden] = hidden_pairs(problem, unit, mixed, bias)
        self.factors = dropout_factors(problem, unit)
        self.row_max, self.row_sum = (unit_rows(problem, unit, x) for x in saved.tiling.done[1:3])

    def hidden_scores(self) -> Array:
        return self.ops.hide(self.biased, self.hidden, -float("inf"))

    def weights(self) -> Array:
        xp = self.problem.xp
        shift = xp.where(self.row_sum != 0, self.row_max, 0.0)
        p = self.ops.hide(formula.exponentials(self.ops, self.biased, shift), self.hidden, 0.0)
        return p * formula.reciprocal(self.row_sum, xp)


def _collect(
    saved: AttentionSaved, problem: Problem, unit_steps: Callable[[_Whole], tuple[Array, ...]], count: int
) -> list[Array]:
    """What ``unit_steps`` returns for every unit, joined, in the caller's shape."""
    stores = [make_rows(problem, problem.keys, plain=True) for _ in range(count)]
    with np.errstate(all="ignore"):
        for unit in (unit for block in cut_units(problem, ONE_TILE) for unit in block):
            for store, rows in zip(stores, unit_steps(_Whole(saved, problem, unit)), strict=True):
                store.put(unit, rows)
        # some steps repeat others, and all are results: none shares memory with another
        results = [problem.result(store.result()) for store in stores]
        return [problem.xp.astype(x, x.dtype) for x in results]
