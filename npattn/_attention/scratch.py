"""The operations of ops.py into buffers that are used again, for NumPy and CuPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from npattn._arrays.block_products import BlockProducts, Limits
from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.products import multiply_into
from npattn._attention.memory import MarkedMemory, Memory, new_memory
from npattn._attention.ops import Hidden

BUFFER = 256  # elements: NumPy copies a column to the width of its buffers, 8192, where a row of the matrix is shorter
ARGUMENTS = ("k", "v", "tk", "tv")  # the names under which parts of a call's arguments are loaded


class Scratch:
    """Results into buffers that are used again; one object a thread and call. The next call gets its ``memory``.

    What a tile's matrices need besides arithmetic is kept small and remembered: threads wait for Python's lock meanwhile.
    """

    def __init__(self, xp: Namespace, dtype: Any, apart: int, memory: Memory, blocks: Limits | None = None) -> None:
        self.xp = xp
        self.dtype = dtype
        self.apart = apart
        self.itemsize = np.dtype(dtype).itemsize
        self.memory = memory
        self.notes: dict[Any, Any] | None = {} if xp is np else None
        self.buffers: dict[str, Array] = {}
        self.results: dict[str, dict[tuple[int, ...], Array]] = {}  # views of the buffers: of each name, by shape
        self.whole: dict[int, Array] = {}  # of each result, by its id: the same with the space after its rows
        self.blocks = None if blocks is None else BlockProducts(blocks)

    def lend(self, name: str, memory: Array | None) -> None:
        for result in self.results.pop(name, {}).values():
            del self.whole[id(result)]
        if memory is None:
            self.buffers.pop(name, None)
        else:
            self.buffers[name] = memory.view(np.ndarray) if self.xp is np else memory

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """The result of this name and shape, with anything in it; in one piece, or with space after its rows.

        Rows that lie a multiple of 1 KiB apart fall on the same few lines of a core's cache, and matrix products that write
        there run up to a quarter slower.
        """
        results = self.results.get(name)
        found = None if results is None else results.get(shape)
        return self.make(name, shape) if found is None else found

    def make(self, name: str, shape: tuple[int, ...]) -> Array:
        """`take` for the first time."""
        keys = shape[-1]
        space = 64 // self.itemsize if self.xp is np and keys and keys * self.itemsize % self.apart == 0 else 0
        size = math.prod(shape[:-1]) * (keys + space)
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < size:
            self.lend(name, self.own_memory(name, size))
            buffer = self.buffers[name]
        whole = buffer[:size].reshape(*shape[:-1], keys + space)
        result = whole[..., :keys]
        self.results.setdefault(name, {})[shape] = result
        self.whole[id(result)] = whole
        return result

    def own_memory(self, name: str, size: int) -> Array:
        """Memory for at least ``size`` elements: what another call has left, if that is enough."""
        if self.xp is not np:
            return new_memory(size, self.dtype, self.xp)  # CuPy has a pool of its own
        memory = self.memory.get(name)
        if memory is None or memory.size < size * self.itemsize:
            self.memory[name] = memory = new_memory(size * self.itemsize, np.uint8, np)
        return memory[: memory.size // self.itemsize * self.itemsize].view(self.dtype)

    def load(self, x: Array, name: str, *, scale: float = 1.0, live: Array | None = None) -> Array:
        as_it_is = live is None and scale == 1.0 and x.dtype == self.dtype and _suits_blas(x)
        if self.blocks is not None and name in ARGUMENTS:
            self.blocks.note(name, x if as_it_is else None)
        if as_it_is:
            return x
        if live is not None:
            return self.hide_rows(x, name, scale, live)
        if scale != 1.0:
            return self.xp.multiply(x, scale, out=self.take(name, x.shape), casting="same_kind", dtype=self.dtype)
        copy = self.take(name, x.shape)
        copy[...] = x
        return copy

    def hide_rows(self, x: Array, name: str, scale: float, live: Array) -> Array:
        """``load`` with 0 in the rows that are not live."""
        copy = self.take(name, broadcast(x.shape, live.shape))
        copy[...] = x
        self.xp.copyto(copy, 0, where=~live)
        return copy if scale == 1.0 else self.xp.multiply(copy, scale, out=copy)

    def matmul(self, a: Array, b: Array, name: str) -> Array:
        *lead, rows, _ = a.shape
        *other, _, columns = b.shape
        lead = lead if lead == other else broadcast(tuple(lead), tuple(other))
        if self.blocks is not None and self.blocks.suit_turned(a, b):
            return self.matmul(b.swapaxes(-1, -2), a.swapaxes(-1, -2), f"{name} turned").swapaxes(-1, -2)
        out = self.take(name, (*lead, rows, columns))
        if self.xp is not np:
            return self.xp.matmul(a, b, out=out)
        if self.blocks is not None and self.blocks.suit(out, a):
            return self.blocks.multiply(out, a, b, name, self.take)
        return multiply_into(out, a, b)

    def add(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        return self.elementwise(self.xp.add, a, b, name)

    def subtract(self, a: Array, b: Array, name: str | None = None) -> Array:
        return self.elementwise(self.xp.subtract, a, b, name)

    def multiply(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        return self.elementwise(self.xp.multiply, a, b, name)

    def elementwise(self, function: Any, a: Array, b: Array | float, name: str | None) -> Array:
        """``function(a, b)``, over whole rows where a's have space after them: one long loop is faster than one a row."""
        out = a if name is None else self.take(name, a.shape)
        x, y = self.to_the_end(a), b
        column = not isinstance(b, float) and b.shape[-1] == 1
        if not isinstance(b, float) and not column:
            y = self.to_the_end(b)
            if y.shape[-1] != x.shape[-1]:
                function(a, b, out)
                return out
        into = x if out is a else self.to_the_end(out)
        if column and x.shape[-1] >= BUFFER and self.xp is np:
            _with_a_column(function, x, y, into)
        else:
            function(x, y, into)
        return out

    def to_the_end(self, a: Array) -> Array:
        """A matrix with the space after its rows, which may hold anything."""
        whole = self.whole.get(id(a))
        return _to_the_end(a) if whole is None else whole

    def exp(self, a: Array, name: str | None = None) -> Array:
        out = a if name is None else self.take(name, a.shape)
        self.xp.exp(self.to_the_end(a), self.to_the_end(out))
        return out

    def tanh(self, a: Array) -> Array:
        self.xp.tanh(self.to_the_end(a), self.to_the_end(a))
        return a

    def transpose(self, a: Array) -> Array:
        return a.swapaxes(-1, -2)

    def row_max(self, a: Array) -> Array:
        return a.max(axis=-1, keepdims=True)

    def row_sum(self, a: Array) -> Array:
        ones = self.buffers.get("ones")
        if ones is None or ones.size < a.shape[-1]:
            self.buffers["ones"] = ones = self.xp.ones(a.shape[-1], dtype=self.dtype)
        return (a @ ones[: a.shape[-1]])[..., None]  # a matrix product is faster than a sum

    def hide(self, a: Array, hidden: Sequence[Hidden], value: float) -> Array:
        for start, stop, pairs in hidden:
            self.xp.copyto(a[..., start:stop], value, where=pairs)
        return a


def _with_a_column(function: Any, a: Array, column: Array, out: Array) -> None:
    """``function(a, column)`` for NumPy's functions, with buffers too short for a copy of the column at the width of a row."""
    size = np.setbufsize(BUFFER)  # of this thread
    try:
        function(a, column, out)
    finally:
        np.setbufsize(size)


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of two shapes that are known to have one."""
    if a == b:
        return a
    a, b = (1,) * (len(b) - len(a)) + a, (1,) * (len(a) - len(b)) + b
    return tuple(n if m == 1 else m for m, n in zip(a, b, strict=True))


def _to_the_end(a: Array) -> Array:
    """A matrix of another Scratch with the space after its rows; other arrays as they are."""
    if not isinstance(getattr(getattr(a, "base", None), "base", None), MarkedMemory):
        return a
    width = a.strides[-2] // a.itemsize
    if width == a.shape[-1] or a.size == 0 or a.strides[-1] != a.itemsize:
        return a
    return a.base[: a.size // a.shape[-1] * width].reshape(*a.shape[:-1], width)


def _suits_blas(x: Array) -> bool:
    """Whether matrix products take ``x`` as it lies in memory: rows of neighbours that do not overlap, aligned."""
    item = x.dtype.itemsize
    row, element = x.strides[-2:]
    return bool(
        element == item and row % item == 0 and row >= item * x.shape[-1] and (not isinstance(x, np.ndarray) or x.flags.aligned)
    )
