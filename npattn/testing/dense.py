"""Lazy masks and biases written out by their definitions, pair by pair: what the tiles of the package are held against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention import biases, mask_kinds, masks

# the kinds of masks, by which code here tells them apart
Band, Lengths, Segments = mask_kinds._Band, mask_kinds._Lengths, mask_kinds._Segments
ArrayMask, Both, Either, Inverse = masks._ArrayMask, masks._Both, masks._Either, masks._Inverse


def dense_mask(mask: Any, lead: tuple[int, ...], H: int, T: int, S: int) -> Array | None:
    """Which query may attend to which key, (..., H, T, S); ``None`` for no mask.

    Parameters
    ----------
    mask : Mask, bool array or None
        As ``npattn.attention`` takes it.
    lead : tuple of int
        The leading axes of the problem.
    H, T, S : int
        Query heads, queries, keys.

    Returns
    -------
    bool array or None
        True where a query may attend.
    """
    if mask is None:
        return None
    if isinstance(mask, np.ndarray):
        return np.array(np.broadcast_to(mask, (*lead, H, T, S)))
    dense = np.zeros((*lead, H, T, S), dtype=bool)
    for index in np.ndindex(*dense.shape):
        dense[index] = sees(mask, index, T, S)
    return dense


def sees(mask: Any, index: tuple[int, ...], T: int, S: int) -> bool:
    """Whether query i of (leading index, head) may attend to key j; ``index`` is (..., h, i, j)."""
    *lead, _, i, j = index
    match mask:
        case Band(left=left, right=right, offset=offset):
            centre = i + (S - T if offset is None else int(_at(offset, lead)))
            return (left is None or j >= centre - left) and (right is None or j <= centre + right)
        case Lengths(keys=keys, queries=queries):
            return bool(j < _at(keys, lead) and (queries is None or i < _at(queries, lead)))
        case Segments(queries=queries, keys=keys):
            return bool(_at(queries, (*lead, i)) == _at(keys, (*lead, j)))
        case ArrayMask(array=array):
            return bool(_at(array, index))
        case Either(left=left, right=right):
            return sees(left, index, T, S) or sees(right, index, T, S)
        case Both(left=left, right=right):
            return sees(left, index, T, S) and sees(right, index, T, S)
        case Inverse(inner=inner):
            return not sees(inner, index, T, S)
    return bool(_at(np.asarray(mask), index))


def _at(array: Any, index: Any) -> Any:
    """The element of an array that broadcasts, right-aligned, to where ``index`` points."""
    own = tuple(index)[len(index) - array.ndim :]
    return array[tuple(0 if n == 1 else i for i, n in zip(own, array.shape, strict=True))]


def dense_bias(bias: Any, H: int, T: int, S: int) -> Array | None:
    """The bias as an array that broadcasts to (..., H, T, S), in float64; a lazy one becomes (H, T, S).

    Parameters
    ----------
    bias : array, LazyBias or None
        As ``npattn.attention`` takes it, of NumPy arrays.
    H, T, S : int
        Query heads, queries, keys.

    Returns
    -------
    array or None
        What is added to the scores.
    """
    if not isinstance(bias, biases.LazyBias):
        return None if bias is None else np.asarray(bias, dtype=np.float64)
    dense = np.zeros((H, T, S))
    for (h, i, j), parameter, factor in _lazy_terms(bias, H, T, S):
        dense[h, i, j] = factor * float(bias.parameters[parameter])
    return dense


def lazy_bias_gradient(bias: Any, dbiased: Array) -> Array:
    """The gradient of a lazy bias's parameters, in their shape, from dbiased (..., H, T, S)."""
    pairs = dbiased.sum(axis=tuple(range(dbiased.ndim - 3))) if dbiased.ndim > 2 else dbiased[None]
    total = np.zeros(bias.parameters.shape, dtype=dbiased.dtype)
    for (h, i, j), parameter, factor in _lazy_terms(bias, *pairs.shape):
        total[parameter] += factor * pairs[h, i, j]
    return total


def lazy_bias_scale(bias: Any, size: Array) -> Array:
    """`lazy_bias_gradient` of absolute values."""
    pairs = size.sum(axis=tuple(range(size.ndim - 3))) if size.ndim > 2 else size[None]
    total = np.zeros(bias.parameters.shape, dtype=size.dtype)
    for (h, i, j), parameter, factor in _lazy_terms(bias, *pairs.shape):
        total[parameter] += abs(factor) * pairs[h, i, j]
    return total


def _lazy_terms(bias: Any, H: int, T: int, S: int) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...], float]]:
    """For every pair of every head: which parameter its bias is a multiple of, and which multiple."""
    for h, i, j in np.ndindex(H, T, S):
        head = h if bias.parameters.shape[-1] > 1 else 0
        distance = j - (i + bias.offset)
        if isinstance(bias, biases._Alibi):
            yield (h, i, j), (head,), -float(abs(distance))
        else:
            bucket = t5_bucket(distance, bias.parameters.shape[0], bias.bidirectional, bias.max_distance)
            yield (h, i, j), (bucket, head), 1.0


def t5_bucket(distance: int, count: int, bidirectional: bool, max_distance: int) -> int:
    """T5's bucket of a distance j - i, in whole numbers throughout.

    Below ``exact`` every distance has a bucket of its own; above, bucket exact + m begins where
    (distance / exact) ^ (count - exact) reaches (max_distance / exact) ^ m.
    """
    first = 0
    if bidirectional:
        count //= 2
        first = count if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    spread, m = count - exact, 0
    while m < spread - 1 and distance**spread * exact ** (m + 1) >= max_distance ** (m + 1) * exact**spread:
        m += 1
    return first + exact + m
