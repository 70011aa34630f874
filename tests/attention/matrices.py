"""Attention in whole matrices, with a place to put a fault into every term of its backward: what the checks must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn.testing.candidates import Answer, Candidate, Run
from npattn.testing.parts import default_scale, narrowed, whole
from npattn.testing.problems import AttentionProblem

Tweak = Callable[[Any], Any]  # a term before and after

# every term of the backward that a fault can sit in
TERMS = ("dv", "dweights", "delta", "dlse", "dbiased", "slope", "dq", "dk", "dbias", "dsinks")


def matrix_candidate(name: str = "matrices", **tweaks: Tweak) -> Candidate:
    """Right, unless a term is tweaked: ``matrix_candidate(dq=np.negative)``."""
    return Candidate(name, lambda problem, backward: Run(problem.inputs().arrays(), answer(problem, tweaks, backward)))


def slipped(term: str, by: float = 1e-4) -> Candidate:
    """One term is off by a factor of 1 + ``by``."""
    return matrix_candidate(f"a slip of {by} in {term}", **{term: lambda x: x * (1 + by)})


def answer(problem: AttentionProblem, tweaks: dict[str, Tweak], backward: bool) -> Answer:
    """Results in the problem's dtype, computed in float64."""

    def term(name: str, value: Any) -> Any:
        return tweaks[name](value) if name in tweaks else value

    p = whole(problem)
    q, k, v, dout = (np.asarray(x, dtype=np.float64) for x in (p.q, p.k, p.v, p.dout))
    lead, (heads, queries, keys), kv_heads, scale = p.lead, p.pairs[-3:], p.kv_heads, default_scale(p)
    group = heads // kv_heads if kv_heads else 1
    k, v = (np.repeat(x, group, axis=-3) for x in (k, v))
    seen = p.visible()
    live, looked_at = seen.any(axis=-1, keepdims=True), seen.any(axis=-2)[..., None]
    q, k, v = np.where(live, q, 0), np.where(looked_at, k, 0), np.where(looked_at, v, 0)  # the rest may be anything
    with np.errstate(all="ignore"):
        scores = scale * (q @ _t(k))
        capped = scores if p.softcap is None else p.softcap * np.tanh(scores / p.softcap)
        biased = np.where(seen, capped if p.bias is None else capped + p.bias, -np.inf)
        sinks = np.full((heads, 1, 1), -np.inf) if p.sinks is None else np.asarray(p.sinks, dtype=np.float64)[:, None, None]
        largest = np.maximum(biased.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
        largest = np.where(largest == -np.inf, 0, largest)
        total = np.exp(biased - largest).sum(axis=-1, keepdims=True) + np.exp(sinks - largest)
        weights = np.where(live, np.exp(biased - largest) / total, 0)
        sink_weights = np.where(total == 0, 0, np.exp(sinks - largest) / total)
        lse = (largest + np.log(total))[..., 0]
        factors = np.ones(()) if p.dropout is None else problem.factors()
        dropped = weights * factors
        out = np.where(live, dropped @ v, 0)
        if not backward:
            return _given(problem, Answer(out, lse))

        dout = term("dout", np.where(live, dout, 0))
        dlse = term("dlse", np.zeros((*lead, heads, queries, 1)) if p.dlse is None else p.dlse[..., None].astype(np.float64))
        dlse = np.where(live | (sinks != -np.inf), dlse, 0)
        dv = term("dv", _t(term("dropped", dropped)) @ dout)
        dweights = term("dweights", (dout @ _t(v)) * term("factors", factors))
        delta = term("delta", (weights * dweights).sum(axis=-1, keepdims=True))
        dbiased = term("dbiased", weights * (dweights - delta + dlse))
        dsinks = term("dsinks", sink_weights * (dlse - delta))[..., 0].sum(axis=(*range(len(lead)), -1))
        slope = term("slope", np.ones(()) if p.softcap is None else 1 - (capped / p.softcap) ** 2)
        dscores = dbiased * slope
        dq = term("dq", scale * (dscores @ k))
        dk = term("dk", scale * (_t(dscores) @ q))
    gather = tweaks.get("group", lambda x: x.sum(axis=-3))
    dk, dv = (gather(x.reshape(*lead, kv_heads, group, keys, x.shape[-1])) for x in (dk, dv))
    dbias = None if p.bias is None else term("dbias", dbiased)
    full = Answer(out, lse, dq, dk, dv, dbias, None if p.sinks is None else dsinks)
    return _given(problem, full)


def _given(problem: AttentionProblem, full: Answer) -> Answer:
    """In the shapes and dtype of the problem."""
    rows = problem.pairs[:-1] if problem.has_heads else problem.pairs[-2:-1]
    if full.dq is None:
        found = Answer(full.out.reshape(*rows, full.out.shape[-1]), full.lse.reshape(rows))
    else:
        found = narrowed(problem, full)
    lifted = np.float32 if problem.dtype.itemsize < 4 else problem.dtype
    with np.errstate(all="ignore"):
        cast = {name: x.astype(lifted if name == "lse" else problem.dtype) for name, x in found.given().items()}
    return found._replace(**cast)


def _t(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)
