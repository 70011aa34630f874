"""The linear map: ``out = x w + b``, weights on the right as in the papers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_cotangent, shape_error
from npattn._arrays.namespace import Array, Namespace, array_namespace, compute_dtype, float_dtype, rounded
from npattn._arrays.products import Product, multiply
from npattn._arrays.trees import tree_repr


class LinearSaved(NamedTuple):
    """What `linear_backward` needs: two inputs, borrowed."""

    x: Array
    w: Array
    has_b: bool

    def __repr__(self) -> str:
        return tree_repr(self)


class LinearGrads(NamedTuple):
    """Gradients of `linear`, each in the shape and dtype of its input; ``None`` for a bias that was not given."""

    dx: Array
    dw: Array
    db: Array | None

    def __repr__(self) -> str:
        return tree_repr(self)


def linear(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """``x @ w + b``; see `linear_forward`."""
    return linear_forward(x, w, b)[0]


def linear_forward(x: Array, w: Array, b: Array | None = None, /) -> tuple[Array, LinearSaved]:
    """``out = x w + b``, the same map for every row.

    Parameters
    ----------
    x : float array (..., C_in)
        Any leading axes; each row is mapped by itself.
    w : float array (C_in, C_out)
        The weights. (PyTorch's ``Linear.weight`` is the transpose.)
    b : float array (C_out,), optional
        The bias.

    Returns
    -------
    out : array (..., C_out)
        In the dtype of the inputs; float16 and bfloat16 are multiplied and summed in float32.
    saved : LinearSaved
        For `linear_backward`. Borrows x and w, and holds nothing else.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Linear".

    Examples
    --------
    >>> import numpy as np
    >>> x, w, b = np.asarray([[1.0, 2.0]]), np.asarray([[1.0, 0.0, 3.0], [0.0, 1.0, 4.0]]), np.asarray([0.0, 0.5, 0.0])
    >>> linear(x, w, b)
    array([[ 1. ,  2.5, 11. ]])
    """
    xp = array_namespace("linear", x=x, w=w, b=b)
    dtype = float_dtype("linear", x=x, w=w, b=b)
    if x.ndim < 1:
        shape_error("linear", "x", "(..., C_in)", x.shape)
    width = x.shape[-1]
    if w.ndim != 2 or w.shape[0] != width:
        shape_error("linear", "w", f"(C_in, C_out) with C_in = {width} as x has", w.shape, _transposed(w, width))
    if b is not None and tuple(b.shape) != (w.shape[1],):
        shape_error("linear", "b", f"(C_out,) with C_out = {w.shape[1]} as w has", b.shape)
    out = rows_forward(as_rows(x, width, xp=xp), w, b, xp=xp, dtype=dtype)
    return xp.reshape(out, (*x.shape[:-1], w.shape[1])), LinearSaved(x, w, b is not None)


def linear_backward(dout: Array, saved: LinearSaved, /) -> LinearGrads:
    """``dx = dout wᵀ``, ``dw = xᵀ dout``, ``db = Σ_rows dout``.

    Parameters
    ----------
    dout : float array (..., C_out)
        The cotangent of out.
    saved : LinearSaved
        From `linear_forward`.

    Returns
    -------
    LinearGrads
        ``dx``, ``dw`` and ``db`` (``None`` if there was no bias).

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, w, has_b = saved
    xp = array_namespace("linear_backward", x=x, dout=dout)
    dtype = float_dtype("linear_backward", x=x)
    check_cotangent("linear_backward", "dout", dout, "(..., C_out)", (*x.shape[:-1], w.shape[1]), dtype)
    drows = as_rows(dout, w.shape[1], xp=xp)
    grads = rows_backward(drows, as_rows(x, w.shape[0], xp=xp), w, has_b=has_b, xp=xp, dtype=dtype)
    return grads._replace(dx=xp.reshape(grads.dx, x.shape))


def as_rows(x: Array, *row: int, xp: Namespace) -> Array:
    """``x`` as a matrix of rows, one product for all: (R, C), where a row is the last axes of shape ``row``."""
    return xp.reshape(x, (math.prod(x.shape[: x.ndim - len(row)]), math.prod(row)))


def rows_forward(rows: Array, w: Array, b: Array | None, *, xp: Namespace, dtype: Any) -> Array:
    """``rows w + b`` for matrices (R, C_in) and (C_in, C_out), computed in ``dtype`` or better."""
    (out,) = multiply(Product(*lift(rows, w, b, xp=xp, dtype=dtype)), xp=xp)
    return rounded(out, dtype, xp=xp)


def rows_backward(drows: Array, rows: Array, w: Array, *, has_b: bool, xp: Namespace, dtype: Any) -> LinearGrads:
    """The gradients of ``rows_forward``."""
    drows, rows, w = lift(drows, rows, w, xp=xp, dtype=dtype)
    # out = rows w + b
    dx, dw = multiply(Product(drows, xp.matrix_transpose(w)), Product(xp.matrix_transpose(rows), drows), xp=xp)
    with np.errstate(all="ignore"):
        db = xp.sum(drows, axis=0, dtype=drows.dtype) if has_b else None
        return LinearGrads(*(None if g is None else xp.astype(g, dtype, copy=False) for g in (dx, dw, db)))


def lift(*arrays: Array | None, xp: Namespace, dtype: Any) -> list[Array]:
    """The arrays in the dtype that products of ``dtype`` are computed in."""
    compute = compute_dtype(dtype, xp=xp)
    return [None if a is None else xp.astype(a, compute, copy=False) for a in arrays]


def _transposed(w: Array, width: int) -> str:
    return "weights multiply from the right, x @ w: transpose w" if w.ndim == 2 and w.shape[1] == width else ""
