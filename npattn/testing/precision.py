"""What a float type is good for, by name: NumPy's, and two that NumPy does not have, bfloat16 and TF32."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class FloatInfo(NamedTuple):
    """The fields of ``numpy.finfo`` that bounds are made of."""

    name: str
    eps: float
    smallest_normal: float
    smallest_subnormal: float
    max: float


_OTHERS = {
    "bfloat16": FloatInfo("bfloat16", 2.0**-7, 2.0**-126, 2.0**-133, (2 - 2.0**-7) * 2.0**127),
    "tf32": FloatInfo("tf32", 2.0**-10, 2.0**-126, 2.0**-136, (2 - 2.0**-10) * 2.0**127),
}
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16")


def float_info(dtype: Any) -> FloatInfo:
    """The properties of a float type.

    Parameters
    ----------
    dtype : dtype or str
        A NumPy dtype or a name of ``PRECISIONS``.

    Returns
    -------
    FloatInfo
        As Python numbers.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).newbyteorder("=").name
    if name in _OTHERS:
        return _OTHERS[name]
    info = np.finfo(name)
    return FloatInfo(name, float(info.eps), float(info.smallest_normal), float(info.smallest_subnormal), float(info.max))


def coarsest(*names: str | None) -> str:
    """Of several precisions, the one with the largest eps."""
    return max((name for name in names if name is not None), key=lambda name: float_info(name).eps)


def to_bfloat16(x: Any) -> Any:
    """The nearest numbers that bfloat16 has, ties to even, as a float32 array.

    Parameters
    ----------
    x : array_like
        Of any float dtype.

    Returns
    -------
    numpy.ndarray
        In float32.

    Examples
    --------
    >>> to_bfloat16([1.001, 1 / 3]).tolist()
    [1.0, 0.333984375]
    """
    with np.errstate(over="ignore"):
        x = np.array(x, dtype=np.float32, order="C")
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(x), x, rounded)
