"""PyTorch's transformer layers in our parameters: a dictionary of arrays by PyTorch's names in, a tree out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from npattn import MultiHeadParams
from npattn.layers import FeedForwardParams
from npattn.models import DecoderBlockParams, DecoderParams, EncoderBlockParams, EncoderParams, NormParams

Arrays = Mapping[str, np.ndarray]


def multi_head(arrays: Arrays, prefix: str, heads: int) -> MultiHeadParams:
    """``in_proj_weight`` has the rows of queries, keys, values; weights multiply from the left, head h is a run of rows."""
    packed, biases = arrays[f"{prefix}in_proj_weight"], arrays.get(f"{prefix}in_proj_bias")
    width = packed.shape[1]
    w_q, w_k, w_v = (w.T.reshape(width, heads, width // heads) for w in np.split(packed, 3))
    b_q = b_k = b_v = None
    if biases is not None:
        b_q, b_k, b_v = (b.reshape(heads, width // heads) for b in np.split(biases, 3))
    w_o = arrays[f"{prefix}out_proj.weight"].T.reshape(heads, width // heads, width)
    return MultiHeadParams(w_q, w_k, w_v, w_o, b_q, b_k, b_v, arrays.get(f"{prefix}out_proj.bias"))


def feed_forward(arrays: Arrays, prefix: str) -> FeedForwardParams:
    w_in, w_out = (arrays[f"{prefix}linear{n}.weight"].T for n in (1, 2))
    return FeedForwardParams(w_in, w_out, arrays.get(f"{prefix}linear1.bias"), arrays.get(f"{prefix}linear2.bias"))


def norm(arrays: Arrays, prefix: str) -> NormParams:
    return NormParams(arrays[f"{prefix}weight"], arrays.get(f"{prefix}bias"))


def encoder_block(arrays: Arrays, heads: int, prefix: str = "") -> EncoderBlockParams:
    attention = multi_head(arrays, f"{prefix}self_attn.", heads)
    norms = [norm(arrays, f"{prefix}norm{n}.") for n in (1, 2)]
    return EncoderBlockParams(attention, feed_forward(arrays, prefix), *norms)


def decoder_block(arrays: Arrays, heads: int, prefix: str = "") -> DecoderBlockParams:
    both = [multi_head(arrays, f"{prefix}{name}.", heads) for name in ("self_attn", "multihead_attn")]
    norms = [norm(arrays, f"{prefix}norm{n}.") for n in (1, 2, 3)]
    return DecoderBlockParams(both[0], both[1], feed_forward(arrays, prefix), *norms)


def _stack(kind: Any, block: Any, arrays: Arrays, heads: int, prefix: str) -> Any:
    count = len({name.removeprefix(prefix).split(".")[1] for name in arrays if name.startswith(f"{prefix}layers.")})
    blocks = tuple(block(arrays, heads, f"{prefix}layers.{n}.") for n in range(count))
    return kind(blocks, norm(arrays, f"{prefix}norm.") if f"{prefix}norm.weight" in arrays else None)


def encoder(arrays: Arrays, heads: int, prefix: str = "") -> EncoderParams:
    stack: EncoderParams = _stack(EncoderParams, encoder_block, arrays, heads, prefix)
    return stack


def decoder(arrays: Arrays, heads: int, prefix: str = "") -> DecoderParams:
    stack: DecoderParams = _stack(DecoderParams, decoder_block, arrays, heads, prefix)
    return stack
