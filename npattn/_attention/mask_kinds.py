"""The kinds of masks: causal and windows, lengths, segments. Arrays are a kind of their own in ``masks.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from npattn._arrays.broadcast import broadcast_shapes
from npattn._arrays.checks import check_broadcasts, check_integer_array, host_int, shape_error
from npattn._arrays.namespace import Array, Namespace, array_namespace, asarray, dtype_name
from npattn._attention.masks import Mask
from npattn._attention.place import MIXED, Place, Run, nested_runs, scan_runs

_FAR = 1 << 30  # an offset or a side beyond any sequence: keeps positions inside 32 bits


def causal_mask(offset: Any = 0) -> Mask:
    """Every query sees the keys up to its own position: key j is visible to query i when ``j <= i + offset``.

    Parameters
    ----------
    offset : int or integer array (...), optional
        Where the diagonal is. 0 starts it in the top left corner; ``offset=n_past`` continues after n_past cached keys.
        An array has the leading axes of the problem, before the head axis. Python and NumPy integers are host data: allowed
        beside any library, and tiles that they empty are skipped.

    Returns
    -------
    Mask

    See Also
    --------
    causal_mask_end : The diagonal ends in the bottom right corner.

    Examples
    --------
    >>> print(causal_mask(offset=1).draw(2, 4))
    ##..
    ###.
    """
    return _Band("causal_mask", None, 0, _offsets("causal_mask", offset))


def causal_mask_end() -> Mask:
    """Causal, with the last query aligned to the last key: key j is visible to query i when ``j <= i + S - T``.

    Returns
    -------
    Mask

    Examples
    --------
    >>> print(causal_mask_end().draw(2, 4))
    ###.
    ####
    """
    return _Band("causal_mask_end", None, 0, None)


def window_mask(left: int | None, right: int | None, offset: Any = 0) -> Mask:
    """Every query sees its neighbours: key j is visible to query i when ``-left <= j - (i + offset) <= right``.

    Parameters
    ----------
    left, right : int or None
        How many neighbours on each side, not counting the position itself; ``None`` is unbounded.
    offset : int or integer array (...), optional
        As in `causal_mask`: position i of the queries is position ``i + offset`` of the keys.

    Returns
    -------
    Mask

    Raises
    ------
    ValueError
        If a side is negative.

    Examples
    --------
    >>> print(window_mask(1, 2).draw(3, 5))
    ###..
    ####.
    .####
    """
    sides = [None if n is None else host_int("window_mask", s, n, least=0) for s, n in (("left", left), ("right", right))]
    near = [None if n is None else min(n, 1 << 41) for n in sides]
    return _Band("window_mask", near[0], near[1], _offsets("window_mask", offset))


def length_mask(key_lengths: Any, query_lengths: Any = None) -> Mask:
    """Padding: key j is visible when ``j < key_lengths``, to the queries ``i < query_lengths``.

    Parameters
    ----------
    key_lengths : int, sequence of int or integer array (...)
        The number of real keys of every batch entry: the leading axes of the problem, before the head axis. Python and NumPy
        integers are host data, allowed beside any library, and let padding be skipped.
    query_lengths : the same, optional
        The number of real queries; the rows after them see nothing and become 0.

    Returns
    -------
    Mask

    Raises
    ------
    TypeError
        If the lengths are not integers.

    Examples
    --------
    >>> print(length_mask(2, 1).draw(2, 3))
    ##.
    ...
    """
    queries = None if query_lengths is None else _integers("length_mask", "query_lengths", query_lengths)
    return _Lengths(_integers("length_mask", "key_lengths", key_lengths), queries)


def segment_mask(query_ids: Any, key_ids: Any = None) -> Mask:
    """Packing: a query sees the keys that have its segment id.

    Parameters
    ----------
    query_ids : sequence of int or integer array (..., T)
        The segment of every query, with the problem's leading axes or without. Python and NumPy integers are host data.
    key_ids : the same (..., S), optional
        The segment of every key; ``query_ids`` by default, for self-attention.

    Returns
    -------
    Mask

    Raises
    ------
    TypeError
        If the ids are not integers.

    Examples
    --------
    >>> print(segment_mask([0, 0, 1]).draw(3, 3))
    ##.
    ##.
    ..#
    """
    queries = _integers("segment_mask", "query_ids", query_ids)
    keys = queries if key_ids is None else _integers("segment_mask", "key_ids", key_ids)
    for name, ids in (("query_ids", queries), ("key_ids", keys)):
        if ids.ndim < 1:
            shape_error("segment_mask", name, "(..., T)" if name == "query_ids" else "(..., S)", ids.shape)
    return _Segments(queries, keys)


class _Band(Mask):
    """``-left <= j - (i + offset) <= right``; the offset None stands for S - T."""

    __slots__ = ("left", "name", "offset", "right")

    def __init__(self, name: str, left: int | None, right: int | None, offset: Array | None) -> None:
        self.name = name
        self.left, self.right = left, right
        self.offset = offset

    def __repr__(self) -> str:
        sides = f"{self.left}, {self.right}" if self.name == "window_mask" else ""
        shift = "" if self.offset is None or _is_zero(self.offset) else f"offset={_show(self.offset)}"
        return f"{self.name}({', '.join(filter(None, (sides, shift)))})"

    def _shift(self, place: Place) -> Array:
        if self.offset is None:
            return np.asarray(place.whole[-1] - place.whole[-2])
        return place.per_batch(self.offset)

    def runs(self, place: Place) -> list[Run]:
        shift = self._shift(place)
        if not isinstance(shift, np.ndarray) or shift.size == 0:
            return [Run(place.keys.start, place.keys.stop, MIXED)]
        first, last = place.queries.start + int(shift.min()), place.queries.stop - 1 + int(shift.max())
        starts = (0, 0) if self.left is None else (first - self.left, last - self.left)
        stops = (place.keys.stop, place.keys.stop) if self.right is None else (last + self.right + 1, first + self.right + 1)
        return nested_runs(place.keys, some=(starts[0], stops[0]), every=(starts[1], stops[1]))

    def reach(self, place: Place) -> int:
        if self.left is None or self.right is None or not self.is_tight():
            return place.whole[-1]
        keys: int = place.queries.stop - place.queries.start + self.left + self.right
        return min(keys, place.whole[-1])

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        keys = place.key_positions(xp, device, xp.int32)
        first = None if self.left is None else keys >= self._edge(place, -self.left, xp, device)
        last = None if self.right is None else keys <= self._edge(place, self.right, xp, device)
        if first is None or last is None:
            return keys == keys if first is last else last if first is None else first  # noqa: PLR0124 - all True
        return first & last

    def _edge(self, place: Place, side: int, xp: Namespace, device: Any) -> Array:
        """``i + offset + side`` of every query; on the host a far offset and a far side may cancel."""
        own, shift = place.query_positions(xp, device, xp.int32), self._shift(place)
        if isinstance(shift, np.ndarray):
            if shift.ndim == 0:
                return own + max(min(int(shift) + side, _FAR), -_FAR)
            return own + _batch_pairs(shift + side, xp, device)
        return own + _batch_pairs(shift, xp, device) + max(min(side, _FAR), -_FAR)

    def is_tight(self) -> bool:
        return self.offset is None or (isinstance(self.offset, np.ndarray) and self.offset.ndim == 0)

    def shows_every_query(self, T: int, S: int) -> bool:
        if not self.is_tight():
            return False
        first = S - T if self.offset is None else int(self.offset)  # the key at the first query's position
        return (self.right is None or first + self.right >= 0) and (self.left is None or first + T - 1 - self.left < S)

    def arrays(self) -> Iterator[Array]:
        return _device_arrays(self.offset)

    def outer_shape(self) -> tuple[int, ...]:
        return _outer(self.offset)

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        if self.offset is not None:
            check_broadcasts(op, f"the offset of {self.name}", self.offset.shape, lead, "the leading axes (...)")


class _Lengths(Mask):
    __slots__ = ("keys", "queries")

    def __init__(self, keys: Array, queries: Array | None) -> None:
        self.keys, self.queries = keys, queries

    def __repr__(self) -> str:
        return f"length_mask({_show(self.keys)}{'' if self.queries is None else ', ' + _show(self.queries)})"

    def runs(self, place: Place) -> list[Run]:
        parts = [place.per_batch(lengths) for lengths in (self.keys, self.queries) if lengths is not None]
        if not all(isinstance(p, np.ndarray) and p.size for p in parts):
            return [Run(place.keys.start, place.keys.stop, MIXED)]
        least, most = int(parts[0].min()), int(parts[0].max())
        if len(parts) == 2:
            if place.queries.start >= int(parts[1].max()):
                most = 0
            if place.queries.stop > int(parts[1].min()):
                least = 0
        return nested_runs(place.keys, some=(0, most), every=(0, least))

    def reach(self, place: Place) -> int:
        lengths, every = place.per_batch(self.keys), place.whole[-1]
        if not isinstance(lengths, np.ndarray) or lengths.size == 0:
            return every
        return min(max(int(lengths.max()), 0), every)

    def shows_every_query(self, T: int, S: int) -> bool:
        needed = ((self.keys, 1), (self.queries, T))
        return all(x is None or (isinstance(x, np.ndarray) and bool((x >= least).all())) for x, least in needed)

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        keys = place.key_positions(xp, device, xp.int32) < _batch_pairs(place.per_batch(self.keys), xp, device)
        if self.queries is None:
            return keys
        lengths = _batch_pairs(place.per_batch(self.queries), xp, device)
        return keys & (place.query_positions(xp, device, xp.int32) < lengths)

    def arrays(self) -> Iterator[Array]:
        return _device_arrays(self.keys, self.queries)

    def outer_shape(self) -> tuple[int, ...]:
        return _outer(self.keys, self.queries)

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        for name, lengths in (("key_lengths", self.keys), ("query_lengths", self.queries)):
            if lengths is not None:
                check_broadcasts(op, f"the {name} of length_mask", lengths.shape, lead, "the leading axes (...)")


class _Segments(Mask):
    __slots__ = ("keys", "queries")

    def __init__(self, queries: Array, keys: Array) -> None:
        self.queries, self.keys = queries, keys

    def __repr__(self) -> str:
        return f"segment_mask({_show(self.queries)}{'' if self.keys is self.queries else ', ' + _show(self.keys)})"

    def runs(self, place: Place) -> list[Run]:
        queries = place.per_batch(self.queries, 1)[..., place.queries]
        keys = place.per_batch(self.keys, 1)[..., place.keys]
        if not (isinstance(queries, np.ndarray) and isinstance(keys, np.ndarray) and queries.size and keys.size):
            return [Run(place.keys.start, place.keys.stop, MIXED)]
        first, last = int(queries.min()), int(queries.max())
        inside = (keys >= first) & (keys <= last)  # ids between are taken for possible: a wider answer is still right
        batch = tuple(range(keys.ndim - 1))
        some = np.logical_or.reduce(inside, axis=batch)
        every = np.logical_and.reduce(keys == first, axis=batch) & (first == last)
        return scan_runs(some, every, place.keys.start)

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        queries = _on(place.per_batch(self.queries, 1)[..., place.queries], xp, device)
        keys = _on(place.per_batch(self.keys, 1)[..., place.keys], xp, device)
        queries = xp.reshape(queries, (*queries.shape[:-1], 1, 1, queries.shape[-1], 1))
        return queries == xp.reshape(keys, (*keys.shape[:-1], 1, 1, 1, keys.shape[-1]))

    def arrays(self) -> Iterator[Array]:
        return _device_arrays(self.queries, self.keys)

    def outer_shape(self) -> tuple[int, ...]:
        lead = broadcast_shapes(self.queries.shape[:-1], self.keys.shape[:-1])
        if lead is None:
            raise ValueError(f"segment_mask: ids of shapes {self.queries.shape} and {self.keys.shape} do not broadcast")
        return (*lead, 1) if lead else ()

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        for name, ids, letter, length in (("query_ids", self.queries, "T", T), ("key_ids", self.keys, "S", S)):
            if ids.shape[-1] != length:
                shape_error(op, f"the {name} of segment_mask", f"(..., {letter}) with {letter} = {length}", ids.shape)
            check_broadcasts(
                op, f"the {name} of segment_mask without its last axis", ids.shape[:-1], lead, "the leading axes (...)"
            )


def _integers(op: str, name: str, values: Any) -> Array:
    """Host data becomes a NumPy array; an array of another library stays what it is."""
    if isinstance(values, (int, np.integer, list, tuple)):
        values = np.asarray(values)
        if values.size == 0:
            values = values.astype(np.int64)
    array_namespace(op, **{name: values})
    check_integer_array(op, name, values)
    return values


def _offsets(op: str, offset: Any) -> Array:
    values = _integers(op, "offset", offset)
    return _clipped(values, 1 << 40, np.int64) if isinstance(values, np.ndarray) else values


def _clipped(values: np.ndarray[Any, Any], most: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Between -most and most, so far as their own dtype reaches, then as ``dtype``."""
    info = np.iinfo(values.dtype)
    return np.asarray(np.clip(values, max(-most, info.min), min(most, info.max)), dtype=dtype)  # clip makes scalars of 0-d arrays


def _batch_pairs(values: Array, xp: Namespace, device: Any) -> Array:
    """An array of the leading axes, ready to meet (..., K, G, T, S)."""
    if isinstance(values, np.ndarray):
        values = _clipped(values, _FAR, np.int32)
        if values.ndim == 0:
            return int(values)
    values = _on(values, xp, device)
    if dtype_name(values.dtype).startswith("uint"):  # not every library adds signed and unsigned ones
        values = xp.astype(values, xp.int32)
    return xp.reshape(values, (*values.shape, 1, 1, 1, 1))


def _on(values: Array, xp: Namespace, device: Any) -> Array:
    """Host data on the problem's device; what is there already stays."""
    return asarray(values, xp=xp, device=device) if isinstance(values, np.ndarray) and xp is not np else values


def _device_arrays(*values: Array | None) -> Iterator[Array]:
    return (v for v in values if v is not None and not isinstance(v, np.ndarray))


def _outer(*values: Array | None) -> tuple[int, ...]:
    shapes = [tuple(v.shape) for v in values if v is not None]
    shape = broadcast_shapes(*shapes)
    if shape is None:
        raise ValueError(f"mask: key_lengths and query_lengths of shapes {shapes} do not broadcast")
    return (*shape, 1) if shape else ()


def _is_zero(offset: Array) -> bool:
    return isinstance(offset, np.ndarray) and offset.ndim == 0 and int(offset) == 0


def _show(values: Array) -> str:
    if isinstance(values, np.ndarray) and values.size <= 16:
        return repr(values.tolist())
    return f"array{tuple(values.shape)}"
