"""Tangents of layers: of results against the backward and differences, of gradients against differences and autodiff."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn import layers
from npattn._arrays.namespace import array_device
from npattn._arrays.trees import tree_leaves, tree_map
from npattn.layers import Dropout, FeedForwardParams, GatedFeedForwardParams, Rotary
from npattn.testing.libraries import NAMES, Unavailable, asarray, open_library, to_numpy

Arrays = dict[str, Any]


class Case(NamedTuple):
    """One way to call one op: shapes of its inputs, which may be trees, and its options."""

    op: str
    shapes: Arrays
    options: Arrays
    targets: Any

    def __repr__(self) -> str:
        return "-".join([self.op, *self.shapes, *(f"{name}" for name in self.options)])

    def draw(self, rng: np.random.Generator) -> Arrays:
        return {name: _draw(rng, shape) for name, shape in self.shapes.items()}

    def forward(self, args: Arrays) -> tuple[Any, Any]:
        given = [*args.values()] if self.targets is None else [args["logits"], self.targets]
        options = {n: x for n, x in args.items() if n == "weights"} | self.options
        return _two(getattr(layers, f"{self.op}_forward")(*given, **options))

    def backward(self, dout: Any, saved: Any) -> Any:
        return getattr(layers, f"{self.op}_backward")(dout, saved)

    def jvp(self, args: Arrays, tangents: Arrays) -> tuple[Any, Any]:
        given = [*args.values()] if self.targets is None else [args["logits"], self.targets]
        options = {n: x for n, x in args.items() if n == "weights"} | self.options
        return _two(getattr(layers, f"{self.op}_jvp")(*given, **_named(tangents), **options))

    def backward_jvp(self, args: Arrays, dout: Any, tangents: Arrays, tdout: Any, saved: Any = None) -> Any:
        f = getattr(layers, f"{self.op}_backward_jvp")
        taken = inspect.signature(f).parameters
        given = {name: x for name, x in {**args, **_named(tangents)}.items() if name in taken}
        return f(dout, self.forward(args)[1] if saved is None else saved, **given, tdout=tdout)


def _two(results: Any) -> tuple[Any, Any]:
    first, second = results
    return first, second


def _named(tangents: Arrays) -> Arrays:
    return {f"t{name}": t for name, t in tangents.items() if t is not None}


def _draw(rng: np.random.Generator, shape: Any) -> Any:
    if hasattr(shape, "_fields"):
        return type(shape)(*(None if s is None else _draw(rng, s) for s in shape))
    return np.asarray(rng.standard_normal(shape))


MASK = np.random.default_rng(0).random((7, 3, 5)) < 0.6
MASK[0, 0] = False  # nothing counts
TARGETS = np.asarray([[1, 2, 2], [0, 4, 6]])
FEED = FeedForwardParams((5, 7), (7, 3), (7,), (3,))
GATED = GatedFeedForwardParams((5, 7), (5, 7), (7, 3), (7,), (7,), (3,))


def case(op: str, shapes: Arrays, options: Arrays | None = None, targets: Any = None) -> Case:
    return Case(op, shapes, options or {}, targets)


CASES = [
    case("linear", {"x": (2, 3, 5), "w": (5, 7), "b": (7,)}),
    case("linear", {"x": (5,), "w": (5, 7)}),
    case("project_heads", {"x": (2, 5, 7), "w": (7, 3, 2), "b": (3, 2)}),
    case("project_heads", {"x": (5, 7), "w": (7, 3, 2)}),
    case("merge_heads", {"x": (2, 3, 5, 7), "w": (3, 7, 11), "b": (11,)}),
    case("merge_heads", {"x": (3, 5, 7), "w": (3, 7, 11)}),
    case("tied_logits", {"x": (2, 3, 5), "table": (7, 5)}),
    case("softmax", {"x": (2, 3, 5)}),
    case("softmax", {"x": (7, 3, 5)}, {"mask": MASK}),
    case("softmax", {"x": (7, 3, 5)}, {"axis": 0, "mask": MASK}),
    case("layer_norm", {"x": (2, 3, 5), "weight": (5,), "bias": (5,)}),
    case("layer_norm", {"x": (2, 7, 3), "weight": (2, 3), "bias": (2, 3)}, {"axes": (2, 0)}),
    case("layer_norm", {"x": (3, 5)}, {"eps": 0.1}),
    case("rms_norm", {"x": (2, 3, 5), "weight": (5,)}),
    case("rms_norm", {"x": (2, 5, 3), "weight": (5,)}, {"axes": 1}),
    case("rms_norm", {"x": (3, 5)}),
    *(case(op, {"x": (2, 3, 5)}) for op in ("relu", "silu", "gelu", "gelu_tanh")),
    *(case("gate", {"x": (2, 3, 5), "gates": (2, 3, 5)}, {"activation": a}) for a in ("relu", "silu", "gelu", "gelu_tanh")),
    *(case("feed_forward", {"params": FEED, "x": (2, 3, 5)}, {"activation": a}) for a in ("relu", "gelu")),
    case("feed_forward", {"params": FEED._replace(b_in=None, b_out=None), "x": (3, 5)}, {"activation": "silu"}),
    case("gated_feed_forward", {"params": GATED, "x": (2, 3, 5)}, {"activation": "gelu_tanh"}),
    case("gated_feed_forward", {"params": GATED._replace(b_gate=None, b_in=None, b_out=None), "x": (3, 5)}),
    case("cross_entropy", {"logits": (2, 3, 7)}, targets=TARGETS),
    case("cross_entropy", {"logits": (2, 3, 7)}, {"ignore_index": 2}, targets=TARGETS),
    case("cross_entropy", {"logits": (2, 3, 7), "weights": (2, 3)}, {"label_smoothing": 0.1, "ignore_index": 2}, targets=TARGETS),
]
every_case = pytest.mark.parametrize("case", CASES, ids=repr)


class Drawn(NamedTuple):
    """A point, a direction, a cotangent and its tangent."""

    args: Arrays
    t: Arrays
    dout: Any
    tdout: Any

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Drawn:
        rng = np.random.default_rng(seed)
        args, t = case.draw(rng), case.draw(rng)
        return cls(args, t, *(np.asarray(x) for x in rng.standard_normal((2, *case.forward(args)[0].shape))))


def moved(x: Any, t: Any, step: float) -> Any:
    return tree_map(lambda a, b: a + step * b, x, t)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in tree_leaves(tuple(tree)) if x is not None]


def inner(a: Any, b: Any) -> float:
    return sum(float(np.vdot(x, y)) for x, y in zip(leaves(a), leaves(b), strict=True))


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    for x, y in zip(leaves(got), leaves(want), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1.0, np.abs(y).max(initial=0)))


@every_case
def test_the_jvp_is_the_adjoint_of_the_backward(case):
    args, t, dout, _ = Drawn.of(case)
    out, saved = case.forward(args)
    same, tout = case.jvp(args, t)
    np.testing.assert_allclose(same, out, rtol=1e-15, atol=1e-15)
    grads = {name.removeprefix("d"): g for name, g in case.backward(dout, saved)._asdict().items() if g is not None}
    size = sum(float(np.abs(a).sum()) for a in leaves(grads.values()))
    assert abs(inner([dout], [tout]) - inner([t[n] for n in grads], grads.values())) <= 1e-13 * size


@every_case
def test_each_tangent_alone_adds_up_to_all(case):
    args, t, dout, tdout = Drawn.of(case)
    touts = [case.jvp(args, {name: t[name]})[1] for name in t]
    assert_close([sum(touts)], [case.jvp(args, t)[1]], 1e-13)
    nothing = dict.fromkeys(t)
    parts = [case.backward_jvp(args, dout, {name: t[name]}, None) for name in t]
    parts.append(case.backward_jvp(args, dout, nothing, tdout))
    assert_close([sum(x) for x in zip(*map(leaves, parts), strict=True)], case.backward_jvp(args, dout, t, tdout), 1e-13)
    # gradients are linear in dout
    assert_close(parts[-1], case.backward(tdout, case.forward(args)[1]), 1e-14)


@every_case
def test_tangents_of_gradients_are_their_differences(case):
    args, t, dout, tdout = Drawn.of(case)

    def gradients(step: float) -> list[np.ndarray]:
        there = {name: moved(x, t[name], step) for name, x in args.items()}
        return leaves(case.backward(dout + step * tdout, case.forward(there)[1]))

    def slope(step: float) -> list[np.ndarray]:
        return [(a - b) / (2 * step) for a, b in zip(gradients(step), gradients(-step), strict=True)]

    want = [(4 * b - a) / 3 for a, b in zip(slope(1e-3), slope(5e-4), strict=True)]
    assert_close(case.backward_jvp(args, dout, t, tdout), want, 1e-8)


def _slow(case: Case) -> Any:
    """JAX compiles each for a second; one of a kind is quick enough."""
    quick = {"layer_norm", "gelu_tanh", "cross_entropy"}
    first = next(c for c in CASES if c.op == case.op)
    return case if case.op in quick and case is first else pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize("case", [_slow(case) for case in CASES], ids=repr)
def test_tangents_agree_with_autodiff_of_forward_and_backward(case):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    library = open_library("jax")
    drawn = Drawn.of(case)
    args, t, dout, tdout = (_to(tuple(x.values()) if isinstance(x, dict) else x, library) for x in drawn)
    targets = None if case.targets is None else asarray(case.targets, library)
    there = case._replace(options=_to(case.options, library), targets=targets)

    def named(values: Any) -> Arrays:
        return dict(zip(case.shapes, values, strict=True))  # JAX would sort a dict by its keys

    def both(args: Any, dout: Any) -> Any:
        out, saved = there.forward(named(args))
        return out, tuple(there.backward(dout, saved))

    def ours(args: Any, t: Any, dout: Any, tdout: Any) -> Any:
        a, t = named(args), named(t)
        return there.jvp(a, t)[1], tuple(there.backward_jvp(a, dout, t, tdout))

    _, (tout, tgrads) = jax.jit(lambda *a: jax.jvp(both, a[:2], a[2:]))(args, dout, t, tdout)
    want = [to_numpy(x) for x in (tout, *tree_leaves(tgrads)) if x is not None]
    mine = [case.jvp(drawn.args, drawn.t)[1], *leaves(case.backward_jvp(drawn.args, drawn.dout, drawn.t, drawn.tdout))]
    assert_close(mine, want, 1e-13)
    traced = jax.jit(ours)(args, t, dout, tdout)
    assert_close([to_numpy(x) for x in tree_leaves(traced) if x is not None], want, 1e-13)


def _to(tree: Any, library: Any) -> Any:
    return tree_map(lambda x: asarray(x, library) if isinstance(x, np.ndarray) else x, tree)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("numpy", "jax")])  # for JAX there is a test above
@every_case
def test_every_library_computes_the_same(case, name):
    try:
        library = open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    drawn = Drawn.of(case)
    mine = [case.jvp(drawn.args, drawn.t)[1], *leaves(case.backward_jvp(drawn.args, drawn.dout, drawn.t, drawn.tdout))]
    with library.active():
        args, t, dout, tdout = (_to(x, library) for x in drawn)
        targets = None if case.targets is None else asarray(case.targets, library)
        there = case._replace(options=_to(case.options, library), targets=targets)
        got = [there.jvp(args, t)[1], *tree_leaves(tuple(there.backward_jvp(args, dout, t, tdout)))]
        assert {array_device(x) for x in got if x is not None} == {array_device(dout)}
        assert_close([to_numpy(x) for x in got if x is not None], mine, 1e-13)


@every_case
def test_a_tangent_of_another_shape_dtype_or_of_nothing_is_refused(case):
    args, t, dout, _ = Drawn.of(case)
    name = next(n for n in t if n != "params")
    with pytest.raises(ValueError, match=rf"_jvp: t{name} must have shape"):
        case.jvp(args, t | {name: np.ones((*args[name].shape, 1))})
    with pytest.raises(TypeError, match=rf"_jvp: t{name} must be float64 as {name} is, got float32"):
        case.backward_jvp(args, dout, t | {name: t[name].astype(np.float32)}, None)
    with pytest.raises(ValueError, match="_backward_jvp: tdout must have shape"):
        case.backward_jvp(args, dout, t, np.ones((*dout.shape, 1)))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@every_case
def test_lower_precisions(case, dtype):
    drawn = Drawn.of(case)
    eps = {"float32": 2.0**-23, "float16": 2.0**-10}[dtype]
    args, t, dout, tdout = (tree_map(lambda x: x.astype(dtype), x) for x in drawn)
    doubles = [tree_map(lambda x: x.astype(np.float64), x) for x in (args, t, dout, tdout)]
    got = [case.jvp(args, t)[1], *leaves(case.backward_jvp(args, dout, t, tdout))]
    assert {x.dtype for x in got} == {np.dtype(dtype)}
    want = [case.jvp(*doubles[:2])[1], *leaves(case.backward_jvp(doubles[0], doubles[2], doubles[1], doubles[3]))]
    # composites round in between
    assert_close(got, want, (32 if "feed" in case.op else 2 if dtype == "float16" else 16) * eps)


@every_case
@pytest.mark.parametrize(("dtype", "large"), [("float64", 1e200), ("float32", 1e30), ("float16", 2e4)])
def test_no_floating_point_warning(case, dtype, large):
    largest = float(np.finfo(dtype).max)
    for size in (1 / large, 1.0, large):

        def sized(x, size=size):
            return np.clip(x * size, -largest, largest).astype(dtype)

        args, t, dout, tdout = (tree_map(sized, x) for x in Drawn.of(case))
        with np.errstate(all="raise"):
            case.jvp(args, t)
            case.backward_jvp(args, dout, t, tdout)


@every_case
def test_nothing_is_written_and_nothing_shared(case):
    args, t, dout, tdout = Drawn.of(case)
    for x in leaves([args, t, dout, tdout]):
        x.flags.writeable = False
    got = [*case.jvp(args, t), *leaves(case.backward_jvp(args, dout, t, tdout))]
    for n, x in enumerate(got):
        assert not any(np.shares_memory(x, other) for other in [*leaves([args, t, dout, tdout]), *got[n + 1 :]])


@pytest.mark.parametrize(
    "case", [case("softmax", {"x": (3, 2, 5)}), case("cross_entropy", {"logits": (2, 3, 7)}, targets=TARGETS)]
)
def test_what_does_not_count_has_no_influence(case):
    """NaN where the mask hides, or where a token is ignored."""
    drawn = Drawn.of(case)
    name = next(iter(drawn.args))
    hidden = np.broadcast_to(np.asarray(TARGETS == 2)[..., None], (2, 3, 7)) if case.op == "cross_entropy" else ~MASK[:3, :2]
    options = {"ignore_index": 2} if case.op == "cross_entropy" else {"mask": ~hidden}
    case = case._replace(options=options)
    args, t = drawn.args, drawn.t
    clean = [case.jvp(args, t), leaves(case.backward_jvp(args, drawn.dout, t, drawn.tdout))]
    poisoned, tpoisoned = ({name: np.where(hidden, np.nan, x[name])} for x in (args, t))
    dirty = [case.jvp(poisoned, tpoisoned), leaves(case.backward_jvp(poisoned, drawn.dout, tpoisoned, drawn.tdout))]
    for want, got in zip([*clean[0], *clean[1]], [*dirty[0], *dirty[1]], strict=True):
        np.testing.assert_array_equal(want, got)


def test_ops_that_are_linear_are_their_own_tangents():
    rng = np.random.default_rng(0)
    ids, rotary, dropout = [2, 0, 2], Rotary(), Dropout(0.3, seed=1)
    for f, shape in (
        (lambda x: layers.embedding(x, ids), (4, 6)),
        (lambda x: layers.rotate(x, rotary), (5, 6)),
        (lambda x: layers.dropout(x, dropout), (5, 6)),
    ):
        x, t = rng.standard_normal((2, *shape))
        np.testing.assert_allclose((f(x + 1e-3 * t) - f(x - 1e-3 * t)) / 2e-3, f(t), rtol=0, atol=1e-12)
