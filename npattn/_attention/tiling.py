"""How a problem is organised: cut into units of rows, each against the runs of keys that its mask leaves. No calculus here.

A unit is some rows of some heads against all keys; its tiles are cut from the runs of keys that are visible to some of its rows.
Sizes depend on shapes and on the array library alone, never on contents or on the number of threads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from npattn._arrays import blas, threads
from npattn._arrays.block_products import Limits
from npattn._arrays.namespace import library_name
from npattn._attention.biases import LazyBias
from npattn._attention.memory import lent_memory
from npattn._attention.ops import Fresh, FreshNumPy, Ops
from npattn._attention.place import ALL, NONE, Place, Run
from npattn._attention.problem import Problem
from npattn._attention.scratch import Scratch

SMALL_PRODUCT = 1 << 15  # multiplications of a matrix product that no BLAS gives to several threads
SMALL_PROBLEM = 1 << 21  # multiplications of a problem that is done before a second thread has woken up
SMALL_PAIRS = 1 << 13  # of a problem with a mask that is one tile all the same: looking for what could be skipped costs more
TILE_BYTES = 1 << 22  # of a tile's matrix, at most
FEW_TILE_PAIRS = 1 << 18  # a tile has so many pairs, if the problem has
UNIT_KEY_BYTES = 1 << 24  # of a unit's keys and values: with few rows it takes as long as to read them
JOBS = 8  # at least so many, if they are not small; in backward each further one on the same heads costs a copy of dk and dv
JOIN_BYTES = 1 << 22  # of dk and dv: of more there are two copies at most if heads can be cut instead
FEW_PAIRS = 1 << 16  # a problem of so few pairs is not worth a second thread; without a mask it is one tile of new arrays
KEEP_MIB = 256  # numerators up to this size are kept for backward
GAP = 32  # a masked run of keys shorter than this is hidden inside a tile rather than cut out


class Sizes(NamedTuple):
    """How large tiles are."""

    rows: int  # rows of a tile, at most
    keys: int  # keys of a tile, at most
    pairs: int  # rows times keys times heads of a tile, at most, unless a single head has more
    plain: bool  # new arrays, every head in each tile: any library
    keep: bool  # whether forward keeps the numerators of all tiles for backward
    apart: int = 1024  # a row of a tile is made longer if its length in bytes is a multiple of this
    heads: int = 1 << 62  # heads of a tile, at most
    blocks: Limits | None = None  # matrix products are made in blocks of this size


ONE_TILE = Sizes(rows=1 << 62, keys=1 << 62, pairs=1 << 62, plain=True, keep=True)

_forced: ContextVar[Sizes | None] = ContextVar("npattn_forced_sizes", default=None)


@contextlib.contextmanager
def forced(sizes: Sizes) -> Iterator[None]:
    """For tests: these tile sizes and this path, whatever the library."""
    token = _forced.set(sizes)
    try:
        yield
    finally:
        _forced.reset(token)


def choose_sizes(problem: Problem, *, backward: bool = True) -> Sizes:
    """The tile sizes for a problem's library; ``backward``: whether that may follow, which does more for each unit."""
    sizes = _forced.get()
    if sizes is not None:
        return sizes
    if problem.xp is np:
        return _numpy_sizes(problem, backward)
    heads = max(math.prod(problem.lead) * problem.kv_heads, 1)
    keys = 1 << 14
    rows = max((1 << 24) // (heads * min(max(problem.keys, 1), keys)), 1)
    return Sizes(rows=rows, keys=keys, pairs=1 << 24, plain=library_name(problem.xp) != "cupy", keep=False)


def _numpy_sizes(problem: Problem, backward: bool) -> Sizes:
    mask, every = problem.options.mask, math.prod(problem.whole)
    if every <= (FEW_PAIRS if mask is None else SMALL_PAIRS):
        return ONE_TILE
    itemsize, heads = problem.compute.itemsize, math.prod(problem.whole[:-3])
    key_bytes = (problem.q.shape[-1] + problem.v.shape[-1]) * itemsize  # of a key and its value
    # few large tiles: between two operations a thread waits for Python's lock; but enough of them for several threads
    most = TILE_BYTES // itemsize
    pairs = min(most, max(every // JOBS, FEW_TILE_PAIRS))
    if mask is None:  # as many rows as go with all keys: what is done once for each unit is done less often
        rows = min(max(pairs // problem.keys, 256), 1024)
    else:  # few rows follow the edge of a mask more closely
        rows = 256 if problem.queries > 256 else 128
    rows = min(rows, max(problem.group * problem.queries, 1))
    pairs = min(pairs, rows * UNIT_KEY_BYTES // max(key_bytes, 1))
    if backward and heads * problem.keys * key_bytes > JOIN_BYTES:  # in so many blocks that no more than two jobs must share one
        heads = max(2 * heads // JOBS, 1)
    blocks = _BLOCKS if blas.multiplies_in_place() else None
    return Sizes(rows, most // rows, pairs, plain=False, keep=_room_to_keep(problem), heads=heads, blocks=blocks)


_BLOCKS = Limits()


def _room_to_keep(problem: Problem) -> bool:
    """Whether the numerators of the whole problem are few enough to be kept: the one place that decides it."""
    text = os.environ.get("NPATTN_KEEP_MIB", "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"NPATTN_KEEP_MIB must be a number of MiB, got {text!r}")
    room = int(text) if text else KEEP_MIB
    size: int = math.prod(problem.whole) * problem.compute.itemsize
    return size <= room << 20


def plain_ops(problem: Problem) -> Ops:
    """The operations that return new arrays, of the problem's library."""
    return _fresh_numpy(problem.compute) if problem.xp is np else Fresh(problem.xp, problem.compute)


@functools.cache
def _fresh_numpy(dtype: Any) -> Ops:
    return FreshNumPy(np, dtype)


def cut_units(problem: Problem, sizes: Sizes) -> list[list[Place]]:
    """The units of every block of heads, all with the whole of the keys: a list a block, in order."""
    *outer, group, queries, keys = problem.whole
    together = min(max(sizes.rows // max(queries, 1), 1), group) if group == 1 or not _heads_may_differ(problem) else 1
    rows = max(min(sizes.rows // together, queries), 1)
    whole = problem.xp is not np or sizes.plain
    steps = outer if whole else _head_steps(outer, together * rows * _reach(problem, rows), sizes)
    blocks: list[list[Place]] = []
    for lead in itertools.product(*(_cut(n, step) for n, step in zip(outer[:-1], steps[:-1], strict=True))):
        # entries that see fewer keys than others do go with more heads
        step = steps[-1] if whole else _head_steps(outer[-1:], together * rows * _reach(problem, rows, lead), sizes)[0]
        blocks += [
            [Place(lead, heads, g, t, slice(0, keys), problem.whole) for g in _cut(group, together) for t in _cut(queries, rows)]
            for heads in _cut(outer[-1], step)
        ]
    return blocks


def _reach(problem: Problem, rows: int, lead: tuple[slice, ...] | None = None) -> int:
    """How many keys so many neighbouring rows may see, at most, in all leading entries or in these."""
    mask = problem.options.mask
    if mask is None:
        return problem.keys
    everywhere = tuple(slice(0, n) for n in problem.whole[:-4])
    heads, group, keys = (slice(0, problem.whole[n]) for n in (-4, -3, -1))
    return mask.reach(Place(lead or everywhere, heads, group, slice(0, rows), keys, problem.whole))


def is_one_unit(problem: Problem) -> bool:
    """Whether ``cut_units`` with sizes that know no limit finds one unit, and keys for it."""
    return 0 not in problem.whole and (problem.group == 1 or not _heads_may_differ(problem))


def _heads_may_differ(problem: Problem) -> bool:
    """Whether query heads may see different keys.

    What is at a key that a head may not see must not reach it, so that such heads do not share a tile.
    """
    mask, bias = problem.options.mask, problem.options.bias
    if mask is not None and mask.varies_by_head():
        return True
    return isinstance(bias, LazyBias) or (bias is not None and bias.ndim > 2 and bias.shape[-3] > 1)


def _head_steps(outer: list[int], pairs: int, sizes: Sizes) -> list[int]:
    """How many entries of each outer axis one unit takes, the last axis first, if a head has so many pairs."""
    most = min(sizes.pairs, sizes.heads * pairs)
    steps = [1] * len(outer)
    for axis in reversed(range(len(outer))):
        steps[axis] = max(min(most // max(pairs, 1), outer[axis]), 1)
        if steps[axis] < outer[axis]:
            break
        pairs *= steps[axis]
    return steps


@functools.lru_cache(maxsize=1024)
def _cut(length: int, step: int) -> tuple[slice, ...]:
    """An axis in nearly equal pieces of at most ``step``."""
    if 0 < length <= step:
        return (slice(0, length),)
    pieces = -(-length // max(step, 1))
    edges = [length * n // pieces for n in range(pieces + 1)] if pieces else []
    return tuple(slice(a, b) for a, b in itertools.pairwise(edges))


def key_tiles(problem: Problem, unit: Place, sizes: Sizes) -> list[tuple[slice, list[slice]]]:
    """The runs of keys that a unit's tiles take, each with the parts of it where some pairs are hidden."""
    mask = problem.options.mask
    if mask is None:
        return [(keys, []) for keys in _cut(problem.keys, sizes.keys)]
    runs = mask.runs(unit)
    tiles: list[tuple[slice, list[slice]]] = []
    for start, stop in _stretches(runs):
        for piece in _cut(stop - start, sizes.keys):
            keys = slice(start + piece.start, start + piece.stop)
            inside = [(max(r.start, keys.start), min(r.stop, keys.stop)) for r in runs if r.state != ALL]
            tiles.append((keys, [slice(a, b) for a, b in inside if a < b]))
    return tiles


def _stretches(runs: list[Run]) -> list[tuple[int, int]]:
    """Runs that somebody sees, neighbours joined, and short gaps between them with them."""
    found: list[tuple[int, int]] = []
    for run in runs:
        if run.state == NONE:
            continue
        if found and run.start - found[-1][1] < GAP:
            found[-1] = (found[-1][0], run.stop)
        else:
            found.append((run.start, run.stop))
    return found


Worker: TypeAlias = Callable[[Ops, Callable[[], None]], Callable[[Any], None]]


def run(problem: Problem, sizes: Sizes, worker: Worker, jobs: Sequence[Any]) -> None:
    """Do the jobs: on NumPy side by side with BLAS held to one thread, unless the problem is too small for either.

    Every thread calls ``worker(ops, check)`` once, see `npattn._arrays.threads.run`.
    """
    size = max(problem.q.shape[-1], problem.v.shape[-1], 1)
    large = problem.xp is np and sizes is not ONE_TILE and math.prod(problem.whole) * size >= SMALL_PROBLEM
    count = max(min(threads.get_num_threads(), len(jobs)), 1) if large else 1
    with one_blas_thread(problem), lent_memory(count) as memories:

        def begin(check: Callable[[], None]) -> Callable[[Any], None]:
            if sizes.plain:
                return worker(plain_ops(problem), check)
            return worker(Scratch(problem.xp, problem.compute, sizes.apart, memories.pop(), sizes.blocks), check)

        threads.run(begin, jobs[::-1], threads=count)  # the last queries see most of a causal mask: short jobs at the end


def one_blas_thread(problem: Problem) -> contextlib.AbstractContextManager[None]:
    """BLAS held to one thread if a product of a whole head is one that it could give to several."""
    product = problem.group * problem.queries * problem.keys * max(problem.q.shape[-1], problem.v.shape[-1])
    return _NO_GUARD if problem.xp is not np or product < SMALL_PRODUCT else blas.one_blas_thread()


_NO_GUARD = contextlib.nullcontext()
