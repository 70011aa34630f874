"""Errors that teach: every message names the operation, the argument, what it must be in axis letters, and what it is.

``attention: k must have shape (..., S, D) with D = 6 as q has, got (2, 5, 7)``
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from npattn._arrays.namespace import Array, array_namespace, dtype_name


def shape_error(op: str, name: str, expected: str, shape: Sequence[int], hint: str = "") -> NoReturn:
    """Raise the one wording for a wrong shape."""
    raise ValueError(f"{op}: {name} must have shape {expected}, got {tuple(shape)}{'; ' + hint if hint else ''}")


def check_bool(
    op: str,
    name: str,
    array: Array,
    meaning: str = "a query may attend to a key",
    hint: str = "numbers that are added to the scores go to bias=",
) -> None:
    """A mask is boolean; numbers go elsewhere, and ``hint`` says where."""
    kind = dtype_name(array.dtype)
    if kind not in ("bool", "bool_"):
        raise TypeError(f"{op}: {name} must be boolean, True where {meaning}, got {kind}; {hint}")


def check_integer_array(op: str, name: str, array: Array) -> None:
    """Ids, lengths and targets are integers."""
    kind = dtype_name(array.dtype)
    if not kind.startswith(("int", "uint")):
        raise TypeError(f"{op}: {name} must have an integer dtype, got {kind}")


def check_broadcasts(op: str, name: str, shape: Sequence[int], target: Sequence[int], letters: str) -> None:
    """``shape`` must broadcast, right-aligned, to ``target`` without enlarging it."""
    fits = len(shape) <= len(target) and all(
        n in (1, m) for n, m in zip(reversed(tuple(shape)), reversed(tuple(target)), strict=False)
    )
    if not fits:
        raise ValueError(f"{op}: {name} must broadcast to {letters} = {tuple(target)}, got shape {tuple(shape)}")


def check_cotangent(op: str, name: str, array: Array, letters: str, shape: Sequence[int], dtype: Any) -> None:
    """A cotangent has the shape and the dtype of its result."""
    if tuple(array.shape) != tuple(shape):
        shape_error(op, name, f"{letters} = {tuple(shape)} as the result", array.shape)
    if dtype_name(array.dtype) != dtype_name(dtype):
        raise TypeError(f"{op}: {name} must be {dtype_name(dtype)} as the result, got {dtype_name(array.dtype)}")


def check_tangent(op: str, name: str, tangent: Array | None, x: Array | None) -> None:
    """A tangent has the shape and the dtype of its input, and lives where that does; ``None`` is 0."""
    if tangent is None:
        return
    if x is None:
        raise ValueError(f"{op}: t{name} is given, but there is no {name}")
    array_namespace(op, **{name: x, f"t{name}": tangent})
    if tuple(tangent.shape) != tuple(x.shape):
        shape_error(op, f"t{name}", f"{tuple(x.shape)} as {name} has", tangent.shape)
    if dtype_name(tangent.dtype) != dtype_name(x.dtype):
        raise TypeError(f"{op}: t{name} must be {dtype_name(x.dtype)} as {name} is, got {dtype_name(tangent.dtype)}")


def host_float(op: str, name: str, value: Any, *, positive: bool = False) -> float:
    """A host number as a Python float, so that it never changes an array's dtype.

    A Python or NumPy scalar, or a 0-d NumPy array.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise TypeError(f"{op}: {name} must be a number on the host, got {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{op}: {name} must be a {'positive ' if positive else ''}finite number, got {number}")
    return number


def host_int(op: str, name: str, value: Any, *, least: int | None = None) -> int:
    """A host integer: a Python or NumPy integer, or a 0-d NumPy integer array."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")
    return int(value)


def host_axis(op: str, value: Any, shape: Sequence[int]) -> int:
    """An axis of an array of this shape, counted from the front."""
    axis, rank = host_int(op, "axis", value), len(shape)
    if not -rank <= axis < rank:
        raise ValueError(f"{op}: axis must be one of the {rank} axes of x with shape {tuple(shape)}, got {axis}")
    return axis % rank
