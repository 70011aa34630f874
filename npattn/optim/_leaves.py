"""What the rules share: checks of trees and numbers, and one formula for every leaf of a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn._arrays.blocks import Results, map_elements_of_each
from npattn._arrays.checks import host_float, shape_error
from npattn._arrays.namespace import Array, array_device, array_namespace, asarray, compute_dtype, float_dtype
from npattn._arrays.trees import tree_items, tree_leaves, tree_map


def at_least_0(op: str, name: str, value: Any) -> float:
    """A host number."""
    number = host_float(op, name, value)
    if number < 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {number}")
    return number


def less_than_1(op: str, name: str, value: Any) -> float:
    """A host number from 0 on, less than 1."""
    number = host_float(op, name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{op}: {name} must be at least 0 and less than 1, got {number}")
    return number


def check_gradients(op: str, params: Any, grads: Any) -> None:
    """Every parameter has a gradient of its own shape, dtype, library and device."""
    tree_map(lambda *_: None, params, grads)  # raises where the trees differ
    for (name, x), (_, g) in zip(tree_items(params), tree_items(grads), strict=True):
        both = {name or "the parameter": x, f"the gradient of {name or 'the parameter'}": g}
        array_namespace(op, **both)
        float_dtype(op, **both)
        if tuple(x.shape) != tuple(g.shape):
            shape_error(op, f"the gradient of {name or 'the parameter'}", f"{tuple(x.shape)} as the parameter", g.shape)


def zeros(op: str, tree: Any) -> Any:
    """Zeros for every leaf, in the dtype that steps are computed in."""

    def leaf(x: Array) -> Array:
        xp = array_namespace(op, x=x)
        return xp.zeros_like(x, dtype=compute_dtype(float_dtype(op, x=x), xp=xp))

    return tree_map(leaf, tree)


def map_leaves(f_of: Callable[[str, Array], Callable[..., Results]], likes: tuple[int, ...], *trees: Any) -> list[Any]:
    """``f_of(name, x)(x, *others)`` of the leaves of trees of one form, as trees of its results.

    The function treats every element by itself, in the dtype that steps are computed in. Result n has the dtypes of tree
    ``likes[n]``.
    """
    first, *others = trees
    tree_map(lambda *_: None, first, *others)  # raises where the trees differ
    named = list(tree_items(first))
    leaves = list(zip([x for _, x in named], *map(tree_leaves, others), strict=True))
    calls = [(_in_steps_dtype(f_of(name, x)), arrays) for (name, x), arrays in zip(named, leaves, strict=True)]
    libraries = [array_namespace("update", x=x) for _, x in named]
    if all(xp is np for xp in libraries):
        results = map_elements_of_each(calls, xp=np)
    else:
        results = [map_elements_of_each([call], xp=xp)[0] for call, xp in zip(calls, libraries, strict=True)]
    made = []
    for n, like in enumerate(likes):
        values = iter([_as_leaf(found[n], like=arrays[like]) for found, arrays in zip(results, leaves, strict=True)])
        made.append(tree_map(lambda _, values=values: next(values), first))
    return made


def _in_steps_dtype(f: Callable[..., Results]) -> Callable[..., Results]:
    """``f`` of arrays that are float32 where they were float16 or bfloat16."""

    def lifted(*arrays: Array) -> Results:
        xp = array_namespace("update", x=arrays[0])
        return f(*(xp.astype(x, compute_dtype(float_dtype("update", x=x), xp=xp), copy=False) for x in arrays))

    return lifted


def _as_leaf(x: Array, *, like: Array) -> Array:
    """An array in the dtype of ``like``; NumPy's arithmetic makes scalars of 0-d arrays."""
    xp = array_namespace("update", like=like)
    with np.errstate(all="ignore"):
        return asarray(x, xp=xp, dtype=like.dtype, device=array_device(like))
