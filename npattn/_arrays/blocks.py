"""Many passes over large arrays, a block of rows at a time.

A formula in plain array operations passes over memory once for each of them. On NumPy a block is small enough to stay in a core's
cache while all of the formula is done to it, and blocks run side by side on the pool's threads. Where the blocks end depends on
shapes alone, and totals are added in order: the same bits from any number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays import threads
from npattn._arrays.namespace import Array, Namespace

Results: TypeAlias = tuple[Array | None, ...]

# A few of a formula's intermediates fit a core's second-level cache, and a pass takes long enough that threads seldom wait for
# Python's lock. NumPy reuses the memory of unnamed intermediates of this size.
BLOCK = 1 << 19  # bytes


def map_rows(f: Callable[..., Results], *arrays: Array, xp: Namespace, totals: int = 0) -> Results:
    """``f(*arrays)`` for an ``f`` that treats every row, that is every index of the first axis, by itself.

    The last ``totals`` results of ``f`` are no rows but sums over the rows that it was given; they are added up. Results must be
    new arrays. ``f`` runs without floating-point warnings.
    """
    count = arrays[0].shape[0]
    step = _rows_per_block(arrays[0]) if xp is np else count
    if count <= step:
        with np.errstate(all="ignore"):
            return f(*arrays)
    done = _Results(count, -(-count // step), totals)

    def worker(_check: Callable[[], None]) -> Callable[[int], None]:
        def work(n: int) -> None:
            part = slice(n * step, (n + 1) * step)
            with np.errstate(all="ignore"):
                done.put(n, part, f(*(array[part] for array in arrays)))

        return work

    threads.run(worker, range(-(-count // step)), threads=threads.get_num_threads())
    return done.whole()


class _Results:
    """The results of all blocks, put together by whichever thread has one."""

    def __init__(self, rows: int, blocks: int, totals: int) -> None:
        self.count = rows
        self.totals = totals
        self.rows: list[Any] | None = None  # whose shapes and dtypes the first block tells
        self.sums: list[Results] = [()] * blocks
        self.lock = threading.Lock()

    def put(self, n: int, part: slice, results: Results) -> None:
        rows = results[: len(results) - self.totals]
        self.sums[n] = results[len(rows) :]
        with self.lock:
            if self.rows is None:
                self.rows = [None if x is None else np.empty((self.count, *x.shape[1:]), dtype=x.dtype) for x in rows]
        for whole, x in zip(self.rows, rows, strict=True):
            if x is not None:
                whole[part] = x

    def whole(self) -> Results:
        sums = (None if parts[0] is None else np.sum(np.stack(parts), axis=0) for parts in zip(*self.sums, strict=True))
        return (*(self.rows or ()), *sums)


def _rows_per_block(array: Array) -> int:
    row: int = math.prod(array.shape[1:]) * max(array.dtype.itemsize, 4)  # halves are computed in float32
    return max(1, BLOCK // max(1, row))


def map_elements(f: Callable[..., Results], *arrays: Array, xp: Namespace) -> Results:
    """``f(*arrays)`` for an ``f`` that treats every element of arrays of one shape by itself."""
    shape = arrays[0].shape
    flat = map_rows(f, *(xp.reshape(array, (-1,)) for array in arrays), xp=xp)
    return tuple(None if x is None else xp.reshape(x, shape) for x in flat)
