"""A small pool of threads.

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
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from npattn._arrays.blas import one_blas_thread
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


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
