"""What the size of tiles costs, on one thread and on all; and what new memory would cost.

``python -m tests.attention.tile_costs [T ...]``, by default for T=256 and T=1024.

Forward, and forward with backward, of B=1, H=8, T=S, D=E=64 in float32 without a mask, in tiles of 256 rows of one to eight heads
against all keys; and the matrix products alone, which say how much a second thread is worth on the machine. All are measured
in turn in one process; the table has the median of every time. Then forward and backward as they are, with the memory of tiles
that an earlier call has left, and with new memory in every call: times and page faults.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from npattn import attention, attention_backward, attention_forward, get_num_threads, set_num_threads
from npattn._attention.memory import drop_spare_memory
from npattn._attention.tiling import Sizes, forced
from npattn._commands.bench_backends import Call, open_backend
from npattn._commands.bench_cases import BOTH, FORWARD, Case, Inputs
from npattn._commands.bench_products import prepare_products
from npattn._commands.bench_timing import interleave

H, D, ROWS = 8, 64, 256
KINDS: tuple[int | str, ...] = (1, 2, 4, 8, "products")


def calls(T: int, heads: int, threads: int) -> dict[str, Call]:
    """Forward, and forward with backward, in tiles of so many heads on so many threads."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, H, T, D), dtype=np.float32)
    sizes = Sizes(rows=ROWS, keys=T, pairs=heads * min(ROWS, T) * T, plain=False, keep=True)

    def within(work: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            set_num_threads(threads)
            with forced(sizes):
                return work()

        return call

    return {
        FORWARD: within(lambda: attention(q, k, v)),
        BOTH: within(lambda: attention_backward(dout, attention_forward(q, k, v)[1])),
    }


def products(T: int, threads: int) -> dict[str, Call]:
    """The products of the two passes, by BLAS or by threads of our own, whichever is quicker."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, H, T, D), dtype=np.float32)
    set_num_threads(threads)
    with threadpool_limits(threads, "blas"):
        prepared = {
            name: prepare_products(Case("full", T, T), Inputs(q, k, v, dout, None), name, open_backend("numpy"))
            for name in (FORWARD, BOTH)
        }

    def limited(work: Call) -> Call:
        def call() -> Any:
            with threadpool_limits(threads, "blas"):
                return work()

        return call

    return {name: limited(work) for name, work in prepared.items()}


def report(T: int) -> None:
    """The table of a size."""
    most = get_num_threads()
    counts = list(dict.fromkeys((1, most)))
    variants = {
        (kind, threads, name): call
        for kind in KINDS
        for threads in counts
        for name, call in (calls(T, kind, threads) if isinstance(kind, int) else products(T, threads)).items()
    }
    for call in variants.values():
        call()
    samples = interleave(
        {str(key): call for key, call in variants.items()},
        synchronize=lambda: None,
        seconds=20,
        least=7,
        repeat=None,
        tick=lambda share: None,
    )
    print(f"T=S={T}: ms forward and forward+backward, by the heads of a tile")
    for threads in counts:
        row = [[1000 * statistics.median(samples[str((kind, threads, name))]) for name in (FORWARD, BOTH)] for kind in KINDS]
        times = "   ".join(f"{kind}: {a:.1f} {b:.1f}" for kind, (a, b) in zip(KINDS, row, strict=True))
        print(f"  {threads} thread{'s' if threads > 1 else ''}   {times}", flush=True)


def report_faults(T: int) -> None:
    """Forward and backward with the memory of earlier calls and without."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, H, T, D), dtype=np.float32)
    set_num_threads(None)

    def again() -> Any:
        return attention_backward(dout, attention_forward(q, k, v)[1])

    def anew() -> Any:
        drop_spare_memory()
        return again()

    for call, what in ((anew, "new memory"), (again, "memory of earlier calls")) * 2:
        call()
        times, before = [], _faults()
        for _ in range(15):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        each = (_faults() - before) / len(times)
        print(f"T=S={T}, {what}: {1000 * statistics.median(times):.1f} ms forward+backward, {each:.0f} page faults")


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    for size in sys.argv[1:] or ("256", "1024"):
        report_faults(int(size))
        report(int(size))
