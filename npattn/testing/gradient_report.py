"""What a failed gradient check prints: of every input the worst element, by finite differences along single elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn.testing.vector_trees import Vectors, difference_along, floating_leaves, unit_vector

LOOKED_AT = 400  # elements of an input that a report looks at


class _Worst(NamedTuple):
    """The element of an input whose gradient is furthest off."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    expected: float
    got: float
    looked_at: int

    def line(self) -> tuple[str, ...]:
        off = abs(self.got - self.expected)
        ratio = off / abs(self.expected) if self.expected else math.inf if off else 0.0
        place = (
            f"[{index_text(self.at)}]"
            if self.looked_at == math.prod(self.shape)
            else f"[{index_text(self.at)}] of {self.looked_at} tried"
        )
        return (self.name, str(self.shape), place, f"{self.expected:.9g}", f"{self.got:.9g}", f"{off:.2e}", f"{ratio:.2e}")


def worst_elements(
    forward: Callable[..., tuple[Any, Any]],
    names: Sequence[str],
    values: Sequence[Any],
    g: Vectors,
    gradients: Vectors,
    h: float,
    rng: np.random.Generator,
) -> str:
    """A table with the worst element of every input, by differences along single elements."""
    point = floating_leaves(names, values)
    lines: list[tuple[str, ...]] = [("input", "shape", "worst element", "differences", "backward", "absolute", "relative")]
    for name, x in point.items():
        every = list(np.ndindex(*x.shape))
        chosen = every if len(every) <= LOOKED_AT else [every[n] for n in rng.choice(len(every), LOOKED_AT, replace=False)]
        worst = None
        for at in chosen:
            t = {other: unit_vector(tuple(y.shape), at) if other == name else np.zeros(y.shape) for other, y in point.items()}
            change = difference_along(lambda *moved: forward(*moved)[0], names, values, t, h)
            expected = sum(float((g[out] * change[out]).sum()) for out in g)
            here = _Worst(name, tuple(x.shape), at, expected, float(gradients[name][at]), len(chosen))
            if worst is None or not abs(here.got - here.expected) <= abs(worst.got - worst.expected):
                worst = here
        if worst is not None:
            lines.append(worst.line())
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def index_text(at: Sequence[Any]) -> str:
    return ", ".join(str(int(n)) for n in at)
