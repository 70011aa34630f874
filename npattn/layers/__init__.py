"""Layers: each an op in three functions, ``op``, ``op_forward -> (out, saved)``, ``op_backward(dout, saved)``.

===================================== ============================================= ======================
op                                    what it gives                                 gradients
===================================== ============================================= ======================
``linear(x, w, b=None)``              (..., C_in) → (..., C_out), x w + b           dx, dw, db
``project_heads(x, w, b=None)``       (..., T, C) → (..., H, T, D), x w_h + b_h     dx, dw, db
``merge_heads(x, w, b=None)``         (..., H, T, E) → (..., T, C), Σ_h x_h w_h + b dx, dw, db
``softmax(x, axis=, mask=)``          exp x / Σ exp x                               dx
``log_softmax(x, axis=, mask=)``      x - log Σ exp x                               dx
``logsumexp(x, axis=, mask=)``        log Σ exp x, without the axis                 dx
``layer_norm(x, weight, bias)``       (x - mean) / std * weight + bias              dx, dweight, dbias
``rms_norm(x, weight=None)``          x / rms * weight                              dx, dweight
``relu(x)``                           max(x, 0)                                     dx
``silu(x)``                           x σ(x)                                        dx
``gelu(x)``                           x Φ(x), the normal distribution itself        dx
``gelu_tanh(x)``                      its approximation by a tanh                   dx
``gate(x, gates, activation=)``       x * activation(gates)                         dx, dgates
``feed_forward(params, x)``           activation(x w_in + b_in) w_out + b_out       dparams, dx
``gated_feed_forward(params, x)``     (activation(x w_gate) * x w_in) w_out         dparams, dx
``embedding(table, ids)``             (V, C), ids (...) → (..., C), table[ids]      dtable
``tied_logits(x, table)``             (..., C), (V, C) → (..., V), x tableᵀ         dx, dtable
``rotate(x, Rotary(base, ...))``      pairs of features turned by the position      dx
``cross_entropy(logits, targets)``    (..., V), (...) → (), mean of -log softmax    dlogits, dweights
``dropout(x, Dropout(rate, seed))``   x kept / (1 - rate)                           dx
===================================== ============================================= ======================

Beside them, ``sinusoidal_positions(T, C)`` is a table without gradients. Learned positions are an embedding of the positions,
and a residual connection is ``x + f(x)``, whose gradient is ``dout + f_backward(dout, saved).dx``.

Gradients are read by name: ``g = linear_backward(dout, saved)``, then ``g.dw``. ``saved`` borrows the inputs: write to none of
them before backward has run. Results and gradients share memory with nothing. Masks are boolean, True where something counts.
"""

from npattn.layers.activation import (
    ReluGrads,
    ReluSaved,
    SiluGrads,
    SiluSaved,
    relu,
    relu_backward,
    relu_forward,
    silu,
    silu_backward,
    silu_forward,
)
from npattn.layers.activation_jvp import (
    gate_backward_jvp,
    gate_jvp,
    gelu_backward_jvp,
    gelu_jvp,
    gelu_tanh_backward_jvp,
    gelu_tanh_jvp,
    relu_backward_jvp,
    relu_jvp,
    silu_backward_jvp,
    silu_jvp,
)
from npattn.layers.dropout import Dropout, DropoutGrads, DropoutSaved, dropout, dropout_backward, dropout_forward
from npattn.layers.embedding import (
    EmbeddingGrads,
    EmbeddingSaved,
    TiedLogitsGrads,
    TiedLogitsSaved,
    embedding,
    embedding_backward,
    embedding_forward,
    tied_logits,
    tied_logits_backward,
    tied_logits_forward,
)
from npattn.layers.feed_forward import (
    FeedForwardGrads,
    FeedForwardParams,
    FeedForwardSaved,
    feed_forward,
    feed_forward_backward,
    feed_forward_forward,
)
from npattn.layers.feed_forward_jvp import (
    feed_forward_backward_jvp,
    feed_forward_jvp,
    gated_feed_forward_backward_jvp,
    gated_feed_forward_jvp,
)
from npattn.layers.gate import GateGrads, GateSaved, gate, gate_backward, gate_forward
from npattn.layers.gated_feed_forward import (
    GatedFeedForwardGrads,
    GatedFeedForwardParams,
    GatedFeedForwardSaved,
    gated_feed_forward,
    gated_feed_forward_backward,
    gated_feed_forward_forward,
)
from npattn.layers.gelu import (
    GeluGrads,
    GeluSaved,
    GeluTanhGrads,
    GeluTanhSaved,
    gelu,
    gelu_backward,
    gelu_forward,
    gelu_tanh,
    gelu_tanh_backward,
    gelu_tanh_forward,
)
from npattn.layers.heads import (
    MergeHeadsGrads,
    MergeHeadsSaved,
    ProjectHeadsGrads,
    ProjectHeadsSaved,
    merge_heads,
    merge_heads_backward,
    merge_heads_forward,
    project_heads,
    project_heads_backward,
    project_heads_forward,
)
from npattn.layers.linear import LinearGrads, LinearSaved, linear, linear_backward, linear_forward
from npattn.layers.linear_jvp import (
    linear_backward_jvp,
    linear_jvp,
    merge_heads_backward_jvp,
    merge_heads_jvp,
    project_heads_backward_jvp,
    project_heads_jvp,
    tied_logits_backward_jvp,
    tied_logits_jvp,
)
from npattn.layers.loss import CrossEntropyGrads, CrossEntropySaved, cross_entropy, cross_entropy_backward, cross_entropy_forward
from npattn.layers.loss_jvp import (
    cross_entropy_backward_jvp,
    cross_entropy_jvp,
)
from npattn.layers.norm import (
    LayerNormGrads,
    LayerNormSaved,
    RmsNormGrads,
    RmsNormSaved,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from npattn.layers.norm_jvp import (
    layer_norm_backward_jvp,
    layer_norm_jvp,
    rms_norm_backward_jvp,
    rms_norm_jvp,
)
from npattn.layers.positions import (
    Rotary,
    RotateGrads,
    RotateSaved,
    rotate,
    rotate_backward,
    rotate_forward,
    sinusoidal_positions,
)
from npattn.layers.softmax import (
    LogSoftmaxGrads,
    LogSoftmaxSaved,
    LogSumExpGrads,
    LogSumExpSaved,
    SoftmaxGrads,
    SoftmaxSaved,
    log_softmax,
    log_softmax_backward,
    log_softmax_forward,
    logsumexp,
    logsumexp_backward,
    logsumexp_forward,
    softmax,
    softmax_backward,
    softmax_forward,
)
from npattn.layers.softmax_jvp import (
    softmax_backward_jvp,
    softmax_jvp,
)

__all__ = [
    "CrossEntropyGrads",
    "CrossEntropySaved",
    "Dropout",
    "DropoutGrads",
    "DropoutSaved",
    "EmbeddingGrads",
    "EmbeddingSaved",
    "FeedForwardGrads",
    "FeedForwardParams",
    "FeedForwardSaved",
    "GateGrads",
    "GateSaved",
    "GatedFeedForwardGrads",
    "GatedFeedForwardParams",
    "GatedFeedForwardSaved",
    "GeluGrads",
    "GeluSaved",
    "GeluTanhGrads",
    "GeluTanhSaved",
    "LayerNormGrads",
    "LayerNormSaved",
    "LinearGrads",
    "LinearSaved",
    "LogSoftmaxGrads",
    "LogSoftmaxSaved",
    "LogSumExpGrads",
    "LogSumExpSaved",
    "MergeHeadsGrads",
    "MergeHeadsSaved",
    "ProjectHeadsGrads",
    "ProjectHeadsSaved",
    "ReluGrads",
    "ReluSaved",
    "RmsNormGrads",
    "RmsNormSaved",
    "Rotary",
    "RotateGrads",
    "RotateSaved",
    "SiluGrads",
    "SiluSaved",
    "SoftmaxGrads",
    "SoftmaxSaved",
    "TiedLogitsGrads",
    "TiedLogitsSaved",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_jvp",
    "cross_entropy_forward",
    "cross_entropy_jvp",
    "dropout",
    "dropout_backward",
    "dropout_forward",
    "embedding",
    "embedding_backward",
    "embedding_forward",
    "feed_forward",
    "feed_forward_backward",
    "feed_forward_backward_jvp",
    "feed_forward_forward",
    "feed_forward_jvp",
    "gate",
    "gate_backward",
    "gate_backward_jvp",
    "gate_forward",
    "gate_jvp",
    "gated_feed_forward",
    "gated_feed_forward_backward",
    "gated_feed_forward_backward_jvp",
    "gated_feed_forward_forward",
    "gated_feed_forward_jvp",
    "gelu",
    "gelu_backward",
    "gelu_backward_jvp",
    "gelu_forward",
    "gelu_jvp",
    "gelu_tanh",
    "gelu_tanh_backward",
    "gelu_tanh_backward_jvp",
    "gelu_tanh_forward",
    "gelu_tanh_jvp",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_backward_jvp",
    "layer_norm_forward",
    "layer_norm_jvp",
    "linear",
    "linear_backward",
    "linear_backward_jvp",
    "linear_forward",
    "linear_jvp",
    "log_softmax",
    "log_softmax_backward",
    "log_softmax_forward",
    "logsumexp",
    "logsumexp_backward",
    "logsumexp_forward",
    "merge_heads",
    "merge_heads_backward",
    "merge_heads_backward_jvp",
    "merge_heads_forward",
    "merge_heads_jvp",
    "project_heads",
    "project_heads_backward",
    "project_heads_backward_jvp",
    "project_heads_forward",
    "project_heads_jvp",
    "relu",
    "relu_backward",
    "relu_backward_jvp",
    "relu_forward",
    "relu_jvp",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_backward_jvp",
    "rms_norm_forward",
    "rms_norm_jvp",
    "rotate",
    "rotate_backward",
    "rotate_forward",
    "silu",
    "silu_backward",
    "silu_backward_jvp",
    "silu_forward",
    "silu_jvp",
    "sinusoidal_positions",
    "softmax",
    "softmax_backward",
    "softmax_backward_jvp",
    "softmax_forward",
    "softmax_jvp",
    "tied_logits",
    "tied_logits_backward",
    "tied_logits_backward_jvp",
    "tied_logits_forward",
    "tied_logits_jvp",
]
