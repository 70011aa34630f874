"""What forward mode and second order cost beside forward and backward.

``python -m tests.attention.jvp_costs [--memory] [T ...]``, by default for T=2048 and T=8192.

All are measured in turn in one process, with B=1, H=8, T=S, D=E=64 in float32 and a tangent of every input. ``backward`` is the
one that makes its weights again (as with ``NPATTN_KEEP_MIB=0``), since `attention_backward_jvp` has none that were kept. The
products are those of the formula alone, in pieces that stay in a cache, at the rate at which the six of forward and backward
run there. With ``--memory``, the most that is held beyond inputs and results is printed in the place of times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from npattn import (
    AttentionTangents,
    attention,
    attention_backward,
    attention_backward_jvp,
    attention_forward,
    attention_jvp,
    get_num_threads,
)
from npattn._arrays.trees import tree_leaves
from npattn._attention.jvp_passes import FEWEST_ROWS, WHOLE_ROWS
from npattn._commands.bench_backends import open_backend
from npattn._commands.bench_cases import BOTH, Case, Inputs
from npattn._commands.bench_products import prepare_products
from npattn._commands.bench_timing import settle
from tests.attention.peaks import peak

H, D = 8, 64
MIB = 1 << 20
Calls = dict[str, Callable[[], Any]]


def calls(T: int) -> Calls:
    """The four passes, and the products of two of them."""
    rng = np.random.default_rng(0)
    q, k, v, tq, tk, tv, dout, tdout = (rng.standard_normal((1, H, T, D), dtype=np.float32) for _ in range(8))
    tangents = AttentionTangents(tq, tk, tv)
    saved = attention_forward(q, k, v)[1]
    again = saved._replace(tiling=saved.tiling._replace(done=saved.tiling.done._replace(kept=None)))
    products = prepare_products(Case("full", T, T), Inputs(q, k, v, dout, None), BOTH, open_backend("numpy"))
    return {
        "forward": lambda: attention(q, k, v),
        "jvp": lambda: attention_jvp(q, k, v, tangents),
        "backward": lambda: attention_backward(dout, again),
        "backward_jvp": lambda: attention_backward_jvp(dout, saved, tangents, tdout=tdout),
        "products": products,
    }


def products_of_backward_jvp(T: int) -> int:
    """14 where tiles have whole rows, and 17 where keys are cut."""
    return 14 if WHOLE_ROWS // T >= FEWEST_ROWS else 17


def memory(call: Callable[[], Any]) -> int:
    """The most bytes that a call holds beyond inputs and results."""
    most, results = peak(call)
    return int(most - sum(x.nbytes for x in tree_leaves(results) if x is not None))


def report(T: int) -> None:
    """Times and ratios of a size, by the median over rounds."""
    passes = calls(T)
    samples: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(9 if T <= 4096 else 2):
        for name, call in passes.items():
            settle()
            started = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - started)
    ms = {name: 1000 * statistics.median(times) for name, times in samples.items()}
    print(f"T=S={T}, {get_num_threads()} threads: " + ", ".join(f"{name} {ms[name]:.0f} ms" for name in list(passes)[:4]))
    for name, of, count in (("jvp", "forward", 6), ("backward_jvp", "backward", products_of_backward_jvp(T))):
        ratio = statistics.median(a / b for a, b in zip(samples[name], samples[of], strict=True))
        alone = count / 6 * ms["products"]
        print(f"  {name}: {ratio:.2f} of {of}; its {count} products alone {alone:.0f} ms", flush=True)


def report_memory(T: int) -> None:
    """The most that is held beyond inputs and results."""
    passes = calls(T)
    print(
        f"T=S={T}, {get_num_threads()} threads: "
        + ", ".join(f"{n} {memory(passes[n]) / MIB:.0f} MiB" for n in ("jvp", "backward_jvp"))
    )


if __name__ == "__main__":
    for size in [argument for argument in sys.argv[1:] if argument != "--memory"] or ("2048", "8192"):
        (report_memory if "--memory" in sys.argv else report)(int(size))
