"""Where the results of tiles are put together: written in place on NumPy and CuPy, as pieces that are joined elsewhere."""

from __future__ import annotations

from typing import Any, Protocol

from npattn._arrays.namespace import Array
from npattn._attention.place import Place
from npattn._attention.problem import Problem


class RowStore(Protocol):
    """Results of rows, (..., H, T, n): every unit puts its own."""

    def put(self, unit: Place, rows: Array) -> None:
        """Take a unit's (..., K, rows, n); what is broadcast over leading axes is repeated."""

    def result(self) -> Array:
        """The whole."""


class SumStore(Protocol):
    """Sums over tiles: an array of any axes, to parts of which shares are added, in several copies that are joined in order."""

    def add(self, copy: int, index: tuple[slice, ...], share: Array) -> None:
        """Add to the part at ``index`` (a slice for every axis)."""

    def result(self) -> Array:
        """The sum of the copies."""


def make_rows(problem: Problem, size: int, *, plain: bool) -> RowStore:
    """A store for (..., H, T, size)."""
    return _PieceRows(problem, size) if plain else _InPlaceRows(problem, size)


def make_sums(problem: Problem, shape: tuple[int, ...], copies: int, *, plain: bool) -> SumStore:
    """A store for a sum of ``shape``."""
    return _PieceSums(problem, shape) if plain else _InPlaceSums(problem, shape, copies)


class _InPlaceRows:
    def __init__(self, problem: Problem, size: int) -> None:
        self.array = problem.xp.empty((*problem.whole[:-1], size), dtype=problem.compute)

    def put(self, unit: Place, rows: Array) -> None:
        part = self.array[(*unit.lead, unit.heads, unit.group, unit.queries)]
        part[...] = rows.reshape(*rows.shape[:-2], *part.shape[-3:])

    def result(self) -> Array:
        *lead, kv_heads, group, queries, size = self.array.shape
        return self.array.reshape(*lead, kv_heads * group, queries, size)


class _PieceRows:
    """Units cut groups and queries only: rows of pieces, joined along the queries, then along the groups."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem = problem
        self.size = size
        self.pieces: dict[tuple[int, int], Array] = {}

    def put(self, unit: Place, rows: Array) -> None:
        group, queries = unit.group.stop - unit.group.start, unit.queries.stop - unit.queries.start
        shape = (*self.problem.whole[:-3], group, queries, self.size)
        piece = self.problem.xp.reshape(rows, (*rows.shape[:-2], *shape[-3:]))
        self.pieces[unit.group.start, unit.queries.start] = (
            piece if piece.shape == shape else self.problem.xp.broadcast_to(piece, shape)
        )

    def result(self) -> Array:
        xp = self.problem.xp
        *lead, kv_heads, group, queries, _ = self.problem.whole
        shape = (*lead, kv_heads * group, queries, self.size)
        if not self.pieces:
            return xp.zeros(shape, dtype=self.problem.compute, device=self.problem.device)
        groups = sorted({group for group, _ in self.pieces})
        strips = [
            [piece for (g, _), piece in sorted(self.pieces.items(), key=lambda item: item[0]) if g == group] for group in groups
        ]
        return xp.reshape(_concat([_concat(strip, -2, xp) for strip in strips], -3, xp), shape)


class _InPlaceSums:
    def __init__(self, problem: Problem, shape: tuple[int, ...], copies: int) -> None:
        self.xp = problem.xp
        self.copies = [problem.xp.zeros(shape, dtype=problem.compute) for _ in range(copies)]

    def add(self, copy: int, index: tuple[slice, ...], share: Array) -> None:
        part = self.copies[copy][index]
        self.xp.add(part, share, out=part)

    def result(self) -> Array:
        total, *others = self.copies
        for other in others:
            self.xp.add(total, other, out=total)
        return total


class _PieceSums:
    """Shares are widened with zeros to the whole and added."""

    def __init__(self, problem: Problem, shape: tuple[int, ...]) -> None:
        self.problem = problem
        self.shape = shape
        self.total: Array | None = None

    def add(self, copy: int, index: tuple[slice, ...], share: Array) -> None:
        if share.shape != self.shape:
            for axis, (part, length) in enumerate(zip(index, self.shape, strict=True)):
                start, stop, _ = part.indices(length)
                share = self._widen(share, axis, start, length - stop)
        self.total = share if self.total is None else self.total + share

    def _widen(self, share: Array, axis: int, before: int, after: int) -> Array:
        pieces = [share]
        for side, length in enumerate((before, after)):
            if length:
                shape = (*share.shape[:axis], length, *share.shape[axis + 1 :])
                zeros = self.problem.xp.zeros(shape, dtype=share.dtype, device=self.problem.device)
                pieces.insert(side * len(pieces), zeros)
        return _concat(pieces, axis, self.problem.xp)

    def result(self) -> Array:
        if self.total is None:
            return self.problem.xp.zeros(self.shape, dtype=self.problem.compute, device=self.problem.device)
        return self.total


def _concat(pieces: list[Array], axis: int, xp: Any) -> Array:
    return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=axis)
