"""How large an error may be, measured against *scale*: the same backward on absolute values.

Gradients are often small differences of large numbers, so that a ratio to the gradient itself fails on right code. With W the
weights, F dropout's factors and s the softmax scale,

    B = W∘(P + rowsum(W∘P) + |dlse|),  P = F∘|dout| |v|ᵀ
    out: (W∘F)|v|   lse: 1 + |lse|
    dq: s·B|k|   dk: s·Bᵀ|q|   dv: (W∘F)ᵀ|dout|   dbias: B   dsinks: Σ_i p_i (rowsum(W∘P) + |dlse|)

each summed over what is broadcast or grouped. Three bounds follow: finite differences (`difference_bound`), automatic
differentiation (`autodiff_bound`), and float32 against float64 (`precision_bound`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.biases import LazyBias
from npattn.testing.candidates import Answer
from npattn.testing.dense import dense_bias, lazy_bias_scale
from npattn.testing.inputs import bias_with
from npattn.testing.oracle import naive_forward
from npattn.testing.parts import default_scale
from npattn.testing.precision import float_info
from npattn.testing.problems import AttentionProblem

DIFFERENCE = 1e-8  # of Σ|t|·scale: what finite differences with Richardson extrapolation are good for in float64
AUTODIFF = 45  # roundings of (1 + largest |biased|)·scale: 1e-14 in float64


class Scales(NamedTuple):
    """The scale of every result, and the size of the scores."""

    of: Answer
    largest: float  # the largest biased score, on absolute values too: a small one may be the sum of large terms
    unweighted: Answer  # what a weight is multiplied by, at most: a weight may underflow
    factor: float  # what any intermediate number is multiplied by, at most: it may be below the normal numbers


def attention_scales(problem: AttentionProblem) -> Scales:
    """The scale of out, lse and every gradient, each in its own shape.

    Parameters
    ----------
    problem : AttentionProblem
        With finite numbers wherever a query can see them.

    Returns
    -------
    Scales
        In float64.
    """
    done = naive_forward(problem.q, problem.k, problem.v, **problem.dense_options())
    pairs, lead = problem.pairs, problem.lead
    group = problem.heads // problem.kv_heads if problem.kv_heads else 1
    weights, lse, factors = done.weights.reshape(pairs), done.lse.reshape(pairs[:-1]), problem.factors()
    q, k, v, dout, dlse = _absolute_values(problem)

    scale = abs(default_scale(problem))
    dropped = weights if factors is None else weights * factors
    shares = dropped * (dout @ np.swapaxes(v, -1, -2))  # W∘P
    rows = shares.sum(axis=-1, keepdims=True)
    dbiased = shares + weights * (rows + dlse[..., None])
    dsinks = None
    if problem.sinks is not None:
        sink = np.asarray(problem.sinks, dtype=np.float64)[:, None]
        sink_weights = np.exp(sink - np.where(lse == -np.inf, np.inf, lse))
        dsinks = (sink_weights * (rows[..., 0] + dlse)).sum(axis=(*range(len(lead)), -1))
    rows_shape = pairs[:-1] if problem.has_heads else pairs[-2:-1]
    return Scales(
        Answer(
            (dropped @ v).reshape(*rows_shape, v.shape[-1]),
            1 + np.abs(np.where(np.isfinite(lse), lse, 0)).reshape(rows_shape),
            _back(scale * (dbiased @ k), problem.q.shape),
            _back(_ungroup(scale * (np.swapaxes(dbiased, -1, -2) @ q), group), problem.k.shape),
            _back(_ungroup(np.swapaxes(dropped, -1, -2) @ dout, group), problem.v.shape),
            _bias_scale(problem, dbiased),
            dsinks,
        ),
        _largest_score(problem, scale * (q @ np.swapaxes(k, -1, -2))),
        *_factors(scale, [float(x.max(initial=0)) for x in (q, k, v, dout, dlse)], max(*pairs[-2:], v.shape[-1]) ** 2),
    )


def _absolute_values(problem: AttentionProblem) -> tuple[Array, ...]:
    """|q|, |k|, |v|, |dout|, |dlse| of every head; 0 where no query sees and where one sees nothing: there may be anything."""
    lead, heads, kv_heads, rows = problem.lead, problem.heads, problem.kv_heads, problem.pairs[:-1]
    seen = problem.visible()
    live, looked_at = seen.any(axis=-1)[..., None], seen.any(axis=-2)[..., None]

    def whole(x: Array, count: int) -> Array:
        x = np.abs(np.asarray(x, dtype=np.float64))
        x = np.broadcast_to(x, (*lead, count, *x.shape[-2:]))
        return x if count == heads else np.repeat(x, heads // max(count, 1), axis=-3)

    dout = np.abs(np.asarray(problem.dout, dtype=np.float64)).reshape(*rows, problem.v.shape[-1])
    dlse = np.abs(np.asarray(np.zeros(rows) if problem.dlse is None else problem.dlse, dtype=np.float64)).reshape(rows)
    return (
        np.where(live, whole(problem.q, heads), 0),
        np.where(looked_at, whole(problem.k, kv_heads), 0),
        np.where(looked_at, whole(problem.v, kv_heads), 0),
        np.where(live, dout, 0),
        np.where(np.isfinite(dlse), dlse, 0),
    )


def _largest_score(problem: AttentionProblem, scores: Array) -> float:
    """The largest score that some query sees, of absolute values, and what its bias adds."""
    seen, bias = problem.visible(), problem.dense_bias()
    sizes = scores if bias is None else scores + np.where(np.isfinite(bias), np.abs(bias), 0)
    return float(np.broadcast_to(sizes, problem.pairs)[seen].max(initial=0))


def _factors(scale: float, largest: list[float], count: int) -> tuple[Answer, float]:
    q, k, v, dout, dlse = largest
    pairs = dout * v * count + dlse
    parts = (v, 0.0, scale * pairs * k, scale * pairs * q, dout, pairs, pairs)
    return Answer(*(count * part for part in parts)), count * max(1.0, scale * k, scale * q, dout)


def _ungroup(x: Array, group: int) -> Array:
    return x.reshape(*x.shape[:-3], x.shape[-3] // group, group, *x.shape[-2:]).sum(axis=-3)


def _back(x: Array, shape: tuple[int, ...]) -> Array:
    extra = x.ndim - len(shape)
    ones = tuple(axis for axis, n in enumerate(shape, start=extra) if n == 1)
    return x.sum(axis=(*range(extra), *ones)).reshape(shape)


def _bias_scale(problem: AttentionProblem, dbiased: Array) -> Array | None:
    if problem.bias is None:
        return None
    return lazy_bias_scale(problem.bias, dbiased) if isinstance(problem.bias, LazyBias) else _back(dbiased, problem.bias.shape)


def difference_step(problem: AttentionProblem, directions: dict[str, Array]) -> float:
    """The step of finite differences: 1e-3 / max(1, largest change of a score), in softcap's units where there is one.

    Parameters
    ----------
    problem : AttentionProblem
        The problem.
    directions : dict of arrays
        The direction of every input that moves: q, k, v, bias, sinks.

    Returns
    -------
    float
        The step.
    """
    kv_heads, heads = problem.kv_heads, problem.heads
    group = heads // kv_heads if kv_heads else 1

    def whole(x: Array, count: int) -> Array:
        x = np.broadcast_to(x, (*problem.lead, count, *x.shape[-2:]))
        return x if count == heads else np.repeat(x, group, axis=-3)

    q, k = whole(problem.q, heads), whole(problem.k, kv_heads)
    tq, tk = whole(directions["q"], heads), whole(directions["k"], kv_heads)
    change = np.abs(default_scale(problem) * (tq @ np.swapaxes(k, -1, -2) + q @ np.swapaxes(tk, -1, -2))) / min(
        problem.softcap or 1, 1
    )
    if "bias" in directions:
        t = directions["bias"]
        lazy = isinstance(problem.bias, LazyBias)
        added: Array = dense_bias(bias_with(problem.bias, t), *problem.pairs[-3:]) if lazy else t
        change = change + np.abs(added)
    largest = change[problem.visible()].max(initial=1.0)
    if "sinks" in directions:
        largest = max(largest, float(np.abs(directions["sinks"]).max(initial=0)))
    return 1e-3 / float(largest)


def difference_bound(scales: Scales, directions: dict[str, Array]) -> float:
    """Finite differences on ordinary draws: 1e-8·Σ|t|·scale, over the inputs that move.

    Parameters
    ----------
    scales : Scales
        Of the problem, with the cotangents in question.
    directions : dict of arrays
        By name, as `difference_step` takes them.

    Returns
    -------
    float
        How far <g, J t> by differences and <t, backward(g)> may be apart.
    """
    of = scales.of.given()
    return DIFFERENCE * sum(float((np.abs(t) * of[f"d{name}"]).sum()) for name, t in directions.items())


def autodiff_bound(scales: Scales, name: str, dtype: Any = np.float64) -> Array:
    """Another exact way to the same number, on any draw: 1e-14·(1 + largest ``|biased|``)·scale in float64.

    And what numbers below the smallest normal one may be off by.

    Parameters
    ----------
    scales : Scales
        Of the problem.
    name : str
        Which result: out, lse, dq, …
    dtype : dtype or str, optional
        The precision that both were computed in: also ``bfloat16`` or ``tf32``.

    Returns
    -------
    array
        The bound of every element.
    """
    info = float_info(dtype)
    rounding = AUTODIFF * info.eps * (1 + scales.largest) * np.asarray(getattr(scales.of, name))
    return rounding + info.smallest_normal * getattr(scales.unweighted, name) + info.smallest_subnormal * scales.factor


def precision_bound(scales: Scales, name: str, exact: Array, rounded: Array, dtype: Any = np.float32) -> Array:
    """A lower precision against float64: twice the naive formula's largest error in that precision, and 2 eps·scale.

    Parameters
    ----------
    scales : Scales
        Of the problem.
    name : str
        Which result: out, lse, dq, …
    exact, rounded : array
        The result of the naive formula in float64 and in ``dtype``.
    dtype : dtype, optional
        The precision.

    Returns
    -------
    array
        The bound of every element. Honest only for results with some elements: the error of a single one may be 0 by luck.
    """
    with np.errstate(all="ignore"):
        error = np.where(np.isfinite(exact), np.abs(np.asarray(rounded, dtype=np.float64) - exact), 0)
    return 2 * float(error.max(initial=0)) + 2 * float(np.finfo(dtype).eps) * np.asarray(getattr(scales.of, name))
