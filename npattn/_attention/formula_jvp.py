"""Tangents of the formula on one tile: how results, and gradients, answer to small changes of q, k, v, bias and sinks.

It is the product rule, line by line, on what formula.py does. ``t…`` is a tangent, ``d…`` a cotangent; tq arrives scaled as q
does. A tangent of ``None`` is 0, and what it would be multiplied with is left out. row_max is a constant: no result depends on
it. Derivation: docs/derivation.md, "Tangents" and "Tangents of the gradients".
"""

from __future__ import annotations

from typing import NamedTuple

from npattn._arrays.namespace import Array, Namespace
from npattn._attention import formula
from npattn._attention.formula import Part, Rows, Terms, TileGrads
from npattn._attention.ops import Ops


class Tangents(NamedTuple):
    """The tangents of what a tile is given."""

    q: Array | None
    k: Array | None
    v: Array | None
    bias: Array | None


class Numerators(NamedTuple):
    """A tile's numerators, and what their tangent is made of."""

    p: Array
    tbiased: Array | None  # memory of its own
    slope: Array | None = None  # of the cap
    tslope: Array | None = None


class TangentPart(NamedTuple):
    """A part of a row's keys and its tangents, before they are divided by row_sum."""

    part: Part
    tout: Array | None
    tsum: Array | None


class RowTangents(NamedTuple):
    """What a tile must know of the tangents of its rows."""

    dout: Array | None  # tdout / row_sum
    offset: Array  # (tδ - tdlse) / row_sum
    lse: Array | None


def product(ops: Ops, a: Array, b: Array, ta: Array | None, tb: Array | None, name: str) -> Array | None:
    """The tangent of a b: ta b + a tb."""
    left = None if ta is None else ops.matmul(ta, b, name)
    if tb is None:
        return left
    return ops.matmul(a, tb, name) if left is None else ops.add(left, ops.matmul(a, tb, "too"))


def _transposed(ops: Ops, x: Array | None) -> Array | None:
    return None if x is None else ops.transpose(x)


def added(a: Array | None, b: Array | None) -> Array | None:
    """The sum of two tangents of rows."""
    return b if a is None else a if b is None else a + b


# Forward ---------------------------------------------------------------------------------------------------------------------


def capped_scores(ops: Ops, q: Array, k: Array, t: Tangents, softcap: float | None) -> tuple[Array, Array | None, Array | None]:
    """capped, tcapped, and the slope between scores and capped."""
    # scores = scale·q kᵀ, with the scale in q
    capped = formula.score(ops, q, k)
    tcapped = product(ops, q, ops.transpose(k), t.q, _transposed(ops, t.k), "tscores")
    if softcap is None:
        return capped, tcapped, None
    # capped = c·tanh(scores / c)
    capped = formula.cap(ops, capped, softcap)
    slope = formula.cap_slope(ops, capped, softcap)
    return capped, None if tcapped is None else ops.multiply(tcapped, slope), slope


def biased_tangent(ops: Ops, tcapped: Array | None, tbias: Array | None, like: Array) -> Array | None:
    """From biased = capped + bias: tbiased = tcapped + tbias."""
    if tbias is None:
        return tcapped
    return ops.add(ops.xp.zeros_like(like) if tcapped is None else tcapped, tbias)


def tangent_sums(
    ops: Ops, n: Numerators, v: Array, tv: Array | None, terms: Terms, name: str, *, keep: bool
) -> tuple[Array | None, Array | None]:
    """The tangents of a tile's share of out and row_sum; ``keep`` tbiased, which is still needed."""
    # p = exp(biased - row_max), row_sum = Σ p
    tp = None if n.tbiased is None else ops.hide(ops.multiply(n.tbiased, n.p, "tp" if keep else None), terms.hidden, 0.0)
    tsum = None if tp is None else ops.row_sum(tp)
    # dropped = p∘factors, out = dropped v
    dropped, tdropped = _dropped(ops, n.p, tp, terms)
    return product(ops, dropped, v, tdropped, tv, name), tsum


def _dropped(ops: Ops, p: Array, tp: Array | None, terms: Terms) -> tuple[Array, Array | None]:
    if terms.factors is None:
        return p, tp
    return ops.multiply(p, terms.factors, "dropped"), None if tp is None else ops.multiply(tp, terms.factors)


def jvp_tile(ops: Ops, q: Array, k: Array, v: Array, t: Tangents, terms: Terms, before: TangentPart | None = None) -> TangentPart:
    """``forward_tile`` and its tangent: the parts of the keys before and of one more tile merge as outputs do."""
    capped, tcapped, _ = capped_scores(ops, q, k, t, terms.softcap)
    part, p = formula.part_of_tile(ops, capped, v, terms, None if before is None else before.part, keep=True)
    n = Numerators(p, biased_tangent(ops, tcapped, t.bias, p))
    tout, tsum = tangent_sums(ops, n, v, t.v, terms, "tout" if before is None else "tile_tout", keep=False)
    if before is None:
        return TangentPart(part, tout, tsum)
    factor = formula.rescale(before.part.row_max, before.part.row_sum, part.row_max, ops.xp)
    if before.tout is not None and tout is not None:
        tout = ops.add(ops.multiply(before.tout, factor), tout)
    return TangentPart(part, tout, None if before.tsum is None else added(factor * before.tsum, tsum))


def add_sink(before: TangentPart, sinks: Array, tsinks: Array | None, xp: Namespace) -> TangentPart:
    """A sink is one more part, whose row_sum has a tangent."""
    part = formula.add_sink(before.part, sinks, xp)
    factor = formula.rescale(before.part.row_max, before.part.row_sum, part.row_max, xp)
    tout = None if before.tout is None else xp.where(before.part.row_sum != 0, factor * before.tout, 0.0)
    tsum = None if before.tsum is None else factor * before.tsum
    return TangentPart(part, tout, added(tsum, sink_tangent(sinks, tsinks, part.row_max, xp)))


def sink_tangent(sinks: Array, tsinks: Array | None, row_max: Array, xp: Namespace) -> Array | None:
    """The tangent of the sink's term of row_sum, exp(sink - row_max)."""
    if tsinks is None:
        return None
    return xp.where(sinks == -float("inf"), 0.0, formula.sink_numerator(sinks, row_max, xp) * tsinks)


def normalised(
    tout: Array | None, tsum: Array | None, out: Array, row_sum: Array, xp: Namespace
) -> tuple[Array | None, Array | None]:
    """The tangents of out / row_sum and of lse = row_max + log row_sum; 0 for a row that sees nothing."""
    seen, inverse = row_sum != 0, formula.reciprocal(row_sum, xp)
    tlse = None if tsum is None else xp.where(seen, tsum * inverse, 0.0)
    tout = None if tout is None else tout * inverse
    if tlse is not None:
        tout = added(tout, -tlse * out)
    return None if tout is None else xp.where(seen, tout, 0.0), tlse


# Backward --------------------------------------------------------------------------------------------------------------------


def delta_tangent(dout: Array, tdout: Array | None, out: Array, tout: Array | None, xp: Namespace) -> Array | None:
    """From δ = dout · out: tδ = tdout · out + dout · tout."""
    left = None if tdout is None else formula.row_delta(tdout, out, xp)
    return added(left, None if tout is None else formula.row_delta(dout, tout, xp))


def rows_tangent(tdout: Array | None, toffset: Array, tlse: Array | None, row_sum: Array, xp: Namespace) -> RowTangents:
    """The row terms of every tile, divided by row_sum as those of ``rows_backward`` are."""
    inverse = formula.reciprocal(row_sum, xp)
    return RowTangents(None if tdout is None else tdout * inverse, toffset * inverse, tlse)


def numerators_again(ops: Ops, q: Array, k: Array, t: Tangents, shift: Array, terms: Terms) -> Numerators:
    """exp(biased - row_max), 0 where hidden, with tbiased, the slope of the cap and its tangent."""
    capped, tcapped, slope = capped_scores(ops, q, k, t, terms.softcap)
    tslope = None
    if terms.softcap is not None and tcapped is not None:
        # slope = 1 - (capped / c)²
        tslope = ops.multiply(ops.multiply(capped, -2 / terms.softcap**2, "tslope"), tcapped)
    x = capped if terms.bias is None else ops.add(capped, terms.bias)
    p = ops.hide(formula.exponentials(ops, x, shift), terms.hidden, 0.0)
    return Numerators(p, biased_tangent(ops, tcapped, t.bias, p), slope, tslope)


def backward_jvp_tile(
    ops: Ops, q: Array, k: Array, v: Array, t: Tangents, n: Numerators, rows: Rows, trows: RowTangents, terms: Terms
) -> TileGrads:
    """The tangents of what ``backward_tile`` makes: of dq / scale, dk, dv, and of dbiased."""
    p, tp = n.p, _weights_tangent(ops, n, trows.lse, terms)
    dropped, tdropped = (p, tp) if terms.factors is None else _dropped_apart(ops, p, tp, terms.factors)
    # dv = droppedᵀ dout
    tdv = product(ops, ops.transpose(dropped), rows.dout, _transposed(ops, tdropped), trows.dout, "dv")
    # ddropped = dout vᵀ
    dweights = formula.values_backward(ops, rows.dout, v)
    tdweights = product(ops, rows.dout, ops.transpose(v), trows.dout, _transposed(ops, t.v), "tdweights")
    # dweights = ddropped∘factors
    dweights = formula.dropout_backward(ops, dweights, terms.factors)
    # dbiased = p∘(dweights - offset)
    pull = ops.subtract(dweights, rows.offset)
    if tdweights is None:
        tdbiased = ops.multiply(p, -trows.offset, "tdweights")
    else:
        tdweights = formula.dropout_backward(ops, tdweights, terms.factors)
        tdbiased = ops.multiply(ops.subtract(tdweights, trows.offset), p)
    if tp is not None:
        tdbiased = ops.add(tdbiased, ops.multiply(tp, pull))
    tdbiased = ops.hide(tdbiased, terms.hidden, 0.0)
    dbiased = ops.hide(ops.multiply(pull, p), terms.hidden, 0.0)
    # dscores = dbiased∘slope
    dscores, tdscores = _cap_backward(ops, dbiased, tdbiased, n, terms)
    # dq = scale·dscores k, dk = dscoresᵀ q, with the scale in q
    tdq = product(ops, dscores, k, tdscores, t.k, "dq")
    tdk = product(ops, ops.transpose(dscores), q, ops.transpose(tdscores), t.q, "dk")
    return TileGrads(tdq, tdk, tdv, tdbiased)


def _weights_tangent(ops: Ops, n: Numerators, tlse: Array | None, terms: Terms) -> Array | None:
    """From weights = exp(biased - lse): tweights = weights∘(tbiased - tlse), times row_sum as p is."""
    if tlse is None:
        return None
    change = -tlse if n.tbiased is None else ops.subtract(n.tbiased, tlse)
    return ops.hide(ops.multiply(n.p, change, "tp"), terms.hidden, 0.0)


def _cap_backward(ops: Ops, dbiased: Array, tdbiased: Array, n: Numerators, terms: Terms) -> tuple[Array, Array]:
    """dscores and its tangent, beside tdbiased, which is a result."""
    if n.slope is None:
        return dbiased, tdbiased
    tdscores = ops.multiply(tdbiased, n.slope, "tdscores")
    if n.tslope is not None:
        tdscores = ops.add(tdscores, ops.multiply(n.tslope, dbiased))
    return formula.cap_backward(ops, dbiased, n.slope, terms.hidden), ops.hide(tdscores, terms.hidden, 0.0)


def _dropped_apart(ops: Ops, p: Array, tp: Array | None, factors: Array) -> tuple[Array, Array | None]:
    """dropped and its tangent, beside p and its tangent, which are still needed."""
    return ops.multiply(p, factors, "dropped"), None if tp is None else ops.multiply(tp, factors, "tdropped")


def sink_backward_tangent(
    sinks: Array,
    tsinks: Array | None,
    offset: Array,
    toffset: Array,
    tlse: Array | None,
    row_max: Array,
    row_sum: Array,
    xp: Namespace,
) -> Array:
    """From dsink_i = -p_i offset_i, p_i = exp(sink - lse_i): tdsink_i = -p_i ((tsink - tlse_i) offset_i + toffset_i)."""
    weight = formula.sink_numerator(sinks, row_max, xp) * formula.reciprocal(row_sum, xp)
    change = added(tsinks, None if tlse is None else -tlse)
    total = toffset if change is None else change * offset + toffset
    return xp.where(sinks == -float("inf"), 0.0, weight * -total)
