"""Positions: the sinusoidal table, learned ones, and rotary ones, by plain loops, laws and printed examples."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from npattn.layers import (
    Rotary,
    embedding_backward,
    embedding_forward,
    rotate,
    rotate_backward,
    rotate_forward,
    sinusoidal_positions,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import asarray, open_library, to_numpy
from npattn.testing.vectors import published_examples

DATA = Path(__file__).parent.parent / "data"
PUBLISHED = {vector.name: (vector, atol) for vector, atol, _ in published_examples(DATA)}
anything: Any = Rotary  # a NamedTuple takes anything; its users check

# Sinusoidal --------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 6), st.integers(0, 9), st.integers(-5, 10**6), st.sampled_from([10000.0, 10.0]))
def test_the_table_by_plain_loops(T, C, offset, base):
    table = sinusoidal_positions(T, C, offset=offset, base=base)
    assert table.shape == (T, C)
    for p, c in itertools.product(range(T), range(C)):
        wave = math.cos if c % 2 else math.sin
        angle = (offset + p) / base ** (2 * (c // 2) / C)
        assert table[p, c] == pytest.approx(wave(angle), abs=1e-15 * (1 + abs(angle)))


def test_odd_widths():
    np.testing.assert_allclose(sinusoidal_positions(2, 3)[1], [0.841471, 0.540302, 0.00215443], atol=5e-7)
    expected = [0.841471, 0.540302, 0.0251162, 0.999685, 0.00063096]
    np.testing.assert_allclose(sinusoidal_positions(2, 5)[1], expected, atol=5e-7)
    np.testing.assert_allclose(sinusoidal_positions(2, 1), [[0], [0.841471]], atol=5e-7)


def test_published_table():
    vector, atol = PUBLISHED["equinox_freqs_sin"]
    np.testing.assert_allclose(sinusoidal_positions(16, 8)[:, ::2], vector.expected["out"], atol=atol)


def test_tables_are_cast_last():
    table = sinusoidal_positions(2050, 8, dtype=np.float16)
    assert table.dtype == np.float16
    assert (table[2048] != table[2049]).any()  # as float16 numbers, both are 2048
    np.testing.assert_array_equal(table, sinusoidal_positions(2050, 8).astype(np.float16))
    far = sinusoidal_positions(1, 8, offset=10**7 + 1, dtype=np.float32)
    assert far[0, 0] == np.float32(math.sin(10**7 + 1))


def test_an_offset_continues_a_table():
    whole = sinusoidal_positions(7, 5)
    np.testing.assert_array_equal(sinusoidal_positions(4, 5, offset=3), whole[3:])


def test_the_table_on_every_library(library, xp):
    device = {} if library.device is None else {"device": library.device}
    expected = sinusoidal_positions(4, 3)
    table = sinusoidal_positions(4, 3, xp=xp, **device)
    assert table.dtype == xp.zeros(1).dtype  # the library's own default
    assert library.device is None or table.device == library.device
    np.testing.assert_allclose(to_numpy(table), expected, rtol=1e-6)
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        if library.has(dtype):
            cast = sinusoidal_positions(4, 3, xp=xp, dtype=getattr(xp, dtype), **device)
            assert cast.dtype == asarray([1.0], library, dtype=dtype).dtype
            np.testing.assert_allclose(to_numpy(cast), expected, rtol=1e-2 if "16" in dtype else 1e-7)


def test_table_errors():
    wrong: Any = 2.0
    for T, C, name in ((wrong, 3, "T"), (3, wrong, "C")):
        with pytest.raises(TypeError, match=f"^sinusoidal_positions: {name} must be an integer, got float"):
            sinusoidal_positions(T, C)
    with pytest.raises(ValueError, match="^sinusoidal_positions: C must be at least 0, got -1"):
        sinusoidal_positions(1, -1)
    with pytest.raises(TypeError, match="^sinusoidal_positions: offset must be an integer, got float"):
        sinusoidal_positions(1, 1, offset=wrong)
    with pytest.raises(ValueError, match="^sinusoidal_positions: base must be a positive finite number, got 0.0"):
        sinusoidal_positions(1, 1, base=0)


def test_learned_positions_are_an_embedding():
    """Added to every sequence of a batch, so their gradient is summed over it."""
    rng = np.random.default_rng(0)
    table, x, dout = rng.standard_normal((7, 3)), rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 5, 3))
    positions, saved = embedding_forward(table, np.arange(2, 7))
    np.testing.assert_array_equal(x + positions, x + table[2:])
    dtable = embedding_backward(dout.sum(0), saved).dtable
    np.testing.assert_array_equal(dtable, np.concatenate([np.zeros((2, 3)), dout.sum(0)]))


# Rotary ------------------------------------------------------------------------------------------------------------------------


def twin(x: np.ndarray, rotary: Rotary, positions: np.ndarray) -> np.ndarray:
    """Pairs as complex numbers, one at a time; positions (..., T)."""
    size = x.shape[-1] if rotary.size is None else rotary.size
    out = x.copy()
    positions = np.broadcast_to(positions, (*x.shape[:-3], x.shape[-2]))
    for at in np.ndindex(*x.shape[:-1]):
        place = (*at[:-2], at[-1])
        for n in range(size // 2):
            a, b = (2 * n, 2 * n + 1) if rotary.pairs == "interleaved" else (n, n + size // 2)
            angle = float(positions[place]) * rotary.scale * rotary.base ** (-2 * n / size)
            turned = complex(x[(*at, a)], x[(*at, b)]) * complex(math.cos(angle), math.sin(angle))
            out[(*at, a)], out[(*at, b)] = turned.real, turned.imag
    return out


@st.composite
def problems(draw: Any) -> tuple[np.ndarray, Rotary, np.ndarray]:
    """x, a setting, and the positions that it means."""
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    heads = draw(st.lists(st.integers(1, 3), min_size=1, max_size=1)) if lead or draw(st.booleans()) else []
    length, half, rest = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    first = draw(st.integers(-3, 50))
    by_row = rng.integers(0, 99, draw(st.sampled_from([(length,), (*lead, length), (*(1,) * len(lead), length)])))
    given_positions, positions = draw(
        st.sampled_from([(0, np.arange(length)), (first, first + np.arange(length)), (by_row, by_row), (by_row.tolist(), by_row)])
    )
    rotary = Rotary(
        base=draw(st.sampled_from([10000.0, 10, 500000.0])),
        pairs=draw(st.sampled_from(["halves", "interleaved"])),
        scale=draw(st.sampled_from([1.0, 0.25])),
        size=2 * half if rest or draw(st.booleans()) else None,
        positions=given_positions,
    )
    return rng.standard_normal((*lead, *heads, length, 2 * half + rest)), rotary, positions


@given(problems())
def test_values_are_those_of_plain_loops(problem):
    x, rotary, positions = problem
    np.testing.assert_allclose(rotate(x, rotary), twin(x, rotary, positions), rtol=1e-13, atol=1e-13)


@given(problems())
def test_backward_is_the_way_back(problem):
    x, rotary, _ = problem
    out, saved = rotate_forward(x, rotary)
    np.testing.assert_allclose(rotate_backward(out, saved).dx, x, rtol=1e-14, atol=1e-14)
    check_backward(lambda x: rotate_forward(x, rotary), rotate_backward, {"x": x}, directions=1)


def test_published_rotation():
    vector, atol = PUBLISHED["equinox_rope_rotate_half"]
    np.testing.assert_allclose(rotate(vector.inputs["x"]), vector.expected["out"], atol=atol)


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(-500, 500), st.integers(0, 99))
def test_inner_products_depend_on_the_distance_alone(pairs, p, s, by, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 8))

    def product(p: int, s: int) -> float:
        return float((rotate(q, Rotary(pairs=pairs, positions=p)) * rotate(k, Rotary(pairs=pairs, positions=s))).sum())

    assert product(p, s) == pytest.approx(product(p + by, s + by), abs=1e-11)
    assert product(p, p) == pytest.approx(float((q * k).sum()), abs=1e-12)
    turned = rotate(q, Rotary(pairs=pairs, positions=p))
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(q), rel=1e-14)


def test_the_two_kinds_of_pairs_are_one_up_to_the_order_of_features():
    x = np.random.default_rng(0).standard_normal((2, 5, 8))
    order = [0, 4, 1, 5, 2, 6, 3, 7]  # features n and n + 4 side by side
    halves, interleaved = rotate(x), rotate(x[..., order], Rotary(pairs="interleaved"))
    np.testing.assert_array_equal(halves[..., order], interleaved)
    assert np.abs(halves - rotate(x, Rotary(pairs="interleaved"))).max() > 0.1


def test_a_scale_of_positions():
    x = np.random.default_rng(0).standard_normal((4, 6))
    np.testing.assert_allclose(rotate(x, Rotary(scale=3.0)), rotate(x, Rotary(positions=[0, 3, 6, 9])), rtol=1e-14)
    np.testing.assert_array_equal(rotate(x, Rotary(scale=0)), x)


def test_features_beyond_the_size_stay():
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7))
    out = rotate(x, Rotary(size=4))
    np.testing.assert_array_equal(out[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(out[..., :4], rotate(x[..., :4]))


def test_every_kind_of_positions_on_every_library(library, to_xp):
    """Host numbers beside any library, and arrays of its own."""
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    rows = np.asarray([[0, 1, 2, 3, 4], [9, 10, 0, 1, 2]])
    for positions, device_positions in ((7, to_xp(7, "int32")), (rows, to_xp(rows)), (rows[1], to_xp(rows[1], "int32"))):
        expected = rotate(x, Rotary(positions=positions))
        for given_positions in (positions, device_positions):
            out, saved = rotate_forward(to_xp(x), Rotary(positions=given_positions))
            assert library.device is None or out.device == library.device
            np.testing.assert_allclose(to_numpy(out), expected, rtol=1e-13, atol=1e-14)
            np.testing.assert_allclose(to_numpy(rotate_backward(out, saved).dx), x, rtol=1e-13, atol=1e-14)


def test_angles_are_exact_for_far_positions(library, to_xp):
    """In float32 as in float64, up to the rounding of x and of the result: angles are not rounded first."""
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for positions in (10**6 + 1, to_xp([10**6 + 1, 10**6 + 2, 10**6 + 3])):
        exact = rotate(x.astype(np.float64), Rotary(positions=10**6 + 1))
        out = rotate(to_xp(x), Rotary(positions=positions))
        np.testing.assert_allclose(to_numpy(out), exact, rtol=0, atol=1e-6)


def test_float16_is_rounded_once(library, to_xp):
    if not library.has("float16"):
        pytest.skip(f"{library.name} has no float16")
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float16)
    out = to_numpy(rotate(to_xp(x)))
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, rotate(x.astype(np.float64)), rtol=2**-11 * 1.01, atol=1e-6)


def test_positions_inside_jit():
    """The position of a token that is generated is a number on the device."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = asarray(np.random.default_rng(0).standard_normal((2, 1, 4)), open_library("jax"))
    step = jax.jit(lambda x, p: rotate(x, Rotary(positions=p)))
    for p in (0, 5):
        np.testing.assert_allclose(to_numpy(step(x, p)), rotate(to_numpy(x), Rotary(positions=p)), rtol=1e-13, atol=1e-15)


def test_jax_without_64_bit_dtypes_is_not_warned_of():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    xp = open_library("jax").xp
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    with jax.enable_x64(False):
        for positions in (3, np.arange(3, 8), xp.arange(3, 8)):
            out = rotate(xp.asarray(x), Rotary(positions=positions))
            np.testing.assert_allclose(to_numpy(out), rotate(x, Rotary(positions=3)), atol=1e-6)
        assert sinusoidal_positions(2, 2, xp=xp).dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (0, 3, 4), (2, 3, 0), (0, 2, 3, 4), (2, 0, 3, 4)])
@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_empty(shape, pairs, to_xp):
    out, saved = rotate_forward(to_xp(np.zeros(shape)), Rotary(pairs=pairs))
    assert tuple(out.shape) == tuple(rotate_backward(out, saved).dx.shape) == shape


def test_saved_holds_no_array_of_the_size_of_x():
    saved = rotate_forward(np.ones((2, 3, 5, 4)), Rotary(positions=2))[1]
    assert saved.shape == (2, 3, 5, 4)
    assert saved.dtype == np.float64
    assert saved.rotary.size == 4
    assert repr(rotate_backward(np.ones((2, 3, 5, 4)), saved)) == "RotateGrads(dx=float64[2, 3, 5, 4])"


def test_a_setting_stands_beside_parameters():
    """It can be compared and hashed, and has its own positions for keys."""
    assert Rotary(size=4) == Rotary(size=4)
    assert len({Rotary(), Rotary(base=10000.0), Rotary(base=10.0)}) == 2
    assert Rotary(positions=3).of_keys().positions == 3
    assert Rotary(positions=3, key_positions=0).of_keys().positions == 0


def test_cotangents_that_do_not_fit():
    x = np.ones((3, 5, 4))
    saved = rotate_forward(x)[1]
    with pytest.raises(ValueError, match=r"^rotate_backward: dout must have shape \(..., H, T, D\) = \(3, 5, 4\) as the result"):
        rotate_backward(x[0], saved)
    with pytest.raises(TypeError, match="^rotate_backward: dout must be float64 as the result, got float32"):
        rotate_backward(x.astype(np.float32), saved)


@pytest.mark.parametrize(
    ("rotary", "error", "message"),
    [
        (Rotary(pairs="half"), ValueError, "the pairs of rotary must be 'halves' or 'interleaved', got 'half'"),
        (Rotary(size=3), ValueError, "the size of rotary must be even and at most D = 6, got 3"),
        (Rotary(size=8), ValueError, "the size of rotary must be even and at most D = 6, got 8"),
        (Rotary(size=-2), ValueError, "the size of rotary must be at least 0, got -2"),
        (anything(size=2.0), TypeError, "the size of rotary must be an integer, got float"),
        (Rotary(base=0), ValueError, "the base of rotary must be a positive finite number, got 0.0"),
        (Rotary(scale=math.nan), ValueError, "the scale of rotary must be a finite number, got nan"),
        (
            Rotary(positions=[0, 1, 2]),
            ValueError,
            r"the positions of rotary must broadcast to \(..., T\) = \(2, 5\), got shape \(3,\)",
        ),
        (Rotary(positions=np.zeros((3, 5), int)), ValueError, r"the positions of rotary must broadcast to \(..., T\) = \(2, 5\)"),
        (Rotary(positions=np.zeros(5)), TypeError, "the positions of rotary must have an integer dtype, got float64"),
        (Rotary(positions=1.5), TypeError, "the positions of rotary must be an array"),
        (anything(10000.0)._asdict(), TypeError, r"rotary must be a Rotary\(base, pairs, ...\), got dict"),
    ],
)
def test_errors(rotary, error, message):
    with pytest.raises(error, match=f"^rotate: {message}"):
        rotate(np.ones((2, 3, 5, 6)), rotary)


def test_other_errors():
    with pytest.raises(ValueError, match="^rotate: the size of rotary must be even and at most D = 5, got 5"):
        rotate(np.ones((2, 5)))
    with pytest.raises(ValueError, match=r"^rotate: x must have shape \(..., H, T, D\) or \(T, D\), got \(4,\)"):
        rotate(np.ones(4))
    with pytest.raises(TypeError, match="^rotate: x must have a floating dtype"):
        rotate(np.ones((2, 4), int))
    strict = open_library("strict").xp
    with pytest.raises(TypeError, match="^rotate: x is an array of numpy but positions is one of array_api_strict"):
        rotate(np.ones((2, 4)), Rotary(positions=strict.asarray([0, 1])))
