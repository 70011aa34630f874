"""The guard around BLAS."""

import threading

import pytest
from threadpoolctl import threadpool_limits

from npattn._arrays import blas, threads
from npattn._arrays.blas import one_blas_thread
from tests.arrays.meeting import Meeting, blas_threads


def test_blas_has_one_thread_inside_and_its_own_setting_after(two_blas_threads):
    with one_blas_thread():
        assert set(blas_threads()) == {1}
    assert set(blas_threads()) == {2}
    with pytest.raises(ValueError, match="inside"), one_blas_thread():
        raise ValueError("inside")
    assert set(blas_threads()) == {2}


def test_a_setting_of_one_stays(two_blas_threads):
    with threadpool_limits(1, user_api="blas"):
        with one_blas_thread():
            assert set(blas_threads()) == {1}
        assert set(blas_threads()) == {1}


def test_callers_overlap_in_any_order(two_blas_threads):
    first, second, third = (one_blas_thread() for _ in range(3))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert set(blas_threads()) == {1}
    third.__enter__()
    second.__exit__(None, None, None)
    assert set(blas_threads()) == {1}
    third.__exit__(None, None, None)
    assert set(blas_threads()) == {2}


def test_many_callers_at_once(two_blas_threads):
    wrong = []

    def caller():
        for _ in range(100):
            with one_blas_thread():
                if set(blas_threads()) != {1}:
                    wrong.append(blas_threads())

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []
    assert set(blas_threads()) == {2}


class PerThread:
    """A BLAS whose setting belongs to the calling thread, as MKL's does."""

    internal_api = "mkl"

    def __init__(self) -> None:
        self.local = threading.local()

    @property
    def num_threads(self) -> int:
        return getattr(self.local, "count", 2)

    def set_num_threads(self, count: int) -> None:
        self.local.count = count


class Other:
    """What threadpoolctl has for a library without OpenBLAS's functions."""

    dynlib = object()
    num_threads = 2

    def __init__(self, internal_api: str) -> None:
        self.internal_api = internal_api

    def set_num_threads(self, count: int) -> None:
        self.num_threads = count


@pytest.mark.parametrize("internal_api", ["blis", "openblas"])
def test_another_blas_is_set_through_threadpoolctl(internal_api):
    controller = Other(internal_api)
    setting = blas._setting(controller)
    assert setting.get() == 2
    setting.set(1)
    assert setting.get() == controller.num_threads == 1


def test_every_working_thread_limits_a_blas_that_has_a_setting_a_thread(monkeypatch):
    guard, other, seen = blas._BlasGuard(), PerThread(), []
    guard.shared, guard.own = [], [blas._Setting(lambda: other.num_threads, other.set_num_threads)]
    monkeypatch.setattr(blas, "_blas", guard)
    meeting = Meeting(3)

    def worker(check):
        work = meeting.worker(check)
        return lambda job: (work(job), seen.append(other.num_threads))

    with one_blas_thread():
        threads.run(worker, range(3), threads=3)
    assert seen == [1, 1, 1]
    again = Meeting(3)  # the same pool threads, now outside
    seen.clear()
    monkeypatch.setattr(blas, "_blas", blas._BlasGuard())
    threads.run(lambda check: lambda job: (again.worker(check)(job), seen.append(other.num_threads)), range(3), threads=3)
    assert seen == [2, 2, 2]
    assert guard.inside == 0
