"""What the size of tiles costs, on one thread and on all.

``python -m tests.attention.tile_costs [T ...]``, by default for T=256.

Forward, and forward with backward, of B=1, H=8, T=S, D=E=64 in float32 without a mask, in tiles of 256 rows of one to eight heads
against all keys. All are measured in turn in one process; the table has the median of every time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn import attention, attention_backward, attention_forward, get_num_threads, set_num_threads
from npattn._attention.tiling import Sizes, forced
from npattn._commands.bench_timing import interleave

H, D, ROWS = 8, 64, 256


def calls(T: int, heads: int, threads: int) -> dict[str, Callable[[], Any]]:
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
        "forward": within(lambda: attention(q, k, v)),
        "both": within(lambda: attention_backward(dout, attention_forward(q, k, v)[1])),
    }


def report(T: int) -> None:
    """The table of a size."""
    most = get_num_threads()
    variants = {
        (heads, threads, name): call
        for heads in (1, 2, 4, 8)
        for threads in dict.fromkeys((1, most))
        for name, call in calls(T, heads, threads).items()
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
    for threads in dict.fromkeys((1, most)):
        row = [[1000 * statistics.median(samples[str((n, threads, p))]) for p in ("forward", "both")] for n in (1, 2, 4, 8)]
        times = "   ".join(f"{n}: {a:.1f} {b:.1f}" for n, (a, b) in zip((1, 2, 4, 8), row, strict=True))
        print(f"  {threads} thread{'s' if threads > 1 else ''}   {times}", flush=True)


if __name__ == "__main__":
    for size in sys.argv[1:] or ("256",):
        report(int(size))
