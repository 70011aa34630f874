"""The pool of threads."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from npattn import get_num_threads, set_num_threads
from npattn._arrays import threads
from npattn._arrays.blas import one_blas_thread
from tests.arrays.meeting import LONG, Meeting, blas_threads

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has neither fork nor signals to a thread")


def until_cancelled(check):
    """A long job that looks up now and then."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        check()
        time.sleep(0.001)
    raise AssertionError("nobody has ended this job")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_threads_work_at_the_same_time(count):
    meeting = Meeting(count)
    threads.run(meeting.worker, range(count), threads=count)
    assert sorted(meeting.done) == list(range(count))
    assert len(set(meeting.workers)) == count
    assert threading.current_thread() in meeting.workers


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("jobs", [0, 1, 3, 100])
def test_every_job_is_done_once_and_a_thread_has_one_worker(count, jobs):
    done, workers = [], []

    def worker(check):
        workers.append(threading.current_thread())
        return done.append

    threads.run(worker, range(jobs), threads=count)
    assert sorted(done) == list(range(jobs))
    assert len(workers) == len(set(workers)) <= max(min(count, jobs), 1)


@pytest.mark.parametrize("error", [ValueError("seven"), MemoryError(), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("from_caller", [True, False])
def test_an_exception_arrives_whole_and_stops_the_others(error, from_caller):
    barrier = threading.Barrier(3, timeout=LONG)
    working = []

    def worker(check):
        def work(job):
            working.append(job)
            barrier.wait()
            try:
                here = threading.current_thread() is threading.main_thread()
                if here == from_caller and (from_caller or first.acquire(blocking=False)):
                    raise error
                until_cancelled(check)
            finally:
                working.remove(job)

        return work

    first = threading.Semaphore()
    with pytest.raises(type(error)) as caught:
        threads.run(worker, range(50), threads=3)
    assert caught.value is error
    assert [entry.name for entry in caught.traceback][-1] == "work"
    assert working == []


def test_an_error_while_a_worker_is_made():
    def worker(check):
        raise ValueError("no worker")

    with pytest.raises(ValueError, match="no worker"):
        threads.run(worker, range(4), threads=2)


def test_runs_inside_runs_and_side_by_side():
    """More callers than threads: nobody waits for a thread that waits for him."""
    sums = {}

    def inner(job):
        found = []
        threads.run(lambda check: found.append, range(job), threads=4)
        sums[job] = sum(found)

    threads.run(lambda check: inner, range(2, 30), threads=4)
    assert sums == {n: n * (n - 1) // 2 for n in range(2, 30)}


def test_serial_where_threads_cannot_start(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_pool", threads._Pool())
    monkeypatch.setattr(threading.Thread, "start", start)
    done = []
    threads.run(lambda check: lambda job: (check(), done.append((job, threading.current_thread()))), range(5), threads=4)
    assert done == [(n, threading.main_thread()) for n in range(5)]
    assert threads._pool.calls.empty()  # or it would hold the arrays of every call for ever


def test_fewer_threads_where_no_more_can_start(monkeypatch):
    start, started = threading.Thread.start, []

    def start_two(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threads, "_pool", threads._Pool())
    monkeypatch.setattr(threading.Thread, "start", start_two)
    meeting = Meeting(3)
    threads.run(meeting.worker, range(3), threads=8)
    assert set(meeting.workers) == {threading.main_thread(), *started}


# An interrupt ----------------------------------------------------------------------------------------------------------------


def interrupt_after(*delays):
    """Ctrl-C, once after each delay."""

    def send():
        for delay in delays:
            time.sleep(delay)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    return sender


@posix
@pytest.mark.parametrize("caller", ["works", "waits"])
@pytest.mark.parametrize("delays", [(0.1,), (0.1, 0.2)], ids=["once", "twice"])
def test_an_interrupt_stops_promptly(two_blas_threads, caller, delays):
    barrier = threading.Barrier(2, timeout=LONG)
    working = []

    def worker(check):
        def work(job):
            working.append(job)
            barrier.wait()
            try:
                if threading.current_thread() is not threading.main_thread():
                    time.sleep(0.6)  # deaf for a while: the caller must wait until it has stopped writing
                    until_cancelled(check)
                elif caller == "works":
                    until_cancelled(check)
            finally:
                working.remove(job)

        return work

    start = time.monotonic()
    sender = interrupt_after(*delays)
    with pytest.raises(KeyboardInterrupt), one_blas_thread():
        threads.run(worker, range(2), threads=2)
    assert time.monotonic() - start < LONG / 4
    assert working == []
    assert set(blas_threads()) == {2}
    sender.join()
    meeting = Meeting(2)
    threads.run(meeting.worker, range(2), threads=2)  # the pool is as good as new
    assert sorted(meeting.done) == [0, 1]


class Thing:
    """Something to be held."""


def test_a_helper_that_wakes_up_too_late_holds_nothing_and_does_nothing(monkeypatch):
    pool, done = threads._Pool(), []
    monkeypatch.setattr(pool, "grow", lambda size: True)  # its helpers are all asleep
    monkeypatch.setattr(threads, "_pool", pool)
    thing = Thing()
    held = weakref.ref(thing)
    threads.run(lambda check, thing=thing: lambda job: done.append((job, thing is held())), range(2), threads=2)
    assert done == [(0, True), (1, True)]
    del thing
    assert held() is None
    pool.calls.get_nowait().help_out()
    assert len(done) == 2


# A fork ----------------------------------------------------------------------------------------------------------------------

FORK = """
import os, threading, warnings
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits
import npattn
from npattn._arrays import threads
from npattn._arrays.blas import one_blas_thread

warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads: this is what is tested
x = np.random.default_rng(0).standard_normal((4, 400, 64))
npattn.set_num_threads(3)
limits = threadpool_limits(2, user_api="blas")
expected = npattn.attention(x, x, x)
assert threads._pool.size == 2, threads._pool.size
with one_blas_thread():
    child = os.fork()
    if not child:
        counts = {b["num_threads"] for b in threadpool_info() if b["user_api"] == "blas"}
        same = np.array_equal(npattn.attention(x, x, x), expected)
        helpers = [t for t in threading.enumerate() if t.name.startswith("npattn")]
        os._exit(0 if same and counts <= {2} and len(helpers) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
assert np.array_equal(npattn.attention(x, x, x), expected)
"""


@posix
def test_a_fork_after_use_and_inside_the_guard():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


# The thread count ------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _default_count(monkeypatch):
    monkeypatch.delenv("NPATTN_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_requested", None)


def test_the_setting_comes_before_the_variable_and_the_machine(monkeypatch):
    usable = get_num_threads()
    assert 1 <= usable <= (os.cpu_count() or 1)
    monkeypatch.setenv("NPATTN_NUM_THREADS", " 3 ")
    assert get_num_threads() == 3
    set_num_threads(np.int64(5))
    assert get_num_threads() == 5
    set_num_threads(None)
    assert get_num_threads() == 3
    monkeypatch.setenv("NPATTN_NUM_THREADS", "")
    assert get_num_threads() == usable


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "²"])
def test_a_variable_that_is_no_count(monkeypatch, text):
    monkeypatch.setenv("NPATTN_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"^NPATTN_NUM_THREADS must be a positive integer, got '{text}'$"):
        get_num_threads()


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (-2, ValueError), (1.0, TypeError), (True, TypeError), ("2", TypeError)]
)
def test_a_setting_that_is_no_count(count, error):
    with pytest.raises(error, match=r"^set_num_threads: count must be "):
        set_num_threads(count)
    assert threads._requested is None


@pytest.mark.parametrize(
    ("quota", "cpus"), [("50000 100000", 1), ("250000 100000", 3), ("max 100000", 8), ("9900000 100000", 8), ("", 8), (None, 8)]
)
def test_the_quota_of_a_control_group(monkeypatch, tmp_path, quota, cpus):
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    monkeypatch.setattr(threads, "QUOTA", file)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert get_num_threads() == cpus


def test_machines_without_affinity(monkeypatch, tmp_path):
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert get_num_threads() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert get_num_threads() == 1
