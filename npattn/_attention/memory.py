"""Memory that tiles are computed in and what is kept of them, and that outlives its use.

New memory costs a page fault for every 4 KiB that is written, which was up to a third of a call's time.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from npattn._arrays.block_products import LINE, address_of
from npattn._arrays.namespace import Array, Namespace


class MarkedMemory(np.ndarray[Any, Any]):
    """Marks memory of a Scratch, so that a view of it is known from a view of a caller's array."""


def new_memory(size: int, dtype: Any, xp: Namespace) -> Array:
    """Memory for a Scratch, with anything in it, on NumPy from the beginning of a line of the cache. Parts of it can be lent."""
    if xp is not np:
        return xp.empty(size, dtype=dtype)
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + LINE, np.uint8)
    start = -address_of(memory) % LINE
    return memory[start : start + nbytes].view(dtype).view(MarkedMemory)


Memory: TypeAlias = dict[str, MarkedMemory]  # the bytes behind the buffers of each name

SPARE_BYTES = 5 << 26  # memory that waits for its next use, at most: the largest room that is kept, and tiles

# Every change of these is one operation, so that threads need no lock.
_spare: list[tuple[int, Memory]] = []  # of threads that have done their jobs, with its bytes
_spare_rooms: dict[int, list[Array]] = {}  # by their bytes


@contextlib.contextmanager
def lent_memory(count: int) -> Iterator[list[Memory]]:
    """Memory for so many Scratches, which a later call gets again."""
    _keep_freed_pages()
    lent = [_take_spare() for _ in range(count)]
    try:
        yield lent.copy()
    finally:
        for memory in lent:
            size = sum(m.nbytes for m in memory.values())
            if _fits(size):
                _spare.append((size, memory))


@functools.cache
def _keep_freed_pages() -> None:
    """Have glibc keep up to 32 MiB of what is freed for the next results: twice the largest array that it has seen freed."""
    np.empty(1 << 24, np.uint8)


def _take_spare() -> Memory:
    with contextlib.suppress(IndexError):
        return _spare.pop()[1]
    return {}


def new_room(size: int, dtype: Any, xp: Namespace) -> Array:
    """Memory that can be lent to Scratches; once nobody refers to any part of it, a later call for as much gets it again."""
    if xp is not np:
        return new_memory(size, dtype, xp)  # CuPy has a pool of its own
    nbytes = size * np.dtype(dtype).itemsize
    try:
        owner = _spare_rooms[nbytes].pop()
    except LookupError:
        owner = np.empty(nbytes, np.uint8)
    room = owner.view(dtype).view(MarkedMemory)
    weakref.finalize(room, _give_back, owner).atexit = False
    return room


def _give_back(owner: Array) -> None:
    if not _fits(owner.nbytes):
        _spare_rooms.clear()  # they may be of sizes that nobody asks for any more
    if _fits(owner.nbytes):
        _spare_rooms.setdefault(owner.nbytes, []).append(owner)


def _fits(size: int) -> bool:
    waiting = sum(n for n, _ in tuple(_spare)) + sum(n * len(rooms) for n, rooms in tuple(_spare_rooms.items()))
    return waiting + size <= SPARE_BYTES


def drop_spare_memory() -> None:
    """For measuring: let the next call find no memory of earlier ones."""
    _spare.clear()
    _spare_rooms.clear()
