"""What happened inside multi-head attention: the steps of attention with the projections around them."""

from __future__ import annotations

from typing import NamedTuple

from npattn._arrays.namespace import Array
from npattn._attention import explain
from npattn._attention.multi_head import (
    MultiHeadAttentionGrads,
    MultiHeadAttentionSaved,
    multi_head_attention_backward,
)
from npattn._attention.steps import AttentionSteps, AttentionStepsBackward, attention_steps, attention_steps_backward
from npattn.layers.heads import merge_heads, merge_heads_backward, project_heads


class MultiHeadAttentionSteps(NamedTuple):
    """The forward intermediates of multi-head attention.

    ``attention`` holds the steps between the projections; its ``out`` are the heads' results before they are merged.
    """

    q: Array  # (..., H, T, D)
    k: Array  # (..., K, S, D)
    v: Array  # (..., K, S, E)
    attention: AttentionSteps
    out: Array  # (..., T, C)
    rotated_q: Array | None = None  # (..., H, T, D), where there is a rotary: attention receives these
    rotated_k: Array | None = None  # (..., K, S, D)

    def __repr__(self) -> str:
        return explain.projection_table(self)


class MultiHeadAttentionStepsBackward(NamedTuple):
    """The gradients of the intermediates of multi-head attention, and of its inputs."""

    dheads: Array  # (..., H, T, E), the cotangent that attention receives
    attention: AttentionStepsBackward
    grads: MultiHeadAttentionGrads

    def __repr__(self) -> str:
        return repr(self.attention)


def multi_head_attention_steps(saved: MultiHeadAttentionSaved, /) -> MultiHeadAttentionSteps:
    """Every intermediate of a forward pass of multi-head attention.

    Parameters
    ----------
    saved : MultiHeadAttentionSaved
        From `multi_head_attention_forward`.

    Returns
    -------
    MultiHeadAttentionSteps
        q (..., H, T, D), k (..., K, S, D), v (..., K, S, E); ``attention``, an AttentionSteps; out (..., T, C); and rotated_q and
        rotated_k, if they were rotated.
    """
    xp, params = saved.attention.problem.xp, saved.params
    q, k, v = (xp.astype(x, x.dtype) for x in (saved.attention.q, saved.attention.k, saved.attention.v))
    out = merge_heads(saved.out.x, params.w_o, params.b_o)
    steps = MultiHeadAttentionSteps(q, k, v, attention_steps(saved.attention), out)
    if saved.rotated_q is None:
        return steps
    projected = {"q": project_heads(saved.q.x, params.w_q, params.b_q), "k": project_heads(saved.k.x, params.w_k, params.b_k)}
    return steps._replace(**projected, rotated_q=q, rotated_k=k)


def multi_head_attention_steps_backward(dout: Array, saved: MultiHeadAttentionSaved, /) -> MultiHeadAttentionStepsBackward:
    """The gradient of every intermediate of a backward pass of multi-head attention.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : MultiHeadAttentionSaved
        From `multi_head_attention_forward`.

    Returns
    -------
    MultiHeadAttentionStepsBackward
        ``dheads``; ``attention``, an AttentionStepsBackward, whose dq, dk, dv are the gradients of the projections (of the
        rotated ones, if they were rotated); and ``grads``, those of the parameters and inputs.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    """
    grads = multi_head_attention_backward(dout, saved)
    dheads = merge_heads_backward(dout, saved.out).dx
    return MultiHeadAttentionStepsBackward(dheads, attention_steps_backward(dheads, saved.attention), grads)
