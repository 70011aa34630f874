"""Attention without a framework: forward and hand-derived backward passes, written once against the array API standard."""

from npattn._arrays.threads import get_num_threads, set_num_threads
from npattn._arrays.trees import tree_map
from npattn._attention.attention import (
    AttentionGrads,
    AttentionSaved,
    attention,
    attention_backward,
    attention_forward,
)
from npattn._attention.biases import LazyBias, alibi_bias, relative_bias
from npattn._attention.masks import (
    Mask,
    causal_mask,
    causal_mask_end,
    length_mask,
    segment_mask,
    window_mask,
)
from npattn.layers.dropout import Dropout

__version__ = "0.1.0"

__all__ = [
    "AttentionGrads",
    "AttentionSaved",
    "Dropout",
    "LazyBias",
    "Mask",
    "alibi_bias",
    "attention",
    "attention_backward",
    "attention_forward",
    "causal_mask",
    "causal_mask_end",
    "get_num_threads",
    "length_mask",
    "relative_bias",
    "segment_mask",
    "set_num_threads",
    "tree_map",
    "window_mask",
]
