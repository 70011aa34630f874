"""Where a tile stands in its problem, and runs: which of the keys before it are all, partly or not at all visible.

A problem's axes are ``(..., K, G, T, S)``: leading axes, key/value heads, query heads of one group, queries, keys.
A tile is a block of them: a slice of every axis. Its matrices are ``(..., K, G·T, S)``, the group folded into rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace

NONE, MIXED, ALL = 0, 1, 2  # three-valued logic: what a block of pairs is


class Run(NamedTuple):
    """The keys ``start <= j < stop``, and how visible they are to a range of queries."""

    start: int
    stop: int
    state: int


class Place(NamedTuple):
    """A block of pairs: one slice for every axis of a problem of shape ``whole`` = (..., K, G, T, S)."""

    lead: tuple[slice, ...]
    heads: slice
    group: slice
    queries: slice
    keys: slice
    whole: tuple[int, ...]
    complete: bool = False  # every leading index, head and query, so that nothing of them need be cut

    def at(self, keys: slice) -> Place:
        """The same rows against these keys."""
        return Place(self.lead, self.heads, self.group, self.queries, keys, self.whole, self.complete)

    @property
    def rows(self) -> int:
        """The length of the tile's folded row axis, G·T."""
        rows: int = (self.group.stop - self.group.start) * (self.queries.stop - self.queries.start)
        return rows

    def query_positions(self, xp: Namespace, device: object, dtype: object) -> Array:
        """``i`` of every row of a single head, as a column (T, 1)."""
        return _arange(self.queries, xp, device, dtype)[:, None]

    def key_positions(self, xp: Namespace, device: object, dtype: object) -> Array:
        """``j`` of every key, as a row (1, S)."""
        return _arange(self.keys, xp, device, dtype)[None, :]

    def per_batch(self, array: Array, trailing: int = 0) -> Array:
        """This tile's part of an array whose axes are the leading ones plus ``trailing`` of its own."""
        lead = array.ndim - trailing
        if lead == 0:
            return array  # whole: NumPy would make a scalar of array[()]
        index = [_part(s, n) for s, n in zip(self.lead[len(self.lead) - lead :], array.shape, strict=False)]
        return array[(*index, ...)]

    def per_pair(self, array: Array, xp: Namespace) -> Array:
        """This tile's part of an array that broadcasts to (..., H, T, S), as (..., K, G, T, S)."""
        if array.ndim < 2:
            array = xp.reshape(array, (1,) * (2 - array.ndim) + array.shape)
        queries, keys = _part(self.queries, array.shape[-2]), _part(self.keys, array.shape[-1])
        if array.ndim == 2:
            return array[queries, keys]
        kv_heads, group = self.whole[-4:-2]
        lead, heads = array.shape[:-3], array.shape[-3]
        split = (1, 1) if heads == 1 else (kv_heads, group)
        array = xp.reshape(array, (*lead, *split, *array.shape[-2:]))
        index = [_part(s, n) for s, n in zip(self.lead[len(self.lead) - len(lead) :], lead, strict=True)]
        return array[(*index, _part(self.heads, split[0]), _part(self.group, split[1]), queries, keys)]

    def per_head(self, array: Array, xp: Namespace) -> Array:
        """This tile's part of an array (H, ...) or (1, ...), as (K, G, 1, ...)."""
        split = (1, 1) if array.shape[0] == 1 else self.whole[-4:-2]
        array = xp.reshape(array, (*split, 1, *array.shape[1:]))
        return array[_part(self.heads, split[0]), _part(self.group, split[1]), ...]

    def fold_rows(self, pairs: Array, xp: Namespace) -> Array:
        """(..., G, T, S), broadcast or whole, to the tile's (..., rows, S): grouped heads are further rows."""
        group = self.group.stop - self.group.start
        if pairs.ndim == 2:
            if group == 1:
                return pairs
            pairs = pairs[None, ...]
        *lead, has_group, has_queries, keys = pairs.shape
        if group == 1 or (has_group == 1 and has_queries == 1):
            return xp.reshape(pairs, (*lead, has_queries, keys))
        full = xp.broadcast_to(pairs, (*lead, group, self.queries.stop - self.queries.start, keys))
        return xp.reshape(full, (*lead, self.rows, keys))


def _part(part: slice, length: int) -> slice:
    """The slice of an axis, or the whole of one that is broadcast."""
    return part if length != 1 else slice(0, 1)


def _arange(part: slice, xp: Namespace, device: object, dtype: object) -> Array:
    return xp.arange(part.start, part.stop, dtype=dtype, device=device)


def join(runs: list[Run]) -> list[Run]:
    """The same runs with empty ones left out and neighbours of one state made one."""
    joined: list[Run] = []
    for run in runs:
        if run.start >= run.stop:
            continue
        if joined and joined[-1].state == run.state and joined[-1].stop == run.start:
            joined[-1] = Run(joined[-1].start, run.stop, run.state)
        else:
            joined.append(run)
    return joined


def both(left: list[Run], right: list[Run]) -> list[Run]:
    """Three-valued *and* of two lists of runs over the same keys."""
    merged: list[Run] = []
    a = b = 0
    while a < len(left) and b < len(right):
        start, stop = max(left[a].start, right[b].start), min(left[a].stop, right[b].stop)
        merged.append(Run(start, stop, min(left[a].state, right[b].state)))
        a, b = a + (left[a].stop == stop), b + (right[b].stop == stop)
    return join(merged)


def inverse(runs: list[Run]) -> list[Run]:
    """Three-valued *not*."""
    return [Run(run.start, run.stop, ALL - run.state) for run in runs]


def nested_runs(keys: slice, *, some: tuple[int, int], every: tuple[int, int]) -> list[Run]:
    """Runs over ``keys`` for one interval that is visible to every query, inside one that is visible to some."""
    if every[0] >= every[1]:
        every = (some[0], some[0])
    edges = [keys.start, *(min(max(edge, keys.start), keys.stop) for edge in (some[0], *every, some[1])), keys.stop]
    edges = [max(edges[: n + 1]) for n in range(len(edges))]  # an empty interval may lie anywhere
    return join([Run(a, b, s) for a, b, s in zip(edges, edges[1:], (NONE, MIXED, ALL, MIXED, NONE), strict=False)])


def scan_runs(some: np.ndarray[Any, Any], every: np.ndarray[Any, Any], start: int, block: int = 32) -> list[Run]:
    """Runs from two boolean vectors over the keys, as whole blocks: many short runs would cost more than they save."""
    keys = len(some)
    edges = np.arange(0, keys, block)
    state = np.logical_or.reduceat(some, edges).astype(np.int8) + np.logical_and.reduceat(every, edges)
    return join([Run(start + int(e), start + min(int(e) + block, keys), int(s)) for e, s in zip(edges, state, strict=True)])
