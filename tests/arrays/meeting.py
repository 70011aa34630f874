"""What tests of threads share."""

import threading

from threadpoolctl import threadpool_info

LONG = 20.0  # seconds that nothing here may take


def blas_threads() -> list[int]:
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


class Meeting:
    """Jobs that all wait for each other: they only end if as many threads as jobs run them at once."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=LONG)
        self.done: list[int] = []
        self.workers: list[threading.Thread] = []

    def worker(self, check):
        self.workers.append(threading.current_thread())

        def work(job):
            self.barrier.wait()
            check()
            self.done.append(job)

        return work
