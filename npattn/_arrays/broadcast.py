"""Broadcasting and its way back: the gradient of a broadcast input is the sum over the copies."""

from __future__ import annotations

from collections.abc import Sequence

from npattn._arrays.namespace import Array, Namespace


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The common shape, right-aligned; ``None`` if there is none."""
    rank = max((len(s) for s in shapes), default=0)
    result = [1] * rank
    for shape in shapes:
        for axis, n in enumerate(shape, start=rank - len(shape)):
            if n != 1:
                if result[axis] not in (1, n):
                    return None
                result[axis] = n
    return tuple(result)


def unbroadcast(x: Array, shape: Sequence[int], *, xp: Namespace) -> Array:
    """Sum ``x`` over what was broadcast, back to ``shape``: the vector-Jacobian product of broadcasting."""
    if x.shape == tuple(shape):
        return x
    extra = x.ndim - len(shape)
    summed = tuple(range(extra)) + tuple(axis for axis, n in enumerate(shape, start=extra) if n == 1 and x.shape[axis] != 1)
    return xp.reshape(xp.sum(x, axis=summed, dtype=x.dtype) if summed else x, tuple(shape))
