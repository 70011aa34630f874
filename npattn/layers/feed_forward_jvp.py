"""Tangents of the feed-forward networks, plain and gated. Wiring only."""

from __future__ import annotations

from typing import Any

from npattn._arrays.namespace import Array
from npattn.layers import activation_jvp as activations
from npattn.layers._curves import times_slopes
from npattn.layers.feed_forward import FeedForwardGrads, FeedForwardParams, FeedForwardSaved, feed_forward_forward
from npattn.layers.gate import gate_backward
from npattn.layers.gated_feed_forward import (
    GatedFeedForwardGrads,
    GatedFeedForwardParams,
    GatedFeedForwardSaved,
    gated_feed_forward_forward,
)
from npattn.layers.linear import linear, linear_backward
from npattn.layers.linear_jvp import linear_backward_jvp, linear_tangent

BACKWARD_JVPS: dict[str, Any] = {
    "relu": activations.relu_backward_jvp,
    "silu": activations.silu_backward_jvp,
    "gelu": activations.gelu_backward_jvp,
    "gelu_tanh": activations.gelu_tanh_backward_jvp,
}


def feed_forward_jvp(
    params: FeedForwardParams,
    x: Array,
    /,
    *,
    tparams: FeedForwardParams | None = None,
    tx: Array | None = None,
    activation: str = "gelu",
) -> tuple[Array, Array]:
    """``out`` of `feed_forward` and its tangent.

    Parameters
    ----------
    params : FeedForwardParams
        As in `feed_forward_forward`, and so are the others.
    x : float array (..., C)
        Any leading axes.
    tparams : FeedForwardParams, optional
        The tangents of the parameters; ``None``, for all or for one of them, is 0.
    tx : float array (..., C), optional
        The tangent of x; 0 by default.
    activation : str, optional
        As in `feed_forward_forward`.

    Returns
    -------
    out : array (..., C)
        As from `feed_forward`.
    tout : array (..., C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, there is no such activation, or there is a tangent of a bias that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    out, saved = feed_forward_forward(params, x, activation=activation)
    return out, feed_forward_tangent(saved, tparams, tx)


def feed_forward_tangent(saved: FeedForwardSaved, tparams: FeedForwardParams | None, tx: Array | None) -> Array:
    """The tangent of `feed_forward`'s out, from what forward saved."""
    op, params, t = "feed_forward_jvp", saved.params, _NONE if tparams is None else tparams
    return linear_tangent(
        op, saved.out.x, params.w_out, params.b_out, tx=_activated_tangents(saved, t, tx)[1], tw=t.w_out, tb=t.b_out
    )


def _activated_tangents(saved: FeedForwardSaved, t: FeedForwardParams, tx: Array | None) -> tuple[Array, Array]:
    """The tangents of what is inside, before and after the activation."""
    op, params, (slope, dtype) = "feed_forward_jvp", saved.params, saved.activated
    thidden = linear_tangent(op, saved.hidden.x, params.w_in, params.b_in, tx=tx, tw=t.w_in, tb=t.b_in)
    return thidden, times_slopes(op, thidden, slope, dtype=dtype)[0]


_NONE: Any = FeedForwardParams(None, None)


def feed_forward_backward_jvp(
    dout: Array,
    saved: FeedForwardSaved,
    /,
    *,
    tparams: FeedForwardParams | None = None,
    tx: Array | None = None,
    tdout: Array | None = None,
) -> FeedForwardGrads:
    """The tangents of the gradients of `feed_forward_backward`; with tdout 0, a Hessian-vector product of ``⟨dout, out⟩``.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : FeedForwardSaved
        From `feed_forward_forward`.
    tparams : FeedForwardParams, optional
        The tangents of the parameters; ``None``, for all or for one of them, is 0.
    tx, tdout : float array (..., C), optional
        The tangents of x and dout; 0 by default.

    Returns
    -------
    FeedForwardGrads
        The tangents of dparams and dx, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    params, t = saved.params, _NONE if tparams is None else tparams
    thidden, tactivated = _activated_tangents(saved, t, tx)
    dactivated = linear_backward(dout, saved.out).dx
    tout = linear_backward_jvp(dout, saved.out, tdout=tdout, tx=tactivated, tw=t.w_out)
    (dhidden,) = times_slopes("feed_forward_backward_jvp", dactivated, saved.activated[0], dtype=saved.activated[1])
    hidden = linear(saved.hidden.x, params.w_in, params.b_in)  # an activation saves its slope, and not its input
    tdhidden = BACKWARD_JVPS[saved.activation](dactivated, saved.activated, x=hidden, tx=thidden, tdout=tout.dx).dx
    tin = linear_backward_jvp(dhidden, saved.hidden, tdout=tdhidden, tx=tx, tw=t.w_in)
    return FeedForwardGrads(FeedForwardParams(tin.dw, tout.dw, tin.db, tout.db), tin.dx)


def gated_feed_forward_jvp(
    params: GatedFeedForwardParams,
    x: Array,
    /,
    *,
    tparams: GatedFeedForwardParams | None = None,
    tx: Array | None = None,
    activation: str = "silu",
) -> tuple[Array, Array]:
    """``out`` of `gated_feed_forward` and its tangent.

    Parameters
    ----------
    params : GatedFeedForwardParams
        As in `gated_feed_forward_forward`, and so are the others.
    x : float array (..., C)
        Any leading axes.
    tparams : GatedFeedForwardParams, optional
        The tangents of the parameters; ``None``, for all or for one of them, is 0.
    tx : float array (..., C), optional
        The tangent of x; 0 by default.
    activation : str, optional
        As in `gated_feed_forward_forward`.

    Returns
    -------
    out : array (..., C)
        As from `gated_feed_forward`.
    tout : array (..., C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, there is no such activation, or there is a tangent of a bias that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    out, saved = gated_feed_forward_forward(params, x, activation=activation)
    return out, gated_feed_forward_tangent(saved, tparams, tx)


def gated_feed_forward_tangent(saved: GatedFeedForwardSaved, tparams: GatedFeedForwardParams | None, tx: Array | None) -> Array:
    """The tangent of `gated_feed_forward`'s out, from what forward saved."""
    op, params, t = "gated_feed_forward_jvp", saved.params, _GATED_NONE if tparams is None else tparams
    _, _, tgated = _gated_tangents(saved, t, tx)
    return linear_tangent(op, saved.out.x, params.w_out, params.b_out, tx=tgated, tw=t.w_out, tb=t.b_out)


def _gated_tangents(saved: GatedFeedForwardSaved, t: GatedFeedForwardParams, tx: Array | None) -> tuple[Array, Array, Array]:
    """The tangents of what is let through, of its gates, and of both together."""
    op, params, x = "gated_feed_forward_jvp", saved.params, saved.hidden.x
    thidden = linear_tangent(op, x, params.w_in, params.b_in, tx=tx, tw=t.w_in, tb=t.b_in)
    tgates = linear_tangent(op, x, params.w_gate, params.b_gate, tx=tx, tw=t.w_gate, tb=t.b_gate)
    return thidden, tgates, activations.gate_tangent(saved.gated, thidden, tgates)


_GATED_NONE: Any = GatedFeedForwardParams(None, None, None)


def gated_feed_forward_backward_jvp(
    dout: Array,
    saved: GatedFeedForwardSaved,
    /,
    *,
    tparams: GatedFeedForwardParams | None = None,
    tx: Array | None = None,
    tdout: Array | None = None,
) -> GatedFeedForwardGrads:
    """The tangents of the gradients of `gated_feed_forward_backward`.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : GatedFeedForwardSaved
        From `gated_feed_forward_forward`.
    tparams : GatedFeedForwardParams, optional
        The tangents of the parameters; ``None``, for all or for one of them, is 0.
    tx, tdout : float array (..., C), optional
        The tangents of x and dout; 0 by default.

    Returns
    -------
    GatedFeedForwardGrads
        The tangents of dparams and dx, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    params, t, x = saved.params, _GATED_NONE if tparams is None else tparams, saved.hidden.x
    thidden, tgates, tgated = _gated_tangents(saved, t, tx)
    hidden, gates = linear(x, params.w_in, params.b_in), linear(x, params.w_gate, params.b_gate)
    dgated = linear_backward(dout, saved.out).dx
    tout = linear_backward_jvp(dout, saved.out, tdout=tdout, tx=tgated, tw=t.w_out)
    dhalves = gate_backward(dgated, saved.gated)
    halves = activations.gate_backward_jvp(dgated, saved.gated, x=hidden, gates=gates, tx=thidden, tgates=tgates, tdout=tout.dx)
    tin = linear_backward_jvp(dhalves.dx, saved.hidden, tdout=halves.dx, tx=tx, tw=t.w_in)
    tgate = linear_backward_jvp(dhalves.dgates, saved.gates, tdout=halves.dgates, tx=tx, tw=t.w_gate)
    dparams = GatedFeedForwardParams(tgate.dw, tin.dw, tout.dw, tgate.db, tin.db, tout.db)
    return GatedFeedForwardGrads(dparams, tin.dx + tgate.dx)
