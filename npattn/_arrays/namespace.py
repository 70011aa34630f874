"""Which array library is it, on which device, with which dtype: the only place that asks.

``array_namespace`` stands on the first line of every public function. It names the culprit when libraries are mixed, and it
answers for NumPy arrays without importing array_api_compat, whose first call costs 0.1 s.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # an array of any library that follows the array API standard
Namespace: TypeAlias = Any  # the module with that library's functions

FLOATS = ("float16", "bfloat16", "float32", "float64")
HALVES = ("float16", "bfloat16")  # computed in float32


def array_namespace(op: str, /, **arrays: Array | None) -> Namespace:
    """The library that all the given arrays belong to (``None`` is passed over).

    Raises
    ------
    TypeError
        If something is not an array, or the arrays come from two libraries, or from two devices.
    """
    for array in arrays.values():
        if type(array) is not np.ndarray and array is not None:
            return _foreign_namespace(op, {name: a for name, a in arrays.items() if a is not None})
    return np


def _foreign_namespace(op: str, arrays: dict[str, Array]) -> Namespace:
    namespaces = {name: _namespace_of(op, name, array) for name, array in arrays.items()}
    first, xp = next(iter(namespaces.items()))
    for name, other in namespaces.items():
        if other is not xp:
            raise TypeError(
                f"{op}: {first} is an array of {library_name(xp)} but {name} is one of {library_name(other)}; "
                f"all arrays of a call must come from one library"
            )
    devices = {name: array_device(array) for name, array in arrays.items()}
    known = [(name, device) for name, device in devices.items() if device is not None]
    for name, device in known[1:]:
        if device != known[0][1]:
            raise TypeError(
                f"{op}: {known[0][0]} is on device {known[0][1]} but {name} is on device {device}; "
                f"move all arrays of a call to one device"
            )
    return xp


def _namespace_of(op: str, name: str, array: Array) -> Namespace:
    if isinstance(array, np.ndarray):
        if type(array).__name__ in ("matrix", "MaskedArray"):
            raise TypeError(
                f"{op}: {name} is a numpy {type(array).__name__}, whose operators do not follow the array API; "
                f"pass a plain array (and give a masked array's mask as mask=)"
            )
        return np
    from array_api_compat import array_namespace as namespace_of

    try:
        if isinstance(array, np.generic):  # NumPy's scalars: array_api_compat takes them for arrays of another NumPy
            raise TypeError
        return namespace_of(array)
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be an array (NumPy, CuPy, PyTorch, JAX or another library that follows the array API), "
            f"got {type(array).__module__}.{type(array).__qualname__}"
        ) from None


def library_name(xp: Namespace) -> str:
    """The library's everyday name, for messages, such as ``numpy`` or ``torch``."""
    parts: list[str] = xp.__name__.split(".")
    return parts[1] if parts[0] == "array_api_compat" and len(parts) > 1 else parts[0]


def array_device(array: Array) -> Any:
    """The device that holds an array; ``None`` for NumPy, and inside ``jax.jit``, where there is none to ask."""
    if isinstance(array, np.ndarray):
        return None
    from array_api_compat import device

    return device(array)


def dtype_name(dtype: Any) -> str:
    """``float32`` for any library's float32, and for NumPy's in either byte order."""
    if isinstance(dtype, np.dtype):
        return _COMMON.get(dtype) or dtype.name
    return str(dtype).rpartition(".")[2].removesuffix("'>")  # JAX's xp.float32 is a class


_COMMON = {np.dtype(name): name for name in ("float32", "float64", "float16", "bool")}  # dtype.name costs 2 µs


def float_dtype(op: str, /, **arrays: Array | None) -> Any:
    """The one floating dtype that all the given arrays have (``None`` is passed over), in native byte order.

    Raises
    ------
    TypeError
        If an array is not float16, bfloat16, float32 or float64, or two arrays differ.
    """
    first = found = None
    for name, array in arrays.items():
        if array is None:
            continue
        dtype = array.dtype
        if dtype is found:
            continue
        kind = dtype_name(dtype)
        if kind not in FLOATS:
            raise TypeError(f"{op}: {name} must have a floating dtype ({', '.join(FLOATS)}), got {kind}")
        if found is None:
            first, found = name, dtype
        elif kind != dtype_name(found):
            raise TypeError(
                f"{op}: {first} is {dtype_name(found)} but {name} is {kind}; all float arrays of a call must share one dtype"
            )
    return found.newbyteorder("=") if isinstance(found, np.dtype) and not found.isnative else found


def float_namespace(op: str, arrays: dict[str, Array | None]) -> tuple[Namespace, Any]:
    """`array_namespace` and `float_dtype` of the same arrays, in one look at each if NumPy's all have the same dtype."""
    first = next(iter(arrays.values()))
    if type(first) is np.ndarray and first.dtype in _NATIVE:
        dtype = first.dtype
        for array in arrays.values():
            if array is not None and (type(array) is not np.ndarray or array.dtype is not dtype):
                break
        else:
            return np, dtype
    return array_namespace(op, **arrays), float_dtype(op, **arrays)


_FLOAT32 = np.dtype("float32")
_NATIVE = frozenset(np.dtype(name) for name in ("float16", "float32", "float64"))


def compute_dtype(dtype: Any, *, xp: Namespace) -> Any:
    """The dtype that a result of ``dtype`` is computed in: float32 for the two halves, else itself."""
    if xp is np:
        return _FLOAT32 if dtype.itemsize == 2 else dtype
    return xp.float32 if dtype_name(dtype) in HALVES else dtype


def rounded(x: Array, dtype: Any, *, xp: Namespace) -> Array:
    """``x`` in ``dtype``, itself if it has it; what is too large there becomes infinite without a warning."""
    if x.dtype == dtype:
        return x
    with np.errstate(all="ignore"):
        return xp.astype(x, dtype)


def asarray(values: Any, *, xp: Namespace, dtype: Any = None, device: Any = None) -> Array:
    """``xp.asarray`` that reaches the device, with NumPy's none left out."""
    return np.asarray(values, dtype=dtype) if xp is np else xp.asarray(values, dtype=dtype, device=device)
