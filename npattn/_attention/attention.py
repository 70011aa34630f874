"""Scaled dot-product attention as a caller sees it: ``attention``, its forward and its hand-derived backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_repr
from npattn._attention import formula
from npattn._attention.biases import LazyBias
from npattn._attention.masks import Mask
from npattn._attention.passes import Forward, Kept, backward, forward
from npattn._attention.problem import Problem, check_cotangent, make_problem
from npattn._attention.tiling import Sizes, choose_sizes
from npattn.layers.dropout import Dropout


class Tiling(NamedTuple):
    """How forward was organised; backward is organised alike."""

    problem: Problem
    sizes: Sizes
    kept: Kept | None

    def __repr__(self) -> str:
        return f"Tiling({self.sizes.rows} rows, {self.sizes.keys} keys{', weights kept' if self.kept else ''})"


class AttentionSaved(NamedTuple):
    """What `attention_backward` needs: the inputs, borrowed, and three results of forward, unrounded.

    ``row_max``, ``row_sum`` and ``lse`` are (..., H, T), in float32 or float64.
    """

    q: Array
    k: Array
    v: Array
    mask: Mask | Array | None
    bias: Array | LazyBias | None
    scale: float | None
    softcap: float | None
    sinks: Array | None
    dropout: Dropout | None
    out: Array
    row_max: Array
    row_sum: Array
    tiling: Tiling

    __repr__ = tree_repr

    @property
    def problem(self) -> Problem:
        """The inputs, checked and grouped."""
        return self.tiling.problem

    @property
    def lse(self) -> Array:
        """The log of every row's sum of exponentials, row_max + log row_sum; -inf where a query sees no key and no sink."""
        with np.errstate(all="ignore"):
            return formula.log_sum_exp(self.row_max, self.row_sum, self.problem.xp)


class AttentionGrads(NamedTuple):
    """Gradients of `attention`, each in the shape and dtype of its input; ``None`` for an input that was not given."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None

    __repr__ = tree_repr


def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
) -> Array:
    problem = make_problem("attention", q, k, v, mask, bias, scale, softcap, sinks, dropout)
    done = forward(problem, choose_sizes(problem), keep=False)
    return _own(problem, problem.result(done.out), shared=False)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
) -> tuple[Array, AttentionSaved]:
    problem = make_problem("attention", q, k, v, mask, bias, scale, softcap, sinks, dropout)
    sizes = choose_sizes(problem)
    done = forward(problem, sizes, keep=sizes.keep > 0)
    out, row_max, row_sum = (problem.result(x) for x in (done.out, done.row_max[..., 0], done.row_sum[..., 0]))
    tiling = Tiling(problem, sizes, done.kept)
    saved = AttentionSaved(q, k, v, mask, bias, scale, softcap, sinks, dropout, out, row_max, row_sum, tiling)
    return _own(problem, out, shared=True), saved


def attention_backward(dout: Array, saved: AttentionSaved, /, *, dlse: Array | None = None) -> AttentionGrads:
    problem, sizes, kept = saved.tiling
    check_cotangent(problem, "dout", dout, problem.v.shape[-1])
    if dlse is not None:
        check_cotangent(problem, "dlse", dlse, lifted=True)
        dlse = problem.with_heads(dlse[..., None])
    done = Forward(*saved_rows(saved), kept)
    grads = backward(problem, sizes, done, problem.with_heads(dout), dlse)
    return AttentionGrads(
        problem.gradient(grads.dq, saved.q),
        problem.gradient(grads.dk, saved.k),
        problem.gradient(grads.dv, saved.v),
        _back_to_bias(problem, grads.dbias),
        None if grads.dsinks is None else problem.xp.astype(problem.xp.reshape(grads.dsinks, (-1,)), problem.dtype, copy=False),
    )


def saved_rows(saved: AttentionSaved) -> tuple[Array, Array, Array]:
    """out (..., H, T, E), row_max and row_sum (..., H, T, 1)."""
    with_heads = saved.problem.with_heads
    return with_heads(saved.out), with_heads(saved.row_max[..., None]), with_heads(saved.row_sum[..., None])


def _own(problem: Problem, out: Array, *, shared: bool) -> Array:
    """The result in the caller's dtype; a copy if ``saved`` holds it too, since callers write ``out += x``."""
    if problem.dtype != problem.compute:
        return problem.xp.astype(out, problem.dtype)
    return problem.xp.asarray(out, copy=True) if shared else out


def _back_to_bias(problem: Problem, dbias: Array | None) -> Array | None:
    bias, xp = problem.options.bias, problem.xp
    if dbias is None or bias is None:
        return None
    dbias = xp.astype(dbias, problem.dtype, copy=False)
    if isinstance(bias, LazyBias):
        return bias.gradient(xp.reshape(dbias, (-1, dbias.shape[-1])), xp)
    return xp.reshape(dbias, bias.shape)
