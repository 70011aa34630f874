"""What a mask and a bias hide of a unit's tiles, remembered from head to head. No calculus here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.biases import LazyBias
from npattn._attention.ops import Hidden, Ops
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.tiling import Sizes, key_tiles

REMEMBERED = 1 << 21  # bytes of masks, at most, that a thread remembers during a call


class Shade(NamedTuple):
    """What a tile's mask and bias hide."""

    bias: Array | None
    hidden: list[Hidden]
    live_rows: Array | None  # as Terms has them
    live_keys: Array | None  # as Tile has them


def make_shade(problem: Problem, place: Place, mixed: list[slice], *, trimmed: bool) -> Shade:
    """``mixed``: where the mask hides some pairs; ``trimmed``: the keys come from the mask's runs."""
    mask = problem.options.mask
    bias = None if problem.options.bias is None else unit_bias(problem, place)
    hidden = hidden_pairs(problem, place, mixed, bias)
    # a band of keys that came from the mask's runs has no key that nobody sees; else what stands there must be kept out
    tight = trimmed and bias is None and mask is not None and mask.is_tight()
    return Shade(bias, hidden, _live_rows(problem, place, hidden), None if tight else _live_keys(problem, place, hidden))


def unit_shades(problem: Problem, unit: Place, sizes: Sizes, ops: Ops) -> Iterable[tuple[slice, Shade]]:
    """The runs of keys of a unit's tiles, and what is hidden there. A mask hides the same from most heads: it is remembered."""
    mask, notes = problem.options.mask, ops.notes
    if mask is None or notes is None or problem.options.bias is not None:
        return _new_shades(problem, unit, sizes)
    outer = unit.lead if mask.outer_shape() else ()
    heads = (unit.heads,) if mask.varies_by_head() else ()
    key = tuple((part.start, part.stop) for part in (unit.queries, unit.group, *outer, *heads))
    return notes[key] if key in notes else _noted(notes, key, _new_shades(problem, unit, sizes))


def _new_shades(problem: Problem, unit: Place, sizes: Sizes) -> Iterator[tuple[slice, Shade]]:
    for keys, mixed in key_tiles(problem, unit, sizes):
        yield keys, make_shade(problem, unit.at(keys), mixed, trimmed=True)


def _noted(notes: dict[Any, Any], key: Any, shades: Iterator[tuple[slice, Shade]]) -> Iterator[tuple[slice, Shade]]:
    """The same, which is noted at the end if there is room for it."""
    made: list[tuple[slice, Shade]] = []
    size = notes.get("size", 0)
    for keys, shade in shades:
        yield keys, shade
        size += sum(part.pairs.nbytes for part in shade.hidden)
        if size <= REMEMBERED:
            made.append((keys, shade))
    if size <= REMEMBERED:
        notes[key], notes["size"] = made, size


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
