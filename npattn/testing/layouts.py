"""The same numbers, differently in memory: what a caller's slices, transposes and broadcasts look like from inside."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYOUTS = (
    "contiguous", "read-only", "fortran", "strided", "reversed", "transposed", "broadcast", "overlapping", "unaligned",
    "big-endian",
)  # fmt: skip


def laid_out(x: np.ndarray[Any, Any], layout: str) -> np.ndarray[Any, Any]:
    """An array of the same shape that lies differently in memory; nobody may write to it, unless it is ``contiguous``."""
    if layout == "contiguous":
        return np.array(x)
    if x.ndim == 0:
        layout = "read-only"
    if layout == "fortran":
        x = np.array(x, order="F")
    elif layout == "strided":
        wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, dtype=x.dtype)
        wide[..., ::2] = x
        x = wide[..., ::2]
    elif layout == "reversed":
        x = np.flip(np.flip(x).copy())
    elif layout == "transposed":
        x = np.array(x.T, order="C").T if x.ndim < 2 else np.swapaxes(np.swapaxes(x, -1, -2).copy(), -1, -2)
    elif layout == "broadcast":
        axis = next((a for a, n in enumerate(x.shape) if n > 1), 0)
        x = np.broadcast_to(x[(slice(None),) * axis + (slice(0, 1),)] if x.ndim else x, x.shape)
    elif layout == "overlapping":
        if x.ndim > 1 and x.size:  # every row is the one before it, moved by one element
            strip = np.concatenate([x[..., 0, :], x[..., 1:, -1]], axis=-1)
            x = np.lib.stride_tricks.sliding_window_view(strip, x.shape[-1], axis=-1)
    elif layout == "unaligned":
        data = np.empty(x.nbytes + 1, dtype=np.uint8)
        moved = data[1:].view(x.dtype).reshape(x.shape)
        moved[...] = x
        x = moved
    elif layout == "big-endian":
        x = x.astype(x.dtype.newbyteorder(">"))
    elif layout != "read-only":
        raise ValueError(f"attention_problem: layouts must be among {', '.join(LAYOUTS)}, got {layout!r}")
    else:
        x = np.array(x)
    x = x.view()
    x.flags.writeable = False
    return x
