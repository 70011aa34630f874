"""Embedding: every id becomes its row of a table."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_cotangent, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, compute_dtype, float_dtype
from npattn._arrays.trees import tree_repr
from npattn.layers._ids import as_ids, beside, check_range, foreign


class EmbeddingSaved(NamedTuple):
    """What `embedding_backward` needs: the ids, borrowed; and the table, for its shape and dtype alone."""

    table: Array
    ids: Array

    def __repr__(self) -> str:
        return tree_repr(self)


class EmbeddingGrads(NamedTuple):
    """Gradients of `embedding`."""

    dtable: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def embedding(table: Array, ids: Any, /) -> Array:
    """``table[ids]``; see `embedding_forward`."""
    return embedding_forward(table, ids)[0]


def embedding_forward(table: Array, ids: Any, /) -> tuple[Array, EmbeddingSaved]:
    """``out[..., :] = table[ids[...], :]``.

    Parameters
    ----------
    table : float array (V, C)
        One row an id.
    ids : integer array (...), or Python integers
        At least 0 and less than V. Python and NumPy integers are host data, allowed with a table of any library, and their
        range is checked; a device array is never read back: what its wrong ids give is up to its library.

    Returns
    -------
    out : array (..., C)
        Copies of rows, in the table's dtype.
    saved : EmbeddingSaved
        For `embedding_backward`. Borrows the ids.

    Raises
    ------
    ValueError
        If the table is not two-dimensional, or an id on the host is out of range.
    TypeError
        If the table is not a floating array, the ids are not integers, or libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Embedding".

    Examples
    --------
    >>> import numpy as np
    >>> embedding(np.asarray([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]), [2, 0])
    array([[2. , 2.5],
           [0. , 0.5]])
    """
    ids = as_ids("embedding", "ids", ids)
    xp = array_namespace("embedding", table=table, ids=foreign(ids))
    dtype = float_dtype("embedding", table=table)
    if table.ndim != 2:
        shape_error("embedding", "table", "(V, C)", table.shape)
    check_range("embedding", "ids", ids, table.shape[0], "V")
    flat = xp.reshape(beside(ids, table, xp=xp), (math.prod(ids.shape),))
    rows = xp.astype(xp.take(table, flat, axis=0), dtype, copy=False)
    return xp.reshape(rows, (*ids.shape, table.shape[1])), EmbeddingSaved(table, ids)


def embedding_backward(dout: Array, saved: EmbeddingSaved, /) -> EmbeddingGrads:
    """``dtable[v, :] = Σ dout[..., :]`` over the places whose id is v.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : EmbeddingSaved
        From `embedding_forward`.

    Returns
    -------
    EmbeddingGrads
        ``dtable`` (V, C), with zero rows for ids that did not occur.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Every row is summed in an order that depends on the ids alone: the same bits every time, on a GPU too.
    """
    table, ids = saved
    xp = array_namespace("embedding_backward", table=table, dout=dout)
    dtype = float_dtype("embedding_backward", table=table)
    check_cotangent("embedding_backward", "dout", dout, "(..., C)", (*ids.shape, table.shape[1]), dtype)
    count = math.prod(ids.shape)
    rows = xp.reshape(xp.astype(dout, compute_dtype(dtype, xp=xp), copy=False), (count, table.shape[1]))
    if count == 0:
        return EmbeddingGrads(xp.zeros(table.shape, dtype=dtype, device=array_device(table)))
    flat = xp.reshape(beside(ids, table, xp=xp), (count,))
    with np.errstate(all="ignore"):
        return EmbeddingGrads(xp.astype(_sum_by_id(rows, flat, table.shape[0], xp=xp), dtype, copy=False))


def _sum_by_id(rows: Array, ids: Array, ids_count: int, *, xp: Namespace) -> Array:
    """The sum of the rows of every id, (V, C), from (N, C) and (N,): sorted, the rows of one id are a run."""
    order = xp.argsort(ids, stable=True)
    ids, rows = xp.take(ids, order, axis=0), xp.take(rows, order, axis=0)
    if xp is np:
        first = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        sums = np.zeros((ids_count, rows.shape[1]), dtype=rows.dtype)
        sums[ids[first]] = np.add.reduceat(rows, first, axis=0)
        return sums
    every = xp.arange(ids_count, dtype=ids.dtype, device=array_device(ids))
    first = xp.searchsorted(ids, every)
    first = xp.where(first < ids.shape[0], first, 0)
    occurs = xp.take(ids, first, axis=0) == every
    return xp.where(occurs[:, None], xp.take(_run_sums(rows, ids, xp=xp), first, axis=0), 0.0)


def _run_sums(rows: Array, ids: Array, *, xp: Namespace) -> Array:
    """Every row plus those after it in its run of equal ids, in log₂ N steps; fits a ``jax.jit``."""
    step = 1
    while step < ids.shape[0]:
        # a row holds the sum of ``step`` rows, or of its run's rest; ids are sorted: equal ends mean equal all between
        same = (ids[step:] == ids[:-step])[:, None]
        rows = xp.concat([rows[:-step, :] + xp.where(same, rows[step:, :], 0.0), rows[-step:, :]], axis=0)
        step *= 2
    return rows
