"""What blocks do to matrix products, and the size of NumPy's buffers to the subtraction of a column; on one thread.

``python -m tests.attention.block_costs [D ...]``, by default for D=64 and D=128: GFLOP/s of the six products of a tile of 512
queries and 1024 keys, by NumPy's matmul and as npattn makes them where BLAS multiplies in place; and nanoseconds for an element
of ``scores - row_max`` with buffers of 8192 elements, which is NumPy's default, and of as many as npattn sets. All are measured
in turn, and the tables have medians.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn._arrays.blas import multiplies_in_place, one_blas_thread
from npattn._arrays.block_products import Limits
from npattn._attention.scratch import BUFFER, Scratch
from npattn._commands.bench_timing import interleave

T, S = 512, 1024
SECONDS = 1.0  # for a row of a table


def medians(calls: dict[str, Callable[[], Any]]) -> list[float]:
    """Of the seconds that each takes."""
    for call in calls.values():
        call()
    samples = interleave(calls, synchronize=lambda: None, seconds=SECONDS, least=9, repeat=None, tick=lambda share: None)
    return [statistics.median(samples[name]) for name in calls]


def products(ops: Scratch, D: int, dtype: str) -> dict[str, Callable[[], Any]]:
    """The products of forward and backward as the formula asks for them."""
    rng = np.random.default_rng(0)

    def own(name: str, *shape: int) -> Any:
        result = ops.take(name, shape)
        result[...] = rng.standard_normal(shape)
        return result

    q, dout, p, dscores = own("q", 1, T, D), own("dout", 1, T, D), own("p", 1, T, S), own("dscores", 1, T, S)
    k, v = (ops.load(rng.standard_normal((1, S, D)).astype(dtype), name) for name in "kv")
    return {
        "q kT": lambda: ops.matmul(q, ops.transpose(k), "scores"),
        "p v": lambda: ops.matmul(p, v, "out"),
        "pT dout": lambda: ops.matmul(ops.transpose(p), dout, "dv"),
        "dout vT": lambda: ops.matmul(dout, ops.transpose(v), "dweights"),
        "dscores k": lambda: ops.matmul(dscores, k, "dq"),
        "dscoresT q": lambda: ops.matmul(ops.transpose(dscores), q, "dk"),
    }


def subtraction(dtype: str, keys: int, buffer: int) -> Callable[[], None]:
    x, column = np.zeros((T, keys), dtype), np.zeros((T, 1), dtype)

    def call() -> None:
        with np.errstate():
            np.setbufsize(buffer)
            np.subtract(x, column, out=x)

    return call


def main(sizes: list[int]) -> None:
    print(f"BLAS multiplies in place: {multiplies_in_place()}\n")
    print(f"{'product':12s} {'dtype':8s} {'D':>4s} {'matmul':>8s} {'blocks':>8s}  GFLOP/s")
    with one_blas_thread():
        for D in sizes:
            for dtype in ("float32", "float64"):
                plain, blocks = (
                    products(Scratch(np, np.dtype(dtype), 1024, {}, limits), D, dtype) for limits in (None, Limits(bytes=1))
                )
                for name in plain:
                    rates = [2e-9 * T * S * D / time for time in medians({"matmul": plain[name], "blocks": blocks[name]})]
                    print(f"{name:12s} {dtype:8s} {D:4d} {rates[0]:8.0f} {rates[1]:8.0f}")
    print(f"\n{'keys':>5s} {'dtype':8s} {8192:>8d} {BUFFER:>8d}  ns for an element of scores - row_max")
    for keys in (128, 256, 512, 1024, 2048):
        for dtype in ("float32", "float64"):
            calls = {str(size): subtraction(dtype, keys, size) for size in (8192, BUFFER)}
            costs = [1e9 * time / (T * keys) for time in medians(calls)]
            print(f"{keys:5d} {dtype:8s} {costs[0]:8.3f} {costs[1]:8.3f}")


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [64, 128])
