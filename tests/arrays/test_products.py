"""Matrix products in pieces: the same as whole, from any number of threads, with BLAS left as it was."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from npattn import set_num_threads
from npattn._arrays import blas, products
from npattn._arrays.products import Product, multiply
from npattn.testing.libraries import to_numpy

# rows or columns in pieces whose last is shorter, of which one may be all; empty; small
SHAPES = [
    (200, 70, 50),
    (50, 70, 200),
    (131, 128, 129),
    (1, 300, 4000),
    (4000, 300, 1),
    (0, 5, 7),
    (5, 0, 7),
    (5, 7, 0),
    (2, 3, 4),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(products, "PIECE", 1 << 18)
    monkeypatch.setattr(products, "LARGE", 1 << 10)
    yield
    set_num_threads(None)


def draw(m: int, k: int, n: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([m, k, n])
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n), (n,)))  # type: ignore[return-value]


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_the_product(shape):
    a, b, row = draw(*shape)
    plain, added, transposed = multiply(Product(a, b), Product(a, b, row), Product(b.T, a.T), xp=np)
    expected = np.einsum("mk,kn->mn", a, b)
    np.testing.assert_allclose(plain, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(added, expected + row, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(transposed, expected.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_number_of_threads_changes_no_bit(shape):
    a, b, row = draw(*shape, dtype="float32")
    results = []
    for count in (1, 2, 5):
        set_num_threads(count)
        results.append(multiply(Product(a, b, row), Product(a.T, a), xp=np))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_there_are_several_pieces_and_blas_has_one_thread_in_each(monkeypatch):
    seen = []
    before = [pool["num_threads"] for pool in threadpool_info()]
    whole = np.matmul

    def matmul(*args, out):
        seen.append({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"})
        return whole(*args, out=out)

    monkeypatch.setattr(np, "matmul", matmul)
    a, b, _ = draw(200, 70, 50)
    multiply(Product(a, b), xp=np)
    assert seen == [{1}] * 2  # 128 rows, then the rest
    assert [pool["num_threads"] for pool in threadpool_info()] == before


def test_no_warning_of_an_overflow_in_any_thread(recwarn):
    a = np.full((300, 70), 1e300)
    set_num_threads(3)
    with np.errstate(all="warn"):
        assert np.isinf(multiply(Product(a, a.T), xp=np)[0]).all()
        assert np.isinf(multiply(Product(a[:2], a[:2].T), xp=np)[0]).all()
    assert not recwarn.list


def test_what_goes_wrong_in_a_piece_reaches_the_caller(monkeypatch):
    def matmul(*args, out):
        raise MemoryError("no room")

    monkeypatch.setattr(np, "matmul", matmul)
    a, b, _ = draw(200, 70, 50)
    with pytest.raises(MemoryError, match="no room"):
        multiply(Product(a, b), xp=np)
    assert blas._blas.inside == 0


def test_every_library(library, to_xp):
    a, b, row = draw(7, 5, 3)
    got = multiply(Product(to_xp(a), to_xp(b), to_xp(row)), xp=library.xp)[0]
    np.testing.assert_allclose(to_numpy(got), a @ b + row, rtol=1e-14, atol=1e-14)
