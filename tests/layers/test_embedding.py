"""Embedding: values, repeated ids, host ids beside any library, ids out of range; and the table as an output layer."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from npattn.layers import (
    embedding,
    embedding_backward,
    embedding_forward,
    linear_backward,
    linear_forward,
    tied_logits,
    tied_logits_backward,
    tied_logits_forward,
)
from npattn.layers.embedding import _sum_by_id
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import open_library, to_numpy

TABLE = np.arange(15.0).reshape(5, 3)


def by_add_at(dout: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    dtable = np.zeros((count, dout.shape[-1]))
    np.add.at(dtable, ids, dout)
    return dtable


@given(st.integers(1, 6), st.integers(0, 3), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(0, 99))
def test_rows_are_copied_and_their_cotangents_summed(count, width, shape, seed):
    rng = np.random.default_rng(seed)
    table, ids = rng.standard_normal((count, width)), np.asarray(rng.integers(0, count, shape))
    out, saved = embedding_forward(table, ids)
    assert out.shape == (*shape, width)
    for at in np.ndindex(*shape):
        np.testing.assert_array_equal(out[at], table[ids[at]])
    dout = rng.integers(-9, 10, out.shape).astype(np.float64)  # sums of whole numbers are exact
    np.testing.assert_array_equal(embedding_backward(dout, saved).dtable, by_add_at(dout, ids, count))


def test_every_kind_of_integer(library, to_xp):
    kinds = [kind for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64") if library.has(kind)]
    assert len(kinds) >= 5
    for kind in kinds:
        out, saved = embedding_forward(to_xp(TABLE), to_xp([4, 0, 4], kind))
        np.testing.assert_array_equal(to_numpy(out), TABLE[[4, 0, 4]])
        dtable = embedding_backward(to_xp([[1.0, 0, 0], [0, 2, 0], [4, 0, 0]]), saved).dtable
        np.testing.assert_array_equal(to_numpy(dtable), [[0, 2, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [5, 0, 0]])


HOST_IDS = [
    3,
    np.int8(3),
    [3, 1],
    (3, 1),
    [[3], [1]],
    np.asarray([3, 1]),
    np.asarray([3, 1], "uint64"),
    np.asarray([3, 1], ">i4"),
    [],
    [[], []],
]


@pytest.mark.parametrize("ids", HOST_IDS, ids=repr)
def test_host_ids_beside_any_library(ids, xp, to_xp):
    out, saved = embedding_forward(to_xp(TABLE), ids)
    expected = TABLE[np.asarray(ids, int)]
    np.testing.assert_array_equal(to_numpy(out), expected)
    dtable = to_numpy(embedding_backward(out, saved).dtable)
    np.testing.assert_array_equal(dtable, by_add_at(expected, np.asarray(ids, int), 5))


@pytest.mark.parametrize("wrong", [5, -1, [0, 5], np.asarray([[0], [-3]]), np.asarray(2**63, "uint64")], ids=repr)
def test_host_ids_out_of_range(wrong, to_xp):
    with pytest.raises(
        ValueError, match="^embedding: ids must be at least 0 and less than V = 5, got (5|-1|-3|9223372036854775808)"
    ):
        embedding(to_xp(TABLE), wrong)


def test_the_first_wrong_id_is_named():
    with pytest.raises(ValueError, match=r"got 7 at \[1, 0\]$"):
        embedding(TABLE, [[0, 1], [7, 8]])
    with pytest.raises(ValueError, match="less than V = 0, got 0"):
        embedding(np.zeros((0, 3)), 0)


def test_a_table_without_rows_or_columns(to_xp):
    for shape in ((0, 3), (5, 0), (0, 0)):
        ids = to_xp(np.zeros((2, 0), int)) if not shape[0] else to_xp([[1], [1]])
        out, saved = embedding_forward(to_xp(np.zeros(shape)), ids)
        assert tuple(out.shape) == (*ids.shape, shape[1])
        assert tuple(embedding_backward(out, saved).dtable.shape) == shape


def test_other_errors():
    with pytest.raises(ValueError, match=r"^embedding: table must have shape \(V, C\), got \(15,\)"):
        embedding(TABLE.ravel(), [0])
    for ids, kind in (([1.0], "float64"), (np.asarray([True]), "bool"), ([True], "bool")):
        with pytest.raises(TypeError, match=f"^embedding: ids must have an integer dtype, got {kind}"):
            embedding(TABLE, ids)
    for thing in (1.0, True, "1"):
        with pytest.raises(TypeError, match="^embedding: ids must be an array"):
            embedding(TABLE, thing)
    with pytest.raises(TypeError, match="^embedding: table must have a floating dtype .* got int64"):
        embedding(TABLE.astype(int), [0])
    strict = open_library("strict").xp
    with pytest.raises(TypeError, match="^embedding: table is an array of numpy but ids is one of array_api_strict"):
        embedding(TABLE, strict.asarray([0]))


def test_the_way_for_every_library_sums_as_numpy_does():
    strict = open_library("strict").xp
    rng = np.random.default_rng(0)
    for count, places in ((7, 1000), (1000, 7), (2, 2), (3, 1), (1, 64)):
        ids, rows = rng.integers(0, count, places), rng.integers(-9, 10, (places, 2)).astype(np.float64)
        general = _sum_by_id(strict.asarray(rows), strict.asarray(ids), count, xp=strict)
        np.testing.assert_array_equal(to_numpy(general), _sum_by_id(rows, ids, count, xp=np))
        np.testing.assert_array_equal(to_numpy(general), by_add_at(rows, ids, count))


@pytest.mark.parametrize("place", range(5))
def test_a_nan_in_one_place_reaches_only_its_own_row(place, to_xp):
    ids = np.asarray([1, 3, 2, 3, 0])
    dout = np.ones((5, 3))
    dout[place] = np.nan
    dtable = to_numpy(embedding_backward(to_xp(dout), embedding_forward(to_xp(TABLE), to_xp(ids))[1]).dtable)
    expected = np.asarray([1.0, 1, 1, 2, 0])
    expected[ids[place]] = np.nan
    np.testing.assert_array_equal(dtable, np.stack([expected] * 3, axis=1))


@pytest.mark.parametrize("name", ["numpy", "strict"])
def test_sums_of_many_are_accurate_and_the_same_every_time(name):
    """At most twice the error of a plain float32 sum."""
    xp = open_library(name).xp
    rng = np.random.default_rng(0)
    ids, rows = rng.integers(0, 3, 20000), rng.random((20000, 5), np.float32)
    first, again = (to_numpy(_sum_by_id(xp.asarray(rows), xp.asarray(ids), 3, xp=xp)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    exact = by_add_at(rows.astype(np.float64), ids, 3)
    naive = np.zeros((3, 5), np.float32)
    np.add.at(naive, ids, rows)
    assert np.abs(first - exact).max() <= 2 * np.abs(naive - exact).max()


def test_float16_is_summed_in_float32():
    table = np.zeros((2, 1), np.float16)
    dtable = embedding_backward(np.ones((4096, 1), np.float16), embedding_forward(table, np.zeros(4096, int))[1]).dtable
    assert dtable.dtype == np.float16
    assert dtable.tolist() == [[4096], [0]]  # a sum in float16 stops at 2048


def test_ids_are_borrowed():
    ids = np.asarray([1, 2])
    assert embedding_forward(TABLE, ids)[1].ids is ids
    assert repr(embedding_forward(TABLE, ids)[1]) == "EmbeddingSaved(table=float64[5, 3], ids=int64[2], scale=1.0)"


def test_jax_without_64_bit_dtypes_is_not_warned_of():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    library = open_library("jax")
    with jax.enable_x64(False):
        table = library.xp.asarray(TABLE.astype(np.float32))
        for ids in ([4, 0], np.asarray([4, 0], np.int64), np.asarray([4, 0], np.uint64), library.xp.asarray([4, 0])):
            out, saved = embedding_forward(table, ids)
            np.testing.assert_array_equal(to_numpy(out), TABLE[[4, 0]])
            assert to_numpy(embedding_backward(out, saved).dtable).sum() == TABLE[[4, 0]].sum()


# Tied logits -------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=2).map(tuple), st.integers(0, 4), st.integers(0, 4), st.integers(0, 99))
def test_tied_logits_are_inner_products_with_every_row(lead, width, count, seed):
    rng = np.random.default_rng(seed)
    x, table, dout = (rng.integers(-4, 5, s).astype(np.float64) for s in ((*lead, width), (count, width), (*lead, count)))
    out, saved = tied_logits_forward(x, table)
    grads = tied_logits_backward(dout, saved)
    expected, dx, dtable = np.zeros(dout.shape), np.zeros(x.shape), np.zeros(table.shape)
    for at in np.ndindex(*lead):
        for v in range(count):
            expected[(*at, v)] = (x[at] * table[v]).sum()
            dx[at] += dout[(*at, v)] * table[v]
            dtable[v] += dout[(*at, v)] * x[at]
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(tied_logits(x, table), expected)
    np.testing.assert_array_equal(grads.dx, dx)
    np.testing.assert_array_equal(grads.dtable, dtable)
    assert grads.dtable.flags.c_contiguous  # it is added to the gradient of the embedding


def test_tied_logits_are_a_linear_map_with_the_transposed_table():
    rng = np.random.default_rng(0)
    x, table, dout = rng.standard_normal((2, 7, 3)), rng.standard_normal((5, 3)), rng.standard_normal((2, 7, 5))
    out, saved = linear_forward(x, table.T)
    tied, tied_saved = tied_logits_forward(x, table)
    np.testing.assert_array_equal(tied, out)
    linear, grads = linear_backward(dout, saved), tied_logits_backward(dout, tied_saved)
    np.testing.assert_array_equal(grads.dx, linear.dx)
    np.testing.assert_allclose(grads.dtable, linear.dw.T, rtol=1e-13)


def test_a_table_that_is_used_twice():
    """Its two gradients add."""
    rng = np.random.default_rng(0)
    ids = np.asarray([[3, 1], [1, 0]])

    def forward(table):
        x, saved_ids = embedding_forward(table, ids)
        out, saved_logits = tied_logits_forward(np.tanh(x), table)
        return out, (x, saved_ids, saved_logits)

    def backward(dout, saved):
        x, saved_ids, saved_logits = saved
        logits = tied_logits_backward(dout, saved_logits)
        return {"table": logits.dtable + embedding_backward(logits.dx / np.cosh(x) ** 2, saved_ids).dtable}

    check_backward(forward, backward, {"table": rng.standard_normal((5, 3))})


def test_float16_logits_are_summed_in_float32():
    x, table = np.ones(4096, np.float16), np.ones((2, 4096), np.float16)
    out, saved = tied_logits_forward(x, table)
    assert out.tolist() == [4096, 4096]  # a sum in float16 stops at 2048
    assert tied_logits_backward(out, saved).dx.dtype == np.float16


def test_errors_of_tied_logits():
    x = np.ones((2, 3))
    for table in (np.ones((3, 5)), np.ones(3), np.ones((1, 5, 3))):
        with pytest.raises(ValueError, match=r"^tied_logits: table must have shape \(V, C\) with C = 3 as x has, got \("):
            tied_logits(x, table)
    with pytest.raises(ValueError, match=r"^tied_logits: x must have shape \(..., C\), got \(\)"):
        tied_logits(np.asarray(1.0), x)
    with pytest.raises(TypeError, match="^tied_logits: x is float64 but table is float32"):
        tied_logits(x, x.astype(np.float32))
