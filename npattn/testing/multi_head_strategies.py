"""Hypothesis strategies for whole multi-head attentions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from npattn.layers.dropout import Dropout
from npattn.testing.mask_strategies import MASKS, broadcastable_shapes, mask_trees
from npattn.testing.multi_head import MultiHeadProblem, multi_head_problem


@st.composite
def multi_head_problems(
    draw: DrawFn,
    *,
    masks: Sequence[str] = MASKS,
    bias: bool = True,
    grouped: bool = True,
    options: bool = True,
    max_side: int = 4,
) -> MultiHeadProblem:
    """A whole multi-head attention: self or cross, grouped heads, widths that all differ, biases, sinks, masks, options.

    Parameters
    ----------
    masks : sequence of str, optional
        The kinds that may be combined, of ``MASKS``; none for no masks.
    bias : bool, optional
        Whether there may be an additive bias.
    grouped : bool, optional
        Whether there may be fewer key/value heads than heads.
    options : bool, optional
        Whether scale, softcap, dropout and sinks may be drawn.
    max_side : int, optional
        The largest length and width.

    Returns
    -------
    SearchStrategy of MultiHeadProblem

    Examples
    --------
    >>> from hypothesis import given
    >>> @given(multi_head_problems(masks=["causal"]))
    ... def test_my_layer(problem): ...
    """
    side = st.integers(1, max_side)
    lead = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * (draw(st.integers(1, 2)) if grouped else 1)
    T, S, width, kv_width = (draw(side) for _ in range(4))
    choice: Any = st.sampled_from
    given: dict[str, Any] = {
        "heads": heads, "kv_heads": kv_heads, "head_size": draw(side), "value_size": draw(side), "out_width": draw(side),
        "biased": draw(st.booleans()), "seed": draw(st.integers(0, 999)),
    }  # fmt: skip
    if draw(st.booleans()) and masks:
        given["mask"] = draw(mask_trees(lead, heads, T, S, kinds=masks))
    if draw(st.booleans()) and bias:
        given["bias"] = draw(broadcastable_shapes((*lead, heads, T, S)))
    if options:
        given["sinks"] = draw(choice([False, True]))
        given["scale"] = draw(choice([None, 1.0, -0.5]))
        given["softcap"] = draw(choice([None, 1.0, 5.0]))
        given["dropout"] = draw(choice([None, Dropout(0.5, 3)]))
    return multi_head_problem((*lead, T, width), (*lead, S, kv_width), **given)
