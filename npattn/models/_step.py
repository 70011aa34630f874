"""A block of a decoder that reads on: the layers without what backward would need, and attention over a cache. Wiring only.

A step of one token is so little arithmetic that looking at shapes and libraries would take longer. Where NumPy or CuPy have few
rows, `Few` does the layers with as few calls as possible; everything else goes through the layers that everybody calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn._arrays.namespace import HALVES, Array, Namespace, array_namespace, dtype_name, library_name
from npattn._attention import formula
from npattn._attention.attention import attention
from npattn._attention.biases import LazyBias
from npattn._attention.multi_head import MultiHeadParams
from npattn._attention.ops import Fresh
from npattn.layers._curves import CURVES
from npattn.layers._features import centred_rows, row_mean
from npattn.layers.gated_feed_forward import GatedFeedForwardParams
from npattn.layers.heads import merge_heads, project_heads
from npattn.layers.positions import rotate
from npattn.models._logits import logits_forward
from npattn.models._sublayers import FeedParams, feed
from npattn.models.cache import KeyValueCache
from npattn.models.config import BlockConfig
from npattn.models.norm import NormParams, norm_forward

ROWS = 32  # with more, the layers' own threads are worth their calls


class Plain:
    """The layers that everybody calls."""

    def norm(self, op: str, params: NormParams, x: Array, config: BlockConfig) -> Array:
        return norm_forward(op, params, x, config)[0]

    def heads(self, x: Array, w: Array, b: Array | None) -> Array:
        return project_heads(x, w, b)

    def merge(self, heads: Array, w: Array, b: Array | None) -> Array:
        return merge_heads(heads, w, b)

    def feed(self, params: FeedParams, x: Array, config: BlockConfig) -> Array:
        return feed(params, x, config)[0]

    def attend_to_all(self, q: Array, k: Array, v: Array, sinks: Array | None, config: BlockConfig) -> Array:
        return attention(q, k, v, scale=config.scale, softcap=config.softcap, sinks=sinks)

    def logits(self, op: str, x: Array, table: Array, w: Array | None, b: Array | None) -> Array:
        return logits_forward(op, x, table, w, b)[0]


class Few(Plain):
    """The same of few rows, in float32 or float64; shapes have been seen to by the first step's cache."""

    def __init__(self, xp: Namespace) -> None:
        self.xp = xp

    def norm(self, op: str, params: NormParams, x: Array, config: BlockConfig) -> Array:
        xp, rows = self.xp, x.reshape(-1, x.shape[-1])
        if config.norm == "layer":
            rows = centred_rows(rows, row_mean(rows, xp=xp), xp=xp)
        elif params.bias is not None:
            return super().norm(op, params, x, config)  # which says what is wrong
        rows = rows / xp.sqrt(row_mean(rows, rows, xp=xp) + config.eps)
        rows = rows if params.weight is None else rows * params.weight
        return (rows if params.bias is None else rows + params.bias).reshape(x.shape)

    def linear(self, x: Array, w: Array, b: Array | None) -> Array:
        out = x.reshape(-1, w.shape[0]) @ w
        out = out if b is None else out + b
        return out.reshape(*x.shape[:-1], w.shape[1])

    def heads(self, x: Array, w: Array, b: Array | None) -> Array:
        flat = self.linear(x, w.reshape(w.shape[0], -1), None if b is None else b.reshape(-1))
        return flat.reshape(*x.shape[:-1], *w.shape[1:]).swapaxes(-2, -3)

    def merge(self, heads: Array, w: Array, b: Array | None) -> Array:
        flat = heads.swapaxes(-2, -3)
        return self.linear(flat.reshape(*flat.shape[:-2], -1), w.reshape(-1, w.shape[-1]), b)

    def feed(self, params: FeedParams, x: Array, config: BlockConfig) -> Array:
        curve = CURVES[config.activation].value
        hidden = self.linear(x, params.w_in, params.b_in)
        if isinstance(params, GatedFeedForwardParams):
            hidden = hidden * curve(self.linear(x, params.w_gate, params.b_gate), self.xp)
        else:
            hidden = curve(hidden, self.xp)
        return self.linear(hidden, params.w_out, params.b_out)

    def attend_to_all(self, q: Array, k: Array, v: Array, sinks: Array | None, config: BlockConfig) -> Array:
        *lead, heads, queries, size = q.shape
        if queries != 1 or sinks is not None or not k.shape[-2]:
            return super().attend_to_all(q, k, v, sinks, config)
        scale = 1 / math.sqrt(size) if config.scale is None else config.scale
        rows = q.reshape(*lead, k.shape[-3], -1, size) * scale  # the heads of a group are rows of one matrix
        part, _ = formula.forward_tile(Fresh(self.xp, q.dtype), rows, k, v, formula.Terms(config.softcap))
        return formula.normalised(part, self.xp, every_row_sees=True).reshape(*lead, heads, 1, v.shape[-1])

    def logits(self, op: str, x: Array, table: Array, w: Array | None, b: Array | None) -> Array:
        if w is None and b is not None:
            return super().logits(op, x, table, w, b)  # which says what is wrong
        return self.linear(x, table.T if w is None else w, b)


def layers_for(x: Array) -> Plain:
    """Those that suit a step with this input, (..., T, C)."""
    xp = array_namespace("step", x=x)
    few = 0 < math.prod(x.shape[:-1]) <= ROWS and dtype_name(x.dtype) not in HALVES
    return Few(xp) if few and (xp is np or library_name(xp) == "cupy") else Plain()


def branch(op: str, layers: Plain, norm: NormParams, x: Array, inner: Callable[[Array], Array], config: BlockConfig) -> Array:
    """``x + inner(norm(x))``, or ``norm(x + inner(x))``."""
    if config.norm_order == "pre":
        return x + inner(layers.norm(op, norm, x, config))
    return layers.norm(op, norm, x + inner(x), config)


class Reader:
    """The blocks of a stack, over one cache: block after block, and then the cache that it has become."""

    def __init__(self, op: str, cache: KeyValueCache, x: Array, bias: LazyBias | None) -> None:
        self.op, self.cache, self.layers = op, cache, layers_for(x)
        self.count = x.shape[-2]
        cache.check_room(op, tuple(x.shape[:-2]), self.count)
        self.positions = cache.positions(self.count)
        self.bias = None if bias is None else shifted(op, bias, cache.length)
        # one token sees the last keys: a slice, and no mask
        self.only_window = self.count == 1 and bias is None and cache.starts is None and isinstance(cache.length, int)
        self.keys: list[Array] = []
        self.values: list[Array] = []

    def attend(self, params: MultiHeadParams, x: Array, config: BlockConfig) -> Array:
        """Self-attention of the next block: over all that the cache has, and the new tokens."""
        layers, n = self.layers, len(self.keys)
        q, k, v = (layers.heads(x, w, b) for w, b in zip(params[:3], params[4:7], strict=True))
        if config.rotary is not None:
            rotary = config.rotary._replace(positions=self.positions, key_positions=None)
            q, k = rotate(q, rotary), rotate(k, rotary)
        keys, values, all_keys, all_values = self.cache.extended(n, k, v)
        self.keys.append(all_keys)
        self.values.append(all_values)
        if self.only_window:
            near = 0 if config.window is None else max(self.cache.length - config.window, 0)
            keys, values, config = keys[..., near:, :], values[..., near:, :], config._replace(window=None)
        mask = self.cache.mask(self.count, config)
        if mask is None and self.bias is None:
            out = layers.attend_to_all(q, keys, values, params.sinks, config)
        else:
            options: dict[str, Any] = {"scale": config.scale, "softcap": config.softcap, "sinks": params.sinks}
            out = attention(q, keys, values, mask=mask, bias=self.bias, **options)
        return layers.merge(out, params.w_o, params.b_o)

    def block(self, params: Any, x: Array, config: BlockConfig, cross: Callable[[Array], Array] | None = None) -> Array:
        """An encoder block, or a decoder block if there is something to cross over to."""
        op, layers = self.op, self.layers
        x = branch(op, layers, params.attention_norm, x, lambda x: self.attend(params.attention, x, config), config)
        if cross is not None:
            x = branch(op, layers, params.cross_attention_norm, x, cross, config)
        return branch(op, layers, params.feed_forward_norm, x, lambda x: layers.feed(params.feed_forward, x, config), config)

    def after(self) -> KeyValueCache:
        """The cache, longer by the new tokens."""
        return self.cache._replace(keys=tuple(self.keys), values=tuple(self.values), length=self.cache.length + self.count)


def shifted(op: str, bias: Any, length: Any) -> LazyBias:
    """The bias of tokens that stand behind ``length`` others."""
    if not isinstance(bias, LazyBias) or not isinstance(length, int):
        raise TypeError(f"{op}: with a cache, bias must be an alibi_bias or a relative_bias, and its length a number on the host")
    moved = copy.copy(bias)
    moved.offset = bias.offset + length
    return moved
