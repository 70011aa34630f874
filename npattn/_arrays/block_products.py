"""Large matrix products made of small ones, which OpenBLAS multiplies where they lie, on CPUs with AVX-512.

BLAS copies both matrices of a product into an order of its own before it multiplies them. In attention one side is a head's 64
or 128 elements, and OpenBLAS loses a quarter to a third of its time on that. For products of up to a million multiplications it
has AVX-512 kernels that copy nothing (https://github.com/OpenMathLib/OpenBLAS/pull/3335). So a product is cut into blocks of
that size, all in one call of NumPy's matmul: some rows of ``a`` times a few columns of ``b``. Only ``b`` is copied, to have
every block of columns in one piece, and keys and values only once for all units that follow each other with the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from npattn._arrays.namespace import Array

LINE = 64  # bytes of a line of a core's cache, where blocks begin


class Limits(NamedTuple):
    """How large blocks are, and what is worth them."""

    bytes: int = 1 << 27  # of an element times a product's multiplications, at least: a smaller one loses more to waiting threads
    multiplications: int = 1_000_000  # of a block, at most: those that OpenBLAS makes without copies
    columns: int = 64  # of a block
    rows: int = 64  # of a block, at most
    row_bytes: int = 12_288  # of a block's rows in ``a``, at most: longer sums are made of shorter ones


Key: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
Take: TypeAlias = Callable[[str, tuple[int, ...]], Array]  # memory for a result by its name and shape


class BlockProducts:
    """Products in blocks, for one thread and one call."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.steady: dict[str, Array | None] = {}  # parts of arguments, by name: the address is enough to know them again
        self.copies: dict[str, tuple[Key, Array]] = {}  # of every result the blocks of its last ``b``, if that was such a part

    def note(self, name: str, x: Array | None) -> None:
        """From now on ``x`` stands under this name: a part of an argument, which keeps its values until the call ends."""
        self.steady[name] = x

    def suit(self, out: Array, a: Array) -> bool:
        """Whether blocks are the quicker way to ``out = a b``."""
        if a.strides[-1] != a.itemsize or min(out.shape[-2:]) < self.limits.columns // 4:
            return False
        return bool(out.size * a.shape[-1] * a.itemsize >= self.limits.bytes)

    def suit_turned(self, a: Array, b: Array) -> bool:
        """Whether ``(bᵀ aᵀ)ᵀ`` is the quicker way to ``a b``: it is where ``a`` lies in columns, in float64."""
        *_, rows, terms = a.shape
        columns = b.shape[-1]
        if a.strides[-1] == a.itemsize or a.itemsize != 8 or a.size * columns * a.itemsize < self.limits.bytes:
            return False
        return bool(rows >= 2 * columns and terms >= 2 * self.limits.columns)

    def multiply(self, out: Array, a: Array, b: Array, name: str, take: Take) -> Array:
        """``a b`` for arrays (..., M, K) and (..., K, N), into ``out``, the result of this name."""
        terms, most = a.shape[-1], self.limits.row_bytes // a.itemsize
        if terms <= most:
            return self._multiply(out, a, b, name, take)
        pieces = _pieces(terms, most)
        if pieces is None:
            return np.matmul(a, b, out=out)
        share = take("share", (*out.shape[:-2], pieces, *out.shape[-2:]))
        a = a.reshape(*a.shape[:-1], pieces, terms // pieces).swapaxes(-3, -2)
        self._multiply(share, a, b.reshape(*b.shape[:-2], pieces, terms // pieces, b.shape[-1]), name, take)
        return np.add.reduce(share, axis=-3, out=out)

    def _multiply(self, out: Array, a: Array, b: Array, name: str, take: Take) -> Array:
        rows, columns, terms, width = a.shape[-2], b.shape[-1], a.shape[-1], self.limits.columns
        if columns % width and columns <= 2 * width:
            width = columns
        whole = columns // width * width
        height = _height(rows, min(self.limits.multiplications // (width * terms), self.limits.rows))
        if height == 0:
            return np.matmul(a, b, out=out)
        blocks = self._blocks(b if whole == columns else b[..., :whole], width, name, take)[..., None, :, :, :]
        even = rows // height * height
        _multiply_blocks(out[..., :even, :whole], a[..., :even, :], blocks, height)
        if even < rows:
            _multiply_blocks(out[..., even:, :whole], a[..., even:, :], blocks, rows - even)
        if whole < columns:
            np.matmul(a, b[..., whole:], out=out[..., whole:])
        return out

    def _blocks(self, b: Array, width: int, name: str, take: Take) -> Array:
        """``b`` (..., K, N) as (..., N / width, K, width), every block in one piece."""
        *lead, terms, columns = b.shape
        address, item = address_of(b), b.itemsize
        if columns == width and b.strides[-2:] == (width * item, item) and address % LINE == 0:
            return b[..., None, :, :]
        key = (address, b.strides, (*lead, width))
        steady = any(x is not None and address_of(x) == address for x in self.steady.values())
        if steady and name in self.copies:
            known, blocks = self.copies[name]
            if known == key and blocks.shape[-3] * width >= columns and blocks.shape[-2] >= terms:  # a mask may leave less of it
                return blocks[..., : columns // width, :terms, :]
        blocks = take(f"blocks of {name}", (*lead, columns // width, terms, width))
        blocks[...] = b.reshape(*b.shape[:-1], columns // width, width).swapaxes(-3, -2)
        self.copies.pop(name, None)
        if steady:
            self.copies[name] = key, blocks
        return blocks


def _multiply_blocks(out: Array, a: Array, blocks: Array, height: int) -> None:
    """All blocks of ``height`` rows of ``a`` times all blocks of columns (..., 1, N / width, K, width)."""
    *lead, rows, terms = a.shape
    *_, count, _, width = blocks.shape
    left = a.reshape(*lead, rows // height, 1, height, terms)
    right = out.reshape(*out.shape[:-2], rows // height, height, count, width).swapaxes(-3, -2)
    np.matmul(left, blocks, out=right)


@functools.lru_cache(maxsize=1024)
def _height(rows: int, most: int) -> int:
    """How many rows of ``a`` a block has: at most ``most``, in fours, and a divisor of all rows if there is a good one."""
    most = most // 4 * 4
    return rows if rows <= most else next((n for n in range(most, most // 2, -4) if rows % n == 0), most)


@functools.lru_cache(maxsize=1024)
def _pieces(terms: int, most: int) -> int | None:
    """In how many equal pieces of at most so many terms a sum is made, None if it has to be many."""
    least = -(-terms // most)
    return next((n for n in range(least, 2 * least + 4) if terms % n == 0), None)


def address_of(x: Array) -> int:
    """Where a NumPy array's first element stands."""
    return int(x.__array_interface__["data"][0])
