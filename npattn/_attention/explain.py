"""Steps in words and numbers: a table of all, and the sum or product behind one cell."""

from __future__ import annotations

import math
from typing import Any

from npattn._arrays.namespace import Array
from npattn._attention.place import Place
from npattn._attention.recipes import Sum, own_index, recipes, sharers, shown_terms
from npattn._attention.shades import unit_bias
from npattn._attention.tiles import dropout_factors

FORMULAS = {
    "scores": "scale * q @ k.T",
    "capped": "softcap * tanh(scores / softcap)",
    "biased": "capped + bias, -inf where masked",
    "weights": "exp(biased - row_max) / row_sum",
    "dropped": "weights * dropout factors",
    "out": "dropped @ v",
    "dv": "dropped.T @ dout",
    "ddropped": "dout @ v.T",
    "dweights": "ddropped * dropout factors",
    "dbiased": "weights * (dweights - delta + dlse)",
    "dcapped": "dbiased",
    "dscores": "dcapped * (1 - (capped / softcap)**2)",
    "dq": "scale * dscores @ k",
    "dk": "scale * dscores.T @ q",
}


def table(steps: Any) -> str:
    """Name, formula and shape of every step, with the numbers of small matrices."""
    lines = [f"{'step':<10}{'formula':<40}shape"]
    for name in (n for n in steps._fields if n in FORMULAS):
        array = getattr(steps, name)
        lines.append(f"{name:<10}{FORMULAS[name]:<40}{tuple(array.shape)}")
        rows, columns = array.shape[-2:]
        if rows <= 6 and columns <= 8 and math.prod(array.shape[:-2]) == 1:
            matrix = array[(*(0,) * (array.ndim - 2), ...)]
            lines += [f"{'':<10}" + "".join(f"{float(matrix[i, j]):>10.4g}" for j in range(columns)) for i in range(rows)]
    return "\n".join(lines)


PROJECTIONS = {
    "q": "x_q @ w_q + b_q",
    "k": "x_kv @ w_k + b_k",
    "v": "x_kv @ w_v + b_v",
    "rotated_q": "q rotated by its positions: q below",
    "rotated_k": "k rotated by its positions: k below",
}


def projection_table(steps: Any) -> str:
    """The table of attention's steps between the projections into heads and out of them."""
    given = ((name, formula, getattr(steps, name)) for name, formula in PROJECTIONS.items())
    into = [f"{name:<10}{formula:<40}{tuple(x.shape)}" for name, formula, x in given if x is not None]
    head, *inside = table(steps.attention).replace("\nout       ", "\nheads     ").split("\n")
    return "\n".join([head, *into, *inside, f"{'out':<10}{'sum over heads of heads @ w_o, + b_o':<40}{tuple(steps.out.shape)}"])


def cell(steps: Any, backward: Any, name: str, i: int, j: int, at: tuple[int, ...]) -> str:
    """The sum or product behind ``name[i, j]``."""
    owner = steps if name in steps._fields else backward
    if name not in FORMULAS or owner is None or name not in owner._fields:
        known = [n for s in (steps, backward) if s is not None for n in s._fields if n in FORMULAS]
        raise ValueError(f"explain: there is no step {name!r} here; the steps are {', '.join(known)}")
    array = getattr(owner, name)
    outer, (rows, columns) = array.shape[:-2], array.shape[-2:]
    if not (0 <= i < rows and 0 <= j < columns):
        raise ValueError(f"explain: {name} has {rows} rows and {columns} columns, so there is no cell ({i}, {j})")
    if len(at) > len(outer) or any(not 0 <= a < n for a, n in zip(reversed(at), reversed(outer), strict=False)):
        raise ValueError(f"explain: at must be an index into the leading axes and heads {tuple(outer)}, got {at}")
    at = (0,) * (len(outer) - len(at)) + tuple(at)
    gaps = _Cell(steps, backward, i, j, at)
    given = recipes(steps.saved.problem, dlse=backward is not None and backward.dlse is not None)[name]
    recipe = next(r for r in given if r.when is None or getattr(gaps, r.when)())
    if recipe.sum is not None:
        gaps["sum"] = gaps.terms(recipe.sum)
    letters, numbers = recipe.letters.format_map(gaps), recipe.numbers.format_map(gaps)
    label = f"{name}[{i}, {j}]"
    return f"{label} = {letters}\n{'':<{len(label)}} = {numbers} = {number(float(array[(*at, i, j)]))}"


def number(x: float) -> str:
    """A number as it is printed."""
    return f"{x:.4g}"


def row_delta(weights: list[float], dweights: list[float]) -> float:
    """delta of one row; what a weight of 0 hides may be NaN."""
    return sum(w * dw for w, dw in zip(weights, dweights, strict=True) if w != 0)


class _Cell(dict[str, Any]):
    """What fills the gaps of a cell's recipe."""

    def __init__(self, steps: Any, backward: Any, i: int, j: int, at: tuple[int, ...]) -> None:
        super().__init__(i=i, j=j)
        self.steps, self.backward = steps, backward
        self.saved = steps.saved
        self.problem = self.saved.problem
        self.i, self.j, self.at = i, j, at

    def __missing__(self, name: str) -> str:
        return str(getattr(self, name)() if name in _Cell.__dict__ else number(self._step(name)))

    # Arrays ---------------------------------------------------------------------------------------------------------------

    def _array(self, name: str) -> Array:
        for owner in (self.steps, self.backward, self.saved):
            if hasattr(owner, name):
                return getattr(owner, name)
        raise KeyError(name)

    def _of(self, name: str, at: tuple[int, ...], *index: int) -> float:
        """An element at a leading index and query head: grouped and broadcast as used."""
        x = self._array(name)
        return float(x[own_index(self.problem, x.shape[: x.ndim - len(index)], at) + index])

    def _step(self, name: str) -> float:
        return self._of(name, self.at, self.i, self.j)

    def _row(self, name: str) -> list[float]:
        return [self._of(name, self.at, self.i, s) for s in range(self.problem.keys)]

    def _pair(self, make: Any) -> float:
        """The number that a (..., K, G, T, S) array made for this one pair holds."""
        problem = self.problem
        lead, head = (self.at[:-1], self.at[-1]) if problem.has_heads else (self.at, 0)
        kv_head, group = divmod(head, problem.group)
        one = [slice(n, n + 1) for n in (*lead, kv_head, group, self.i, self.j)]
        place = Place(tuple(one[:-4]), one[-4], one[-3], one[-2], one[-1], problem.whole)
        return float(problem.xp.reshape(make(problem, place), (-1,))[0])

    def terms(self, total: Sum) -> str:
        """A sum of products, its first terms written out."""
        used = [self.at] if total.shared is None else list(sharers(self.problem, self._array(total.shared).shape[:-2], self.at))
        axes = {"T": self.problem.queries, "S": self.problem.keys, "D": self.saved.q.shape[-1], "E": self.saved.v.shape[-1]}
        length = axes[total.axis]
        count, rest = shown_terms(len(used) * length)
        shown = [self._product(total, used[n // length], n % length) for n in range(count)] + [rest] * (rest != "")
        return f"({' + '.join(shown)})" if shown else "(nothing)"

    def _product(self, total: Sum, at: tuple[int, ...], n: int) -> str:
        index = {"i": self.i, "j": self.j, "n": n}
        left, right = (self._of(name, at, index[row], index[column]) for name, row, column in (total.left, total.right))
        return f"{number(left)}*{number(right) if right >= 0 else f'({number(right)})'}"

    # Numbers that are no step's -------------------------------------------------------------------------------------------

    def scale(self) -> str:
        return number(self.problem.options.scale)

    def softcap(self) -> str:
        return number(self.problem.options.softcap)

    def reason(self) -> str:
        mask: str = self.problem.options.mask.explain(self.i, self.j, T=self.problem.queries, S=self.problem.keys, at=self.at)
        return mask

    def bias(self) -> str:
        return number(self._pair(unit_bias))

    def factor(self) -> str:
        return number(self._pair(dropout_factors))

    def row_max(self) -> str:
        return number(self._of("row_max", self.at, self.i))

    def row_sum(self) -> str:
        return number(self._of("row_sum", self.at, self.i))

    def delta(self) -> str:
        return number(row_delta(self._row("weights"), self._row("dweights")))

    def dlse(self) -> str:
        return number(self._of("dlse", self.at, self.i))

    # What a recipe may depend on ------------------------------------------------------------------------------------------

    def masked(self) -> bool:
        return not self.problem.options.mask.sees(self.i, self.j, self.problem.queries, self.problem.keys, self.at)

    def blind(self) -> bool:
        return self._of("row_sum", self.at, self.i) == 0

    def cut(self) -> bool:
        return self._pair(dropout_factors) == 0

    def hidden(self) -> bool:
        return self._step("weights") == 0 and self._step("biased") == -math.inf
