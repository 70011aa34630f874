"""Tangents of multi-head attention, blocks, stacks and the language model: of results and of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn import (
    Dropout,
    MultiHeadParams,
    Rotary,
    alibi_bias,
    causal_mask,
    length_mask,
    multi_head_attention_backward,
    multi_head_attention_backward_jvp,
    multi_head_attention_forward,
    multi_head_attention_jvp,
    tree_map,
)
from npattn._arrays.namespace import array_device
from npattn._arrays.trees import tree_leaves
from npattn.models import (
    BlockConfig,
    EmbeddingConfig,
    EncoderBlockParams,
    EncoderParams,
    LanguageModelConfig,
    LanguageModelParams,
    encoder_backward,
    encoder_backward_jvp,
    encoder_block_backward,
    encoder_block_backward_jvp,
    encoder_block_forward,
    encoder_block_jvp,
    encoder_forward,
    encoder_jvp,
    language_model_backward,
    language_model_backward_jvp,
    language_model_forward,
    language_model_jvp,
    language_model_loss_backward,
    language_model_loss_forward,
    language_model_loss_hvp,
    language_model_loss_jvp,
)
from npattn.testing.libraries import Unavailable, asarray, open_library, to_numpy

WIDTH, HEADS, VOCABULARY = 6, 2, 11
LLAMA = BlockConfig(norm="rms", eps=1e-6, activation="silu", rotary=Rotary(base=100.0, size=2), window=2)
T5 = BlockConfig("post", norm="rms", activation="gelu_tanh", scale=1.0, softcap=3.0)
IDS = np.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
TARGETS = np.asarray([[1, 4, 1, 5, -1], [2, 6, 5, 3, 5]])

Drawn = dict[str, Any]


class Case(NamedTuple):
    """One way to call one composite. What can move is drawn; ``place`` makes arguments and options of it."""

    name: str
    functions: tuple[Callable[..., Any], ...]  # forward, backward, jvp, backward_jvp
    draw: Callable[[np.random.Generator], Drawn]
    place: Callable[[Drawn], tuple[tuple[Any, ...], dict[str, Any]]]

    def __repr__(self) -> str:
        return self.name

    def forward(self, drawn: Drawn) -> tuple[Any, Any]:
        arguments, options = self.place(drawn)
        out, saved = self.functions[0](*arguments, **options)
        return out, saved

    def backward(self, dout: Any, saved: Any) -> list[Any]:
        return leaves(self.functions[1](dout, saved))

    def jvp(self, drawn: Drawn, t: Drawn) -> tuple[Any, Any]:
        arguments, options = self.place(drawn)
        out, tout = self.functions[2](*arguments, **tangents(t), **options)
        return out, tout

    def backward_jvp(self, dout: Any, saved: Any, t: Drawn, tdout: Any = None) -> list[Any]:
        return leaves(self.functions[3](dout, saved, **tangents(t), tdout=tdout))


def tangents(t: Drawn) -> Drawn:
    return {f"t{name}": x for name, x in t.items()}


def leaves(tree: Any) -> list[Any]:
    return [x for x in tree_leaves(tuple(tree)) if x is not None]


def randomised(params: Any, rng: np.random.Generator) -> Any:
    """No bias is 0 and no norm does nothing."""
    return tree_map(lambda x: x + 0.3 * rng.standard_normal(x.shape), params)


def _drawing(init: Callable[[np.random.Generator], Any], **shapes: tuple[int, ...]) -> Callable[[np.random.Generator], Drawn]:
    def draw(rng: np.random.Generator) -> Drawn:
        return {"params": randomised(init(rng), rng), **{n: np.asarray(rng.standard_normal(s)) for n, s in shapes.items()}}

    return draw


def _placing(*first: Any, bias_of: Callable[[Any], Any] = lambda bias: bias, **options: Any) -> Callable[[Drawn], Any]:
    """Parameters and sequences, in their order; ``bias`` becomes an option."""

    def place(drawn: Drawn) -> Any:
        given = [x for name, x in drawn.items() if name != "bias"]
        own = {"bias": bias_of(drawn["bias"])} if "bias" in drawn else {}
        return (*given, *first), own | options

    return place


MULTI_HEAD = (
    multi_head_attention_forward,
    multi_head_attention_backward,
    multi_head_attention_jvp,
    multi_head_attention_backward_jvp,
)
BLOCK = (encoder_block_forward, encoder_block_backward, encoder_block_jvp, encoder_block_backward_jvp)
STACK = (encoder_forward, encoder_backward, encoder_jvp, encoder_backward_jvp)
MODEL = (language_model_forward, language_model_backward, language_model_jvp, language_model_backward_jvp)


def _multi_head(name: str, options: Drawn, bias: tuple[int, ...] | None = None, **sizes: Any) -> Case:
    shapes: dict[str, tuple[int, ...]] = {"x_q": (2, 3, WIDTH), "x_kv": (2, 5, 7)}
    if bias is not None:
        shapes["bias"] = bias

    def init(rng: np.random.Generator) -> Any:
        return MultiHeadParams.init(rng, width=WIDTH, kv_width=7, heads=HEADS, **sizes)

    return Case(f"multi_head-{name}", MULTI_HEAD, _drawing(init, **shapes), _placing(**options))


def _block(name: str, config: BlockConfig, options: Drawn, bias: tuple[int, ...] | None = None, **sizes: Any) -> Case:
    shapes: dict[str, tuple[int, ...]] = {"x": (2, 5, WIDTH)} | ({} if bias is None else {"bias": bias})

    def init(rng: np.random.Generator) -> Any:
        return EncoderBlockParams.init(rng, width=WIDTH, heads=HEADS, hidden=7, config=config, **sizes)

    return Case(f"block-{name}", BLOCK, _drawing(init, **shapes), _placing(config=config, **options))


def _stack(name: str, config: BlockConfig, options: Drawn, bias: tuple[int, ...] | None = None) -> Case:
    shapes: dict[str, tuple[int, ...]] = {"x": (2, 5, WIDTH)} | ({} if bias is None else {"bias": bias})

    def init(rng: np.random.Generator) -> Any:
        return EncoderParams.init(rng, blocks=2, width=WIDTH, heads=HEADS, hidden=7, config=config)

    return Case(f"stack-{name}", STACK, _drawing(init, **shapes), _placing(config=config, **options))


def _model(name: str, config: LanguageModelConfig, options: Drawn, **sizes: Any) -> Case:
    def init(rng: np.random.Generator) -> Any:
        sizes_of: Drawn = {"vocabulary": VOCABULARY, "blocks": 2, "width": WIDTH, "heads": HEADS, "hidden": 7}
        return LanguageModelParams.init(rng, **sizes_of, config=config, **sizes)

    return Case(f"model-{name}", MODEL, _drawing(init), _placing(IDS, config=config, **options))


CASES = [
    _multi_head("rotary", {"rotary": Rotary(), "mask": length_mask([3, 5])}, head_size=4, sinks=True),
    _multi_head("bias", {"softcap": 2.0, "dropout": Dropout(0.3, 7)}, bias=(HEADS, 1, 5), kv_heads=1),
    _multi_head("alibi", {"bias_of": alibi_bias}, bias=(HEADS,)),
    _block("pre", BlockConfig(), {"mask": causal_mask()}),
    _block("post", BlockConfig("post"), {"dropout": Dropout(0.3, 7)}, head_size=5),
    _block("gated", LLAMA, {"mask": causal_mask()}, gated=True, sinks=True, kv_heads=1),
    _block("bias", T5, {}, bias=(HEADS, 1, 5)),
    _stack("post", BlockConfig("post", window=(1, None)), {"mask": causal_mask()}),
    _stack("alibi", BlockConfig(), {"bias_of": alibi_bias, "dropout": Dropout(0.2, 3), "recompute": True}, bias=(HEADS,)),
    _model("tied", LanguageModelConfig(BlockConfig(activation="gelu_tanh")), {"dropout": Dropout(0.1, 2)}, context=9),
    _model("untied", LanguageModelConfig(LLAMA, EmbeddingConfig("none", scale=2.0)), {"positions": 3}, tied=False),
]
AGAINST_AUTODIFF = ("multi_head-rotary", "multi_head-bias", "block-gated")  # JAX needs 20 seconds for each
every_case = pytest.mark.parametrize("case", CASES, ids=repr)


class Point(NamedTuple):
    """Where we are, which way we look, a cotangent and its tangent."""

    at: Drawn
    t: Drawn
    dout: Any
    tdout: Any

    @classmethod
    def of(cls, case: Case) -> Point:
        rng = np.random.default_rng([ord(c) for c in case.name])
        at, t = case.draw(rng), case.draw(rng)
        t = {name: tree_map(lambda x: 0.3 * x, x) for name, x in t.items()}
        return cls(at, t, *np.asarray(rng.standard_normal((2, *case.forward(at)[0].shape))))

    def moved(self, step: float) -> Drawn:
        return {name: tree_map(lambda x, t: x + step * t, x, self.t[name]) for name, x in self.at.items()}


def inner(a: list[Any], b: list[Any]) -> float:
    return sum(float(np.vdot(x, y)) for x, y in zip(a, b, strict=True))


def differences(f: Callable[[float], list[Any]]) -> list[np.ndarray]:
    """The derivative at 0 by Richardson's extrapolation."""

    def slope(step: float) -> list[np.ndarray]:
        return [(a - b) / (2 * step) for a, b in zip(f(step), f(-step), strict=True)]

    return [(4 * b - a) / 3 for a, b in zip(slope(4e-4), slope(2e-4), strict=True)]


def assert_close(got: list[Any], want: list[Any], tolerance: float) -> None:
    largest = max(float(np.abs(x).max(initial=0)) for x in want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)


@every_case
def test_the_jvp_is_the_adjoint_of_the_backward(case):
    point = Point.of(case)
    out, saved = case.forward(point.at)
    same, tout = case.jvp(point.at, point.t)
    np.testing.assert_array_equal(same, out)
    grads = case.backward(point.dout, saved)
    terms = [np.abs(x * y).sum() for x, y in zip(grads, leaves(point.t.values()), strict=True)]
    assert abs(inner([point.dout], [tout]) - inner(grads, leaves(point.t.values()))) <= 1e-12 * sum(terms)


@every_case
def test_tangents_of_gradients_are_their_differences(case):
    point = Point.of(case)

    def gradients(step: float) -> Any:
        return case.backward(point.dout + step * point.tdout, case.forward(point.moved(step))[1])

    got = case.backward_jvp(point.dout, case.forward(point.at)[1], point.t, point.tdout)
    assert_close(got, differences(gradients), 1e-8)


@every_case
def test_a_slip_of_1e_4_is_caught(case):
    point = Point.of(case)
    got = case.backward_jvp(point.dout, case.forward(point.at)[1], point.t, point.tdout)
    for n, x in enumerate(got):
        if np.abs(x).max() > 1e-2 * max(np.abs(y).max() for y in got):
            with pytest.raises(AssertionError):
                assert_close([*got[:n], 1.0001 * x, *got[n + 1 :]], got, 1e-8)


@every_case
def test_the_hessian_is_symmetric(case):
    point = Point.of(case)
    other = Point.of(case._replace(name=case.name + " once more")).t
    saved = case.forward(point.at)[1]
    products = [case.backward_jvp(point.dout, saved, t) for t in (point.t, other)]
    left, right = inner(leaves(other.values()), products[0]), inner(leaves(point.t.values()), products[1])
    assert abs(left - right) <= 1e-11 * sum(np.abs(x * y).sum() for x, y in zip(leaves(other.values()), products[0], strict=True))


@every_case
def test_a_part_that_does_not_move_may_be_none(case):
    point = Point.of(case)
    saved = case.forward(point.at)[1]
    zeros = {name: tree_map(np.zeros_like, x) for name, x in point.t.items()}
    for name, t in point.t.items():
        alone = {name: t} if name == "params" or "model" not in case.name else point.t
        full = zeros | alone
        np.testing.assert_allclose(case.jvp(point.at, alone)[1], case.jvp(point.at, full)[1], rtol=1e-13, atol=1e-13)
        got, want = (case.backward_jvp(point.dout, saved, x, point.tdout) for x in (alone, full))
        assert_close(got, want, 1e-13)
    first = {"params": type(point.t["params"])(*(x if n == 0 else None for n, x in enumerate(point.t["params"])))}
    both = zip(zeros["params"], first["params"], strict=True)
    partly = {"params": type(first["params"])(*(z if t is None else t for z, t in both))}
    np.testing.assert_allclose(case.jvp(point.at, first)[1], case.jvp(point.at, partly)[1], rtol=1e-13, atol=1e-13)
    got, want = (case.backward_jvp(point.dout, saved, x) for x in (first, partly))
    assert_close(got, want, 1e-13)


@every_case
def test_nothing_is_written_and_nothing_shared(case):
    point = Point.of(case)
    given = leaves([*point.at.values(), *point.t.values(), point.dout, point.tdout])
    for x in given:
        x.flags.writeable = False
    results = [case.jvp(point.at, point.t)[1], *case.backward_jvp(point.dout, case.forward(point.at)[1], point.t, point.tdout)]
    for n, x in enumerate(results):
        assert not any(np.shares_memory(x, other) for other in [*given, *results[n + 1 :]])


@pytest.mark.parametrize("name", ["strict-device1", "torch"])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("multi_head-rotary", "block-gated", "stack-alibi", "model-tied")]
)
def test_other_libraries_compute_the_same(case, name):
    try:
        library = open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    point = Point.of(case)
    mine = [case.jvp(point.at, point.t)[1], *case.backward_jvp(point.dout, case.forward(point.at)[1], point.t, point.tdout)]
    with library.active():
        at, t = ({n: _to(x, library) for n, x in tree.items()} for tree in (point.at, point.t))
        dout, tdout = (asarray(x, library) for x in (point.dout, point.tdout))
        got = [case.jvp(at, t)[1], *case.backward_jvp(dout, case.forward(at)[1], t, tdout)]
        assert {array_device(x) for x in got} == {array_device(dout)}
        assert_close([to_numpy(x) for x in got], mine, 1e-12)


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.name in AGAINST_AUTODIFF], ids=repr)
def test_tangents_agree_with_autodiff_of_forward_and_backward(case):
    jax = pytest.importorskip("jax", reason="jax is not installed")
    library = open_library("jax")
    point = Point.of(case)
    at, t = ({n: _to(x, library) for n, x in tree.items()} for tree in (point.at, point.t))
    dout, tdout = (asarray(x, library) for x in (point.dout, point.tdout))
    names = list(at)

    def named(values: Any) -> Drawn:
        return dict(zip(names, values, strict=True))  # JAX would sort a dict by its keys

    def both(values: Any, dout: Any) -> Any:
        out, saved = case.forward(named(values))
        return out, tuple(case.backward(dout, saved))

    def ours(values: Any, dout: Any, t: Any, tdout: Any) -> Any:
        return case.jvp(named(values), named(t))[1], tuple(
            case.backward_jvp(dout, case.forward(named(values))[1], named(t), tdout)
        )

    given, along = (tuple(at.values()), dout), (tuple(t.values()), tdout)
    _, (tout, tgrads) = jax.jit(lambda *a: jax.jvp(both, *a))(given, along)
    tgrads = [to_numpy(x) for x in tgrads]
    for got in (
        [case.jvp(point.at, point.t)[1], *case.backward_jvp(point.dout, case.forward(point.at)[1], point.t, point.tdout)],
        [to_numpy(x) for x in tree_leaves(jax.jit(ours)(*given, *along))],
    ):
        np.testing.assert_allclose(got[0], to_numpy(tout), rtol=1e-11, atol=1e-11)
        assert_close(got[1:], tgrads, 1e-11)


def _to(tree: Any, library: Any) -> Any:
    return tree_map(lambda x: asarray(x, library), tree)


# The loss --------------------------------------------------------------------------------------------------------------------

SIZES: Drawn = {"vocabulary": VOCABULARY, "context": 9, "blocks": 2, "width": WIDTH, "heads": HEADS}


def loss_of(params: Any, **options: Any) -> tuple[Any, Any]:
    loss, saved = language_model_loss_forward(params, IDS, TARGETS, ignore_index=-1, label_smoothing=0.1, **options)
    return loss, saved


@pytest.fixture
def point() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params, t = (randomised(LanguageModelParams.init(rng, **SIZES), rng) for _ in range(2))
    return params, tree_map(lambda x: 0.3 * x, t)


def test_the_slope_of_the_loss_along_a_direction(point):
    params, t = point
    loss, saved = loss_of(params)
    grads = language_model_loss_backward(1.0, saved).dparams
    same, tout = language_model_loss_jvp(params, IDS, TARGETS, tparams=t, ignore_index=-1, label_smoothing=0.1)
    assert same == loss
    np.testing.assert_allclose(tout, inner(leaves(t), leaves(grads)), rtol=1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_hessian_of_the_loss_times_a_vector(point, recompute):
    params, t = point

    def gradient(step: float) -> list[Any]:
        moved = tree_map(lambda x, d: x + step * d, params, t)
        return leaves(language_model_loss_backward(1.0, loss_of(moved)[1]).dparams)

    got = language_model_loss_hvp(loss_of(params, recompute=recompute)[1], tparams=t)
    assert isinstance(got.dparams, LanguageModelParams)
    assert_close(leaves(got.dparams), differences(gradient), 1e-8)


def test_tangents_that_do_not_fit_are_refused(point):
    params, t = point
    for wrong, error, text in (
        (t._replace(norm=t.norm._replace(bias=np.ones(2))), ValueError, r"tparams.norm.bias must have shape \(6,\)"),
        (t._replace(blocks=t.blocks[:1]), TypeError, "tparams.blocks must be a tuple of 2"),
        (t._replace(w_out=np.ones((6, 11))), ValueError, "tparams.w_out is given, but there is no params.w_out"),
        (tree_map(lambda x: x.astype(np.float32), t), TypeError, "tparams.embedding.tokens must be float64"),
    ):
        with pytest.raises(error, match=text):
            language_model_jvp(params, IDS, tparams=wrong)
    saved = language_model_forward(params, IDS)[1]
    with pytest.raises(ValueError, match="tdout must have shape"):
        language_model_backward_jvp(np.ones((2, 5, 11)), saved, tdout=np.ones((2, 5)))
    saved = loss_of(params)[1]
    for wrong, text in (
        (t._replace(blocks=t.blocks[:1]), "tparams must have 2 blocks, got 1"),
        (t._replace(norm=t.norm._replace(bias=np.ones(2))), r"tbias must have shape \(6,\)"),
        (t._replace(norm=t.norm._replace(weight=np.ones(2))), r"tweight must have shape \(6,\)"),
        (t._replace(embedding=t.embedding._replace(tokens=np.ones((2, 6)))), r"ttable must have shape \(11, 6\)"),
    ):
        with pytest.raises(ValueError, match=text):
            language_model_loss_hvp(saved, tparams=wrong)


def test_a_norm_without_a_bias_has_no_tangent_of_one():
    rng = np.random.default_rng(0)
    params = EncoderBlockParams.init(rng, width=WIDTH, heads=HEADS, config=LLAMA)
    _, saved = encoder_block_forward(params, rng.standard_normal((5, WIDTH)), config=LLAMA)
    t = params._replace(attention_norm=params.attention_norm._replace(bias=np.ones(WIDTH)))
    with pytest.raises(ValueError, match="tbias is given, but there is no bias"):
        encoder_block_backward_jvp(np.ones((5, WIDTH)), saved, tparams=t)
