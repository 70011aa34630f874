"""Trees of parameters: nested NamedTuples, tuples, lists and dicts with arrays as leaves and ``None`` where nothing is.

The same trees that ``jax.tree_util`` understands, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from npattn._arrays.namespace import dtype_name

Class = TypeVar("Class", bound=type)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """The same tree with ``fn(leaf, *leaves_of_rest)`` in the place of every leaf; ``None`` stays ``None``.

    Parameters
    ----------
    fn : callable
        Called once a leaf.
    tree : tree
        Nested NamedTuples, tuples, lists and dicts; anything else is a leaf.
    *rest : trees
        Trees of the same structure, whose leaves become further arguments.

    Returns
    -------
    tree
        The same containers with new leaves.

    Raises
    ------
    ValueError
        If a tree of ``rest`` has another structure; the message says where.

    Examples
    --------
    >>> tree_map(lambda x: 2 * x, {"w": 1, "b": None, "more": (3, 4)})
    {'w': 2, 'b': None, 'more': (6, 8)}
    """
    return _map(fn, tree, rest, "")


def _map(fn: Callable[..., Any], tree: Any, rest: tuple[Any, ...], path: str) -> Any:
    if not _is_node(tree):
        if any(_is_node(other) for other in rest):
            raise ValueError(f"tree_map: the trees differ at {path or 'the root'}")
        return fn(tree, *rest)
    names = _child_names(tree)
    for other in rest:
        if type(other) is not type(tree) or _child_names(other) != names:
            raise ValueError(f"tree_map: the trees differ at {path or 'the root'}")
    children = [
        _map(fn, _child(tree, name), tuple(_child(o, name) for o in rest), f"{path}.{name}".lstrip(".")) for name in names
    ]
    if tree is None:
        return None
    if isinstance(tree, dict):
        mapped = dict(zip(names, children, strict=True))
        return {name: mapped[name] for name in tree}  # in the caller's order
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves in order."""
    return [leaf for _, leaf in tree_items(tree)]


def tree_items(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(name, leaf)`` pairs in order, with names such as ``blocks.0.attention.w_q``.

    Examples
    --------
    >>> list(tree_items({"blocks": [1, None, {"w": 2}]}))
    [('blocks.0', 1), ('blocks.2.w', 2)]
    """
    if not _is_node(tree):
        yield path, tree
        return
    for name in _child_names(tree):
        yield from tree_items(_child(tree, name), f"{path}.{name}" if path else str(name))


def tree_repr(tree: Any) -> str:
    """A NamedTuple's repr with names, shapes and dtypes instead of numbers."""
    inside = ", ".join(f"{name}={_leaf_repr(_child(tree, name))}" for name in _child_names(tree))
    return f"{type(tree).__name__}({inside})"


def with_tree_repr(cls: Class) -> Class:
    """Give a NamedTuple the repr of its shapes: a class decorator."""
    cls.__repr__ = tree_repr  # type: ignore[assignment,method-assign]
    return cls


def _leaf_repr(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return f"[{', '.join(_leaf_repr(v) for v in value)}]"
    return repr(value)


def _is_node(tree: Any) -> bool:
    return tree is None or isinstance(tree, (tuple, list, dict))


def _child_names(tree: Any) -> list[Any]:
    if tree is None:
        return []
    if isinstance(tree, dict):
        return sorted(tree)
    return list(tree._fields) if hasattr(tree, "_fields") else list(range(len(tree)))


def _child(tree: Any, name: Any) -> Any:
    return getattr(tree, name) if hasattr(tree, "_fields") else tree[name]
