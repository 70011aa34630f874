"""The way into every array library and out again."""

import numpy as np
import pytest

from npattn._arrays.namespace import array_namespace, dtype_name
from npattn.testing import libraries
from npattn.testing.libraries import Unavailable, available_libraries, open_library, to_numpy


def test_an_array_belongs_to_its_library_and_device(library, xp, to_xp):
    x = to_xp(np.arange(6.0).reshape(2, 3))
    assert array_namespace("test", x=x) is xp
    if library.name == "strict-device1":
        assert x.device == library.device != xp.asarray([1.0]).device
    else:
        assert library.device is None


@pytest.mark.parametrize("dtype", ["bool", "int32", "int64", "uint8", "float16", "float32", "float64", "bfloat16"])
def test_there_and_back(library, to_xp, dtype):
    if not library.has(dtype):
        with pytest.raises(AttributeError):
            to_xp([1], dtype)
        return
    values = np.asarray([[0, 1, 3], [2, 1, 0]])
    x = to_xp(values, dtype)
    assert dtype_name(x.dtype) == dtype
    back = to_numpy(x)
    assert back.dtype == np.dtype("float32" if dtype == "bfloat16" else dtype)
    np.testing.assert_array_equal(back, values.astype(back.dtype))


@pytest.mark.parametrize(
    "values",
    [
        np.float64(3.0),
        np.zeros((0, 2)),
        np.arange(12.0).reshape(3, 4).T[::-1, ::2],
        np.broadcast_to(1.5, (2, 3)),
        np.asarray([1.0], ">f8"),
    ],
    ids=["0-d", "empty", "reversed", "broadcast", "big-endian"],
)
def test_any_memory_layout(to_xp, values):
    x = to_xp(values)
    assert tuple(x.shape) == values.shape
    np.testing.assert_array_equal(to_numpy(x), values)


def test_nothing_shares_memory(to_xp):
    values = np.arange(3.0)
    x = to_xp(values)
    values[0] = 7
    back = to_numpy(x)
    back[1] = 7
    np.testing.assert_array_equal(to_numpy(x), [0, 1, 2])


def test_autograd_is_no_obstacle():
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(to_numpy(torch.ones(2, requires_grad=True) * 2), [2, 2])


def test_optional_features_are_off_inside_active_only():
    bare = open_library("strict-bare")
    x = bare.xp.asarray([1.0, 2.0])
    with bare.active(), pytest.raises(RuntimeError, match="boolean_indexing"):
        x[x > 1]
    assert x[x > 1].shape == (1,)


def test_the_bare_fixture_is_bare(library, to_xp):
    x = to_xp([1.0, 2.0])
    if library.name == "strict-bare":
        with pytest.raises(RuntimeError, match="boolean_indexing"):
            x[x > 1]
    elif library.name.startswith("strict"):
        assert x[x > 1].shape == (1,)


def test_a_missing_library_says_why(monkeypatch):
    monkeypatch.setattr(libraries, "NAMES", ("numpy", "no_such_library"))
    assert available_libraries()["no_such_library"] == "no_such_library is not installed"
    with pytest.raises(Unavailable, match="no_such_library is not installed"):
        open_library("no_such_library")


def test_an_unknown_name():
    with pytest.raises(ValueError, match="open_library: name must be one of numpy, strict"):
        open_library("tensorflow")
