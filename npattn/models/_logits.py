"""From the last rows of a model to logits: a linear map of its own, or the table of the tokens once more. Wiring only."""

from __future__ import annotations

from typing import NamedTuple

from npattn._arrays.namespace import Array
from npattn.layers.embedding import TiedLogitsSaved, tied_logits_backward, tied_logits_forward
from npattn.layers.linear import LinearSaved, linear_backward, linear_forward

LogitsSaved = LinearSaved | TiedLogitsSaved


class LogitsGrads(NamedTuple):
    """Gradients of the logits; ``dtable`` if they are made with the tokens' table, else those of the linear map."""

    dx: Array
    dtable: Array | None
    dw: Array | None
    db: Array | None


def logits_forward(op: str, x: Array, table: Array, w: Array | None, b: Array | None) -> tuple[Array, LogitsSaved]:
    """``x w + b``; without ``w``, ``x tableᵀ``."""
    if w is not None:
        return linear_forward(x, w, b)
    if b is not None:
        raise ValueError(f"{op}: b_out needs w_out: logits that are made with the tokens' table have no bias")
    return tied_logits_forward(x, table)


def logits_backward(dout: Array, saved: LogitsSaved) -> LogitsGrads:
    """The gradients of whichever it was."""
    if isinstance(saved, LinearSaved):
        linear = linear_backward(dout, saved)
        return LogitsGrads(linear.dx, None, linear.dw, linear.db)
    tied = tied_logits_backward(dout, saved)
    return LogitsGrads(tied.dx, tied.dtable, None, None)
