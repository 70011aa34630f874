"""The passes over a problem's tiles that make tangents: of results, and of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from npattn._arrays.namespace import Array
from npattn._attention import formula, formula_jvp
from npattn._attention.formula import TileGrads
from npattn._attention.formula_jvp import Numerators, TangentPart, Tangents
from npattn._attention.gathering import Backward, gather
from npattn._attention.ops import Ops
from npattn._attention.passes import Forward, per_sink, sink_rows
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.shades import unit_bias
from npattn._attention.stores import RowStore, make_rows
from npattn._attention.tiles import (
    Tile,
    at_live_keys,
    key_part,
    unit_rows,
    unit_tiles,
)
from npattn._attention.tiling import Sizes, cut_units, run

KEYS = 512  # keys of a tile, at most: there are more matrices of it than forward has
WHOLE_ROWS = 1 << 19  # rows times keys of a tile that takes whole rows, and so need not make its scores twice
FEWEST_ROWS = 128  # a tile with fewer makes slow products, more costly than making the scores twice


class Jvp(NamedTuple):
    """Results and their tangents, in the dtype of the computation."""

    out: Array  # (..., H, T, E)
    row_max: Array  # (..., H, T, 1)
    row_sum: Array  # (..., H, T, 1)
    tout: Array  # (..., H, T, E)
    tlse: Array  # (..., H, T, 1)


class Cotangents(NamedTuple):
    """The cotangents of out and lse, and their tangents, each (..., H, T, ·); ``None`` is 0."""

    dout: Array
    dlse: Array | None
    tdout: Array | None
    tdlse: Array | None


class _Directions:
    """The tangents of a unit's rows and of its tiles, from a problem with tangents in the place of the inputs."""

    def __init__(self, problem: Problem, along: Problem, unit: Place, ops: Ops) -> None:
        self.along, self.ops = along, ops
        scale = problem.options.scale
        self.tq = None if along.q is None else ops.load(unit_rows(problem, unit, along.q), "tq", scale=scale)
        self.tsinks = None if along.options.sinks is None else sink_rows(along, unit)

    def of_tile(self, tile: Tile) -> Tangents:
        along, load = self.along, self.ops.load
        tk, tv = (
            None if x is None else load(key_part(tile.place, x), name, live=tile.live_keys)
            for x, name in ((along.k, "tk"), (along.v, "tv"))
        )
        return Tangents(self.tq, tk, tv, None if along.options.bias is None else unit_bias(along, tile.place))


def jvp(problem: Problem, along: Problem, sizes: Sizes) -> Jvp:
    """Every unit's rows against its tiles, results and tangents merged where its keys are cut."""
    sizes = _narrow(sizes)
    units = [unit for block in cut_units(problem, sizes) for unit in block]
    value_size = problem.v.shape[-1]
    stores = [make_rows(problem, n, plain=sizes.plain) for n in (value_size, 1, 1, value_size, 1)]

    def worker(ops: Ops, check: Callable[[], None]) -> Callable[[int], None]:
        def work(index: int) -> None:
            for store, rows in zip(stores, _jvp_unit(problem, along, sizes, units[index], ops, check), strict=True):
                store.put(units[index], rows)

        return work

    run(problem, sizes, worker, range(len(units)))
    return Jvp(*(store.result() for store in stores))


def _jvp_unit(problem: Problem, along: Problem, sizes: Sizes, unit: Place, ops: Ops, check: Callable[[], None]) -> Jvp:
    xp = problem.xp
    q = ops.load(unit_rows(problem, unit, problem.q), "q", scale=problem.options.scale)
    directions = _Directions(problem, along, unit, ops)
    done: TangentPart | None = None
    for tile in unit_tiles(problem, unit, sizes, ops):
        check()
        done = formula_jvp.jvp_tile(ops, q, tile.k, tile.v, directions.of_tile(tile), tile.terms, done)
    if done is None:
        lead = tuple(s.stop - s.start for s in (*unit.lead, unit.heads))
        empty = formula.empty_part((*lead, unit.rows), problem.v.shape[-1], problem.compute, problem.device, xp)
        done = TangentPart(empty, None, None)
    if problem.options.sinks is not None:
        done = formula_jvp.add_sink(done, sink_rows(problem, unit), directions.tsinks, xp)
    out = formula.normalised(done.part, xp, every_row_sees=problem.every_row_sees)
    row_max, row_sum = done.part.row_max, done.part.row_sum
    tout, tlse = formula_jvp.normalised(done.tout, done.tsum, out, row_sum, xp)
    return Jvp(
        out,
        row_max,
        row_sum,
        xp.zeros_like(out) if tout is None else tout,
        xp.zeros_like(row_sum) if tlse is None else tlse,
    )


class BackwardJvp(NamedTuple):
    """The tangents of gradients, and those of the results beside them."""

    grads: Backward
    tout: Array  # (..., H, T, E)
    tlse: Array  # (..., H, T, 1)


def backward_jvp(problem: Problem, along: Problem, sizes: Sizes, done: Forward, given: Cotangents) -> BackwardJvp:
    """The tangent of ``passes.backward``: every unit's tiles once for the tangents of its rows, and once for the gradients."""
    sizes = _whole_rows(problem, sizes)
    stores = [make_rows(problem, n, plain=sizes.plain) for n in (problem.v.shape[-1], 1)]

    def begin(ops: Ops, _index: int, unit: Place) -> _BackwardJvpUnit:
        return _BackwardJvpUnit(problem, along, unit, ops, done, given, stores)

    grads = gather(problem, sizes, begin)
    return BackwardJvp(grads, *(store.result() for store in stores))


def _narrow(sizes: Sizes) -> Sizes:
    return sizes if sizes.plain else sizes._replace(keys=min(sizes.keys, KEYS))


def _whole_rows(problem: Problem, sizes: Sizes) -> Sizes:
    """Tiles of whole rows, where that leaves rows enough."""
    rows = min(sizes.rows, WHOLE_ROWS // max(problem.keys, 1))
    if sizes.plain or rows < FEWEST_ROWS:
        return _narrow(sizes)
    return sizes._replace(rows=rows, keys=problem.keys, pairs=min(sizes.pairs, WHOLE_ROWS))


class _BackwardJvpUnit:
    """A unit's rows on their way through its tiles, twice."""

    def __init__(
        self,
        problem: Problem,
        along: Problem,
        unit: Place,
        ops: Ops,
        done: Forward,
        given: Cotangents,
        stores: list[RowStore],
    ) -> None:
        self.problem, self.unit, self.ops, self.xp, self.stores = problem, unit, ops, problem.xp, stores
        self.q = ops.load(unit_rows(problem, unit, problem.q), "q", scale=problem.options.scale)
        self.directions = _Directions(problem, along, unit, ops)
        self.dout, self.tdout = (
            None if x is None else ops.load(unit_rows(problem, unit, x), name)
            for x, name in ((given.dout, "dout"), (given.tdout, "tdout"))
        )
        self.dlse, self.tdlse = (None if x is None else unit_rows(problem, unit, x) for x in (given.dlse, given.tdlse))
        self.out, self.row_max, self.row_sum = (unit_rows(problem, unit, x) for x in done[:3])
        self.delta = formula.row_delta(self.dout, self.out, self.xp)
        self.rows = formula.rows_backward(
            self.dout,
            formula.row_offset(self.delta, self.dlse),
            self.row_max,
            self.row_sum,
            self.xp,
            every_row_sees=problem.every_row_sees,
        )
        self.tdelta: Array | None = None
        self.tlse: Array | None = None
        self.total: Array | None = None
        self.seen: Array | bool = False  # which rows see a key; True for all

    def shares(self, sizes: Sizes, check: Callable[[], None]) -> Iterator[tuple[Place, TileGrads]]:
        only = self._row_tangents(sizes, check)
        if only is not None:
            yield only[0].place, self._tile(*only)
            return
        for tile in unit_tiles(self.problem, self.unit, sizes, self.ops):
            check()
            t = self.directions.of_tile(tile)
            yield tile.place, self._tile(tile, t, self._numerators(tile, t))

    def _numerators(self, tile: Tile, t: Tangents) -> Numerators:
        return formula_jvp.numerators_again(self.ops, self.q, tile.k, t, self.rows.shift, tile.terms)

    def _row_tangents(self, sizes: Sizes, check: Callable[[], None]) -> tuple[Tile, Tangents, Numerators] | None:
        """Find tout and tlse, and the row terms that are made of them; what is at hand of the tile, if there is only one."""
        problem, unit, xp, tout, tsum = self.problem, self.unit, self.xp, None, None
        count = 0
        for tile in unit_tiles(problem, unit, sizes, self.ops):
            check()
            t = self.directions.of_tile(tile)
            n = self._numerators(tile, t)
            name = "tile_tout" if count else "tout"
            tile_tout, tile_tsum = formula_jvp.tangent_sums(self.ops, n, tile.v, t.v, tile.terms, name, keep=True)
            tout = tile_tout if tout is None else self.ops.add(tout, tile_tout)
            tsum = formula_jvp.added(tsum, tile_tsum)
            live = tile.terms.live
            self.seen = True if live is None or self.seen is True else live if self.seen is False else self.seen | live
            count, last = count + 1, (tile, t, n)
        if tout is not None and self.seen is not True:
            tout = xp.where(self.seen, tout, 0.0)
        if problem.options.sinks is not None:
            sinks = sink_rows(problem, unit)
            tsum = formula_jvp.added(tsum, formula_jvp.sink_tangent(sinks, self.directions.tsinks, self.row_max, xp))
        tout, self.tlse = formula_jvp.normalised(tout, tsum, self.out, self.row_sum, xp)
        self.tdelta = formula_jvp.delta_tangent(self.dout, self.tdout, self.out, tout, xp)
        tdelta = xp.zeros_like(self.delta) if self.tdelta is None else self.tdelta
        toffset = formula.row_offset(tdelta, self.tdlse)
        self.trows = formula_jvp.rows_tangent(self.tdout, toffset, self.tlse, self.row_sum, xp)
        for store, x, like in zip(self.stores, (tout, self.tlse), (self.out, self.row_sum), strict=True):
            store.put(unit, xp.zeros_like(like) if x is None else x)
        return last if count == 1 else None

    def _tile(self, tile: Tile, t: Tangents, n: Numerators) -> TileGrads:
        """A tile's share; tdq stays here."""
        q, rows, trows, live, load = self.q, self.rows, self.trows, tile.terms.live, self.ops.load
        if live is not None:  # a row that sees nothing here may hold anything
            q, rows = load(q, "live_q", live=live), rows._replace(dout=load(rows.dout, "live_dout", live=live))
            if t.q is not None:
                t = t._replace(q=load(t.q, "live_tq", live=live))
            if trows.dout is not None:
                trows = trows._replace(dout=load(trows.dout, "live_tdout", live=live))
        grads = formula_jvp.backward_jvp_tile(self.ops, q, tile.k, tile.v, t, n, rows, trows, tile.terms)
        if grads.dq is not None:
            scaled = self.ops.multiply(grads.dq, self.problem.options.scale, "total_dq" if self.total is None else None)
            self.total = scaled if self.total is None else self.ops.add(self.total, scaled)
        return at_live_keys(tile, grads, self.xp)

    def dq(self) -> Array:
        if self.total is None:
            return self.xp.zeros_like(self.q)
        return self.total if self.seen is True else self.xp.where(self.seen, self.total, 0.0)

    def dsinks(self) -> Array:
        xp, zeros = self.xp, self.xp.zeros_like(self.delta)
        delta, tdelta = (
            zeros if x is None or self.seen is False else x if self.seen is True else xp.where(self.seen, x, 0.0)
            for x in (self.delta, self.tdelta)
        )
        shares = formula_jvp.sink_backward_tangent(
            sink_rows(self.problem, self.unit),
            self.directions.tsinks,
            formula.row_offset(delta, self.dlse),
            formula.row_offset(tdelta, self.tdlse),
            self.tlse,
            self.row_max,
            self.row_sum,
            xp,
        )
        return per_sink(self.unit, shares, xp)
