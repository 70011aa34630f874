"""Rows along one axis or several, and the features across them: what the norms stand on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays.checks import check_cotangent, host_axis, host_float, shape_error
from npattn._arrays.namespace import Array, Namespace, array_namespace, float_dtype, rounded

Axes: TypeAlias = int | Sequence[int]


def row_mean(a: Array, b: Array | None = None, *, xp: Namespace) -> Array:
    """The mean along every row of ``a``, or of ``a * b``, (R, 1); 0 of an empty row."""
    count = a.shape[1]
    # BLAS is the fastest sum, but adds long rows on several threads, whose number would show in the bits
    if xp is np and count <= 8192:
        total = np.vecdot(a, np.ones((1, count), dtype=a.dtype) if b is None else b)[:, None]
    else:
        total = xp.sum(a if b is None else a * b, axis=1, keepdims=True, dtype=a.dtype)
    return total / max(count, 1)


def centred_rows(rows: Array, mean: Array, *, xp: Namespace) -> Array:
    """``rows - mean``, less what the rounding of a large mean has left in it."""
    centred = rows - mean
    return centred - row_mean(centred, xp=xp)


def to_rows(x: Array, axes: tuple[int, ...], *, xp: Namespace) -> Array:
    """A matrix (R, C) whose rows run along the axes."""
    order = _order(x.ndim, axes)
    if order != tuple(range(x.ndim)):
        x = xp.permute_dims(x, order)
    others = x.ndim - len(axes)
    return xp.reshape(x, (math.prod(x.shape[:others]), math.prod(x.shape[others:])))


def from_rows(rows: Array, shape: tuple[int, ...], axes: tuple[int, ...], *, xp: Namespace) -> Array:
    """The way back: the matrix as an array of this shape."""
    every, order = tuple(range(len(shape))), _order(len(shape), axes)
    x = xp.reshape(rows, tuple(shape[axis] for axis in order))
    return x if order == every else xp.permute_dims(x, tuple(order.index(axis) for axis in every))


def _order(rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(axis for axis in range(rank) if axis not in axes), *axes)


def per_feature(parameter: Array | None, dtype: Any, *, xp: Namespace) -> Array | None:
    """Weight or bias as it meets the rows, (C,)."""
    return None if parameter is None else xp.reshape(xp.astype(parameter, dtype, copy=False), (-1,))


def to_features(gradient: Array | None, shape: tuple[int, ...], dtype: Any, *, xp: Namespace) -> Array | None:
    """The gradient of weight or bias in its shape and dtype."""
    return None if gradient is None else xp.reshape(rounded(gradient, dtype, xp=xp), shape)


def check_norm(
    op: str, x: Array, weight: Array | None, bias: Array | None, eps: float, axes: Axes
) -> tuple[Namespace, Any, float, tuple[int, ...]]:
    """The library, the dtype, eps as a host number, and the axes in order, counted from the front."""
    xp = array_namespace(op, x=x, weight=weight, bias=bias)
    dtype = float_dtype(op, x=x, weight=weight, bias=bias)
    eps = host_float(op, "eps", eps)
    if eps < 0:
        raise ValueError(f"{op}: eps must be at least 0, got {eps}")
    found = sorted(host_axis(op, axis, x.shape) for axis in (axes if isinstance(axes, (tuple, list)) else [axes]))
    if not found or len(set(found)) < len(found):
        raise ValueError(f"{op}: axes must be one axis or several different ones, got {axes}")
    shape = tuple(x.shape[axis] for axis in found)
    for name, array in (("weight", weight), ("bias", bias)):
        if array is not None and tuple(array.shape) != shape:
            letters = f"(C,) with C = {shape[0]} as x has" if len(shape) == 1 else f"{shape} as x has along axes {tuple(found)}"
            shape_error(op, name, letters, array.shape)
    return xp, dtype, eps, tuple(found)


def check_norm_backward(op: str, dout: Array, x: Array) -> tuple[Namespace, Any]:
    """The library and the dtype, for a cotangent that fits."""
    xp = array_namespace(op, x=x, dout=dout)
    dtype = float_dtype(op, x=x)
    check_cotangent(op, "dout", dout, "(..., C)", x.shape, dtype)
    return xp, dtype
