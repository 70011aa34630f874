"""How arrays of one library stand for those of another: tables that are read in both directions.

An entry says which of theirs is which of ours, and how: a table of entries is a layout. What is missing, what is left over and
which other layout would fit is found here, once for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_int, shape_error
from npattn._arrays.host import to_numpy
from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_items, tree_repr
from npattn.layers._parameters import check_parameters

State = dict[str, Array]
SHOWN = 8  # names of a kind in an error


class Imported(NamedTuple):
    """What another library's weights are here: parameters, and the config that they were made for."""

    params: Any
    config: Any

    def __repr__(self) -> str:
        return tree_repr(self)


class Exported(NamedTuple):
    """What our parameters are elsewhere: arrays by the other library's names, and the settings that they need there."""

    state: Any
    settings: dict[str, Any]

    def __repr__(self) -> str:
        return tree_repr(self)


class Entry(NamedTuple):
    """One of their arrays and the one or more of ours that it holds."""

    theirs: str
    ours: tuple[str, ...]
    axes: str  # of theirs: one letter is one length
    split: Callable[[Array], Sequence[Array]]
    join: Callable[..., Array]


def same(theirs: str, ours: str, axes: str) -> Entry:
    """The same array."""
    return Entry(theirs, (ours,), axes, lambda x: [x], lambda x: x)


def linear(theirs: str, ours: str, axes: str) -> Entry:
    """A matrix that multiplies from the left there, (out, in), and from the right here."""
    return Entry(theirs, (ours,), axes, lambda w: [w.T], lambda w: w.T)


def rows_to_heads(theirs: str, ours: str, axes: str, heads: int) -> Entry:
    """(H·D, C) there, (C, H, D) here."""

    def split(w: Array) -> list[Array]:
        return [_divided(theirs, w, heads).transpose(2, 0, 1)]

    return Entry(theirs, (ours,), axes, split, lambda w: w.transpose(1, 2, 0).reshape(-1, w.shape[0]))


def heads_to_rows(theirs: str, ours: str, axes: str, heads: int) -> Entry:
    """(C, H·E) there, (H, E, C) here."""

    def split(w: Array) -> list[Array]:
        return [_divided(theirs, w.T, heads)]

    return Entry(theirs, (ours,), axes, split, lambda w: w.reshape(-1, w.shape[-1]).T)


def bias_of_heads(theirs: str, ours: str, axes: str, heads: int) -> Entry:
    """(H·D,) there, (H, D) here."""
    return Entry(theirs, (ours,), axes, lambda b: [_divided(theirs, b, heads)], lambda b: b.reshape(-1))


def packed(theirs: str, ours: Sequence[str], axes: str, one: Callable[[str], Entry], axis: int = 0) -> Entry:
    """Queries, keys and values one after another along an axis, each as ``one(name)`` says."""
    entries = [one(name) for name in ours]

    def split(x: Array) -> list[Array]:
        if x.shape[axis] % len(entries):
            shape_error("interop", theirs, f"with {len(entries)} equal parts along axis {axis}", x.shape)
        parts = np.split(x, len(entries), axis=axis)
        return [entry.split(part)[0] for entry, part in zip(entries, parts, strict=True)]

    def join(*arrays: Array) -> Array:
        return np.concatenate([entry.join(x) for entry, x in zip(entries, arrays, strict=True)], axis=axis)

    return Entry(theirs, tuple(ours), axes, split, join)


def _divided(name: str, x: Array, heads: int) -> Array:
    """The first axis as heads and what each has."""
    if x.shape[0] % heads:
        raise ValueError(f"interop: {name} has {x.shape[0]} features, which {heads} heads cannot share")
    return x.reshape(heads, x.shape[0] // heads, *x.shape[1:])


Layout = Callable[[set[str], int, int], list[Entry]]  # the entries for a state dict with these names, H and K
LAYOUTS: dict[str, Layout] = {}  # by the function that reads it


def as_state(op: str, source: Any, *, prefixes: Sequence[str] = (), ignore: Iterable[str] = ()) -> State:
    """A module's, a mapping's or a nested mapping's arrays by name: in NumPy, without a prefix that they all may have."""
    state = source.state_dict() if hasattr(source, "state_dict") else source
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{op}: expected a state dict, a mapping of names to arrays, or a module that has one, got {type(source).__name__}"
        )
    flat = dict(_flatten(state, ""))
    for prefix in prefixes:
        if any(name.startswith(prefix) for name in flat):
            flat = {name.removeprefix(prefix): x for name, x in flat.items()}
    left_out = tuple(ignore)
    return {name: to_numpy(x) for name, x in flat.items() if not (left_out and name.startswith(left_out))}


def _flatten(state: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any]]:
    for name, value in state.items():
        whole = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from _flatten(value, whole)
        else:
            yield whole, value


def read(op: str, state: State, heads: Any, kv_heads: Any = None, *, layout: Layout | None = None) -> State:
    """Ours by name, of theirs in the layout of this function; or one error for all that is missing or left over."""
    count = host_int(op, "the number of heads", heads, least=1)
    groups = count if kv_heads is None else host_int(op, "the number of key/value heads", kv_heads, least=1)
    entries = (layout or LAYOUTS[op])(set(state), count, groups)
    check_names(op, {entry.theirs for entry in entries}, set(state))
    check_parameters(op, state, {entry.theirs: entry.axes for entry in entries})
    found: State = {}
    for entry in entries:
        try:
            parts = entry.split(state[entry.theirs])
        except ValueError as error:
            raise ValueError(str(error).replace("interop:", f"{op}:")) from None
        for name, x in zip(entry.ours, parts, strict=True):
            found[name] = np.ascontiguousarray(x)
    return found


def check_names(op: str, expected: set[str], found: set[str]) -> None:
    """One error: what is missing, what is left over, and which function reads such names."""
    missing, more = expected - found, found - expected
    if not missing and not more:
        return
    parts = [f"{what}: {_shown(names)}" for what, names in (("missing", missing), ("left over", more)) if names]
    fitting = [name for name, layout in LAYOUTS.items() if name != op and _fits(layout, found)]
    hint = f"; {' or '.join(fitting)} would fit" if fitting else ""
    raise ValueError(f"{op}: these are not the names that it expects; {'; '.join(parts)}{hint}")


def _shown(names: set[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:SHOWN]) + (f", … ({len(first) - SHOWN} more)" if len(first) > SHOWN else "")


def _fits(layout: Layout, names: set[str]) -> bool:
    return {entry.theirs for entry in layout(names, 1, 1)} == names


def write(op: str, entries: Sequence[Entry], params: Any) -> State:
    """Theirs by name, of our parameters; or one error for what has no place there, or is missing here."""
    ours = {name: to_numpy(x) for name, x in tree_items(params)}
    expected = {name for entry in entries for name in entry.ours}
    missing, more = expected - set(ours), set(ours) - expected
    if missing or more:
        parts = [
            f"{what}: {_shown(names)}" for what, names in (("needed and not there", missing), ("no place for", more)) if names
        ]
        raise ValueError(f"{op}: params do not fit that layout; {'; '.join(parts)}")
    return {entry.theirs: np.ascontiguousarray(entry.join(*(ours[name] for name in entry.ours))) for entry in entries}


def count_layers(names: Iterable[str], prefix: str) -> int:
    """How many layers the names speak of."""
    numbers = [name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix)]
    return max((int(n) + 1 for n in numbers if n.isdecimal()), default=1)
