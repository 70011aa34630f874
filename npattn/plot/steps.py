"""The steps of attention side by side, each above its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from npattn._arrays.host import to_numpy
from npattn._attention.multi_head_steps import MultiHeadAttentionSteps, MultiHeadAttentionStepsBackward
from npattn._attention.steps import AttentionSteps, AttentionStepsBackward
from npattn._explore.tokens import token_names
from npattn.plot._panels import Panel, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"scores": "scores", "capped": "scores", "biased": "scores", "weights": "weights", "dropped": "weights", "out": "out"}
BARS = {kind: kind for kind in ("scores", "weights", "out")} | {
    f"d{kind}": f"gradients of {kind}" for kind in ("scores", "weights", "out")
}


def plot_steps(
    steps: Any, grads: Any = None, *, at: Any = (), tokens_q: Any = None, tokens_k: Any = None, ax: Any = None
) -> Figure:
    """Attention's way from the scores to the output on one sheet, and under each step its gradient.

    Parameters
    ----------
    steps : AttentionSteps or MultiHeadAttentionSteps
        From `attention_steps` or `multi_head_attention_steps`.
    grads : AttentionStepsBackward or MultiHeadAttentionStepsBackward, optional
        From `attention_steps_backward` or `multi_head_attention_steps_backward`.
    at : tuple of int, optional
        Leading index and head; the first by default.
    tokens_q, tokens_k : sequence of str, optional
        What stands at the queries and keys.
    ax : sequence of Axes, optional
        Where to draw: those of the steps, then those of the gradients.

    Returns
    -------
    matplotlib.figure.Figure
        scores, weights and out, and between them the steps that the options ask for. All scores, before and after softcap, bias
        and mask, have one scale, weights before and after dropout have one, and so have their gradients, with 0 in the middle.

    Raises
    ------
    TypeError
        If steps or grads is something else.
    ValueError
        If there is no such leading index and head, or the tokens or Axes are more or fewer.
    """
    op = "plot_steps"
    steps = _attention_of(op, "steps", steps)
    grads = None if grads is None else _attention_of(op, "grads", grads)
    outer = tuple(steps.weights.shape[:-2])
    if len(at) > len(outer) or not all(0 <= a < n for a, n in zip(reversed(at), reversed(outer), strict=False)):
        raise ValueError(f"{op}: at must be an index into the leading axes and heads {outer}, got {tuple(at)}")
    at = (0,) * (len(outer) - len(at)) + tuple(at)
    options = steps.saved.problem.options
    asked = {
        "scores": True,
        "capped": options.softcap is not None,
        "biased": options.mask is not None or options.bias is not None,
        "weights": True,
        "dropped": options.dropout is not None,
        "out": True,
    }
    T, S = steps.weights.shape[-2:]
    of_q, of_k = token_names(op, "queries", tokens_q, "T", T), token_names(op, "keys", tokens_k, "S", S)
    hidden = to_numpy(steps.biased)[at] == -np.inf
    dead = hidden.all(axis=-1)
    chosen = [name for name, is_asked in asked.items() if is_asked]

    def panel(name: str, kind: str, array: Any, marked: bool) -> Panel:
        array = to_numpy(array)[at].astype(np.float64)
        if name.endswith("out"):
            features = [str(n) for n in range(array.shape[-1])]
            return Panel(name, array, (of_q, features), kind, dead=dead if marked else None, axes=("query", "feature"))
        return Panel(name, array, (of_q, of_k), kind, hidden if marked else None, dead if marked else None)

    # scores are shown as they are also where a mask hides them, and so are the gradients of what was hidden before it is dropped
    panels = [panel(name, KINDS[name], getattr(steps, name), name not in ("scores", "capped")) for name in chosen]
    if grads is not None:
        panels += [panel(f"d{n}", f"d{KINDS[n]}", getattr(grads, f"d{n}"), KINDS[n] == "scores") for n in chosen]
    return draw(op, panels, len(chosen), BARS, ax)


def _attention_of(op: str, name: str, x: Any) -> Any:
    """Attention's own steps or gradients, out of those of multi-head attention."""
    whole, part = (
        (MultiHeadAttentionSteps, AttentionSteps)
        if name == "steps"
        else (MultiHeadAttentionStepsBackward, AttentionStepsBackward)
    )
    x = x.attention if isinstance(x, whole) else x
    if not isinstance(x, part):
        raise TypeError(f"{op}: {name} must be {part.__name__} or {whole.__name__}, got {type(x).__name__}")
    return x
