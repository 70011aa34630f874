"""Dropout that can be replayed: whether an element is kept is a hash of the seed and of where the element stands.

The hash works in wrapping 32-bit integers, which every array library has, so the same elements are kept on NumPy, CuPy, PyTorch
and JAX, in one tile or in many, forward and backward. Its finaliser is that of MurmurHash3 (Austin Appleby, public domain).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_float, host_int
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, compute_dtype, float_dtype

_MASK64 = (1 << 64) - 1


class Dropout(NamedTuple):
    """Which elements are dropped: ``Dropout(rate, seed)``.

    Element (leading index, head, i, j) is kept or not depending on the seed and that index alone. Kept elements are divided
    by ``1 - rate``.

    Parameters
    ----------
    rate : float
        The share that is dropped, 0 <= rate < 1.
    seed : int
        Any integer.
    origin : tuple of int, optional
        Where a part stands in its whole: added to (leading index, head, i, j), right-aligned. Indices count modulo 2**32.

    Examples
    --------
    >>> Dropout(0.1, seed=7).fold(3) == Dropout(0.1, seed=7).fold(3)
    True
    """

    rate: float
    seed: int
    origin: tuple[int, ...] = ()

    def fold(self, n: int) -> Dropout:
        """The same rate with a seed of its own, for layer or step ``n``."""
        return self._replace(seed=_splitmix(_splitmix(self.seed) + host_int("Dropout.fold", "n", n)))

    def checked(self, op: str) -> Dropout:
        """The same with host numbers, or a clear error."""
        if not isinstance(self, Dropout):
            raise TypeError(f"{op}: dropout must be a Dropout(rate, seed), got {type(self).__name__}")
        rate = host_float(op, "the rate of dropout", self.rate)
        if not 0 <= rate < 1:
            raise ValueError(f"{op}: the rate of dropout must be at least 0 and less than 1, got {rate}")
        if not isinstance(self.origin, (tuple, list)) or len(self.origin) > 4:
            raise ValueError(f"{op}: the origin of dropout must be a tuple (leading index, head, i, j), got {self.origin}")
        origin = tuple(host_int(op, "the origin of dropout", n) for n in self.origin)
        return Dropout(rate, host_int(op, "the seed of dropout", self.seed), origin)

    def factors(self, leading: Array, head: Array, i: Array, j: Array, *, xp: Namespace, dtype: Any) -> Array:
        """0 where an element is dropped and ``1 / (1 - rate)`` where it is kept; int32 indices that broadcast together."""
        low, high = _words(_splitmix(self.seed))
        shifts = (0,) * (4 - len(self.origin)) + tuple(_signed(n) for n in self.origin)
        for index, shift in zip((leading, head, i), shifts, strict=False):
            low = _mix((index + shift) * 0x27D4EB2F + low)
            high = _mix((index + shift) * 0x165667B1 + high)
        # two words a row, so that no two rows share a shifted pattern: a start and an odd stride
        kept = _mix((j + shifts[3]) * (high | 1) + low) >= min(round(self.rate * 2**32), 2**32 - 1) - 2**31
        return xp.astype(kept, dtype) * (1 / (1 - self.rate))


def _mix(x: Array) -> Array:
    """MurmurHash3's finaliser on signed 32-bit integers, whose right shift is arithmetic: the mask makes it logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def _splitmix(seed: int) -> int:
    """Steele, Lea and Flood's SplitMix64: one step from any integer."""
    z = (int(seed) + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _words(seed: int) -> tuple[int, int]:
    """64 bits as two signed 32-bit words."""
    return _signed(seed), _signed(seed >> 32)


def _signed(n: int) -> int:
    """The lowest 32 bits of any integer as a signed one."""
    return ((int(n) + 2**31) & 0xFFFFFFFF) - 2**31


class DropoutSaved(NamedTuple):
    """What `dropout_backward` needs: nothing but the rule itself."""

    dropout: Dropout | None


class DropoutGrads(NamedTuple):
    """Gradients of `dropout`."""

    dx: Array


def dropout(x: Array, /, dropout: Dropout | None) -> Array:
    """Drop elements of ``x`` and divide the others by ``1 - rate``; see `dropout_forward`."""
    return dropout_forward(x, dropout)[0]


def dropout_forward(x: Array, /, dropout: Dropout | None) -> tuple[Array, DropoutSaved]:
    """``out = x * kept / (1 - rate)``.

    Parameters
    ----------
    x : float array (..., C)
        Element c of row r (the leading axes flattened) is the element (0, 0, r, c) of `Dropout`.
    dropout : Dropout or None
        The rule; ``None`` keeps everything.

    Returns
    -------
    out : array (..., C)
        In x's dtype; shares no memory with x.
    saved : DropoutSaved
        Holds no array: the rule is replayed.

    Raises
    ------
    TypeError
        If x is not a floating array or dropout is no Dropout.
    ValueError
        If the rate is not in [0, 1).
    """
    checked = None if dropout is None else Dropout.checked(dropout, "dropout")
    return _apply("dropout", x, checked), DropoutSaved(checked)


def dropout_backward(dout: Array, saved: DropoutSaved, /) -> DropoutGrads:
    """``dx = dout * kept / (1 - rate)``: the same elements.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : DropoutSaved
        From `dropout_forward`.

    Returns
    -------
    DropoutGrads
        ``dx``.
    """
    return DropoutGrads(_apply("dropout_backward", dout, saved.dropout))


def _apply(op: str, x: Array, dropout: Dropout | None) -> Array:
    xp = array_namespace(op, x=x)
    dtype = float_dtype(op, x=x)
    if dropout is None or dropout.rate == 0:
        return xp.astype(x, dtype)
    columns = x.shape[-1] if x.ndim else 1
    rows = math.prod(x.shape[:-1])
    zero = xp.zeros((1, 1), dtype=xp.int32, device=array_device(x))
    i = xp.arange(rows, dtype=xp.int32, device=array_device(x))[:, None]
    j = xp.arange(columns, dtype=xp.int32, device=array_device(x))[None, :]
    compute = compute_dtype(dtype, xp=xp)
    factors = dropout.factors(zero, zero, i, j, xp=xp, dtype=compute)
    with np.errstate(all="ignore"):  # as rows: NumPy's product of 0-d arrays is a scalar, which NumPy 2.0 takes for no array
        dropped = xp.astype(xp.reshape(x, (rows, columns)), compute, copy=False) * factors
        return xp.reshape(xp.astype(dropped, dtype, copy=False), x.shape)
