"""Where npattn is measured, NumPy on a CPU or CuPy on a GPU: arrays, waiting for the device, memory."""

from __future__ import annotations

import importlib
import tracemalloc
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._attention.memory import drop_spare_memory
from npattn.testing.libraries import Unavailable, open_library

Call = Callable[[], tuple[Array, ...]]  # one run of a pass: (out,) or (out, dq, dk, dv)


class Backend(Protocol):
    """An array library on its device."""

    name: str

    @property
    def xp(self) -> Namespace:
        """The library."""

    def dtype(self, name: str) -> Any:
        """The library's dtype of this name; ``ValueError`` if it has none."""

    def array(self, values: Array, dtype: str) -> Array:
        """A NumPy array on the device."""

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""

    def extra_memory(self, call: Call) -> int:
        """The most bytes that a call holds at a time, without its results."""

    def device(self) -> str | None:
        """The name of the device, if it is not the CPU."""


class NumPyBackend:
    """NumPy on the CPU."""

    name = "numpy"
    xp: Namespace = np

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            raise ValueError("NumPy has no bfloat16; --dtype bfloat16 needs --backend cupy")
        return np.dtype(name)

    def array(self, values: Array, dtype: str) -> Array:
        return values.astype(self.dtype(dtype), copy=False)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def extra_memory(self, call: Call) -> int:
        drop_spare_memory()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            results = call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return max(int(peak - before - sum(x.nbytes for x in results)), 0)

    def device(self) -> str | None:
        return None


class CuPyBackend:  # cupy only
    """CuPy on the current GPU."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self.xp = cupy

    def dtype(self, name: str) -> Any:
        if name != "bfloat16":
            return np.dtype(name)
        try:
            dtype = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
            self.xp.zeros(1, dtype=dtype)
        except (ImportError, TypeError, ValueError):
            raise ValueError("--dtype bfloat16 needs ml_dtypes and CuPy 14 or newer") from None
        return dtype

    def array(self, values: Array, dtype: str) -> Array:
        return self.xp.asarray(values).astype(self.dtype(dtype), copy=False)

    def synchronize(self) -> None:
        self.xp.cuda.Device().synchronize()

    def extra_memory(self, call: Call) -> int:
        """By how much the pool grows: it keeps what it once had."""
        pool = self.xp.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        results = call()
        self.synchronize()
        return max(int(pool.total_bytes() - before - sum(x.nbytes for x in results)), 0)

    def device(self) -> str | None:
        properties = self.xp.cuda.runtime.getDeviceProperties(self.xp.cuda.Device().id)
        return str(properties["name"].decode())


def open_backend(name: str) -> Backend:
    """The backend of this name; ``ValueError`` if the machine does not have it."""
    if name == "numpy":
        return NumPyBackend()
    try:
        open_library("cupy")
    except (Unavailable, ImportError) as reason:
        raise ValueError(f"--backend cupy: {str(reason).strip().splitlines()[0]}") from None
    return CuPyBackend(importlib.import_module("cupy"))  # cupy only
