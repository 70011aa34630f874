"""Hypothesis strategies for masks that a plain function takes: causal, windows, lengths, both of them, or any array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from npattn._attention.mask_kinds import causal_mask, causal_mask_end, length_mask, window_mask
from npattn.testing.mask_strategies import mask_trees


def plain_masks(kinds: Sequence[str]) -> Callable[[tuple[int, ...], int, int, int], SearchStrategy[Any]]:
    """Masks that can be said in these terms.

    Parameters
    ----------
    kinds : sequence of str
        Of ``plain.MASK_OPTIONS``.

    Returns
    -------
    callable
        ``masks(lead, H, T, S)`` makes the strategy.
    """

    @st.composite
    def masks(draw: DrawFn, lead: tuple[int, ...], H: int, T: int, S: int) -> Any:
        kind = draw(st.sampled_from(list(kinds)))
        if kind == "mask":
            return draw(mask_trees(lead, H, T, S))
        count = math.prod(lead)
        drawn = st.lists(st.integers(0, S), min_size=count, max_size=count)
        lengths = length_mask(_nested(draw(drawn), lead)) if "lengths" in kinds else None
        if kind == "lengths":
            return lengths
        side = st.one_of(st.integers(0, 3), st.none())
        if kind == "window":
            band = window_mask(draw(side), draw(side))
        else:
            band = causal_mask() if kind == "causal" else causal_mask_end()
        return band if lengths is None or draw(st.booleans()) else band & lengths

    return masks


def _nested(values: list[int], shape: tuple[int, ...]) -> Any:
    """The numbers as nested lists of this shape."""
    if not shape:
        return values[0]
    size = len(values) // shape[0] if shape[0] else 0
    return [_nested(values[n * size : (n + 1) * size], shape[1:]) for n in range(shape[0])]
