"""BLAS held to one thread while the pool's threads work, and what it is good at."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias


class _Setting(NamedTuple):
    """How the thread count of a BLAS is read and changed."""

    get: Callable[[], int]
    set: Callable[[int], Any]


def _setting(controller: Any) -> _Setting:
    """OpenBLAS's own functions, or what threadpoolctl has for another BLAS.

    threadpoolctl's way to OpenBLAS takes ten times as long, and 3.8 listens only to the first thread that sets it.
    """
    if controller.internal_api == "openblas":
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64")):
            with contextlib.suppress(AttributeError):
                own = [getattr(controller.dynlib, f"{prefix}openblas_{verb}_num_threads{suffix}") for verb in ("get", "set")]
                return _Setting(*own)
    return _Setting(lambda: controller.num_threads, controller.set_num_threads)


@functools.cache
def _controllers() -> tuple[Any, ...]:
    """threadpoolctl's handles of every BLAS in the process."""
    from threadpoolctl import ThreadpoolController  # its search takes longer than the import

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


IN_PLACE = ("SkylakeX", "Cooperlake", "SapphireRapids")  # of OpenBLAS's kinds of CPUs those with AVX-512


@functools.cache
def multiplies_in_place() -> bool:
    """Whether BLAS has kernels for small products that copy neither matrix, see `npattn._arrays.block_products`."""
    found = _controllers()
    return bool(found) and all(c.internal_api == "openblas" and c.architecture in IN_PLACE for c in found)


Found: TypeAlias = list[tuple[_Setting, int]]  # what was changed, and the thread counts that go back there


class _BlasGuard:
    """BLAS on one thread while anybody is inside, as it was found once the last one has left.

    Most BLAS have one setting for the process, some (MKL, OpenBLAS on OpenMP) one for each calling thread: every thread that
    works comes in for itself.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.shared: list[_Setting] | None = None
        self.own: list[_Setting] = []
        self.found: Found = []

    def enter(self) -> Found:
        with self.lock:
            if self.shared is None:
                found = _controllers()
                own = [c for c in found if c.internal_api == "mkl" or getattr(c, "threading_layer", "") == "openmp"]
                self.own = [_Setting(lambda c=c: c.num_threads, c.set_num_threads) for c in own]  # type: ignore[misc]
                self.shared = [_setting(c) for c in found if c not in own]
            if self.inside == 0:
                self.found = _limit(self.shared)
            self.inside += 1
        return _limit(self.own)

    def leave(self, found: Found) -> None:
        _restore(found)
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                _restore(self.found)


def _limit(settings: list[_Setting]) -> Found:
    """One thread each; and what that changes."""
    found = [(setting, count) for setting in settings if (count := setting.get()) != 1]
    for setting, _ in found:
        setting.set(1)
    return found


def _restore(found: Found) -> None:
    for setting, count in found:
        setting.set(count)


_blas = _BlasGuard()


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread; calls may overlap in any order."""
    guard = _blas  # a child process has another
    found = guard.enter()
    try:
        yield
    finally:
        guard.leave(found)


def _after_fork() -> None:
    """A child may have been born inside a guard."""
    global _blas
    if _blas.inside:
        _restore(_blas.found)
    _blas = _BlasGuard()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
