"""Blocks of rows: the same as in one piece, from any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from npattn import get_num_threads, set_num_threads
from npattn._arrays import blocks
from npattn._arrays.blocks import map_elements, map_elements_of_each, map_rows
from npattn.testing.libraries import open_library, to_numpy


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    set_num_threads(request.param)
    assert get_num_threads() == request.param
    yield
    set_num_threads(None)


def rows_and_totals(x, y):
    return x * y[:, None], None, np.sum(x, axis=0), None


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 100])
def test_rows_and_totals(rows, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(-9, 10, (11, 3)).astype(np.float64), rng.integers(-9, 10, 11).astype(np.float64)  # exact sums
    monkeypatch.setattr(blocks, "BLOCK", rows * 3 * 8)
    seen = []

    def f(x, y):
        seen.append(len(x))
        return rows_and_totals(x, y)

    got = map_rows(f, x, y, xp=np, totals=2)
    for result, expected in zip(got, rows_and_totals(x, y), strict=True):
        np.testing.assert_array_equal(result, expected)
    assert sum(seen) == 11
    assert max(seen) <= rows
    assert len(seen) == -(-11 // rows)


def test_the_number_of_threads_shows_in_no_bit(monkeypatch):
    x = np.random.default_rng(0).standard_normal((1000, 7)).astype(np.float32)
    monkeypatch.setattr(blocks, "BLOCK", 1000)
    results = []
    for count in (1, 2, 5):
        set_num_threads(count)
        results.append(map_rows(lambda x: (np.exp(x), np.sum(x, axis=0)), x, xp=np, totals=1))
    set_num_threads(None)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_blocks_run_side_by_side(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 8)
    set_num_threads(2)
    both = threading.Barrier(2, timeout=20)
    waiting = iter([False, True, True])  # the first block is done before the others begin

    def f(x):
        if next(waiting):
            both.wait()
        return (x + 1,)

    (result,) = map_rows(f, np.arange(3.0), xp=np)
    set_num_threads(None)
    assert result.tolist() == [1, 2, 3]


@pytest.mark.usefixtures("_threads")
def test_no_warning_in_any_block(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    with np.errstate(all="raise"):
        (result,) = map_rows(lambda x: (1 / x,), np.zeros(9), xp=np)
    assert np.isinf(result).all()


@pytest.mark.usefixtures("_threads")
def test_an_error_in_a_block_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 8)

    def f(x):
        if x[0] == 5:
            raise KeyError("five")
        return (x,)

    with pytest.raises(KeyError, match="five"):
        map_rows(f, np.arange(9.0), xp=np)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 3), (3, 4), (2, 3, 5)])
@pytest.mark.parametrize("size", [8, 40, 10**6])
def test_elements(shape, size, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", size)
    x = np.random.default_rng(0).standard_normal(shape)
    x, transposed = np.asarray(x), np.asarray(x).T
    for array in (x, transposed):
        twice, nothing = map_elements(lambda x: (2 * x, None), array, xp=np)
        assert type(twice) is np.ndarray
        np.testing.assert_array_equal(twice, 2 * array)
        assert nothing is None


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("size", [8, 40, 10**6])
def test_elements_of_several_calls(size, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", size)
    shapes: list[tuple[int, ...]] = [(), (0,), (2, 0), (3, 4), (2, 3, 5), (1,)]
    calls = [(lambda a, b, n=n: (n * a * b, a + b), (np.full(s, 2.0), np.full(s, 3.0))) for n, s in enumerate(shapes)]
    for n, (shape, (product, total)) in enumerate(zip(shapes, map_elements_of_each(calls, xp=np), strict=True)):
        assert product.shape == total.shape == shape
        assert (product == 6 * n).all()
        assert (total == 5).all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_do(shape):
    x = np.zeros(shape)
    out, total = map_rows(lambda x: (x + 1, np.sum(x, axis=0)), x, xp=np, totals=1)
    assert out.shape == shape
    np.testing.assert_array_equal(total, np.zeros(shape[1]))


def test_halves_count_as_what_they_are_computed_in(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 16)
    lengths: dict[str, int] = {}
    for dtype in ("float16", "float32", "float64"):
        map_rows(lambda x: (lengths.setdefault(str(x.dtype), len(x)), x)[1:], np.zeros(100, dtype), xp=np)
    assert lengths == {"float16": 4, "float32": 4, "float64": 2}


def test_other_libraries_do_it_in_one(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 8)
    strict = open_library("strict").xp
    calls = []

    def f(x):
        calls.append(x.shape)
        return (x + 1,)

    (result,) = map_rows(f, strict.asarray([1.0, 2.0, 3.0]), xp=strict)
    assert calls == [(3,)]
    np.testing.assert_array_equal(to_numpy(result), [2, 3, 4])
