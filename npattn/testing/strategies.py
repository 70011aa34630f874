"""Hypothesis strategies for whole attention problems. Only this module and `mask_strategies` import Hypothesis.

Every drawn problem shrinks towards rank 2, lengths of 1, no options and seed 0, and prints as the code that rebuilds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from npattn.layers.dropout import Dropout
from npattn.testing.layouts import LAYOUTS
from npattn.testing.mask_strategies import MASKS, broadcastable_shapes, mask_trees
from npattn.testing.problems import EXTREMES, Alibi, AttentionProblem, Relative, attention_problem

__all__ = ["BIASES", "EXTREMES", "LAYOUTS", "MASKS", "attention_problems", "broadcastable_shapes", "mask_trees", "multiples_of"]

Axis: TypeAlias = int | Sequence[int] | SearchStrategy[int] | None
Masks: TypeAlias = Sequence[str] | Callable[[tuple[int, ...], int, int, int], SearchStrategy[Any]]

BIASES = ("dense", "alibi", "relative")


def multiples_of(n: int, *, most: int = 256) -> SearchStrategy[int]:
    """Lengths that are multiples of ``n``, up to ``most``.

    Parameters
    ----------
    n : int
        The factor.
    most : int, optional
        The largest length.

    Returns
    -------
    SearchStrategy of int
        For pinning an axis: ``attention_problems(T=multiples_of(16))``.
    """
    multiples = st.integers(1, most // n).map(lambda m: m * n)
    multiples.factor = n  # type: ignore[attr-defined] # by which others can tell
    return multiples


@st.composite
def attention_problems(
    draw: DrawFn,
    *,
    dtypes: Sequence[str] = ("float64",),
    masks: Masks = MASKS,
    bias: Sequence[str] = BIASES,
    hidden: bool = True,
    grouped: bool = True,
    scale: bool = True,
    softcap: bool = True,
    sinks: bool = True,
    dropout: bool = True,
    dlse: bool = True,
    broadcast: bool = True,
    layouts: Sequence[str] = (),
    extreme: Sequence[str] = (),
    empty: bool = False,
    ranks: Sequence[int] = (2, 3, 4, 5),
    max_side: int = 6,
    B: Axis = None,
    H: Axis = None,
    K: Axis = None,
    T: Axis = None,
    S: Axis | Literal["T"] = None,
    D: Axis = None,
    E: Axis | Literal["D"] = None,
) -> AttentionProblem:
    """A whole problem: shapes, numbers, mask, bias, scale, softcap, sinks, dropout, cotangents.

    Parameters
    ----------
    dtypes : sequence of str, optional
        Of the arrays.
    masks : sequence of str or callable, optional
        The kinds that may be combined, of ``MASKS``; none for no masks. Dead rows come with them. Or ``masks(lead, H, T, S)``,
        which makes a strategy of masks.
    bias : sequence of str, optional
        The kinds of ``BIASES`` that may be drawn. A dense one has any shape that broadcasts.
    hidden : bool, optional
        Whether a dense bias may hold -inf.
    grouped : bool, optional
        Whether there may be fewer key/value heads than heads.
    scale, softcap, sinks, dropout, dlse : bool, optional
        Whether they may be drawn.
    broadcast : bool, optional
        Whether q, k and v may differ in rank and have leading axes of 1 that broadcast.
    layouts : sequence of str, optional
        How arrays may lie in memory, of ``LAYOUTS``.
    extreme : sequence of str, optional
        Kinds of ``EXTREMES`` that may be drawn, or ``infinite bias``.
    empty : bool, optional
        Whether lengths may be 0.
    ranks : sequence of int, optional
        Of q.
    max_side : int, optional
        The largest T, S, D, E that is drawn.
    B, H, K, T, S, D, E : int, sequence or strategy, optional
        Pin an axis: one length, some lengths, or a strategy of them; S may be ``"T"`` and E may be ``"D"``, the same as that.
        With H or K pinned, K must divide H for what is drawn to exist.

    Returns
    -------
    SearchStrategy of AttentionProblem

    Examples
    --------
    >>> from hypothesis import given
    >>> @given(attention_problems(D=(64, 128), T=multiples_of(16), masks=["causal"], bias=[]))
    ... def test_my_kernel(problem): ...
    """
    least = 0 if empty else 1
    side = st.integers(least, max_side)

    def axis(pin: Axis, default: SearchStrategy[int]) -> int:
        if pin is None:
            return draw(default)
        if isinstance(pin, int):
            return pin
        return draw(pin if isinstance(pin, SearchStrategy) else st.sampled_from(list(pin)))

    rank = draw(st.sampled_from([*sorted(ranks), *(r for r in sorted(ranks) if r > 3)]))  # most bugs need leading axes
    queries = axis(T, side)
    keys = queries if S == "T" else axis(S, side)
    head_size = axis(D, side)
    value_size = head_size if E == "D" else axis(E, side)
    heads, kv_heads = _draw_heads(draw, axis, rank, H, K, grouped, empty)
    lead = tuple(axis(B, st.integers(least, 3)) for _ in range(rank - 3))
    shapes = _draw_shapes(
        draw, lead, (heads, queries, head_size), (kv_heads, keys, head_size), (kv_heads, keys, value_size), rank, broadcast
    )
    lead = np.broadcast_shapes(*(s[:-3] for s in shapes))
    whole = (*lead, heads, queries, keys)

    options: dict[str, Any] = {"seed": draw(st.integers(0, 999)), "dtype": draw(st.sampled_from(list(dtypes)))}
    options["values"] = draw(st.sampled_from(["integers", "normal"]))

    def wanted(option: Any, odds: int = 1) -> bool:
        return bool(option) and draw(st.integers(0, odds)) > 0

    if wanted(masks, odds=2):
        made = masks(lead, heads, queries, keys) if callable(masks) else mask_trees(lead, heads, queries, keys, kinds=masks)
        options["mask"] = draw(made)
    if wanted(bias):
        kinds = st.sampled_from(list(bias))
        options["bias"] = _draw_bias(draw, draw(st.one_of(st.just(bias[0]), kinds)), whole)
        if hidden and not isinstance(options["bias"], (Alibi, Relative)):
            options["hidden"] = draw(st.sampled_from([0.0, 0.25, 0.75]))
    if wanted(scale):
        options["scale"] = draw(st.sampled_from([1.0, 0.25, -0.5, 0.0]))
    if wanted(softcap):
        options["softcap"] = draw(st.sampled_from([1.0, 5.0, 0.3]))
    if wanted(dropout):
        options["dropout"] = Dropout(draw(st.sampled_from([0.5, 0.2, 0.9])), draw(st.integers(-3, 999)))
    options["sinks"] = wanted(sinks)
    options["dlse"] = wanted(dlse)
    if extreme:
        options["extreme"] = tuple(draw(st.lists(st.sampled_from(list(extreme)), max_size=2, unique=True)))
    if layouts:
        names = st.sampled_from(["q", "k", "v", "dout", "bias", "sinks", "dlse"])
        options["layouts"] = draw(st.dictionaries(names, st.sampled_from(list(layouts))))
    return attention_problem(*shapes, **options)


def _draw_heads(draw: DrawFn, axis: Any, rank: int, H: Axis, K: Axis, grouped: bool, empty: bool) -> tuple[int, int]:
    if rank == 2:
        return 1, 1
    if H is None:
        kv_heads = axis(K, st.integers(0 if empty else 1, 3))
        return kv_heads * (draw(st.integers(1, 3)) if grouped else 1), kv_heads
    heads = axis(H, st.nothing())
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and (grouped or n == heads)] or [0]
    if K is not None:
        wanted = [K] if isinstance(K, int) else list(K) if not isinstance(K, SearchStrategy) else divisors
        divisors = [n for n in divisors if n in wanted]
        if not divisors:
            raise ValueError(f"attention_problems: no K among {K} divides H = {heads}")
    return heads, draw(st.sampled_from(divisors))


def _draw_shapes(
    draw: DrawFn, lead: tuple[int, ...], q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], rank: int, broadcast: bool
) -> list[tuple[int, ...]]:
    """The shapes of q, k, v: with fewer leading axes or with ones, if they may broadcast."""
    if rank == 2:
        return [q[1:], k[1:], v[1:]]
    shapes = []
    for own in (q, k, v):
        axes = lead
        if broadcast and lead and draw(st.booleans()):
            axes = tuple(1 if n > 1 and draw(st.booleans()) else n for n in lead)
            axes = axes[draw(st.integers(0, len(axes))) :] if 0 not in axes else axes
        elif broadcast and not lead and own[0] == 1 and draw(st.booleans()):
            shapes.append(own[1:])  # a single head needs no axis
            continue
        shapes.append((*axes, *own))
    if broadcast and k[0] > 1 and draw(st.booleans()):  # one key head, or one value head, for all
        which = draw(st.sampled_from([1, 2]))
        shapes[which] = (*shapes[which][:-3], 1, *shapes[which][-2:])
    return shapes


def _draw_bias(draw: DrawFn, kind: str, whole: tuple[int, ...]) -> tuple[int, ...] | Alibi | Relative:
    heads = whole[-3]
    if kind == "dense":
        return draw(broadcastable_shapes(whole))
    columns = draw(st.sampled_from([1, heads]))
    offset = draw(st.integers(-2, 4))
    if kind == "alibi":
        return Alibi(columns, offset)
    bidirectional = draw(st.booleans())
    return Relative(draw(st.sampled_from([4, 8])), columns, offset, bidirectional, draw(st.sampled_from([5, 16])))
