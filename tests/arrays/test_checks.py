"""The wording of errors, and host numbers."""

import numpy as np
import pytest

from npattn._arrays.checks import check_bool, check_broadcasts, check_integer_array, host_float, host_int, shape_error


@pytest.mark.parametrize(("hint", "tail"), [("", ""), ("write (B, 1, T, D)", "; write (B, 1, T, D)")])
def test_wording_of_a_wrong_shape(hint, tail):
    with pytest.raises(ValueError) as caught:
        shape_error("attention", "k", "(..., S, D) with D = 6 as q has", (2, 5, 7), hint)
    assert str(caught.value) == f"attention: k must have shape (..., S, D) with D = 6 as q has, got (2, 5, 7){tail}"


@pytest.mark.parametrize("dtype", ["int64", "float64"])
def test_a_mask_of_numbers_names_bias(xp, to_xp, dtype):
    check_bool("attention", "mask", to_xp([True]))
    with pytest.raises(TypeError, match=f"^attention: mask must be boolean, .* got {dtype}; .* go to bias=$"):
        check_bool("attention", "mask", to_xp([1], dtype))


def test_ids_are_integers(to_xp):
    for dtype in ("int32", "uint8", "int64"):
        check_integer_array("embedding", "ids", to_xp([1], dtype))
    for dtype in ("float32", "bool"):
        with pytest.raises(TypeError, match=f"^embedding: ids must have an integer dtype, got {dtype}$"):
            check_integer_array("embedding", "ids", to_xp([1], dtype))


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (4, 1), (3, 4, 5), (1, 1, 1)])
def test_what_broadcasts(shape):
    check_broadcasts("attention", "bias", shape, (3, 4, 5), "(..., H, T, S)")


@pytest.mark.parametrize("shape", [(4,), (2, 4, 5), (1, 3, 4, 5), (0,), (3, 4, 1, 5)])
def test_what_does_not_broadcast_or_would_enlarge(shape):
    with pytest.raises(ValueError) as caught:
        check_broadcasts("attention", "bias", shape, (3, 4, 5), "(..., H, T, S)")
    assert str(caught.value) == f"attention: bias must broadcast to (..., H, T, S) = (3, 4, 5), got shape {shape}"


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int8(2), np.array(2.0), np.array(2)])
def test_host_float_takes_any_host_number(value):
    number = host_float("op", "scale", value, positive=True)
    assert type(number) is float
    assert number == 2.0


@pytest.mark.parametrize("value", [True, np.True_, "2", None, 2j, np.array([2.0]), [2.0]])
def test_host_float_takes_nothing_else(value):
    with pytest.raises(TypeError, match=r"^op: scale must be a number on the host, got "):
        host_float("op", "scale", value)


@pytest.mark.parametrize(("value", "positive"), [(np.nan, False), (np.inf, False), (0, True), (-1.5, True)])
def test_host_float_is_finite(value, positive):
    kind = "positive finite" if positive else "finite"
    with pytest.raises(ValueError, match=f"^op: softcap must be a {kind} number, got {float(value)}$"):
        host_float("op", "softcap", value, positive=positive)


def test_host_float_may_be_negative_or_zero():
    assert host_float("op", "scale", -2) == -2.0
    assert host_float("op", "scale", 0) == 0.0


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_host_int_takes_any_host_integer(value):
    number = host_int("op", "left", value, least=3)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", [True, 3.0, np.float64(3), "3", None, np.array([3]), np.array(3.0)])
def test_host_int_takes_nothing_else(value):
    with pytest.raises(TypeError, match=r"^op: left must be an integer, got "):
        host_int("op", "left", value)


def test_host_int_has_a_least_value():
    with pytest.raises(ValueError, match=r"^op: left must be at least 0, got -1$"):
        host_int("op", "left", -1, least=0)
    assert host_int("op", "n", -1) == -1


def test_device_numbers_are_never_read():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="on the host, got Tensor"):
        host_float("op", "scale", torch.tensor(2.0))
    with pytest.raises(TypeError, match="integer, got Tensor"):
        host_int("op", "left", torch.tensor(2))
