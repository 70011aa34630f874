"""Tangents of attention in whole matrices, with a place for a fault in every term; and the same on absolute values, the scale.

An independent text of the derivation: no tiles, no stabilised sums that are merged, weights that are divided at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from npattn._attention.biases import LazyBias
from npattn.testing.candidates import Answer
from npattn.testing.dense import dense_bias, lazy_bias_scale
from npattn.testing.inputs import bias_with
from npattn.testing.parts import default_scale, narrowed, whole
from npattn.testing.problems import AttentionProblem

Along = Mapping[str, np.ndarray]  # tangents by the name of their input: q, k, v, bias, sinks, dout, dlse; the others are 0
Tweak = Callable[[Any], Any]

# every term that a fault can sit in
TERMS = (
    "tbiased",
    "tlse",
    "tout",
    "tdelta",
    "tweights",
    "tdweights",
    "tdbiased",
    "tslope",
    "tdq",
    "tdk",
    "tdv",
    "tdbias",
    "tdsinks",
)


class Results(NamedTuple):
    """The tangents of out, lse and of every gradient, in the shapes of the problem."""

    tout: Any
    tlse: Any
    tdq: Any
    tdk: Any
    tdv: Any
    tdbias: Any
    tdsinks: Any

    def given(self) -> dict[str, Any]:
        """What there is, by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}


def matrix_tangents(
    problem: AttentionProblem, along: Along, *, dtype: Any = np.float64, tweaks: Mapping[str, Tweak] | None = None
) -> Results:
    """The tangents, every step computed in ``dtype``."""
    return _Matrices(problem, along, dtype, tweaks or {}).results(absolute=False)


def tangent_scales(problem: AttentionProblem, along: Along) -> Results:
    """The same on absolute values: what rounding errors are measured against."""
    return _Matrices(problem, along, np.float64, {}).results(absolute=True)


def largest_score(problem: AttentionProblem, along: Along) -> float:
    """The largest biased score that some query sees, on absolute values."""
    matrices = _Matrices(problem, along, np.float64, {})
    sizes = matrices.scale * (np.abs(matrices.q) @ _t(np.abs(matrices.k)))
    if problem.bias is not None:
        sizes = sizes + np.where(np.isfinite(matrices.bias), np.abs(matrices.bias), 0)
    return float(np.broadcast_to(sizes, matrices.seen.shape)[matrices.seen].max(initial=0))


class _Matrices:
    def __init__(self, problem: AttentionProblem, along: Along, dtype: Any, tweaks: Mapping[str, Tweak]) -> None:
        p = whole(problem)
        self.problem, self.p, self.tweaks, self.dtype = problem, p, tweaks, dtype
        self.scale = np.asarray(default_scale(p), dtype=dtype)
        self.group = p.heads // p.kv_heads if p.kv_heads else 1
        self.seen = p.visible()
        live, looked_at = self.seen.any(axis=-1, keepdims=True), self.seen.any(axis=-2)[..., None]

        def rows(x: Any) -> Any:
            return np.where(live, np.asarray(x, dtype=dtype), 0)

        def keys(x: Any) -> Any:
            return np.where(looked_at, np.repeat(np.asarray(x, dtype=dtype), self.group, axis=-3), 0)

        def tangent(name: str, like: Any) -> Any:
            t = along.get(name)
            return np.zeros(like.shape) if t is None else np.broadcast_to(t, like.shape)

        pairs = p.pairs
        dlse = np.zeros(pairs[:-1]) if p.dlse is None else p.dlse
        self.live = live
        self.q, self.tq, self.dout = rows(p.q), rows(tangent("q", p.q)), rows(p.dout)
        self.k, self.tk, self.v, self.tv = (keys(x) for x in (p.k, tangent("k", p.k), p.v, tangent("v", p.v)))
        self.tdout = rows(np.reshape(along.get("dout", np.zeros(p.dout.shape)), p.dout.shape))
        # dlse counts wherever there is a sum: at a row that sees nothing but its sink too
        self.dlse, self.tdlse = (
            np.asarray(np.reshape(x, (*pairs[:-1], 1)), dtype=dtype) for x in (dlse, along.get("dlse", np.zeros(pairs[:-1])))
        )
        lazy = isinstance(problem.bias, LazyBias)
        # written out in the problem's dtype, as p has it, a lazy bias would be rounded
        bias: Any = dense_bias(problem.bias, *pairs[-3:]) if lazy else p.bias
        self.bias = 0.0 if bias is None else np.asarray(bias, dtype=dtype)
        self.tbias = np.zeros(pairs, dtype=dtype)
        if "bias" in along:
            dense: Any = dense_bias(bias_with(problem.bias, along["bias"]), *pairs[-3:]) if lazy else along["bias"]
            self.tbias = np.where(self.seen, np.asarray(np.broadcast_to(dense, pairs), dtype=dtype), 0)
        none = np.full(p.heads, -np.inf)
        self.sinks = np.asarray(none if p.sinks is None else p.sinks, dtype=dtype)[:, None, None]
        tsinks = np.asarray(along.get("sinks", np.zeros(p.heads)), dtype=dtype)[:, None, None]
        self.tsinks = np.where(self.sinks == -np.inf, 0, tsinks)
        self.factors = np.ones((), dtype=dtype) if p.dropout is None else np.asarray(problem.factors(), dtype=dtype)

    def results(self, *, absolute: bool) -> Results:
        with np.errstate(all="ignore"):
            return self._results(absolute)

    def _results(self, absolute: bool) -> Results:
        p, c, factors, dtype = self.p, self.p.softcap, self.factors, self.dtype

        def size(*arrays: Any) -> Any:
            return tuple(np.abs(x) for x in arrays) if absolute else arrays

        def minus(a: Any, b: Any) -> Any:
            return a + b if absolute else a - b

        def term(name: str, value: Any) -> Any:
            return self.tweaks[name](value) if name in self.tweaks else value

        scale = abs(self.scale) if absolute else self.scale
        # forward
        scores = self.scale * (self.q @ _t(self.k))
        tanh = np.zeros(()) if c is None else np.tanh(scores / dtype(c))
        biased = np.where(self.seen, (scores if c is None else dtype(c) * tanh) + self.bias, -np.inf)
        slope = np.ones((), dtype=dtype) if c is None else minus(1, tanh**2)
        row_max = np.maximum(biased.max(axis=-1, keepdims=True, initial=-np.inf), self.sinks)
        row_max = np.where(row_max == -np.inf, 0, row_max)
        p_sink = np.exp(self.sinks - row_max)
        row_sum = np.exp(biased - row_max).sum(axis=-1, keepdims=True) + p_sink
        alive = row_sum != 0
        weights = np.where(self.live, np.exp(biased - row_max) / row_sum, 0)
        p_sink = np.where(alive, p_sink / row_sum, 0)
        q, tq, k, tk, v, tv = size(self.q, self.tq, self.k, self.tk, self.v, self.tv)
        dout, tdout, dlse, tdlse = size(self.dout, self.tdout, self.dlse, self.tdlse)
        tbias, tsinks, tanh = size(self.tbias, self.tsinks, tanh)
        out = (weights * factors) @ v

        tscores = scale * (tq @ _t(k) + q @ _t(tk))
        tbiased = term("tbiased", np.where(self.seen, tscores * slope + tbias, 0))
        tlse = term("tlse", (weights * tbiased).sum(axis=-1, keepdims=True) + p_sink * tsinks)
        tweights = term("tweights", weights * minus(tbiased, tlse))
        tout = term("tout", (tweights * factors) @ v + (weights * factors) @ tv)
        # backward
        dweights = factors * (dout @ _t(v))
        tdweights = term("tdweights", factors * (tdout @ _t(v) + dout @ _t(tv)))
        delta = (weights * dweights).sum(axis=-1, keepdims=True)
        tdelta = term("tdelta", (tweights * dweights + weights * tdweights).sum(axis=-1, keepdims=True))
        pull, tpull = dweights + minus(dlse, delta), tdweights + minus(tdlse, tdelta)
        dbiased = weights * pull
        tdbiased = term("tdbiased", tweights * pull + weights * tpull)
        tslope = term("tslope", np.zeros(()) if c is None else minus(0, 2 / dtype(c) * tanh * slope * tscores))
        dscores, tdscores = dbiased * slope, tdbiased * slope + np.where(self.seen, dbiased * tslope, 0)
        tdq = term("tdq", scale * (tdscores @ k + dscores @ tk))
        tdk = term("tdk", scale * (_t(tdscores) @ q + _t(dscores) @ tq))
        tdv = term("tdv", _t(tweights * factors) @ dout + _t(weights * factors) @ tdout)
        tdsinks = None
        if p.sinks is not None:
            change = minus(tsinks, tlse)
            tdsinks = term("tdsinks", p_sink * (change * minus(dlse, delta) + minus(tdlse, tdelta)))
            tdsinks = tdsinks[..., 0].sum(axis=(*range(len(p.lead)), -1))
        return self._narrowed(out, tout, np.where(alive, tlse, 0), tdq, tdk, tdv, term("tdbias", tdbiased), tdsinks, absolute)

    def _narrowed(
        self, out: Any, tout: Any, tlse: Any, tdq: Any, tdk: Any, tdv: Any, tdbias: Any, tdsinks: Any, absolute: bool
    ) -> Results:
        p, problem = self.p, self.problem
        tdk, tdv = (x.reshape(*p.lead, p.kv_heads, self.group, *x.shape[-2:]).sum(axis=-3) for x in (tdk, tdv))
        no_bias = problem.bias is None
        found = narrowed(problem, Answer(tout, tlse[..., 0], tdq, tdk, tdv, None if no_bias else tdbias, tdsinks))
        if absolute and isinstance(problem.bias, LazyBias):
            found = found._replace(dbias=lazy_bias_scale(problem.bias, tdbias))
        return Results(*found)


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)
