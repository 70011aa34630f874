"""The problems that ``python -m npattn bench`` measures, and the arrays that they are made of."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn import Mask, causal_mask, length_mask, window_mask
from npattn._arrays.namespace import Array

FORWARD, BOTH = "forward", "forward+backward"
PRODUCTS = {FORWARD: 2, BOTH: 6}  # matrix products of the formula: q kᵀ, w v; then wᵀ dout, dout vᵀ, ds k, dsᵀ q
WINDOW = 128  # keys before its own that a query of a window case sees
LENGTHS = (402, 187, 1024, 236, 611, 102, 351, 287)  # of the padded case: 400 on average, the longest fills the batch


class Inputs(NamedTuple):
    """NumPy arrays that every library copies its own from; ``visible`` broadcasts to (B, H, T, S)."""

    q: Array
    k: Array
    v: Array
    dout: Array
    visible: Array | None


class Case(NamedTuple):
    """A problem: q (B, H, T, D), k and v (B, K, S, D)."""

    kind: str
    T: int
    S: int
    dtype: str = "float32"
    B: int = 1
    H: int = 8
    K: int = 8
    D: int = 64
    lengths: tuple[int, ...] = ()  # of the keys of each batch entry, for the kind "padded"

    @property
    def name(self) -> str:
        """Kind, size and dtype; the size is T, TxS or BxT."""
        size = f"{self.B}x{self.T}" if self.B > 1 else f"{self.T}" if self.T == self.S else f"{self.T}x{self.S}"
        return f"{self.kind}-{size}-{self.dtype}"

    @property
    def passes(self) -> tuple[str, ...]:
        """What is measured; a decoder that writes one token after another needs no gradient."""
        return (FORWARD,) if self.kind == "decode" else (FORWARD, BOTH)

    @property
    def mask(self) -> Mask | None:
        """npattn's mask."""
        if self.kind == "causal":
            return causal_mask()
        if self.kind == "window":
            return window_mask(WINDOW, 0)
        return length_mask(self.lengths) if self.lengths else None

    def visible(self) -> Array | None:
        """The same mask as others take it, written out by its definition: (T, S), or (B, 1, 1, S) for lengths."""
        if self.lengths:
            return np.arange(self.S) < np.reshape(self.lengths, (-1, 1, 1, 1))
        behind = np.arange(self.T)[:, None] - np.arange(self.S)
        return {"causal": behind >= 0, "window": (behind >= 0) & (behind <= WINDOW)}.get(self.kind)

    def keys_seen(self) -> Array:
        """How many keys every query sees, (B, T)."""
        visible = self.visible()
        seen = np.asarray(self.S) if visible is None else np.reshape(visible.sum(-1), (-1, *visible.shape[-2:-1]))
        return np.broadcast_to(seen, (self.B, self.T))

    def operations(self, name: str) -> int:
        """Floating-point operations of a pass: those of its matrix products, on the pairs that the mask leaves."""
        return PRODUCTS[name] * 2 * self.D * self.H * int(self.keys_seen().sum())

    def matrix_bytes(self) -> int:
        """The size of the scores, written out."""
        return math.prod((self.B, self.H, self.T, self.S, {"float64": 8, "float32": 4}.get(self.dtype, 2)))

    def inputs(self) -> Inputs:
        """The case's arrays, the same in every run; of a half precision in float32."""
        rng = np.random.default_rng(0)
        query, key = (self.B, self.H, self.T, self.D), (self.B, self.K, self.S, self.D)
        dtype = np.float64 if self.dtype == "float64" else np.float32
        q, k, v, dout = (rng.standard_normal(shape, dtype=dtype) for shape in (query, key, key, query))
        return Inputs(q, k, v, dout, self.visible())


CASES = (
    Case("full", 256, 256),
    Case("full", 1024, 1024),
    Case("full", 2048, 2048),
    Case("full", 4096, 4096),
    Case("causal", 1024, 1024),
    Case("causal", 2048, 2048),
    Case("full", 1024, 1024, "float64"),
    Case("full", 2048, 2048, "float64"),
    Case("causal", 1024, 1024, "float64"),
    Case("window", 4096, 4096),
    Case("padded", 1024, 1024, B=8, lengths=LENGTHS),
    Case("decode", 1, 4096),
    Case("cross", 256, 4096),
    Case("grouped", 1024, 1024, K=2),
    Case("tiny", 8, 8, H=2, K=2, D=16),
)
QUICK = ("full-256-float32", "causal-1024-float32", "decode-1x4096-float32", "tiny-8-float32")


def select(every: Sequence[Any], *patterns: str, quick: bool = False, dtype: str | None = None) -> list[Any]:
    """The cases whose names have something that matches one of the shell patterns, all of them in one dtype if it is given.

    Raises
    ------
    ValueError
        If no name matches one of them.
    """
    cases: Iterable[Any] = (case for case in every if not quick or case.name in QUICK)
    if dtype is not None:
        cases = dict.fromkeys(case._replace(dtype=dtype) for case in cases)
    cases = list(cases)
    found = {pattern: [case for case in cases if fnmatch.fnmatchcase(case.name, f"*{pattern}*")] for pattern in patterns or ("",)}
    for pattern, matching in found.items():
        if not matching:
            raise ValueError(f"no case matches {pattern!r}; the cases are {', '.join(case.name for case in cases)}")
    return [case for case in cases if any(case in matching for matching in found.values())]
