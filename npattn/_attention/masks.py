"""Who may look at whom: lazy masks that compose with ``&``, ``|`` and ``~``. True means *may attend*, everywhere.

This is what masks have in common and how they combine; their kinds are in ``mask_kinds.py``. A mask knows no sizes until it is
used. It answers two questions about a tile: ``runs``, which of its keys are visible to all, some or none of its queries, from
host data alone; and ``visible``, the pairs themselves, asked only where the answer is mixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from npattn._arrays.broadcast import broadcast_shapes
from npattn._arrays.checks import check_bool, check_broadcasts, host_int
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, library_name
from npattn._attention.place import ALL, MIXED, NONE, Place, Run, both, inverse, scan_runs


class Mask:
    """A rule that says which query may attend to which key; made by `causal_mask` and its neighbours.

    Masks combine: ``a & b`` (both allow), ``a | b`` (either allows), ``~a`` (the opposite); a boolean array may stand on one
    side. ``print(mask)`` shows the expression.
    """

    __array_ufunc__ = None  # NumPy arrays on the left of & and | leave the operation to us
    __slots__ = ()

    def __and__(self, other: Any) -> Mask:
        return _Both(self, as_mask("mask", other))

    def __or__(self, other: Any) -> Mask:
        return _Either(self, as_mask("mask", other))

    def __rand__(self, other: Any) -> Mask:
        return _Both(as_mask("mask", other), self)

    def __ror__(self, other: Any) -> Mask:
        return _Either(as_mask("mask", other), self)

    def __invert__(self) -> Mask:
        return _Inverse(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no single truth value: combine masks with & | ~, or ask mask.to_array(T, S).all()")

    def to_array(self, T: int, S: int, *, xp: Namespace = np, device: Any = None) -> Array:
        """The mask as a boolean array.

        Parameters
        ----------
        T, S : int
            The number of queries and of keys.
        xp : namespace, optional
            The library of the result, NumPy by default.
        device : device, optional
            Where the result lives, for libraries with devices.

        Returns
        -------
        array of bool
            (T, S), or (..., H, T, S) for a mask with leading axes or heads; True where a query may attend to a key.

        Raises
        ------
        ValueError
            If an array inside the mask does not fit T and S.
        TypeError
            If an array inside the mask belongs to another library.

        Examples
        --------
        >>> from npattn import causal_mask
        >>> causal_mask().to_array(2, 3).astype(int)
        array([[1, 0, 0],
               [1, 1, 0]])
        """
        home = self._home(xp, device)[0]
        if library_name(home) != library_name(xp):
            raise TypeError(f"to_array: the mask holds arrays of {library_name(home)}, and xp is {library_name(xp)}")
        place = self._place(T, S)
        visible = xp.broadcast_to(self.visible(place, xp, device), place.whole)
        return xp.asarray(xp.reshape(visible, (*self.outer_shape(), T, S)), copy=True)  # an array mask's own memory until here

    def draw(self, T: int, S: int, *, at: Sequence[int] = ()) -> str:
        """A picture in text: a row a query, ``#`` where it may attend, ``.`` where not.

        Parameters
        ----------
        T, S : int
            The number of queries and of keys.
        at : sequence of int, optional
            Which leading index and head to draw, for a mask that has them; the first by default.

        Returns
        -------
        str
            T lines of S characters.

        Raises
        ------
        ValueError
            If there is no such leading index and head.

        Examples
        --------
        >>> from npattn import window_mask
        >>> print(window_mask(1, 0).draw(3, 4))
        #...
        ##..
        .##.
        """
        xp, device = self._home()
        pairs = self.to_array(T, S, xp=xp, device=device)[(*self._index(at), ...)]
        return "\n".join("".join(".#"[int(bool(pairs[i, j]))] for j in range(S)) for i in range(T))

    def explain(self, i: int, j: int, *, T: int, S: int, at: Sequence[int] = ()) -> str:
        """Say in words whether query ``i`` may attend to key ``j``, and which part of the mask forbids it if not.

        Parameters
        ----------
        i, j : int
            A query and a key.
        T, S : int
            The number of queries and of keys.
        at : sequence of int, optional
            The leading index and head, for a mask that has them; the first by default.

        Returns
        -------
        str
            One sentence.

        Raises
        ------
        ValueError
            If i or j lies outside, or there is no such leading index and head.

        Examples
        --------
        >>> from npattn import causal_mask, length_mask
        >>> (causal_mask() & length_mask(3)).explain(1, 2, T=4, S=4)
        'query 1 may not attend to key 2: causal_mask() forbids it'
        """
        if not (0 <= i < T and 0 <= j < S):
            raise ValueError(f"explain: the pair ({i}, {j}) lies outside T = {T}, S = {S}")
        if self.sees(i, j, T, S, at):
            return f"query {i} may attend to key {j}"
        reasons = self._forbidders(i, j, T, S, at)
        return f"query {i} may not attend to key {j}: {' and '.join(reasons)} forbid{'s' if len(reasons) == 1 else ''} it"

    def _place(self, T: int, S: int) -> Place:
        """Everything, for a problem that has the mask's own leading axes and heads."""
        *lead, heads = self.outer_shape() or (1,)
        self.check("mask", tuple(lead), heads, T, S)
        parts = (slice(0, heads), slice(0, 1), slice(0, T), slice(0, S))
        return Place(tuple(slice(0, n) for n in lead), *parts, whole=(*lead, heads, 1, T, S))

    def _index(self, at: Sequence[int]) -> tuple[int, ...]:
        """``at``, right-aligned, as an index into the mask's own leading axes and heads."""
        outer = self.outer_shape()
        wanted = (0,) * (len(outer) - len(at)) + tuple(at)[max(len(at) - len(outer), 0) :]
        index = tuple(0 if n == 1 else host_int("mask", "at", a) for a, n in zip(wanted, outer, strict=True))
        if not all(0 <= a < n for a, n in zip(index, outer, strict=True)):
            raise ValueError(f"mask: at must be an index into the leading axes and heads {outer}, got {tuple(at)}")
        return index

    def _home(self, xp: Namespace = np, device: Any = None) -> tuple[Namespace, Any]:
        """The library and device of the arrays inside, else those given."""
        arrays = {f"array {n} of the mask": array for n, array in enumerate(self.arrays())}
        return (array_namespace("mask", **arrays), array_device(next(iter(arrays.values())))) if arrays else (xp, device)

    def _forbidders(self, i: int, j: int, T: int, S: int, at: Sequence[int]) -> list[str]:
        return [repr(self)]

    # What other rooms ask --------------------------------------------------------------------------------------------------

    def sees(self, i: int, j: int, T: int, S: int, at: Sequence[int] = ()) -> bool:
        """Whether query ``i`` may attend to key ``j``, from this one pair."""
        index = self._index(at) or (0,)
        *lead, heads = (slice(n, n + 1) for n in index)
        one = self._place(T, S)._replace(lead=tuple(lead), heads=heads, queries=slice(i, i + 1), keys=slice(j, j + 1))
        xp, device = self._home()
        return bool(xp.reshape(self.visible(one, xp, device), ()))

    def runs(self, place: Place) -> list[Run]:
        """How visible the keys of ``place`` are to its queries: runs that cover them, in order. Host data only."""
        raise NotImplementedError

    def is_tight(self) -> bool:
        """Whether every key of the runs that are not NONE is known to be seen by one of the queries, in every batch entry."""
        return False

    def shows_every_query(self, T: int, S: int) -> bool:
        """Whether every one of T queries is known to see one of S > 0 keys, in every batch entry."""
        return False

    def reach(self, place: Place) -> int:
        """How many keys the queries of ``place`` may see, or as many neighbours elsewhere: at most, and from numbers alone."""
        return place.whole[-1]

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        """The pairs of ``place``, boolean, broadcasting to (..., K, G, T, S)."""
        raise NotImplementedError

    def arrays(self) -> Iterator[Array]:
        """The arrays that must live where the problem's do; host data is not among them."""
        return iter(())

    def outer_shape(self) -> tuple[int, ...]:
        """The axes before T, S that the mask itself brings: ``()``, or ``(..., H)`` with ones where it does not care."""
        return ()

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        """Raise unless the mask fits a problem of these sizes."""

    def varies_by_head(self) -> bool:
        """Whether heads may see different keys."""
        outer = self.outer_shape()
        return bool(outer) and outer[-1] != 1


def as_mask(op: str, mask: Any) -> Mask:
    """A Mask, from one or from a boolean array."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, (bool, int, float, str, list, tuple)) or mask is None:
        raise TypeError(f"{op}: mask must be a mask such as causal_mask() or a boolean array, got {type(mask).__name__}")
    if isinstance(mask, np.bool_):  # what NumPy makes of an array without axes
        mask = np.asarray(mask)
    array_namespace(op, mask=mask)
    check_bool(op, "mask", mask)
    return _ArrayMask(mask)


class _ArrayMask(Mask):
    """A boolean array that broadcasts, right-aligned, to (..., H, T, S)."""

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    def __repr__(self) -> str:
        return f"array{tuple(self.array.shape)}"

    def runs(self, place: Place) -> list[Run]:
        if not isinstance(self.array, np.ndarray):
            return [Run(place.keys.start, place.keys.stop, MIXED)]
        pairs = place.per_pair(self.array, np)
        above = tuple(range(pairs.ndim - 1))
        some, every = pairs.any(axis=above), pairs.all(axis=above)
        if len(some) == 1:
            state = ALL if every[0] else MIXED if some[0] else NONE
            return [Run(place.keys.start, place.keys.stop, state)]
        return scan_runs(some, every, place.keys.start)

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        return place.per_pair(self.array, xp)

    def arrays(self) -> Iterator[Array]:
        yield self.array

    def outer_shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape[:-2])

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        check_broadcasts(op, "mask", self.array.shape, (*lead, heads, T, S), "(..., H, T, S)")


class _Both(Mask):
    __slots__ = ("left", "right")
    sign = "&"

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def __repr__(self) -> str:
        parts = [f"({p!r})" if isinstance(p, _Both) and p.sign != self.sign else repr(p) for p in (self.left, self.right)]
        return f"{parts[0]} {self.sign} {parts[1]}"

    def _forbidders(self, i: int, j: int, T: int, S: int, at: Sequence[int]) -> list[str]:
        parts = [p for p in (self.left, self.right) if not p.sees(i, j, T, S, at)]
        return [reason for part in parts for reason in part._forbidders(i, j, T, S, at)]

    def runs(self, place: Place) -> list[Run]:
        return both(self.left.runs(place), self.right.runs(place))

    def reach(self, place: Place) -> int:
        return min(self.left.reach(place), self.right.reach(place))

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        return self.left.visible(place, xp, device) & self.right.visible(place, xp, device)

    def arrays(self) -> Iterator[Array]:
        yield from self.left.arrays()
        yield from self.right.arrays()

    def outer_shape(self) -> tuple[int, ...]:
        shape = broadcast_shapes(self.left.outer_shape(), self.right.outer_shape())
        if shape is None:
            raise ValueError(f"mask: the shapes of {self.left!r} and {self.right!r} do not broadcast")
        return shape

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        self.left.check(op, lead, heads, T, S)
        self.right.check(op, lead, heads, T, S)


class _Either(_Both):
    __slots__ = ()
    sign = "|"

    def runs(self, place: Place) -> list[Run]:
        return inverse(both(inverse(self.left.runs(place)), inverse(self.right.runs(place))))

    def reach(self, place: Place) -> int:
        return min(self.left.reach(place) + self.right.reach(place), place.whole[-1])

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        return self.left.visible(place, xp, device) | self.right.visible(place, xp, device)


class _Inverse(Mask):
    __slots__ = ("inner",)

    def __init__(self, inner: Mask) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, _Both) else f"~{self.inner!r}"

    def runs(self, place: Place) -> list[Run]:
        return inverse(self.inner.runs(place))

    def visible(self, place: Place, xp: Namespace, device: Any) -> Array:
        return ~self.inner.visible(place, xp, device)

    def arrays(self) -> Iterator[Array]:
        return self.inner.arrays()

    def outer_shape(self) -> tuple[int, ...]:
        return self.inner.outer_shape()

    def check(self, op: str, lead: tuple[int, ...], heads: int, T: int, S: int) -> None:
        self.inner.check(op, lead, heads, T, S)
