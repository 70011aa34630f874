"""Trees as JSON and named arrays, and back: NamedTuples by the name of their type, which must be one that npattn knows."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.host import to_numpy
from npattn._arrays.namespace import Array, Namespace, asarray, dtype_name
from npattn._arrays.trees import tree_items
from npattn.checkpoint._errors import CheckpointError

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")


_HOMES = ("npattn", "npattn.layers", "npattn.models", "npattn.optim", "npattn.interop")  # of the types that files may hold


class Stored(NamedTuple):
    """An array as a file has it: bfloat16, which NumPy lacks, as the upper halves of float32."""

    dtype: str
    values: np.ndarray[Any, Any]


def to_json(op: str, tree: Any, name: str, arrays: dict[str, Stored]) -> Any:
    """What a tree is but for the numbers of its arrays, which go to ``arrays`` by name."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree.item() if isinstance(tree, np.generic) else tree
    if isinstance(tree, np.generic):
        return tree.item()
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return _store(op, tree, name, arrays)

    def child(key: Any, value: Any) -> Any:
        return to_json(op, value, f"{name}.{key}" if name else str(key), arrays)

    if hasattr(tree, "_fields"):
        fields = {key: child(key, getattr(tree, key)) for key in tree._fields}
        return {"type": type(tree).__name__, "fields": fields}
    if isinstance(tree, (tuple, list)):
        return {"tuple" if isinstance(tree, tuple) else "list": [child(n, value) for n, value in enumerate(tree)]}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: child(key, value) for key, value in tree.items()}}
    raise TypeError(f"{op}: {name or 'params'} is a {type(tree).__name__}, which a file cannot hold")


def _store(op: str, array: Array, name: str, arrays: dict[str, Stored]) -> Any:
    dtype, name = dtype_name(array.dtype), name or "params"
    if dtype not in (*DTYPES, "bfloat16"):
        raise TypeError(f"{op}: {name} has dtype {dtype}, which a file cannot hold")
    if name in arrays:
        raise ValueError(f"{op}: two arrays would have the name {name}")
    values = to_numpy(array)
    if dtype == "bfloat16":
        values = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    values = np.array(values, dtype=values.dtype.newbyteorder("<"), order="C")
    arrays[name] = Stored(dtype, values)
    return {"array": name, "dtype": dtype, "shape": list(values.shape)}


def array_entries(structure: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every array that a tree's JSON speaks of, by name."""
    if not isinstance(structure, dict):
        return {}
    if "array" in structure:
        shape = tuple(structure["shape"])
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{structure['array']} has no shape: {shape}")
        return {structure["array"]: (structure["dtype"], shape)}
    inside = next((structure[kind] for kind in ("fields", "dict", "tuple", "list") if kind in structure), ())
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for value in inside.values() if isinstance(inside, dict) else inside:
        found.update(array_entries(value))
    return found


def from_json(structure: Any, arrays: dict[str, Array]) -> Any:
    """The tree that `to_json` was given, with these arrays."""
    if not isinstance(structure, dict):
        return structure
    if "array" in structure:
        return arrays[structure["array"]]
    if "type" in structure:
        return _named_tuple(structure["type"], {key: from_json(value, arrays) for key, value in structure["fields"].items()})
    if "dict" in structure:
        return {key: from_json(value, arrays) for key, value in structure["dict"].items()}
    if "tuple" in structure:
        return tuple(from_json(value, arrays) for value in structure["tuple"])
    return [from_json(value, arrays) for value in structure["list"]]


def _named_tuple(name: str, fields: dict[str, Any]) -> Any:
    known = known_types()
    if name not in known:
        raise CheckpointError(f"it holds a {name}, a type that npattn does not know: say like= which parameters it is for")
    unknown = sorted(fields.keys() - set(known[name]._fields))
    if unknown:
        raise CheckpointError(f"its {name} has {', '.join(unknown)}, which this version of npattn does not know")
    return known[name](**fields)  # a field that is new since has its default


@functools.cache
def known_types() -> dict[str, Any]:
    """The NamedTuples that files may hold: parameters, configs, rules and their states."""
    modules = [importlib.import_module(name) for name in _HOMES]
    things = {name: thing for module in modules for name, thing in vars(module).items()}
    return {
        name: thing
        for name, thing in things.items()
        if isinstance(thing, type) and hasattr(thing, "_fields") and not name.endswith(("Saved", "Grads"))
    }


def fill(like: Any, arrays: dict[str, Array]) -> Any:
    """``like`` with these arrays in the place of its own, or one error for all that does not fit."""
    wanted = {name or "params": leaf for name, leaf in tree_items(like) if hasattr(leaf, "shape")}
    wrong = [f"{name} is missing" for name in wanted if name not in arrays]
    wrong += [f"{name} is left over" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        ours, theirs = ((tuple(x.shape), dtype_name(x.dtype)) for x in (wanted[name], arrays[name]))
        if ours != theirs:
            wrong.append(f"{name} must be {ours[1]} of shape {ours[0]}, got {theirs[1]} of shape {theirs[0]}")
    if wrong:
        raise CheckpointError("it does not fit: " + "; ".join(sorted(wrong)))
    return _replace_arrays(like, "", arrays)


def _replace_arrays(tree: Any, name: str, arrays: dict[str, Array]) -> Any:
    if hasattr(tree, "shape"):
        return arrays[name or "params"]

    def child(key: Any, value: Any) -> Any:
        return _replace_arrays(value, f"{name}.{key}" if name else str(key), arrays)

    if hasattr(tree, "_fields"):
        return type(tree)(*(child(key, getattr(tree, key)) for key in tree._fields))
    if isinstance(tree, dict):
        return {key: child(key, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(child(n, value) for n, value in enumerate(tree))
    return tree


def restore(stored: Stored, *, xp: Namespace, device: Any) -> Array:
    """An array of a library; bfloat16 becomes float32 where the library has none."""
    values = stored.values
    if stored.dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    else:
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
    return asarray(values, xp=xp, device=device, dtype=getattr(xp, stored.dtype, None))


def check_size(name: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
    """Before anything is allocated: the bytes that are there are those that a shape needs."""
    if dtype not in (*DTYPES, "bfloat16"):
        raise ValueError(f"{name} has dtype {dtype}")
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    if math.prod(shape) * itemsize != size:
        raise ValueError(f"{name} has {size} bytes, but {dtype} of shape {shape} needs {math.prod(shape) * itemsize}")
