"""Into heads and out of them: "several heads" is one more axis of the weights, and nothing else.

Both are one linear map (``npattn.layers.linear``) with the head axis folded into the columns or the rows of its weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from npattn._arrays.checks import check_cotangent, shape_error
from npattn._arrays.namespace import Array, Namespace, array_namespace, float_dtype
from npattn._arrays.trees import tree_repr
from npattn.layers.linear import as_rows, rows_backward, rows_forward


class ProjectHeadsSaved(NamedTuple):
    """What `project_heads_backward` needs: two inputs, borrowed."""

    x: Array
    w: Array
    has_b: bool

    def __repr__(self) -> str:
        return tree_repr(self)


class ProjectHeadsGrads(NamedTuple):
    """Gradients of `project_heads`, each in the shape and dtype of its input; ``None`` for a bias that was not given."""

    dx: Array
    dw: Array
    db: Array | None

    def __repr__(self) -> str:
        return tree_repr(self)


def project_heads(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """Project every row to the vectors of H heads; see `project_heads_forward`."""
    return project_heads_forward(x, w, b)[0]


def project_heads_forward(x: Array, w: Array, b: Array | None = None, /) -> tuple[Array, ProjectHeadsSaved]:
    """``out[..., h, t, :] = x[..., t, :] w[:, h, :] + b[h, :]``.

    Parameters
    ----------
    x : float array (..., T, C)
        The sequence that queries, keys or values are made of.
    w : float array (C, H, D)
        One projection a head.
    b : float array (H, D), optional
        The biases.

    Returns
    -------
    out : array (..., H, T, D)
        In the dtype of the inputs; float16 and bfloat16 are multiplied and summed in float32. Its memory is that of one
        product (..., T, H, D), seen with the head axis in front.
    saved : ProjectHeadsSaved
        For `project_heads_backward`. Borrows x and w, and holds nothing else.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    merge_heads_forward : The way back.

    Notes
    -----
    Derivation: docs/derivation.md, "Heads".

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.2.2; its W_i^Q is ``w[:, i, :]``.

    Examples
    --------
    >>> import numpy as np
    >>> project_heads(np.ones((2, 5, 3)), np.ones((3, 4, 7))).shape
    (2, 4, 5, 7)
    """
    xp = array_namespace("project_heads", x=x, w=w, b=b)
    dtype = float_dtype("project_heads", x=x, w=w, b=b)
    if x.ndim < 2:
        shape_error("project_heads", "x", "(..., T, C)", x.shape)
    width = x.shape[-1]
    if w.ndim != 3 or w.shape[0] != width:
        shape_error("project_heads", "w", f"(C, H, D) with C = {width} as x has", w.shape)
    heads = tuple(w.shape[1:])
    if b is not None and tuple(b.shape) != heads:
        shape_error("project_heads", "b", f"(H, D) = {heads} as w has", b.shape)
    columns = xp.reshape(w, (width, math.prod(heads)))
    flat_b = None if b is None else xp.reshape(b, (math.prod(heads),))
    out = rows_forward(as_rows(x, width, xp=xp), columns, flat_b, xp=xp, dtype=dtype)
    return swap_heads(xp.reshape(out, (*x.shape[:-1], *heads)), xp=xp), ProjectHeadsSaved(x, w, b is not None)


def project_heads_backward(dout: Array, saved: ProjectHeadsSaved, /) -> ProjectHeadsGrads:
    """``dx = Σ_h dout_h w_hᵀ``, ``dw_h = xᵀ dout_h``, ``db = Σ_rows dout``.

    Parameters
    ----------
    dout : float array (..., H, T, D)
        The cotangent of out.
    saved : ProjectHeadsSaved
        From `project_heads_forward`.

    Returns
    -------
    ProjectHeadsGrads
        ``dx``, ``dw`` and ``db`` (``None`` if there was no bias).

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, w, has_b = saved
    width, *heads = w.shape
    xp = array_namespace("project_heads_backward", x=x, dout=dout)
    dtype = float_dtype("project_heads_backward", x=x)
    shape = (*x.shape[:-2], heads[0], x.shape[-2], heads[1])
    check_cotangent("project_heads_backward", "dout", dout, "(..., H, T, D)", shape, dtype)
    drows = as_rows(swap_heads(dout, xp=xp), *heads, xp=xp)
    columns = xp.reshape(w, (width, math.prod(heads)))
    dx, dw, db = rows_backward(drows, as_rows(x, width, xp=xp), columns, has_b=has_b, xp=xp, dtype=dtype)
    return ProjectHeadsGrads(
        xp.reshape(dx, x.shape), xp.reshape(dw, w.shape), None if db is None else xp.reshape(db, tuple(heads))
    )


class MergeHeadsSaved(NamedTuple):
    """What `merge_heads_backward` needs: two inputs, borrowed."""

    x: Array
    w: Array
    has_b: bool

    def __repr__(self) -> str:
        return tree_repr(self)


class MergeHeadsGrads(NamedTuple):
    """Gradients of `merge_heads`, each in the shape and dtype of its input; ``None`` for a bias that was not given."""

    dx: Array
    dw: Array
    db: Array | None

    def __repr__(self) -> str:
        return tree_repr(self)


def merge_heads(x: Array, w: Array, b: Array | None = None, /) -> Array:
    """Mix the vectors of H heads into one row; see `merge_heads_forward`."""
    return merge_heads_forward(x, w, b)[0]


def merge_heads_forward(x: Array, w: Array, b: Array | None = None, /) -> tuple[Array, MergeHeadsSaved]:
    """``out[..., t, :] = Σ_h x[..., h, t, :] w[h, :, :] + b``: the heads concatenated and multiplied by W_O.

    Parameters
    ----------
    x : float array (..., H, T, E)
        What the heads found.
    w : float array (H, E, C)
        The output projection.
    b : float array (C,), optional
        The bias.

    Returns
    -------
    out : array (..., T, C)
        In the dtype of the inputs; float16 and bfloat16 are multiplied and summed in float32.
    saved : MergeHeadsSaved
        For `merge_heads_backward`. Borrows x and w, and holds nothing else.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    project_heads_forward : The way into heads.

    Notes
    -----
    Derivation: docs/derivation.md, "Heads".

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.2.2; its W^O is ``w`` with the first two axes as one.

    Examples
    --------
    >>> import numpy as np
    >>> merge_heads(np.ones((2, 4, 5, 7)), np.ones((4, 7, 3))).shape
    (2, 5, 3)
    """
    xp = array_namespace("merge_heads", x=x, w=w, b=b)
    dtype = float_dtype("merge_heads", x=x, w=w, b=b)
    if x.ndim < 3:
        shape_error("merge_heads", "x", "(..., H, T, E)", x.shape)
    heads = (x.shape[-3], x.shape[-1])
    if w.ndim != 3 or tuple(w.shape[:2]) != heads:
        shape_error("merge_heads", "w", f"(H, E, C) with H, E = {heads[0]}, {heads[1]} as x has", w.shape)
    width = w.shape[2]
    if b is not None and tuple(b.shape) != (width,):
        shape_error("merge_heads", "b", f"(C,) with C = {width} as w has", b.shape)
    rows = as_rows(swap_heads(x, xp=xp), *heads, xp=xp)
    out = rows_forward(rows, xp.reshape(w, (math.prod(heads), width)), b, xp=xp, dtype=dtype)
    return xp.reshape(out, (*x.shape[:-3], x.shape[-2], width)), MergeHeadsSaved(x, w, b is not None)


def merge_heads_backward(dout: Array, saved: MergeHeadsSaved, /) -> MergeHeadsGrads:
    """``dx_h = dout w_hᵀ``, ``dw_h = x_hᵀ dout``, ``db = Σ_rows dout``.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : MergeHeadsSaved
        From `merge_heads_forward`.

    Returns
    -------
    MergeHeadsGrads
        ``dx``, ``dw`` and ``db`` (``None`` if there was no bias).

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, w, has_b = saved
    *heads, width = w.shape
    xp = array_namespace("merge_heads_backward", x=x, dout=dout)
    dtype = float_dtype("merge_heads_backward", x=x)
    check_cotangent("merge_heads_backward", "dout", dout, "(..., T, C)", (*x.shape[:-3], x.shape[-2], width), dtype)
    swapped = swap_heads(x, xp=xp)
    rows = as_rows(swapped, *heads, xp=xp)
    flat_w = xp.reshape(w, (math.prod(heads), width))
    drows = as_rows(dout, width, xp=xp)
    dx, dw, db = rows_backward(drows, rows, flat_w, has_b=has_b, xp=xp, dtype=dtype)
    return MergeHeadsGrads(swap_heads(xp.reshape(dx, swapped.shape), xp=xp), xp.reshape(dw, w.shape), db)


def swap_heads(x: Array, *, xp: Namespace) -> Array:
    """(..., H, T, D) as (..., T, H, D), and back: the axes change places, nothing is copied."""
    lead = tuple(range(x.ndim - 3))
    return xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))
