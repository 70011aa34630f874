"""Many passes over large arrays, a block of rows at a time.

A formula in plain array operations passes over memory once for each of them. On NumPy a block is small enough to stay in a core's
cache while all of the formula is done to it, and blocks run side by side on the pool's threads. Where the blocks end depends on
shapes alone, and totals are added in order: the same bits from any number of threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays import threads
from npattn._arrays.namespace import Array, Namespace

Results: TypeAlias = tuple[Array | None, ...]
Call: TypeAlias = tuple[Callable[..., Results], tuple[Array, ...]]  # a function and what it is called with

# A few of a formula's intermediates fit a core's second-level cache, and a pass takes long enough that threads seldom wait for
# Python's lock. NumPy reuses the memory of unnamed intermediates of this size.
BLOCK = 1 << 19  # bytes


def map_rows(f: Callable[..., Results], *arrays: Array, xp: Namespace, totals: int = 0) -> Results:
    """``f(*arrays)`` for an ``f`` that treats every row, that is every index of the first axis, by itself.

    The last ``totals`` results of ``f`` are no rows but sums over the rows that it was given; they are added up. Results must be
    new arrays. ``f`` runs without floating-point warnings.
    """
    return _run([(f, arrays)], xp, totals)[0]


def _run(calls: Sequence[Call], xp: Namespace, totals: int) -> list[Results]:
    """Several calls, whose blocks run side by side."""
    if xp is not np or sum(arrays[0].shape[0] * _row_bytes(arrays[0]) for _, arrays in calls) <= BLOCK:
        with np.errstate(all="ignore"):
            return [f(*arrays) for f, arrays in calls]
    done = [_Results(f, arrays, totals) for f, arrays in calls]

    def worker(_check: Callable[[], None]) -> Callable[[tuple[_Results, int]], None]:
        def work(job: tuple[_Results, int]) -> None:
            results, n = job
            part = results.blocks[n]
            results.put(n, part, results.f(*(array[part] for array in results.arrays)))

        return work

    jobs = [(results, n) for results in done for n in range(len(results.blocks))]
    threads.run(worker, jobs, threads=threads.get_num_threads())
    return [results.whole() for results in done]


class _Results:
    """The results of all blocks of a call, put together by whichever thread has one."""

    def __init__(self, f: Callable[..., Results], arrays: tuple[Array, ...], totals: int) -> None:
        self.f = f
        self.arrays = arrays
        self.blocks = _blocks(arrays)
        self.totals = totals
        self.rows: list[Any] | None = None  # whose shapes and dtypes the first block tells
        self.sums: list[Results] = [()] * len(self.blocks)
        self.lock = threading.Lock()

    def put(self, n: int, part: slice, results: Results) -> None:
        rows = results[: len(results) - self.totals]
        self.sums[n] = results[len(rows) :]
        if len(self.blocks) == 1:
            self.rows = list(rows)
            return
        count = self.arrays[0].shape[0]
        with self.lock:
            if self.rows is None:
                self.rows = [None if x is None else np.empty((count, *x.shape[1:]), dtype=x.dtype) for x in rows]
        for whole, x in zip(self.rows, rows, strict=True):
            if x is not None:
                whole[part] = x

    def whole(self) -> Results:
        sums = (None if parts[0] is None else np.sum(np.stack(parts), axis=0) for parts in zip(*self.sums, strict=True))
        return (*(self.rows or ()), *sums)


def _blocks(arrays: tuple[Array, ...]) -> list[slice]:
    """Where the rows are cut: one block at least."""
    count, step = arrays[0].shape[0], max(BLOCK // max(_row_bytes(arrays[0]), 1), 1)
    return [slice(start, min(start + step, count)) for start in range(0, max(count, 1), step)]


def _row_bytes(array: Array) -> int:
    size: int = math.prod(array.shape[1:]) * max(array.dtype.itemsize, 4)  # halves are computed in float32
    return size


def map_elements(f: Callable[..., Results], *arrays: Array, xp: Namespace) -> Results:
    """``f(*arrays)`` for an ``f`` that treats every element of arrays of one shape by itself."""
    shape = arrays[0].shape
    flat = map_rows(f, *(xp.reshape(array, (-1,)) for array in arrays), xp=xp)
    return tuple(None if x is None else xp.reshape(x, shape) for x in flat)


def map_elements_of_each(calls: Sequence[Call], *, xp: Namespace) -> list[Results]:
    """`map_elements` for several calls, whose blocks run side by side."""
    done = _run([(f, tuple(xp.reshape(array, (-1,)) for array in arrays)) for f, arrays in calls], xp, 0)
    return [
        tuple(None if x is None else xp.reshape(x, arrays[0].shape) for x in results)
        for results, (_, arrays) in zip(done, calls, strict=True)
    ]
