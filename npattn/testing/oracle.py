"""Attention as a textbook writes it: one query after another, in plain loops. Slow, and easy to believe.

Nothing here is shared with the package: no tiles, no online softmax, no row statistics, the full Jacobian of softmax. Each query
touches only the keys that it may see, so that the rules for masked pairs and dead rows hold by construction. In float64 it is the
oracle; in float32 it is the naive formula of that precision, whose own rounding error sets the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array


class NaiveForward(NamedTuple):
    """The results of `naive_forward`."""

    out: Array  # (..., H, T, E)
    lse: Array  # (..., H, T)
    weights: Array  # (..., H, T, S), before dropout; 0 where a query may not look


class NaiveGrads(NamedTuple):
    """The gradients of `naive_backward`, each in its input's shape; ``dbiased`` is (..., H, T, S)."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None
    dbiased: Array


class _Row(NamedTuple):
    """One query of one head, against the keys it sees."""

    keys: Array  # their indices
    capped: Array
    weights: Array
    sink_weight: Any
    factors: Array
    lse: Any


class _Loops:
    """The inputs as whole arrays (..., H or K, T or S, ·), and every (leading index, head, query) in turn."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        mask: Any,
        bias: Any,
        scale: float | None,
        softcap: float | None,
        sinks: Any,
        factors: Any,
        dtype: Any,
    ) -> None:
        self.dtype = np.dtype(dtype)
        q, k, v = (np.asarray(x, dtype=self.dtype) for x in (q, k, v))
        self.flat = q.ndim == k.ndim == v.ndim == 2  # no head axis at all
        q, k, v = (x[None] if x.ndim == 2 else x for x in (q, k, v))
        self.lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        self.heads, self.kv_heads = q.shape[-3], max(k.shape[-3], v.shape[-3]) if k.shape[-3] and v.shape[-3] else 0
        self.queries, self.keys, self.head_size, self.value_size = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        self.q = np.broadcast_to(q, (*self.lead, *q.shape[-3:]))
        self.k, self.v = (np.broadcast_to(x, (*self.lead, self.kv_heads, *x.shape[-2:])) for x in (k, v))
        self.pairs = (*self.lead, self.heads, self.queries, self.keys)
        self.mask = np.broadcast_to(np.asarray(True if mask is None else mask), self.pairs)
        self.bias = None if bias is None else np.broadcast_to(np.asarray(bias, dtype=self.dtype), self.pairs)
        self.sinks = None if sinks is None else np.asarray(sinks, dtype=self.dtype)
        self.factors = None if factors is None else np.broadcast_to(np.asarray(factors, dtype=self.dtype), self.pairs)
        default = 1 / math.sqrt(self.head_size) if self.head_size else 1.0
        self.scale = self.dtype.type(default if scale is None else scale)
        self.softcap = None if softcap is None else self.dtype.type(softcap)

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        for b in np.ndindex(*self.lead):
            for h in range(self.heads):
                for i in range(self.queries):
                    yield b, h, i

    def kv_head(self, h: int) -> int:
        """Query head h reads key/value head h // (H / K)."""
        return int(h // (self.heads // self.kv_heads))

    def row(self, b: tuple[int, ...], h: int, i: int) -> _Row:
        """softmax of one row: the weights of the keys that query i may see, and of the sink."""
        kv = self.kv_head(h)
        seen = self.mask[(*b, h, i)]
        if self.bias is not None:
            seen = seen & (self.bias[(*b, h, i)] != -np.inf)
        keys = np.flatnonzero(seen)
        capped = self.scale * (self.k[(*b, kv)][keys] @ self.q[(*b, h, i)])
        if self.softcap is not None:
            capped = self.softcap * np.tanh(capped / self.softcap)
        biased = capped if self.bias is None else capped + self.bias[(*b, h, i)][keys]
        sink = None if self.sinks is None else self.sinks[h]
        everything = biased if sink is None else np.append(biased, sink)
        factors = np.ones(len(keys), dtype=self.dtype) if self.factors is None else self.factors[(*b, h, i)][keys]
        if everything.size == 0 or (everything == -np.inf).all():  # a dead row
            zeros = np.zeros(len(keys), dtype=self.dtype)
            return _Row(keys, capped, zeros, self.dtype.type(0), factors, self.dtype.type(-np.inf))
        largest = everything.max()
        exponentials = np.exp(everything - largest)
        weights = exponentials / exponentials.sum()
        lse = largest + np.log(exponentials.sum())
        sink_weight = self.dtype.type(0) if sink is None else weights[-1]
        return _Row(keys, capped, weights[: len(keys)], sink_weight, factors, lse)


def naive_forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    factors: Any = None,
    dtype: Any = np.float64,
) -> NaiveForward:
    """Attention by loops over leading axes, heads and queries.

    Parameters
    ----------
    q, k, v : array (..., H, T, D), (..., K, S, D), (..., K, S, E)
        Anything that NumPy can read, computed in ``dtype``.
    mask : bool array, optional
        Broadcasts to (..., H, T, S), True where a query may attend.
    bias : array, optional
        Broadcasts to (..., H, T, S).
    scale, softcap : float, optional
        As in ``npattn.attention``.
    sinks : array (H,), optional
        One logit a head.
    factors : array, optional
        Dropout: 0 or 1 / (1 - rate), broadcasts to (..., H, T, S).
    dtype : dtype, optional
        The precision of every step.

    Returns
    -------
    NaiveForward
        out, lse and weights.
    """
    loops = _Loops(q, k, v, mask, bias, scale, softcap, sinks, factors, dtype)
    out = np.zeros((*loops.pairs[:-1], loops.value_size), dtype=dtype)
    lse = np.zeros(loops.pairs[:-1], dtype=dtype)
    weights = np.zeros(loops.pairs, dtype=dtype)
    with np.errstate(all="ignore"):
        for b, h, i in loops:
            row = loops.row(b, h, i)
            weights[(*b, h, i)][row.keys] = row.weights
            lse[(*b, h, i)] = row.lse
            if len(row.keys):
                out[(*b, h, i)] = (row.weights * row.factors) @ loops.v[(*b, loops.kv_head(h))][row.keys]
    if loops.flat:
        out, lse, weights = out[0], lse[0], weights[0]
    return NaiveForward(out, lse, weights)


def naive_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    factors: Any = None,
    dtype: Any = np.float64,
) -> NaiveGrads:
    """The gradients by the chain rule, row by row, with the Jacobian of softmax written out.

    Parameters
    ----------
    dout : array (..., H, T, E)
        The cotangent of out.
    q, k, v : array (..., H, T, D), (..., K, S, D), (..., K, S, E)
        As in `naive_forward`.
    dlse : array (..., H, T), optional
        The cotangent of the log-sum-exp.
    mask : bool array, optional
        As in `naive_forward`, and so are all others.
    bias : array, optional
        Broadcasts to (..., H, T, S).
    scale, softcap : float, optional
        As in ``npattn.attention``.
    sinks : array (H,), optional
        One logit a head.
    factors : array, optional
        Dropout's.
    dtype : dtype, optional
        The precision of every step.

    Returns
    -------
    NaiveGrads
        ``None`` for an input that was not given.
    """
    loops = _Loops(q, k, v, mask, bias, scale, softcap, sinks, factors, dtype)
    rows = loops.pairs[:-1]
    dout = np.reshape(np.asarray(dout, dtype=dtype), (*rows, loops.value_size))
    dlse = np.zeros(rows, dtype=dtype) if dlse is None else np.reshape(np.asarray(dlse, dtype=dtype), rows)
    dq, dk, dv = (np.zeros(x.shape, dtype=dtype) for x in (loops.q, loops.k, loops.v))
    dbiased = np.zeros(loops.pairs, dtype=dtype)
    dsinks = np.zeros(loops.heads, dtype=dtype)
    with np.errstate(all="ignore"):
        for b, h, i in loops:
            row = loops.row(b, h, i)
            here, keys = (*b, h, i), row.keys
            values, g = loops.v[(*b, loops.kv_head(h))][keys], dout[here]
            if not len(keys):
                dsinks[h] += row.sink_weight * dlse[here]
                continue
            # out = Σ_j weights_j factors_j v_j
            dv[(*b, loops.kv_head(h))][keys] += np.outer(row.weights * row.factors, g)
            dweights = row.factors * (values @ g)
            # d weights_l / d biased_j = weights_l (1 if l = j else 0) - weights_l weights_j;  d lse / d biased_j = weights_j
            jacobian = np.diag(row.weights) - np.outer(row.weights, row.weights)
            pairs = jacobian @ dweights + row.weights * dlse[here]
            dbiased[here][keys] = pairs
            # d weights_l / d sink = -weights_l sink_weight;  d lse / d sink = sink_weight
            dsinks[h] += row.sink_weight * dlse[here] - (row.weights * row.sink_weight) @ dweights
            # capped = c tanh(scores / c)
            dscores = pairs if loops.softcap is None else pairs * (1 - (row.capped / loops.softcap) ** 2)
            # scores_j = scale q · k_j
            dq[here] = loops.scale * (dscores @ loops.k[(*b, loops.kv_head(h))][keys])
            dk[(*b, loops.kv_head(h))][keys] += loops.scale * np.outer(dscores, loops.q[here])
    return NaiveGrads(
        sum_to_shape(dq, np.shape(q)),
        sum_to_shape(dk, np.shape(k)),
        sum_to_shape(dv, np.shape(v)),
        None if bias is None else sum_to_shape(dbiased, np.shape(bias)),
        None if sinks is None else dsinks,
        dbiased[0] if loops.flat else dbiased,
    )


def sum_to_shape(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of broadcasting, element by element: add every copy to where it came from."""
    total = np.zeros(shape, dtype=x.dtype)
    for index in np.ndindex(*x.shape):
        own = index[len(index) - len(shape) :]
        total[tuple(i if n != 1 else 0 for i, n in zip(own, shape, strict=True))] += x[index]
    return total
