"""Layers: each an op in three functions, ``op``, ``op_forward -> (out, saved)``, ``op_backward(dout, saved)``.

==================================== ============================================= ===========================================
op                                   what it gives                                 gradients
==================================== ============================================= ===========================================
``linear(x, w, b=None)``             (..., C_in) → (..., C_out), x w + b           dx, dw, db
``project_heads(x, w, b=None)``      (..., T, C) → (..., H, T, D), x w_h + b_h     dx, dw, db
``merge_heads(x, w, b=None)``        (..., H, T, E) → (..., T, C), Σ_h x_h w_h + b dx, dw, db
``softmax(x, axis=, mask=)``         exp x / Σ exp x                               dx
``log_softmax(x, axis=, mask=)``     x - log Σ exp x                               dx
``logsumexp(x, axis=, mask=)``       log Σ exp x, without the axis                 dx
``embedding(table, ids)``            (V, C), ids (...) → (..., C), table[ids]      dtable
``cross_entropy(logits, targets)``   (..., V), (...) → (), mean of -log softmax    dlogits, dweights
``dropout(x, Dropout(rate, seed))``  x kept / (1 - rate)                           dx
==================================== ============================================= ===========================================

Gradients are read by name: ``g = linear_backward(dout, saved)``, then ``g.dw``. ``saved`` borrows the inputs: write to none of
them before backward has run. Results and gradients share memory with nothing. Masks are boolean, True where something counts.
"""

from npattn.layers.dropout import Dropout, DropoutGrads, DropoutSaved, dropout, dropout_backward, dropout_forward
from npattn.layers.embedding import EmbeddingGrads, EmbeddingSaved, embedding, embedding_backward, embedding_forward
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
from npattn.layers.loss import (
    CrossEntropyGrads,
    CrossEntropySaved,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_forward,
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

__all__ = [
    "CrossEntropyGrads",
    "CrossEntropySaved",
    "Dropout",
    "DropoutGrads",
    "DropoutSaved",
    "EmbeddingGrads",
    "EmbeddingSaved",
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
    "SoftmaxGrads",
    "SoftmaxSaved",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "dropout",
    "dropout_backward",
    "dropout_forward",
    "embedding",
    "embedding_backward",
    "embedding_forward",
    "linear",
    "linear_backward",
    "linear_forward",
    "log_softmax",
    "log_softmax_backward",
    "log_softmax_forward",
    "logsumexp",
    "logsumexp_backward",
    "logsumexp_forward",
    "merge_heads",
    "merge_heads_backward",
    "merge_heads_forward",
    "project_heads",
    "project_heads_backward",
    "project_heads_forward",
    "softmax",
    "softmax_backward",
    "softmax_forward",
]
