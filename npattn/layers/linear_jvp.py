"""Tangents of the linear maps: products of two things that both may move.

``op_jvp`` gives a result and how it answers to a small change of the inputs, ``op_backward_jvp`` how the gradients do. ``t…`` is
a tangent, and ``None`` stands for one of 0. The ops that are linear in their one input (embedding, rotate, dropout) need neither:
``op`` of the tangent is the tangent of out, and ``op_backward`` of dout's tangent is that of the gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from npattn._arrays.checks import check_cotangent, check_tangent
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, rounded
from npattn._arrays.products import Product, multiply
from npattn.layers.embedding import TiedLogitsGrads, TiedLogitsSaved, tied_logits
from npattn.layers.heads import (
    MergeHeadsGrads,
    MergeHeadsSaved,
    ProjectHeadsGrads,
    ProjectHeadsSaved,
    merge_heads,
    project_heads,
    swap_heads,
)
from npattn.layers.linear import LinearGrads, LinearSaved, as_rows, lift, linear


def linear_jvp(
    x: Array, w: Array, b: Array | None = None, /, *, tx: Array | None = None, tw: Array | None = None, tb: Array | None = None
) -> tuple[Array, Array]:
    """``out = x w + b`` and ``tout = tx w + x tw + tb``.

    Parameters
    ----------
    x : float array (..., C_in)
        As in `linear_forward`, and so are w and b.
    w : float array (C_in, C_out)
        The weights.
    b : float array (C_out,), optional
        The bias.
    tx, tw, tb : float arrays, optional
        The tangents of x, w and b, each in the shape and dtype of its input; 0 by default.

    Returns
    -------
    out : array (..., C_out)
        As from `linear`.
    tout : array (..., C_out)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias that is not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Tangents of layers".

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.asarray([[1.0, 2.0]]), np.asarray([[1.0], [10.0]])
    >>> linear_jvp(x, w, tx=np.asarray([[1.0, 0.0]]), tw=np.asarray([[0.0], [5.0]]))
    (array([[21.]]), array([[11.]]))
    """
    return linear(x, w, b), linear_tangent("linear_jvp", x, w, b, tx=tx, tw=tw, tb=tb)


def linear_tangent(
    op: str, x: Array, w: Array, b: Array | None, *, tx: Array | None, tw: Array | None, tb: Array | None
) -> Array:
    """The tangent of `linear`'s out alone."""
    xp = array_namespace(op, x=x)
    for name, t, of in (("x", tx, x), ("w", tw, w), ("b", tb, b)):
        check_tangent(op, name, t, of)
    width = w.shape[0]
    tout = _out_tangent(as_rows(x, width, xp=xp), w, _rows(tx, width, xp=xp), tw, tb, xp=xp, dtype=x.dtype)
    return xp.reshape(tout, (*x.shape[:-1], w.shape[1]))


def linear_backward_jvp(
    dout: Array,
    saved: LinearSaved,
    /,
    *,
    tdout: Array | None = None,
    tx: Array | None = None,
    tw: Array | None = None,
) -> LinearGrads:
    """``tdx = tdout wᵀ + dout twᵀ``, ``tdw = xᵀ tdout + txᵀ dout``, ``tdb = Σ_rows tdout``.

    Parameters
    ----------
    dout : float array (..., C_out)
        The cotangent of out.
    saved : LinearSaved
        From `linear_forward`.
    tdout, tx, tw : float arrays, optional
        The tangents of dout, x and w; 0 by default.

    Returns
    -------
    LinearGrads
        The tangents of dx, dw and db, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, w, has_b = saved
    op = "linear_backward_jvp"
    xp = array_namespace(op, x=x, dout=dout)
    _check(op, dout, tdout, "(..., C_out)", (*x.shape[:-1], w.shape[1]), x, tx, w, tw)
    drows, tdrows = (_rows(a, w.shape[1], xp=xp) for a in (dout, tdout))
    rows, trows = (_rows(a, w.shape[0], xp=xp) for a in (x, tx))
    tdx, tdw, tdb = _gradient_tangents(drows, rows, w, tdrows, trows, tw, has_b=has_b, xp=xp, dtype=x.dtype)
    return LinearGrads(xp.reshape(tdx, x.shape), tdw, tdb)


def project_heads_jvp(
    x: Array, w: Array, b: Array | None = None, /, *, tx: Array | None = None, tw: Array | None = None, tb: Array | None = None
) -> tuple[Array, Array]:
    """``out`` of `project_heads` and ``tout[..., h, t, :] = tx[..., t, :] w[:, h, :] + x[..., t, :] tw[:, h, :] + tb[h, :]``.

    Parameters
    ----------
    x : float array (..., T, C)
        As in `project_heads_forward`, and so are w and b.
    w : float array (C, H, D)
        One projection a head.
    b : float array (H, D), optional
        The biases.
    tx, tw, tb : float arrays, optional
        The tangents of x, w and b, each in the shape and dtype of its input; 0 by default.

    Returns
    -------
    out : array (..., H, T, D)
        As from `project_heads`.
    tout : array (..., H, T, D)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return project_heads(x, w, b), project_heads_tangent("project_heads_jvp", x, w, b, tx=tx, tw=tw, tb=tb)


def project_heads_tangent(
    op: str, x: Array, w: Array, b: Array | None, *, tx: Array | None, tw: Array | None, tb: Array | None
) -> Array:
    """The tangent of `project_heads`' out alone."""
    xp = array_namespace(op, x=x)
    for name, t, of in (("x", tx, x), ("w", tw, w), ("b", tb, b)):
        check_tangent(op, name, t, of)
    width, *heads = w.shape
    columns, tcolumns = (_reshaped(a, (width, math.prod(heads)), xp=xp) for a in (w, tw))
    flat_tb = _reshaped(tb, (math.prod(heads),), xp=xp)
    rows, trows = as_rows(x, width, xp=xp), _rows(tx, width, xp=xp)
    tout = _out_tangent(rows, columns, trows, tcolumns, flat_tb, xp=xp, dtype=x.dtype)
    return swap_heads(xp.reshape(tout, (*x.shape[:-1], *heads)), xp=xp)


def project_heads_backward_jvp(
    dout: Array,
    saved: ProjectHeadsSaved,
    /,
    *,
    tdout: Array | None = None,
    tx: Array | None = None,
    tw: Array | None = None,
) -> ProjectHeadsGrads:
    """The tangents of the gradients of `project_heads_backward`.

    Parameters
    ----------
    dout : float array (..., H, T, D)
        The cotangent of out.
    saved : ProjectHeadsSaved
        From `project_heads_forward`.
    tdout, tx, tw : float arrays, optional
        The tangents of dout, x and w; 0 by default.

    Returns
    -------
    ProjectHeadsGrads
        The tangents of dx, dw and db, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, w, has_b = saved
    width, *heads = w.shape
    op = "project_heads_backward_jvp"
    xp = array_namespace(op, x=x, dout=dout)
    _check(op, dout, tdout, "(..., H, T, D)", (*x.shape[:-2], heads[0], x.shape[-2], heads[1]), x, tx, w, tw)
    drows, tdrows = (None if a is None else as_rows(swap_heads(a, xp=xp), *heads, xp=xp) for a in (dout, tdout))
    columns, tcolumns = (_reshaped(a, (width, math.prod(heads)), xp=xp) for a in (w, tw))
    rows, trows = (_rows(a, width, xp=xp) for a in (x, tx))
    tdx, tdw, tdb = _gradient_tangents(drows, rows, columns, tdrows, trows, tcolumns, has_b=has_b, xp=xp, dtype=x.dtype)
    return ProjectHeadsGrads(xp.reshape(tdx, x.shape), xp.reshape(tdw, w.shape), _reshaped(tdb, tuple(heads), xp=xp))


def merge_heads_jvp(
    x: Array, w: Array, b: Array | None = None, /, *, tx: Array | None = None, tw: Array | None = None, tb: Array | None = None
) -> tuple[Array, Array]:
    """``out`` of `merge_heads` and ``tout[..., t, :] = Σ_h (tx[..., h, t, :] w[h, :, :] + x[..., h, t, :] tw[h, :, :]) + tb``.

    Parameters
    ----------
    x : float array (..., H, T, E)
        As in `merge_heads_forward`, and so are w and b.
    w : float array (H, E, C)
        The output projection.
    b : float array (C,), optional
        The bias.
    tx, tw, tb : float arrays, optional
        The tangents of x, w and b, each in the shape and dtype of its input; 0 by default.

    Returns
    -------
    out : array (..., T, C)
        As from `merge_heads`.
    tout : array (..., T, C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return merge_heads(x, w, b), merge_heads_tangent("merge_heads_jvp", x, w, b, tx=tx, tw=tw, tb=tb)


def merge_heads_tangent(
    op: str, x: Array, w: Array, b: Array | None, *, tx: Array | None, tw: Array | None, tb: Array | None
) -> Array:
    """The tangent of `merge_heads`' out alone."""
    xp = array_namespace(op, x=x)
    for name, t, of in (("x", tx, x), ("w", tw, w), ("b", tb, b)):
        check_tangent(op, name, t, of)
    *heads, width = w.shape
    rows, trows = (None if a is None else as_rows(swap_heads(a, xp=xp), *heads, xp=xp) for a in (x, tx))
    flat_w, flat_tw = (_reshaped(a, (math.prod(heads), width), xp=xp) for a in (w, tw))
    tout = _out_tangent(rows, flat_w, trows, flat_tw, tb, xp=xp, dtype=x.dtype)
    return xp.reshape(tout, (*x.shape[:-3], x.shape[-2], width))


def merge_heads_backward_jvp(
    dout: Array,
    saved: MergeHeadsSaved,
    /,
    *,
    tdout: Array | None = None,
    tx: Array | None = None,
    tw: Array | None = None,
) -> MergeHeadsGrads:
    """The tangents of the gradients of `merge_heads_backward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : MergeHeadsSaved
        From `merge_heads_forward`.
    tdout, tx, tw : float arrays, optional
        The tangents of dout, x and w; 0 by default.

    Returns
    -------
    MergeHeadsGrads
        The tangents of dx, dw and db, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, w, has_b = saved
    *heads, width = w.shape
    op = "merge_heads_backward_jvp"
    xp = array_namespace(op, x=x, dout=dout)
    _check(op, dout, tdout, "(..., T, C)", (*x.shape[:-3], x.shape[-2], width), x, tx, w, tw)
    drows, tdrows = (_rows(a, width, xp=xp) for a in (dout, tdout))
    rows, trows = (None if a is None else as_rows(swap_heads(a, xp=xp), *heads, xp=xp) for a in (x, tx))
    flat_w, flat_tw = (_reshaped(a, (math.prod(heads), width), xp=xp) for a in (w, tw))
    tdx, tdw, tdb = _gradient_tangents(drows, rows, flat_w, tdrows, trows, flat_tw, has_b=has_b, xp=xp, dtype=x.dtype)
    swapped = (*x.shape[:-3], x.shape[-2], *heads)
    return MergeHeadsGrads(swap_heads(xp.reshape(tdx, swapped), xp=xp), xp.reshape(tdw, w.shape), tdb)


def tied_logits_jvp(x: Array, table: Array, /, *, tx: Array | None = None, ttable: Array | None = None) -> tuple[Array, Array]:
    """``out = x tableᵀ`` and ``tout = tx tableᵀ + x ttableᵀ``.

    Parameters
    ----------
    x : float array (..., C)
        As in `tied_logits_forward`, and so is the table.
    table : float array (V, C)
        The table of an embedding.
    tx, ttable : float arrays, optional
        The tangents of x and table; 0 by default.

    Returns
    -------
    out : array (..., V)
        As from `tied_logits`.
    tout : array (..., V)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return tied_logits(x, table), tied_logits_tangent("tied_logits_jvp", x, table, tx=tx, ttable=ttable)


def tied_logits_tangent(op: str, x: Array, table: Array, *, tx: Array | None, ttable: Array | None) -> Array:
    """The tangent of `tied_logits`' out alone."""
    xp = array_namespace(op, x=x)
    for name, t, of in (("x", tx, x), ("table", ttable, table)):
        check_tangent(op, name, t, of)
    rows, trows = (_rows(a, table.shape[1], xp=xp) for a in (x, tx))
    w, tw = (None if a is None else xp.matrix_transpose(a) for a in (table, ttable))
    tout = _out_tangent(rows, w, trows, tw, None, xp=xp, dtype=x.dtype)
    return xp.reshape(tout, (*x.shape[:-1], table.shape[0]))


def tied_logits_backward_jvp(
    dout: Array,
    saved: TiedLogitsSaved,
    /,
    *,
    tdout: Array | None = None,
    tx: Array | None = None,
    ttable: Array | None = None,
) -> TiedLogitsGrads:
    """``tdx = tdout table + dout ttable``, ``tdtable = tdoutᵀ x + doutᵀ tx``.

    Parameters
    ----------
    dout : float array (..., V)
        The cotangent of out.
    saved : TiedLogitsSaved
        From `tied_logits_forward`.
    tdout, tx, ttable : float arrays, optional
        The tangents of dout, x and table; 0 by default.

    Returns
    -------
    TiedLogitsGrads
        The tangents of dx and dtable, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, table = saved
    op = "tied_logits_backward_jvp"
    xp = array_namespace(op, x=x, dout=dout)
    _check(op, dout, tdout, "(..., V)", (*x.shape[:-1], table.shape[0]), x, tx, None, None)
    check_tangent(op, "table", ttable, table)
    drows, tdrows = (_rows(a, table.shape[0], xp=xp) for a in (dout, tdout))
    rows, trows = (_rows(a, table.shape[1], xp=xp) for a in (x, tx))
    w, tw = (None if a is None else xp.matrix_transpose(a) for a in (table, ttable))
    tdx, tdw, _ = _gradient_tangents(drows, rows, w, tdrows, trows, tw, has_b=False, xp=xp, dtype=x.dtype)
    return TiedLogitsGrads(xp.reshape(tdx, x.shape), xp.matrix_transpose(tdw))


def _check(
    op: str,
    dout: Array,
    tdout: Array | None,
    letters: str,
    shape: tuple[int, ...],
    x: Array,
    tx: Array | None,
    w: Array | None,
    tw: Array | None,
) -> None:
    check_cotangent(op, "dout", dout, letters, shape, x.dtype)
    for name, t, of in (("dout", tdout, dout), ("x", tx, x), ("w", tw, w)):
        check_tangent(op, name, t, of)


def _rows(x: Array | None, width: int, *, xp: Namespace) -> Array | None:
    return None if x is None else as_rows(x, width, xp=xp)


def _reshaped(x: Array | None, shape: tuple[int, ...], *, xp: Namespace) -> Array | None:
    return None if x is None else xp.reshape(x, shape)


def _out_tangent(
    rows: Array, w: Array, trows: Array | None, tw: Array | None, tb: Array | None, *, xp: Namespace, dtype: Any
) -> Array:
    """The tangent of ``rows w + b`` for matrices."""
    rows, w, trows, tw, tb = lift(rows, w, trows, tw, tb, xp=xp, dtype=dtype)
    # out = rows w + b
    tout = _total([(trows, w), (rows, tw)], (rows.shape[0], w.shape[1]), like=rows, xp=xp)
    with np.errstate(all="ignore"):
        return xp.astype(tout if tb is None else tout + tb, dtype, copy=False)


def _gradient_tangents(
    drows: Array,
    rows: Array,
    w: Array,
    tdrows: Array | None,
    trows: Array | None,
    tw: Array | None,
    *,
    has_b: bool,
    xp: Namespace,
    dtype: Any,
) -> tuple[Array, Array, Array | None]:
    """The tangents of what ``rows_backward`` makes."""
    drows, rows, w, tdrows, trows, tw = lift(drows, rows, w, tdrows, trows, tw, xp=xp, dtype=dtype)

    def transposed(a: Array | None) -> Array | None:
        return None if a is None else xp.matrix_transpose(a)

    # dx = drows wᵀ, dw = rowsᵀ drows, db = Σ drows
    tdx = _total([(tdrows, transposed(w)), (drows, transposed(tw))], rows.shape, like=rows, xp=xp)
    tdw = _total([(transposed(rows), tdrows), (transposed(trows), drows)], w.shape, like=rows, xp=xp)
    tdb = None
    if has_b:
        with np.errstate(all="ignore"):
            tdb = _zeros((w.shape[1],), like=rows, xp=xp) if tdrows is None else xp.sum(tdrows, axis=0, dtype=tdrows.dtype)
    tdx, tdw = (rounded(x, dtype, xp=xp) for x in (tdx, tdw))
    return tdx, tdw, None if tdb is None else rounded(tdb, dtype, xp=xp)


def _total(pairs: list[tuple[Array | None, Array | None]], shape: tuple[int, ...], *, like: Array, xp: Namespace) -> Array:
    """The sum of products, of which those with a ``None`` are 0."""
    products = [Product(a, b) for a, b in pairs if a is not None and b is not None]
    if not products:
        return _zeros(shape, like=like, xp=xp)
    first, *others = multiply(*products, xp=xp)
    with np.errstate(all="ignore"):
        return first + others[0] if others else first


def _zeros(shape: tuple[int, ...], *, like: Array, xp: Namespace) -> Array:
    return xp.zeros(tuple(shape), dtype=like.dtype, device=array_device(like))
