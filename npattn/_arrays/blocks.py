"""Many passes over large arrays, a block of rows at a time.

A formula in plain array operations passes over memory once for each of them. On NumPy a block is small enough to stay in a core's
cache while all of the formula is done to it, and blocks run side by side on the pool's threads. Where the blocks end depends on
shapes alone, and totals are added in order: the same bits from any number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays import threads
from npattn._arrays.namespace import Array, Namespace

Results: TypeAlias = tuple[Array | None, ...]

# With a formula's intermediates, a core's second-level cache. NumPy reuses the memory of unnamed intermediates from this size on.
BLOCK = 1 << 18  # bytes


def map_rows(f: Callable[..., Results], *arrays: Array, xp: Namespace, totals: int = 0) -> Results:
    """``f(*arrays)`` for an ``f`` that treats every row, that is every index of the first axis, by itself.

    The last ``totals`` results of ``f`` are no rows but sums over the rows that it was given; they are added up. Results must be
    new arrays. ``f`` runs without floating-point warnings.
    """
    count = arrays[0].shape[0]
    with np.errstate(all="ignore"):
        step = _rows_per_block(arrays[0]) if xp is np else count
        if count <= step:
            return f(*arrays)
        first = f(*(array[:step] for array in arrays))
    rows = first[: len(first) - totals]
    whole = [None if part is None else np.empty((count, *part.shape[1:]), dtype=part.dtype) for part in rows]
    sums: list[Results] = [()] * -(-count // step)
    _put(whole, first, slice(0, step))
    sums[0] = first[len(rows) :]

    def worker(_check: Callable[[], None]) -> Callable[[int], None]:
        def work(n: int) -> None:
            part = slice(n * step, (n + 1) * step)
            with np.errstate(all="ignore"):
                results = f(*(array[part] for array in arrays))
            _put(whole, results, part)
            sums[n] = results[len(rows) :]

        return work

    threads.run(worker, range(1, len(sums)), threads=threads.get_num_threads())
    return (*whole, *(_add(parts) for parts in zip(*sums, strict=True)))


def map_elements(f: Callable[..., Results], *arrays: Array, xp: Namespace) -> Results:
    """``f(*arrays)`` for an ``f`` that treats every element of arrays of one shape by itself."""
    shape = arrays[0].shape
    flat = map_rows(f, *(xp.reshape(array, (-1,)) for array in arrays), xp=xp)
    return tuple(None if x is None else xp.reshape(x, shape) for x in flat)


def _rows_per_block(array: Array) -> int:
    row: int = math.prod(array.shape[1:]) * max(array.dtype.itemsize, 4)  # halves are computed in float32
    return max(1, BLOCK // max(1, row))


def _put(whole: list[Any], results: Results, part: slice) -> None:
    for array, result in zip(whole, results, strict=False):
        if array is not None:
            array[part] = result


def _add(parts: tuple[Array | None, ...]) -> Array | None:
    return None if parts[0] is None else np.sum(np.stack(parts), axis=0)  # type: ignore[arg-type]
