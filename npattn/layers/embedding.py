"""Embedding: every id becomes its row of a table. And with the same table, tied, the way back to logits of ids."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_cotangent, host_float, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, compute_dtype, float_dtype, rounded
from npattn._arrays.products import Product, multiply
from npattn._arrays.trees import tree_repr
from npattn.layers._ids import as_ids, beside, check_range, foreign
from npattn.layers.linear import as_rows, lift, rows_forward


class EmbeddingSaved(NamedTuple):
    """What `embedding_backward` needs: the ids, borrowed; the scale; and the table, for its shape and dtype alone."""

    table: Array
    ids: Array
    scale: float = 1.0

    def __repr__(self) -> str:
        return tree_repr(self)


class EmbeddingGrads(NamedTuple):
    """Gradients of `embedding`."""

    dtable: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def embedding(table: Array, ids: Any, /, *, scale: float = 1.0) -> Array:
    """``scale * table[ids]``; see `embedding_forward`."""
    return embedding_forward(table, ids, scale=scale)[0]


def embedding_forward(table: Array, ids: Any, /, *, scale: float = 1.0) -> tuple[Array, EmbeddingSaved]:
    """``out[..., :] = scale * table[ids[...], :]``.

    Parameters
    ----------
    table : float array (V, C)
        One row an id.
    ids : integer array (...), or Python integers
        At least 0 and less than V. Python and NumPy integers are host data, allowed with a table of any library, and their
        range is checked; a device array is never read back: what its wrong ids give is up to its library.
    scale : float, optional
        A factor: √C in the original transformer, where the same table makes logits.

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
    scale = host_float("embedding", "scale", scale)
    if table.ndim != 2:
        shape_error("embedding", "table", "(V, C)", table.shape)
    check_range("embedding", "ids", ids, table.shape[0], "V")
    flat = xp.reshape(beside(ids, table, xp=xp), (math.prod(ids.shape),))
    rows = xp.take(table, flat, axis=0)
    if scale != 1:
        with np.errstate(all="ignore"):
            rows = xp.astype(rows, compute_dtype(dtype, xp=xp), copy=False) * scale
    rows = rounded(rows, dtype, xp=xp)
    return xp.reshape(rows, (*ids.shape, table.shape[1])), EmbeddingSaved(table, ids, scale)


def embedding_backward(dout: Array, saved: EmbeddingSaved, /) -> EmbeddingGrads:
    """``dtable[v, :] = scale Σ dout[..., :]`` over the places whose id is v.

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
    table, ids, scale = saved
    xp = array_namespace("embedding_backward", table=table, dout=dout)
    dtype = float_dtype("embedding_backward", table=table)
    check_cotangent("embedding_backward", "dout", dout, "(..., C)", (*ids.shape, table.shape[1]), dtype)
    count = math.prod(ids.shape)
    rows = xp.reshape(xp.astype(dout, compute_dtype(dtype, xp=xp), copy=False), (count, table.shape[1]))
    if count == 0:
        return EmbeddingGrads(xp.zeros(table.shape, dtype=dtype, device=array_device(table)))
    flat = xp.reshape(beside(ids, table, xp=xp), (count,))
    with np.errstate(all="ignore"):
        dtable = _sum_by_id(rows, flat, table.shape[0], xp=xp)
        return EmbeddingGrads(xp.astype(dtable if scale == 1 else dtable * scale, dtype, copy=False))


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


class TiedLogitsSaved(NamedTuple):
    """What `tied_logits_backward` needs: two inputs, borrowed."""

    x: Array
    table: Array

    def __repr__(self) -> str:
        return tree_repr(self)


class TiedLogitsGrads(NamedTuple):
    """Gradients of `tied_logits`. The table's other gradient is that of `embedding`: they add."""

    dx: Array
    dtable: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def tied_logits(x: Array, table: Array, /) -> Array:
    """``x tableᵀ``; see `tied_logits_forward`."""
    return tied_logits_forward(x, table)[0]


def tied_logits_forward(x: Array, table: Array, /) -> tuple[Array, TiedLogitsSaved]:
    """``out[..., v] = Σ_c x[..., c] table[v, c]``: how well every row of an embedding's table fits.

    Parameters
    ----------
    x : float array (..., C)
        Any leading axes; each row is compared by itself.
    table : float array (V, C)
        The table of an embedding, used a second time.

    Returns
    -------
    out : array (..., V)
        Logits for `cross_entropy`, in the dtype of the inputs; float16 and bfloat16 are multiplied and summed in float32.
    saved : TiedLogitsSaved
        For `tied_logits_backward`. Borrows x and table, and holds nothing else.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    The linear map with the transposed table, whose gradient has the table's shape. Derivation: docs/derivation.md, "Embedding".

    References
    ----------
    Press, Wolf: Using the Output Embedding to Improve Language Models (2017).

    Examples
    --------
    >>> import numpy as np
    >>> tied_logits(np.asarray([1.0, 10.0]), np.asarray([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]))
    array([ 1., 10., 22.])
    """
    op = "tied_logits"
    xp = array_namespace(op, x=x, table=table)
    dtype = float_dtype(op, x=x, table=table)
    if x.ndim < 1:
        shape_error(op, "x", "(..., C)", x.shape)
    if table.ndim != 2 or table.shape[1] != x.shape[-1]:
        shape_error(op, "table", f"(V, C) with C = {x.shape[-1]} as x has", table.shape)
    out = rows_forward(as_rows(x, x.shape[-1], xp=xp), xp.matrix_transpose(table), None, xp=xp, dtype=dtype)
    return xp.reshape(out, (*x.shape[:-1], table.shape[0])), TiedLogitsSaved(x, table)


def tied_logits_backward(dout: Array, saved: TiedLogitsSaved, /) -> TiedLogitsGrads:
    """``dx = dout table``, ``dtable = doutᵀ x``.

    Parameters
    ----------
    dout : float array (..., V)
        The cotangent of out.
    saved : TiedLogitsSaved
        From `tied_logits_forward`.

    Returns
    -------
    TiedLogitsGrads
        ``dx`` and ``dtable``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, table = saved
    op = "tied_logits_backward"
    xp = array_namespace(op, x=x, dout=dout)
    dtype = float_dtype(op, x=x)
    check_cotangent(op, "dout", dout, "(..., V)", (*x.shape[:-1], table.shape[0]), dtype)
    drows, rows = as_rows(dout, table.shape[0], xp=xp), as_rows(x, table.shape[1], xp=xp)
    drows, rows, table = lift(drows, rows, table, xp=xp, dtype=dtype)
    # out = rows tableᵀ
    dx, dtable = multiply(Product(drows, table), Product(xp.matrix_transpose(drows), rows), xp=xp)
    return TiedLogitsGrads(xp.reshape(rounded(dx, dtype, xp=xp), x.shape), rounded(dtable, dtype, xp=xp))
