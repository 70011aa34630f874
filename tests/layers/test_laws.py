"""What holds for every layer: backward is the derivative of forward, on every library, and nothing is written or shared."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn._arrays.namespace import array_device, array_namespace, dtype_name
from npattn._arrays.trees import tree_leaves
from npattn.layers import (
    Dropout,
    cross_entropy_backward,
    cross_entropy_forward,
    dropout_backward,
    dropout_forward,
    embedding_backward,
    embedding_forward,
    linear_backward,
    linear_forward,
    log_softmax_backward,
    log_softmax_forward,
    logsumexp_backward,
    logsumexp_forward,
    merge_heads_backward,
    merge_heads_forward,
    project_heads_backward,
    project_heads_forward,
    softmax_backward,
    softmax_forward,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import Library, asarray, open_library, to_numpy

Arrays = dict[str, Any]


class Case(NamedTuple):
    """One way to call one op. ``scale`` is its backward on absolute values: what rounding errors are measured against."""

    name: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    draw: Callable[[np.random.Generator], Arrays]
    scale: Callable[[Arrays, np.ndarray], Arrays]

    def __repr__(self) -> str:
        return self.name


def _softmax_case(name: str, forward: Any, backward: Any, scale: Any, shape: Any, axis: int, mask: Any = None) -> Case:
    def draw(rng: np.random.Generator) -> Arrays:
        args: Arrays = {"x": 2 * rng.standard_normal(shape)}
        if mask is not None:
            args["mask"] = _mask_with_dead_rows(rng, mask, axis)
        return args

    def call(x: Any, mask: Any = None) -> tuple[Any, Any]:
        out, saved = forward(x, axis=axis, mask=mask)
        # differences of -inf are no numbers, and a constant -inf has derivative 0
        return (array_namespace("call", x=x).where(out == -np.inf, 0.0, out), saved) if mask is not None else (out, saved)

    return Case(name, call, backward, draw, lambda args, dout: {"dx": scale(args["x"], axis, args.get("mask", True), dout)})


def _mask_with_dead_rows(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> np.ndarray:
    mask = rng.random(shape) < 0.6
    if mask.size > shape[axis]:
        mask[(0,) * (mask.ndim + axis) + (slice(None),) + (0,) * (-1 - axis)] = False
    return mask


def _weights(x: np.ndarray, axis: int, mask: Any) -> np.ndarray:
    p = np.where(mask, np.exp(x), 0.0)
    total = p.sum(axis, keepdims=True)
    return p / np.where(total == 0, 1, total)


def _softmax_scale(x: np.ndarray, axis: int, mask: Any, dout: np.ndarray) -> np.ndarray:
    w = _weights(x, axis, mask)
    return np.asarray(w * (np.abs(dout) + (w * np.abs(dout)).sum(axis, keepdims=True)))


def _log_softmax_scale(x: np.ndarray, axis: int, mask: Any, dout: np.ndarray) -> np.ndarray:
    dout = np.where(mask, np.abs(dout), 0.0)
    return np.asarray(dout + _weights(x, axis, mask) * dout.sum(axis, keepdims=True))


def _logsumexp_scale(x: np.ndarray, axis: int, mask: Any, dout: np.ndarray) -> np.ndarray:
    return np.asarray(_weights(x, axis, mask) * np.abs(np.expand_dims(dout, axis)))


def _softmax_cases() -> Iterator[Case]:
    for op, forward, backward, scale in (
        ("softmax", softmax_forward, softmax_backward, _softmax_scale),
        ("log_softmax", log_softmax_forward, log_softmax_backward, _log_softmax_scale),
        ("logsumexp", logsumexp_forward, logsumexp_backward, _logsumexp_scale),
    ):
        yield _softmax_case(f"{op}-row", forward, backward, scale, (5,), -1)
        yield _softmax_case(f"{op}-last", forward, backward, scale, (2, 3, 5), -1)
        yield _softmax_case(f"{op}-middle", forward, backward, scale, (2, 3, 5), -2)
        yield _softmax_case(f"{op}-masked", forward, backward, scale, (7, 3, 5), -1, (7, 3, 5))
        yield _softmax_case(f"{op}-masked-middle", forward, backward, scale, (7, 3, 5), -2, (3, 1))
        yield _softmax_case(f"{op}-masked-first", forward, backward, scale, (7, 3), -2, (7, 3))


def _affine(forward: Any, backward: Any, formula: str, name: str, **shapes: tuple[int, ...]) -> Case:
    """A bilinear op in x and w: its absolute backward is the einsum of absolute values."""
    x, w, out = formula.replace("->", ",").split(",")

    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        dout = np.abs(dout)
        scales = {
            "dx": np.einsum(f"{out},{w}->{x}", dout, np.abs(args["w"])),
            "dw": np.einsum(f"{out},{x}->{w}", dout, np.abs(args["x"])),
        }
        if "b" in args:
            scales["db"] = np.einsum(f"{out}->{w.replace(x[-1], '')}" if "h" not in x else f"{out}->{out[-1]}", dout)
        return scales

    return Case(name, forward, backward, lambda rng: {n: rng.standard_normal(s) for n, s in shapes.items()}, scale)


def _affine_cases() -> Iterator[Case]:
    linear = (linear_forward, linear_backward)
    yield _affine(*linear, "c,cd->d", "linear-row", x=(5,), w=(5, 7), b=(7,))
    yield _affine(*linear, "abc,cd->abd", "linear", x=(2, 3, 5), w=(5, 7), b=(7,))
    yield _affine(*linear, "ac,cd->ad", "linear-without-b", x=(3, 5), w=(5, 7))
    project = (project_heads_forward, project_heads_backward)
    yield _affine(*project, "tc,cgd->gtd", "project_heads", x=(5, 7), w=(7, 3, 2), b=(3, 2))
    yield _affine(*project, "abtc,cgd->abgtd", "project_heads-batch", x=(2, 3, 5, 7), w=(7, 3, 2), b=(3, 2))
    yield _affine(*project, "atc,cgd->agtd", "project_heads-without-b", x=(2, 5, 7), w=(7, 3, 2))
    merge = (merge_heads_forward, merge_heads_backward)
    yield _affine(*merge, "hte,hec->tc", "merge_heads", x=(3, 5, 2), w=(3, 2, 7), b=(7,))
    yield _affine(*merge, "abhte,hec->abtc", "merge_heads-batch", x=(2, 5, 3, 7, 2), w=(3, 2, 11), b=(11,))
    yield _affine(*merge, "ahte,hec->atc", "merge_heads-without-b", x=(2, 3, 5, 7), w=(3, 7, 11))


def _embedding_cases() -> Iterator[Case]:
    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        dtable = np.zeros_like(args["table"])
        np.add.at(dtable, args["ids"], np.abs(dout))
        return {"dtable": dtable}

    for name, count, width, shape in (("", 7, 3, (5, 2)), ("-one", 3, 2, ()), ("-many", 5, 2, (3, 41)), ("-few", 23, 2, (3,))):

        def draw(rng: np.random.Generator, count: int = count, width: int = width, shape: tuple[int, ...] = shape) -> Arrays:
            return {"table": rng.standard_normal((count, width)), "ids": np.asarray(rng.integers(0, count, shape))}

        yield Case(f"embedding{name}", embedding_forward, embedding_backward, draw, scale)


def _cross_entropy_cases() -> Iterator[Case]:
    for shape, smoothing, ignore, weighted in (
        ((3, 5, 7), 0.0, None, False),
        ((3, 5, 7), 0.0, 2, False),
        ((3, 5, 7), 0.1, None, True),
        ((3, 5, 7), 0.1, 2, True),
        ((5,), 0.0, None, False),
        ((5,), 0.1, 2, True),
    ):

        def draw(rng: np.random.Generator, shape: Any = shape, ignore: Any = ignore, weighted: bool = weighted) -> Arrays:
            args: Arrays = {"logits": rng.standard_normal(shape), "targets": np.asarray(rng.integers(0, shape[-1], shape[:-1]))}
            if len(shape) > 1:
                args["targets"][0, :2] = 2
            if weighted:
                args["weights"] = np.asarray(rng.random(shape[:-1]))
            return args

        def call(logits: Any, targets: Any, weights: Any = None, smoothing: Any = smoothing, ignore: Any = ignore) -> Any:
            return cross_entropy_forward(logits, targets, label_smoothing=smoothing, ignore_index=ignore, weights=weights)

        def scale(args: Arrays, dout: np.ndarray, smoothing: Any = smoothing, ignore: Any = ignore) -> Arrays:
            logits, targets = args["logits"], args["targets"]
            w = np.where(targets == ignore, 0.0, args.get("weights", np.ones(targets.shape)))
            q = (1 - smoothing) * (np.arange(logits.shape[-1]) == targets[..., None]) + smoothing / logits.shape[-1]
            p = _weights(logits, -1, True)
            total = w.sum() or 1.0
            losses = np.abs((q * np.log(p)).sum(-1)) + (q * np.abs(logits)).sum(-1) + 1
            scales = {"dlogits": np.abs(dout) * (w / total)[..., None] * (p + q)}
            if "weights" in args:
                scales["dweights"] = np.abs(dout) * (losses + (w * losses).sum() / total) / total
            return scales

        yield Case(
            f"cross_entropy-{len(shape)}d{'-smooth' * bool(smoothing)}{'-ignore' * bool(ignore)}{'-weights' * weighted}",
            call,
            cross_entropy_backward,
            draw,
            scale,
        )


def _dropout_cases() -> Iterator[Case]:
    rule = Dropout(0.3, seed=7)
    yield Case(
        "dropout",
        lambda x: dropout_forward(x, rule),
        dropout_backward,
        lambda rng: {"x": rng.standard_normal((2, 3, 5))},
        lambda args, dout: {"dx": np.abs(dout) / 0.7},
    )


CASES = [*_softmax_cases(), *_affine_cases(), *_embedding_cases(), *_cross_entropy_cases(), *_dropout_cases()]
RICHEST = (
    "softmax-masked", "log_softmax-masked", "logsumexp-masked", "linear", "project_heads-batch", "merge_heads-batch", "embedding",
    "cross_entropy-3d-smooth-ignore-weights", "dropout",
)  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=repr)
one_of_each = pytest.mark.parametrize("case", [c for c in CASES if c.name in RICHEST], ids=repr)


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


@pytest.mark.parametrize("name", ["dx", "dw", "db", "dtable", "dlogits", "dweights"])
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
    with np.errstate(all="raise"):
        for factor in (1.0, 1e-300, 1e200):
            args = {n: x * factor if x.dtype == np.float64 else x for n, x in case.draw(rng).items()}
            out, saved = case.forward(*args.values())
            case.backward(np.full(out.shape, 1e-200), saved)


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


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in RICHEST and c.name != "dropout"], ids=repr
)  # dropout saves no array
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


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in RICHEST and c.name != "dropout"], ids=repr
)  # which saves no shape
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
