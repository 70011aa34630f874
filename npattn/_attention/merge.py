"""Attention over disjoint sets of keys, joined: each part is a pair (out, lse), and so is the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import shape_error
from npattn._arrays.namespace import Array, Namespace, array_namespace, compute_dtype, dtype_name, float_dtype
from npattn._arrays.trees import with_tree_repr
from npattn._attention import formula
from npattn._attention.formula import Part

Pair = tuple[Array, Array]  # out (..., T, E) and lse (..., T)


@with_tree_repr
class MergeAttentionSaved(NamedTuple):
    """What `merge_attention_backward` needs: the parts, borrowed, and their merged pair, unrounded."""

    parts: tuple[Pair, ...]
    out: Array
    lse: Array


@with_tree_repr
class MergeAttentionGrads(NamedTuple):
    """Gradients of `merge_attention`: a pair (dout, dlse) for every part."""

    dparts: tuple[Pair, ...]


def merge_attention(parts: Sequence[Pair], /) -> Pair:
    """Join attention over disjoint keys; see `merge_attention_forward`."""
    return merge_attention_forward(parts)[0]


def merge_attention_forward(parts: Sequence[Pair], /) -> tuple[Pair, MergeAttentionSaved]:
    """``lse = log Σ_j exp lse_j``, ``out = Σ_j exp(lse_j - lse) out_j``: attention over the keys of all parts.

    Tiles, cached prefixes and machines are joined by this one function. The result is a part again.

    Parameters
    ----------
    parts : sequence of (out, lse)
        At least one pair: out (..., T, E) and ``saved.lse`` (..., T) of attention over some of the keys. A row without keys
        has lse -inf; what its out holds does not matter. Give sinks to one part only, or merge them as the part ``(0, sink)``.

    Returns
    -------
    (out, lse) : pair of arrays
        out in the parts' dtype, lse in float32 or float64; out 0 and lse -inf where no part has keys.
    saved : MergeAttentionSaved
        For `merge_attention_backward`.

    Raises
    ------
    ValueError
        If there is no part, or shapes differ.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Merging".

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention, attention_forward, merge_attention
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 4, 2))
    >>> halves = [attention_forward(q, k[s], v[s]) for s in (slice(0, 1), slice(1, 4))]
    >>> out, lse = merge_attention([(out, saved.lse) for out, saved in halves])
    >>> bool(np.allclose(out, attention(q, k, v)))
    True
    """
    xp, dtype, pairs = _checked(parts)
    lifted = _lifted(pairs, xp)
    with np.errstate(all="ignore"):
        whole = lifted[0]
        for part in lifted[1:]:
            whole = formula.merge(whole, part, xp)
        out, lse = (
            formula.normalised(whole, xp, every_row_sees=False),
            formula.log_sum_exp(whole.row_max, whole.row_sum, xp)[..., 0],
        )
        saved = MergeAttentionSaved(pairs, out, lse)
        return (xp.astype(out, dtype), xp.astype(lse, lse.dtype)), saved  # astype copies; PyTorch's asarray warns of autograd


def merge_attention_backward(dout: Array, saved: MergeAttentionSaved, /, *, dlse: Array | None = None) -> MergeAttentionGrads:
    """The vector-Jacobian product of `merge_attention_forward`.

    Parameters
    ----------
    dout : float array (..., T, E)
        The cotangent of out.
    saved : MergeAttentionSaved
        From `merge_attention_forward`.
    dlse : float array (..., T), optional
        The cotangent of lse.

    Returns
    -------
    MergeAttentionGrads
        ``dparts``: (dout, dlse) for every part, ready for ``attention_backward(dout, saved, dlse=dlse)``; 0 in rows where the
        part has no keys.

    Raises
    ------
    ValueError
        If a cotangent has not the shape of its result.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "merge_attention_backward"
    first_out, first_lse = saved.parts[0]
    xp = array_namespace(op, out=saved.out, dout=dout, dlse=dlse)
    dtype = float_dtype(op, dout=dout, out=first_out)
    float_dtype(op, dlse=dlse, lse=first_lse)
    for name, x, like in (("dout", dout, saved.out), ("dlse", dlse, saved.lse)):
        if x is not None and tuple(x.shape) != tuple(like.shape):
            shape_error(op, name, str(tuple(like.shape)), x.shape)
    lifted = xp.astype(dout, saved.out.dtype, copy=False)
    tail = None if dlse is None else dlse[..., None]
    with np.errstate(all="ignore"):
        lse = saved.lse[..., None]
        grads = [formula.merge_backward(part, saved.out, lse, lifted, tail, xp) for part in _lifted(saved.parts, xp)]
        return MergeAttentionGrads(tuple((xp.astype(d, dtype, copy=False), t[..., 0]) for d, t in grads))


def _lifted(pairs: Sequence[Pair], xp: Namespace) -> list[Part]:
    return [formula.as_part(xp.astype(out, lse.dtype, copy=False), lse[..., None], xp) for out, lse in pairs]


def _checked(parts: Sequence[Pair]) -> tuple[Namespace, Any, tuple[Pair, ...]]:
    op = "merge_attention"
    pairs = tuple((out, lse) for out, lse in parts)
    if not pairs:
        raise ValueError(f"{op}: parts must hold at least one pair (out, lse)")
    outs = {f"out of part {n}": out for n, (out, _) in enumerate(pairs)}
    lses = {f"lse of part {n}": lse for n, (_, lse) in enumerate(pairs)}
    xp = array_namespace(op, **outs, **lses)
    dtype = float_dtype(op, **outs)
    expected = dtype_name(compute_dtype(dtype, xp=xp))
    if dtype_name(float_dtype(op, **lses)) != expected:
        raise TypeError(f"{op}: lse must be {expected} beside out in {dtype_name(pairs[0][0].dtype)}, got {pairs[0][1].dtype}")
    for name, out in outs.items():
        if out.ndim < 2 or out.shape != pairs[0][0].shape:
            shape_error(op, name, f"(..., T, E) = {tuple(pairs[0][0].shape)} as the first part", out.shape)
    for name, lse in lses.items():
        if lse.shape != pairs[0][0].shape[:-1]:
            shape_error(op, name, f"(..., T) = {tuple(pairs[0][0].shape[:-1])} as out has", lse.shape)
    return xp, dtype, pairs
