"""The passes over a problem's tiles, forward and backward: they hand tiles to the formula and put together what it returns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._attention import formula
from npattn._attention.formula import Part
from npattn._attention.gathering import Backward, gather
from npattn._attention.memory import new_room
from npattn._attention.ops import Ops
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.stores import make_rows
from npattn._attention.tiles import (
    Tile,
    at_live_keys,
    complete_rows,
    unit_rows,
    unit_tiles,
    whole_tile,
    whole_unit,
)
from npattn._attention.tiling import ONE_TILE, Sizes, cut_units, is_one_unit, one_blas_thread, plain_ops, run

# of every unit's tiles: numerators, and the row_max that they were made with (None: that of the whole row)
Kept = tuple[tuple[tuple[Array, Array | None], ...], ...]


class Forward(NamedTuple):
    """What the forward pass leaves, in the dtype of the computation."""

    out: Array  # (..., H, T, E)
    row_max: Array  # (..., H, T, 1)
    row_sum: Array  # (..., H, T, 1)
    kept: Kept | None
    tile: Tile | None = None  # the only one, if backward can have it as it is


def forward(problem: Problem, sizes: Sizes, *, keep: bool) -> Forward:
    """Every unit's rows against its tiles, merged where its keys are cut."""
    if sizes is ONE_TILE and is_one_unit(problem):
        return _forward_whole(problem, keep=keep)
    units = [unit for block in cut_units(problem, sizes) for unit in block]
    stores = [make_rows(problem, n, plain=sizes.plain) for n in (problem.v.shape[-1], 1, 1)]
    kept: list[Any] = [()] * len(units)
    rooms = _rooms(problem, sizes, units) if keep else [None] * len(units)

    def worker(ops: Ops, check: Callable[[], None]) -> Callable[[int], None]:
        def work(index: int) -> None:
            part, kept[index] = _forward_unit(problem, sizes, units[index], ops, check, keep=keep, room=rooms[index])
            for store, rows in zip(stores, part[:3], strict=True):
                store.put(units[index], rows)

        return work

    run(problem, sizes, worker, range(len(units)))
    out, row_max, row_sum = (store.result() for store in stores)
    return Forward(out, row_max, row_sum, tuple(kept) if keep else None)


def _rooms(problem: Problem, sizes: Sizes, units: list[Place]) -> list[Array | None]:
    """Memory for the numerators of every unit, in one piece: many pieces would cost a page fault for every 4 KiB."""
    if sizes.plain:
        return [None] * len(units)
    heads = [math.prod(s.stop - s.start for s in (*unit.lead, unit.heads)) for unit in units]
    width = problem.keys + 64 * (problem.keys // max(sizes.keys, 1) + 1)  # rows may be set apart, see Scratch.take
    edges = [0, *itertools.accumulate(n * unit.rows * width for n, unit in zip(heads, units, strict=True))]
    memory = new_room(edges[-1], problem.compute, problem.xp)
    return [memory[a:b] for a, b in itertools.pairwise(edges)]


def _forward_whole(problem: Problem, *, keep: bool) -> Forward:
    """``forward`` of a small problem: one tile, and nothing to put together."""
    ops, options, unit = plain_ops(problem), problem.options, whole_unit(problem.whole)
    with np.errstate(all="ignore"), one_blas_thread(problem):
        q = ops.load(complete_rows(problem, problem.q), "q", scale=options.scale)
        tile = whole_tile(problem, unit, ops)
        part, p = formula.forward_tile(ops, q, tile.k, tile.v, tile.terms, keep=keep)
        made_with = None
        if options.sinks is not None:
            made_with = part.row_max
            part = formula.add_sink(part, sink_rows(problem, unit), problem.xp)
        out = formula.normalised(part, problem.xp, every_row_sees=problem.every_row_sees)
        rows = (out, part.row_max, part.row_sum)
        if problem.group > 1 or out.shape[:-3] != problem.lead:
            rows = tuple(_whole_rows(problem, x) for x in rows)
    ready = tile if tile.k is problem.k and tile.terms.hidden == () else None  # nothing in it that is not held anyway
    return Forward(*rows, (((p, made_with),),) if keep else None, ready)


def _whole_rows(problem: Problem, rows: Array) -> Array:
    """The rows (..., K, G·T, n) of the only unit as (..., H, T, n)."""
    lead, shape = problem.lead, rows.shape
    if shape[:-3] != lead:
        rows = problem.xp.broadcast_to(rows, (*lead, *shape[-3:]))
    if problem.group == 1:
        return rows
    return problem.xp.reshape(rows, (*lead, problem.kv_heads * problem.group, problem.queries, shape[-1]))


def _forward_unit(
    problem: Problem, sizes: Sizes, unit: Place, ops: Ops, check: Callable[[], None], *, keep: bool, room: Array | None = None
) -> tuple[Part, tuple[tuple[Array, Array | None], ...]]:
    """A unit's rows: the normalised out, row_max and row_sum; and what is kept of its tiles, in ``room`` if there is one."""
    xp = problem.xp
    q = ops.load(unit_rows(problem, unit, problem.q), "q", scale=problem.options.scale)
    part: Part | None = None
    kept: list[tuple[Array, Array | None]] = []
    for tile in unit_tiles(problem, unit, sizes, ops):
        check()
        if keep:
            ops.lend("scores", room)
        part, p = formula.forward_tile(ops, q, tile.k, tile.v, tile.terms, part, keep=keep)
        if keep:
            kept.append((p, part.row_max))
            ops.lend("scores", None)
            room = None if room is None else room[math.prod(p.shape[:-2]) * p.strides[-3] // p.itemsize :]
    if part is None:
        lead = tuple(s.stop - s.start for s in (*unit.lead, unit.heads))
        part = formula.empty_part((*lead, unit.rows), problem.v.shape[-1], problem.compute, problem.device, xp)
    if problem.options.sinks is not None:
        part = formula.add_sink(part, sink_rows(problem, unit), xp)
    elif len(kept) == 1:
        kept = [(kept[0][0], None)]
    return Part(formula.normalised(part, xp, every_row_sees=problem.every_row_sees), part.row_max, part.row_sum), tuple(kept)


def sink_rows(problem: Problem, unit: Place) -> Array:
    """The sink of every row of a unit, (K, rows, 1)."""
    sinks = problem.xp.astype(problem.options.sinks, problem.compute, copy=False)
    return unit.fold_rows(unit.per_head(sinks, problem.xp)[..., None], problem.xp)


def backward(problem: Problem, sizes: Sizes, done: Forward, dout: Array, dlse: Array | None) -> Backward:
    """Every unit's tiles again. dq is a unit's own; all else is summed in an order that shapes alone decide."""
    options = problem.options
    if sizes is ONE_TILE and options.bias is None and options.sinks is None and is_one_unit(problem):
        return _backward_whole(problem, done, dout, dlse)

    def begin(ops: Ops, index: int, unit: Place) -> _BackwardUnit:
        return _BackwardUnit(problem, unit, ops, done, dout, dlse, index)

    return gather(problem, sizes, begin)


def _backward_whole(problem: Problem, done: Forward, dout: Array, dlse: Array | None) -> Backward:
    """``backward`` of a small problem without bias and sinks: one tile, and nothing to put together."""
    ops, unit = plain_ops(problem), whole_unit(problem.whole)
    kept = None if done.kept is None else done.kept[0][0]
    with np.errstate(all="ignore"), one_blas_thread(problem):
        tile = done.tile or whole_tile(problem, unit, ops)
        bare = tile.terms.live is tile.live_keys is None
        if bare and problem.every_row_sees and kept is not None and problem.group == 1:
            grads = _bare_tile(problem, tile, ops, done, kept[0], dout, dlse)
            dq = ops.multiply(grads.dq, problem.options.scale)
        else:
            rows = _BackwardUnit(problem, unit, ops, done, dout, dlse)
            grads = rows.tile(tile, kept)
            dq = rows.dq()
        if problem.group > 1 or dq.shape[:-3] != problem.lead:
            dq = _whole_rows(problem, dq)
    return Backward(dq, grads.dk, grads.dv, None, None)


def _bare_tile(
    problem: Problem, tile: Tile, ops: Ops, done: Forward, p: Array, dout: Array, dlse: Array | None
) -> formula.TileGrads:
    """What `_BackwardUnit` makes of the only tile where no row is without a key and no key without a row.

    The way through it takes a tenth of the time.
    """
    dout = ops.load(dout, "dout")
    offset = formula.row_offset(formula.row_delta(dout, done.out, problem.xp), dlse)
    rows = formula.rows_backward(dout, offset, done.row_max, done.row_sum, problem.xp, every_row_sees=True)
    q = ops.load(problem.q, "q", scale=problem.options.scale)
    return formula.backward_tile(ops, q, tile.k, tile.v, rows, tile.terms, p)


class _BackwardUnit:
    def __init__(
        self, problem: Problem, unit: Place, ops: Ops, done: Forward, dout: Array, dlse: Array | None, index: int = 0
    ) -> None:
        self.problem, self.unit, self.ops, self.xp = problem, unit, ops, problem.xp
        self.kept = None if done.kept is None else done.kept[index]
        self.q = ops.load(unit_rows(problem, unit, problem.q), "q", scale=problem.options.scale)
        dout = ops.load(unit_rows(problem, unit, dout), "dout")
        self.dlse = None if dlse is None else unit_rows(problem, unit, dlse)
        self.row_max, self.row_sum = unit_rows(problem, unit, done.row_max), unit_rows(problem, unit, done.row_sum)
        self.delta = formula.row_delta(dout, unit_rows(problem, unit, done.out), self.xp)
        offset = formula.row_offset(self.delta, self.dlse)
        self.rows = formula.rows_backward(
            dout, offset, self.row_max, self.row_sum, self.xp, every_row_sees=problem.every_row_sees
        )
        self.total: Array | None = None
        self.seen: Array | bool = False  # which rows see a key; True for all

    def shares(self, sizes: Sizes, check: Callable[[], None]) -> Iterator[tuple[Place, formula.TileGrads]]:
        for n, tile in enumerate(unit_tiles(self.problem, self.unit, sizes, self.ops)):
            check()
            yield tile.place, self.tile(tile, None if self.kept is None else self.kept[n])

    def tile(self, tile: Tile, kept: tuple[Array, Array | None] | None) -> formula.TileGrads:
        """A tile's share; dq stays here."""
        q, rows, live = self.q, self.rows, tile.terms.live
        p = None
        if kept is not None:
            p, row_max = kept
            rows = rows if row_max is None else formula.rows_as_kept(rows, row_max, self.xp)
        if live is None:
            self.seen = True
        else:  # a row that sees nothing here may hold anything
            q = self.ops.load(q, "live_q", live=live)
            rows = rows._replace(dout=self.ops.load(rows.dout, "live_dout", live=live))
            self.seen = self.seen if self.seen is True else live if self.seen is False else self.seen | live
        grads = formula.backward_tile(self.ops, q, tile.k, tile.v, rows, tile.terms, p)
        if self.total is None:
            self.total = self.ops.multiply(grads.dq, self.problem.options.scale, "total_dq")
        else:
            self.total = self.ops.add(self.total, self.ops.multiply(grads.dq, self.problem.options.scale))
        return at_live_keys(tile, grads, self.xp)

    def dq(self) -> Array:
        if self.total is None:
            return self.xp.zeros_like(self.q)
        return self.total if self.seen is True else self.xp.where(self.seen, self.total, 0.0)

    def dsinks(self) -> Array:
        delta = self.delta
        if self.seen is False:
            delta = self.xp.zeros_like(delta)
        elif self.seen is not True:
            delta = self.xp.where(self.seen, delta, 0.0)
        sinks = sink_rows(self.problem, self.unit)
        shares = formula.sink_backward(sinks, formula.row_offset(delta, self.dlse), self.row_max, self.row_sum, self.xp)
        return per_sink(self.unit, shares, self.xp)


def per_sink(unit: Place, shares: Array, xp: Namespace) -> Array:
    """What the rows of a unit have for their sinks, (..., K, rows, 1), summed to (K, G)."""
    group = unit.group.stop - unit.group.start
    shares = xp.reshape(shares, (*shares.shape[:-2], group, -1))
    return xp.sum(shares, axis=(*range(shares.ndim - 3), shares.ndim - 1))
