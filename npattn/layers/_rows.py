"""Rows along one axis of an array, of which some elements may not count: what softmax and its relatives stand on."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_bool, check_broadcasts, check_cotangent, host_axis
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, asarray, compute_dtype, float_dtype

INF = float("inf")


class Rows(NamedTuple):
    """The rows of x along an axis, in the dtype they are computed in."""

    x: Array
    hidden: Array | None  # True where an element does not count; None where all do
    axis: int
    row_max: Array
    row_sum: Array
    dtype: Any  # the caller's
    xp: Namespace

    def hide(self, a: Array, value: float) -> Array:
        """``a`` with ``value`` where an element does not count: by selection, since a NaN may stand there."""
        return a if self.hidden is None else self.xp.where(self.hidden, value, a)

    def sum(self, a: Array) -> Array:
        """The sum of every row."""
        return self.xp.sum(a, axis=self.axis, keepdims=True, dtype=a.dtype)

    def weights(self) -> Array:
        """softmax(x) made again, with anything where an element does not count."""
        return self.xp.exp(self.x - shift(self.row_max, xp=self.xp)) * reciprocal(self.row_sum, xp=self.xp)

    def result(self, a: Array) -> Array:
        """In the caller's dtype."""
        return self.xp.astype(a, self.dtype, copy=False)


def measure_rows(op: str, x: Array, axis: int, mask: Array | None) -> tuple[Rows, Array, Array]:
    """The rows, measured; x - row_max; and its exponentials."""
    xp = array_namespace(op, x=x, mask=mask)
    dtype = float_dtype(op, x=x)
    axis = host_axis(op, axis, x.shape)
    if mask is not None:
        check_bool(op, "mask", mask, "an element counts", "add numbers to x instead")
        check_broadcasts(op, "mask", mask.shape, x.shape, "the shape of x")
    with np.errstate(all="ignore"):
        lifted = xp.astype(x, compute_dtype(dtype, xp=xp), copy=False)
        hidden = _hidden(lifted, mask, xp=xp)
        seen = lifted if hidden is None else xp.where(hidden, -INF, lifted)
        largest = row_max(seen, axis, xp=xp)
        shifted = seen - shift(largest, xp=xp)
        exponentials = xp.exp(shifted)
        row_sum = xp.sum(exponentials, axis=axis, keepdims=True, dtype=lifted.dtype)
    return Rows(lifted, hidden, axis, largest, row_sum, dtype, xp), shifted, exponentials


def rows_again(op: str, dout: Array, saved: Any, *, reduced: bool = False) -> tuple[Rows, Array]:
    """The rows again, and dout as it meets them; ``reduced``: dout is without the axis."""
    x, mask, axis, row_max, row_sum = saved
    xp = array_namespace(op, x=x)
    dout = host_cotangent(dout, x, xp=xp)
    array_namespace(op, x=x, dout=dout)
    dtype = float_dtype(op, x=x)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :]) if reduced else x.shape
    check_cotangent(op, "dout", dout, "(...)", shape, dtype)
    lifted, dout = (xp.astype(a, row_max.dtype, copy=False) for a in (x, dout))
    rows = Rows(lifted, _hidden(lifted, mask, xp=xp), axis, row_max, row_sum, dtype, xp)
    return rows, xp.expand_dims(dout, axis=axis) if reduced else dout


def host_cotangent(dout: Any, like: Array, *, xp: Namespace) -> Any:
    """A number on the host as a 0-d array beside ``like``: what NumPy's own functions make of a 0-d result."""
    if isinstance(dout, (numbers.Real, np.floating)) and not isinstance(dout, bool):
        return asarray(float(dout), xp=xp, dtype=like.dtype, device=array_device(like))
    return dout


def _hidden(x: Array, mask: Array | None, *, xp: Namespace) -> Array | None:
    """True where an element does not count, in x's shape; None where all do, which only the host can see."""
    hidden = x == -INF
    if mask is not None:
        hidden = hidden | ~mask
    return None if xp is np and not hidden.any() else hidden


def row_max(x: Array, axis: int, *, xp: Namespace) -> Array:
    """The largest element along an axis that is kept; -inf for an empty row, where ``xp.max`` raises."""
    if x.shape[axis] == 0:
        shape = list(x.shape)
        shape[axis] = 1
        return xp.full(tuple(shape), -INF, dtype=x.dtype, device=array_device(x))
    return xp.max(x, axis=axis, keepdims=True)


def shift(row_max: Array, *, xp: Namespace) -> Array:
    """What is subtracted from a row before exp: its largest element, or 0 if that is -inf (-inf - -inf would be NaN)."""
    return xp.where(row_max == -INF, 0.0, row_max)


def reciprocal(total: Array, *, xp: Namespace) -> Array:
    """1 / total; 0 where that is 0, since nothing counts."""
    return xp.where(total == 0, 0.0, 1 / or_one(total, xp=xp))


def or_one(total: Array, *, xp: Namespace) -> Array:
    """``total``, or 1 where that is 0: inside a guard too, since autodiff multiplies what is not chosen by 0."""
    return xp.where(total == 0, 1.0, total)
