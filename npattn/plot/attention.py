"""Maps of who attends to whom: weights, and masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npattn._arrays.host import to_numpy
from npattn._attention.masks import as_mask
from npattn._explore.tokens import token_names
from npattn.plot._panels import Panel, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_attention(weights: Any, tokens_q: Any = None, tokens_k: Any = None, *, ax: Any = None) -> Figure:
    """Attention weights as a map: a row a query, a column a key.

    Parameters
    ----------
    weights : array (T, S), (H, T, S) or (L, H, T, S), or a list of such
        The weights of one head, of a panel for each head, or of a row of panels for each layer: what `attention_weights` gives
        for one entry of a batch; of several layers a list of them.
    tokens_q, tokens_k : sequence of str, optional
        What stands at the queries and keys; their numbers by default.
    ax : Axes or sequence of Axes, optional
        Where to draw, one for each panel.

    Returns
    -------
    matplotlib.figure.Figure
        All panels have one scale, from 0 to the largest weight, and one colour bar.

    Raises
    ------
    ValueError
        If weights has another shape, or the tokens or Axes are more or fewer.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.plot import plot_attention
    >>> figure = plot_attention(np.array([[1.0, 0.0], [0.25, 0.75]]), ["a", "b"], ["a", "b"])  # doctest: +SKIP
    >>> figure.savefig("attention.png")  # doctest: +SKIP
    """
    op = "plot_attention"
    array = np.stack([to_numpy(x) for x in weights]) if isinstance(weights, (list, tuple)) else to_numpy(weights)
    array = array.astype(np.float64)
    if array.ndim not in (2, 3, 4):
        raise ValueError(f"{op}: weights must have shape (T, S), (H, T, S) or (L, H, T, S), got {array.shape}")
    T, S = array.shape[-2:]
    names = token_names(op, "queries", tokens_q, "T", T), token_names(op, "keys", tokens_k, "S", S)
    panels = []
    for at in np.ndindex(*array.shape[:-2]):
        title = ", ".join(f"{thing} {n}" for thing, n in zip(("layer", "head")[2 - len(at) :], at, strict=True))
        panels.append(Panel(title, array[at], names, "weights", dead=(array[at] == 0).all(axis=-1)))
    return draw(op, panels, array.shape[1] if array.ndim == 4 else min(len(panels), 4), {"weights": "weight"}, ax)


def plot_mask(mask: Any, T: int, S: int, *, at: Any = (), tokens_q: Any = None, tokens_k: Any = None, ax: Any = None) -> Figure:
    """Who may attend to whom: a row a query, a column a key.

    Parameters
    ----------
    mask : Mask or boolean array
        True where a query may attend to a key.
    T, S : int
        The number of queries and of keys.
    at : tuple of int, optional
        Leading index and head, for a mask that has them; the first by default.
    tokens_q, tokens_k : sequence of str, optional
        What stands at the queries and keys.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    matplotlib.figure.Figure
        One panel.

    Raises
    ------
    TypeError
        If mask is no mask.
    ValueError
        If it does not fit T and S, or the tokens or Axes are more or fewer.
    """
    op = "plot_mask"
    rows = as_mask(op, mask).draw(T, S, at=at).split("\n")
    seen = np.array([[mark == "#" for mark in row] for row in rows], dtype=np.float64).reshape(T, S)
    names = token_names(op, "queries", tokens_q, "T", T), token_names(op, "keys", tokens_k, "S", S)
    return draw(op, [Panel("", seen, names, "mask", hidden=seen == 0, dead=(seen == 0).all(axis=-1))], 1, {}, ax)
