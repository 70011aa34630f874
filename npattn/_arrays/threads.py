"""A small pool of threads, and BLAS held to one thread while they work.

NumPy releases Python's lock inside its loops, so tiles run side by side. ``run`` hands the jobs of one call to the pool and
works along; which thread does which job changes no bit, since jobs share no memory that they write to. The thread count is
the package's only global setting.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from npattn._arrays.checks import host_int

Job = TypeVar("Job")

_requested: int | None = None


def set_num_threads(count: int | None) -> None:
    """Set how many threads a call may use; ``None`` goes back to the default.

    The default is the environment variable ``NPATTN_NUM_THREADS``, else the number of CPUs that this process may use.
    Results do not depend on it: the same bits come out of one thread and of many.

    Parameters
    ----------
    count : int or None
        At least 1.

    Raises
    ------
    TypeError
        If ``count`` is not an integer.
    ValueError
        If ``count`` is less than 1.

    Examples
    --------
    >>> set_num_threads(1)
    >>> get_num_threads()
    1
    >>> set_num_threads(None)
    """
    global _requested
    _requested = None if count is None else host_int("set_num_threads", "count", count, least=1)


def get_num_threads() -> int:
    """How many threads a call may use.

    Returns
    -------
    int
        What `set_num_threads` was given, else the environment variable ``NPATTN_NUM_THREADS``, else the number of CPUs
        that this process may use.

    Raises
    ------
    ValueError
        If ``NPATTN_NUM_THREADS`` is not a positive integer.
    """
    if _requested is not None:
        return _requested
    text = os.environ.get("NPATTN_NUM_THREADS", "").strip()
    if not text:
        return _usable_cpus()
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"NPATTN_NUM_THREADS must be a positive integer, got {text!r}")
    return int(text)


QUOTA = "/sys/fs/cgroup/cpu.max"  # of the control group, on Linux


def _usable_cpus() -> int:
    """The CPUs of this process's affinity mask, within its control group's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open(QUOTA, encoding="ascii") as file:  # noqa: PTH123 - pathlib costs a tenth of the import
        quota, period = file.read().split()
        cpus = min(cpus, math.ceil(int(quota) / int(period)))  # "max" is no number: no quota
    return max(cpus, 1)


class Cancelled(BaseException):
    """Raised inside a worker whose call has failed or been interrupted elsewhere; never reaches a caller."""


Worker: TypeAlias = Callable[[Callable[[], None]], Callable[[Job], None]]


class _Call:
    """The jobs of one ``run``, taken one at a time by whoever is free."""

    def __init__(self, worker: Worker[Any], jobs: Sequence[Any]) -> None:
        self.worker = worker
        self.jobs = jobs
        self.next_index = itertools.count()  # next() on it is atomic
        self.cancelled = False
        self.error: BaseException | None = None
        self.active = 0
        self.changed = threading.Condition()

    def check(self) -> None:
        """What a job calls between its tiles, so that an interrupt stops promptly."""
        if self.cancelled:
            raise Cancelled

    def take_jobs(self) -> None:
        work = None
        while not self.cancelled and (index := next(self.next_index)) < len(self.jobs):
            work = work or self.worker(self.check)
            work(self.jobs[index])

    def help_out(self) -> None:
        """A pool thread's share. What goes wrong is kept for the caller."""
        with self.changed:
            if self.cancelled:
                return
            self.active += 1
        try:
            with one_blas_thread(), np.errstate(all="ignore"):
                self.take_jobs()
        except Cancelled:
            pass
        except BaseException as error:
            self.error = self.error or error
            self.cancelled = True
        finally:
            with self.changed:
                self.active -= 1
                self.changed.notify_all()

    def wait(self) -> None:
        """Until no pool thread works on this call any more: they write to the caller's arrays."""
        with self.changed:
            self.changed.wait_for(lambda: self.active == 0)


class _Pool:
    """Daemon threads that are started when first needed and live as long as the process."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.size = 0

    def grow(self, size: int) -> bool:
        """Have ``size`` threads; False where threads cannot start (the browser's Python)."""
        with self.lock:
            while self.size < size:
                try:
                    threading.Thread(target=self._serve, name=f"npattn-{self.size}", daemon=True).start()
                except RuntimeError:
                    return self.size > 0
                self.size += 1
        return True

    def _serve(self) -> None:
        while True:
            self.calls.get().help_out()


_pool = _Pool()


def run(worker: Worker[Job], jobs: Sequence[Job], *, threads: int) -> None:
    """Do every job on up to ``threads`` threads, this one among them.

    Every thread calls ``worker(check)`` once, for a function that does a job with memory of its own. ``check`` is for a long job
    to call now and then: it ends the job when another one has failed or the user interrupts. The first exception reaches the
    caller as it was raised, after every thread has stopped writing. Jobs run without floating-point warnings.
    """
    with np.errstate(all="ignore"):
        _run(worker, jobs, threads)


def _run(worker: Worker[Job], jobs: Sequence[Job], threads: int) -> None:
    helpers = min(threads, len(jobs)) - 1
    if helpers < 1 or not _pool.grow(helpers):
        work = worker(_never)
        for job in jobs:
            work(job)
        return
    call = _Call(worker, jobs)
    for _ in range(helpers):
        _pool.calls.put(call)
    try:
        call.take_jobs()
        call.wait()
    except Cancelled:
        pass
    finally:  # an error here or an interrupt: stop the others first, and let no second interrupt cut that short
        call.cancelled = True
        while call.active:
            with contextlib.suppress(KeyboardInterrupt):
                call.wait()
        del call.worker, call.jobs  # a helper that has yet to wake up or to leave holds the call, and must not hold their memory
    if call.error is not None:
        raise call.error


def _never() -> None:
    """The check of a serial run: there is nobody else to wait for."""


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
                from threadpoolctl import ThreadpoolController

                found = ThreadpoolController().select(user_api="blas").lib_controllers
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
    """A child has none of its parent's threads, and may have been born inside a guard."""
    global _pool, _blas
    _pool = _Pool()
    if _blas.inside:
        _restore(_blas.found)
    _blas = _BlasGuard()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
