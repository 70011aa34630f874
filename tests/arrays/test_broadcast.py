"""Broadcasting and its way back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from npattn._arrays.broadcast import broadcast_shapes, unbroadcast
from npattn.testing.libraries import to_numpy


@given(mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=4, min_side=0))
def test_common_shape_is_that_of_numpy(shapes):
    assert broadcast_shapes(*shapes.input_shapes) == shapes.result_shape


@given(st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), max_size=3))
def test_no_common_shape_is_none(shapes):
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        expected = None
    assert broadcast_shapes(*shapes) == expected


@given(mutually_broadcastable_shapes(num_shapes=1, base_shape=(2, 3, 5)), st.integers(0, 2**32 - 1))
def test_unbroadcast_is_the_adjoint_of_broadcasting(library, xp, to_xp, shapes, seed):
    """⟨dy, broadcast(x)⟩ = ⟨unbroadcast(dy), x⟩, in integers, so exactly."""
    shape, whole = shapes.input_shapes[0], shapes.result_shape
    rng = np.random.default_rng(seed)
    x, dy = (rng.integers(-9, 10, size=s).astype(float) for s in (shape, whole))
    with library.active():
        dx = unbroadcast(to_xp(dy), shape, xp=xp)
    assert tuple(dx.shape) == shape
    assert np.vdot(dy, np.broadcast_to(x, whole)) == np.vdot(to_numpy(dx), x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_unbroadcast_keeps_the_dtype(library, xp, to_xp, dtype):
    if library.has(dtype):
        assert unbroadcast(to_xp(np.ones((2, 3)), dtype), (3,), xp=xp).dtype == getattr(xp, dtype)
