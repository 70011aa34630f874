"""Tiles: a unit's rows of a problem's arrays against a run of keys, ready for the formula. No calculus here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._attention.biases import LazyBias
from npattn._attention.formula import Terms, TileGrads
from npattn._attention.ops import Hidden, Ops
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.tiling import ONE_TILE, Sizes, key_tiles

_BARE = Terms()
REMEMBERED = 1 << 21  # bytes of masks, at most, that a thread remembers during a call


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
    if k.shape[:-2] == v.shape[:-2]:
        part = (*_parts(place, k.shape), place.keys, ...)
        return k[part], v[part]
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
    terms = _bare_terms(problem)
    if terms is None:
        shades = _shades(problem, unit, sizes, ops)
        return (make_tile(problem, unit.at(keys), shade, ops) for keys, shade in shades)
    k, v = unit_keys(problem, unit)
    tiles = key_tiles(problem, unit, sizes)
    return (_bare_tile(unit.at(keys), k[..., keys, :], v[..., keys, :], terms, ops) for keys, _ in tiles)


def _bare_terms(problem: Problem) -> Terms | None:
    """The terms of every tile, if there is nothing that differs from tile to tile: no mask, bias or dropout."""
    options = problem.options
    if not (options.mask is options.bias is options.dropout is None):
        return None
    return _BARE if options.softcap is None else Terms(options.softcap)


def _bare_tile(place: Place, k: Array, v: Array, terms: Terms, ops: Ops) -> Tile:
    return Tile(place, ops.load(k, "k"), ops.load(v, "v"), terms)


def whole_tile(problem: Problem, unit: Place, ops: Ops) -> Tile:
    """A unit's only tile, of all keys; what the mask leaves of them is not looked for."""
    terms = _bare_terms(problem)
    if terms is None:
        shade = _shade(problem, unit, [] if problem.options.mask is None else [unit.keys], trimmed=False)
        return make_tile(problem, unit, shade, ops)
    if unit.complete and problem.dtype is problem.compute:
        return Tile(unit, problem.k, problem.v, terms)
    return _bare_tile(unit, *unit_keys(problem, unit), terms, ops)


class _Shade(NamedTuple):
    """What a tile's mask and bias hide."""

    bias: Array | None
    hidden: list[Hidden]
    live_rows: Array | None  # as Terms has them
    live_keys: Array | None  # as Tile has them


def _shade(problem: Problem, place: Place, mixed: list[slice], *, trimmed: bool) -> _Shade:
    """``mixed``: where the mask hides some pairs; ``trimmed``: the keys come from the mask's runs."""
    mask = problem.options.mask
    bias = None if problem.options.bias is None else unit_bias(problem, place)
    hidden = hidden_pairs(problem, place, mixed, bias)
    # a band of keys that came from the mask's runs has no key that nobody sees; else what stands there must be kept out
    tight = trimmed and bias is None and mask is not None and mask.is_tight()
    return _Shade(bias, hidden, _live_rows(problem, place, hidden), None if tight else _live_keys(problem, place, hidden))


def _shades(problem: Problem, unit: Place, sizes: Sizes, ops: Ops) -> Iterable[tuple[slice, _Shade]]:
    """The runs of keys of a unit's tiles, and what is hidden there. A mask hides the same from most heads: it is remembered."""
    mask, notes = problem.options.mask, ops.notes
    if mask is None or notes is None or problem.options.bias is not None:
        return _new_shades(problem, unit, sizes)
    outer = unit.lead if mask.outer_shape() else ()
    heads = (unit.heads,) if mask.varies_by_head() else ()
    key = tuple((part.start, part.stop) for part in (unit.queries, unit.group, *outer, *heads))
    return notes[key] if key in notes else _noted(notes, key, _new_shades(problem, unit, sizes))


def _new_shades(problem: Problem, unit: Place, sizes: Sizes) -> Iterator[tuple[slice, _Shade]]:
    for keys, mixed in key_tiles(problem, unit, sizes):
        yield keys, _shade(problem, unit.at(keys), mixed, trimmed=True)


def _noted(notes: dict[Any, Any], key: Any, shades: Iterator[tuple[slice, _Shade]]) -> Iterator[tuple[slice, _Shade]]:
    """The same, which is noted at the end if there is room for it."""
    made: list[tuple[slice, _Shade]] = []
    size = notes.get("size", 0)
    for keys, shade in shades:
        yield keys, shade
        size += sum(part.pairs.nbytes for part in shade.hidden)
        if size <= REMEMBERED:
            made.append((keys, shade))
    if size <= REMEMBERED:
        notes[key], notes["size"] = made, size


def make_tile(problem: Problem, place: Place, shade: _Shade, ops: Ops) -> Tile:
    """A tile, with what stands at keys that none of its rows sees set to 0."""
    (k, v), live_keys = unit_keys(problem, place), shade.live_keys
    terms = Terms(problem.options.softcap, shade.bias, shade.hidden, shade.live_rows, dropout_factors(problem, place))
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
        return [_span(problem, place, part, ~_visible(problem, place.at(part))) for part in mixed]
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
