"""``npattn.explore``: attention and its gradients as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from npattn._explore.runs import Runs


class Explorer:
    """A page on which every number of attention and of its gradients can be opened; made by `explore`.

    A notebook shows it; `write` makes a file of it that needs nothing else. ``html`` is the page itself.
    """

    __slots__ = ("_about", "html")

    def __init__(self, html: str, about: str) -> None:
        self.html = html
        self._about = about

    def write(self, path: str | Path) -> None:
        """Write the page to a file.

        Parameters
        ----------
        path : str or Path
            Where to; what stands there is replaced.
        """
        from pathlib import Path

        Path(path).write_text(self.html, encoding="ascii")

    def __repr__(self) -> str:
        return f"Explorer({self._about}, kB={len(self.html) / 1000:.0f})"

    def _repr_html_(self) -> str:
        """The page in a frame of its own: it shares nothing with the notebook, and may reach nothing."""
        from html import escape

        title, style = "Attention, step by step", "width:100%;height:46rem;border:1px solid #8888;border-radius:6px"
        return f'<iframe title="{title}" sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html)}"></iframe>'


def explore(runs: Any, tokens: Any = None, *, features: int | None = None) -> Explorer:
    """A page that shows every step of attention, forward and backward, with the sum or product behind every cell.

    Hover over a query, or reach it by keyboard, and see which keys it reads; choose a cell of any matrix and read what `explain`
    says about it; go through the steps forward and back; switch heads, layers and runs. Every number on the page was computed by
    npattn, and rounded as `explain` prints it: the page looks up, formats and colours, and computes nothing.

    Parameters
    ----------
    runs : steps, sequence of runs or mapping
        A run is what `attention_steps`, `attention_steps_backward`, `multi_head_attention_steps` or
        `multi_head_attention_steps_backward` returned, or a list of them, one for each layer. In a sequence of runs, every option
        in which they differ (mask, scale, softcap, bias, sinks, dropout) becomes a switch; a mapping gives each run a name.
    tokens : sequence of str, or a pair of them, optional
        What stands at the positions: for queries and keys alike, or ``(of_queries, of_keys)``. Their numbers by default.
    features : int, optional
        How many features of q, k, v, out and their gradients are shown. By default as many as keep the page small, and at
        least 8.

    Returns
    -------
    Explorer
        Shows itself in a notebook, and has ``write(path)``.

    Raises
    ------
    TypeError
        If a run is something else, or a token is no string.
    ValueError
        If runs have different tokens or numbers of layers or cannot be told apart; if there are more than 256 queries or keys,
        or none; or if there are more or fewer tokens than positions.

    Notes
    -----
    A number that is printed to four digits holds 15 bits. For 64 tokens and 8 heads that makes a page of 300 to 500 kB for one
    run of self-attention with its gradients; a softcap, dropout or another run adds the matrices that they change.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_forward, attention_steps_backward, causal_mask, explore
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 3, 2))
    >>> masks = (causal_mask(), None)
    >>> runs = [attention_steps_backward(dout, attention_forward(q, k, v, mask=mask)[1]) for mask in masks]
    >>> explore(runs, ["a", "b", "c"])  # doctest: +ELLIPSIS
    Explorer(runs=2, layers=1, heads=1, T=3, S=3, kB=...)
    """
    from npattn._explore.page import make_page
    from npattn._explore.runs import read_runs

    if features is not None and (not isinstance(features, int) or features < 1):
        raise ValueError(f"explore: features must be a positive integer, got {features!r}")
    given = read_runs(runs)
    return Explorer(make_page(given, tokens, features), _about(given))


def _about(given: Runs) -> str:
    layer = given.runs[0][0]
    heads = layer.outer[-1] if layer.outer else 1
    T, S = layer.problem.queries, layer.problem.keys
    return f"runs={len(given.runs)}, layers={len(given.runs[0])}, heads={heads}, T={T}, S={S}"
