"""The bare matrix products of attention: the time that no implementation on the same BLAS gets below."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays import threads
from npattn._arrays.blas import multiplies_in_place, one_blas_thread
from npattn._arrays.block_products import BlockProducts, Limits
from npattn._arrays.namespace import Array, Namespace
from npattn._commands.bench_backends import Backend, Call
from npattn._commands.bench_cases import FORWARD, Case, Inputs

LARGE = 1 << 29  # operations of a pass from which on threads of our own are surely worth their start
BLOCKS = Limits(bytes=1 << 24)  # no thread waits for another here: blocks are worth while for smaller products than in attention


class Pieces(NamedTuple):
    """How large the pieces are that the products are done in."""

    rows: int
    keys: int
    pairs: int  # rows times keys times heads


ON_CPU = Pieces(rows=256, keys=1024, pairs=1 << 18)  # the pairs of a piece fit a core's cache
ON_GPU = Pieces(rows=1024, keys=1 << 14, pairs=1 << 26)


class Job(NamedTuple):
    """Some rows of some heads of one batch entry, against as many keys as a row of them sees on average."""

    entry: int
    heads: slice
    kv_heads: slice
    rows: slice
    keys: int


class Product(NamedTuple):
    """``a @ b`` into memory that is there."""

    a: Array
    b: Array
    out: Array
    name: str


def prepare_products(case: Case, inputs: Inputs, name: str, backend: Backend) -> Call:
    """The products of a pass, ready to run, on NumPy's half precisions in float32 as npattn does.

    On NumPy the pieces are done by threads side by side, each with a BLAS of one thread; or in turn, where that is quicker. They
    are made in blocks where that is quicker, as npattn's are.
    """
    xp, half = backend.xp, case.dtype in ("float16", "bfloat16")
    pieces = ON_CPU if xp is np else ON_GPU
    dtype = "float32" if half and xp is np else case.dtype
    q, k, v, dout = (backend.array(x, dtype) for x in inputs[:4])

    def products(job: Job, buffers: dict[str, Array], blocks: BlockProducts | None) -> Iterator[Product]:
        def product(name: str, a: Array, b: Array, buffer: str) -> Product:
            if blocks is not None and blocks.suit_turned(a, b):  # that the result lies in columns then matters to nobody
                a, b = b.swapaxes(-1, -2), a.swapaxes(-1, -2)
            shape = (*a.shape[:-1], b.shape[-1])
            return Product(a, b, _memory(buffers, a.dtype, xp, buffer, shape), name)

        own_q, own_dout = (x[job.entry, job.heads, job.rows] for x in (q, dout))
        for start in range(0, job.keys, pieces.keys):
            own_k, own_v = (x[job.entry, job.kv_heads, start : min(start + pieces.keys, job.keys)] for x in (k, v))
            if blocks is not None:
                blocks.note("k", own_k)
                blocks.note("v", own_v)
            scores = product("scores", own_q, own_k.swapaxes(-1, -2), "pairs")
            yield scores
            yield product("out", scores.out, own_v, "rows")
            if name != FORWARD:
                yield product("dv", scores.out.swapaxes(-1, -2), own_dout, "keys")
                dscores = product("dweights", own_dout, own_v.swapaxes(-1, -2), "pairs")
                yield dscores
                yield product("dq", dscores.out, own_k, "rows")
                yield product("dk", dscores.out.swapaxes(-1, -2), own_q, "keys")

    count = threads.get_num_threads() if xp is np else 1

    def begin() -> tuple[dict[str, Array], BlockProducts | None]:
        return {}, BlockProducts(BLOCKS) if xp is np and multiplies_in_place() else None

    def in_turn() -> tuple[Array, ...]:
        _run(xp, prepared, shared, blocks)
        return ()

    def worker(_: Callable[[], None]) -> Callable[[Job], None]:
        buffers, blocks = begin()
        return lambda job: _run(np, products(job, buffers, blocks), buffers, blocks)

    def side_by_side() -> tuple[Array, ...]:
        with one_blas_thread():
            threads.run(worker, jobs, threads=count)
        return ()

    if count > 1 and case.operations(name) > LARGE:
        jobs = cut_jobs(case, pieces, count)
        return side_by_side
    shared, blocks = begin()
    prepared = [product for job in cut_jobs(case, pieces, 1) for product in products(job, shared, blocks)]
    if count == 1:
        return in_turn
    jobs = cut_jobs(case, pieces, count)
    return min(in_turn, side_by_side, key=_quickest)


def _memory(buffers: dict[str, Array], dtype: Any, xp: Namespace, name: str, shape: tuple[int, ...]) -> Array:
    """Memory of this name, with anything in it."""
    size = math.prod(shape)
    if name not in buffers or buffers[name].size < size:
        buffers[name] = xp.empty(size, dtype=dtype)
    return buffers[name][:size].reshape(shape)


def _run(xp: Namespace, products: Iterable[Product], buffers: dict[str, Array], blocks: BlockProducts | None) -> None:
    for a, b, out, name in products:
        if blocks is not None and blocks.suit(out, a):
            blocks.multiply(out, a, b, name, functools.partial(_memory, buffers, a.dtype, xp))
        else:
            xp.matmul(a, b, out=out)


def _quickest(call: Call) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def cut_jobs(case: Case, pieces: Pieces, count: int) -> list[Job]:
    """All pairs that the mask leaves, to rounding, in at least ``count`` jobs where there are so many heads."""
    group, seen = case.H // case.K, case.keys_seen()
    jobs = []
    for entry in range(case.B):
        for start in range(0, case.T, pieces.rows):
            rows = slice(start, min(start + pieces.rows, case.T))
            keys = round(float(seen[entry, rows].mean()))
            pairs = (rows.stop - rows.start) * min(keys, pieces.keys)
            together = max(min(pieces.pairs // max(pairs, 1), case.B * case.H // count), 1) if group == 1 else 1
            for first in range(0, case.H, together):
                heads = slice(first, min(first + together, case.H))
                kv_heads = heads if group == 1 else slice(first // group, first // group + 1)
                jobs.append(Job(entry, heads, kv_heads, rows, keys))
    return jobs
