"""Biases that are never written out: functions of the distance between key and query, made tile by tile.

Such a tile is a strip of T + S - 1 numbers, slid by one place a row; the gradient of the parameters needs a tile's dbiased only
summed along its diagonals, which is the same slide read backwards. Derivation: docs/derivation.md, "Biases".
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np

from npattn._arrays.checks import host_int, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, asarray, float_dtype
from npattn._attention.place import Place


class LazyBias:
    """A bias made of a head's parameters and the distance ``j - (i + offset)``; its gradient is that of its parameters.

    `alibi_bias` and `relative_bias` make one.
    """

    __slots__ = ("offset", "parameters")
    name = ""

    def __init__(self, parameters: Array, offset: int) -> None:
        self.parameters, self.offset = parameters, offset

    def __repr__(self) -> str:
        return f"{self.name}({tuple(self.parameters.shape)}{f', offset={self.offset}' if self.offset else ''})"

    def with_parameters(self, parameters: Array) -> LazyBias:
        """The same bias of other parameters: a bias is linear in them, so that their tangent makes the tangent of the bias."""
        other = copy.copy(self)
        other.parameters = parameters
        return other

    def check(self, op: str, heads: int) -> None:
        """Raise unless there is a parameter (or a column of them) for every head, or one for all."""
        if self.parameters.shape[-1] not in (1, heads):
            shape_error(op, f"the parameter of {self.name}", f"(..., H) with H = {heads}", self.parameters.shape)

    def tile(self, place: Place, xp: Namespace, dtype: Any) -> Array:
        """The tile's bias, (K, G, T, S)."""
        columns = xp.reshape(xp.astype(self.parameters, dtype), (-1, self.parameters.shape[-1]))  # (P, H)
        strip = place.per_head(xp.matrix_transpose(self.strip(self._distances(place), columns, xp)), xp)  # (K, G, 1, T + S - 1)
        return _slide(strip, place.queries.stop - place.queries.start, place.keys.stop - place.keys.start, xp)

    def strip(self, distances: np.ndarray[Any, Any], columns: Array, xp: Namespace) -> Array:
        """The bias of every distance and head, (distances, H), from the parameters (P, H)."""
        return self.basis(distances, columns, xp) @ columns

    def tile_gradient(self, dbiased: Array, place: Place, xp: Namespace) -> Array:
        """The tile's share of the parameters' gradient, (K, G, P), from its dbiased (..., K, G, T, S)."""
        diagonals = _diagonal_sums(dbiased, xp)
        if diagonals.ndim > 3:
            diagonals = xp.sum(diagonals, axis=tuple(range(diagonals.ndim - 3)))
        return diagonals @ self.basis(self._distances(place), diagonals, xp)

    def gradient(self, total: Array, xp: Namespace) -> Array:
        """The parameters' gradient in their own shape, from the sum of the tiles' shares over all heads, (H, P)."""
        if self.parameters.shape[-1] == 1:
            total = xp.sum(total, axis=0, keepdims=True)
        return xp.reshape(xp.matrix_transpose(total), self.parameters.shape)

    def basis(self, distances: np.ndarray[Any, Any], like: Array, xp: Namespace) -> Array:
        """How the bias at every distance depends on the parameters, which it is linear in: (distances, P)."""
        return asarray(self.host_basis(distances), xp=xp, dtype=like.dtype, device=array_device(like))

    def host_basis(self, distances: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """``basis`` as a NumPy array."""
        raise NotImplementedError

    def _distances(self, place: Place) -> np.ndarray[Any, Any]:
        """``j - (i + offset)`` along the strip: from the last query and first key to the first query and last key."""
        return np.arange(
            place.keys.start - (place.queries.stop - 1) - self.offset, place.keys.stop - place.queries.start - self.offset
        )


class _Alibi(LazyBias):
    __slots__ = ()
    name = "alibi_bias"

    def host_basis(self, distances: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        basis: np.ndarray[Any, Any] = -np.abs(distances)[:, None].astype(np.float64)
        return basis


class _Relative(LazyBias):
    __slots__ = ("bidirectional", "max_distance")
    name = "relative_bias"

    def __init__(self, table: Array, offset: int, *, bidirectional: bool, max_distance: int) -> None:
        super().__init__(table, offset)
        self.bidirectional, self.max_distance = bidirectional, max_distance

    def strip(self, distances: np.ndarray[Any, Any], columns: Array, xp: Namespace) -> Array:
        # a lookup, not basis @ columns: an entry of -inf hides its own distances only
        return xp.take(columns, asarray(self._buckets(distances), xp=xp, device=array_device(columns)), axis=0)

    def host_basis(self, distances: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        one_hot = self._buckets(distances)[:, None] == np.arange(self.parameters.shape[0])
        basis: np.ndarray[Any, Any] = one_hot.astype(np.float64)
        return basis

    def _buckets(self, distances: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return relative_buckets(
            distances, self.parameters.shape[0], bidirectional=self.bidirectional, max_distance=self.max_distance
        )


def alibi_bias(slopes: Array, *, offset: int = 0) -> LazyBias:
    """Linear bias: ``-slope * |j - (i + offset)|``, made tile by tile.

    Parameters
    ----------
    slopes : float array (H,) or (1,)
        One slope a head; in the paper 2^(-8/H), 2^(-16/H), …
    offset : int, optional
        Query i stands at position ``i + offset`` of the keys, as in `causal_mask`.

    Returns
    -------
    LazyBias
        For ``attention(…, bias=…)``. ``grads.dbias`` is the gradient of the slopes.

    Raises
    ------
    TypeError
        If the slopes are not a floating array.
    ValueError
        If the slopes are not one-dimensional.

    References
    ----------
    Press, Smith, Lewis: Train Short, Test Long (2022), section 3.
    """
    array_namespace("alibi_bias", slopes=slopes)
    float_dtype("alibi_bias", slopes=slopes)
    if slopes.ndim != 1:
        shape_error("alibi_bias", "slopes", "(H,)", slopes.shape)
    return _Alibi(slopes, host_int("alibi_bias", "offset", offset))


def relative_bias(table: Array, *, offset: int = 0, bidirectional: bool = True, max_distance: int = 128) -> LazyBias:
    """Learned bias of the distance: ``table[bucket(j - (i + offset)), h]``, with T5's buckets, made tile by tile.

    Near distances have a bucket each, far ones share buckets that widen logarithmically up to ``max_distance``.

    Parameters
    ----------
    table : float array (N, H) or (N, 1)
        N buckets for every head; the layout of T5's ``relative_attention_bias.weight``.
    offset : int, optional
        Query i stands at position ``i + offset`` of the keys, as in `causal_mask`.
    bidirectional : bool, optional
        Whether keys after the query have buckets of their own (encoders); else they share the bucket of distance 0.
    max_distance : int, optional
        Keys at this distance and beyond share the last bucket.

    Returns
    -------
    LazyBias
        For ``attention(…, bias=…)``. ``grads.dbias`` is the gradient of the table.

    Raises
    ------
    TypeError
        If the table is not a floating array.
    ValueError
        If the table is not two-dimensional, or has too few buckets for logarithmic ones.

    References
    ----------
    Raffel et al.: Exploring the Limits of Transfer Learning (2020), section 2.1.
    """
    array_namespace("relative_bias", table=table)
    float_dtype("relative_bias", table=table)
    least = 4 if bidirectional else 2
    if table.ndim != 2 or table.shape[0] < least or (bidirectional and table.shape[0] % 2):
        shape_error("relative_bias", "table", f"(N, H) with {'an even ' if bidirectional else ''}N >= {least}", table.shape)
    exact = table.shape[0] // (4 if bidirectional else 2)
    return _Relative(
        table,
        host_int("relative_bias", "offset", offset),
        bidirectional=bidirectional,
        max_distance=host_int("relative_bias", "max_distance", max_distance, least=exact + 1),
    )


def relative_buckets(
    distances: np.ndarray[Any, Any], count: int, *, bidirectional: bool, max_distance: int
) -> np.ndarray[Any, Any]:
    """T5's bucket of every distance ``j - i``."""
    if bidirectional:
        count //= 2
        first = np.where(distances > 0, count, 0)
        far = np.abs(distances)
    else:
        first = np.zeros_like(distances)
        far = np.maximum(-distances, 0)
    exact = count // 2
    growth = np.log(np.maximum(far, exact) / exact) / math.log(max_distance / exact)
    logarithmic = np.minimum(exact + (growth * (count - exact)).astype(distances.dtype), count - 1)
    buckets: np.ndarray[Any, Any] = first + np.where(far < exact, far, logarithmic)
    return buckets


def _slide(strip: Array, queries: int, keys: int, xp: Namespace) -> Array:
    """A strip (..., 1, T + S - 1) as rows that slide: row i, column j holds element ``j - i + T - 1``."""
    if queries == 1:
        return strip
    *outer, _, width = strip.shape
    # the strip repeated T times and read in rows one element shorter moves back by one element a row
    flat = xp.reshape(xp.broadcast_to(strip, (*outer, queries, width)), (*outer, queries * width))
    return xp.reshape(flat[..., queries - 1 : -1], (*outer, queries, width - 1))[..., :keys]


def _diagonal_sums(pairs: Array, xp: Namespace) -> Array:
    """The transpose of ``_slide``: (..., T, S) summed over each diagonal, (..., T + S - 1)."""
    *outer, queries, keys = pairs.shape
    width = queries + keys - 1
    zeros = xp.zeros((*outer, queries, queries), dtype=pairs.dtype, device=array_device(pairs))
    flat = xp.reshape(xp.concat([xp.flip(pairs, axis=-2), zeros], axis=-1), (*outer, queries * (width + 1)))
    return xp.sum(xp.reshape(flat[..., : queries * width], (*outer, queries, width)), axis=-2)
