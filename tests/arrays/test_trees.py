"""Trees of parameters: structure, order, names, and errors that say where."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import tree_map
from npattn._arrays.trees import tree_items, tree_leaves, tree_repr


class Block(NamedTuple):
    """A small tree of parameters."""

    w: Any
    b: Any = None

    def __repr__(self) -> str:
        return tree_repr(self)


def test_containers_keep_their_types_and_none_stays():
    tree = {"z": Block(1), "a": [2, (3, None)], "m": {}}
    doubled = tree_map(lambda x: 2 * x, tree)
    assert doubled == {"z": Block(2), "a": [4, (6, None)], "m": {}}
    assert list(doubled) == ["z", "a", "m"]
    assert type(doubled["z"]) is Block


def test_leaves_come_in_the_order_of_jax():
    tree = {"z": Block(1, 2), "a": [3, None, (4,)]}
    assert tree_leaves(tree) == [3, 4, 1, 2]
    jax = pytest.importorskip("jax")
    assert tree_leaves(tree) == jax.tree_util.tree_leaves(tree)


def test_names_of_leaves():
    tree = {"blocks": [Block(1), Block(2, 3)], "head": (4,)}
    assert [name for name, _ in tree_items(tree)] == ["blocks.0.w", "blocks.1.w", "blocks.1.b", "head.0"]
    assert list(tree_items(5)) == [("", 5)]


def test_several_trees_side_by_side():
    total = tree_map(lambda a, b, c: a + b + c, Block([1, 2]), Block([10, 20]), Block([100, 200]))
    assert total == Block([111, 222])


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (Block([1, 2], 3), "b"),
        (Block([1]), "w"),
        (Block((1, 2)), "w"),
        (Block([1, [2]]), "w.1"),
        (([1, 2], None), "the root"),
        (5, "the root"),
    ],
)
def test_trees_of_another_structure(other, where):
    with pytest.raises(ValueError, match=f"tree_map: the trees differ at {where}$"):
        tree_map(lambda a, b: a, Block([1, 2]), other)


def test_a_leaf_beside_a_tree():
    with pytest.raises(ValueError, match="differ at the root"):
        tree_map(lambda a, b: a, 1, [1])


def test_repr_shows_shapes_and_no_numbers():
    block = Block(np.zeros((2, 3), np.float32), [np.zeros(4), Block(1)])
    assert repr(block) == "Block(w=float32[2, 3], b=[float64[4], Block(w=1, b=None)])"


trees = st.recursive(
    st.integers() | st.none(),
    lambda t: st.lists(t, max_size=3) | st.tuples(t, t) | st.builds(Block, t, t) | st.dictionaries(st.text("abc", max_size=2), t),
    max_leaves=12,
)


@given(trees)
def test_mapping_the_identity_changes_nothing(tree):
    assert tree_map(lambda x: x, tree) == tree


@given(trees)
def test_map_visits_the_leaves_in_order(tree):
    visited = []
    tree_map(visited.append, tree)
    assert visited == tree_leaves(tree)
