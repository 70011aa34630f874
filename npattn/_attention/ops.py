"""The operations that the formula is written in, in two kinds.

``Fresh`` returns new arrays and works with any library, inside ``jax.jit`` and under PyTorch's autograd. ``Scratch`` may
overwrite its first argument and writes into buffers of its own, which it uses again for the next tile; it is for NumPy and
CuPy, whose functions take ``out=``. The text of the formula is the same for both: it must not use a value again that it has
handed to an operation as the first argument, unless it gave the result a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from npattn._arrays.namespace import Array, Namespace


class Hidden(NamedTuple):
    """The pairs that may not be seen, among the keys ``start <= j < stop`` of a tile: True where hidden, (..., rows, keys)."""

    start: int
    stop: int
    pairs: Array


class Ops(Protocol):
    """Arithmetic on a tile's matrices (..., rows, keys)."""

    xp: Namespace
    notes: dict[Any, Any] | None  # what a thread finds out in a call and may use for its next unit

    def lend(self, name: str, memory: Array | None) -> None:
        """Write the next results of this name into ``memory``, which outlives the tile; None takes it back."""

    def load(self, x: Array, name: str, *, scale: float = 1.0, live: Array | None = None) -> Array:
        """A tile's part of an input in the dtype it is computed in, times ``scale``, 0 where ``live`` is not."""

    def matmul(self, a: Array, b: Array, name: str) -> Array:
        """``a @ b``."""

    def add(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        """``a + b``."""

    def subtract(self, a: Array, b: Array, name: str | None = None) -> Array:
        """``a - b``."""

    def multiply(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        """``a * b``."""

    def exp(self, a: Array, name: str | None = None) -> Array:
        """``exp(a)``."""

    def tanh(self, a: Array) -> Array:
        """``tanh(a)``."""

    def transpose(self, a: Array) -> Array:
        """The last two axes exchanged, a view."""

    def row_max(self, a: Array) -> Array:
        """The largest element of every row, (..., rows, 1)."""

    def row_sum(self, a: Array) -> Array:
        """The sum of every row, (..., rows, 1)."""

    def hide(self, a: Array, hidden: Sequence[Hidden], value: float) -> Array:
        """``a`` with ``value`` at the hidden pairs."""


class Fresh:
    """New arrays, any library."""

    notes: dict[Any, Any] | None = None

    def __init__(self, xp: Namespace, dtype: Any) -> None:
        self.xp = xp
        self.dtype = dtype

    def lend(self, name: str, memory: Array | None) -> None:
        """Every result has memory of its own."""

    def load(self, x: Array, name: str, *, scale: float = 1.0, live: Array | None = None) -> Array:
        if x.dtype != self.dtype:
            x = self.xp.astype(x, self.dtype)
        if live is not None:  # selection, not multiplication: what stands there may be NaN
            x = self.xp.where(live, x, 0.0)
        return x if scale == 1.0 else x * scale

    def matmul(self, a: Array, b: Array, name: str) -> Array:
        return a @ b

    def add(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        return a + b

    def subtract(self, a: Array, b: Array, name: str | None = None) -> Array:
        return a - b

    def multiply(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        return a * b

    def exp(self, a: Array, name: str | None = None) -> Array:
        return self.xp.exp(a)

    def tanh(self, a: Array) -> Array:
        return self.xp.tanh(a)

    def transpose(self, a: Array) -> Array:
        return self.xp.matrix_transpose(a)

    def row_max(self, a: Array) -> Array:
        return self.xp.max(a, axis=-1, keepdims=True)

    def row_sum(self, a: Array) -> Array:
        return self.xp.sum(a, axis=-1, keepdims=True)

    def hide(self, a: Array, hidden: Sequence[Hidden], value: float) -> Array:
        for start, stop, pairs in hidden:
            inside = self.xp.where(pairs, value, a[..., start:stop])
            if stop - start == a.shape[-1]:
                a = inside
            else:
                a = self.xp.concat([a[..., :start], inside, a[..., stop:]], axis=-1)
        return a


class FreshNumPy(Fresh):
    """The same, through NumPy's shortest ways: half the time of a tiny problem is the way into a function.

    Results without a name overwrite the first argument, as in a Scratch.
    """

    def load(self, x: Array, name: str, *, scale: float = 1.0, live: Array | None = None) -> Array:
        if live is not None or x.dtype is not self.dtype:
            return super().load(x, name, scale=scale, live=live)
        return x if scale == 1.0 else x * scale

    def add(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        return np.add(a, b, None if name else a)

    def subtract(self, a: Array, b: Array, name: str | None = None) -> Array:
        return np.subtract(a, b, None if name else a)

    def multiply(self, a: Array, b: Array | float, name: str | None = None) -> Array:
        return np.multiply(a, b, None if name else a)

    def exp(self, a: Array, name: str | None = None) -> Array:
        return np.exp(a, None if name else a)

    def tanh(self, a: Array) -> Array:
        return np.tanh(a, a)

    def transpose(self, a: Array) -> Array:
        return a.mT

    def row_max(self, a: Array) -> Array:
        return np.maximum.reduce(a, axis=-1, keepdims=True)

    def row_sum(self, a: Array) -> Array:
        return np.add.reduce(a, axis=-1, keepdims=True)
