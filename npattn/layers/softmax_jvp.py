"""Tangents of softmax, of its result and of its gradient."""

from __future__ import annotations

import numpy as np

from npattn._arrays.checks import check_tangent
from npattn._arrays.namespace import Array
from npattn.layers._rows import Rows, measure_rows, rows_again
from npattn.layers.softmax import SoftmaxGrads, SoftmaxSaved


def softmax_jvp(x: Array, /, *, tx: Array, axis: int = -1, mask: Array | None = None) -> tuple[Array, Array]:
    """``out`` of `softmax` and ``tout = out (tx - Σ out tx)``, the sum along the axis.

    Parameters
    ----------
    x : float array (...)
        As in `softmax_forward`, and so are axis and mask.
    tx : float array (...)
        The tangent of x. What stands at elements that do not count has no influence.
    axis : int, optional
        The axis along which the weights sum to 1.
    mask : bool array that broadcasts to x, optional
        True where an element counts.

    Returns
    -------
    out : array (...)
        As from `softmax`.
    tout : array (...)
        The tangent of out; 0 where an element does not count.

    Raises
    ------
    ValueError
        If shapes do not fit or the axis does not exist.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    The Jacobian of softmax is symmetric: the JVP is the formula of its backward.
    Derivation: docs/derivation.md, "Tangents of layers".

    Examples
    --------
    >>> import numpy as np
    >>> softmax_jvp(np.zeros(2), tx=np.asarray([1.0, 0.0]))
    (array([0.5, 0.5]), array([ 0.25, -0.25]))
    """
    check_tangent("softmax_jvp", "x", tx, x)
    rows, _, _ = measure_rows("softmax_jvp", x, axis, mask)
    with np.errstate(all="ignore"):
        out = rows.hide(rows.weights(), 0.0)
        tout = _tangent(rows, out, rows.xp.astype(tx, out.dtype, copy=False))
        return rows.result(out), rows.result(tout)


def _tangent(rows: Rows, out: Array, tx: Array) -> Array:
    # out = exp(x - row_max) / row_sum
    mean = rows.sum(rows.hide(out * tx, 0.0))
    return rows.hide(out * (tx - mean), 0.0)


def softmax_backward_jvp(
    dout: Array, saved: SoftmaxSaved, /, *, tdout: Array | None = None, tx: Array | None = None
) -> SoftmaxGrads:
    """The tangent of ``dx = out (dout - Σ out dout)``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : SoftmaxSaved
        From `softmax_forward`.
    tdout, tx : float arrays, optional
        The tangents of dout and x; 0 by default.

    Returns
    -------
    SoftmaxGrads
        The tangent of dx, in the field of its gradient; 0 where an element does not count.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "softmax_backward_jvp"
    for name, t, of in (("dout", tdout, dout), ("x", tx, saved.x)):
        check_tangent(op, name, t, of)
    rows, dout = rows_again(op, dout, saved)
    xp = rows.xp
    with np.errstate(all="ignore"):
        out = rows.hide(rows.weights(), 0.0)
        tdx = xp.zeros_like(out) if tdout is None else _tangent(rows, out, xp.astype(tdout, out.dtype, copy=False))
        if tx is not None:
            tout = _tangent(rows, out, xp.astype(tx, out.dtype, copy=False))
            # dx = out (dout - delta), delta = Σ out dout
            delta, tdelta = (rows.sum(rows.hide(p * dout, 0.0)) for p in (out, tout))
            tdx = tdx + rows.hide(tout * (dout - delta) - out * tdelta, 0.0)
        return SoftmaxGrads(rows.result(tdx))
