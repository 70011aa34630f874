"""Forward mode and second order of multi-head attention. Wiring only.

``t…`` is a tangent, and ``None`` stands for one of 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._arrays.checks import check_tangent
from npattn._arrays.namespace import Array
from npattn._attention.attention import AttentionGrads, attention_backward
from npattn._attention.biases import LazyBias
from npattn._attention.jvp import AttentionTangents, tangent_of_out, tangents_of_gradients
from npattn._attention.masks import Mask
from npattn._attention.multi_head import (
    MultiHeadAttentionGrads,
    MultiHeadAttentionSaved,
    MultiHeadParams,
    multi_head_attention_forward,
)
from npattn.layers.dropout import Dropout
from npattn.layers.heads import merge_heads_backward
from npattn.layers.linear_jvp import (
    merge_heads_backward_jvp,
    merge_heads_tangent,
    project_heads_backward_jvp,
    project_heads_tangent,
)
from npattn.layers.positions import Rotary, RotateSaved, rotate, rotate_backward

NONE: Any = MultiHeadParams(None, None, None, None)


def multi_head_attention_jvp(
    params: MultiHeadParams,
    x_q: Array,
    x_kv: Array,
    /,
    *,
    tparams: MultiHeadParams | None = None,
    tx_q: Array | None = None,
    tx_kv: Array | None = None,
    tbias: Array | None = None,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    rotary: Rotary | None = None,
) -> tuple[Array, Array]:
    """``out`` of `multi_head_attention` and its tangent.

    Parameters
    ----------
    params : MultiHeadParams
        As in `multi_head_attention_forward`, and so are all options.
    x_q : float array (..., T, C)
        Where the queries come from.
    x_kv : float array (..., S, C)
        Where keys and values come from.
    tparams : MultiHeadParams, optional
        The tangents of the parameters; ``None``, for all or for one of them, is 0.
    tx_q, tx_kv, tbias : float arrays, optional
        The tangents of x_q, x_kv and bias; 0 by default. Self-attention gives that of x twice.
    mask, bias, scale, softcap, dropout : optional
        As in `attention_forward`.
    rotary : Rotary, optional
        As in `multi_head_attention_forward`.

    Returns
    -------
    out : array (..., T, C)
        As from `multi_head_attention`.
    tout : array (..., T, C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that is not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Tangents of layers".

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> params = MultiHeadParams.init(rng, width=8, heads=2)
    >>> x, t = rng.standard_normal((2, 3, 8))
    >>> out, tout = multi_head_attention_jvp(params, x, x, tx_q=t, tx_kv=t)
    >>> moved, _ = multi_head_attention_jvp(params, x + 1e-6 * t, x + 1e-6 * t)
    >>> bool(np.allclose((moved - out) / 1e-6, tout, atol=1e-5))
    True
    """
    options: dict[str, Any] = {"mask": mask, "bias": bias, "scale": scale, "softcap": softcap}
    out, saved = multi_head_attention_forward(params, x_q, x_kv, **options, dropout=dropout, rotary=rotary)
    _check("multi_head_attention_jvp", params, tparams)
    return out, multi_head_tangent("multi_head_attention_jvp", saved, tparams, tx_q, tx_kv, tbias)


def multi_head_attention_backward_jvp(
    dout: Array,
    saved: MultiHeadAttentionSaved,
    /,
    *,
    tparams: MultiHeadParams | None = None,
    tx_q: Array | None = None,
    tx_kv: Array | None = None,
    tbias: Array | None = None,
    tdout: Array | None = None,
) -> MultiHeadAttentionGrads:
    """The tangents of the gradients of `multi_head_attention_backward`; if tdout is 0, the Hessian of ``⟨dout, out⟩`` times them.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : MultiHeadAttentionSaved
        From `multi_head_attention_forward`.
    tparams : MultiHeadParams, optional
        The tangents of the parameters; ``None``, for all or for one of them, is 0.
    tx_q, tx_kv, tbias, tdout : float arrays, optional
        The tangents of x_q, x_kv, bias and dout; 0 by default.

    Returns
    -------
    MultiHeadAttentionGrads
        The tangents of ``dparams``, ``dx_q``, ``dx_kv`` and ``dbias``, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that was not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Tangents of layers".
    """
    _check("multi_head_attention_backward_jvp", saved.params, tparams)
    return multi_head_tangents(dout, saved, tparams, tx_q, tx_kv, tbias, tdout)[1]


def multi_head_tangents(
    dout: Array,
    saved: MultiHeadAttentionSaved,
    tparams: MultiHeadParams | None,
    tx_q: Array | None,
    tx_kv: Array | None,
    tbias: Array | None,
    tdout: Array | None,
) -> tuple[AttentionGrads, MultiHeadAttentionGrads]:
    """The gradients of the projections, ``dq``, ``dk`` and ``dv``; and the tangents of all gradients."""
    op, t = "multi_head_attention_backward_jvp", NONE if tparams is None else tparams
    along = _of_attention(op, saved, t, tx_q, tx_kv, tbias)
    dheads = merge_heads_backward(dout, saved.out).dx
    merged = merge_heads_backward_jvp(dout, saved.out, tdout=tdout, tw=t.w_o)
    attended = attention_backward(dheads, saved.attention)
    change, theads, _ = tangents_of_gradients(op, dheads, saved.attention, along, tdout=merged.dx)
    w_o = _sum(merged.dw, merge_heads_backward_jvp(dout, saved.out, tx=theads).dw)
    dq, tdq = (_turned_back(x, saved.rotated_q) for x in (attended.dq, change.dq))
    dk, tdk = (_turned_back(x, saved.rotated_k) for x in (attended.dk, change.dk))
    q = project_heads_backward_jvp(dq, saved.q, tdout=tdq, tx=tx_q, tw=t.w_q)
    k = project_heads_backward_jvp(dk, saved.k, tdout=tdk, tx=tx_kv, tw=t.w_k)
    v = project_heads_backward_jvp(attended.dv, saved.v, tdout=change.dv, tx=tx_kv, tw=t.w_v)
    dparams = MultiHeadParams(q.dw, k.dw, v.dw, w_o, q.db, k.db, v.db, merged.db, change.dsinks)
    tgrads = MultiHeadAttentionGrads(dparams, q.dx, _sum(k.dx, v.dx), change.dbias)
    return attended._replace(dq=dq, dk=dk), tgrads


def multi_head_tangent(
    op: str,
    saved: MultiHeadAttentionSaved,
    tparams: MultiHeadParams | None,
    tx_q: Array | None,
    tx_kv: Array | None,
    tbias: Array | None,
) -> Array:
    """The tangent of `multi_head_attention`'s out, from what forward saved."""
    params, t = saved.params, NONE if tparams is None else tparams
    theads = tangent_of_out(op, saved.attention, _of_attention(op, saved, t, tx_q, tx_kv, tbias))
    return merge_heads_tangent(op, saved.out.x, params.w_o, params.b_o, tx=theads, tw=t.w_o, tb=t.b_o)


def _of_attention(
    op: str, saved: MultiHeadAttentionSaved, t: MultiHeadParams, tx_q: Array | None, tx_kv: Array | None, tbias: Array | None
) -> AttentionTangents:
    """What moves in attention when this moves around it."""
    params, x_q, x_kv = saved.params, saved.q.x, saved.k.x

    def projected(x: Array, w: Array, b: Array | None, tx: Array | None, tw: Array | None, tb: Array | None) -> Array | None:
        if tx is None and tw is None and tb is None:
            return None
        return project_heads_tangent(op, x, w, b, tx=tx, tw=tw, tb=tb)

    tq = projected(x_q, params.w_q, params.b_q, tx_q, t.w_q, t.b_q)
    tk = projected(x_kv, params.w_k, params.b_k, tx_kv, t.w_k, t.b_k)
    tv = projected(x_kv, params.w_v, params.b_v, tx_kv, t.w_v, t.b_v)
    return AttentionTangents(_turned(tq, saved.rotated_q), _turned(tk, saved.rotated_k), tv, tbias, t.sinks)


def _turned(x: Array | None, saved: RotateSaved | None) -> Array | None:
    return x if x is None or saved is None else rotate(x, saved.rotary)


def _turned_back(x: Array, saved: RotateSaved | None) -> Array:
    return x if saved is None else rotate_backward(x, saved).dx


def _sum(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        return a + b


def _check(op: str, params: MultiHeadParams, tparams: MultiHeadParams | None) -> None:
    if tparams is not None:
        for name, x, t in zip(params._fields, params, tparams, strict=True):
            check_tangent(op, name, t, x)
