"""Softmax and its two relatives along one axis, with an optional mask.

All three save the input, borrowed, with the largest element and the sum of exponentials of every row (a row is what runs along
the axis), and make the weights again in backward. An element that the mask hides, or that is -inf, does not count: its weight
and its derivative are 0 by selection, so what stands there may be NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_bool, check_broadcasts, check_cotangent, host_axis
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, compute_dtype, float_dtype
from npattn._arrays.trees import tree_repr

_INF = float("inf")


class SoftmaxSaved(NamedTuple):
    """What `softmax_backward` needs: x and mask, borrowed; of every row row_max and row_sum, unrounded, with the axis kept."""

    x: Array
    mask: Array | None
    axis: int
    row_max: Array
    row_sum: Array

    __repr__ = tree_repr


class SoftmaxGrads(NamedTuple):
    """Gradients of `softmax`."""

    dx: Array


def softmax(x: Array, /, *, axis: int = -1, mask: Array | None = None) -> Array:
    """``exp(x) / Σ exp(x)`` along an axis; see `softmax_forward`."""
    return softmax_forward(x, axis=axis, mask=mask)[0]


def softmax_forward(x: Array, /, *, axis: int = -1, mask: Array | None = None) -> tuple[Array, SoftmaxSaved]:
    """``out = exp(x - row_max) / row_sum``: every row becomes weights that sum to 1.

    Parameters
    ----------
    x : float array (...)
        Elements of -inf are as good as masked; a row with +inf or NaN at an element that counts becomes NaN.
    axis : int, optional
        The axis along which the weights sum to 1.
    mask : bool array that broadcasts to x, optional
        True where an element counts. What stands elsewhere has no influence.

    Returns
    -------
    out : array (...)
        In x's shape and dtype; 0 where the mask is False, and in a row where nothing counts. float16 and bfloat16 are computed
        in float32.
    saved : SoftmaxSaved
        For `softmax_backward`. Borrows x and mask, and holds two numbers a row.

    Raises
    ------
    ValueError
        If the axis does not exist or the mask does not broadcast to x.
    TypeError
        If x is not a floating array, the mask is not boolean, or libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Softmax".

    Examples
    --------
    >>> import numpy as np
    >>> softmax(np.asarray([[0.0, 0.0, 9.0], [1.0, 2.0, 3.0]]), mask=np.asarray([[True, True, False], [False, False, False]]))
    array([[0.5, 0.5, 0. ],
           [0. , 0. , 0. ]])
    """
    rows, _, exponentials = _forward("softmax", x, axis, mask)
    with np.errstate(all="ignore"):
        out = rows.hide(exponentials * _reciprocal(rows.row_sum, xp=rows.xp), 0.0)
        return rows.result(out), SoftmaxSaved(x, mask, rows.axis, rows.row_max, rows.row_sum)


def softmax_backward(dout: Array, saved: SoftmaxSaved, /) -> SoftmaxGrads:
    """``dx = out (dout - Σ out dout)``, the sum along the axis.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out. What stands at elements that do not count has no influence.
    saved : SoftmaxSaved
        From `softmax_forward`.

    Returns
    -------
    SoftmaxGrads
        ``dx``, 0 where an element does not count.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    rows, dout = _backward("softmax_backward", dout, saved)
    with np.errstate(all="ignore"):
        # out = exp(x - row_max) / row_sum
        out = rows.weights()
        delta = rows.sum(rows.hide(out * dout, 0.0))
        return SoftmaxGrads(rows.result(rows.hide(out * (dout - delta), 0.0)))


class LogSoftmaxSaved(SoftmaxSaved):
    """What `log_softmax_backward` needs: the same as `SoftmaxSaved`."""

    __slots__ = ()
    __repr__ = tree_repr


class LogSoftmaxGrads(NamedTuple):
    """Gradients of `log_softmax`."""

    dx: Array


def log_softmax(x: Array, /, *, axis: int = -1, mask: Array | None = None) -> Array:
    """``x - log Σ exp(x)`` along an axis; see `log_softmax_forward`."""
    return log_softmax_forward(x, axis=axis, mask=mask)[0]


def log_softmax_forward(x: Array, /, *, axis: int = -1, mask: Array | None = None) -> tuple[Array, LogSoftmaxSaved]:
    """``out = (x - row_max) - log row_sum``: the logarithm of softmax, accurate where that is tiny.

    Parameters
    ----------
    x : float array (...)
        As for `softmax_forward`.
    axis : int, optional
        The axis along which the exponentials sum to 1.
    mask : bool array that broadcasts to x, optional
        True where an element counts.

    Returns
    -------
    out : array (...)
        In x's shape and dtype; -inf where an element does not count.
    saved : LogSoftmaxSaved
        For `log_softmax_backward`. Borrows x and mask, and holds two numbers a row.

    Raises
    ------
    ValueError
        If the axis does not exist or the mask does not broadcast to x.
    TypeError
        If x is not a floating array, the mask is not boolean, or libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Log-softmax".

    Examples
    --------
    >>> import numpy as np
    >>> log_softmax(np.asarray([0.0, 1000.0]))
    array([-1000.,     0.])
    """
    rows, shifted, _ = _forward("log_softmax", x, axis, mask)
    with np.errstate(all="ignore"):
        out = rows.hide(shifted - rows.xp.log(rows.row_sum), -_INF)
        return rows.result(out), LogSoftmaxSaved(x, mask, rows.axis, rows.row_max, rows.row_sum)


def log_softmax_backward(dout: Array, saved: LogSoftmaxSaved, /) -> LogSoftmaxGrads:
    """``dx = dout - softmax(x) Σ dout``, the sum along the axis over what counts.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out. What stands at elements that do not count has no influence: there, out is -inf whatever x is.
    saved : LogSoftmaxSaved
        From `log_softmax_forward`.

    Returns
    -------
    LogSoftmaxGrads
        ``dx``, 0 where an element does not count.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    rows, dout = _backward("log_softmax_backward", dout, saved)
    with np.errstate(all="ignore"):
        # out = (x - row_max) - log row_sum
        total = rows.sum(rows.hide(dout, 0.0))
        return LogSoftmaxGrads(rows.result(rows.hide(dout - rows.weights() * total, 0.0)))


class LogSumExpSaved(SoftmaxSaved):
    """What `logsumexp_backward` needs: the same as `SoftmaxSaved`."""

    __slots__ = ()
    __repr__ = tree_repr


class LogSumExpGrads(NamedTuple):
    """Gradients of `logsumexp`."""

    dx: Array


def logsumexp(x: Array, /, *, axis: int = -1, mask: Array | None = None) -> Array:
    """``log Σ exp(x)`` along an axis, which is dropped; see `logsumexp_forward`."""
    return logsumexp_forward(x, axis=axis, mask=mask)[0]


def logsumexp_forward(x: Array, /, *, axis: int = -1, mask: Array | None = None) -> tuple[Array, LogSumExpSaved]:
    """``out = row_max + log row_sum``, where row_sum is ``Σ exp(x - row_max)``.

    Parameters
    ----------
    x : float array (...)
        Elements of -inf are as good as masked; a row with +inf is +inf, one with NaN is NaN.
    axis : int, optional
        The axis to sum over.
    mask : bool array that broadcasts to x, optional
        True where an element counts.

    Returns
    -------
    out : array (...)
        In x's dtype, without the axis; -inf where nothing counts.
    saved : LogSumExpSaved
        For `logsumexp_backward`. Borrows x and mask, and holds two numbers a row.

    Raises
    ------
    ValueError
        If the axis does not exist or the mask does not broadcast to x.
    TypeError
        If x is not a floating array, the mask is not boolean, or libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Log-sum-exp".

    Examples
    --------
    >>> import numpy as np
    >>> logsumexp(np.asarray([[1000.0, 1000.0], [-np.inf, -np.inf]]))
    array([1000.69314718,          -inf])
    """
    rows, _, _ = _forward("logsumexp", x, axis, mask)
    xp, row_max = rows.xp, rows.row_max
    with np.errstate(all="ignore"):
        lse = xp.where(xp.abs(row_max) == _INF, row_max, row_max + xp.log(rows.row_sum))
        return rows.result(xp.squeeze(lse, axis=rows.axis)), LogSumExpSaved(x, mask, rows.axis, rows.row_max, rows.row_sum)


def logsumexp_backward(dout: Array, saved: LogSumExpSaved, /) -> LogSumExpGrads:
    """``dx = softmax(x) dout``, with dout the same for a whole row.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out, without the axis.
    saved : LogSumExpSaved
        From `logsumexp_forward`.

    Returns
    -------
    LogSumExpGrads
        ``dx``, 0 where an element does not count.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    rows, dout = _backward("logsumexp_backward", dout, saved, reduced=True)
    with np.errstate(all="ignore"):
        # out = row_max + log row_sum
        return LogSumExpGrads(rows.result(rows.hide(rows.weights() * dout, 0.0)))


class _Rows(NamedTuple):
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
        return self.xp.exp(self.x - shift(self.row_max, xp=self.xp)) * _reciprocal(self.row_sum, xp=self.xp)

    def result(self, a: Array) -> Array:
        """In the caller's dtype."""
        return self.xp.astype(a, self.dtype, copy=False)


def _forward(op: str, x: Array, axis: int, mask: Array | None) -> tuple[_Rows, Array, Array]:
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
        seen = lifted if hidden is None else xp.where(hidden, -_INF, lifted)
        largest = row_max(seen, axis, xp=xp)
        shifted = seen - shift(largest, xp=xp)
        exponentials = xp.exp(shifted)
        row_sum = xp.sum(exponentials, axis=axis, keepdims=True, dtype=lifted.dtype)
    return _Rows(lifted, hidden, axis, largest, row_sum, dtype, xp), shifted, exponentials


def _backward(op: str, dout: Array, saved: SoftmaxSaved, *, reduced: bool = False) -> tuple[_Rows, Array]:
    """The rows again, and dout as it meets them; ``reduced``: dout is without the axis."""
    x, mask, axis, row_max, row_sum = saved
    xp = array_namespace(op, x=x, dout=dout)
    dtype = float_dtype(op, x=x)
    shape = (*x.shape[:axis], *x.shape[axis + 1 :]) if reduced else x.shape
    check_cotangent(op, "dout", dout, "(...)", shape, dtype)
    lifted, dout = (xp.astype(a, row_max.dtype, copy=False) for a in (x, dout))
    rows = _Rows(lifted, _hidden(lifted, mask, xp=xp), axis, row_max, row_sum, dtype, xp)
    return rows, xp.expand_dims(dout, axis=axis) if reduced else dout


def _hidden(x: Array, mask: Array | None, *, xp: Namespace) -> Array | None:
    """True where an element does not count, in x's shape; None where all do, which only the host can see."""
    hidden = x == -_INF
    if mask is not None:
        hidden = hidden | ~mask
    return None if xp is np and not hidden.any() else hidden


def row_max(x: Array, axis: int, *, xp: Namespace) -> Array:
    """The largest element along an axis that is kept; -inf for an empty row, where ``xp.max`` raises."""
    if x.shape[axis] == 0:
        shape = list(x.shape)
        shape[axis] = 1
        return xp.full(tuple(shape), -_INF, dtype=x.dtype, device=array_device(x))
    return xp.max(x, axis=axis, keepdims=True)


def shift(row_max: Array, *, xp: Namespace) -> Array:
    """What is subtracted from a row before exp: its largest element, or 0 if that is -inf (-inf - -inf would be NaN)."""
    return xp.where(row_max == -_INF, 0.0, row_max)


def _reciprocal(row_sum: Array, *, xp: Namespace) -> Array:
    """1 / row_sum; 0 for a row where nothing counts."""
    return xp.where(row_sum == 0, 0.0, 1 / row_sum)
