"""A problem with everything written out, and parts cut from it: single batch entries, heads, queries, runs of keys."""

from __future__ import annotations

import math

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.biases import LazyBias
from npattn.testing.candidates import Answer
from npattn.testing.dense import lazy_bias_gradient
from npattn.testing.oracle import sum_to_shape
from npattn.testing.problems import AttentionProblem

Index = slice | Array
ALL = slice(None)


def whole(problem: AttentionProblem) -> AttentionProblem:
    """The same problem with nothing broadcast and nothing lazy.

    Parameters
    ----------
    problem : AttentionProblem
        Any.

    Returns
    -------
    AttentionProblem
        q (..., H, T, D), k (..., K, S, D), v (..., K, S, E), with the same leading axes; mask and bias, if any, (..., H, T, S).
    """
    lead, pairs = problem.lead, problem.pairs

    def full(x: Array, heads: int) -> Array:
        return np.array(np.broadcast_to(x, (*lead, heads, *x.shape[-2:])), order="C")

    bias = problem.dense_bias()
    dense = None if bias is None else np.array(np.broadcast_to(bias, pairs), dtype=problem.dtype, order="C")
    return problem.replace(
        q=full(problem.q, problem.heads),
        k=full(problem.k, problem.kv_heads),
        v=full(problem.v, problem.kv_heads),
        dout=np.array(problem.dout, order="C").reshape(*pairs[:-1], problem.v.shape[-1]),
        dlse=None if problem.dlse is None else np.array(problem.dlse, order="C").reshape(pairs[:-1]),
        mask=problem.dense_mask(),
        bias=dense,
    )


def narrowed(problem: AttentionProblem, answer: Answer) -> Answer:
    """The answer to ``whole(problem)`` as that to ``problem``: gradients summed over what was broadcast."""
    rows = problem.pairs[:-1] if problem.has_heads else problem.pairs[-2:-1]
    dbias = answer.dbias
    if dbias is not None:
        lazy = isinstance(problem.bias, LazyBias)
        dbias = lazy_bias_gradient(problem.bias, dbias) if lazy else sum_to_shape(dbias, problem.bias.shape)
    inputs = (problem.q, problem.k, problem.v)
    dq, dk, dv = (None if dx is None else sum_to_shape(dx, x.shape) for dx, x in zip(answer[2:5], inputs, strict=True))
    return Answer(
        np.reshape(answer.out, (*rows, answer.out.shape[-1])),
        None if answer.lse is None else np.reshape(answer.lse, rows),
        dq,
        dk,
        dv,
        dbias,
        answer.dsinks,
    )


def part(
    problem: AttentionProblem,
    *,
    batch: tuple[int, ...] | None = None,
    head: int | None = None,
    queries: Index = ALL,
    keys: Index = ALL,
) -> AttentionProblem:
    """Some of a problem that `whole` has made.

    Parameters
    ----------
    problem : AttentionProblem
        Of `whole`.
    batch : tuple of int, optional
        One leading index: the leading axes go.
    head : int, optional
        One query head, with its key/value head: the head axis stays, of length 1.
    queries, keys : slice or integer array, optional
        Which of them.

    Returns
    -------
    AttentionProblem
        With dropout placed in the whole; an integer array may only be used without dropout.
    """
    lead = () if batch is None else batch
    group = problem.heads // max(problem.kv_heads, 1)
    of_head = ALL if head is None else slice(head, head + 1)
    of_kv_head = ALL if head is None else slice(head // group, head // group + 1)

    def pairs(x: Array | None) -> Array | None:
        return None if x is None else x[lead][..., of_head, :, :][..., queries, :][..., keys]

    def rows(x: Array, heads: slice, index: Index) -> Array:
        return np.array(x[lead][..., heads, :, :][..., index, :])

    dropout = problem.dropout
    if dropout is not None:
        leading = 0 if batch is None else int(np.ravel_multi_index(batch, problem.lead)) if batch else 0
        dropout = dropout._replace(origin=(leading, head or 0, _start(queries), _start(keys)))
    return problem.replace(
        q=rows(problem.q, of_head, queries),
        k=rows(problem.k, of_kv_head, keys),
        v=rows(problem.v, of_kv_head, keys),
        dout=rows(problem.dout, of_head, queries),
        dlse=None if problem.dlse is None else rows(problem.dlse[..., None], of_head, queries)[..., 0],
        mask=pairs(problem.mask),
        bias=pairs(problem.bias),
        sinks=None if problem.sinks is None else problem.sinks[of_head],
        dropout=dropout,
    )


def _start(index: Index) -> int:
    return (index.start or 0) if isinstance(index, slice) else 0


def default_scale(problem: AttentionProblem) -> float:
    """The scale that a problem has, given or by default."""
    if problem.scale is not None:
        return problem.scale
    return 1 / math.sqrt(problem.q.shape[-1]) if problem.q.shape[-1] else 1.0
