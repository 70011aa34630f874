"""Tangents of the feed-forward networks, plain and gated. Wiring only."""

from __future__ import annotations

from typing import Any

from npattn._arrays.namespace import Array
from npattn.layers import activation_jvp as activations
from npattn.layers._curves import check_activation
from npattn.layers.feed_forward import ACTIVATIONS, FeedForwardGrads, FeedForwardParams, FeedForwardSaved
from npattn.layers.gate import gate_backward
from npattn.layers.gated_feed_forward import GatedFeedForwardGrads, GatedFeedForwardParams, GatedFeedForwardSaved
from npattn.layers.linear import linear_backward
from npattn.layers.linear_jvp import linear_backward_jvp, linear_jvp

JVPS: dict[str, tuple[Any, Any]] = {
    "relu": (activations.relu_jvp, activations.relu_backward_jvp),
    "silu": (activations.silu_jvp, activations.silu_backward_jvp),
    "gelu": (activations.gelu_jvp, activations.gelu_backward_jvp),
    "gelu_tanh": (activations.gelu_tanh_jvp, activations.gelu_tanh_backward_jvp),
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
    t = _NONE if tparams is None else tparams
    hidden, thidden = linear_jvp(x, params.w_in, params.b_in, tx=tx, tw=t.w_in, tb=t.b_in)
    check_activation("feed_forward_jvp", activation)
    activated, tactivated = JVPS[activation][0](hidden, tx=thidden)
    return linear_jvp(activated, params.w_out, params.b_out, tx=tactivated, tw=t.w_out, tb=t.b_out)


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
    hidden, thidden = linear_jvp(saved.hidden.x, params.w_in, params.b_in, tx=tx, tw=t.w_in, tb=t.b_in)
    jvp, backward_jvp = JVPS[saved.activation]
    _, tactivated = jvp(hidden, tx=thidden)
    dactivated = linear_backward(dout, saved.out).dx
    tout = linear_backward_jvp(dout, saved.out, tdout=tdout, tx=tactivated, tw=t.w_out)
    dhidden = ACTIVATIONS[saved.activation][1](dactivated, saved.activated).dx
    tdhidden = backward_jvp(dactivated, saved.activated, x=hidden, tx=thidden, tdout=tout.dx).dx
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
    t = _GATED_NONE if tparams is None else tparams
    gates, tgates = linear_jvp(x, params.w_gate, params.b_gate, tx=tx, tw=t.w_gate, tb=t.b_gate)
    hidden, thidden = linear_jvp(x, params.w_in, params.b_in, tx=tx, tw=t.w_in, tb=t.b_in)
    gated, tgated = activations.gate_jvp(hidden, gates, tx=thidden, tgates=tgates, activation=activation)
    return linear_jvp(gated, params.w_out, params.b_out, tx=tgated, tw=t.w_out, tb=t.b_out)


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
    gates, tgates = linear_jvp(x, params.w_gate, params.b_gate, tx=tx, tw=t.w_gate, tb=t.b_gate)
    hidden, thidden = linear_jvp(x, params.w_in, params.b_in, tx=tx, tw=t.w_in, tb=t.b_in)
    _, tgated = activations.gate_jvp(hidden, gates, tx=thidden, tgates=tgates, activation=saved.gated.activation)
    dgated = linear_backward(dout, saved.out).dx
    tout = linear_backward_jvp(dout, saved.out, tdout=tdout, tx=tgated, tw=t.w_out)
    dhalves = gate_backward(dgated, saved.gated)
    halves = activations.gate_backward_jvp(dgated, saved.gated, x=hidden, gates=gates, tx=thidden, tgates=tgates, tdout=tout.dx)
    tin = linear_backward_jvp(dhalves.dx, saved.hidden, tdout=halves.dx, tx=tx, tw=t.w_in)
    tgate = linear_backward_jvp(dhalves.dgates, saved.gates, tdout=halves.dgates, tx=tx, tw=t.w_gate)
    dparams = GatedFeedForwardParams(tgate.dw, tin.dw, tout.dw, tgate.db, tin.db, tout.db)
    return GatedFeedForwardGrads(dparams, tin.dx + tgate.dx)
