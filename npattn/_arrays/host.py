"""From any library and device to the host, for what is printed, drawn or compared: never on a path that computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._arrays.namespace import Array, dtype_name


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """A new NumPy array with an array's numbers; bfloat16, which NumPy does not have, becomes float32.

    Parameters
    ----------
    array : array
        Of any of the libraries, on any device, with or without PyTorch's autograd.

    Returns
    -------
    numpy.ndarray
        It shares no memory with ``array``.

    Examples
    --------
    >>> to_numpy(np.asarray([1.0, 2.0]))
    array([1., 2.])
    """
    library = type(array).__module__.partition(".")[0]
    if library == "cupy":
        return np.array(array.get())  # cupy only
    if library == "torch":
        array = array.detach().cpu()
        array = (array.float() if dtype_name(array.dtype) == "bfloat16" else array).numpy()
    elif library == "array_api_strict":
        # from any of its devices; a copy, since NumPy 2.0 hands out nothing that is read-only
        array = np.from_dlpack(array.__array_namespace__().asarray(array, copy=True))
    elif dtype_name(array.dtype) == "bfloat16":
        array = array.astype("float32")
    return np.array(array)
