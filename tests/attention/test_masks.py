"""Masks: which pairs each kind allows, alone and combined, for a whole problem, for any tile of it, on any library."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn import (
    Mask,
    attention,
    attention_backward,
    attention_forward,
    causal_mask,
    causal_mask_end,
    length_mask,
    segment_mask,
    window_mask,
)
from npattn._attention.masks import as_mask
from npattn._attention.place import ALL, MIXED, NONE, Place, Run
from npattn._attention.tiling import forced
from npattn.testing.libraries import asarray, open_library, to_numpy

from .paths import PATHS

Truth = np.ndarray[Any, Any]

# Every kind by its definition --------------------------------------------------------------------------------------------------


@st.composite
def leading(draw: st.DrawFn, lead: tuple[int, ...], low: int, high: int) -> tuple[Any, Truth]:
    """A number, or numbers for the leading axes: as a mask takes them, and written out to (..., 1, 1, 1)."""
    if draw(st.booleans()):
        n = draw(st.integers(low, high))
        return n, np.asarray(n)
    shape = tuple(n if draw(st.booleans()) else 1 for n in lead)
    shape = shape[draw(st.integers(0, len(shape))) :]
    values = np.random.default_rng(draw(st.integers(0, 999))).integers(low, high + 1, shape)
    form = draw(st.sampled_from(["int64", "int16", "list"]))
    return values.tolist() if form == "list" else values.astype(form), values[..., None, None, None]


@st.composite
def ids(draw: st.DrawFn, lead: tuple[int, ...], length: int) -> tuple[Any, Truth]:
    """Segment ids in runs, or anyhow."""
    shape = (*(n if draw(st.booleans()) else 1 for n in lead), length)
    shape = shape[draw(st.integers(0, len(lead))) :]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    values = rng.integers(-1, 3, shape)
    values = np.sort(values, axis=-1) if draw(st.booleans()) else values
    return values.tolist() if draw(st.booleans()) else values, values


@st.composite
def one_mask(draw: st.DrawFn, lead: tuple[int, ...], H: int, T: int, S: int) -> tuple[Any, Truth]:
    """A mask of one kind, and the pairs that its definition allows, broadcasting to (..., H, T, S)."""
    i, j = np.arange(T)[:, None], np.arange(S)[None, :]
    kind = draw(st.sampled_from(["causal", "causal end", "window", "lengths", "segments", "array"]))
    if kind == "causal":
        offset, shift = draw(leading(lead, -T - 2, S + 2))
        mask, truth = causal_mask(offset), j <= i + shift
    elif kind == "causal end":
        mask, truth = causal_mask_end(), j <= i + S - T
    elif kind == "window":
        left, right = (draw(st.none() | st.integers(0, S)) for _ in range(2))
        offset, shift = draw(leading(lead, -T - 2, S + 2))
        distance = j - (i + shift)
        truth = (distance >= -(np.inf if left is None else left)) & (distance <= (np.inf if right is None else right))
        mask = window_mask(left, right, offset)
    elif kind == "lengths":
        keys, key_lengths = draw(leading(lead, -1, S + 1))
        mask, truth = length_mask(keys), (j < key_lengths) & (i >= 0)
        if draw(st.booleans()):
            queries, query_lengths = draw(leading(lead, -1, T + 1))
            mask, truth = length_mask(keys, queries), (j < key_lengths) & (i < query_lengths)
    elif kind == "segments":
        queries, query_ids = draw(ids(lead, T))
        keys, key_ids = (None, query_ids) if T == S and draw(st.booleans()) else draw(ids(lead, S))
        mask, truth = segment_mask(queries, keys), query_ids[..., None, :, None] == key_ids[..., None, None, :]
    else:
        shape = tuple(n if draw(st.booleans()) else 1 for n in (*lead, H, T, S))[draw(st.integers(0, len(lead) + 3)) :]
        truth = np.asarray(
            np.random.default_rng(draw(st.integers(0, 999))).random(shape) < draw(st.sampled_from([0.5, 0.02, 0.98]))
        )
        mask = as_mask("test", truth)
    return mask, truth


@st.composite
def combined(draw: st.DrawFn, lead: tuple[int, ...], H: int, T: int, S: int, depth: int = 2) -> tuple[Any, Truth]:
    """Masks under ``&``, ``|`` and ``~``."""
    form = draw(st.sampled_from(["one", "not", "and", "or"])) if depth else "one"
    if form == "one":
        return draw(one_mask(lead, H, T, S))
    mask, truth = draw(combined(lead, H, T, S, depth - 1))
    if form == "not":
        return ~mask, ~np.asarray(truth)
    other, more = draw(combined(lead, H, T, S, depth - 1))
    return (mask & other, truth & more) if form == "and" else (mask | other, truth | more)


@st.composite
def cases(draw: st.DrawFn, wide: bool = False) -> tuple[Any, Truth]:
    """A mask and its truth (..., H, T, S)."""
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    H, T = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    S = draw(st.integers(1, 110 if wide else 9))
    mask, truth = draw(combined(lead, H, T, S))
    return mask, np.broadcast_to(truth, (*lead, H, T, S))


@given(cases())
def test_to_array_is_the_definition(case):
    mask, truth = case
    got = mask.to_array(*truth.shape[-2:])
    assert got.dtype == bool
    assert got.flags.writeable
    assert got.shape[:-2] == mask.outer_shape()
    np.testing.assert_array_equal(np.broadcast_to(got, truth.shape), truth)


@given(cases(), st.data())
def test_one_pair(case, data):
    mask, truth = case
    index = tuple(data.draw(st.integers(0, n - 1)) for n in truth.shape)
    *at, i, j = index
    T, S = truth.shape[-2:]
    assert mask.sees(i, j, T, S, at) == truth[index]
    assert mask.draw(T, S, at=at).split("\n")[i][j] == ".#"[int(truth[index])]
    sentence = mask.explain(i, j, T=T, S=S, at=at)
    assert sentence.startswith(f"query {i} may {'' if truth[index] else 'not '}attend to key {j}")


# Tiles -------------------------------------------------------------------------------------------------------------------------


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, ...]) -> Place:
    """A tile of a problem (..., H, T, S), its heads in groups of some size."""
    *lead, heads, T, S = shape
    group = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))

    def part(n: int) -> slice:
        start = draw(st.integers(0, n - 1))
        return slice(start, draw(st.integers(start + 1, n)))

    whole = (*lead, heads // group, group, T, S)
    *outer, kv_heads, of_group, queries, keys = (part(n) for n in whole)
    return Place(tuple(outer), kv_heads, of_group, queries, keys, whole)


def inside(truth: Truth, place: Place) -> Truth:
    return truth.reshape(place.whole)[(*place.lead, place.heads, place.group, place.queries, place.keys)]


@given(cases(wide=True), st.data())
def test_a_tile_is_a_part_of_the_whole(case, data):
    mask, truth = case
    place = data.draw(places(truth.shape))
    expected = inside(truth, place)
    np.testing.assert_array_equal(np.broadcast_to(mask.visible(place, np, None), expected.shape), expected)


@given(cases(wide=True), st.data())
def test_runs_cover_the_keys_and_say_what_is_so(case, data):
    mask, truth = case
    place = data.draw(places(truth.shape))
    runs = mask.runs(place)
    assert [runs[0].start, *(r.stop for r in runs)] == [*(r.start for r in runs), place.keys.stop]
    assert runs[0].start == place.keys.start
    for run in runs:
        pairs = inside(truth, place._replace(keys=slice(run.start, run.stop)))
        assert pairs.size > 0
        assert run.state != ALL or pairs.all(), run
        assert run.state != NONE or not pairs.any(), run


@given(cases(wide=True), st.data())
def test_neighbouring_queries_see_no_more_keys_than_a_mask_reaches(case, data):
    mask, truth = case
    place = data.draw(places(truth.shape))
    seen = inside(truth, place._replace(keys=slice(0, truth.shape[-1])))
    length = place.queries.stop - place.queries.start
    assert seen.any(axis=tuple(range(seen.ndim - 1))).sum() <= mask.reach(place) <= truth.shape[-1]
    assert mask.reach(place) == mask.reach(place._replace(queries=slice(0, length)))


@pytest.mark.parametrize("left", [0, 1, 3])
@pytest.mark.parametrize("right", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_window_reaches_as_far_as_its_queries_see(left, right, count):
    part, mask = slice(0, 1), window_mask(left, right, 1)
    place = Place((), part, part, slice(0, count), slice(0, 12), (1, 1, 12, 12))
    seen = mask.to_array(12, 12)
    most = max(seen[first : first + count].any(axis=0).sum() for first in range(12 - count + 1))
    assert mask.reach(place) == most


def test_how_far_masks_reach():
    def reach(mask, lead=slice(0, 2)):
        part = slice(0, 1)
        return mask.reach(Place((lead,), part, part, slice(0, 256), slice(0, 4096), (2, 1, 1, 4096, 4096)))

    assert reach(window_mask(128, 0)) == 384
    assert reach(window_mask(3, 5, 7)) == 264
    assert reach(window_mask(128, 0) & length_mask(300)) == 300
    assert reach(window_mask(10, 0) | length_mask(7)) == 273
    assert reach(causal_mask()) == 4096
    assert reach(length_mask([100, 200])) == 200
    assert reach(length_mask([100, 200]), slice(0, 1)) == 100


@st.composite
def bands_and_lengths(draw: st.DrawFn, T: int, S: int) -> Mask:
    """Masks that numbers describe: of them everything can be known without a look at pairs."""
    offset, left, right = (
        draw(st.integers(-T - 2, S + 2)),
        draw(st.none() | st.integers(0, S)),
        draw(st.none() | st.integers(0, S)),
    )
    masks = [
        causal_mask(offset),
        causal_mask_end(),
        window_mask(left, right, offset),
        length_mask(draw(st.integers(0, S))),
        length_mask(offset, draw(st.integers(0, T))),
    ]
    return draw(st.sampled_from(masks))


@given(st.data())
def test_runs_of_bands_and_lengths_are_as_sharp_as_can_be(data):
    """Key by key: whatever could be skipped, or taken without a look, is."""
    T, S = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 60))
    mask = data.draw(bands_and_lengths(T, S))
    place = data.draw(places((1, T, S)))
    for run in mask.runs(place):
        pairs = inside(mask.to_array(T, S)[None], place._replace(keys=slice(run.start, run.stop)))[0, 0]
        state = np.where(pairs.all(axis=0), ALL, np.where(pairs.any(axis=0), MIXED, NONE))
        assert (state == run.state).all(), (mask, run, state)


@given(cases())
def test_queries_said_to_see_a_key_do(case):
    mask, truth = case
    assert truth.any(axis=-1).all() or not mask.shows_every_query(*truth.shape[-2:])


@given(st.data())
def test_bands_and_lengths_know_whether_every_query_sees_a_key(data):
    T, S = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    mask = data.draw(bands_and_lengths(T, S))
    assert mask.shows_every_query(T, S) == mask.to_array(T, S).any(axis=-1).all()


def test_runs_worth_having():
    rows = Place((), slice(0, 1), slice(0, 1), slice(100, 110), slice(0, 1000), (1, 1, 1000, 1000))
    assert causal_mask().runs(rows) == [Run(0, 101, ALL), Run(101, 110, MIXED), Run(110, 1000, NONE)]
    assert window_mask(20, 0).runs(rows) == [
        Run(0, 80, NONE),
        Run(80, 89, MIXED),
        Run(89, 101, ALL),
        Run(101, 110, MIXED),
        Run(110, 1000, NONE),
    ]
    assert (causal_mask() & length_mask(50)).runs(rows) == [Run(0, 50, ALL), Run(50, 1000, NONE)]
    # a window and a few keys that everybody sees: not one span
    few = (window_mask(20, 0) | length_mask(4)).runs(rows)
    assert few[:2] == [Run(0, 4, ALL), Run(4, 80, NONE)]
    assert (~causal_mask()).runs(rows)[0] == Run(0, 101, NONE)
    packed = segment_mask(np.repeat(np.arange(10), 100)).runs(rows)  # in blocks of 32
    assert packed == [Run(0, 96, NONE), Run(96, 128, MIXED), Run(128, 192, ALL), Run(192, 224, MIXED), Run(224, 1000, NONE)]
    for array, state in (([True, True], ALL), ([True, False], MIXED), ([False, False], NONE)):  # the same for every key
        column = as_mask("test", np.repeat(array, 500)[:, None])
        both = rows._replace(queries=slice(499, 501))
        assert column.runs(both) == [Run(0, 1000, state)]
        assert (~column).runs(both) == [Run(0, 1000, ALL - state)]
    lengths = length_mask([10, 500])
    batch = Place((slice(0, 1),), *rows[1:5], (2, *rows.whole))
    assert lengths.runs(batch) == [Run(0, 10, ALL), Run(10, 1000, NONE)]
    assert lengths.runs(batch._replace(lead=(slice(0, 2),))) == [Run(0, 10, ALL), Run(10, 500, MIXED), Run(500, 1000, NONE)]


# In attention ------------------------------------------------------------------------------------------------------------------


@given(cases(), st.sampled_from(list(PATHS)), st.integers(0, 99))
def test_a_mask_is_its_array(case, path, seed):
    """To rounding; and what no query sees may be NaN."""
    mask, truth = case
    *lead, H, T, S = truth.shape
    rng = np.random.default_rng(seed)
    q, dout = rng.standard_normal((*lead, H, T, 3)), rng.standard_normal((*lead, H, T, 2))
    k, v = rng.standard_normal((*lead, H, S, 3)), rng.standard_normal((*lead, H, S, 2))
    k[~truth.any(axis=-2)] = np.nan
    v[~truth.any(axis=-2)] = np.inf
    expected, saved = attention_forward(q, k, v, mask=np.array(truth))
    expected_grads = attention_backward(dout, saved)
    assert np.isfinite(expected).all()
    assert (expected[~truth.any(axis=-1)] == 0).all()
    with forced(PATHS[path]):
        out, saved = attention_forward(q, k, v, mask=mask)
        grads = attention_backward(dout, saved)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(grads, name), getattr(expected_grads, name), rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("by", [2**29, 2**31 - 1, 2**31, 2**40, 2**62, -(2**29), -(2**31), -(2**40), -(2**63)])
def test_far_offsets_and_sides(by, path):
    v = np.arange(6.0)[:, None]
    q = k = np.zeros((6, 1))
    with forced(PATHS[path]):
        everything = np.full((6, 1), 2.5 if by > 0 else 0)
        np.testing.assert_allclose(attention(q, k, v, mask=causal_mask(by)), everything)
        np.testing.assert_allclose(attention(q, k, v, mask=~window_mask(None, 0, by)), 2.5 - everything)
        np.testing.assert_allclose(attention(q, k, v, mask=window_mask(None, 0, np.asarray(by))), everything)
        if by > 0:
            np.testing.assert_allclose(attention(q, k, v, mask=window_mask(by, by)), everything)
            np.testing.assert_allclose(attention(q, k, v, mask=length_mask(by)), everything)
        if 0 < by <= 2**31:  # they cancel: keys from i + 1 on
            expected = [3, 3.5, 4, 4.5, 5, 0]
            np.testing.assert_allclose(attention(q, k, v, mask=window_mask(by, None, by + 1))[:, 0], expected)


def test_a_million_by_a_million_costs_nothing():
    n = 10**6
    tracemalloc.start()
    mask = (window_mask(64, 0, offset=[0, 5]) | length_mask(4)) & ~causal_mask_end() | causal_mask() & length_mask([n, 10])
    tile = Place((slice(0, 2),), slice(0, 1), slice(0, 1), slice(n // 2, n // 2 + 64), slice(0, n), (2, 1, 1, n, n))
    runs = mask.runs(tile)
    pairs = mask.visible(tile._replace(keys=slice(n // 2, n // 2 + 64)), np, None)
    assert pairs.shape == (2, 1, 1, 64, 64)
    assert runs[0].start == 0
    assert runs[-1].stop == n
    mask.explain(n - 1, 3, T=n, S=n, at=(1, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


# Libraries ---------------------------------------------------------------------------------------------------------------------


def _masks_of(convert: Any) -> list[tuple[Any, Any]]:
    """Masks whose numbers are ``convert``-ed, and the same on the host, for a problem (2, 1, 3, 4)."""
    lengths, offsets, ids = np.asarray([1, 3]), np.asarray([0, 2]), np.asarray([[0, 0, 1, 1], [2, 1, 1, 2]])
    pairs = np.asarray([[[[True, False, True, False]]], [[[False, True, True, True]]]])
    forms: list[tuple[Any, tuple[np.ndarray, ...]]] = [
        (length_mask, (lengths,)),
        (length_mask, (lengths, lengths)),
        (causal_mask, (offsets,)),
        (lambda offset: window_mask(1, 0, offset), (offsets,)),
        (lambda offset: window_mask(2**40, 1, offset), (offsets,)),
        (lambda own, keys: segment_mask(own[:, :3], keys), (ids, ids)),
        (lambda n, pairs: causal_mask(n) & pairs | ~length_mask(n), (offsets, pairs)),
    ]
    return [(make(*map(convert, arrays)), make(*arrays)) for make, arrays in forms]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint64"])
def test_numbers_on_the_device(library, xp, to_xp, dtype):
    """They are not looked at: every tile is mixed, and the pairs are right."""
    if not library.has(dtype):
        pytest.skip(f"{library.name} has no {dtype}")
    place = Place((slice(0, 2),), slice(0, 1), slice(0, 1), slice(0, 3), slice(0, 4), (2, 1, 1, 3, 4))

    def convert(x: np.ndarray) -> Any:
        return to_xp(x) if x.dtype == bool else to_xp(x, dtype)

    for mask, host in _masks_of(convert):
        got = mask.to_array(3, 4, xp=xp, device=library.device)
        np.testing.assert_array_equal(to_numpy(got), host.to_array(3, 4))
        assert mask.draw(3, 4, at=(1, 0)) == host.draw(3, 4, at=(1, 0))
        assert library.name == "numpy" or mask.runs(place) == [Run(0, 4, MIXED)]


def test_numbers_on_the_host_beside_any_library(library, xp, to_xp):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 1, 3, 2)), rng.standard_normal((2, 1, 4, 2)), rng.standard_normal((2, 1, 4, 2))
    for _, host in _masks_of(lambda x: x)[:-1]:
        out = attention(to_xp(q), to_xp(k), to_xp(v), mask=host)
        np.testing.assert_allclose(to_numpy(out), attention(q, k, v, mask=host), rtol=1e-12, atol=1e-14)
        np.testing.assert_array_equal(to_numpy(host.to_array(3, 4, xp=xp, device=library.device)), host.to_array(3, 4))


def test_traced_numbers_are_never_read_back():
    """Inside jit there is nothing to read: what tried to would fail."""
    jax = pytest.importorskip("jax")
    library = open_library("jax")
    rng = np.random.default_rng(0)
    shapes = (2, 1, 3, 2), (2, 1, 4, 2), (2, 1, 4, 2)
    q, k, v = (rng.standard_normal(s) for s in shapes)
    dout = rng.standard_normal((2, 1, 3, 2))
    n, pairs = np.asarray([1, 3]), rng.random((2, 1, 3, 4)) < 0.6

    def run(q, k, v, dout, n, pairs):
        mask = (causal_mask(n) | length_mask(n)) & segment_mask(pairs[0, 0, :, 0] + n[0], n[0] + n[None, [0, 1, 1, 0]]) | pairs
        out, saved = attention_forward(q, k, v, mask=mask)
        return out, attention_backward(dout, saved)

    got = jax.jit(run)(*(asarray(x, library) for x in (q, k, v, dout, n, pairs)))
    for g, e in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(run(q, k, v, dout, n, pairs)), strict=True):
        np.testing.assert_allclose(np.asarray(g), e, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "strict"])
def test_arrays_on_either_side(name):
    if name in ("torch", "jax"):
        pytest.importorskip(name)
    library = open_library(name)
    array = np.asarray([[True, False, True], [False, True, True]])
    causal = causal_mask().to_array(2, 3)
    given = asarray(array, library)
    sides = [(causal_mask() & given, causal & array), (causal_mask() | given, causal | array)]
    if name == "strict":  # it asks of the right operand that it be one of its arrays, and leaves it no say
        with pytest.raises(TypeError, match="Expected Array or Python scalar"):
            given & causal_mask()
    else:
        sides += [(given & causal_mask(), causal & array), (given | causal_mask(), causal | array)]
    for mask, expected in sides:
        assert isinstance(mask, Mask)
        np.testing.assert_array_equal(to_numpy(mask.to_array(2, 3, xp=library.xp)), expected)


# Words -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (causal_mask(), "causal_mask()"),
        (causal_mask(-3), "causal_mask(offset=-3)"),
        (causal_mask([0, 2]), "causal_mask(offset=[0, 2])"),
        (causal_mask_end(), "causal_mask_end()"),
        (window_mask(None, 2), "window_mask(None, 2)"),
        (window_mask(1, 2, offset=4), "window_mask(1, 2, offset=4)"),
        (length_mask(3), "length_mask(3)"),
        (length_mask([3, 1], 2), "length_mask([3, 1], 2)"),
        (length_mask(np.zeros(20, int)), "length_mask(array(20,))"),
        (segment_mask([0, 1]), "segment_mask([0, 1])"),
        (segment_mask([0, 1], [0]), "segment_mask([0, 1], [0])"),
        (as_mask("test", np.zeros((2, 3), bool)), "array(2, 3)"),
        (causal_mask() & length_mask(3) | window_mask(0, 0), "(causal_mask() & length_mask(3)) | window_mask(0, 0)"),
        (causal_mask() & (length_mask(3) | window_mask(0, 0)), "causal_mask() & (length_mask(3) | window_mask(0, 0))"),
        (causal_mask() & length_mask(3) & window_mask(0, 0), "causal_mask() & length_mask(3) & window_mask(0, 0)"),
        (~causal_mask(), "~causal_mask()"),
        (~(causal_mask() | length_mask(3)), "~(causal_mask() | length_mask(3))"),
        (np.ones((1, 3), bool) & ~causal_mask(), "array(1, 3) & ~causal_mask()"),
    ],
)
def test_repr(mask, text):
    assert repr(mask) == text
    if "array" not in text:
        again = eval(text, dict(vars(npattn)))
        np.testing.assert_array_equal(again.outer_shape(), mask.outer_shape())
        if "[" not in text:
            np.testing.assert_array_equal(again.to_array(4, 5), mask.to_array(4, 5))


def test_draw():
    assert (causal_mask() & length_mask([2, 3])).draw(3, 4, at=(0, 0)) == "#...\n##..\n##.."
    assert (causal_mask() & length_mask([2, 3])).draw(3, 4, at=(1, 0)) == "#...\n##..\n###."
    heads = as_mask("test", np.asarray([[[True, False]], [[False, True]]]))
    assert heads.draw(1, 2) == "#."
    assert heads.draw(1, 2, at=(1,)) == ".#"
    assert heads.draw(1, 2, at=(7, 1)) == ".#"  # further leading axes are not the mask's concern
    assert causal_mask().draw(0, 3) == ""


def test_explain():
    mask = causal_mask() & (length_mask([2, 3]) | window_mask(0, 0))
    assert mask.explain(2, 2, T=4, S=4) == "query 2 may attend to key 2"
    assert mask.explain(1, 3, T=4, S=4) == (
        "query 1 may not attend to key 3: causal_mask() and length_mask([2, 3]) and window_mask(0, 0) forbid it"
    )
    assert mask.explain(3, 2, T=4, S=4) == (
        "query 3 may not attend to key 2: length_mask([2, 3]) and window_mask(0, 0) forbid it"
    )
    assert mask.explain(3, 2, T=4, S=4, at=(1, 0)) == "query 3 may attend to key 2"
    assert (~causal_mask()).explain(1, 0, T=2, S=2) == "query 1 may not attend to key 0: ~causal_mask() forbids it"


@pytest.mark.parametrize(
    "mask", [causal_mask(), causal_mask() & length_mask(1), as_mask("test", np.ones((1, 1), bool))], ids=repr
)
def test_no_truth_value(mask):
    for use in (bool, lambda m: m and m, lambda m: m or m, lambda m: not m, lambda m: [1 for _ in "a" if m]):
        with pytest.raises(TypeError, match="a mask has no single truth value: combine masks with & | ~"):
            use(mask)


# Errors ------------------------------------------------------------------------------------------------------------------------

NO_INTEGER: Any = 1.0
X = np.zeros((2, 3, 4, 5))  # (B, H, T, D), and S = 4


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            np.ones((4, 4), int),
            TypeError,
            "mask must be boolean, .*, got int64; numbers that are added to the scores go to bias=",
        ),
        (np.ones((4, 4)), TypeError, "mask must be boolean, .*, got float64; numbers that are added to the scores go to bias="),
        ([[True] * 4] * 4, TypeError, "mask must be a mask such as causal_mask.. or a boolean array, got list"),
        (True, TypeError, "mask must be a mask such as causal_mask.. or a boolean array, got bool"),
        ("causal", TypeError, "mask must be a mask such as causal_mask.. or a boolean array, got str"),
        (causal_mask, TypeError, "mask must be an array"),
        (np.ones((4, 3), bool), ValueError, r"mask must broadcast to \(..., H, T, S\) = \(2, 3, 4, 4\), got shape \(4, 3\)"),
        (
            np.ones((2, 4, 4), bool),
            ValueError,
            r"mask must broadcast to \(..., H, T, S\) = \(2, 3, 4, 4\), got shape \(2, 4, 4\)",
        ),
        (np.ones((1, 2, 3, 4, 4), bool), ValueError, r"mask must broadcast to \(..., H, T, S\)"),
        (causal_mask() & np.ones((3, 4), bool), ValueError, r"mask must broadcast to \(..., H, T, S\)"),
        (causal_mask([0, 1, 2]), ValueError, r"the offset of causal_mask must broadcast to the leading axes \(...\) = \(2,\)"),
        (length_mask([[0], [1]]), ValueError, r"the key_lengths of length_mask must broadcast to the leading axes"),
        (length_mask(3, [1, 2, 3]), ValueError, r"the query_lengths of length_mask must broadcast to the leading axes"),
        (segment_mask([0, 1, 2]), ValueError, r"the query_ids of segment_mask must have shape \(..., T\) with T = 4, got \(3,\)"),
        (segment_mask([0] * 4, [0] * 3), ValueError, r"the key_ids of segment_mask must have shape \(..., S\) with S = 4"),
        (
            segment_mask([[0] * 4] * 3),
            ValueError,
            r"the query_ids of segment_mask without its last axis must broadcast to the lead",
        ),
    ],
    ids=lambda part: "a function" if part is causal_mask else str(part),  # with its address the id would change from run to run
)
def test_what_does_not_fit(mask, error, message):
    with pytest.raises(error, match=f"^attention: {message}"):
        attention(X, X, X, mask=mask)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: causal_mask(0.5), TypeError, "causal_mask: offset must be an array"),
        (lambda: causal_mask(np.asarray([0.5])), TypeError, "causal_mask: offset must have an integer dtype, got float64"),
        (lambda: causal_mask([True]), TypeError, "causal_mask: offset must have an integer dtype, got bool"),
        (lambda: window_mask(-1, 0), ValueError, "window_mask: left must be at least 0, got -1"),
        (lambda: window_mask(0, NO_INTEGER), TypeError, "window_mask: right must be an integer, got float"),
        (lambda: length_mask([1.0]), TypeError, "length_mask: key_lengths must have an integer dtype, got float64"),
        (lambda: length_mask(1, [1.0]), TypeError, "length_mask: query_lengths must have an integer dtype, got float64"),
        (lambda: segment_mask(3), ValueError, r"segment_mask: query_ids must have shape \(..., T\), got \(\)"),
        (lambda: segment_mask([3], 3), ValueError, r"segment_mask: key_ids must have shape \(..., S\), got \(\)"),
        (lambda: causal_mask() & np.ones((2, 2)), TypeError, "mask: mask must be boolean"),
        (
            lambda: causal_mask() | None,
            TypeError,
            "mask: mask must be a mask such as causal_mask.. or a boolean array, got NoneType",
        ),
        (
            lambda: causal_mask() & [True],
            TypeError,
            "mask: mask must be a mask such as causal_mask.. or a boolean array, got list",
        ),
        (lambda: 1 & causal_mask(), TypeError, "mask: mask must be a mask such as causal_mask.. or a boolean array, got int"),
        (lambda: length_mask([1, 2], [1, 2, 3]).to_array(2, 2), ValueError, "mask: key_lengths and query_lengths of shapes"),
        (lambda: segment_mask([[1], [2]], [[1]] * 3).to_array(1, 1), ValueError, "segment_mask: ids of shapes"),
        (lambda: (length_mask([1, 2]) & causal_mask([1, 2, 3])).draw(2, 2), ValueError, "mask: the shapes of length_mask"),
        (
            lambda: (causal_mask() & np.ones((2, 3), bool)).to_array(3, 3),
            ValueError,
            r"mask: mask must broadcast to \(..., H, T, S\)",
        ),
        (lambda: causal_mask().explain(2, 0, T=2, S=2), ValueError, r"explain: the pair \(2, 0\) lies outside T = 2, S = 2"),
        (lambda: causal_mask().explain(0, -1, T=2, S=2), ValueError, r"explain: the pair \(0, -1\) lies outside T = 2, S = 2"),
        (
            lambda: length_mask([1, 2]).draw(2, 2, at=(2, 0)),
            ValueError,
            r"mask: at must be an index into the leading axes and heads",
        ),
        (lambda: length_mask([1, 2]).explain(0, 0, T=2, S=2, at=(-1, 0)), ValueError, "mask: at must be an index"),
    ],
)
def test_what_makes_no_mask(make, error, message):
    with pytest.raises(error, match=f"^{message}"):
        make()


@pytest.mark.parametrize("name", ["torch", "jax", "strict"])
def test_arrays_of_another_library(name):
    if name in ("torch", "jax"):
        pytest.importorskip(name)
    mask = causal_mask() & asarray(np.ones((4, 4), bool), open_library(name))
    spelt = "array_api_strict" if name == "strict" else name
    with pytest.raises(TypeError, match=rf"^attention: q is an array of numpy but mask \(0\) is one of {spelt}"):
        attention(X, X, X, mask=mask)
    with pytest.raises(TypeError, match=f"^to_array: the mask holds arrays of {spelt}, and xp is numpy"):
        mask.to_array(4, 4)


def test_empty():
    for T, S in itertools.product((0, 2), (0, 3)):
        mask = causal_mask() & length_mask([1, 2]) | segment_mask(np.zeros((2, T), int), np.zeros(S, int))
        assert mask.to_array(T, S).shape == (2, 1, T, S)
    assert length_mask([]).to_array(2, 3).shape == (0, 1, 2, 3)
