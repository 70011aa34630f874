"""No floating-point warning comes out of attention, whatever overflows or underflows in it or in the rounding of its results."""

import numpy as np
import pytest

from npattn import (
    AttentionTangents,
    Dropout,
    alibi_bias,
    attention,
    attention_backward,
    attention_backward_jvp,
    attention_forward,
    attention_jvp,
    causal_mask,
    merge_attention_backward,
    merge_attention_forward,
)
from npattn._attention.tiling import Sizes, forced
from tests.attention.paths import PATHS

H, T, S, D = 2, 5, 6, 3
OPTIONS = {
    "bare": lambda _: {},
    "mask, sinks": lambda draw: {"mask": causal_mask(-1), "sinks": draw(H)},
    "dense bias": lambda draw: {"bias": draw(H, T, S)},
    "lazy bias": lambda draw: {"bias": alibi_bias(draw(H))},
    "softcap, dropout": lambda _: {"softcap": 2.0, "dropout": Dropout(0.3, 1)},
}
SIZES = {"float64": (1e-300, 1.0, 1e200), "float32": (1e-38, 1.0, 1e30), "float16": (1e-6, 1.0, 2e4)}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("dtype", SIZES)
def test_no_floating_point_warning(dtype, kind, path):
    rng = np.random.default_rng(0)
    for size in SIZES[dtype]:

        def draw(*shape, size=size):
            return np.clip(size * rng.standard_normal(shape), -np.finfo(dtype).max, np.finfo(dtype).max).astype(dtype)

        cotangents = np.asarray(SIZES[dtype]).astype(dtype)
        q, k, v, options = draw(H, T, D), draw(H, S, D), draw(H, S, D), OPTIONS[kind](draw)
        tangents = AttentionTangents(draw(H, T, D), draw(H, S, D), draw(H, S, D))
        with forced(PATHS[path]), np.errstate(all="raise"):
            attention(q, k, v, **options)
            _, saved = attention_forward(q, k, v, **options)
            attention_jvp(q, k, v, tangents, **options)
            for cotangent in cotangents:
                dout, dlse = np.broadcast_to(cotangent, saved.out.shape), np.ones_like(saved.lse)
                attention_backward(dout, saved, dlse=dlse)
                attention_backward_jvp(dout, saved, tangents, dlse=dlse)


def test_what_several_jobs_share_may_overflow_in_the_end():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 4), dtype=np.float32)
    dout = np.full((1, 16, 4), 3e38, np.float32)
    sinks = np.zeros(1, np.float32)
    with forced(Sizes(rows=2, keys=16, pairs=32, plain=False, keep=False)), np.errstate(all="raise"):
        _, saved = attention_forward(q, k, v, sinks=sinks, bias=q[0] @ k[0].T)
        grads = attention_backward(dout, saved)
    assert np.isinf(grads.dv).any()  # every job's share is finite, their sum is not


@pytest.mark.parametrize("dtype", SIZES)
def test_merging(dtype):
    compute = np.result_type(dtype, np.float32)
    for size in SIZES[dtype]:
        parts = [(np.full((H, T, D), x * size, dtype), np.full((H, T), x * size, compute)) for x in (1, -2, 3)]
        cotangents = [(np.full((H, T, D), x, dtype), np.full((H, T), x, compute)) for x in SIZES[dtype]]
        with np.errstate(all="raise"):
            _, saved = merge_attention_forward(parts)
            for dout, dlse in cotangents:
                merge_attention_backward(dout, saved, dlse=dlse)
