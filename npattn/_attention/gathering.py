"""What the tiles of backward leave, put together: shares are added in an order that shapes alone decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from npattn._arrays.broadcast import unbroadcast
from npattn._arrays.namespace import Array
from npattn._attention import formula
from npattn._attention.biases import LazyBias
from npattn._attention.ops import Ops
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.stores import make_rows, make_sums
from npattn._attention.tiling import JOBS, Sizes, cut_units, run


class Backward(NamedTuple):
    """The gradients, in the dtype of the computation."""

    dq: Array  # (..., H, T, D)
    dk: Array  # (..., K, S, D)
    dv: Array  # (..., K, S, E)
    dbias: Array | None  # of a dense bias in its grouped shape; of a lazy one (K, G, P)
    dsinks: Array | None  # (K, G)


class UnitGrads(Protocol):
    """A unit's rows on their way through its tiles."""

    def shares(self, sizes: Sizes, check: Callable[[], None]) -> Iterator[tuple[Place, formula.TileGrads]]:
        """Of every tile its share; dq stays here. ``check`` is called before every tile."""

    def dq(self) -> Array:
        """Once every tile is through."""

    def dsinks(self) -> Array:
        """The share of the sinks' gradient, (K, G)."""


def gather(problem: Problem, sizes: Sizes, begin: Callable[[Ops, int, Place], UnitGrads]) -> Backward:
    """Put together what ``begin(ops, number, unit)`` makes of every unit."""
    options, xp = problem.options, problem.xp
    jobs, copies = _backward_jobs(problem, sizes)
    keys = (*problem.lead, problem.kv_heads, problem.keys)
    dq = make_rows(problem, problem.q.shape[-1], plain=sizes.plain)
    dk, dv = (make_sums(problem, (*keys, x.shape[-1]), copies, plain=sizes.plain) for x in (problem.k, problem.v))
    bias_shape = bias_axes(problem)
    dbias = None if bias_shape is None else make_sums(problem, bias_shape, 1, plain=sizes.plain)
    dsinks = None if options.sinks is None else make_sums(problem, problem.whole[-4:-2], 1, plain=sizes.plain)
    # what several jobs add to waits until all are done, and is then added in the order of the jobs; a bias with both queries and
    # keys would be too large to wait, and the jobs are made so that each has its part to itself
    waiting: list[list[tuple[Any, tuple[slice, ...], Array]]] = [[] for _ in jobs]

    def worker(ops: Ops, check: Callable[[], None]) -> Callable[[int], None]:
        def work(job: int) -> None:
            for copy, number, unit in jobs[job]:
                rows = begin(ops, number, unit)
                for place, grads in rows.shares(sizes, check):
                    part = (*unit.lead, unit.heads, place.keys, slice(None))
                    for sums, share in ((dk, grads.dk), (dv, grads.dv)):
                        if share is not None:
                            sums.add(copy, part, share)
                    if dbias is not None:
                        index, share = bias_share(problem, place, grads.dbiased)
                        if is_wide(bias_shape):
                            dbias.add(0, index, share)
                        else:
                            # a share that nothing was summed in is still the tile's own memory
                            waiting[job].append((dbias, index, xp.asarray(share, copy=True)))
                dq.put(unit, rows.dq())
                if dsinks is not None:
                    waiting[job].append((dsinks, (unit.heads, unit.group), rows.dsinks()))

        return work

    run(problem, sizes, worker, range(len(jobs)))
    with np.errstate(all="ignore"):
        for store, index, share in (entry for entries in waiting for entry in entries):
            store.add(0, index, share)
        sums = [None if store is None else store.result() for store in (dk, dv, dbias, dsinks)]
    return Backward(dq.result(), *sums)


def _backward_jobs(problem: Problem, sizes: Sizes) -> tuple[list[list[tuple[int, int, Place]]], int]:
    """Jobs of (copy, index of the unit, unit), and how many copies of the sums over rows they add to."""
    blocks = cut_units(problem, sizes)
    wide = bias_axes(problem) if is_wide(bias_axes(problem)) else None
    copies = 1
    if blocks and problem.xp is np and not sizes.plain and not (wide and wide[-3] != problem.group):
        copies = max(min(-(-JOBS // len(blocks)), len(blocks[0])), 1)
    jobs: dict[Any, list[tuple[int, int, Place]]] = {}
    index = 0
    for number, block in enumerate(blocks):
        for n, unit in enumerate(block):
            # with a wide bias, blocks that share a part of it share a job
            part = number if wide is None else tuple(_start(s, m) for s, m in zip((*unit.lead, unit.heads), wide, strict=False))
            jobs.setdefault((part, n % copies), []).append((n % copies, index, unit))
            index += 1
    if sizes.plain:
        return [[entry for job in jobs.values() for entry in job]], 1
    return list(jobs.values()), copies


def _start(part: slice, length: int) -> int:
    return 0 if length == 1 else part.start


def bias_axes(problem: Problem) -> tuple[int, ...] | None:
    """The shape of what gathers dbias: a dense bias as (..., K, G, T, S), a lazy one as (K, G, P)."""
    bias = problem.options.bias
    if bias is None:
        return None
    if isinstance(bias, LazyBias):
        return (problem.kv_heads, problem.group, math.prod(bias.parameters.shape[:-1]))
    *lead, queries, keys = (1,) * max(2 - bias.ndim, 0) + tuple(bias.shape)
    heads = lead.pop() if lead else 1
    split = (1, 1) if heads == 1 else (problem.kv_heads, problem.group)
    return (*(1,) * (len(problem.lead) - len(lead)), *lead, *split, queries, keys)


def is_wide(axes: tuple[int, ...] | None) -> bool:
    """Whether a dense bias has both queries and keys."""
    return axes is not None and len(axes) > 3 and axes[-1] > 1 and axes[-2] > 1


def bias_share(problem: Problem, place: Place, dbiased: Array) -> tuple[tuple[slice, ...], Array]:
    """Which part of dbias a tile adds to, and what."""
    bias, xp = problem.options.bias, problem.xp
    group, queries = place.group.stop - place.group.start, place.queries.stop - place.queries.start
    pairs = xp.reshape(dbiased, (*dbiased.shape[:-2], group, queries, dbiased.shape[-1]))
    if isinstance(bias, LazyBias):
        share = bias.tile_gradient(pairs, place, xp)
        return (place.heads, place.group, slice(0, share.shape[-1])), share
    axes = bias_axes(problem)
    assert axes is not None
    slices = (*place.lead, place.heads, place.group, place.queries, place.keys)
    index = tuple(slice(0, 1) if n == 1 else part for part, n in zip(slices, axes, strict=True))
    return index, unbroadcast(pairs, tuple(s.stop - s.start for s in index), xp=xp)
