"""What a page needs of one layer: its arrays, whose head reads which, and the recipes that put cells into words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from npattn._arrays.host import to_numpy
from npattn._attention.explain import number, row_delta
from npattn._attention.place import Place
from npattn._attention.problem import Problem
from npattn._attention.recipes import Recipe, own_index, recipes, shown_terms
from npattn._attention.shades import unit_bias
from npattn._attention.steps import AttentionSteps, AttentionStepsBackward
from npattn._attention.tiles import dropout_factors
from npattn._explore.numbers import Floats, Packer

FORWARD = ("q", "k", "v", "scores", "capped", "biased", "weights", "dropped", "out")
BACKWARD = ("dout", "dv", "ddropped", "dweights", "dbiased", "dcapped", "dscores", "dq", "dk")
FEATURES = {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}  # a column a feature, not a key
LEAST = 8  # features: more than explain writes out of a sum
ROOM = 32768  # numbers in the arrays of features, about as many as one step's of 64 tokens and 8 heads


class Layer:
    """One attention, with every array as a NumPy one of three axes: leading indices and heads, rows, columns."""

    def __init__(self, steps: AttentionSteps, backward: AttentionStepsBackward | None) -> None:
        self.steps, self.backward = steps, backward
        self.problem: Problem = steps.saved.problem
        self.outer = self.problem.out_shape()[:-1]
        self.arrays: dict[str, Floats] = {}
        self.own: dict[str, list[int]] = {}  # for every leading index and query head, the index of its part of an array
        for name in FORWARD + (() if backward is None else BACKWARD):
            self._put(name, self._array(name))
        for name in ("row_max", "row_sum"):
            self._put(name, getattr(steps.saved, name)[..., None])
        if backward is not None and backward.dlse is not None:
            self._put("dlse", backward.dlse[..., None])
        for name, make in (("bias", unit_bias), ("factor", dropout_factors)):
            if getattr(self.problem.options, {"factor": "dropout"}.get(name, name)) is not None:
                self._put_pairs(name, make)
        if backward is not None:
            rows = zip(
                *(self.arrays[name].reshape(-1, self.sizes["S"]).tolist() for name in ("weights", "dweights")), strict=True
            )
            self._put("delta", np.reshape([row_delta(w, dw) for w, dw in rows], (*self.outer, self.sizes["T"], 1)))

    def _array(self, name: str) -> Any:
        for owner in (self.steps, self.backward, self.steps.saved):
            if owner is not None and name in owner._fields:
                return getattr(owner, name)
        raise KeyError(name)

    def _put(self, name: str, array: Any) -> None:
        array = to_numpy(array).astype(np.float64)
        outer = array.shape[:-2]
        self.arrays[name] = array.reshape(math.prod(outer), *array.shape[-2:])
        index = [own_index(self.problem, outer, at) for at in np.ndindex(*self.outer)]
        self.own[name] = [int(np.ravel_multi_index(i, outer)) if outer else 0 for i in index]

    def _put_pairs(self, name: str, make: Any) -> None:
        """An array that the tiling makes, of the whole problem."""
        *lead, kv_heads, group, queries, keys = self.problem.whole
        *of_lead, of_heads, of_group, of_queries, of_keys = (slice(0, n) for n in self.problem.whole)
        place = Place(tuple(of_lead), of_heads, of_group, of_queries, of_keys, self.problem.whole)
        pairs = np.broadcast_to(to_numpy(make(self.problem, place)), (*lead, kv_heads, group * queries, keys))
        self._put(name, pairs.reshape(*self.outer, queries, keys))

    @property
    def sizes(self) -> dict[str, int]:
        """The lengths of the axes by their letters."""
        T, D = self.arrays["q"].shape[1:]
        S, E = self.arrays["v"].shape[1:]
        return {"T": T, "S": S, "D": D, "E": E}

    def features(self) -> int:
        """How many features keep the arrays that have them small."""
        rows = sum(len(x) * len(x[0]) for name, x in self.arrays.items() if name in FEATURES)
        return max(LEAST, ROOM // rows)

    def cut(self, features: int) -> dict[str, Floats]:
        """The arrays, of features the first ones only."""
        return {name: x[..., :features] if name in FEATURES else x for name, x in self.arrays.items()}

    # What a recipe may depend on ------------------------------------------------------------------------------------------

    def flags(self, name: str) -> tuple[Floats, list[int]]:
        """Where ``when`` holds, and whose part is whose."""
        if name == "blind":
            return self.arrays["row_sum"] == 0, self.own["row_sum"]
        if name == "cut":
            return self.arrays["factor"] == 0, self.own["factor"]
        return (self.arrays["weights"] == 0) & (self.arrays["biased"] == -np.inf), self.own["weights"]

    def masked(self) -> tuple[Floats, list[int], list[str]]:
        """For every pair 0, or the number of the reason for which the mask hides it, from 1; and the reasons."""
        mask, xp = self.problem.options.mask, self.problem.xp
        assert mask is not None
        T, S = self.problem.queries, self.problem.keys
        seen = to_numpy(mask.to_array(T, S, xp=xp, device=self.problem.device))
        outer, reasons = seen.shape[:-2], dict[str, int]()
        numbers = np.zeros(seen.shape, np.uint8)
        for *at, i, j in np.argwhere(~seen).tolist():
            words = mask.explain(i, j, T=T, S=S, at=at)
            numbers[(*at, i, j)] = reasons.setdefault(
                words.removeprefix(f"query {i} may not attend to key {j}"), len(reasons) + 1
            )
        own = [
            int(np.ravel_multi_index(own_index(self.problem, outer, at), outer)) if outer else 0 for at in np.ndindex(*self.outer)
        ]
        return numbers.reshape(-1, T, S), own, [f"query {{i}} may not attend to key {{j}}{words}" for words in reasons]


def pack(layer: Layer, packer: Packer, features: int) -> dict[str, Any]:
    """The layer as the page reads it; its arrays go to ``packer``."""
    options, sizes = layer.problem.options, layer.sizes
    arrays = layer.cut(features)
    given = recipes(layer.problem, dlse="dlse" in arrays)
    given = {name: given[name] for name in arrays if name in given}
    tables = {}
    for name in used(given, arrays):
        if name == "biased" and options.bias is None:
            block = packer.hidden(arrays[name], packer.numbers(arrays["capped"]))
        else:
            block = packer.numbers(arrays[name])
        tables[name] = {"block": block, "own": layer.own[name]}
    reasons: list[str] = []
    for when in {recipe.when for several in given.values() for recipe in several} - {None}:
        if when == "masked":
            flags, own, reasons = layer.masked()
        else:
            flags, own = layer.flags(str(when))
        tables[str(when)] = {"block": packer.flags(flags), "own": own}
    return {
        "outer": list(layer.outer),
        "whole": {name: list(layer.arrays[name].shape[1:]) for name in arrays if name in FORWARD + BACKWARD},
        "tables": tables,
        "numbers": {
            "scale": number(options.scale),
            **({} if options.softcap is None else {"softcap": number(options.softcap)}),
        },
        "recipes": {name: [_recipe(layer, r, sizes) for r in several] for name, several in given.items()},
        "reasons": reasons,
    }


def used(given: dict[str, tuple[Recipe, ...]], arrays: dict[str, Floats]) -> Iterator[str]:
    """The arrays that are shown, and those whose numbers stand in recipes."""
    named = {name for several in given.values() for r in several for name in re.findall(r"\{(\w+)\}", r.numbers)}
    return (name for name in arrays if name in FORWARD + BACKWARD or name in named)


def _recipe(layer: Layer, recipe: Recipe, sizes: dict[str, int]) -> dict[str, Any]:
    parts: dict[str, Any] = {"letters": recipe.letters, "numbers": recipe.numbers, "when": recipe.when}
    if recipe.sum is None:
        return parts
    length, sharers = sizes[recipe.sum.axis], None
    if recipe.sum.shared is not None:
        own = layer.own[recipe.sum.shared]
        sharers = [[g for g, mine in enumerate(own) if mine == n] for n in range(max(own) + 1)]
    shown, rest = shown_terms(length * (1 if sharers is None else len(sharers[0])))
    total = recipe.sum._asdict() | {"length": length, "shown": shown, "rest": rest, "sharers": sharers}
    return {**parts, "sum": total}
