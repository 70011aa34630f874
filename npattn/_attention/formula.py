"""The formula, softmax(scale·q kᵀ) v, and its derivatives on one tile: the only calculus of attention in the package.

A tile is some rows (queries, of all heads of a group) against some keys. Its matrices are (..., rows, keys); q and dout are
(..., rows, D) and (..., rows, E), k and v (..., keys, D) and (..., keys, E), what belongs to a row (..., rows, 1). q arrives
scaled. Forward leaves, of every row, the largest biased score and the sum of the numerators exp(biased - row_max); backward
makes the numerators again from them. Derivation: docs/derivation.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from npattn._arrays.namespace import Array, Namespace
from npattn._attention.ops import Hidden, Ops


class Terms(NamedTuple):
    """What stands beside q, k, v in a tile; arrays broadcast to (..., rows, keys)."""

    softcap: float | None = None
    bias: Array | None = None
    hidden: Sequence[Hidden] = ()
    live: Array | None = None  # (..., rows, 1), the rows that see a key of this tile; None where all do
    factors: Array | None = None  # dropout's: 0 or 1 / (1 - rate)


class Part(NamedTuple):
    """The result of some keys for some rows, before it is divided by row_sum.

    A row that has seen no key has out 0, row_max -inf, row_sum 0; every other row has row_sum >= 1, or NaN.
    """

    out: Array
    row_max: Array
    row_sum: Array
    complete: bool = False  # every row has seen a key; else that is not known


class Rows(NamedTuple):
    """What backward needs to know of every row, ready for its tiles."""

    dout: Array  # dout / row_sum
    offset: Array  # (δ - dlse) / row_sum
    shift: Array  # row_max, 0 where there is none


class TileGrads(NamedTuple):
    """A tile's share of the gradients; dq is still to be multiplied by scale. ``None`` is 0."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbiased: Array


# Forward ---------------------------------------------------------------------------------------------------------------------


def score(ops: Ops, q: Array, k: Array) -> Array:
    """scores = scale·q kᵀ."""
    return ops.matmul(q, ops.transpose(k), "scores")


def cap(ops: Ops, scores: Array, softcap: float) -> Array:
    """capped = c·tanh(scores / c)."""
    return ops.multiply(ops.tanh(ops.multiply(scores, 1 / softcap)), softcap)


def exponentials(ops: Ops, biased: Array, shift: Array) -> Array:
    """The numerators exp(biased - shift): weights before they are divided by row_sum."""
    return ops.exp(ops.subtract(biased, shift))


def forward_tile(
    ops: Ops, q: Array, k: Array, v: Array, terms: Terms, before: Part | None = None, *, keep: bool = False
) -> tuple[Part, Array]:
    """The part of the keys ``before`` and of one more tile; and the tile's numerators p, to be kept for backward."""
    x = score(ops, q, k)
    if terms.softcap is not None:
        x = cap(ops, x, terms.softcap)
    return part_of_tile(ops, x, v, terms, before, keep=keep)


def part_of_tile(ops: Ops, capped: Array, v: Array, terms: Terms, before: Part | None, *, keep: bool) -> tuple[Part, Array]:
    """``forward_tile`` from the capped scores on.

    Numerators are made with the largest score so far. Where a tile raises it, what came before is too large by
    exp(row_max - new row_max), and is made smaller.
    """
    xp = ops.xp
    x = capped if terms.bias is None else ops.add(capped, terms.bias)
    x = ops.hide(x, terms.hidden, -float("inf"))
    row_max, seen = ops.row_max(x), terms.live
    if before is not None:
        row_max = xp.maximum(before.row_max, row_max)
        seen = None if seen is None or before.complete else seen | (before.row_sum != 0)
    p = exponentials(ops, x, row_max if seen is None else xp.where(seen, row_max, 0.0))
    if keep:
        p = ops.hide(p, terms.hidden, 0.0)  # a row that is NaN is NaN at its hidden pairs too
    row_sum = ops.row_sum(p)
    dropped = p if terms.factors is None else ops.multiply(p, terms.factors, "dropped" if keep else None)
    if before is None:
        return Part(ops.matmul(dropped, v, "out"), row_max, row_sum, seen is None), p
    if before.complete:
        factor = xp.exp(before.row_max - row_max)
    else:
        factor = rescale(before.row_max, before.row_sum, row_max, xp)
    out = ops.add(ops.multiply(before.out, factor), ops.matmul(dropped, v, "tile_out"))
    return Part(out, row_max, factor * before.row_sum + row_sum, seen is None), p


def empty_part(shape: tuple[int, ...], value_size: int, dtype: Any, device: Any, xp: Namespace) -> Part:
    """The part of rows (..., rows) that have no keys at all."""
    out, row_sum = (xp.zeros((*shape, n), dtype=dtype, device=device) for n in (value_size, 1))
    return Part(out, xp.full((*shape, 1), -float("inf"), dtype=dtype, device=device), row_sum)


def add_sink(part: Part, sinks: Array, xp: Namespace) -> Part:
    """A sink is one more part, with no value: out 0, row_max the sink, row_sum 1 (0 for a sink of -inf, which is none)."""
    out = xp.where(part.row_sum != 0, part.out, 0.0)  # now: a row that only sees its sink has row_sum 1
    return merge(part._replace(out=out), Part(xp.zeros_like(sinks), sinks, _sink_sum(sinks, xp)), xp)


def _sink_sum(sinks: Array, xp: Namespace) -> Array:
    return xp.astype(sinks != -float("inf"), sinks.dtype)


def merge(a: Part, b: Part, xp: Namespace) -> Part:
    """Two parts over disjoint keys as one: out = Σ exp(row_max_j - row_max)·out_j, row_sum alike."""
    row_max = xp.maximum(a.row_max, b.row_max)
    by_a, by_b = (rescale(part.row_max, part.row_sum, row_max, xp) for part in (a, b))
    return Part(by_a * a.out + by_b * b.out, row_max, by_a * a.row_sum + by_b * b.row_sum)


def rescale(row_max: Array, row_sum: Array, new_max: Array, xp: Namespace) -> Array:
    """exp(row_max - new_max), 0 for a part that has seen no key (its row_max may meet another -inf there)."""
    seen = row_sum != 0
    return xp.where(seen, xp.exp(xp.where(seen, row_max - new_max, 0.0)), 0.0)


def normalised(part: Part, xp: Namespace, *, every_row_sees: bool) -> Array:
    """out / row_sum, set to 0 for a row that has seen no key: 0 times a NaN that another row sees would not be."""
    if every_row_sees:
        return part.out / part.row_sum
    return xp.where(part.row_sum != 0, part.out * reciprocal(part.row_sum, xp), 0.0)


def reciprocal(row_sum: Array, xp: Namespace) -> Array:
    """1 / row_sum, 0 for a row that has seen no key."""
    seen = row_sum != 0
    return xp.where(seen, 1 / xp.where(seen, row_sum, 1.0), 0.0)


def log_sum_exp(row_max: Array, row_sum: Array, xp: Namespace) -> Array:
    """lse = row_max + log row_sum, -inf for a row that has seen no key."""
    seen = row_sum != 0
    return xp.where(seen, row_max + xp.log(xp.where(seen, row_sum, 1.0)), -float("inf"))


# Backward --------------------------------------------------------------------------------------------------------------------


def row_delta(dout: Array, out: Array, xp: Namespace) -> Array:
    """δ_i = Σ_j weights_ij dweights_ij = dout_i · out_i."""
    return xp.vecdot(dout, out)[..., None]


def row_offset(delta: Array, dlse: Array | None) -> Array:
    """δ - dlse, what the softmax's backward subtracts in every row."""
    return delta if dlse is None else delta - dlse


def rows_backward(dout: Array, offset: Array, row_max: Array, row_sum: Array, xp: Namespace, *, every_row_sees: bool) -> Rows:
    """The row terms of every tile: weights = numerators / row_sum, and the division is done here, once a row."""
    if every_row_sees:
        return Rows(dout / row_sum, offset / row_sum, row_max)
    # selection: at a row that sees nothing, dout may be NaN and dlse may be anything
    seen, inverse = row_sum != 0, reciprocal(row_sum, xp)
    return Rows(xp.where(seen, dout * inverse, 0.0), xp.where(seen, offset * inverse, 0.0), xp.where(seen, row_max, 0.0))


def rows_as_kept(rows: Rows, tile_max: Array, xp: Namespace) -> Rows:
    """The row terms for numerators that were made with the row_max of when their tile was reached."""
    factor = xp.exp(tile_max - rows.shift)
    return rows._replace(dout=rows.dout * factor, offset=rows.offset * factor)


def sink_backward(sinks: Array, offset: Array, row_max: Array, row_sum: Array, xp: Namespace) -> Array:
    """dsink_i = p_i (dlse_i - δ_i), p_i = exp(sink - lse_i) the sink's weight in row i."""
    return sink_numerator(sinks, row_max, xp) * reciprocal(row_sum, xp) * -offset


def sink_numerator(sinks: Array, row_max: Array, xp: Namespace) -> Array:
    """The sink's term of row_sum, exp(sink - row_max), 0 for a sink of -inf."""
    return rescale(sinks, _sink_sum(sinks, xp), row_max, xp)


def cap_slope(ops: Ops, capped: Array, softcap: float) -> Array:
    """The slope of c·tanh(scores / c): 1 - (capped / c)²."""
    tanh = ops.multiply(capped, 1 / softcap, "slope")
    return ops.add(ops.multiply(ops.multiply(tanh, tanh), -1.0), 1.0)


def values_backward(ops: Ops, dout: Array, v: Array) -> Array:
    """From out = dropped v: ddropped = dout vᵀ."""
    return ops.matmul(dout, ops.transpose(v), "dweights")


def dropout_backward(ops: Ops, ddropped: Array, factors: Array | None) -> Array:
    """From dropped = weights∘factors: dweights = ddropped∘factors."""
    return ddropped if factors is None else ops.multiply(ddropped, factors)


def softmax_backward(ops: Ops, dweights: Array, offset: Array, weights: Array, hidden: Sequence[Hidden]) -> Array:
    """From weights = softmax(biased): dbiased = weights∘(dweights - δ + dlse), 0 where hidden."""
    return ops.hide(ops.multiply(ops.subtract(dweights, offset), weights), hidden, 0.0)


def cap_backward(ops: Ops, dcapped: Array, slope: Array | None, hidden: Sequence[Hidden]) -> Array:
    """From capped = c·tanh(scores / c): dscores = dcapped∘slope, 0 where hidden; and dcapped is dbiased."""
    if slope is None:
        return dcapped
    return ops.hide(ops.multiply(dcapped, slope, "dscores"), hidden, 0.0)  # of a hidden score that overflows it is NaN


def backward_tile(ops: Ops, q: Array, k: Array, v: Array, rows: Rows, terms: Terms, kept: Array | None = None) -> TileGrads:
    """One tile's share of dq / scale, dk, dv, and its dbiased; ``kept`` are the numerators, if forward kept them.

    p are numerators and stand where the chain rule has weights = p / row_sum: rows brings dout and offset divided by row_sum.
    """
    p, slope = _numerators_again(ops, q, k, rows.shift, terms) if kept is None else (kept, None)
    # out = dropped v
    dropped = p if terms.factors is None else ops.multiply(p, terms.factors, "dropped")
    dv = ops.matmul(ops.transpose(dropped), rows.dout, "dv")
    ddropped = values_backward(ops, rows.dout, v)
    # dropped = weights∘factors
    dweights = dropout_backward(ops, ddropped, terms.factors)
    # weights = softmax(biased), biased = capped + bias
    dbiased = softmax_backward(ops, dweights, rows.offset, p, terms.hidden)
    # capped = c·tanh(scores / c)
    dscores = cap_backward(ops, dbiased, slope, terms.hidden)
    # scores = scale·q kᵀ, with the scale in q
    return TileGrads(ops.matmul(dscores, k, "dq"), ops.matmul(ops.transpose(dscores), q, "dk"), dv, dbiased)


def _numerators_again(ops: Ops, q: Array, k: Array, shift: Array, terms: Terms) -> tuple[Array, Array | None]:
    """exp(biased - row_max), 0 where hidden, and the slope of the cap."""
    x, slope = score(ops, q, k), None
    if terms.softcap is not None:
        x = cap(ops, x, terms.softcap)
        slope = cap_slope(ops, x, terms.softcap)
    if terms.bias is not None:
        x = ops.add(x, terms.bias)
    return ops.hide(exponentials(ops, x, shift), terms.hidden, 0.0), slope


# Merging results -------------------------------------------------------------------------------------------------------------


def as_part(out: Array, lse: Array, xp: Namespace) -> Part:
    """A result (out, lse) as a part: row_max lse, row_sum 1, or nothing where lse is -inf."""
    seen = lse != -float("inf")
    return Part(xp.where(seen, out, 0.0), lse, xp.astype(seen, lse.dtype))


def merge_backward(part: Part, out: Array, lse: Array, dout: Array, dlse: Array | None, xp: Namespace) -> tuple[Array, Array]:
    """out = Σ_j p_j out_j, p_j = exp(lse_j - lse): dout_j = p_j dout, dlse_j = p_j (dout·(out_j - out) + dlse)."""
    seen = part.row_sum != 0
    weight = rescale(part.row_max, part.row_sum, lse, xp)
    pull = xp.vecdot(dout, part.out - out)[..., None]
    of_lse = weight * (pull if dlse is None else pull + dlse)
    return xp.where(seen, weight * dout, 0.0), xp.where(seen, of_lse, 0.0)
