"""What the composites share: errors in the names of their parameters, and how parameters begin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_int, shape_error
from npattn._arrays.namespace import Array, Namespace, array_namespace, asarray, float_dtype


def check_parameters(op: str, arrays: Mapping[str, Array | None], axes: Mapping[str, str]) -> None:
    """Errors in the names that the caller knows, before the parts of a composite raise them in theirs.

    ``axes`` has the letters of every array, ``"...TC"`` where any axes may lead. One letter is one length; a lower-case one is a
    further C, of keys and values or of the output.
    """
    array_namespace(op, **arrays)
    float_dtype(op, **arrays)
    sizes: dict[str, tuple[int, str]] = {}
    for name, letters in axes.items():
        array = arrays[name]
        if array is None:
            continue
        own = letters.removeprefix("...")
        shape = array.shape if own == letters else array.shape[-len(own) :]
        shown = ["..."] * (own != letters) + ["C" if letter.islower() else letter for letter in own]
        expected = f"({', '.join(shown)}{',' * (len(shown) == 1)})"
        if len(shape) != len(own):
            shape_error(op, name, expected, array.shape)
        for axis, letter, n in zip(own, shown[-len(own) :], shape, strict=True):
            size, source = sizes.setdefault(axis, (n, name))
            if size != n:
                shape_error(op, name, f"{expected} with {letter} = {size} as {source} has", array.shape)


def check_sizes(op: str, **sizes: int) -> None:
    """Lengths of axes are integers from 1 on."""
    for name, size in sizes.items():
        host_int(op, name, size, least=1)


class Parameters(NamedTuple):
    """New parameters in a library, on a device, in a dtype; the library's default float dtype if that is None."""

    xp: Namespace
    dtype: Any
    device: Any

    def array(self, values: Any) -> Array:
        """The given numbers."""
        dtype = self.xp.zeros(1).dtype if self.dtype is None else self.dtype
        return asarray(values, xp=self.xp, device=self.device, dtype=dtype)

    def zeros(self, *shape: int) -> Array:
        """Nothing but 0."""
        return self.array(np.zeros(shape))

    def xavier(self, rng: np.random.Generator, *shape: int, inputs: int) -> Array:
        """Xavier-uniform weights of a linear map from so many inputs, the product of the first axes, to the other axes."""
        limit = math.sqrt(6 / (inputs + math.prod(shape) // max(inputs, 1)))
        return self.array(rng.uniform(-limit, limit, shape))
