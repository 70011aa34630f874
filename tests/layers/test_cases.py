"""Inputs that broke the layers of other libraries, as their public bug reports have them, and what npattn gives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from npattn import attention_backward, attention_forward
from npattn._arrays.namespace import dtype_name
from npattn.layers import (
    Rotary,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    log_softmax_backward,
    log_softmax_forward,
    rotate,
    rotate_backward,
    rotate_forward,
    sinusoidal_positions,
    softmax_backward,
    softmax_forward,
)
from npattn.testing.libraries import to_numpy

# Precision -------------------------------------------------------------------------------------------------------------------


def test_layer_norm_of_a_large_mean(to_xp):
    root = np.sqrt(1.5)
    got = to_numpy(layer_norm(to_xp([1e6, 1e6 + 1, 1e6 + 2], "float32")))
    np.testing.assert_allclose(got, [-root, 0, root], rtol=1e-5, atol=1e-6)
    nearly_constant = np.full(3, -11, np.float32) + np.float32(3e-6)
    assert np.isfinite(to_numpy(layer_norm(to_xp(nearly_constant, "float32")))).all()


def test_layer_norm_divides_by_the_biased_variance_with_eps_inside_the_root(to_xp):
    got = to_numpy(layer_norm(to_xp([1.0, 0.0, 0.0, 0.0])))
    np.testing.assert_allclose(got, [1.7320, -0.5773, -0.5773, -0.5773], atol=1e-4)
    np.testing.assert_allclose(got[0], 0.75 / np.sqrt(3 / 16 + 1e-5), rtol=1e-14)


def test_layer_norm_in_float16(library, to_xp):
    if not library.has("float16"):
        pytest.skip(f"{library.name} has no float16")
    np.testing.assert_array_equal(to_numpy(layer_norm(to_xp(np.zeros((1, 4)), "float16"), eps=1e-12)), np.zeros((1, 4)))
    np.testing.assert_array_equal(to_numpy(layer_norm(to_xp([6e4, -6e4, 6e4, -6e4], "float16"))), [1, -1, 1, -1])


NUMBERS = [0.5, 1 / np.sqrt(4), np.float64(0.5), np.array(0.5)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_a_scale_an_eps_or_a_table_changes_no_dtype(number, to_xp):
    x = to_xp(np.random.default_rng(0).standard_normal((1, 3, 4)), "float32")
    out, saved = attention_forward(x, x, x, scale=number)
    normed, saved_norm = layer_norm_forward(x, to_xp(np.ones(4), "float32"), to_xp(np.zeros(4), "float32"), eps=number)
    rotary = Rotary(base=np.float64(100.0), scale=np.float64(0.5), positions=np.arange(3))
    turned, saved_turn = rotate_forward(x, rotary)
    grads = attention_backward(out, saved), layer_norm_backward(normed, saved_norm), rotate_backward(turned, saved_turn)
    results = [out, normed, turned, *(g for g in itertools.chain(*grads) if g is not None)]
    assert len(results) == 10
    assert {dtype_name(g.dtype) for g in results} == {"float32"}


# Backward --------------------------------------------------------------------------------------------------------------------


def test_softmax_does_not_see_what_is_added_to_all(to_xp):
    x, dout = to_xp([0.1, 0.9]), to_xp([1.0, 1.0])
    dx = to_numpy(softmax_backward(dout, softmax_forward(x)[1]).dx)
    np.testing.assert_allclose(dx, [0, 0], atol=1e-16)
    dx = to_numpy(log_softmax_backward(dout, log_softmax_forward(x)[1]).dx)
    np.testing.assert_allclose(dx, [0.3799, -0.3799], atol=5e-5)


def test_the_gradient_of_layer_norm(to_xp):
    _, saved = layer_norm_forward(to_xp([1.0, 2.0, 4.0]), to_xp(np.ones(3)), eps=1e-5)
    dx = to_numpy(layer_norm_backward(to_xp([1.0, 2.0, 3.0]), saved).dx)
    np.testing.assert_allclose(dx, [-0.1145446, 0.1718091, -0.0572646], atol=5e-8)
    np.testing.assert_allclose(to_numpy(layer_norm_backward(to_xp(np.ones(3)), saved).dx), np.zeros(3), atol=1e-15)


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_without_weight_or_bias(has_weight, has_bias, to_xp):
    x = np.asarray([[1.0, 2.0, 4.0], [3.0, -1.0, 0.5]])
    weight, bias = (to_xp([1.0, 2.0, 3.0]) if given else None for given in (has_weight, has_bias))
    out, saved = layer_norm_forward(to_xp(x), weight, bias)
    grads = layer_norm_backward(out, saved)
    assert (grads.dweight is not None, grads.dbias is not None) == (has_weight, has_bias)
    assert [g.shape for g in grads if g is not None] == [(2, 3), *([(3,)] * (has_weight + has_bias))]
    if has_bias:
        np.testing.assert_allclose(to_numpy(grads.dbias), to_numpy(out).sum(axis=0), rtol=1e-12, atol=1e-12)


# Positions -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (1, [0.841471]),
        (3, [0.841471, 0.540302, 0.00215443]),
        (5, [0.841471, 0.540302, 0.0251162, 0.999685, 0.00063096]),
    ],
)
def test_sinusoids_of_an_odd_width(width, expected, xp, library):
    table = sinusoidal_positions(2, width, xp=xp, device=library.device)
    np.testing.assert_allclose(to_numpy(table)[1], expected, rtol=1e-6, atol=5e-9)


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rotary_scores_depend_on_the_distance_alone(pairs, to_xp):
    q, k = np.random.default_rng(0).standard_normal((2, 1, 6))

    def turned(x, position):
        return to_numpy(rotate(to_xp(x), Rotary(pairs=pairs, positions=position)))

    scores = [(turned(q, p) @ turned(k, p - 5).T).item() for p in (5, 17, 400)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-12)
    assert abs(scores[0] - (q @ k.T).item()) > 1e-3
    np.testing.assert_allclose(np.linalg.norm(turned(q, 400)), np.linalg.norm(q), rtol=1e-14)


def test_the_two_kinds_of_pairs_differ(to_xp):
    x = np.asarray([[1.0, 2.0, 3.0, 4.0]])
    a, b = np.cos([1, 0.01]), np.sin([1, 0.01])
    halves = [1 * a[0] - 3 * b[0], 2 * a[1] - 4 * b[1], 3 * a[0] + 1 * b[0], 4 * a[1] + 2 * b[1]]
    interleaved = [1 * a[0] - 2 * b[0], 2 * a[0] + 1 * b[0], 3 * a[1] - 4 * b[1], 4 * a[1] + 3 * b[1]]
    for pairs, expected in (("halves", halves), ("interleaved", interleaved)):
        got = to_numpy(rotate(to_xp(x), Rotary(pairs=pairs, positions=1)))
        np.testing.assert_allclose(got[0], expected, rtol=1e-13)


def test_tables_are_computed_in_float64_and_cast_last(library, xp, to_xp):
    if not library.has("float16"):
        pytest.skip(f"{library.name} has no float16")
    half = to_xp([0.0], "float16").dtype
    table = to_numpy(sinusoidal_positions(2050, 8, xp=xp, dtype=half, device=library.device))
    exact = sinusoidal_positions(2050, 8, xp=np, dtype=np.float64)
    np.testing.assert_allclose(table, exact, rtol=0, atol=2.0**-12 + 1e-7)  # PyTorch rounds to float32 on the way
    assert (table[2048] != table[2049]).any()
    x = to_xp(np.ones((1, 8)), "float16")
    one, other = (to_numpy(rotate(x, Rotary(positions=p))) for p in (2048, 2049))
    assert (one != other).any()
