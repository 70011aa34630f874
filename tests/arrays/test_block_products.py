"""Products in blocks are the products, whatever the shapes and however the arrays lie; a copy is used again only for the same."""

from __future__ import annotations

import numpy as np
import pytest

from npattn._arrays import blas
from npattn._arrays.block_products import BlockProducts, Limits

DTYPES = ["float32", "float64"]


# 16 columns and a few rows, and sums of 64 terms of float32 at once, from the smallest product on
LIMITS = Limits(bytes=1, multiplications=8_000, columns=16, row_bytes=256)


class Memory:
    """Results by name and shape, full of what a product that does not write everything would leave."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.results: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
        self.taken: list[str] = []

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        self.taken.append(name)
        return self.results.setdefault((name, shape), np.full(shape, np.nan, self.dtype))


def draw(shape: tuple[int, ...], dtype: str, *, apart: int = 0, turned: bool = False) -> np.ndarray:
    """Numbers whose rows lie ``apart`` elements apart; ``turned``: in columns, as a transposed array."""
    *lead, rows, columns = (*shape[:-2], *shape[:-3:-1]) if turned else shape
    x = np.random.default_rng(list(shape)).standard_normal((*lead, rows, columns + apart)).astype(dtype)[..., :columns]
    return x.swapaxes(-1, -2) if turned else x


def assert_product(
    products: BlockProducts, memory: Memory, a: np.ndarray, b: np.ndarray, *, apart: int = 0, name: str = "out"
) -> None:
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    whole = np.full((*lead, a.shape[-2], b.shape[-1] + apart), np.nan, a.dtype)
    out = whole[..., : b.shape[-1]]
    assert products.multiply(out, a, b, name, memory.take) is out
    exact = np.einsum("...mk,...kn->...mn", a.astype("float64"), b.astype("float64"))
    np.testing.assert_allclose(out, exact, rtol=0, atol=100 * np.finfo(a.dtype).eps * a.shape[-1] ** 0.5)
    assert np.isnan(whole[..., b.shape[-1] :]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows", "terms", "columns"),
    [
        (32, 16, 64),  # even
        (33, 16, 64),  # a row too many
        (31, 16, 70),  # columns too many
        (30, 16, 20),  # one block of columns, of odd width
        (30, 16, 7),
        (5, 10, 33),  # fewer rows than a block has
        (32, 64, 16),
        (32, 128, 16),  # two sums, or four
        (20, 192, 40),
        (20, 67, 16),  # no equal sums
        (16, 200, 300),  # many blocks, of few rows
        (1, 64, 3_000),
        (3, 60, 400),
    ],
)
def test_blocks_are_the_product(rows, terms, columns, turned, apart, dtype):
    a = draw((rows, terms), dtype, apart=apart)
    b = draw((terms, columns), dtype, apart=apart, turned=turned)
    assert_product(BlockProducts(LIMITS), Memory(dtype), a, b, apart=apart)


@pytest.mark.parametrize(
    ("a_lead", "b_lead"),
    [((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (2, 1)), ((2, 3), ()), ((), (2,)), ((0,), (0,))],
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "terms", "columns"), [(33, 16, 70), (20, 128, 16)])
def test_leading_axes(a_lead, b_lead, turned, rows, terms, columns):
    a, b = draw((*a_lead, rows, terms), "float64"), draw((*b_lead, terms, columns), "float64", turned=turned)
    assert_product(BlockProducts(LIMITS), Memory("float64"), a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(value):
    a, b = draw((33, 128), "float64"), draw((128, 70), "float64")
    a[32, 100], b[5, 69] = value, value
    with np.errstate(invalid="ignore"):
        out = BlockProducts(LIMITS).multiply(np.empty((33, 70)), a, b, "out", Memory("float64").take)
    assert not np.isfinite(out[32]).any()
    assert not np.isfinite(out[:, 69]).any()
    np.testing.assert_allclose(out[:32, :69], a[:32] @ b[:, :69], rtol=0, atol=1e-12)


def copies(memory: Memory) -> int:
    return sum(name.startswith("blocks") for name in memory.taken)


def test_keys_are_copied_once_for_neighbours():
    memory = Memory("float64")
    products = BlockProducts(LIMITS)
    a, k = draw((32, 16), "float64"), draw((96, 16), "float64")
    products.note("k", k)
    for columns in (96, 64, 96):  # a mask may leave less
        assert_product(products, memory, a, k[:columns].T, name="scores")
    assert copies(memory) == 1
    assert_product(products, memory, a, k[32:].T, name="scores")  # what is noted begins elsewhere
    products.note("k", k[32:])
    assert_product(products, memory, a, k[32:80].T, name="scores")
    assert_product(products, memory, a, k[32:].T, name="scores")  # more than was copied
    assert copies(memory) == 4


def test_values_are_copied_once_for_neighbours():
    memory = Memory("float64")
    products = BlockProducts(LIMITS)
    v = draw((32, 16), "float64", apart=1)
    products.note("v", v)
    for terms in (32, 20, 32):
        assert_product(products, memory, draw((32, terms), "float64"), v[:terms], name="out")
    assert copies(memory) == 1


def test_what_does_not_keep_its_values_is_copied_every_time():
    memory = Memory("float64")
    products = BlockProducts(LIMITS)
    a, b = draw((32, 16), "float64"), draw((16, 64), "float64")
    products.note("k", b)
    assert_product(products, memory, a, b)
    products.note("k", None)  # what stands under this name now is a tile's own memory
    b += 1
    assert_product(products, memory, a, b)
    assert copies(memory) == 2
    b += 1
    products.note("k", b)
    assert_product(products, memory, a, b)  # a copy from before it was noted is not for it


def test_blocks_that_lie_in_one_piece_are_not_copied():
    memory = Memory("float64")
    whole = np.empty(32 * 16 + 8)
    start = -(whole.ctypes.data // 8) % 8
    b = whole[start : start + 32 * 16].reshape(32, 16)
    b[...] = draw((32, 16), "float64")
    assert_product(BlockProducts(LIMITS), memory, draw((32, 32), "float64"), b)
    assert copies(memory) == 0


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([("openblas", "SkylakeX")], True),
        ([("openblas", "Haswell")], False),
        ([("openblas", "SkylakeX"), ("mkl", "SkylakeX")], False),
        ([("openblas", "SapphireRapids"), ("openblas", "Cooperlake")], True),
        ([], False),
    ],
)
def test_which_blas_gets_blocks(monkeypatch, kinds, expected):
    class Controller:
        def __init__(self, internal_api: str, architecture: str) -> None:
            self.internal_api, self.architecture = internal_api, architecture

    monkeypatch.setattr(blas, "_controllers", lambda: tuple(Controller(*kind) for kind in kinds))
    assert blas.multiplies_in_place.__wrapped__() is expected
