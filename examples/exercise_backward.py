"""Exercise: backpropagation through attention, five lines of your own.

Fill in `backward` below, and let the checker compare your lines with npattn's, number by number:

    python examples/check_exercise.py examples/exercise_backward.py

It can be run at any time: what is still None is left out, and the first line that is wrong is named. docs/derivation.md derives
every line; `python -m npattn explore` shows them with numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def forward(q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Attention of T queries (T, D) over S keys (S, D) and values (S, E): given, nothing is to be done here."""
    scale = 1 / np.sqrt(q.shape[-1])
    scores = scale * (q @ k.T)  # (T, S)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = e / e.sum(axis=-1, keepdims=True)  # (T, S), every row sums to 1
    out = weights @ v  # (T, E)
    return {"scale": scale, "scores": scores, "weights": weights, "out": out}


def backward(dout: Any, q: Any, k: Any, v: Any, steps: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001
    """From dout, the gradient of out (T, E), those of everything before it. ``steps`` is what forward returned."""
    scale, weights = steps["scale"], steps["weights"]
    # out = weights @ v
    dv = None
    dweights = None
    # weights = softmax(scores), row by row
    dscores = None
    # scores = scale * (q @ k.T)
    dq = None
    dk = None
    del scale, weights  # this line may go once you use them
    return {"dv": dv, "dweights": dweights, "dscores": dscores, "dq": dq, "dk": dk}
