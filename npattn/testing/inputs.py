"""Problems in the arrays of a library: what a call takes, with masks and lazy biases made of that library's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from npattn._attention.biases import LazyBias, alibi_bias, relative_bias
from npattn._attention.mask_kinds import length_mask, segment_mask
from npattn._attention.masks import as_mask
from npattn.testing.dense import ArrayMask, Band, Both, Either, Inverse, Lengths, Segments


class Inputs(NamedTuple):
    """What a call takes, in the arrays of some library."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    dout: Any
    dlse: Any

    def arrays(self) -> dict[str, Any]:
        """Every float array by name; a lazy bias's parameters under ``bias``."""
        bias, sinks = self.options.get("bias"), self.options.get("sinks")
        named = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "bias": bias.parameters if isinstance(bias, LazyBias) else bias,
            "sinks": sinks,
            "dout": self.dout,
            "dlse": self.dlse,
        }
        return {name: array for name, array in named.items() if array is not None}


def bias_with(bias: Any, parameters: Any) -> Any:
    """The same bias with other parameters (a dense one is its own parameters)."""
    if not isinstance(bias, LazyBias):
        return parameters
    if bias.name == "alibi_bias":
        return alibi_bias(parameters, offset=bias.offset)
    return relative_bias(
        parameters,
        offset=bias.offset,
        bidirectional=bias.bidirectional,  # type: ignore[attr-defined]
        max_distance=bias.max_distance,  # type: ignore[attr-defined]
    )


def mask_in(mask: Any, convert: Callable[[Any], Any], *, host: bool = True) -> Any:
    """The same mask with its boolean arrays converted, and its lengths, offsets and ids as well unless they stay on the host."""

    def integers(x: Any) -> Any:
        return x if x is None or host else convert(x)

    match mask:
        case Band(name=name, left=left, right=right, offset=offset):
            return Band(name, left, right, integers(offset))
        case Lengths(keys=keys, queries=queries):
            return length_mask(integers(keys), integers(queries))
        case Segments(queries=queries, keys=keys):
            return segment_mask(integers(queries), integers(keys))
        case Either(left=left, right=right):
            return mask_in(left, convert, host=host) | mask_in(right, convert, host=host)
        case Both(left=left, right=right):
            return mask_in(left, convert, host=host) & mask_in(right, convert, host=host)
        case Inverse(inner=inner):
            return ~mask_in(inner, convert, host=host)
        case ArrayMask(array=array):
            return as_mask("mask", convert(array))
    return convert(mask)
