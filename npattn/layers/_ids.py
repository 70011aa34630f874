"""Integers that pick rows: the ids of an embedding, the targets of a loss.

Python and NumPy integers are host data: allowed beside any library, and checked against the range. Arrays on a device are never
read back, so their range is the caller's word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._arrays.checks import check_integer_array
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, asarray


def as_ids(op: str, name: str, ids: Any) -> Array:
    """Host data as a NumPy array; an array of another library as it is."""
    if isinstance(ids, (int, np.integer, list, tuple)) and not isinstance(ids, bool):
        ids = np.asarray(ids) if np.size(ids) else np.zeros(np.shape(ids), dtype=np.int64)
    array_namespace(op, **{name: ids})
    check_integer_array(op, name, ids)
    return ids


def foreign(ids: Array) -> Array | None:
    """``ids`` if they must belong to the problem's library; None for host data, which need not."""
    return None if isinstance(ids, np.ndarray) else ids


def check_range(op: str, name: str, ids: Array, count: int, letter: str, *, ignored: int | None = None) -> None:
    """Host ids are at least 0 and less than ``count``, or the ``ignored`` one."""
    if not isinstance(ids, np.ndarray) or ids.size == 0:
        return
    wrong = (ids < 0) | (ids >= count)
    if ignored is not None:
        wrong &= ids != ignored
    if wrong.any():
        allowed = "" if ignored is None else f", or ignore_index = {ignored}"
        where = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise ValueError(
            f"{op}: {name} must be at least 0 and less than {letter} = {count}{allowed}, got {int(ids[where])}"
            f"{f' at {list(where)}' if where else ''}"
        )


def beside(ids: Array, like: Array, *, xp: Namespace) -> Array:
    """``ids`` in the library and on the device of ``like``, in the integers that the library indexes with."""
    integer = xp.asarray(0).dtype  # int64; int32 in a JAX without 64-bit dtypes
    if isinstance(ids, np.ndarray):
        return asarray(ids.astype(np.int64, copy=False), xp=xp, dtype=integer, device=array_device(like))
    return xp.astype(ids, integer, copy=False)
