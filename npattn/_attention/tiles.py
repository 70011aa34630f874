"""Tiles: a unit's rows of a problem's arrays against a run of keys, ready for the formula. No calculus here."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from npattn._arrays.namespace import Array, Namespace
from npattn._attention.formula import Terms, TileGrads
from npattn._attention.ops import Ops
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.shades import Shade, make_shade, unit_shades
from npattn._attention.tiling import ONE_TILE, Sizes, key_tiles

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
        shades = unit_shades(problem, unit, sizes, ops)
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
        shade = make_shade(problem, unit, [] if problem.options.mask is None else [unit.keys], trimmed=False)
        return make_tile(problem, unit, shade, ops)
    if unit.complete and problem.dtype is problem.compute:
        return Tile(unit, problem.k, problem.v, terms)
    return _bare_tile(unit, *unit_keys(problem, unit), terms, ops)


def make_tile(problem: Problem, place: Place, shade: Shade, ops: Ops) -> Tile:
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
