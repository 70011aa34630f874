"""Softmax and its two relatives along one axis, with an optional mask.

All three save the input, borrowed, with the largest element and the sum of exponentials of every row (a row is what runs along
the axis), and make the weights again in backward. An element that the mask hides, or that is -inf, does not count: its weight
and its derivative are 0 by selection, so what stands there may be NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_repr
from npattn.layers._rows import INF, measure_rows, or_one, reciprocal, rows_again


class SoftmaxSaved(NamedTuple):
    """What `softmax_backward` needs: x and mask, borrowed; of every row row_max and row_sum, unrounded, with the axis kept."""

    x: Array
    mask: Array | None
    axis: int
    row_max: Array
    row_sum: Array

    def __repr__(self) -> str:
        return tree_repr(self)


class SoftmaxGrads(NamedTuple):
    """Gradients of `softmax`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


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
    rows, _, exponentials = measure_rows("softmax", x, axis, mask)
    with np.errstate(all="ignore"):
        out = rows.hide(exponentials * reciprocal(rows.row_sum, xp=rows.xp), 0.0)
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
    rows, dout = rows_again("softmax_backward", dout, saved)
    with np.errstate(all="ignore"):
        # out = exp(x - row_max) / row_sum
        out = rows.weights()
        delta = rows.sum(rows.hide(out * dout, 0.0))
        return SoftmaxGrads(rows.result(rows.hide(out * (dout - delta), 0.0)))


class LogSoftmaxSaved(SoftmaxSaved):
    """What `log_softmax_backward` needs: the same as `SoftmaxSaved`."""

    __slots__ = ()


class LogSoftmaxGrads(NamedTuple):
    """Gradients of `log_softmax`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


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
    rows, shifted, _ = measure_rows("log_softmax", x, axis, mask)
    with np.errstate(all="ignore"):
        out = rows.hide(shifted - rows.xp.log(or_one(rows.row_sum, xp=rows.xp)), -INF)
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
    rows, dout = rows_again("log_softmax_backward", dout, saved)
    with np.errstate(all="ignore"):
        # out = (x - row_max) - log row_sum
        total = rows.sum(rows.hide(dout, 0.0))
        return LogSoftmaxGrads(rows.result(rows.hide(dout - rows.weights() * total, 0.0)))


class LogSumExpSaved(SoftmaxSaved):
    """What `logsumexp_backward` needs: the same as `SoftmaxSaved`."""

    __slots__ = ()


class LogSumExpGrads(NamedTuple):
    """Gradients of `logsumexp`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


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
    rows, _, _ = measure_rows("logsumexp", x, axis, mask)
    xp, row_max, row_sum = rows.xp, rows.row_max, rows.row_sum
    with np.errstate(all="ignore"):
        lse = row_max + xp.log(or_one(row_sum, xp=xp))
        lse = xp.where(row_sum == 0, -INF, xp.where(row_max == INF, INF, lse))
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
    rows, dout = rows_again("logsumexp_backward", dout, saved, reduced=True)
    with np.errstate(all="ignore"):
        # out = row_max + log row_sum
        return LogSumExpGrads(rows.result(rows.hide(rows.weights() * dout, 0.0)))
