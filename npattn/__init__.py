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
from npattn._attention.jvp import (
    AttentionBackwardGrads,
    AttentionTangents,
    attention_backward_backward,
    attention_backward_jvp,
    attention_hvp,
    attention_jvp,
)
from npattn._attention.mask_kinds import causal_mask, causal_mask_end, length_mask, segment_mask, window_mask
from npattn._attention.masks import Mask
from npattn._attention.merge import (
    MergeAttentionGrads,
    MergeAttentionSaved,
    merge_attention,
    merge_attention_backward,
    merge_attention_forward,
)
from npattn._attention.multi_head import (
    MultiHeadAttentionGrads,
    MultiHeadAttentionSaved,
    MultiHeadParams,
    multi_head_attention,
    multi_head_attention_backward,
    multi_head_attention_forward,
)
from npattn._attention.multi_head_jvp import multi_head_attention_backward_jvp, multi_head_attention_jvp
from npattn._attention.multi_head_steps import (
    MultiHeadAttentionSteps,
    MultiHeadAttentionStepsBackward,
    multi_head_attention_steps,
    multi_head_attention_steps_backward,
)
from npattn._attention.steps import (
    AttentionSteps,
    AttentionStepsBackward,
    attention_steps,
    attention_steps_backward,
    attention_weights,
)
from npattn._explore.explorer import Explorer, explore
from npattn.layers.dropout import Dropout
from npattn.layers.positions import Rotary

__version__ = "0.1.0"

__all__ = [
    "AttentionBackwardGrads",
    "AttentionGrads",
    "AttentionSaved",
    "AttentionSteps",
    "AttentionStepsBackward",
    "AttentionTangents",
    "Dropout",
    "Explorer",
    "LazyBias",
    "Mask",
    "MergeAttentionGrads",
    "MergeAttentionSaved",
    "MultiHeadAttentionGrads",
    "MultiHeadAttentionSaved",
    "MultiHeadAttentionSteps",
    "MultiHeadAttentionStepsBackward",
    "MultiHeadParams",
    "Rotary",
    "alibi_bias",
    "attention",
    "attention_backward",
    "attention_backward_backward",
    "attention_backward_jvp",
    "attention_forward",
    "attention_hvp",
    "attention_jvp",
    "attention_steps",
    "attention_steps_backward",
    "attention_weights",
    "causal_mask",
    "causal_mask_end",
    "explore",
    "get_num_threads",
    "length_mask",
    "merge_attention",
    "merge_attention_backward",
    "merge_attention_forward",
    "multi_head_attention",
    "multi_head_attention_backward",
    "multi_head_attention_backward_jvp",
    "multi_head_attention_forward",
    "multi_head_attention_jvp",
    "multi_head_attention_steps",
    "multi_head_attention_steps_backward",
    "relative_bias",
    "segment_mask",
    "set_num_threads",
    "tree_map",
    "window_mask",
]
