"""Tangents of layer norm and RMS norm, of results and of gradients."""

from __future__ import annotations

from typing import Any

from npattn._arrays.blocks import map_rows
from npattn._arrays.checks import check_tangent
from npattn._arrays.namespace import Array, Namespace, array_namespace
from npattn.layers._features import (
    Axes,
    centred_rows,
    check_norm_backward,
    from_rows,
    per_feature,
    row_mean,
    to_features,
    to_rows,
)
from npattn.layers.norm import (
    LayerNormGrads,
    LayerNormSaved,
    RmsNormGrads,
    RmsNormSaved,
    layer_norm_forward,
    rms_norm_forward,
)


def layer_norm_jvp(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    /,
    *,
    tx: Array | None = None,
    tweight: Array | None = None,
    tbias: Array | None = None,
    eps: float = 1e-5,
    axes: Axes = -1,
) -> tuple[Array, Array]:
    """``out`` of `layer_norm` and ``tout = tnormal weight + normal tweight + tbias``.

    Here ``tnormal = (tx - mean(tx) - normal mean(normal tx)) / std``.

    Parameters
    ----------
    x : float array (..., C)
        As in `layer_norm_forward`, and so are the others.
    weight, bias : float array (C,), optional
        Factors and shifts of the features.
    tx, tweight, tbias : float arrays, optional
        The tangents of x, weight and bias, each in the shape and dtype of its input; 0 by default.
    eps : float, optional
        Added to the variance.
    axes : int or sequence of int, optional
        What a row runs along.

    Returns
    -------
    out : array (..., C)
        As from `layer_norm`.
    tout : array (..., C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of what is not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Tangents of layers".

    Examples
    --------
    Moving all numbers of a row by the same amount changes nothing.

    >>> import numpy as np
    >>> out, tout = layer_norm_jvp(np.asarray([1.0, 2.0, 4.0]), tx=np.ones(3))
    >>> bool(abs(tout).max() < 1e-15)
    True
    """
    out, saved = layer_norm_forward(x, weight, bias, eps=eps, axes=axes)
    for name, t, of in (("x", tx, x), ("weight", tweight, weight), ("bias", tbias, bias)):
        check_tangent("layer_norm_jvp", name, t, of)
    return out, layer_norm_tangent(saved, tx=tx, tweight=tweight, tbias=tbias)


def layer_norm_tangent(saved: LayerNormSaved, *, tx: Array | None, tweight: Array | None, tbias: Array | None) -> Array:
    """The tangent of `layer_norm`'s out, from what forward saved."""
    xp = array_namespace("layer_norm_jvp", x=saved.x)
    return _out_tangent(_Rows.of_layer_norm(saved, tx, tweight, xp), tbias)


def layer_norm_backward_jvp(
    dout: Array,
    saved: LayerNormSaved,
    /,
    *,
    tdout: Array | None = None,
    tx: Array | None = None,
    tweight: Array | None = None,
) -> LayerNormGrads:
    """The tangents of the gradients of `layer_norm_backward`.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : LayerNormSaved
        From `layer_norm_forward`.
    tdout, tx, tweight : float arrays, optional
        The tangents of dout, x and weight; 0 by default.

    Returns
    -------
    LayerNormGrads
        The tangents of dx, dweight and dbias, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a weight that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "layer_norm_backward_jvp"
    xp, _ = check_norm_backward(op, dout, saved.x)
    for name, t, of in (("dout", tdout, dout), ("x", tx, saved.x), ("weight", tweight, saved.weight)):
        check_tangent(op, name, t, of)
    tdx, tdweight, tdbias = _gradient_tangents(_Rows.of_layer_norm(saved, tx, tweight, xp), dout, tdout)
    return LayerNormGrads(tdx, tdweight, tdbias if saved.has_bias else None)


def rms_norm_jvp(
    x: Array,
    weight: Array | None = None,
    /,
    *,
    tx: Array | None = None,
    tweight: Array | None = None,
    eps: float = 1e-6,
    axes: Axes = -1,
) -> tuple[Array, Array]:
    """``out`` of `rms_norm` and ``tout = tnormal weight + normal tweight``, ``tnormal = (tx - normal mean(normal tx)) / rms``.

    Parameters
    ----------
    x : float array (..., C)
        As in `rms_norm_forward`, and so are the others.
    weight : float array (C,), optional
        Factors of the features.
    tx, tweight : float arrays, optional
        The tangents of x and weight, each in the shape and dtype of its input; 0 by default.
    eps : float, optional
        Added to the mean square.
    axes : int or sequence of int, optional
        What a row runs along.

    Returns
    -------
    out : array (..., C)
        As from `rms_norm`.
    tout : array (..., C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a weight that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    out, saved = rms_norm_forward(x, weight, eps=eps, axes=axes)
    for name, t, of in (("x", tx, x), ("weight", tweight, weight)):
        check_tangent("rms_norm_jvp", name, t, of)
    return out, rms_norm_tangent(saved, tx=tx, tweight=tweight)


def rms_norm_tangent(saved: RmsNormSaved, *, tx: Array | None, tweight: Array | None) -> Array:
    """The tangent of `rms_norm`'s out, from what forward saved."""
    xp = array_namespace("rms_norm_jvp", x=saved.x)
    return _out_tangent(_Rows.of_rms_norm(saved, tx, tweight, xp), None)


def rms_norm_backward_jvp(
    dout: Array,
    saved: RmsNormSaved,
    /,
    *,
    tdout: Array | None = None,
    tx: Array | None = None,
    tweight: Array | None = None,
) -> RmsNormGrads:
    """The tangents of the gradients of `rms_norm_backward`.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : RmsNormSaved
        From `rms_norm_forward`.
    tdout, tx, tweight : float arrays, optional
        The tangents of dout, x and weight; 0 by default.

    Returns
    -------
    RmsNormGrads
        The tangents of dx and dweight, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a weight that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "rms_norm_backward_jvp"
    xp, _ = check_norm_backward(op, dout, saved.x)
    for name, t, of in (("dout", tdout, dout), ("x", tx, saved.x), ("weight", tweight, saved.weight)):
        check_tangent(op, name, t, of)
    tdx, tdweight, _ = _gradient_tangents(_Rows.of_rms_norm(saved, tx, tweight, xp), dout, tdout)
    return RmsNormGrads(tdx, tdweight)


class _Rows:
    """What both norms have in common: rows that become ``normal`` by a factor of their own, once their mean is away or not."""

    def __init__(
        self,
        x: Array,
        axes: tuple[int, ...],
        mean: Array | None,
        factor: Array,
        weight: Array | None,
        tx: Array | None,
        tweight: Array | None,
        xp: Namespace,
    ) -> None:
        self.shape, self.axes, self.xp, self.dtype, self.compute = x.shape, axes, xp, x.dtype, factor.dtype
        self.x, self.mean, self.factor, self.tx = (None if a is None else to_rows(a, axes, xp=xp) for a in (x, mean, factor, tx))
        self.weight, self.tweight = (per_feature(a, self.compute, xp=xp) for a in (weight, tweight))

    @classmethod
    def of_layer_norm(cls, saved: LayerNormSaved, tx: Array | None, tweight: Array | None, xp: Namespace) -> _Rows:
        return cls(saved.x, saved.axes, saved.mean, saved.rstd, saved.weight, tx, tweight, xp)

    @classmethod
    def of_rms_norm(cls, saved: RmsNormSaved, tx: Array | None, tweight: Array | None, xp: Namespace) -> _Rows:
        return cls(saved.x, saved.axes, None, saved.rrms, saved.weight, tx, tweight, xp)

    def map(self, f: Any, *arrays: Array | None, totals: int = 0) -> tuple[Any, ...]:
        """``f`` of rows of x, mean, factor, tx and the arrays, in the dtype of the computation; ``None`` stays ``None``."""
        given = [
            self.x,
            self.mean,
            self.factor,
            self.tx,
            *(None if a is None else to_rows(a, self.axes, xp=self.xp) for a in arrays),
        ]
        there = [n for n, a in enumerate(given) if a is not None]

        def block(*parts: Array) -> Any:
            rows: list[Array | None] = [None] * len(given)
            for n, part in zip(there, parts, strict=True):
                rows[n] = self.xp.astype(part, self.compute, copy=False)
            return f(*rows)

        return map_rows(block, *(given[n] for n in there), xp=self.xp, totals=totals)

    def normal(self, x: Array, mean: Array | None, factor: Array) -> Array:
        return (x if mean is None else centred_rows(x, mean, xp=self.xp)) * factor

    def centred(self, t: Array, mean: Array | None) -> Array:
        return t if mean is None else t - row_mean(t, xp=self.xp)

    def result(self, rows: Array) -> Array:
        return from_rows(rows, self.shape, self.axes, xp=self.xp)


def _out_tangent(rows: _Rows, tbias: Array | None) -> Array:
    xp = rows.xp
    shifts = per_feature(tbias, rows.compute, xp=xp)

    def block(x: Array, mean: Array | None, factor: Array, tx: Array | None) -> tuple[Array]:
        normal = rows.normal(x, mean, factor)
        tout = xp.zeros_like(normal)
        if tx is not None:
            # normal = (x - mean) factor, factor = 1 / √(mean of (x - mean)² + eps)
            moved = rows.centred(tx, mean)
            tnormal = (moved - normal * row_mean(normal, moved, xp=xp)) * factor
            tout = tnormal if rows.weight is None else tnormal * rows.weight
        # out = normal * weight + bias
        tout = tout if rows.tweight is None else tout + normal * rows.tweight
        tout = tout if shifts is None else tout + shifts
        return (xp.astype(tout, rows.dtype, copy=False),)

    return rows.result(rows.map(block)[0])


def _gradient_tangents(rows: _Rows, dout: Array, tdout: Array | None) -> tuple[Array, Array | None, Array | None]:
    """The tangents of dx, dweight and dbias."""
    xp, weight, tweight = rows.xp, rows.weight, rows.tweight

    def block(
        x: Array, mean: Array | None, factor: Array, tx: Array | None, dout: Array, tdout: Array | None
    ) -> tuple[Array | None, ...]:
        normal = rows.normal(x, mean, factor)
        if tdout is None:
            tdout = xp.zeros_like(dout)
        # out = normal * weight + bias
        dnormal = dout if weight is None else dout * weight
        tdnormal = tdout if weight is None else tdout * weight
        tdnormal = tdnormal if tweight is None else tdnormal + dout * tweight
        tdbias, tdweight = xp.sum(tdout, axis=0, dtype=rows.compute), None
        # normal = (x - mean) factor; dx = (dnormal - mean(dnormal) - normal mean(dnormal normal)) factor
        along = row_mean(dnormal, normal, xp=xp)
        change, by_weight = row_mean(tdnormal, normal, xp=xp), tdout * normal
        tdx = rows.centred(tdnormal, mean)
        if tx is not None:
            moved = rows.centred(tx, mean)
            stretch = row_mean(normal, moved, xp=xp)  # tfactor is -factor² times it
            tnormal = (moved - normal * stretch) * factor
            change, by_weight = change + row_mean(dnormal, tnormal, xp=xp), by_weight + dout * tnormal
            tdx = tdx - tnormal * along - (rows.centred(dnormal, mean) - normal * along) * (stretch * factor)
        tdx = (tdx - normal * change) * factor
        if weight is not None:
            tdweight = xp.sum(by_weight, axis=0, dtype=rows.compute)
        return xp.astype(tdx, rows.dtype, copy=False), tdweight, tdbias

    tdx, tdweight, tdbias = rows.map(block, dout, tdout, totals=2)
    shape = tuple(rows.shape[axis] for axis in rows.axes)
    return rows.result(tdx), *(to_features(g, shape, rows.dtype, xp=xp) for g in (tdweight, tdbias))
