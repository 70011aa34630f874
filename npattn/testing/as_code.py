"""Problems, masks and biases as the code that rebuilds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from npattn._attention.biases import LazyBias
from npattn.testing.dense import ArrayMask, Band, Both, Inverse, Lengths, Segments

_DEFAULTS = {
    "seed": 0, "dtype": "float64", "values": "normal", "hidden": 0.0, "sinks": False, "dlse": False, "extreme": (), "layouts": {}
}  # fmt: skip


def call_code(given: dict[str, Any]) -> str:
    shapes = ", ".join(f"{name}={tuple(given.pop(name))}" for name in ("q", "k", "v"))
    options = [
        f"{name}={code_of(value)}"
        for name, value in given.items()
        if value is not None and (name == "mask" or value != _DEFAULTS.get(name))
    ]
    return f"attention_problem({', '.join([shapes, *options])})"


def literal_code(problem: Any) -> str:
    fields = [
        f"{name}={code_of(value)}"
        for name, value in zip(problem._fields, problem, strict=True)
        if value is not None and name not in ("code", "seed")
    ]
    return f"AttentionProblem({', '.join(fields)})"


def code_of(value: Any) -> str:
    """A value as code, with ``np`` for NumPy and npattn's own names."""
    match value:
        case np.ndarray():
            dtype = value.dtype.newbyteorder("=").name
            return f"np.array({_list(value)}, dtype=np.{dtype})" if value.size else f"np.zeros({value.shape}, dtype=np.{dtype})"
        case LazyBias():
            more = "" if value.name == "alibi_bias" else _keywords(value, ("bidirectional", "max_distance"))
            return f"{value.name}({code_of(value.parameters)}{_keywords(value, ('offset',))}{more})"
        case Band(name=name, left=left, right=right, offset=offset):
            sides = [repr(left), repr(right)] if name == "window_mask" else []
            shift = [] if offset is None or (offset.ndim == 0 and int(offset) == 0) else [f"offset={_integers(offset)}"]
            return f"{name}({', '.join(sides + shift)})"
        case Lengths(keys=keys, queries=queries):
            return f"length_mask({_integers(keys)}{'' if queries is None else ', ' + _integers(queries)})"
        case Segments(queries=queries, keys=keys):
            return f"segment_mask({_integers(queries)}{'' if keys is queries else ', ' + _integers(keys)})"
        case Both(left=left, right=right, sign=sign):  # the brackets that are not needed do no harm
            return f"({code_of(left)} {sign} {code_of(right)})"
        case Inverse(inner=inner):
            return f"~{code_of(inner)}"
        case ArrayMask(array=array):
            return code_of(array)
    return repr(value)


def _list(value: np.ndarray[Any, Any]) -> str:
    return repr(value.tolist()).replace("inf", "np.inf").replace("nan", "np.nan")


def _integers(value: Any) -> str:
    value = np.asarray(value)
    return _list(value) if value.size else code_of(value)


def _keywords(value: Any, names: Sequence[str]) -> str:
    return "".join(f", {name}={getattr(value, name)!r}" for name in names)
