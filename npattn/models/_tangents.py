"""Tangents through what blocks and models are made of, from what forward saved. Wiring only.

``x_tangent`` gives that of out. ``x_tangents`` gives ``dx``, its tangent, and the tangents of the other gradients: the way back
and its change go together, since a part needs both from the part after it. A tangent of ``None`` is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from npattn._arrays.checks import check_tangent, shape_error
from npattn._arrays.namespace import Array
from npattn._attention.multi_head import MultiHeadAttentionGrads, MultiHeadAttentionSaved, MultiHeadParams
from npattn._attention.multi_head_jvp import multi_head_tangent, multi_head_tangents
from npattn.layers.feed_forward_jvp import (
    feed_forward_backward_jvp,
    feed_forward_tangent,
    gated_feed_forward_backward_jvp,
    gated_feed_forward_tangent,
)
from npattn.layers.gated_feed_forward import GatedFeedForwardSaved
from npattn.layers.heads import project_heads_backward
from npattn.layers.linear import LinearSaved
from npattn.layers.linear_jvp import linear_backward_jvp, linear_tangent, tied_logits_backward_jvp, tied_logits_tangent
from npattn.layers.norm import LayerNormSaved
from npattn.layers.norm_jvp import layer_norm_backward_jvp, layer_norm_tangent, rms_norm_backward_jvp, rms_norm_tangent
from npattn.models._logits import LogitsGrads, LogitsSaved
from npattn.models._residual import BranchSaved, add, drop_backward
from npattn.models._sublayers import FeedParams, FeedSaved, feed_backward
from npattn.models.norm import NormParams, NormSaved, norm_backward

Grads = TypeVar("Grads")
NO_NORM = NormParams(None, None)
drop_tangent = drop_backward  # dropout multiplies by the same factors either way


def check_tangents(op: str, name: str, tree: Any, tangents: Any) -> None:
    """A tree of tangents fits a tree of parameters; ``None`` in the place of anything is 0."""
    if tangents is None:
        return
    if not isinstance(tree, tuple):
        check_tangent(op, name, tangents, tree)
        return
    if type(tangents) is not type(tree) or len(tangents) != len(tree):
        raise TypeError(f"{op}: t{name} must be a {type(tree).__name__} of {len(tree)} as {name} is, got {tangents!r}")
    for part, x, t in zip(getattr(tree, "_fields", range(len(tree))), tree, tangents, strict=True):
        check_tangents(op, f"{name}.{part}", x, t)


def norm_tangent(saved: NormSaved, tparams: NormParams | None, tx: Array | None) -> Array:
    t = NO_NORM if tparams is None else tparams
    op, has_bias, features = "norm_jvp", isinstance(saved, LayerNormSaved) and saved.has_bias, tuple(saved.x.shape[-1:])
    check_tangent(op, "weight", t.weight, saved.weight)
    if t.bias is not None and not has_bias:
        raise ValueError(f"{op}: tbias is given, but there is no bias")
    if t.bias is not None and tuple(t.bias.shape) != features:
        shape_error(op, "tbias", f"{features} as bias has", t.bias.shape)
    if isinstance(saved, LayerNormSaved):
        return layer_norm_tangent(saved, tx=tx, tweight=t.weight, tbias=t.bias)
    return rms_norm_tangent(saved, tx=tx, tweight=t.weight)


def norm_tangents(
    dout: Array, saved: NormSaved, tparams: NormParams | None, tx: Array | None, tdout: Array | None
) -> tuple[Array, Array, NormParams]:
    weight = None if tparams is None else tparams.weight
    dx, _ = norm_backward(dout, saved)
    if isinstance(saved, LayerNormSaved):
        layer = layer_norm_backward_jvp(dout, saved, tdout=tdout, tx=tx, tweight=weight)
        return dx, layer.dx, NormParams(layer.dweight, layer.dbias)
    rms = rms_norm_backward_jvp(dout, saved, tdout=tdout, tx=tx, tweight=weight)
    return dx, rms.dx, NormParams(rms.dweight)


class Inner(NamedTuple):
    """What stands inside a branch."""

    tangent: Callable[[Array], Array]  # tx → tout
    tangents: Callable[[Array, Array, Array], tuple[Array, Array, Any]]  # dout, tx, tdout → dx, tdx, the other tangents


def branch_tangent(saved: BranchSaved, tnorm: NormParams | None, tx: Array, inner: Inner) -> Array:
    if saved.norm_order == "pre":
        return add(tx, drop_tangent(inner.tangent(norm_tangent(saved.norm, tnorm, tx)), saved.dropout))
    return norm_tangent(saved.norm, tnorm, _sum_tangent(saved, tx, inner))


def _sum_tangent(saved: BranchSaved, tx: Array, inner: Inner) -> Array:
    """The tangent of x + dropout(inner(x))."""
    return add(tx, drop_tangent(inner.tangent(tx), saved.dropout))


def branch_tangents(
    dout: Array, tdout: Array, saved: BranchSaved, tnorm: NormParams | None, tx: Array, inner: Inner
) -> tuple[Array, Array, Any, NormParams]:
    """``dx``, its tangent, what ``inner.tangents`` gives beside, and the tangents of the norm's gradients."""
    if saved.norm_order == "pre":
        tnormed = norm_tangent(saved.norm, tnorm, tx)
        dbranch, tdbranch = (drop_backward(d, saved.dropout) for d in (dout, tdout))
        dnormed, tdnormed, tgrads = inner.tangents(dbranch, tnormed, tdbranch)
        dx, tdx, tdnorm = norm_tangents(dnormed, saved.norm, tnorm, tx, tdnormed)
        return add(dout, dx), add(tdout, tdx), tgrads, tdnorm
    dsum, tdsum, tdnorm = norm_tangents(dout, saved.norm, tnorm, _sum_tangent(saved, tx, inner), tdout)
    dbranch, tdbranch = (drop_backward(d, saved.dropout) for d in (dsum, tdsum))
    dx, tdx, tgrads = inner.tangents(dbranch, tx, tdbranch)
    return add(dsum, dx), add(tdsum, tdx), tgrads, tdnorm


def self_attention(op: str, saved: MultiHeadAttentionSaved, tparams: MultiHeadParams | None, tbias: Array | None) -> Inner:
    def tangent(tx: Array) -> Array:
        return multi_head_tangent(op, saved, tparams, tx, tx, tbias)

    def tangents(dout: Array, tx: Array, tdout: Array) -> tuple[Array, Array, MultiHeadAttentionGrads]:
        grads, change = multi_head_tangents(dout, saved, tparams, tx, tx, tbias, tdout)
        parts = ((grads.dq, saved.q), (grads.dk, saved.k), (grads.dv, saved.v))
        dx = add(*(project_heads_backward(d, projection).dx for d, projection in parts))
        return dx, add(change.dx_q, change.dx_kv), change

    return Inner(tangent, tangents)


def feed_forward(saved: FeedSaved, tparams: Any) -> Inner:
    def tangent(tx: Array) -> Array:
        if isinstance(saved, GatedFeedForwardSaved):
            return gated_feed_forward_tangent(saved, tparams, tx)
        return feed_forward_tangent(saved, tparams, tx)

    def tangents(dout: Array, tx: Array, tdout: Array) -> tuple[Array, Array, FeedParams]:
        dx, _ = feed_backward(dout, saved)
        if isinstance(saved, GatedFeedForwardSaved):
            gated = gated_feed_forward_backward_jvp(dout, saved, tparams=tparams, tx=tx, tdout=tdout)
            return dx, gated.dx, gated.dparams
        plain = feed_forward_backward_jvp(dout, saved, tparams=tparams, tx=tx, tdout=tdout)
        return dx, plain.dx, plain.dparams

    return Inner(tangent, tangents)


def logits_tangent(op: str, saved: LogitsSaved, tx: Array, ttable: Array | None, tw: Array | None, tb: Array | None) -> Array:
    if not isinstance(saved, LinearSaved):
        return tied_logits_tangent(op, saved.x, saved.table, tx=tx, ttable=ttable)
    tout = linear_tangent(op, saved.x, saved.w, None, tx=tx, tw=tw, tb=None)
    return add(tout, tb)


def logits_tangents(
    dout: Array, saved: LogitsSaved, tx: Array, ttable: Array | None, tw: Array | None, tdout: Array | None
) -> LogitsGrads:
    """The tangents of the gradients of whichever it was."""
    if isinstance(saved, LinearSaved):
        linear = linear_backward_jvp(dout, saved, tdout=tdout, tx=tx, tw=tw)
        return LogitsGrads(linear.dx, None, linear.dw, linear.db)
    tied = tied_logits_backward_jvp(dout, saved, tdout=tdout, tx=tx, ttable=ttable)
    return LogitsGrads(tied.dx, tied.dtable, None, None)
