"""Tangents of cross-entropy, of its result and of its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_cotangent, check_tangent
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, float_dtype
from npattn.layers._rows import host_cotangent, reciprocal, shift
from npattn.layers.loss import CrossEntropyGrads, CrossEntropySaved, cross_entropy_forward, mean_loss, what_counts


def cross_entropy_jvp(
    logits: Array,
    targets: Any,
    /,
    *,
    tlogits: Array | None = None,
    tweights: Array | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Array | None = None,
) -> tuple[Array, Array]:
    """``out`` of `cross_entropy` and ``tout = Σ (w tl + tw (l - out)) / Σ w``, ``tl = Σ_v (softmax(logits)_v - q_v) tlogits_v``.

    Parameters
    ----------
    logits : float array (..., V)
        As in `cross_entropy_forward`, and so are the others.
    targets : integer array (...), or Python integers
        The class of every token.
    tlogits, tweights : float arrays, optional
        The tangents of logits and weights; 0 by default.
    label_smoothing : float, optional
        From 0 to 1.
    ignore_index : int, optional
        Tokens with this target do not count.
    weights : float array (...), optional
        How much every token counts.

    Returns
    -------
    out : array ()
        As from `cross_entropy`.
    tout : array ()
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, a number is out of range, or there is a tangent of weights that are not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Tangents of layers".

    Examples
    --------
    >>> import numpy as np
    >>> out, tout = cross_entropy_jvp(np.zeros((1, 4)), [3], tlogits=np.asarray([[0.0, 0.0, 0.0, 1.0]]))
    >>> float(tout)
    -0.75
    """
    op = "cross_entropy_jvp"
    out, saved = cross_entropy_forward(
        logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index, weights=weights
    )
    for name, t, of in (("logits", tlogits, logits), ("weights", tweights, weights)):
        check_tangent(op, name, t, of)
    with np.errstate(all="ignore"):
        tokens = _Tokens.of(saved, tlogits, tweights)
        xp, tout = tokens.xp, tokens.tout
        # a mean is a scalar in NumPy, whose function astype took arrays alone before 2.1
        return out, tout.astype(out.dtype) if xp is np else xp.astype(tout, out.dtype)


def cross_entropy_backward_jvp(
    dout: Array | float,
    saved: CrossEntropySaved,
    /,
    *,
    tdout: Array | float | None = None,
    tlogits: Array | None = None,
    tweights: Array | None = None,
) -> CrossEntropyGrads:
    """The tangents of the gradients of `cross_entropy_backward`.

    Parameters
    ----------
    dout : float array () or number
        The cotangent of out; 1 for the Hessian of the loss itself.
    saved : CrossEntropySaved
        From `cross_entropy_forward`.
    tdout : float array () or number, optional
        The tangent of dout; 0 by default.
    tlogits, tweights : float arrays, optional
        The tangents of logits and weights; 0 by default.

    Returns
    -------
    CrossEntropyGrads
        The tangents of dlogits and dweights, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of weights that were not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    With tlogits alone it is the product with the Hessian in the logits, ``w / Σw (diag(p) - p pᵀ)``, which has no negative
    curvature: the middle factor of a Gauss-Newton product.
    """
    op = "cross_entropy_backward_jvp"
    logits = saved.logits
    xp = array_namespace(op, logits=logits)
    dtype = float_dtype(op, logits=logits)
    for name, t, of in (("logits", tlogits, logits), ("weights", tweights, saved.weights)):
        check_tangent(op, name, t, of)
    cotangents = []
    for name, value in (("dout", dout), ("tdout", 0.0 if tdout is None else tdout)):
        x = host_cotangent(value, logits, xp=xp)
        array_namespace(op, logits=logits, **{name: x})
        check_cotangent(op, name, x, "()", (), dtype)
        cotangents.append(xp.astype(x, saved.losses.dtype))
    with np.errstate(all="ignore"):
        tokens = _Tokens.of(saved, tlogits, tweights)
        # dlosses = w factor, factor = dout / Σ w
        inverse = reciprocal(tokens.total, xp=xp)
        factor = cotangents[0] * inverse
        tfactor = (cotangents[1] - factor * tokens.ttotal) * inverse
        dlosses, tdlosses = tokens.w * factor, tokens.tw * factor + tokens.w * tfactor
        # dlogits = dlosses (p - q)
        tdlogits = tdlosses[..., None] * tokens.pull
        if tokens.tp is not None:
            tdlogits = tdlogits + dlosses[..., None] * tokens.tp
        tdlogits = xp.where(tokens.live[..., None], tdlogits, 0.0)
        tdweights = None
        if saved.weights is not None:
            # dweights = (l - out) factor
            tdweights = (tokens.tlosses - tokens.tout) * factor + (saved.losses - tokens.out) * tfactor
            tdweights = xp.astype(xp.where(tokens.counts & (tokens.total != 0), tdweights, 0.0), dtype, copy=False)
        return CrossEntropyGrads(xp.astype(tdlogits, dtype, copy=False), tdweights)


class _Tokens(NamedTuple):
    """Tokens, their losses and the tangents of both, in the dtype of the computation."""

    xp: Namespace
    counts: Array  # (...), False where ignored
    live: Array  # (...), False where the logits have no influence
    w: Array
    tw: Array
    total: Array
    ttotal: Array
    pull: Array  # (..., V), softmax(logits) - q
    tp: Array | None  # (..., V), of softmax(logits); None where it is 0
    tlosses: Array
    out: Array
    tout: Array

    @classmethod
    def of(cls, saved: CrossEntropySaved, tlogits: Array | None, tweights: Array | None) -> _Tokens:
        logits, losses, smoothing = saved.logits, saved.losses, saved.label_smoothing
        xp = array_namespace("cross_entropy_jvp", logits=logits)
        counted = what_counts(saved, xp)
        targets, counts, w, total = counted
        tw = xp.zeros_like(w) if tweights is None else xp.where(counts, xp.astype(tweights, w.dtype, copy=False), 0.0)
        seen = counts & (saved.row_sum[..., 0] != 0)  # selection, not multiplication: what stands elsewhere may be NaN
        p = xp.exp(xp.astype(logits, w.dtype, copy=False) - shift(saved.row_max, xp=xp)) * reciprocal(saved.row_sum, xp=xp)
        every = xp.arange(logits.shape[-1], dtype=targets.dtype, device=array_device(targets))
        q = xp.astype(every == targets[..., None], w.dtype) * (1 - smoothing) + smoothing / max(logits.shape[-1], 1)
        tp, tlosses = None, xp.zeros_like(losses)
        if tlogits is not None:
            lifted = xp.where(seen[..., None], xp.astype(tlogits, w.dtype, copy=False), 0.0)
            along = p * lifted
            # l = -Σ_v q_v log softmax(logits)_v
            tlosses = xp.where(seen, xp.sum(along - q * lifted, axis=-1, dtype=w.dtype), 0.0)
            tp = along - p * xp.sum(along, axis=-1, keepdims=True, dtype=w.dtype)
        # out = Σ w l / Σ w
        out = mean_loss(losses, counted, xp)
        changes = xp.where(w != 0, w * tlosses, 0.0) + xp.where(tw != 0, tw * (losses - out), 0.0)
        tout = xp.sum(changes, dtype=w.dtype) * reciprocal(total, xp=xp)
        live = seen & ((w != 0) | (tw != 0))
        return cls(xp, counts, live, w, tw, total, xp.sum(tw, dtype=w.dtype), p - q, tp, tlosses, out, tout)
