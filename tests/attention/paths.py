"""Every way in which the tiling may organise a problem: results must not depend on it."""

from __future__ import annotations

import contextlib

from npattn._arrays.block_products import Limits
from npattn._attention import tiling
from npattn._attention.tiling import Sizes
from npattn.testing.candidates import npattn_candidate

# The first is what a caller gets, where a small problem is one tile. Few rows and keys make many tiles of the smallest problem.
PATHS: dict[str, Sizes | None] = {
    "as chosen": None,
    "scratch": Sizes(rows=2, keys=3, pairs=12, plain=False, keep=False),
    "scratch, rows apart": Sizes(rows=3, keys=3, pairs=18, plain=False, keep=True, apart=1),
    "scratch, kept": Sizes(rows=3, keys=2, pairs=12, plain=False, keep=True),
    "scratch, in blocks": Sizes(rows=64, keys=6, pairs=1 << 14, plain=False, keep=True, blocks=Limits(1, 100, 2, 4, 32)),
    "scratch, many heads": Sizes(rows=64, keys=4, pairs=1 << 14, plain=False, keep=False),
    "plain": Sizes(rows=3, keys=2, pairs=12, plain=True, keep=False),
    "plain, kept": Sizes(rows=2, keys=3, pairs=12, plain=True, keep=True),
}
CANDIDATES = {name: npattn_candidate(sizes=sizes) for name, sizes in PATHS.items()}


@contextlib.contextmanager
def no_problem_too_small():
    """Threads and the guard of BLAS even for problems that would be done before a thread has woken up."""
    found = tiling.SMALL_PRODUCT, tiling.SMALL_PROBLEM
    tiling.SMALL_PRODUCT = tiling.SMALL_PROBLEM = 0
    try:
        yield
    finally:
        tiling.SMALL_PRODUCT, tiling.SMALL_PROBLEM = found
