"""What stands inside the residual branches of blocks: self-attention, cross-attention, the feed-forward network. Wiring only."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._arrays.checks import shape_error
from npattn._arrays.namespace import Array, array_namespace, float_dtype
from npattn._attention.biases import LazyBias
from npattn._attention.mask_kinds import window_mask
from npattn._attention.masks import Mask
from npattn._attention.multi_head import (
    MultiHeadAttentionGrads,
    MultiHeadAttentionSaved,
    MultiHeadParams,
    multi_head_attention_backward,
    multi_head_attention_forward,
)
from npattn.layers.dropout import Dropout
from npattn.layers.feed_forward import FeedForwardParams, FeedForwardSaved, feed_forward_backward, feed_forward_forward
from npattn.layers.gated_feed_forward import (
    GatedFeedForwardParams,
    GatedFeedForwardSaved,
    gated_feed_forward_backward,
    gated_feed_forward_forward,
)
from npattn.models._residual import add
from npattn.models.config import BlockConfig

FeedParams = FeedForwardParams | GatedFeedForwardParams
FeedSaved = FeedForwardSaved | GatedFeedForwardSaved


def self_attention_forward(
    params: MultiHeadParams,
    x: Array,
    *,
    mask: Mask | Array | None,
    bias: Array | LazyBias | None,
    dropout: Dropout | None,
    config: BlockConfig,
) -> tuple[Array, MultiHeadAttentionSaved]:
    """A sequence attends to itself, within the config's window."""
    mask = within_window(mask, config)
    options: dict[str, Any] = {"scale": config.scale, "softcap": config.softcap, "rotary": config.rotary}
    return multi_head_attention_forward(params, x, x, mask=mask, bias=bias, dropout=dropout, **options)


def self_attention_backward(dout: Array, saved: MultiHeadAttentionSaved) -> tuple[Array, MultiHeadAttentionGrads]:
    """``dx``, to which queries, keys and values contribute; and the other gradients."""
    grads = multi_head_attention_backward(dout, saved)
    return add(grads.dx_q, grads.dx_kv), grads


def within_window(mask: Mask | Array | None, config: BlockConfig) -> Mask | Array | None:
    """The mask, and the config's window."""
    window = config.window
    if window is None:
        return mask
    assert not isinstance(window, tuple)  # the config is checked, and a stack has told whose turn it is
    near = window_mask(window, window)
    return near if mask is None else near & mask


def cross_attention_forward(
    params: MultiHeadParams,
    x: Array,
    memory: Array,
    *,
    mask: Mask | Array | None,
    dropout: Dropout | None,
    config: BlockConfig,
) -> tuple[Array, MultiHeadAttentionSaved]:
    """A sequence attends to another."""
    options: dict[str, Any] = {"scale": config.scale, "softcap": config.softcap}
    return multi_head_attention_forward(params, x, memory, mask=mask, dropout=dropout, **options)


def cross_attention_backward(dout: Array, saved: MultiHeadAttentionSaved) -> tuple[Array, MultiHeadAttentionGrads]:
    """``dx``; and the other gradients, that of the memory as ``dx_kv``."""
    grads = multi_head_attention_backward(dout, saved)
    return grads.dx_q, grads


def feed(params: FeedParams, x: Array, config: BlockConfig) -> tuple[Array, FeedSaved]:
    """The network that the parameters' type says."""
    if isinstance(params, GatedFeedForwardParams):
        return gated_feed_forward_forward(params, x, activation=config.activation)
    return feed_forward_forward(params, x, activation=config.activation)


def feed_backward(dout: Array, saved: FeedSaved) -> tuple[Array, FeedParams]:
    """``dx``, and the gradient of the parameters."""
    if isinstance(saved, GatedFeedForwardSaved):
        gated = gated_feed_forward_backward(dout, saved)
        return gated.dx, gated.dparams
    plain = feed_forward_backward(dout, saved)
    return plain.dx, plain.dparams


def init_feed_forward(
    rng: np.random.Generator, *, width: int, hidden: int | None, gated: bool, bias: bool, **place: Any
) -> FeedParams:
    """New parameters; four times as wide inside as outside, unless it is said."""
    kind = GatedFeedForwardParams if gated else FeedForwardParams
    return kind.init(rng, width=width, hidden=4 * width if hidden is None else hidden, bias=bias, **place)


def check_sequences(op: str, **sequences: Array) -> None:
    """Sequences of vectors: x, and the memory."""
    array_namespace(op, **sequences)
    float_dtype(op, **sequences)
    for name, x in sequences.items():
        if x.ndim < 2:
            shape_error(op, name, "(..., S, C)" if name == "memory" else "(..., T, C)", x.shape)
