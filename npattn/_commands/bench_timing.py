"""Measuring: whether results agree, and times that are taken in turn so that what disturbs one disturbs all."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from npattn._arrays.namespace import Array
from npattn._commands.bench_backends import Call
from npattn.testing.libraries import to_numpy

# The largest difference between two right results, as a share of the largest element of each: ten times what was seen.
TOLERANCES = {"float64": 3e-14, "float32": 3e-5, "float16": 1e-2, "bfloat16": 5e-2}

SAMPLE = 0.005  # seconds: a shorter call is repeated within a sample
WARM = 0.05  # seconds: before each sample of a shorter call, it is made untimed, once or for a millisecond
LOOK, QUIET, PATIENCE = 0.005, 0.001, 0.3  # seconds: how often to look for threads that spin, what is none, how long to wait
LONG, OF_LONG = 2.0, 5  # seconds: with a longer round, so many must do
MOST = 100  # repetitions
STOLEN, AGAIN = 0.05, 2  # a sample that lost more of its time to other virtual machines is taken again, so often at most


class Disagreement(Exception):
    """Raised when two implementations compute different things; the message says which and where."""


def largest_difference(ours: Sequence[Array], theirs: Sequence[Array], *, dtype: str, who: str) -> float:
    """The largest difference of any result, as a share of the largest element of that result.

    Raises
    ------
    Disagreement
        If it is more than the dtype's tolerance.
    """
    worst = 0.0
    for result, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=False):
        own, other = (to_numpy(x).astype(np.float64, copy=False) for x in (a, b))
        if own.shape != other.shape:
            raise Disagreement(f"{who}: {result} has shape {other.shape}, npattn's {own.shape}")
        share = float(np.max(np.abs(own - other)) / np.max(np.abs(own)))
        if not share <= TOLERANCES[dtype]:  # NaN is not
            raise Disagreement(
                f"{who}: {result} differs from npattn's by {share:.1e} of its largest element, more than {TOLERANCES[dtype]:.0e}"
            )
        worst = max(worst, share)
    return worst


def interleave(
    calls: Mapping[str, Call],
    *,
    synchronize: Callable[[], None],
    seconds: float,
    least: int,
    repeat: int | None,
    tick: Callable[[float], None],
) -> dict[str, list[float]]:
    """The time of every call, again and again in turn: one sample of each a round, in an order that chance decides.

    The order is the same in every run. In one that did not change, who comes after a call that leaves the machine
    something to do would do so in every round.

    Parameters
    ----------
    calls : dict
        They have run before.
    synchronize : callable
        Waits for the device.
    seconds : float
        About how long all of it takes, if ``least`` rounds do not take longer.
    least : int
        So many rounds at least, or five if a round is long.
    repeat : int or None
        Exactly so many rounds.
    tick : callable
        Called with the share that is done.

    Returns
    -------
    dict
        Seconds a call, for every round.
    """
    gc.collect()
    gc.disable()
    try:
        round_time, guess = 0.0, {}
        for name, call in calls.items():
            started = time.perf_counter()
            settle()
            round_time += time.perf_counter() - started
            guess[name] = _estimate(call, synchronize)
        counts = {name: max(math.ceil(SAMPLE / estimate), 1) for name, estimate in guess.items()}
        warm = {name: max(math.ceil(0.001 / estimate), 1) if estimate < WARM else 0 for name, estimate in guess.items()}
        round_time += sum(estimate * (counts[name] + warm[name]) for name, estimate in guess.items())
        rounds = repeat or max(min(int(seconds / round_time), MOST), min(least, OF_LONG) if round_time > LONG else least)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        chance = random.Random(0)
        for done in range(rounds):
            chance.shuffle(names)
            for name in names:
                settle()
                if warm[name]:
                    _timed(calls[name], warm[name], synchronize)
                samples[name].append(_undisturbed(calls[name], counts[name], synchronize))
            tick((done + 1) / rounds)
    finally:
        gc.enable()
    return samples


def _estimate(call: Call, synchronize: Callable[[], None]) -> float:
    """About how long a call takes: the first ones of a short call take several times as long."""
    count = 1
    while True:
        each = max(_timed(call, count, synchronize), 1e-9)
        if each * count >= SAMPLE / 2 or count >= 1 << 20:
            return each
        count = max(math.ceil(SAMPLE / each), 2 * count)


def settle() -> None:
    """Wait until nothing runs in this process: threads of BLAS and OpenMP spin for a while, looking for more work.

    OpenBLAS's do so for a tenth of a second, on a CPU that the next one needs.
    """
    end = time.perf_counter() + PATIENCE
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(LOOK)
        if time.process_time() - before < QUIET:
            break


def _undisturbed(call: Call, count: int, synchronize: Callable[[], None]) -> float:
    """Seconds a call, of the sample that lost least to other virtual machines if there must be several."""
    samples: list[tuple[float, float]] = []
    for _ in range(1 + AGAIN):
        if samples:
            settle()
        before = stolen()
        each = _timed(call, count, synchronize)
        lost = stolen() - before
        samples.append((lost, each))
        if lost <= STOLEN * each * count:
            break
    return min(samples)[1]


def stolen() -> float:
    """Seconds that the host of this virtual machine has given to others while the CPUs had work; 0 where nobody counts them."""
    with contextlib.suppress(OSError, ValueError, IndexError), Path("/proc/stat").open(encoding="ascii") as file:  # Linux
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")  # the first line is the sum over the CPUs
    return 0.0


def _timed(call: Call, count: int, synchronize: Callable[[], None]) -> float:
    """Seconds a call, over ``count`` of them."""
    started = time.perf_counter()
    for _ in range(count):
        call()
        synchronize()
    return (time.perf_counter() - started) / count
