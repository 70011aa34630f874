"""A residual branch: norm, what it leads to, dropout, and the addition, in one of two orders. Wiring only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import with_tree_repr
from npattn.layers.dropout import Dropout, DropoutSaved, dropout_backward, dropout_forward
from npattn.models.config import BlockConfig
from npattn.models.norm import NormParams, NormSaved, norm_backward, norm_forward

Inner = TypeVar("Inner")


@with_tree_repr
class BranchSaved(NamedTuple):
    """What the way back through a branch needs, beside what lies inside it."""

    norm: NormSaved
    norm_order: str
    dropout: DropoutSaved | None


def branch_forward(
    op: str,
    norm: NormParams,
    x: Array,
    inner: Callable[[Array], tuple[Array, Inner]],
    config: BlockConfig,
    dropout: Dropout | None,
) -> tuple[Array, Inner, BranchSaved]:
    """``x + dropout(inner(norm(x)))``, or ``norm(x + dropout(inner(x)))``; what ``inner`` saved; and what the rest did."""
    if config.norm_order == "pre":
        normed, saved_norm = norm_forward(op, norm, x, config)
        branch, saved_inner = inner(normed)
        branch, saved_dropout = drop_forward(branch, dropout)
        return add(x, branch), saved_inner, BranchSaved(saved_norm, "pre", saved_dropout)
    branch, saved_inner = inner(x)
    branch, saved_dropout = drop_forward(branch, dropout)
    out, saved_norm = norm_forward(op, norm, add(x, branch), config)
    return out, saved_inner, BranchSaved(saved_norm, "post", saved_dropout)


def branch_backward(
    dout: Array, saved: BranchSaved, inner_backward: Callable[[Array], tuple[Array, Inner]]
) -> tuple[Array, Inner, NormParams]:
    """``dx``; the gradients that ``inner_backward(dbranch) -> (dx, grads)`` gives; and those of the norm."""
    if saved.norm_order == "pre":
        dnormed, grads = inner_backward(drop_backward(dout, saved.dropout))
        dx, dnorm = norm_backward(dnormed, saved.norm)
        return add(dout, dx), grads, dnorm
    dsum, dnorm = norm_backward(dout, saved.norm)
    dx, grads = inner_backward(drop_backward(dsum, saved.dropout))
    return add(dsum, dx), grads, dnorm


def drop_forward(x: Array, dropout: Dropout | None) -> tuple[Array, DropoutSaved | None]:
    """Dropout, without the copy that it makes where there is none."""
    return (x, None) if dropout is None else dropout_forward(x, dropout)


def drop_backward(dout: Array, saved: DropoutSaved | None) -> Array:
    return dout if saved is None else dropout_backward(dout, saved).dx


def fold(dropout: Dropout | None, n: int) -> Dropout | None:
    """A rule of its own for part ``n``."""
    return None if dropout is None else dropout.fold(n)


def add(x: Array, *others: Array | None) -> Array:
    """The sum of cotangents, or of a residual connection; ``None`` is nothing."""
    total: Any = x
    with np.errstate(all="ignore"):
        for other in others:
            if other is not None:
                total = other if total is None else total + other
    return total
