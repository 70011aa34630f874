"""The array libraries that tests run on, and the way in and out of them.

A library is known by a name: ``numpy``, ``strict`` (array-api-strict), ``strict-bare`` (the same with its optional features off),
``strict-device1`` (the same on a device that is not the default), ``torch``, ``jax``, ``cupy``.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.host import to_numpy as to_numpy  # noqa: PLC0414 - passed on
from npattn._arrays.namespace import Array, Namespace

NAMES = ("numpy", "strict", "strict-bare", "strict-device1", "torch", "jax", "cupy")


class Library(NamedTuple):
    """An array library as a test uses it: ``xp`` is what npattn takes its arrays to belong to."""

    name: str
    xp: Namespace
    device: Any = None

    def has(self, dtype: str) -> bool:
        """Whether the library knows a dtype of this name."""
        return hasattr(self.xp, dtype)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, ``strict-bare`` has its optional features off; they are a setting of the whole process."""
        if self.name != "strict-bare":
            yield
            return
        with self.xp.ArrayAPIStrictFlags(boolean_indexing=False, data_dependent_shapes=False, enabled_extensions=()):
            yield


class Unavailable(Exception):
    """Raised for a library that this machine does not have; the message says why."""


def open_library(name: str) -> Library:
    """The library of this name.

    Parameters
    ----------
    name : str
        One of ``NAMES``. Opening ``jax`` switches its 64-bit dtypes on for the whole process: without them there is nothing to
        compare with.

    Returns
    -------
    Library
        With its namespace and the device that tests put arrays on (None: the default).

    Raises
    ------
    Unavailable
        If the library is not installed, or there is no GPU for it.
    ValueError
        If there is no such name.

    Examples
    --------
    >>> open_library("numpy").xp.__name__
    'numpy'
    """
    if name not in NAMES:
        raise ValueError(f"open_library: name must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "numpy":
        return Library(name, np)
    if name.startswith("strict"):
        xp = _import("array_api_strict")
        return Library(name, xp, xp.Device("device1") if name == "strict-device1" else None)
    if name == "jax":
        _import("jax").config.update("jax_enable_x64", True)
        return Library(name, _import("jax.numpy"))
    module = _import(name)
    if name == "cupy":
        _require_gpu(module)
    return Library(name, _import(f"array_api_compat.{name}"))


def available_libraries() -> dict[str, Library | str]:
    """Every name with its library, or with the reason why it is not there.

    Returns
    -------
    dict
        In the order of ``NAMES``.

    Examples
    --------
    >>> available_libraries()["numpy"].name
    'numpy'
    """
    found: dict[str, Library | str] = {}
    for name in NAMES:
        try:
            found[name] = open_library(name)
        except Unavailable as reason:
            found[name] = str(reason)
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is not installed") from None


def _require_gpu(cupy: Any) -> None:  # cupy only
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise Unavailable(f"cupy finds no GPU: {error}") from None
    if not count:
        raise Unavailable("cupy finds no GPU")


def asarray(values: Any, library: Library, *, dtype: str | None = None) -> Array:
    """A new array of the library, on its device, from a NumPy array or nested lists.

    Parameters
    ----------
    values : array_like
        What NumPy makes an array of.
    library : Library
        Where to.
    dtype : str, optional
        The name of a dtype, ``bfloat16`` among them; that of ``values`` by default.

    Returns
    -------
    array
        It shares no memory with ``values``.

    Examples
    --------
    >>> asarray([1, 2], open_library("numpy"), dtype="float32")
    array([1., 2.], dtype=float32)
    """
    own = np.array(values, order="C")  # PyTorch knows no negative strides and warns of read-only memory
    array = library.xp.asarray(own.astype(own.dtype.newbyteorder("="), copy=False), **_on(library))
    return array if dtype is None else library.xp.astype(array, getattr(library.xp, dtype))


def _on(library: Library) -> dict[str, Any]:
    return {} if library.device is None else {"device": library.device}
