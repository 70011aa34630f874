"""Layer norm and RMS norm: rows brought to one size, then scaled (and moved) feature by feature.

A row is what runs along the last axis, or along several. Both save the input, borrowed, and one or two numbers a row.
"""

from __future__ import annotations

from typing import NamedTuple

from npattn._arrays.blocks import map_rows
from npattn._arrays.namespace import Array, compute_dtype
from npattn._arrays.trees import tree_repr
from npattn.layers._features import (
    Axes,
    centred_rows,
    check_norm,
    check_norm_backward,
    from_rows,
    per_feature,
    row_mean,
    to_features,
    to_rows,
)


class LayerNormSaved(NamedTuple):
    """What `layer_norm_backward` needs: x and weight, borrowed; of every row its mean and 1/std, with the axes kept."""

    x: Array
    weight: Array | None
    has_bias: bool
    axes: tuple[int, ...]
    mean: Array
    rstd: Array

    def __repr__(self) -> str:
        return tree_repr(self)


class LayerNormGrads(NamedTuple):
    """Gradients of `layer_norm`, each in the shape and dtype of its input; ``None`` for what was not given."""

    dx: Array
    dweight: Array | None
    dbias: Array | None

    def __repr__(self) -> str:
        return tree_repr(self)


def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, /, *, eps: float = 1e-5, axes: Axes = -1
) -> Array:
    """``(x - mean) / std * weight + bias``; see `layer_norm_forward`."""
    return layer_norm_forward(x, weight, bias, eps=eps, axes=axes)[0]


def layer_norm_forward(
    x: Array, weight: Array | None = None, bias: Array | None = None, /, *, eps: float = 1e-5, axes: Axes = -1
) -> tuple[Array, LayerNormSaved]:
    """``out = (x - mean) / √(variance + eps) * weight + bias``: every row gets mean 0 and variance 1, before weight and bias.

    Parameters
    ----------
    x : float array (..., C)
        Any leading axes; each row is normalised by itself.
    weight, bias : float array (C,), optional
        Factors and shifts of the features; in the shape of the axes, in x's order, where they are several.
    eps : float, optional
        Added to the variance, inside the root; at least 0. With 0, a row of equal numbers becomes NaN.
    axes : int or sequence of int, optional
        What a row runs along.

    Returns
    -------
    out : array (..., C)
        In x's shape and dtype; float16 and bfloat16 are computed in float32.
    saved : LayerNormSaved
        For `layer_norm_backward`. Borrows x and weight, and holds two numbers a row.

    Raises
    ------
    ValueError
        If shapes do not fit, an axis does not exist or is named twice, or eps is negative.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    rms_norm_forward : Without the mean.

    Notes
    -----
    The variance is the mean of squared distances (divided by C, not C - 1). It is taken in a second pass, after the mean, and the
    mean is corrected: numbers that are large beside their differences lose nothing. Derivation: docs/derivation.md, "Layer norm".

    References
    ----------
    Ba, Kiros, Hinton: Layer Normalization (2016), equations 3 and 4.

    Examples
    --------
    >>> import numpy as np
    >>> layer_norm(np.asarray([[1.0, 0.0, 0.0, 0.0]])).round(4)
    array([[ 1.732 , -0.5773, -0.5773, -0.5773]])
    """
    xp, dtype, eps, axes = check_norm("layer_norm", x, weight, bias, eps, axes)
    compute = compute_dtype(dtype, xp=xp)
    factors, shifts = (per_feature(a, compute, xp=xp) for a in (weight, bias))

    def rows_forward(rows: Array) -> tuple[Array, ...]:
        rows = xp.astype(rows, compute, copy=False)
        mean = row_mean(rows, xp=xp)
        centred = centred_rows(rows, mean, xp=xp)
        rstd = 1 / xp.sqrt(row_mean(centred, centred, xp=xp) + eps)
        out = centred * rstd
        out = out if factors is None else out * factors
        out = out if shifts is None else out + shifts
        return xp.astype(out, dtype, copy=False), mean, rstd

    out, mean, rstd = map_rows(rows_forward, to_rows(x, axes, xp=xp), xp=xp)
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    saved = LayerNormSaved(x, weight, bias is not None, axes, xp.reshape(mean, kept), xp.reshape(rstd, kept))
    return from_rows(out, x.shape, axes, xp=xp), saved


def layer_norm_backward(dout: Array, saved: LayerNormSaved, /) -> LayerNormGrads:
    """``dx = (dnormal - mean(dnormal) - normal mean(dnormal normal)) / std``, with ``dnormal = dout weight``.

    ``normal`` is ``(x - mean) / std``; ``dweight = Σ_rows dout normal``, ``dbias = Σ_rows dout``.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : LayerNormSaved
        From `layer_norm_forward`.

    Returns
    -------
    LayerNormGrads
        ``dx``, ``dweight`` and ``dbias``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, weight, has_bias, axes, mean, rstd = saved
    xp, dtype = check_norm_backward("layer_norm_backward", dout, x)
    compute = rstd.dtype
    factors = per_feature(weight, compute, xp=xp)

    def rows_backward(dout: Array, rows: Array, mean: Array, rstd: Array) -> tuple[Array | None, ...]:
        dout, rows = (xp.astype(a, compute, copy=False) for a in (dout, rows))
        normal = centred_rows(rows, mean, xp=xp) * rstd
        # out = normal * weight + bias
        dbias = xp.sum(dout, axis=0, dtype=compute) if has_bias else None
        dweight = None if factors is None else xp.sum(dout * normal, axis=0, dtype=compute)
        dnormal = dout if factors is None else dout * factors
        # normal = (x - mean) / √(variance + eps)
        along_normal = row_mean(dnormal, normal, xp=xp)
        dx = (dnormal - row_mean(dnormal, xp=xp) - normal * along_normal) * rstd
        return xp.astype(dx, dtype, copy=False), dweight, dbias

    arrays = [to_rows(a, axes, xp=xp) for a in (dout, x, mean, rstd)]
    dx, dweight, dbias = map_rows(rows_backward, *arrays, xp=xp, totals=2)
    shape = tuple(x.shape[axis] for axis in axes)
    return LayerNormGrads(from_rows(dx, x.shape, axes, xp=xp), *(to_features(g, shape, dtype, xp=xp) for g in (dweight, dbias)))


class RmsNormSaved(NamedTuple):
    """What `rms_norm_backward` needs: x and weight, borrowed; of every row 1/rms, with the axes kept."""

    x: Array
    weight: Array | None
    axes: tuple[int, ...]
    rrms: Array

    def __repr__(self) -> str:
        return tree_repr(self)


class RmsNormGrads(NamedTuple):
    """Gradients of `rms_norm`; ``dweight`` is ``None`` if there was no weight."""

    dx: Array
    dweight: Array | None

    def __repr__(self) -> str:
        return tree_repr(self)


def rms_norm(x: Array, weight: Array | None = None, /, *, eps: float = 1e-6, axes: Axes = -1) -> Array:
    """``x / rms * weight``; see `rms_norm_forward`."""
    return rms_norm_forward(x, weight, eps=eps, axes=axes)[0]


def rms_norm_forward(
    x: Array, weight: Array | None = None, /, *, eps: float = 1e-6, axes: Axes = -1
) -> tuple[Array, RmsNormSaved]:
    """``out = x / √(mean of x² + eps) * weight``: every row gets a mean square of 1, before the weight.

    Parameters
    ----------
    x : float array (..., C)
        Any leading axes; each row is normalised by itself.
    weight : float array (C,), optional
        Factors of the features; in the shape of the axes, in x's order, where they are several.
    eps : float, optional
        Added to the mean square, inside the root; at least 0. With 0, a row of zeros becomes NaN.
    axes : int or sequence of int, optional
        What a row runs along.

    Returns
    -------
    out : array (..., C)
        In x's shape and dtype; float16 and bfloat16 are computed in float32.
    saved : RmsNormSaved
        For `rms_norm_backward`. Borrows x and weight, and holds one number a row.

    Raises
    ------
    ValueError
        If shapes do not fit, an axis does not exist or is named twice, or eps is negative.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    layer_norm_forward : With the mean.

    Notes
    -----
    Derivation: docs/derivation.md, "RMS norm".

    References
    ----------
    Zhang, Sennrich: Root Mean Square Layer Normalization (2019), equation 4.

    Examples
    --------
    >>> import numpy as np
    >>> rms_norm(np.asarray([[3.0, -4.0, 0.0, 0.0]])).round(4)
    array([[ 1.2, -1.6,  0. ,  0. ]])
    """
    xp, dtype, eps, axes = check_norm("rms_norm", x, weight, None, eps, axes)
    compute = compute_dtype(dtype, xp=xp)
    factors = per_feature(weight, compute, xp=xp)

    def rows_forward(rows: Array) -> tuple[Array, ...]:
        rows = xp.astype(rows, compute, copy=False)
        rrms = 1 / xp.sqrt(row_mean(rows, rows, xp=xp) + eps)
        out = rows * rrms
        return xp.astype(out if factors is None else out * factors, dtype, copy=False), rrms

    out, rrms = map_rows(rows_forward, to_rows(x, axes, xp=xp), xp=xp)
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(x.shape))
    return from_rows(out, x.shape, axes, xp=xp), RmsNormSaved(x, weight, axes, xp.reshape(rrms, kept))


def rms_norm_backward(dout: Array, saved: RmsNormSaved, /) -> RmsNormGrads:
    """``dx = (dnormal - normal mean(dnormal normal)) / rms``, with ``normal = x / rms`` and ``dnormal = dout weight``.

    ``dweight = Σ_rows dout normal``.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : RmsNormSaved
        From `rms_norm_forward`.

    Returns
    -------
    RmsNormGrads
        ``dx`` and ``dweight``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    x, weight, axes, rrms = saved
    xp, dtype = check_norm_backward("rms_norm_backward", dout, x)
    compute = rrms.dtype
    factors = per_feature(weight, compute, xp=xp)

    def rows_backward(dout: Array, rows: Array, rrms: Array) -> tuple[Array | None, ...]:
        dout, rows = (xp.astype(a, compute, copy=False) for a in (dout, rows))
        normal = rows * rrms
        # out = normal * weight
        dweight = None if factors is None else xp.sum(dout * normal, axis=0, dtype=compute)
        dnormal = dout if factors is None else dout * factors
        # normal = x / √(mean of x² + eps)
        dx = (dnormal - normal * row_mean(dnormal, normal, xp=xp)) * rrms
        return xp.astype(dx, dtype, copy=False), dweight

    arrays = [to_rows(a, axes, xp=xp) for a in (dout, x, rrms)]
    dx, dweight = map_rows(rows_backward, *arrays, xp=xp, totals=1)
    shape = tuple(x.shape[axis] for axis in axes)
    return RmsNormGrads(from_rows(dx, x.shape, axes, xp=xp), to_features(dweight, shape, dtype, xp=xp))
