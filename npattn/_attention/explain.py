"""Steps in words and numbers: a table of all, and the sum or product behind one cell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.place import Place
from npattn._attention.tiling import dropout_factors, unit_bias

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

_TERMS = 6  # of a sum, written out


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
    letters, numbers = getattr(_Cell(steps, backward, i, j, at), name)()
    label = f"{name}[{i}, {j}]"
    return f"{label} = {letters}\n{'':<{len(label)}} = {numbers} = {_number(float(array[(*at, i, j)]))}"


def _number(x: float) -> str:
    return f"{x:.4g}"


def _product(*factors: float) -> str:
    return "*".join(_number(f) if f >= 0 or n == 0 else f"({_number(f)})" for n, f in enumerate(factors))


def _sum(terms: list[str]) -> str:
    shown = terms if len(terms) <= _TERMS else [*terms[: _TERMS - 1], f"... ({len(terms) - _TERMS + 1} more)"]
    return f"({' + '.join(shown)})" if shown else "(nothing)"


class _Cell:
    """One method a step, which returns its letters and its numbers."""

    def __init__(self, steps: Any, backward: Any, i: int, j: int, at: tuple[int, ...]) -> None:
        self.steps, self.backward = steps, backward
        self.saved = steps.saved
        self.problem = self.saved.problem
        self.i, self.j, self.at = i, j, at

    # The arrays of one leading index and head ---------------------------------------------------------------------------

    def _of(self, x: Array, at: tuple[int, ...], *index: int) -> float:
        """An element of q, k, v, dout or a result at the leading index and query head ``at``: grouped and broadcast as used."""
        outer = x.shape[: x.ndim - len(index)]
        at = at[len(at) - len(outer) :]
        if outer and outer[-1] != 1:
            heads = self.problem.kv_heads * self.problem.group
            at = (*at[:-1], at[-1] * outer[-1] // heads)  # query head h reads key/value head h // (H / K)
        return float(x[tuple(0 if n == 1 else a for a, n in zip(at, outer, strict=True)) + index])

    def _sharers(self, x: Array) -> Iterator[tuple[int, ...]]:
        """The leading indices and query heads whose tiles add to the cell of ``x``'s gradient at ``self.at``."""
        full = self.problem.out_shape()[:-1]
        outer = x.shape[:-2]
        for at in np.ndindex(*full):
            own = at[len(at) - len(outer) :]
            if outer and outer[-1] != 1:
                own = (*own[:-1], own[-1] * outer[-1] // (self.problem.kv_heads * self.problem.group))
            if all(n == 1 or a == b for a, b, n in zip(own, self.at, outer, strict=True)):
                yield at

    def _pair(self, make: Any) -> float:
        """The number that a (..., K, G, T, S) array made for this one pair holds."""
        problem = self.problem
        lead, head = (self.at[:-1], self.at[-1]) if problem.has_heads else (self.at, 0)
        kv_head, group = divmod(head, problem.group)
        one = [slice(n, n + 1) for n in (*lead, kv_head, group, self.i, self.j)]
        place = Place(tuple(one[:-4]), one[-4], one[-3], one[-2], one[-1], problem.whole)
        return float(problem.xp.reshape(make(problem, place), (-1,))[0])

    def _row(self, name: str) -> float:
        return self._of(getattr(self.saved, name), self.at, self.i)

    def _step(self, name: str) -> float:
        owner = self.steps if name in self.steps._fields else self.backward
        return self._of(getattr(owner, name), self.at, self.i, self.j)

    # Forward -------------------------------------------------------------------------------------------------------------

    def scores(self) -> tuple[str, str]:
        q, k = self.saved.q, self.saved.k
        terms = [_product(self._of(q, self.at, self.i, d), self._of(k, self.at, self.j, d)) for d in range(q.shape[-1])]
        letters = f"scale * sum_d q[{self.i}, d] * k[{self.j}, d]"
        return letters, f"{_number(self.problem.options.scale)} * {_sum(terms)}"

    def capped(self) -> tuple[str, str]:
        softcap = self.problem.options.softcap
        score = self._step("scores")
        if softcap is None:
            return "scores, as there is no softcap", _number(score)
        c = _number(softcap)
        return f"softcap * tanh(scores[{self.i}, {self.j}] / softcap)", f"{c} * tanh({_number(score)} / {c})"

    def biased(self) -> tuple[str, str]:
        mask = self.problem.options.mask
        if mask is not None and not mask.sees(self.i, self.j, self.problem.queries, self.problem.keys, self.at):
            reason = mask.explain(self.i, self.j, T=self.problem.queries, S=self.problem.keys, at=self.at)
            return "-inf where masked", reason
        value = self._step("capped")
        if self.problem.options.bias is None:
            return "capped, as there is no bias and no mask hides it", _number(value)
        bias = self._pair(unit_bias)
        return f"capped[{self.i}, {self.j}] + bias[{self.i}, {self.j}]", f"{_number(value)} + {_number(bias)}"

    def weights(self) -> tuple[str, str]:
        if self._row("row_sum") == 0:
            return "0 where a query sees nothing", "no key to attend to"
        numbers = f"exp({_number(self._step('biased'))} - {_number(self._row('row_max'))}) / {_number(self._row('row_sum'))}"
        return f"exp(biased[{self.i}, {self.j}] - row_max[{self.i}]) / row_sum[{self.i}]", numbers

    def _factor(self) -> float | None:
        return None if self.problem.options.dropout is None else self._pair(dropout_factors)

    def dropped(self) -> tuple[str, str]:
        factor = self._factor()
        weight = _number(self._step("weights"))
        if factor is None:
            return "weights, as there is no dropout", weight
        letters = "weights * 0, as dropout drops it" if factor == 0 else "weights / (1 - rate), as dropout keeps it"
        return letters, f"{weight} * {_number(factor)}"

    def out(self) -> tuple[str, str]:
        v, dropped = self.saved.v, self.steps.dropped
        terms = [
            _product(self._of(dropped, self.at, self.i, s), self._of(v, self.at, s, self.j)) for s in range(self.problem.keys)
        ]
        return f"sum_j dropped[{self.i}, j] * v[j, {self.j}]", _sum(terms)

    # Backward ------------------------------------------------------------------------------------------------------------

    def dv(self) -> tuple[str, str]:
        return self._over_queries(self.saved.v, self.steps.dropped, self.backward.dout, "", "dropped", "dout")

    def ddropped(self) -> tuple[str, str]:
        v, dout = self.saved.v, self.backward.dout
        terms = [_product(self._of(dout, self.at, self.i, e), self._of(v, self.at, self.j, e)) for e in range(v.shape[-1])]
        return f"sum_e dout[{self.i}, e] * v[{self.j}, e]", _sum(terms)

    def dweights(self) -> tuple[str, str]:
        factor = self._factor()
        value = _number(self._step("ddropped"))
        if factor is None:
            return "ddropped, as there is no dropout", value
        return "ddropped * the factor that dropout gave the weight", f"{value} * {_number(factor)}"

    def dbiased(self) -> tuple[str, str]:
        if self._step("weights") == 0 and self._step("biased") == -math.inf:
            return "0 where masked", "a pair that is hidden has no influence"
        weights, dweights = self.steps.weights, self.backward.dweights
        delta = sum(
            self._of(weights, self.at, self.i, s) * self._of(dweights, self.at, self.i, s)
            for s in range(self.problem.keys)
            if self._of(weights, self.at, self.i, s) != 0
        )
        dlse = None if self.backward.dlse is None else self._of(self.backward.dlse, self.at, self.i)
        tail = "" if dlse is None else f" + dlse[{self.i}]"
        letters = f"weights * (dweights - delta{tail}), delta = sum_j weights[{self.i}, j] * dweights[{self.i}, j]"
        shown = "" if dlse is None else f" + {_number(dlse)}"
        return letters, f"{_number(self._step('weights'))} * ({_number(self._step('dweights'))} - {_number(delta)}{shown})"

    def dcapped(self) -> tuple[str, str]:
        return "dbiased: the bias is only added", _number(self._step("dbiased"))

    def dscores(self) -> tuple[str, str]:
        softcap = self.problem.options.softcap
        value = _number(self._step("dcapped"))
        if softcap is None:
            return "dcapped, as there is no softcap", value
        numbers = f"{value} * (1 - ({_number(self._step('capped'))} / {_number(softcap)})**2)"
        return f"dcapped * (1 - (capped[{self.i}, {self.j}] / softcap)**2)", numbers

    def dq(self) -> tuple[str, str]:
        k, dscores = self.saved.k, self.backward.dscores
        terms = [
            _product(self._of(dscores, at, self.i, s), self._of(k, at, s, self.j))
            for at in self._sharers(self.saved.q)
            for s in range(self.problem.keys)
        ]
        letters = f"scale * sum_j dscores[{self.i}, j] * k[j, {self.j}]"
        return letters, f"{_number(self.problem.options.scale)} * {_sum(terms)}"

    def dk(self) -> tuple[str, str]:
        scale = f"{_number(self.problem.options.scale)} * "
        return self._over_queries(self.saved.k, self.backward.dscores, self.saved.q, scale, "dscores", "q")

    def _over_queries(
        self, own: Array, pairs: Array, rows: Array, scale: str, pairs_name: str, rows_name: str
    ) -> tuple[str, str]:
        sharers = list(self._sharers(own))
        terms = [
            _product(self._of(pairs, at, t, self.i), self._of(rows, at, t, self.j))
            for at in sharers
            for t in range(self.problem.queries)
        ]
        over = "sum_i" if len(sharers) == 1 else "sum over the heads that share it and i,"
        letters = f"{'scale * ' if scale else ''}{over} {pairs_name}[i, {self.i}] * {rows_name}[i, {self.j}]"
        return letters, f"{scale}{_sum(terms)}"
