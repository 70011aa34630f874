"""What holds for every layer: backward is the derivative of forward, on every library, and nothing is written or shared."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from npattn._arrays.namespace import array_device, array_namespace, dtype_name
from npattn._arrays.trees import tree_leaves
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import Library, asarray, open_library, to_numpy
from tests.layers.cases import CASES, RICHEST, SAVES_NO_ARRAY, Arrays, Case

every_case = pytest.mark.parametrize("case", CASES, ids=repr)
one_of_each = pytest.mark.parametrize("case", [c for c in CASES if c.name in RICHEST], ids=repr)
saving_arrays = pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in RICHEST and c.name not in SAVES_NO_ARRAY], ids=repr
)


def test_there_is_one_of_each():
    assert {c.name for c in CASES} >= set(RICHEST)
    assert {name.partition("-")[0] for name in RICHEST} == {c.name.partition("-")[0] for c in CASES}


def _seed(case: Case) -> np.random.Generator:
    return np.random.default_rng([ord(c) for c in case.name])


def _to(args: Arrays, library: Any, dtype: str | None = None) -> Arrays:
    return {n: asarray(x, library, dtype=dtype if x.dtype == np.float64 else None) for n, x in args.items()}


def _run(case: Case, args: Arrays, dout: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, Arrays]:
    """out, its cotangent (random by default) and the gradients by name, as NumPy arrays in float64."""
    out, saved = case.forward(*args.values())
    if dout is None:
        dout = np.asarray(_seed(case).standard_normal(out.shape))
    grads = case.backward(_beside(dout, out), saved)
    return _doubles(out), dout, {n: _doubles(g) for n, g in grads._asdict().items() if g is not None}


def _beside(dout: np.ndarray, out: Any) -> Any:
    xp = array_namespace("test", out=out)
    return xp.asarray(dout, dtype=out.dtype, device=array_device(out))


def _doubles(x: Any) -> np.ndarray:
    return to_numpy(x).astype(np.float64)


def _assert_close(got: Arrays, expected: Arrays, scales: Arrays, ratio: float) -> None:
    assert got.keys() == expected.keys() == scales.keys()
    for name, scale in scales.items():
        assert got[name].shape == expected[name].shape == scale.shape, name
        wrong = np.abs(got[name] - expected[name])
        assert (wrong <= ratio * scale).all(), f"{name} is off by up to {np.max(wrong / (scale + 1e-300)):.2g} of its scale"


# Derivatives -----------------------------------------------------------------------------------------------------------------


@every_case
def test_backward_is_the_derivative_of_forward(case):
    check_backward(case.forward, case.backward, case.draw(_seed(case)))


@one_of_each
def test_backward_is_the_derivative_of_forward_on_every_library(case, library):
    check_backward(case.forward, case.backward, _to(case.draw(_seed(case)), library))


@every_case
def test_backward_agrees_with_autodiff_of_our_forward(case, autodiff):
    args = case.draw(_seed(case))
    _, dout, grads = _run(case, args)
    _assert_close(
        grads,
        {f"d{n}": g for n, g in autodiff(lambda *a: case.forward(*a)[0], args, dout).items()},
        case.scale(args, dout),
        1e-14,
    )


@every_case
def test_every_library_computes_the_same(case, library):
    args = case.draw(_seed(case))
    out, dout, grads = _run(case, args)
    other_out, _, other_grads = _run(case, _to(args, library), dout)
    np.testing.assert_allclose(other_out, out, rtol=1e-14, atol=1e-14)
    _assert_close(other_grads, grads, case.scale(args, dout), 1e-14)


@pytest.mark.parametrize("name", ["dx", "dw", "db", "dtable", "dlogits", "dweights", "dweight", "dbias", "dgates"])
def test_a_slip_of_1e_4_is_caught(name):
    """The bounds from the other side."""
    caught = 0
    for case in CASES:
        args = case.draw(_seed(case))
        _, dout, grads = _run(case, args)
        if name not in grads:
            continue
        scale = case.scale(args, dout)
        wrong = {**grads, name: grads[name] + 1e-4 * scale[name] * _seed(case).choice([-1, 1], scale[name].shape)}
        with pytest.raises(AssertionError, match=f"{name} is off"):
            _assert_close(wrong, grads, scale, 1e-14)

        def slipping(dout: Any, saved: Any, case: Case = case, shift: Any = wrong[name] - grads[name]) -> Any:
            g = case.backward(dout, saved)
            size = np.abs(dout).max() / 3  # shift was made for a cotangent of about this size
            return g._replace(**{name: getattr(g, name) + size * shift})

        with pytest.raises(AssertionError, match="check_backward: along a random direction"):
            check_backward(case.forward, slipping, args)
        caught += 1
    assert caught >= 3


# Precision -------------------------------------------------------------------------------------------------------------------


@one_of_each
def test_lower_precisions(case, library):
    """Everything keeps its dtype, and is as near to the float64 result as the dtype allows."""
    dtypes = [dtype for dtype in ("float32", "float16", "bfloat16") if library.has(dtype)]
    assert dtypes
    for dtype in dtypes:
        _check_precision(case, dtype, library)


def _check_precision(case: Case, dtype: str, library: Library) -> None:
    eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    args = _to(case.draw(_seed(case)), library, dtype)
    doubles = {n: _doubles(x) if x.dtype == getattr(library.xp, dtype) else to_numpy(x) for n, x in args.items()}
    out, saved = case.forward(*args.values())
    assert dtype_name(out.dtype) == dtype
    dout = _beside(np.asarray(_seed(case).standard_normal(out.shape)), out)
    grads = {n: g for n, g in case.backward(dout, saved)._asdict().items() if g is not None}
    assert {dtype_name(g.dtype) for g in grads.values()} == {dtype}
    expected, _, gradients = _run(case, doubles, _doubles(dout))
    # computed in float32, rounded once at the end
    np.testing.assert_allclose(_doubles(out), expected, rtol=eps + 1e-6, atol=2e-6)
    scales = case.scale(doubles, _doubles(dout))
    for name, scale in scales.items():
        wrong = np.abs(_doubles(grads[name]) - gradients[name])
        smallest = {"float16": 2.0**-24}.get(dtype, 0.0)
        assert (wrong <= eps / 2 * np.abs(gradients[name]) + 16 * 2.0**-23 * scale + smallest).all(), name


@one_of_each
def test_no_floating_point_warning(case):
    rng = _seed(case)
    for dtype, tiny, large in (("float64", 1e-300, 1e200), ("float32", 1e-38, 1e30), ("float16", 1e-6, 2e4)):
        for factor in (1.0, tiny, large):
            args = case.draw(rng)
            for name, x in args.items():
                if x.dtype == np.float64:
                    largest = float(np.finfo(dtype).max)
                    args[name] = np.clip(x * factor, -largest, largest).astype(dtype)
            cotangents = np.asarray([tiny, large]).astype(dtype)
            with np.errstate(all="raise"):
                out, saved = case.forward(*args.values())
                for dout in cotangents:
                    case.backward(np.broadcast_to(dout, out.shape), saved)


# Memory ----------------------------------------------------------------------------------------------------------------------


@every_case
def test_inputs_are_not_written_and_nothing_is_shared(case):
    args = case.draw(_seed(case))
    dout = np.asarray(_seed(case).standard_normal(case.forward(*args.values())[0].shape))
    before = {n: x.copy() for n, x in args.items()}
    for x in (*args.values(), dout):
        x.flags.writeable = False
    out, saved = case.forward(*args.values())
    assert isinstance(out, np.ndarray)
    grads = [g for g in case.backward(dout, saved) if g is not None]
    again = [g for g in case.backward(dout, saved) if g is not None]
    for g, h in zip(grads, again, strict=True):
        np.testing.assert_array_equal(g, h)
    for n, x in args.items():
        np.testing.assert_array_equal(x, before[n])
    theirs = [*args.values(), dout, *(x for x in tree_leaves(tuple(saved)) if isinstance(x, np.ndarray))]
    for mine, other in itertools.chain(itertools.product([out, *grads], theirs), itertools.combinations([out, *grads], 2)):
        assert not np.shares_memory(mine, other)
    assert out.flags.writeable
    assert all(g.flags.writeable for g in grads)


@every_case
def test_out_may_be_changed_before_backward(case):
    args = case.draw(_seed(case))
    _, dout, grads = _run(case, args)
    out, saved = case.forward(*args.values())
    out += 1
    for name, g in grads.items():
        np.testing.assert_array_equal(getattr(case.backward(dout, saved), name), g)


def _layouts(x: np.ndarray) -> Iterator[np.ndarray]:
    """The same numbers otherwise in memory."""
    yield np.asfortranarray(x)
    yield np.repeat(x, 2, axis=-1)[..., ::2]
    yield np.flip(np.flip(x, 0).copy(), 0)
    yield np.swapaxes(np.swapaxes(x, 0, -1).copy(), 0, -1)
    yield x.astype(x.dtype.newbyteorder())


@every_case
def test_memory_layout_does_not_matter(case):
    args = case.draw(_seed(case))
    out, dout, grads = _run(case, args)
    for n, x in args.items():
        for other in _layouts(x) if x.ndim else ():
            other_out, _, other_grads = _run(case, {**args, n: other}, dout)
            np.testing.assert_allclose(other_out, out, rtol=1e-14, atol=1e-14)
            _assert_close(other_grads, grads, case.scale(args, dout), 1e-14)
    for other in _layouts(dout) if dout.ndim else ():
        g = case.backward(other.astype(np.float64, copy=False), case.forward(*args.values())[1])
        _assert_close({n: getattr(g, n) for n in grads}, grads, case.scale(args, dout), 1e-14)


@every_case
def test_the_gradient_of_a_broadcast_input_has_the_broadcast_shape(case):
    args = case.draw(_seed(case))
    for n, x in args.items():
        if x.dtype != np.float64 or x.ndim < 2:
            continue
        stretched = np.broadcast_to(x[:1], x.shape)
        out, dout, grads = _run(case, {**args, n: stretched})
        plain_out, _, plain = _run(case, {**args, n: stretched.copy()}, dout)
        np.testing.assert_allclose(out, plain_out, rtol=1e-14, atol=1e-14)
        _assert_close(grads, plain, case.scale({**args, n: stretched}, dout), 1e-14)


@saving_arrays
def test_reprs_are_shapes_and_not_numbers(case):
    out, saved = case.forward(*case.draw(_seed(case)).values())
    for record in (saved, case.backward(np.ones(out.shape), saved)):
        assert re.fullmatch(rf"{type(record).__name__}\(\w+=float64\[[\d, ]+\].*\)", repr(record))
        assert "array" not in repr(record)


# Libraries -------------------------------------------------------------------------------------------------------------------


@one_of_each
def test_results_stay_on_the_device(case):
    library = open_library("strict-device1")
    args = _to(case.draw(_seed(case)), library)
    out, saved = case.forward(*args.values())
    assert array_device(out) == library.device
    grads = case.backward(_beside(np.ones(out.shape), out), saved)
    assert all(array_device(g) == library.device for g in grads if g is not None)


@one_of_each
def test_forward_and_backward_inside_one_jit(case):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    library = open_library("jax")
    args = case.draw(_seed(case))
    _, dout, grads = _run(case, args)

    def both(dout: Any, *values: Any) -> Any:
        out, saved = case.forward(*values)
        return out, tuple(case.backward(dout, saved))

    jitted = jax.jit(both)(asarray(dout, library), *_to(args, library).values())[1]
    got = {
        n: to_numpy(g)
        for n, g in zip(case.backward(dout, case.forward(*args.values())[1])._fields, jitted, strict=True)
        if g is not None
    }
    _assert_close(got, grads, case.scale(args, dout), 1e-14)


@saving_arrays
def test_a_cotangent_of_another_shape_or_dtype_is_refused(case):
    args = case.draw(_seed(case))
    out, saved = case.forward(*args.values())
    with pytest.raises(ValueError, match=r"_backward: dout must have shape \(.*\) = \(.*\) as the result, got"):
        case.backward(np.ones((*out.shape, 2)), saved)
    with pytest.raises(TypeError, match="_backward: dout must be float64 as the result, got float32"):
        case.backward(np.ones(out.shape, np.float32), saved)
    strict = open_library("strict")
    with pytest.raises(TypeError, match="_backward: .* is an array of numpy but dout is one of array_api_strict"):
        case.backward(asarray(np.ones(out.shape), strict), saved)
