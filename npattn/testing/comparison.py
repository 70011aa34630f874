"""A learner's own chain beside ours, name by name: exact, close, or wrong, and which step went wrong first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_items
from npattn._attention.steps import AttentionSteps, AttentionStepsBackward
from npattn.testing.gradient_report import index_text
from npattn.testing.libraries import to_numpy
from npattn.testing.vector_trees import is_floating

EXACT, CLOSE, WRONG, MISSING = "exact", "close", "wrong", "not there"


class Compared(NamedTuple):
    """One array beside ours."""

    name: str
    verdict: str  # exact, close, wrong or not there
    error: float  # the largest difference, as a share of our largest number
    where: str  # of the largest difference, with both values; or what is the matter

    @property
    def right(self) -> bool:
        """Whether it is exact or close."""
        return self.verdict in (EXACT, CLOSE)


class Comparison(NamedTuple):
    """Every name in the order in which it is computed; ``print`` shows a table."""

    rows: tuple[Compared, ...]
    unknown: tuple[str, ...]  # names that ours do not have

    @property
    def first_wrong(self) -> str | None:
        """The first name that is wrong: what comes after may be wrong because of it."""
        return next((row.name for row in self.rows if row.verdict == WRONG), None)

    @property
    def right(self) -> bool:
        """Whether everything that is there is right, and something is."""
        return self.first_wrong is None and any(row.right for row in self.rows)

    def __repr__(self) -> str:
        lines = [("name", "verdict", "error", "largest difference")]
        for name, verdict, error, where in self.rows:
            shown = "" if verdict == MISSING else f"{error:.1e}"
            mark = "   <- the first that is wrong" if name == self.first_wrong else ""
            lines.append((name, verdict, shown, where + mark))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        if self.unknown:
            text.append(f"no such name: {', '.join(self.unknown)}")
        return "\n".join(text)


def compare(mine: Any, grads: Any, *, rtol: float = 1e-6) -> Comparison:
    """Set arrays of one's own beside ours, by name, in the order in which they are computed.

    Parameters
    ----------
    mine : mapping, NamedTuple or tree
        Arrays by the names that ours have; not all of them need be there. A name may be ``"softmax.dx"`` for a tree in a tree.
    grads : AttentionSteps, AttentionStepsBackward, or any tree of arrays
        Ours: what ``attention_steps``, ``attention_steps_backward`` or a backward gave.
    rtol : float, optional
        How far apart two numbers may be that are close, as a share of the largest number of the array.

    Returns
    -------
    Comparison
        ``right``, ``first_wrong``, and a table of all.

    Examples
    --------
    >>> from npattn import attention_forward, attention_steps
    >>> q = k = v = np.eye(2)
    >>> steps = attention_steps(attention_forward(q, k, v)[1])
    >>> weights = np.exp(q @ k.T) / np.exp(q @ k.T).sum(axis=-1, keepdims=True)  # without the scale
    >>> compare({"scores": q @ k.T / 2**0.5, "weights": weights, "out": weights @ v}, steps)
    name     verdict    error    largest difference
    scores   exact      0.0e+00
    capped   not there
    biased   not there
    weights  wrong      9.2e-02  [0, 0]: 0.731059, not 0.669762   <- the first that is wrong
    dropped  not there
    out      wrong      9.2e-02  [0, 0]: 0.731059, not 0.669762
    """
    ours, given = _named(grads), _named(mine)
    rows = tuple(_compared(name, given.get(name), wanted, rtol) for name, wanted in ours.items())
    return Comparison(rows, tuple(name for name in given if name not in ours))


def _named(tree: Any) -> dict[str, Any]:
    """The arrays of a tree by name, in order; steps in the order of the computation."""
    if isinstance(tree, AttentionSteps):
        return {name: x for name, x in tree._asdict().items() if name != "saved"}
    if isinstance(tree, AttentionStepsBackward):
        return {name: x for name, x in tree._asdict().items() if name not in ("steps", "dout", "dlse")}
    if isinstance(tree, Mapping):
        return {name: x for top, value in tree.items() for name, x in tree_items(value, str(top))}
    return {name: x for name, x in tree_items(tree) if is_floating(x)}


def _compared(name: str, given: Any, wanted: Any, rtol: float) -> Compared:
    if given is None:
        return Compared(name, MISSING, 0.0, "")
    x, y = np.asarray(to_numpy(given) if hasattr(given, "shape") else given, dtype=np.float64), to_numpy(wanted)
    y = np.asarray(y, dtype=np.float64)
    if x.shape != y.shape:
        return Compared(name, WRONG, np.inf, f"its shape is {x.shape}, not {y.shape}{_hint(x, y)}")
    with np.errstate(all="ignore"):
        off = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    off = np.where(np.isnan(off), np.inf, off)
    worst = float(off.max(initial=0))
    if worst == 0:
        return Compared(name, EXACT, 0.0, "")
    at = np.unravel_index(int(off.argmax()), off.shape)
    largest = float(np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0))
    error = worst / largest if largest else worst
    where = f"[{index_text(at)}]: {x[at]:.6g}, not {y[at]:.6g}"
    return Compared(name, CLOSE, error, where) if error <= rtol else Compared(name, WRONG, error, where + _hint(x, y))


def _hint(x: Array, y: Array) -> str:
    """A likely slip, if one explains the whole difference."""
    slips = {"its sign is wrong": -x, "it is transposed": np.swapaxes(x, -1, -2)} if x.ndim > 1 else {}
    for what, z in slips.items():
        if z.shape == y.shape and np.allclose(z, y, rtol=1e-6, atol=1e-12):
            return f" ({what})"
    finite = np.isfinite(x) & np.isfinite(y) & (y != 0) if x.shape == y.shape else np.zeros(1, dtype=bool)
    if finite.any() and np.allclose(x[finite] / y[finite], factor := float(np.median(x[finite] / y[finite])), rtol=1e-6):
        return f" (all of it is {factor:.6g} times what it should be)"
    return ""
