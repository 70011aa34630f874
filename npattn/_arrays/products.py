"""Matrix products that threads share: in pieces on the pool's threads, BLAS held to one, and with Python's lock given back.

The threads of OpenBLAS go on spinning for a tenth of a second after each product, on CPUs that the next passes need. And how it
shares a product among its threads changes the bits of the result. Here the pieces depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from npattn._arrays import threads
from npattn._arrays.blas import one_blas_thread
from npattn._arrays.namespace import Array, Namespace

SMALL = 1 << 15  # multiplications of a product that no BLAS gives to several threads
LARGE = 1 << 21  # of one that is not done before a second thread has woken up
PIECE = 1 << 26  # of a piece: enough for the time that BLAS takes to lay the other matrix out to be small
FEW_RESULTS, LONG_SUM = 500, 1024  # NumPy's matmul asks for the former alone; shorter sums do not take long
ALIGN = 64  # rows or columns of a piece are a multiple of it, as BLAS likes them


class Product(NamedTuple):
    """``a b``, and a row to add to every row of it."""

    a: Array  # (M, K)
    b: Array  # (K, N)
    row: Array | None = None  # (N,)

    @property
    def size(self) -> int:
        """How many multiplications it takes."""
        return int(self.a.shape[0] * self.a.shape[1] * self.b.shape[1])


def multiply(*products: Product, xp: Namespace) -> list[Array]:
    """Every product as a new array. Those of one call run side by side."""
    if xp is not np or max(product.size for product in products) < SMALL:
        with np.errstate(all="ignore"):
            return [_whole(product) for product in products]
    outs = [np.empty((a.shape[0], b.shape[1]), dtype=np.result_type(a, b)) for a, b, _ in products]
    jobs = [job for product, out in zip(products, outs, strict=True) for job in _jobs(product, out)]
    count = threads.get_num_threads() if sum(product.size for product in products) >= LARGE else 1
    with one_blas_thread():
        threads.run(lambda _: lambda job: job(), jobs, threads=count)
    return outs


def multiply_into(out: Array, a: Array, b: Array) -> Array:
    """``a b`` of NumPy arrays (..., M, K) and (..., K, N), with Python's lock given back meanwhile so that other threads go on.

    NumPy's matmul keeps it where there are few results, however long they take: a row of weights times thousands of values.
    """
    if out.size >= FEW_RESULTS or a.shape[-1] < LONG_SUM:
        return np.matmul(a, b, out=out)
    lead = out.shape[:-2]
    a, b = np.broadcast_to(a, (*lead, *a.shape[-2:])), np.broadcast_to(b, (*lead, *b.shape[-2:]))
    for index in np.ndindex(*lead):
        out[index] = np.dot(a[index], b[index])
    return out


def _whole(product: Product) -> Array:
    out = product.a @ product.b
    return out if product.row is None else out + product.row


def _jobs(product: Product, out: Array) -> list[Callable[[], None]]:
    """The pieces of a product: runs of rows, or of columns if there are more of them."""
    by_rows = out.shape[0] >= out.shape[1]
    count = out.shape[0 if by_rows else 1]
    share = -(-count * PIECE // max(product.size, 1))
    step = max(-(-share // ALIGN) * ALIGN, ALIGN)
    parts = [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def rows(part: slice) -> None:
        np.matmul(product.a[part], product.b, out=out[part])
        if product.row is not None:
            out[part] += product.row

    def columns(part: slice) -> None:
        np.matmul(product.a, product.b[:, part], out=out[:, part])
        if product.row is not None:
            out[:, part] += product.row[part]

    return [lambda part=part: (rows if by_rows else columns)(part) for part in parts]  # type: ignore[misc]
