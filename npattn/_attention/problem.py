"""What one problem is: checked, with its leading axes broadcast and its heads grouped, and the way back for results and gradients.

Inside, every array has the axes (..., K, G, T, ·): leading axes, key/value heads, query heads of one group. Axes of length 1 that
are broadcast stay 1, so nothing is copied.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from npattn._arrays.broadcast import broadcast_shapes, unbroadcast
from npattn._arrays.checks import check_broadcasts, host_float, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, compute_dtype, dtype_name, float_dtype
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
    """q, k, v in grouped form, and what else the tiling must know."""

    op: str
    xp: Namespace
    device: Any
    dtype: Any  # of the caller's arrays
    compute: Any  # of the computation
    lead: tuple[int, ...]
    kv_heads: int
    group: int
    has_heads: bool  # rank 2 has none
    q: Array  # (..., K, G, T, D), leading axes 1 where broadcast
    k: Array  # (..., K, S, D)
    v: Array  # (..., K, S, E)
    options: Options

    @property
    def queries(self) -> int:
        """T."""
        return int(self.q.shape[-2])

    @property
    def keys(self) -> int:
        """S."""
        return int(self.k.shape[-2])

    @property
    def whole(self) -> tuple[int, ...]:
        """(..., K, G, T, S)."""
        return (*self.lead, self.kv_heads, self.group, self.queries, self.keys)

    def out_shape(self, *last: int) -> tuple[int, ...]:
        """The caller's shape of a result: (..., H, T, E), (..., H, T), without the head axis if no input has one."""
        heads = (self.kv_heads * self.group,) if self.has_heads else ()
        return (*self.lead, *heads, self.queries, *last)

    def group_rows(self, x: Array) -> Array:
        """A cotangent of the caller's (..., H, T, ·) or (..., H, T) as (..., K, G, T, ·)."""
        return self.xp.reshape(x, (*self.lead, self.kv_heads, self.group, self.queries, *x.shape[len(self.out_shape()) :]))

    def ungroup_rows(self, x: Array, like: Array) -> Array:
        """dq (..., K, G, T, D) in the shape and dtype of the caller's q."""
        heads = (*self.lead, self.kv_heads * self.group, *x.shape[-2:])
        return self._back(self.xp.reshape(x, heads), like)

    def ungroup_keys(self, x: Array, like: Array) -> Array:
        """dk or dv (..., K, S, ·) in the shape and dtype of the caller's k or v."""
        return self._back(x, like)

    def result(self, x: Array, *last: int) -> Array:
        """(..., K, G, T, ·) in the caller's shape; its dtype stays."""
        return self.xp.reshape(x, self.out_shape(*last))

    def _back(self, x: Array, like: Array) -> Array:
        shape = like.shape if like.ndim > 2 else (1, *like.shape)
        return self.xp.reshape(self.xp.astype(unbroadcast(x, shape, xp=self.xp), self.dtype, copy=False), like.shape)


def make_problem(
    op: str, q: Array, k: Array, v: Array, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, dropout: Any
) -> Problem:
    """Check everything and group it; every error is raised here, before any work."""
    lazy = isinstance(bias, LazyBias)
    floats = {"q": q, "k": k, "v": v, "bias": bias.parameters if lazy else bias, "sinks": sinks}
    if mask is not None:
        mask = as_mask(op, mask)
        extra = {f"mask ({n})": a for n, a in enumerate(mask.arrays())}
        xp = array_namespace(op, **floats, **extra)
    else:
        xp = array_namespace(op, **floats)
    dtype = float_dtype(op, **floats)

    for name, x, letters in (("q", q, "(..., T, D)"), ("k", k, "(..., S, D)"), ("v", v, "(..., S, E)")):
        if x.ndim < 2:
            shape_error(op, name, letters, x.shape)
    head_size, keys = q.shape[-1], k.shape[-2]
    if k.shape[-1] != head_size:
        shape_error(op, "k", f"(..., S, D) with D = {head_size} as q has", k.shape)
    if v.shape[-2] != keys:
        shape_error(op, "v", f"(..., S, E) with S = {keys} as k has", v.shape)
    heads, kv_heads = _heads(op, q, k, v)
    lead = broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if lead is None:
        raise ValueError(
            f"{op}: the leading axes of q, k and v must broadcast, got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    group = heads // kv_heads if kv_heads else 1

    scale = _default_scale(head_size) if scale is None else host_float(op, "scale", scale)
    softcap = None if softcap is None else host_float(op, "softcap", softcap, positive=True)
    if mask is not None:
        mask.check(op, lead, heads, q.shape[-2], keys)
    if lazy:
        bias.check(op, heads)
    elif bias is not None:
        check_broadcasts(op, "bias", bias.shape, (*lead, heads, q.shape[-2], keys), "(..., H, T, S)")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        shape_error(op, "sinks", f"(H,) with H = {heads}", sinks.shape)
    if dropout is not None:
        dropout = Dropout.checked(dropout, op)
        dropout = dropout if dropout.rate else None

    def aligned(x: Array, *last: int) -> Array:
        shape = (1,) * (len(lead) - max(x.ndim - 3, 0)) + x.shape[:-3] + last
        return x if x.shape == shape else xp.reshape(x, shape)

    return Problem(
        op,
        xp,
        array_device(q),
        dtype,
        compute_dtype(dtype, xp=xp),
        lead,
        kv_heads,
        group,
        max(q.ndim, k.ndim, v.ndim) > 2,
        aligned(q, kv_heads, group, *q.shape[-2:]),
        aligned(k, k.shape[-3] if k.ndim > 2 else 1, *k.shape[-2:]),
        aligned(v, v.shape[-3] if v.ndim > 2 else 1, *v.shape[-2:]),
        Options(mask, bias, scale, softcap, sinks, dropout),
    )


def _heads(op: str, q: Array, k: Array, v: Array) -> tuple[int, int]:
    heads, of_k, of_v = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v))
    kv_heads = of_k if of_v == 1 else of_v
    if of_k not in (1, kv_heads):
        shape_error(op, "v", f"(..., K, S, E) with K = {of_k} as k has", v.shape)
    if kv_heads > heads or (kv_heads == 0) != (heads == 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"{op}: H query heads must be a multiple of K key/value heads, got H = {heads} and K = {kv_heads} from shapes "
            f"{tuple(q.shape)} and {tuple(k.shape)}; from rank 3 on, axis -3 is the head axis: "
            f"write a batch without heads as (B, 1, T, D)"
        )
    return heads, kv_heads


def _default_scale(head_size: int) -> float:
    return 1 / math.sqrt(head_size) if head_size else 1.0


def check_cotangent(problem: Problem, name: str, x: Array, *last: int, lifted: bool = False) -> None:
    """A cotangent has the shape of the result and its dtype (``lifted``: the dtype that the result is computed in)."""
    op = f"{problem.op}_backward"
    if array_namespace(op, q=problem.q, **{name: x}) is not problem.xp:  # pragma: no cover - array_namespace has raised
        raise TypeError
    shape = problem.out_shape(*last)
    if tuple(x.shape) != shape:
        shape_error(op, name, f"{'(..., H, T, E)' if last else '(..., H, T)'} = {shape}", x.shape)
    expected = problem.compute if lifted else problem.dtype
    if dtype_name(x.dtype) != dtype_name(expected):
        raise TypeError(f"{op}: {name} must be {dtype_name(expected)}, got {dtype_name(x.dtype)}")
