"""Memory that tiles are computed in, and that outlives a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays.namespace import Array, Namespace


class MarkedMemory(np.ndarray[Any, Any]):
    """Marks memory of a Scratch, so that a view of it is known from a view of a caller's array."""


def new_memory(size: int, dtype: Any, xp: Namespace) -> Array:
    """Memory for a Scratch, with anything in it. Parts of it can be lent."""
    return MarkedMemory(size, dtype) if xp is np else xp.empty(size, dtype=dtype)


Memory: TypeAlias = dict[str, MarkedMemory]  # the bytes behind the buffers of each name

SPARE_BYTES = 1 << 26  # memory that waits for the next call, of all threads together, at most

_spare: list[tuple[int, Memory]] = []  # with its bytes; every change is one operation, so that threads need no lock


@contextlib.contextmanager
def lent_memory(count: int) -> Iterator[list[Memory]]:
    """Memory for so many Scratches, which a later call gets again.

    New memory costs a page fault for every 4 KiB that is written, which was up to a third of a call's time.
    """
    lent = [_take_spare() for _ in range(count)]
    try:
        yield lent.copy()
    finally:
        for memory in lent:
            size = sum(m.nbytes for m in memory.values())
            if sum(n for n, _ in tuple(_spare)) + size <= SPARE_BYTES:
                _spare.append((size, memory))


def _take_spare() -> Memory:
    with contextlib.suppress(IndexError):
        return _spare.pop()[1]
    return {}


def drop_spare_memory() -> None:
    """For measuring: let the next call find no memory of earlier ones."""
    _spare.clear()
