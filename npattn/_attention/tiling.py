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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from npattn._arrays import threads
from npattn._arrays.namespace import Array, Namespace, library_name
from npattn._attention.biases import LazyBias
from npattn._attention.formula import Terms, TileGrads
from npattn._attention.memory import lent_memory
from npattn._attention.ops import Fresh, FreshNumPy, Hidden, Ops, Scratch
from npattn._attention.place import ALL, NONE, Place, Run
from npattn._attention.problem import Problem

SMALL_PRODUCT = 1 << 15  # multiplications of a matrix product that no BLAS gives to several threads
SMALL_PROBLEM = 1 << 21  # multiplications of a problem that is done before a second thread has woken up
SMALL_PAIRS = 1 << 13  # of a problem with a mask that is one tile all the same: looking for what could be skipped costs more
TILE_BYTES = 1 << 21  # of a tile's matrix, at most
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


def choose_sizes(problem: Problem) -> Sizes:
    """The tile sizes for a problem's library."""
    sizes = _forced.get()
    if sizes is not None:
        return sizes
    if problem.xp is np:
        every = math.prod(problem.whole)
        if every <= (FEW_PAIRS if problem.options.mask is None else SMALL_PAIRS):
            return ONE_TILE
        # few large tiles: between two operations a thread waits for Python's lock; but enough of them for several threads
        most = TILE_BYTES // problem.compute.itemsize
        pairs = min(most, max(every // 4, FEW_PAIRS))
        # few rows follow the edge of a mask more closely; whole rows need no merging; else many rows make faster products
        if problem.options.mask is None:
            rows = 512 if problem.keys * 512 <= pairs else 256
        else:
            rows = 256 if problem.queries > 256 else 128
        keys = most // min(rows, max(problem.group * problem.queries, 1))
        return Sizes(rows=rows, keys=keys, pairs=pairs, plain=False, keep=_room_to_keep(problem))
    heads = max(math.prod(problem.lead) * problem.kv_heads, 1)
    keys = 1 << 14
    rows = max((1 << 24) // (heads * min(max(problem.keys, 1), keys)), 1)
    return Sizes(rows=rows, keys=keys, pairs=1 << 24, plain=library_name(problem.xp) != "cupy", keep=False)


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
    steps = outer if problem.xp is not np or sizes.plain else _head_steps(outer, together * rows * keys, sizes.pairs)
    blocks = itertools.product(*(_cut(n, step) for n, step in zip(outer, steps, strict=True)))
    return [
        [
            Place(tuple(lead), heads, g, t, slice(0, keys), problem.whole)
            for g in _cut(group, together)
            for t in _cut(queries, rows)
        ]
        for *lead, heads in blocks
    ]


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


def _head_steps(outer: list[int], pairs: int, most: int) -> list[int]:
    """How many entries of each outer axis one unit takes, the last axis first, within the budget of pairs."""
    steps = [1] * len(outer)
    for axis in reversed(range(len(outer))):
        steps[axis] = max(min(most // max(pairs, 1), outer[axis]), 1)
        if steps[axis] < outer[axis]:
            break
        pairs *= steps[axis]
    return steps


def _cut(length: int, step: int) -> list[slice]:
    """An axis in nearly equal pieces of at most ``step``."""
    if 0 < length <= step:
        return [slice(0, length)]
    pieces = -(-length // max(step, 1))
    edges = [length * n // pieces for n in range(pieces + 1)] if pieces else []
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


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
    with one_blas_thread(problem, sizes.rows), lent_memory(count) as memories:

        def begin(check: Callable[[], None]) -> Callable[[Any], None]:
            if sizes.plain:
                return worker(plain_ops(problem), check)
            return worker(Scratch(problem.xp, problem.compute, sizes.apart, memories.pop()), check)

        threads.run(begin, jobs, threads=count)


def one_blas_thread(problem: Problem, rows: int) -> contextlib.AbstractContextManager[None]:
    """BLAS held to one thread if a product of so many rows is one that it could give to several."""
    rows = min(rows, problem.group * problem.queries)
    size = max(problem.q.shape[-1], problem.v.shape[-1], 1)
    if problem.xp is not np or rows * problem.keys * size < SMALL_PRODUCT:
        return contextlib.nullcontext()
    return threads.one_blas_thread()


_BARE = Terms()


class Tile(NamedTuple):
    """A unit's rows against a run of keys, ready for the formula."""

    place: Place
    k: Array
    v: Array
    terms: Terms
    live_keys: Array | None = None  # (..., keys, 1), the keys that a row sees; None where all are


@functools.lru_cache(maxsize=1024)
def whole_unit(whole: tuple[int, ...]) -> Place:
    """The place of everything in a problem of shape ``whole``."""
    *lead, heads, group, queries, keys = [slice(0, n) for n in whole]
    return Place(tuple(lead), heads, group, queries, keys, whole, complete=True)


def complete_rows(problem: Problem, x: Array) -> Array:
    """An array (..., H, T, ·) with the groups folded into rows: (..., K, G·T, ·)."""
    if problem.group == 1:
        return x
    *lead, _, queries, last = x.shape
    return problem.xp.reshape(x, (*lead, problem.kv_heads, problem.group * queries, last))


def unit_rows(problem: Problem, unit: Place, x: Array) -> Array:
    """A unit's part of an array (..., H, T, ·), with the group folded into rows: (..., K, rows, ·)."""
    if unit.complete:
        return complete_rows(problem, x)
    if problem.group == 1:
        return x[(*_parts(unit, x.shape), unit.queries, ...)]
    *lead, _, queries, last = x.shape
    x = problem.xp.reshape(x, (*lead, problem.kv_heads, problem.group, queries, last))
    x = x[(*_parts(unit, x.shape), unit.group, unit.queries, ...)]
    return problem.xp.reshape(x, (*x.shape[: len(lead)], unit.heads.stop - unit.heads.start, unit.rows, last))


def unit_keys(problem: Problem, place: Place) -> tuple[Array, Array]:
    """A place's part of k and v, (..., K, keys, ·)."""
    k, v = problem.k, problem.v
    if place.complete and place.keys.stop - place.keys.start == problem.keys:
        return k, v
    return key_part(place, k), key_part(place, v)


def key_part(place: Place, x: Array) -> Array:
    """A place's part of an array (..., K, S, ·)."""
    return x[(*_parts(place, x.shape), place.keys, ...)]


def _parts(place: Place, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices of the leading axes and the key/value heads, whole where an axis is broadcast."""
    return tuple([slice(0, 1) if n == 1 else part for part, n in zip((*place.lead, place.heads), shape, strict=False)])


def unit_tiles(problem: Problem, unit: Place, sizes: Sizes, ops: Ops) -> Iterable[Tile]:
    """The tiles of a unit in order."""
    if sizes is ONE_TILE:
        return (whole_tile(problem, unit, ops),) if problem.keys else ()
    tiles = key_tiles(problem, unit, sizes)
    return (make_tile(problem, unit._replace(keys=keys), mixed, ops, trimmed=True) for keys, mixed in tiles)


def whole_tile(problem: Problem, unit: Place, ops: Ops) -> Tile:
    """A unit's only tile, of all keys; what the mask leaves of them is not looked for."""
    options = problem.options
    if unit.complete and options.mask is options.bias is options.dropout is None:
        terms = _BARE if options.softcap is None else Terms(options.softcap)
        return Tile(unit, ops.load(problem.k, "k"), ops.load(problem.v, "v"), terms)
    return make_tile(problem, unit, [] if problem.options.mask is None else [unit.keys], ops, trimmed=False)


def make_tile(problem: Problem, place: Place, mixed: list[slice], ops: Ops, *, trimmed: bool) -> Tile:
    """A tile, with what stands at keys that none of its rows sees set to 0; ``trimmed``: its keys come from the mask's runs."""
    options = problem.options
    k, v = unit_keys(problem, place)
    if options.mask is None and options.bias is None and options.dropout is None:
        return Tile(place, ops.load(k, "k"), ops.load(v, "v"), _BARE if options.softcap is None else Terms(options.softcap))
    bias = None if options.bias is None else unit_bias(problem, place)
    hidden = hidden_pairs(problem, place, mixed, bias)
    # a band of keys that came from the mask's runs has no key that nobody sees; else what stands there must be kept out
    live_keys = (
        None
        if trimmed and bias is None and options.mask is not None and options.mask.is_tight()
        else _live_keys(problem, place, hidden)
    )
    terms = Terms(options.softcap, bias, hidden, _live_rows(problem, place, hidden), dropout_factors(problem, place))
    return Tile(place, ops.load(k, "k", live=live_keys), ops.load(v, "v", live=live_keys), terms, live_keys)


def at_live_keys(tile: Tile, grads: TileGrads, xp: Namespace) -> TileGrads:
    """A tile's share with dk and dv set to 0 at keys that none of its rows sees: 0 times a row that is NaN would not be."""
    if tile.live_keys is None:
        return grads
    dk, dv = (None if x is None else xp.where(tile.live_keys, x, 0.0) for x in (grads.dk, grads.dv))
    return grads._replace(dk=dk, dv=dv)


def unit_bias(problem: Problem, place: Place) -> Array:
    """The tile's bias as (..., rows, keys), in the dtype of the computation."""
    bias, xp = problem.options.bias, problem.xp
    if isinstance(bias, LazyBias):
        pairs = bias.tile(place, xp, problem.compute)
    else:
        pairs = xp.astype(place.per_pair(bias, xp), problem.compute, copy=False)
    return place.fold_rows(pairs, xp)


def hidden_pairs(problem: Problem, place: Place, mixed: list[slice], bias: Array | None) -> list[Hidden]:
    """Where a tile's pairs are hidden, by the mask or by a bias of -inf."""
    by_bias = None
    if bias is not None:
        by_bias = bias == -float("inf")
        if problem.xp is np and not by_bias.any():
            by_bias = None
    if by_bias is None:
        return [_span(problem, place, part, ~_visible(problem, place._replace(keys=part))) for part in mixed]
    if mixed:
        by_bias = by_bias | ~_visible(problem, place)
    return [_span(problem, place, place.keys, by_bias)]


def _span(problem: Problem, place: Place, part: slice, pairs: Array) -> Hidden:
    length = part.stop - part.start
    if pairs.shape[-1] != length:
        pairs = problem.xp.broadcast_to(pairs, (*pairs.shape[:-1], length))
    return Hidden(part.start - place.keys.start, part.stop - place.keys.start, pairs)


def _visible(problem: Problem, place: Place) -> Array:
    mask = problem.options.mask
    assert mask is not None
    return place.fold_rows(mask.visible(place, problem.xp, problem.device), problem.xp)


def _live_rows(problem: Problem, place: Place, hidden: list[Hidden]) -> Array | None:
    """Which rows see a key of the tile, (..., rows, 1); None for all of them."""
    if sum(part.stop - part.start for part in hidden) < place.keys.stop - place.keys.start:
        return None  # there is a key that every row sees
    rows = None
    for part in hidden:
        seen = problem.xp.any(~part.pairs, axis=-1, keepdims=True)
        rows = seen if rows is None else rows | seen
    return None if problem.xp is np and rows is not None and rows.all() else rows  # host arrays may be looked at


def _live_keys(problem: Problem, place: Place, hidden: list[Hidden]) -> Array | None:
    """Which keys are seen by a row of the tile, (..., keys, 1); None for all of them."""
    xp = problem.xp
    if not hidden:
        return None
    length = place.keys.stop - place.keys.start
    pieces, at = [], 0
    for part in [*hidden, Hidden(length, length, hidden[-1].pairs[..., :0])]:
        seen = xp.any(~part.pairs, axis=-2)
        pieces += [xp.ones((*seen.shape[:-1], part.start - at), dtype=xp.bool, device=problem.device), seen]
        at = part.stop
    keys = xp.concat(pieces, axis=-1)[..., None]
    return None if xp is np and keys.all() else keys


def dropout_factors(problem: Problem, place: Place) -> Array | None:
    """Dropout's factors for a tile, (..., rows, keys)."""
    dropout, xp = problem.options.dropout, problem.xp
    if dropout is None:
        return None
    *lead, _, group, _, _ = problem.whole

    def index(part: slice, trailing: int) -> Array:
        numbers = xp.arange(part.start, part.stop, dtype=xp.int32, device=problem.device)
        return xp.reshape(numbers, (-1, *(1,) * trailing))

    leading = xp.zeros((1,) * (len(lead) + 4), dtype=xp.int32, device=problem.device)
    for axis, part in enumerate(place.lead):
        leading = leading * lead[axis] + index(part, len(lead) - 1 - axis + 4)
    head = index(place.heads, 3) * group + index(place.group, 2)
    factors = dropout.factors(leading, head, index(place.queries, 1), index(place.keys, 0), xp=xp, dtype=problem.compute)
    return place.fold_rows(factors, xp)
