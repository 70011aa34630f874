"""What one problem is: checked, with every axis in its place, and the way back for results and gradients.

Inside, every array has the leading axes and a head axis; axes that are broadcast stay 1, so nothing is copied. The H query heads
are K key/value heads times a group of G.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.broadcast import broadcast_shapes, unbroadcast
from npattn._arrays.checks import check_broadcasts, host_float, shape_error
from npattn._arrays.namespace import (
    Array,
    Namespace,
    array_device,
    array_namespace,
    compute_dtype,
    dtype_name,
    float_namespace,
    rounded,
)
from npattn._attention.biases import LazyBias
from npattn._attention.masks import Mask, as_mask
from npattn.layers.dropout import Dropout


class Options(NamedTuple):
    """The options of `attention`, checked: what is not q, k, v."""

    mask: Mask | None
    bias: Array | LazyBias | None
    scale: float
    softcap: float | None
    sinks: Array | None
    dropout: Dropout | None


class Problem(NamedTuple):
    """q, k, v with all their axes, and what else the tiling must know."""

    op: str
    xp: Namespace
    device: Any
    dtype: Any  # of the caller's arrays
    compute: Any  # of the computation
    lead: tuple[int, ...]
    kv_heads: int
    group: int
    has_heads: bool  # rank 2 has none
    queries: int  # T
    keys: int  # S
    whole: tuple[int, ...]  # (..., K, G, T, S)
    q: Array  # (..., H, T, D), leading axes 1 where broadcast
    k: Array  # (..., K, S, D)
    v: Array  # (..., K, S, E)
    options: Options
    every_row_sees: bool  # no row can be without a key

    def out_shape(self, *last: int) -> tuple[int, ...]:
        """The caller's shape of a result: (..., H, T, E), (..., H, T), without the head axis if no input has one."""
        heads = (self.kv_heads * self.group,) if self.has_heads else ()
        return (*self.lead, *heads, self.queries, *last)

    def with_heads(self, x: Array) -> Array:
        """A result or cotangent of the caller's shape as (..., H, T, ·)."""
        return x if self.has_heads else x[None, ...]

    def result(self, x: Array) -> Array:
        """(..., H, T, ·) in the caller's shape; its dtype stays."""
        return x if self.has_heads else x[0, ...]

    def gradient(self, x: Array, like: Array) -> Array:
        """dq (..., H, T, D), dk or dv (..., K, S, ·) in the shape and dtype of the caller's input."""
        if x.shape == like.shape and x.dtype is self.dtype:
            return x
        shape = like.shape if like.ndim > 2 else (1, *like.shape)
        if x.shape != shape:
            x = unbroadcast(x, shape, xp=self.xp)
        x = self.rounded(x)
        return x if like.ndim > 2 else x[0, ...]

    def rounded(self, x: Array) -> Array:
        """A result in the caller's dtype."""
        return rounded(x, self.dtype, xp=self.xp)


def make_problem(
    op: str, q: Array, k: Array, v: Array, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, dropout: Any
) -> Problem:
    """Check everything and put every axis in its place; every error is raised here, before any work."""
    if q is None or k is None or v is None:
        raise TypeError(f"{op}: {'q' if q is None else 'k' if k is None else 'v'} must be an array, got None")
    lazy = isinstance(bias, LazyBias)
    arrays = {"q": q, "k": k, "v": v, "bias": bias.parameters if lazy else bias, "sinks": sinks}
    xp, dtype = float_namespace(op, arrays)
    if mask is not None:
        mask = as_mask(op, mask)
        array_namespace(op, q=q, **{f"mask ({n})": a for n, a in enumerate(mask.arrays())})
    layout = _layout(op, q.shape, k.shape, v.shape)
    lead, heads, kv_heads, group, queries, keys, head_size = layout[:7]
    if not layout.aligned:
        q, k, v = aligned(q, len(lead), xp), aligned(k, len(lead), xp), aligned(v, len(lead), xp)
    if layout.only_v_has_lead:  # the scores have all leading axes: what joins them later may be as large as v
        q = xp.broadcast_to(q, (*lead, heads, queries, head_size))
    return Problem(
        op,
        xp,
        None if xp is np else array_device(q),
        dtype,
        compute_dtype(dtype, xp=xp),
        lead,
        kv_heads,
        group,
        layout.has_heads,
        queries,
        keys,
        layout.whole,
        q,
        k,
        v,
        _options(op, mask, bias, scale, softcap, sinks, dropout, layout.pairs, head_size),
        bias is None and keys > 0 and (mask is None or mask.shows_every_query(queries, keys)),
    )


class _Layout(NamedTuple):
    """What the shapes of q, k and v say."""

    lead: tuple[int, ...]
    heads: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    head_size: int
    has_heads: bool
    aligned: bool  # all have the leading axes and a head axis
    only_v_has_lead: bool  # v has leading axes that q and k have not
    whole: tuple[int, ...]  # (..., K, G, T, S)
    pairs: tuple[int, ...]  # (..., H, T, S)


@functools.lru_cache(maxsize=1024)  # a tiny problem's shapes take longer to check than to look up
def _layout(op: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> _Layout:
    for name, shape, letters in (("q", q, "(..., T, D)"), ("k", k, "(..., S, D)"), ("v", v, "(..., S, E)")):
        if len(shape) < 2:
            shape_error(op, name, letters, shape)
    queries, head_size = q[-2:]
    keys = k[-2]
    if k[-1] != head_size:
        shape_error(op, "k", f"(..., S, D) with D = {head_size} as q has", k)
    if v[-2] != keys:
        shape_error(op, "v", f"(..., S, E) with S = {keys} as k has", v)
    heads, kv_heads = _heads(op, q, k, v)
    lead, group = _lead(op, q, k, v), heads // kv_heads if kv_heads else 1
    return _Layout(
        lead,
        heads,
        kv_heads,
        group,
        queries,
        keys,
        head_size,
        has_heads=max(len(q), len(k), len(v)) > 2,
        aligned=len(q) == len(k) == len(v) == len(lead) + 3,
        only_v_has_lead=lead != _lead(op, q, k),
        whole=(*lead, kv_heads, group, queries, keys),
        pairs=(*lead, heads, queries, keys),
    )


def _options(
    op: str, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, dropout: Any, pairs: tuple[int, ...], head_size: int
) -> Options:
    """Check the options of a problem with ``pairs`` = (..., H, T, S)."""
    if scale is None:
        scale = 1 / math.sqrt(head_size) if head_size else 1.0
    else:
        scale = host_float(op, "scale", scale)
    if mask is bias is softcap is sinks is dropout is None:
        return Options(None, None, scale, None, None, None)
    if softcap is not None:
        softcap = host_float(op, "softcap", softcap, positive=True)
    if mask is not None:
        mask.check(op, pairs[:-3], *pairs[-3:])
    if isinstance(bias, LazyBias):
        bias.check(op, pairs[-3])
    elif bias is not None:
        check_broadcasts(op, "bias", bias.shape, pairs, "(..., H, T, S)")
    if sinks is not None and tuple(sinks.shape) != pairs[-3:-2]:
        shape_error(op, "sinks", f"(H,) with H = {pairs[-3]}", sinks.shape)
    if dropout is not None:
        dropout = Dropout.checked(dropout, op)
        dropout = dropout if dropout.rate else None
    return Options(mask, bias, scale, softcap, sinks, dropout)


def aligned(x: Array, lead: int, xp: Namespace) -> Array:
    """``x`` with ``lead`` leading axes and a head axis, 1 where it has none."""
    missing = lead + 3 - x.ndim
    return x if missing == 0 else xp.reshape(x, (1,) * missing + x.shape)


def _lead(op: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    lead = broadcast_shapes(*(shape[:-3] for shape in shapes))
    if lead is None:
        raise ValueError(
            f"{op}: the leading axes of q, k and v must broadcast, got shapes {', '.join(str(tuple(s)) for s in shapes)}"
        )
    return lead


def _heads(op: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, int]:
    heads, of_k, of_v = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k, v))
    kv_heads = of_k if of_v == 1 else of_v
    if of_k not in (1, kv_heads):
        shape_error(op, "v", f"(..., K, S, E) with K = {of_k} as k has", v)
    if kv_heads > heads or (kv_heads == 0) != (heads == 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"{op}: H query heads must be a multiple of K key/value heads, got H = {heads} and K = {kv_heads} from shapes "
            f"{tuple(q)} and {tuple(k)}; from rank 3 on, axis -3 is the head axis: write a batch without heads as (B, 1, T, D)"
        )
    return heads, kv_heads


def check_cotangent(problem: Problem, name: str, x: Array, *last: int, lifted: bool = False, op: str = "") -> None:
    """A cotangent has the shape of the result and its dtype (``lifted``: the dtype that the result is computed in)."""
    shape, expected = problem.out_shape(*last), problem.compute if lifted else problem.dtype
    if type(x) is np.ndarray and problem.xp is np and x.dtype is expected and x.shape == shape:
        return
    op = op or f"{problem.op}_backward"
    array_namespace(op, q=problem.q, **{name: x})
    if tuple(x.shape) != shape:
        shape_error(op, name, f"{'(..., H, T, E)' if last else '(..., H, T)'} = {shape}", x.shape)
    if dtype_name(x.dtype) != dtype_name(expected):
        raise TypeError(f"{op}: {name} must be {dtype_name(expected)}, got {dtype_name(x.dtype)}")
