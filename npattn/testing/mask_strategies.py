"""Hypothesis strategies for masks of every kind, and combinations of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from npattn._attention.mask_kinds import causal_mask, causal_mask_end, length_mask, segment_mask, window_mask
from npattn._attention.masks import Mask

MASKS = ("causal", "causal_end", "window", "length", "segment", "array")


def broadcastable_shapes(whole: tuple[int, ...]) -> SearchStrategy[tuple[int, ...]]:
    """Shapes that broadcast, right-aligned, to ``whole``.

    Parameters
    ----------
    whole : tuple of int
        The shape to broadcast to.

    Returns
    -------
    SearchStrategy of tuple of int
        Of any rank up to that of ``whole``.
    """

    @st.composite
    def shapes(draw: DrawFn) -> tuple[int, ...]:
        rank = draw(st.one_of(st.integers(0, len(whole)), st.just(len(whole))))
        return tuple(n if draw(st.booleans()) else 1 for n in whole[len(whole) - rank :])

    return shapes()


@st.composite
def mask_trees(
    draw: DrawFn, lead: tuple[int, ...], H: int, T: int, S: int, *, kinds: Sequence[str] = MASKS, depth: int = 2
) -> Mask | np.ndarray[Any, Any]:
    """A mask of some kind, or several combined by ``&``, ``|`` and ``~``.

    Parameters
    ----------
    lead : tuple of int
        The leading axes of the problem.
    H, T, S : int
        Query heads, queries, keys.
    kinds : sequence of str, optional
        Of ``MASKS``.
    depth : int, optional
        How deep combinations may go.

    Returns
    -------
    SearchStrategy of Mask or bool array
    """
    form = draw(st.sampled_from(["one", "not", "and", "or"])) if depth else "one"
    if form == "one":
        mask: Mask | np.ndarray[Any, Any] = _draw_mask(draw, draw(st.sampled_from(list(kinds))), lead, H, T, S)
        return mask
    inner = [draw(mask_trees(lead, H, T, S, kinds=kinds, depth=depth - 1)) for _ in range(1 if form == "not" else 2)]
    if form == "not":
        made = ~inner[0]
    else:
        made = inner[0] & inner[1] if form == "and" else inner[0] | inner[1]
    return np.asarray(made) if isinstance(made, np.generic) else made  # what NumPy makes of arrays without axes


def _draw_mask(draw: DrawFn, kind: str, lead: tuple[int, ...], H: int, T: int, S: int) -> Any:
    def numbers(low: int, high: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if draw(st.booleans()):
            shape = draw(broadcastable_shapes(shape))
        rng = np.random.default_rng(draw(st.integers(0, 999)))
        return np.asarray(rng.integers(low, high + 1, shape))

    def number_or_array(low: int, high: int) -> Any:
        return draw(st.integers(low, high)) if draw(st.booleans()) else numbers(low, high, lead)

    def ids(length: int) -> Any:
        drawn = numbers(0, 2, (*lead, length))  # it may have lost its last axis
        return np.broadcast_to(drawn, (*drawn.shape[:-1], length)).copy()

    if kind == "causal":
        return causal_mask(number_or_array(-2, 3))
    if kind == "causal_end":
        return causal_mask_end()
    if kind == "window":
        side = st.one_of(st.integers(0, 3), st.none())
        return window_mask(draw(side), draw(side), number_or_array(-2, 3))
    if kind == "length":
        return length_mask(number_or_array(0, S), number_or_array(0, T) if draw(st.integers(0, 2)) else None)
    if kind == "segment":
        queries = ids(T)
        return segment_mask(queries) if T == S and draw(st.booleans()) else segment_mask(queries, ids(S))
    shape = draw(broadcastable_shapes((*lead, H, T, S)))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    return np.asarray(rng.random(shape) < draw(st.sampled_from([0.5, 0.9, 0.1])))
