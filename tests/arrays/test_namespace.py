"""Which library, which device, which dtype: and one clear error where they are mixed."""

import numpy as np
import pytest

from npattn import attention, attention_backward, attention_forward
from npattn._arrays.namespace import array_device, array_namespace, asarray, compute_dtype, dtype_name, float_dtype, library_name
from npattn.testing.libraries import Unavailable, open_library
from npattn.testing.libraries import asarray as to_library


def test_namespace_is_that_of_array_api_compat(xp, to_xp):
    assert array_namespace("op", x=to_xp([1.0]), y=None, z=to_xp([2])) is xp


def test_numpy_is_its_own_namespace():
    assert array_namespace("op", x=np.ones(2), b=None) is np
    assert array_namespace("op", b=None) is np


def test_a_subclass_with_the_same_operators_is_welcome(tmp_path):
    memory = np.memmap(tmp_path / "x", dtype="float64", mode="w+", shape=(2,))
    assert array_namespace("op", x=memory) is np


def test_matrix_and_masked_array_are_refused():
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0]])
    with pytest.raises(TypeError, match="op: x is a numpy matrix, whose operators do not follow the array API"):
        array_namespace("op", x=matrix)
    masked = np.ma.masked_array([1.0], [True])
    with pytest.raises(TypeError, match="op: w is a numpy MaskedArray, .* mask as mask="):
        array_namespace("op", x=np.ones(1), w=masked)


@pytest.mark.parametrize("thing", [[1.0], 1.0, "x", (np.ones(1),), np.float64(1)], ids=str)
def test_what_is_no_array(thing):
    with pytest.raises(TypeError, match=r"^op: x must be an array \(NumPy, CuPy, PyTorch, JAX or .*\), got .*\."):
        array_namespace("op", y=np.ones(1), x=thing)


@pytest.mark.parametrize("other", ["strict", "torch", "jax", "cupy"])
def test_two_libraries(other):
    try:
        library = open_library(other)
    except Unavailable as reason:
        pytest.skip(str(reason))
    name = "array_api_strict" if other == "strict" else other
    x, y = np.ones((2, 3)), to_library(np.ones((2, 3)), library)
    with pytest.raises(TypeError, match=f"^op: x is an array of numpy but y is one of {name}; all arrays of a call"):
        array_namespace("op", x=x, y=y)
    with pytest.raises(TypeError, match=f"^op: y is an array of {name} but x is one of numpy; all arrays of a call"):
        array_namespace("op", y=y, x=x)
    with pytest.raises(TypeError, match="^attention: q is an array of numpy but v is one of"):
        attention(x, x, y)
    with pytest.raises(TypeError, match="^attention_backward: q is an array of numpy but dout is one of"):
        attention_backward(y, attention_forward(x, x, x)[1])


def test_two_devices():
    default, other = (open_library(name) for name in ("strict", "strict-device1"))
    x, y = (to_library(np.ones((2, 3)), library) for library in (default, other))
    with pytest.raises(TypeError, match=r"^op: x is on device .*CPU_DEVICE.* but y is on device .*device1.*; move all arrays"):
        array_namespace("op", x=x, y=y)
    with pytest.raises(TypeError, match="^attention: q is on device"):
        attention(x, y, x)


def test_names(library, xp, to_xp):
    expected = "array_api_strict" if library.name.startswith("strict") else library.name
    assert library_name(xp) == expected
    assert (array_device(to_xp([1.0])) is None) == (library.name == "numpy")
    for dtype in ("bool", "int32", "float16", "bfloat16", "float32", "float64"):
        if library.has(dtype):
            assert dtype_name(to_xp([1], dtype).dtype) == dtype


def test_device_inside_jit_is_unknown_and_no_obstacle():
    jax = pytest.importorskip("jax")
    jnp = open_library("jax").xp
    seen = []

    @jax.jit
    def inside(x):
        seen.append(array_namespace("op", x=x, y=jnp.ones(1)))
        return x

    inside(jnp.ones(2))
    assert seen == [jnp]


def test_one_float_dtype(library, to_xp):
    x = to_xp([1.0], "float32")
    assert float_dtype("op", x=x, b=None, y=to_xp([2.0], "float32")) == x.dtype
    with pytest.raises(TypeError, match=r"^op: x is float32 but y is float64; all float arrays of a call must share one dtype$"):
        float_dtype("op", x=x, y=to_xp([1.0], "float64"))
    for dtype in ("int64", "bool", "complex64"):
        if library.has(dtype):
            with pytest.raises(TypeError, match=f"^op: x must have a floating dtype .*, got {dtype}$"):
                float_dtype("op", x=to_xp([1], dtype))


def test_byte_order_is_no_dtype_of_its_own():
    big, native = np.ones(1, ">f4"), np.ones(1, "f4")
    assert float_dtype("op", x=big, y=native) == np.dtype("f4")
    assert float_dtype("op", x=big).isnative


def test_halves_are_computed_in_float32(library, xp, to_xp):
    for dtype, expected in (("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        if library.has(dtype):
            assert dtype_name(compute_dtype(to_xp([1], dtype).dtype, xp=xp)) == expected


def test_asarray_lands_on_the_device(library, xp, to_xp):
    device = array_device(to_xp([1.0]))
    x = asarray([1, 2], xp=xp, dtype=xp.float32, device=device)
    assert array_device(x) == device
    assert x.dtype == xp.float32
