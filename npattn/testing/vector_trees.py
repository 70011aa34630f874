"""Arguments as vectors: the floating leaves of trees of any array library by name, moved along directions and differenced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from npattn._arrays.namespace import FLOATS, Array, array_device, array_namespace, asarray, dtype_name
from npattn._arrays.trees import tree_items, tree_map
from npattn.testing.libraries import to_numpy

Vectors = dict[str, Array]  # of every floating leaf, by name, in NumPy
Args = Mapping[str, Any] | Sequence[Any]


def named(args: Args) -> tuple[list[str], list[Any]]:
    if isinstance(args, Mapping):
        return list(args), list(args.values())
    return [str(n) for n in range(len(args))], list(args)


def is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and dtype_name(x.dtype) in FLOATS


def floating_leaves(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The floating leaves of all arguments by name."""
    named = ((name, x) for top, value in zip(names, values, strict=True) for name, x in tree_items(value, top))
    return {name: x for name, x in named if is_floating(x)}


def random_vectors(like: Mapping[str, Any], rng: np.random.Generator) -> Vectors:
    return {name: rng.standard_normal(tuple(x.shape)) for name, x in like.items()}


def unit_vector(shape: tuple[int, ...], at: tuple[int, ...]) -> Array:
    unit = np.zeros(shape)
    unit[at] = 1.0
    return unit


def _move(x: Array, by: Array) -> Array:
    xp, device = array_namespace("check", x=x), array_device(x)
    moved = x + asarray(by, xp=xp, dtype=x.dtype, device=device)
    return asarray(moved, xp=xp, dtype=x.dtype, device=device)  # NumPy makes a scalar of a 0-d array


def as_tree(tree: Any, vectors: Vectors, path: str = "") -> Any:
    """``vectors`` as a tree in the library and dtypes of ``tree``."""
    leaves: Iterator[Array] = iter([vectors[name] for name, x in tree_items(tree, path) if is_floating(x)])

    def leaf(x: Any) -> Any:
        if not is_floating(x):
            return x
        return asarray(next(leaves), xp=array_namespace("check", x=x), dtype=x.dtype, device=array_device(x))

    return tree_map(leaf, tree)


def difference_along(f: Callable[..., Any], names: Sequence[str], values: Sequence[Any], t: Vectors, h: float) -> Vectors:
    """J t by central differences at h and h/2, extrapolated: the error is of the order h⁴."""

    def at(shift: float) -> Vectors:
        moved = []
        for top, value in zip(names, values, strict=True):
            steps = iter([shift * t[name] for name, x in tree_items(value, top) if is_floating(x)])
            moved.append(tree_map(lambda x, steps=steps: _move(x, next(steps)) if is_floating(x) else x, value))
        return {name: to_numpy(x) for name, x in tree_items(f(*moved))}

    ahead, behind, half_ahead, half_behind = (at(shift) for shift in (h, -h, h / 2, -h / 2))
    return {name: (4 * (half_ahead[name] - half_behind[name]) / h - (ahead[name] - behind[name]) / (2 * h)) / 3 for name in ahead}


def gradients_of(grads: Any, names: Sequence[str], values: Sequence[Any]) -> Vectors:
    """The gradient of every floating leaf by name, in NumPy; the one place that asks whether it is there and has its form."""
    found: Vectors = {}
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        inputs = {path: x for path, x in tree_items(value, name) if is_floating(x)}
        if not inputs:
            continue
        gradient = _of_argument(grads, name, position)
        leaves = dict(tree_items(gradient, name))
        for path, x in inputs.items():
            dx = leaves.get(path)
            if dx is None:
                raise AssertionError(f"check: there is no gradient of {path}")
            if tuple(dx.shape) != tuple(x.shape) or dtype_name(dx.dtype) != dtype_name(x.dtype):
                raise AssertionError(
                    f"check: the gradient of {path} should be {dtype_name(x.dtype)} of shape {tuple(x.shape)} as {path} is, "
                    f"got {dtype_name(dx.dtype)} of shape {tuple(dx.shape)}"
                )
            found[path] = to_numpy(dx)
    return found


def _of_argument(grads: Any, name: str, position: int) -> Any:
    if isinstance(grads, Mapping):
        return grads.get(f"d{name}", grads.get(name))
    if hasattr(grads, f"d{name}"):
        return getattr(grads, f"d{name}")
    return grads[position] if isinstance(grads, (tuple, list)) and position < len(grads) else None
