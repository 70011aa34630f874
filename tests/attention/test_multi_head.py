"""Multi-head attention: heads are one more axis, and self- and cross-attention differ in what they are given."""

from __future__ import annotations

import functools
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import (
    Dropout,
    MultiHeadParams,
    alibi_bias,
    attention,
    causal_mask,
    length_mask,
    multi_head_attention,
    multi_head_attention_backward,
    multi_head_attention_forward,
    relative_bias,
    tree_map,
)
from npattn._arrays.trees import tree_items, tree_leaves
from npattn.layers import Rotary, rotate
from npattn.testing.dense import dense_bias, dense_mask
from npattn.testing.gradients import check_backward
from npattn.testing.inputs import bias_with
from npattn.testing.libraries import asarray, open_library, to_numpy
from npattn.testing.oracle import naive_forward
from npattn.testing.strategies import broadcastable_shapes, mask_trees

DATA = Path(__file__).parent.parent / "data"

# Random problems ---------------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """A call of multi-head attention. For self-attention x_q and x_kv are the same object."""

    params: MultiHeadParams
    x_q: Any
    x_kv: Any
    options: dict[str, Any]
    dout: Any


@st.composite
def multi_head_problems(draw: st.DrawFn) -> Drawn:
    side = st.integers(1, 4)
    K, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    H, D, E, T = K * group, draw(side), draw(side), draw(side)
    own_width, out_width = draw(side), draw(side)
    itself = draw(st.booleans())
    S, kv_width = (T, own_width) if itself else (draw(side), draw(side))
    lead = tuple(draw(st.lists(st.integers(1, 2), max_size=2)))
    rng = np.random.default_rng(draw(st.integers(0, 999)))

    shapes = [
        (own_width, H, D),
        (kv_width, K, D),
        (kv_width, K, E),
        (H, E, out_width),
        (H, D),
        (K, D),
        (K, E),
        (out_width,),
        (H,),
    ]
    params = MultiHeadParams(
        *(rng.standard_normal(shape) if n < 4 or draw(st.booleans()) else None for n, shape in enumerate(shapes))
    )
    x_q = rng.standard_normal((*lead, T, own_width))
    x_kv = x_q if itself else rng.standard_normal((*lead[draw(st.integers(0, len(lead))) :], S, kv_width))

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["mask"] = draw(mask_trees(lead, H, T, S))
    bias = draw(st.sampled_from([None, "dense", "alibi", "relative"]))
    if bias == "dense":
        options["bias"] = rng.standard_normal(draw(broadcastable_shapes((*lead, H, T, S))))
    elif bias is not None:
        columns = draw(st.sampled_from([1, H]))
        options["bias"] = alibi_bias(rng.random(columns)) if bias == "alibi" else relative_bias(rng.standard_normal((4, columns)))
    if draw(st.booleans()):
        options["softcap"] = 1.5
    if draw(st.booleans()):
        options["scale"] = 0.4
    if draw(st.booleans()):
        options["dropout"] = Dropout(0.4, draw(st.integers(0, 99)))
    if draw(st.booleans()):
        size = draw(st.sampled_from(range(0, D + 1, 2)))
        pairs = draw(st.sampled_from(["halves", "interleaved"]))
        options["rotary"] = Rotary(
            base=draw(st.sampled_from([10000.0, 10.0])), pairs=pairs, size=size, positions=draw(st.integers(0, 9))
        )
        if draw(st.booleans()):
            options["rotary"] = options["rotary"]._replace(key_positions=rng.integers(0, 9, S))
    return Drawn(params, x_q, x_kv, options, rng.standard_normal((*lead, T, out_width)))


@given(multi_head_problems())
def test_finite_differences(drawn):
    bias = drawn.options.get("bias")
    itself = drawn.x_q is drawn.x_kv

    def forward(params: MultiHeadParams, x: Any, x_kv: Any = None, parameters: Any = None) -> Any:
        options = drawn.options | ({} if bias is None else {"bias": bias_with(bias, parameters)})
        return multi_head_attention_forward(params, x, x if itself else x_kv, **options)

    def backward(dout: Any, saved: Any) -> Any:
        grads = multi_head_attention_backward(dout, saved)
        dx = grads.dx_q + grads.dx_kv if itself else grads.dx_q
        return {"params": grads.dparams, "x": dx, "x_kv": grads.dx_kv, "parameters": grads.dbias}

    args = {"params": drawn.params, "x": drawn.x_q, "x_kv": None if itself else drawn.x_kv}
    args["parameters"] = None if bias is None else getattr(bias, "parameters", bias)
    check_backward(forward, backward, args, directions=1, rtol=1e-7)


@given(multi_head_problems())
def test_heads_one_by_one(drawn):
    """Every head projected, attended by loops and multiplied by its own rows of W_O; the results added."""
    params, x_q, x_kv, options, dout = drawn
    H, K, T, S = params.w_q.shape[1], params.w_k.shape[1], x_q.shape[-2], x_kv.shape[-2]
    lead = x_q.shape[:-2]
    mask, bias = dense_mask(options.get("mask"), lead, H, T, S), dense_bias(options.get("bias"), H, T, S)
    whole = (*lead, H, T, S)
    mask = np.broadcast_to(True if mask is None else mask, whole)
    bias = np.broadcast_to(0.0 if bias is None else bias, whole)
    factors = np.ones(whole)
    if "dropout" in options:
        index = np.indices((math.prod(lead), H, T, S), dtype=np.int32)
        factors = options["dropout"].factors(*index, xp=np, dtype=np.float64).reshape(whole)
    expected = np.zeros(dout.shape)
    for h in range(H):
        kv = h // (H // K)
        q, k, v = (
            x @ w[:, n] + (0 if b is None else b[n])
            for x, w, b, n in (
                (x_q, params.w_q, params.b_q, h),
                (x_kv, params.w_k, params.b_k, kv),
                (x_kv, params.w_v, params.b_v, kv),
            )
        )
        if "rotary" in options:
            q, k = rotate(q, options["rotary"]), rotate(k, options["rotary"].of_keys())
        given_options = {name: options[name] for name in ("scale", "softcap") if name in options}
        sink = None if params.sinks is None else params.sinks[h : h + 1]
        head = naive_forward(
            *(x[..., None, :, :] for x in (q, k, v)),
            mask=mask[..., h : h + 1, :, :],
            bias=bias[..., h : h + 1, :, :],
            sinks=sink,
            factors=factors[..., h : h + 1, :, :],
            **given_options,
        ).out[..., 0, :, :]
        expected = expected + head @ params.w_o[h]
    expected = expected + (0 if params.b_o is None else params.b_o)
    got = multi_head_attention(params, x_q, x_kv, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


# PyTorch's modules -------------------------------------------------------------------------------------------------------------


def from_torch(weights: dict[str, Any], heads: int, names: tuple[str, str, str] | None = None) -> MultiHeadParams:
    """nn.MultiheadAttention's weights, (out, in) and packed, as ours, (in, heads, size)."""

    def into(w: Any, b: Any) -> tuple[Any, Any]:
        w = np.moveaxis(w.reshape(heads, -1, w.shape[-1]), -1, 0)
        return w, None if b is None else b.reshape(heads, -1)

    packed = [weights[f"{n}_proj_weight"] for n in "qkv"] if names else np.split(weights["in_proj_weight"], 3)
    biases = np.split(weights["in_proj_bias"], 3) if "in_proj_bias" in weights else [None] * 3
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (into(w, b) for w, b in zip(packed, biases, strict=True))
    w_o = weights["out_proj.weight"].T
    return MultiHeadParams(w_q, w_k, w_v, w_o.reshape(heads, -1, w_o.shape[-1]), b_q, b_k, b_v, weights.get("out_proj.bias"))


def to_torch(params: MultiHeadParams) -> dict[str, Any]:
    """The way back, for gradients."""
    rows = [np.moveaxis(w, 0, -1).reshape(-1, w.shape[0]) for w in (params.w_q, params.w_k, params.w_v)]
    named = {"in_proj_weight": np.concatenate(rows), "out_proj.weight": params.w_o.reshape(-1, params.w_o.shape[-1]).T}
    if params.b_q is not None:
        biases: list[Any] = [params.b_q, params.b_k, params.b_v]
        named["in_proj_bias"] = np.concatenate([b.reshape(-1) for b in biases])
        named["out_proj.bias"] = params.b_o
    return named


def two_sources(params: MultiHeadParams) -> MultiHeadParams:
    """Keys and values from features of their own, side by side: w_k sees the first half, w_v the second."""
    nothing = np.zeros_like(params.w_k)
    return params._replace(w_k=np.concatenate([params.w_k, nothing]), w_v=np.concatenate([nothing, params.w_v]))


VECTORS = [
    case for case in json.loads((DATA / "torch_gradients.json").read_text())["cases"] if case["op"] == "MultiheadAttention"
]


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_gradients_that_pytorch_computed(case):
    with np.load(DATA / "torch_gradients.npz") as file:
        start = f"{case['name']}/"
        arrays = {name.removeprefix(start): file[name] for name in file.files if name.startswith(start)}
    heads, width = case["heads"], case["embed"]
    params = two_sources(from_torch({name[2:]: x for name, x in arrays.items() if name.startswith("p_")}, heads))
    mask = None  # PyTorch's modules say True for what is ignored
    if "in_key_padding_mask" in arrays:
        mask = ~arrays["in_key_padding_mask"][:, None, None, :]
    if "in_attn_mask" in arrays:  # (B·H, T, S)
        mask = ~arrays["in_attn_mask"].reshape(-1, heads, *arrays["in_attn_mask"].shape[1:])
    x_kv = np.concatenate([arrays["in_k"], arrays["in_v"]], axis=-1)
    out, saved = multi_head_attention_forward(params, arrays["in_q"], x_kv, mask=mask)
    np.testing.assert_allclose(out, arrays["out"], rtol=1e-12, atol=1e-13)
    grads = multi_head_attention_backward(arrays["g_out"], saved)
    got = {"d_q": grads.dx_q, "d_k": grads.dx_kv[..., :width], "d_v": grads.dx_kv[..., width:]}
    own = grads.dparams._replace(w_k=grads.dparams.w_k[:width], w_v=grads.dparams.w_v[width:])
    got |= {f"dp_{name}": x for name, x in to_torch(own).items()}
    wanted = {name for name in arrays if name.startswith(("d_", "dp_"))}
    assert wanted <= set(got)
    assert len(wanted) >= 5
    for name in wanted:
        np.testing.assert_allclose(got[name], arrays[name], rtol=1e-11, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("itself", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
def test_pytorch_beside(bias, itself, masked):
    """The same weights, mapped by hand; values and every gradient."""
    torch = pytest.importorskip("torch")
    B, T, S, width, heads = 3, 5, 5 if itself else 7, 12, 4
    torch.manual_seed(0)
    other = {} if itself else {"kdim": 6, "vdim": 6}
    module = torch.nn.MultiheadAttention(width, heads, bias=bias, batch_first=True, dtype=torch.float64, **other)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p))
    rng = np.random.default_rng(0)
    x_q, x_kv, dout = (
        rng.standard_normal((B, T, width)),
        rng.standard_normal((B, S, other.get("kdim", width))),
        rng.standard_normal((B, T, width)),
    )
    x_kv = x_q if itself else x_kv
    lengths = np.asarray([S, 2, 3])
    ours = causal_mask(S - T) & length_mask(lengths) if masked else None
    theirs = {}
    if masked:
        theirs["key_padding_mask"] = torch.tensor(np.arange(S) >= lengths[:, None])
        theirs["attn_mask"] = torch.tensor(~causal_mask(S - T).to_array(T, S))
    t_q = torch.tensor(x_q, requires_grad=True)
    t_kv = t_q if itself else torch.tensor(x_kv, requires_grad=True)
    expected, _ = module(t_q, t_kv, t_kv, need_weights=False, **theirs)
    expected.backward(torch.tensor(dout))

    names = None if itself else ("q", "k", "v")
    params = from_torch({name: p.detach().numpy() for name, p in module.named_parameters()}, heads, names)
    out, saved = multi_head_attention_forward(params, x_q, x_kv, mask=ours)
    grads = multi_head_attention_backward(dout, saved)
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-11, atol=1e-12)
    dx = {"x_q": grads.dx_q + grads.dx_kv} if itself else {"x_q": grads.dx_q, "x_kv": grads.dx_kv}
    for name, got in dx.items():
        wanted = (t_q if name == "x_q" else t_kv).grad.numpy()
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-11, err_msg=name)
    dparams = from_torch({name: p.grad.numpy() for name, p in module.named_parameters()}, heads, names)
    assert [x is None for x in grads.dparams] == [x is None for x in dparams]
    for (name, got), wanted in zip(tree_items(grads.dparams), tree_leaves(dparams), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10, err_msg=name)


# Examples from elsewhere -------------------------------------------------------------------------------------------------------

EXAMPLES = {case["id"]: case for case in json.loads((DATA / "published_examples.json").read_text())}


def test_keras_example():
    case = EXAMPLES["keras_mha_identity_out"]
    q, k, v = (np.asarray(case["inputs"][name]) for name in "qkv")
    every_head = np.stack([np.eye(8)] * 8, axis=1)
    one_feature_a_head = np.repeat(np.eye(8)[:, None, :], 8, axis=1)
    params = two_sources(MultiHeadParams(every_head, every_head, every_head, one_feature_a_head))
    got = multi_head_attention(params, q, np.concatenate([k, v], axis=-1))
    np.testing.assert_allclose(got, case["expected"], atol=case["atol"])


def test_equinox_example():
    case = EXAMPLES["equinox_mha_1tok"]
    w = np.arange(16.0).reshape(4, 4).T
    params = MultiHeadParams(*[w.reshape(4, 2, 2)] * 3, w.reshape(2, 2, 4))
    x = np.asarray(case["inputs"]["x"])
    np.testing.assert_allclose(multi_head_attention(params, x, x), case["expected"], atol=case["atol"])


def test_the_order_of_features_in_heads():
    """Zero queries and keys: every head is the mean of its own features."""
    identity = MultiHeadParams.identity(width=4, heads=2)
    params = identity._replace(w_q=np.zeros((4, 2, 2)), w_k=np.zeros((4, 2, 2)))
    x = np.asarray([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    np.testing.assert_array_equal(multi_head_attention(params, x, x), [[3, 4, 5, 6]] * 2)


def test_a_query_that_sees_nothing():
    """It gives b_o, and every gradient is finite."""
    params = MultiHeadParams.identity(width=2)._replace(b_o=np.asarray([7.0, 8.0]), b_k=np.zeros((1, 2)), b_v=np.zeros((1, 2)))
    x = np.eye(2)
    out, saved = multi_head_attention_forward(params, x, x, mask=np.asarray([[True, False], [False, False]]))
    np.testing.assert_array_equal(out, [[8, 8], [7, 8]])  # the first query is the first row of the identity
    grads = multi_head_attention_backward(np.ones((2, 2)), saved)
    assert all(np.isfinite(x).all() for x in tree_leaves(grads))
    np.testing.assert_array_equal(grads.dx_q, np.zeros((2, 2)))
    np.testing.assert_array_equal(grads.dx_kv, [[1, 1], [0, 0]])
    np.testing.assert_array_equal(grads.dparams.b_o, [2, 2])


def test_the_targets_mask_does_not_fit_the_source():
    params = MultiHeadParams.identity(width=4, heads=2)
    mask = causal_mask().to_array(3, 3)
    with pytest.raises(
        ValueError, match=r"^attention: mask must broadcast to \(..., H, T, S\) = \(2, 3, 5\), got shape \(3, 3\)"
    ):
        multi_head_attention(params, np.ones((3, 4)), np.ones((5, 4)), mask=mask)


# Laws --------------------------------------------------------------------------------------------------------------------------


def test_grouped_heads_are_repeated_heads():
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=8, heads=4, kv_heads=2, sinks=True)
    params = tree_map(lambda x: x + 0.1 * rng.standard_normal(x.shape), params)
    repeated = params._replace(**{name: np.repeat(getattr(params, name), 2, axis=-2) for name in ("w_k", "w_v", "b_k", "b_v")})
    x = rng.standard_normal((2, 5, 8))
    dout = rng.standard_normal((2, 5, 8))
    out, saved = multi_head_attention_forward(params, x, x, mask=causal_mask())
    expected, repeated_saved = multi_head_attention_forward(repeated, x, x, mask=causal_mask())
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)
    grads, many = (multi_head_attention_backward(dout, s) for s in (saved, repeated_saved))
    np.testing.assert_allclose(grads.dx_q + grads.dx_kv, many.dx_q + many.dx_kv, rtol=1e-11, atol=1e-13)
    for name, got in grads.dparams._asdict().items():
        wanted = getattr(many.dparams, name)
        if name in ("w_k", "w_v", "b_k", "b_v"):
            wanted = wanted.reshape(*wanted.shape[:-2], 2, 2, wanted.shape[-1]).sum(-2)
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-13, err_msg=name)


def test_moving_every_key_changes_nothing():
    """The same number is added to every score of a row: the key bias has no gradient, but rounding."""
    rng = np.random.default_rng(0)
    params = tree_map(lambda x: rng.standard_normal(x.shape), MultiHeadParams.init(rng, width=6, heads=3))
    x, dout = rng.standard_normal((2, 2, 7, 6))
    out, saved = multi_head_attention_forward(params, x, x)
    dparams = multi_head_attention_backward(dout, saved).dparams
    size = np.abs(dparams.w_k).max()
    assert np.abs(dparams.b_k).max() < 1e-14 * size
    assert np.abs(dparams.b_q).max() > 1e-2 * size
    moved = params._replace(b_k=params.b_k + 3)
    np.testing.assert_allclose(multi_head_attention(moved, x, x), out, rtol=1e-11, atol=1e-12)
    # with a softcap or a sink it does have one
    for params_too, options in ((params, {"softcap": 1.0}), (params._replace(sinks=np.zeros(3)), {})):
        _, saved = multi_head_attention_forward(params_too, x, x, **options)
        assert np.abs(multi_head_attention_backward(dout, saved).dparams.b_k).max() > 1e-4 * size


def test_leading_axes_broadcast():
    """One source for every target of a batch."""
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=4, heads=2)
    x_q, x_kv, dout = rng.standard_normal((3, 2, 4)), rng.standard_normal((5, 4)), rng.standard_normal((3, 2, 4))
    out, saved = multi_head_attention_forward(params, x_q, x_kv)
    grads = multi_head_attention_backward(dout, saved)
    assert grads.dx_kv.shape == (5, 4)
    each = [multi_head_attention_forward(params, x, x_kv) for x in x_q]
    np.testing.assert_allclose(out, [o for o, _ in each], rtol=1e-13)
    backs = [multi_head_attention_backward(d, s) for d, (_, s) in zip(dout, each, strict=True)]
    np.testing.assert_allclose(grads.dx_kv, sum(b.dx_kv for b in backs), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(grads.dparams.w_q, sum(b.dparams.w_q for b in backs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("B", "T", "S"), [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_empty(B, T, S):
    params = MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2)._replace(b_o=np.arange(4.0))
    out, saved = multi_head_attention_forward(params, np.ones((B, T, 4)), np.ones((B, S, 4)))
    np.testing.assert_array_equal(out, np.broadcast_to(params.b_o, (B, T, 4)))
    grads = multi_head_attention_backward(np.ones((B, T, 4)), saved)
    assert (grads.dx_q.shape, grads.dx_kv.shape) == ((B, T, 4), (B, S, 4))
    for name, x in grads.dparams._asdict().items():
        assert x is None or x.shape == getattr(params, name).shape
        assert x is None or name == "b_o" or not x.any()


# Rotary positions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rotation_is_a_projection_that_depends_on_the_position(pairs):
    """One token at a time: its rotation is a matrix that multiplies w_q and w_k."""
    rng = np.random.default_rng(0)
    params = tree_map(lambda x: rng.standard_normal(x.shape), MultiHeadParams.init(rng, width=6, heads=2, head_size=4))
    x = rng.standard_normal((5, 6))
    turned = [
        params._replace(
            **{n: rotate(getattr(params, n)[..., None, :], Rotary(pairs=pairs, positions=p))[..., 0, :] for n in NAMES_QK}
        )
        for p in range(5)
    ]
    q, k, v = (
        np.stack(
            [x[p] @ getattr(turned[p], f"w_{n}")[:, h] + getattr(turned[p], f"b_{n}")[h] for h in range(2) for p in range(5)]
        )
        for n in "qkv"
    )
    heads = attention(*(y.reshape(2, 5, 4) for y in (q, k, v)), mask=causal_mask())
    expected = np.einsum("hte,hec->tc", heads, params.w_o) + params.b_o
    got = multi_head_attention(params, x, x, mask=causal_mask(), rotary=Rotary(pairs=pairs))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


NAMES_QK = ("w_q", "w_k", "b_q", "b_k")


def test_moving_all_positions_changes_nothing():
    """Only distances count; without rotation, or with keys that are moved alone, that is not so."""
    rng = np.random.default_rng(0)
    params, x, dout = MultiHeadParams.init(rng, width=8, heads=2), rng.standard_normal((2, 5, 8)), rng.standard_normal((2, 5, 8))
    results = []
    for positions in (0, 17, np.arange(5) + 40, [[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]]):
        out, saved = multi_head_attention_forward(params, x, x, rotary=Rotary(positions=positions))
        results.append([out, *tree_leaves(multi_head_attention_backward(dout, saved))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    assert np.abs(multi_head_attention(params, x, x, rotary=Rotary(key_positions=3)) - results[0][0]).max() > 1e-3
    assert np.abs(multi_head_attention(params, x, x) - results[0][0]).max() > 1e-3


def test_the_last_query_alone_with_its_position():
    rng = np.random.default_rng(0)
    params, x = MultiHeadParams.init(rng, width=8, heads=2, kv_heads=1), rng.standard_normal((3, 6, 8))
    whole = multi_head_attention(params, x, x, mask=causal_mask(), rotary=Rotary())
    last = multi_head_attention(params, x[:, 5:], x, rotary=Rotary(positions=5, key_positions=0))
    np.testing.assert_allclose(last, whole[:, 5:], rtol=1e-12, atol=1e-13)


def test_a_key_bias_has_a_gradient_once_keys_are_rotated():
    rng = np.random.default_rng(0)
    params = tree_map(lambda x: rng.standard_normal(x.shape), MultiHeadParams.init(rng, width=6, heads=3))
    x, dout = rng.standard_normal((2, 7, 6))
    _, saved = multi_head_attention_forward(params, x, x, rotary=Rotary())
    assert np.abs(multi_head_attention_backward(dout, saved).dparams.b_k).max() > 1e-3


def test_what_no_query_sees_may_be_nan_rotated_or_not():
    rng = np.random.default_rng(0)
    params, x, dout = MultiHeadParams.init(rng, width=4, heads=2), rng.standard_normal((3, 4)), rng.standard_normal((3, 4))
    hidden = x.copy()
    hidden[2] = np.nan
    results = []
    for x_kv in (x, hidden):
        out, saved = multi_head_attention_forward(params, x, x_kv, mask=length_mask(2), rotary=Rotary())
        results.append((out, multi_head_attention_backward(dout, saved)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1].dx_q, results[1][1].dx_q)
    np.testing.assert_array_equal(results[1][1].dx_kv[2], 0)


def test_errors_of_rotary():
    params, x = MultiHeadParams.init(np.random.default_rng(0), width=6, heads=2), np.ones((3, 6))
    with pytest.raises(ValueError, match="^rotate: the size of rotary must be even and at most D = 3, got 3"):
        multi_head_attention(params, x, x, rotary=Rotary())
    with pytest.raises(TypeError, match="^rotate: rotary must be a Rotary"):
        multi_head_attention(params, x, x, rotary={"base": 10})
    with pytest.raises(
        ValueError, match=r"^rotate: the positions of rotary must broadcast to \(..., T\) = \(4,\), got shape \(3,\)"
    ):
        multi_head_attention(params, x, np.ones((4, 6)), rotary=Rotary(size=2, positions=[0, 1, 2]))


# The parameters ----------------------------------------------------------------------------------------------------------------


def test_identity_does_nothing():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 5, 6)), rng.standard_normal((2, 3, 6))
    one = MultiHeadParams.identity(width=6)
    np.testing.assert_allclose(
        multi_head_attention(one, x, y, mask=causal_mask()),
        attention(x[:, None], y[:, None], y[:, None], mask=causal_mask())[:, 0],
        rtol=1e-14,
    )
    for heads in (2, 3, 6):
        params = MultiHeadParams.identity(width=6, heads=heads)
        parts = [slice(n * 6 // heads, (n + 1) * 6 // heads) for n in range(heads)]
        each = [attention(*(z[:, None, :, part] for z in (x, y, y)))[:, 0] for part in parts]
        np.testing.assert_allclose(multi_head_attention(params, x, y), np.concatenate(each, axis=-1), rtol=1e-13)
        assert all(b is None for b in params[4:])
    assert len({id(w) for w in one[:4]}) == 4
    for a, b in itertools.combinations(one[:4], 2):
        assert not np.shares_memory(a, b)


def test_init_is_xavier_uniform():
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=64, heads=8, kv_heads=2, value_size=12, kv_width=48, out_width=80, sinks=True)
    sizes = {"w_q": (64, 64), "w_k": (48, 16), "w_v": (48, 24), "w_o": (96, 80)}  # inputs, outputs
    shapes = {"w_q": (64, 8, 8), "w_k": (48, 2, 8), "w_v": (48, 2, 12), "w_o": (8, 12, 80)}
    for name, (inputs, outputs) in sizes.items():
        w, limit = getattr(params, name), math.sqrt(6 / (inputs + outputs))
        assert w.shape == shapes[name]
        assert 0.99 * limit < np.abs(w).max() <= limit
        assert abs(w.mean()) < 5 * limit / math.sqrt(3 * w.size)
        assert w.std() == pytest.approx(limit / math.sqrt(3), rel=0.1)
    shapes = {"b_q": (8, 8), "b_k": (2, 8), "b_v": (2, 12), "b_o": (80,), "sinks": (8,)}
    for name, shape in shapes.items():
        np.testing.assert_array_equal(getattr(params, name), np.zeros(shape))
    bare = MultiHeadParams.init(rng, width=64, heads=8, bias=False)
    assert bare[4:] == (None,) * 5
    same = [MultiHeadParams.init(np.random.default_rng(3), width=4, heads=2) for _ in range(2)]
    for a, b in zip(*same, strict=True):
        np.testing.assert_array_equal(a, b)


def test_init_on_every_library(library, xp):
    device = {} if library.device is None else {"device": library.device}
    for make in (
        lambda **o: MultiHeadParams.init(np.random.default_rng(0), width=8, heads=2, **o),
        lambda **o: MultiHeadParams.identity(width=8, heads=2, **o),
    ):
        default = make(xp=xp, **device)
        plain = make()
        for name, x in default._asdict().items():
            if x is not None:
                assert x.dtype == xp.zeros(1).dtype  # the library's own default
                assert library.device is None or x.device == library.device
                np.testing.assert_allclose(to_numpy(x), getattr(plain, name), rtol=1e-6)
        for dtype in ("float16", "float32", "float64"):
            if library.has(dtype):
                leaves = tree_leaves(make(xp=xp, dtype=getattr(xp, dtype), **device))
                assert {str(x.dtype) for x in leaves} == {str(xp.zeros(1, dtype=getattr(xp, dtype)).dtype)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 8, "heads": 3}, ValueError, "heads must divide width = 8, got 3; or give head_size"),
        ({"width": 8, "heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"width": 8, "heads": 2.0}, TypeError, "heads must be an integer, got float"),
        ({"width": 8, "heads": 4, "kv_heads": 3}, ValueError, "kv_heads must divide heads = 4, got 3"),
        ({"width": 8, "heads": 4, "kv_heads": 8}, ValueError, "kv_heads must divide heads = 4, got 8"),
        ({"width": 8, "heads": 4, "kv_heads": 0}, ValueError, "kv_heads must be at least 1, got 0"),
        ({"width": 8, "heads": 4, "head_size": 0}, ValueError, "head_size must be at least 1, got 0"),
        ({"width": 8, "heads": 4, "value_size": 1.5}, TypeError, "value_size must be an integer, got float"),
        ({"width": 8, "heads": 4, "kv_width": -1}, ValueError, "kv_width must be at least 1, got -1"),
        ({"width": 8.0, "heads": 4, "head_size": 2}, TypeError, "width must be an integer, got float"),
    ],
    ids=str,
)
def test_sizes_that_make_no_parameters(options, error, message):
    with pytest.raises(error, match=f"^MultiHeadParams.init: {message}"):
        MultiHeadParams.init(np.random.default_rng(0), **options)
    if set(options) == {"width", "heads"}:
        with pytest.raises(error, match=f"^MultiHeadParams.identity: {message}"):
            MultiHeadParams.identity(**options)


def test_gradients_have_the_parameters_type():
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=4, heads=2)._replace(b_q=None, b_o=None, sinks=np.zeros(2))
    x = rng.standard_normal((3, 4))
    _, saved = multi_head_attention_forward(params, x, x)
    dparams = multi_head_attention_backward(np.ones((3, 4)), saved).dparams
    assert type(dparams) is MultiHeadParams
    assert dparams.b_q is None
    assert dparams.b_o is None
    moved = tree_map(lambda p, d: p - 0.1 * d, params, dparams)  # a step of learning
    assert [None if x is None else x.shape for x in moved] == [None if x is None else x.shape for x in params]


def test_repr():
    params = MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2, bias=False)
    text = "MultiHeadParams(w_q=float64[4, 2, 2], w_k=float64[4, 2, 2], w_v=float64[4, 2, 2], w_o=float64[2, 2, 4], b_q=None"
    assert repr(params).startswith(text)
    x = np.ones((3, 4))
    _, saved = multi_head_attention_forward(params, x, x, mask=causal_mask())
    assert repr(saved).startswith(f"MultiHeadAttentionSaved(params={text}")
    assert "mask=causal_mask()" in repr(saved)
    grads = multi_head_attention_backward(x, saved)
    assert repr(grads).endswith("dx_q=float64[3, 4], dx_kv=float64[3, 4], dbias=None)")


# Libraries, precision, memory --------------------------------------------------------------------------------------------------


def _call(convert: Any, dtype: str | None = None) -> tuple[Any, Any]:
    """Forward and backward with every option, in arrays that ``convert`` makes."""
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(
        rng, width=6, heads=4, kv_heads=2, head_size=3, value_size=2, kv_width=5, out_width=7, sinks=True
    )
    params = tree_map(lambda x: convert(x + 0.2 * rng.standard_normal(x.shape), dtype), params)
    x_q, x_kv, bias, dout = (convert(rng.standard_normal(s), dtype) for s in ((2, 3, 6), (2, 4, 5), (4, 1, 4), (2, 3, 7)))
    out, saved = multi_head_attention_forward(
        params, x_q, x_kv, mask=length_mask([2, 4]), bias=bias, softcap=3.0, dropout=Dropout(0.2, 1), rotary=Rotary(size=2)
    )
    return out, multi_head_attention_backward(dout, saved)


def test_every_library(library, to_xp):
    expected = _call(lambda x, dtype: x)
    call = functools.partial(_call, to_xp)
    if library.name == "jax":  # one by one, its operations take ten times as long
        call = pytest.importorskip("jax").jit(call)
    got = call()
    assert type(got[1]) is type(expected[1])
    for (name, g), e in zip(tree_items(got), tree_leaves(expected), strict=True):
        assert library.device is None or g.device == library.device
        np.testing.assert_allclose(to_numpy(g), e, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 3e-6), ("float16", 1e-2), ("bfloat16", 8e-2)])
def test_dtype(name, dtype, rtol):
    if name == "torch":
        pytest.importorskip("torch")
    library = open_library(name)
    if not library.has(dtype):
        pytest.skip(f"{name} has no {dtype}")
    expected = _call(lambda x, dtype: x)
    got = _call(lambda x, dtype: asarray(x, library, dtype=dtype), dtype)
    one = asarray([1.0], library, dtype=dtype)
    for (path, g), e in zip(tree_items(got), tree_leaves(expected), strict=True):
        assert g.dtype == one.dtype
        np.testing.assert_allclose(to_numpy(g), e, rtol=rtol, atol=rtol * np.abs(e).max(), err_msg=path)


def test_inside_jit():
    """All of it, forward and backward, parameters and gradients as trees."""
    jax = pytest.importorskip("jax")
    library = open_library("jax")
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=4, heads=2, sinks=True)
    x, dout = rng.standard_normal((2, 2, 3, 4))

    def run(params, x, dout):
        out, saved = multi_head_attention_forward(params, x, x, mask=causal_mask(), dropout=Dropout(0.2, 1))
        return out, multi_head_attention_backward(dout, saved)

    got = jax.jit(run)(*(tree_map(lambda x: asarray(x, library), tree) for tree in (params, x, dout)))
    expected = run(params, x, dout)
    assert type(got[1].dparams) is MultiHeadParams
    for g, e in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(g), e, rtol=1e-11, atol=1e-12)


IN_32_BITS = """
import jax, jax.numpy as jnp, numpy as np
from npattn import *
params = MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2, sinks=True, xp=jnp)
assert params.w_q.dtype == jnp.float32
x = jnp.ones((2, 3, 4), dtype=jnp.float32)
def run(params, x):
    mask = causal_mask([0, 2**40]) & length_mask([2, 3]) | segment_mask([0, 0, 1])
    bias, dropout = relative_bias(jnp.ones((8, 2), dtype=jnp.float32)), Dropout(0.2, 2**50, origin=(2**40,))
    out, saved = multi_head_attention_forward(params, x, x, mask=mask, bias=bias, softcap=2.0, dropout=dropout)
    return out, multi_head_attention_backward(out, saved)
for results in (run(params, x), jax.jit(run)(params, x)):
    assert {str(y.dtype) for y in jax.tree_util.tree_leaves(results)} == {"float32"}
    assert all(bool(jnp.isfinite(y).all()) for y in jax.tree_util.tree_leaves(results))
"""


def test_jax_as_it_comes():
    """Without 64-bit numbers, which are a setting of the whole process; and without a warning."""
    pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-W", "error", "-c", IN_32_BITS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("itself", [True, False])
def test_nothing_is_written_or_shared(itself):
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=4, heads=2, sinks=True)
    x_q, dout, bias = rng.standard_normal((3, 4)), rng.standard_normal((3, 4)), rng.standard_normal((2, 3, 3))
    x_kv = x_q if itself else rng.standard_normal((3, 4))
    inputs = [*tree_leaves(params), x_q, dout, bias, *([] if itself else [x_kv])]
    for x in inputs:
        x.flags.writeable = False
    out, saved = multi_head_attention_forward(params, x_q, x_kv, bias=bias)
    grads = multi_head_attention_backward(dout, saved)
    results = [out, *tree_leaves(grads)]
    for n, x in enumerate(results):
        assert not any(np.shares_memory(x, y) for y in [*inputs, *results[n + 1 :]])
    out += x_q  # the caller's own, before backward too
    for got, expected in zip(tree_leaves(multi_head_attention_backward(dout, saved)), tree_leaves(grads), strict=True):
        np.testing.assert_array_equal(got, expected)


# Errors ------------------------------------------------------------------------------------------------------------------------

PARAMS = MultiHeadParams.init(
    np.random.default_rng(0), width=6, heads=4, kv_heads=2, head_size=3, value_size=5, kv_width=7, out_width=8, sinks=True
)
X_Q, X_KV = np.ones((2, 3, 6)), np.ones((2, 4, 7))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x_q": X_KV}, ValueError, r"w_q must have shape \(C, H, D\) with C = 7 as x_q has, got \(6, 4, 3\)"),
        ({"x_kv": X_Q}, ValueError, r"w_k must have shape \(C, K, D\) with C = 6 as x_kv has, got \(7, 2, 3\)"),
        ({"x_q": np.ones(6)}, ValueError, r"x_q must have shape \(..., T, C\), got \(6,\)"),
        ({"x_kv": np.ones(7)}, ValueError, r"x_kv must have shape \(..., S, C\), got \(7,\)"),
        ({"w_q": np.ones((6, 12))}, ValueError, r"w_q must have shape \(C, H, D\), got \(6, 12\)"),
        ({"w_k": np.ones((7, 2, 4))}, ValueError, r"w_k must have shape \(C, K, D\) with D = 3 as w_q has, got \(7, 2, 4\)"),
        ({"w_v": np.ones((7, 3, 5))}, ValueError, r"w_v must have shape \(C, K, E\) with K = 2 as w_k has, got \(7, 3, 5\)"),
        ({"w_v": np.ones((6, 2, 5))}, ValueError, r"w_v must have shape \(C, K, E\) with C = 7 as x_kv has"),
        ({"w_o": np.ones((4, 3, 8))}, ValueError, r"w_o must have shape \(H, E, C\) with E = 5 as w_v has, got \(4, 3, 8\)"),
        ({"w_o": np.ones((2, 5, 8))}, ValueError, r"w_o must have shape \(H, E, C\) with H = 4 as w_q has"),
        ({"b_q": np.ones((4, 5))}, ValueError, r"b_q must have shape \(H, D\) with D = 3 as w_q has, got \(4, 5\)"),
        ({"b_k": np.ones((4, 3))}, ValueError, r"b_k must have shape \(K, D\) with K = 2 as w_k has"),
        ({"b_v": np.ones(10)}, ValueError, r"b_v must have shape \(K, E\), got \(10,\)"),
        ({"b_o": np.ones(7)}, ValueError, r"b_o must have shape \(C,\) with C = 8 as w_o has, got \(7,\)"),
        ({"sinks": np.ones(2)}, ValueError, r"sinks must have shape \(H,\) with H = 4 as w_q has, got \(2,\)"),
        ({"x_q": X_Q.astype(np.float32)}, TypeError, "x_q is float32 but x_kv is float64; all float arrays of a call must share"),
        ({"w_v": PARAMS.w_v.astype(np.float32)}, TypeError, "x_q is float64 but w_v is float32; all float arrays of a call must"),
        ({"w_k": PARAMS.w_k.astype(int)}, TypeError, "w_k must have a floating dtype"),
        ({"x_q": X_Q.tolist()}, TypeError, "x_q must be an array"),
        (
            {"b_v": asarray(PARAMS.b_v, open_library("strict"))},
            TypeError,
            "x_q is an array of numpy but b_v is one of array_api_strict",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit(changes, error, message):
    x_q, x_kv = changes.pop("x_q", X_Q), changes.pop("x_kv", X_KV)
    params = PARAMS._replace(**changes)
    for op in (multi_head_attention, multi_head_attention_forward):
        with pytest.raises(error, match=f"^multi_head_attention: {message}"):
            op(params, x_q, x_kv)


def test_head_counts_that_do_not_divide():
    params = PARAMS._replace(w_k=np.ones((7, 3, 3)), w_v=np.ones((7, 3, 5)), b_k=None, b_v=None)
    with pytest.raises(ValueError, match="H query heads must be a multiple of K key/value heads, got H = 4 and K = 3"):
        multi_head_attention(params, X_Q, X_KV)


@pytest.mark.parametrize(
    "dout",
    [np.ones((2, 3, 7)), np.ones((3, 8)), np.ones((2, 3, 8), np.float32), np.ones((2, 3, 8)).tolist()],
    ids=["width", "rank", "dtype", "list"],
)
def test_cotangents_that_do_not_fit(dout):
    _, saved = multi_head_attention_forward(PARAMS, X_Q, X_KV)
    with pytest.raises((ValueError, TypeError), match="^m.*_backward: dout "):
        multi_head_attention_backward(dout, saved)
