"""Blocks and models of random shapes: axes, heads, biases, norms, masks and options as they come."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from npattn import Dropout, Rotary, causal_mask, causal_mask_end, length_mask, window_mask
from npattn._arrays.trees import tree_leaves
from npattn.models import (
    BlockConfig,
    DecoderBlockParams,
    EmbeddingConfig,
    LanguageModelConfig,
    LanguageModelParams,
    decoder_block_backward,
    decoder_block_forward,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import open_library, to_numpy
from tests.models.cases import Arguments, Case, randomised
from tests.models.test_laws import autodiff_by_torch, cotangent, run, to

# Where a norm is narrow or its eps is small, results bend within a step of differences; there is autodiff for that.
ordinary = {"eps": st.just(0.1), "scale": st.none() | st.floats(0.1, 0.5), "softcap": st.none() | st.floats(2, 5)}
rotaries = st.tuples(st.floats(2, 1e4), st.sampled_from(["halves", "interleaved"])).map(
    lambda drawn: Rotary(base=drawn[0], pairs=drawn[1], size=2)
)


def configs(**options: Any) -> st.SearchStrategy[BlockConfig]:
    rest: dict[str, Any] = {
        "norm_order": st.sampled_from(["pre", "post"]),
        "norm": st.sampled_from(["layer", "rms"]),
        "eps": st.sampled_from([1e-6, 1e-5, 1e-2]),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "silu"]),  # relu bends at once where differences look
        "rotary": st.none() | rotaries,
        "window": st.none() | st.integers(0, 3),
        "scale": st.none() | st.floats(0.1, 1.5),
        "softcap": st.none() | st.floats(1, 5),
    }
    return st.builds(BlockConfig, **{**rest, **options})


@st.composite
def sizes_of_blocks(draw: Any, least_width: int = 2) -> dict[str, Any]:
    """Options of a block's ``init``."""
    heads = draw(st.integers(1, 4))
    groups = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    return {
        "width": draw(st.integers(least_width, 7)),
        "heads": heads,
        "kv_heads": groups,
        "head_size": draw(st.integers(2, 4)),
        "hidden": draw(st.integers(1, 7)),
        "gated": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "sinks": draw(st.booleans()),
    }


masks = st.sampled_from([None, causal_mask(), causal_mask_end(), window_mask(1, 0), length_mask([2, 1])])
dropouts = st.none() | st.tuples(st.floats(0, 0.6), st.integers(0, 9)).map(lambda drawn: Dropout(*drawn))


@st.composite
def decoder_blocks(draw: Any, config: st.SearchStrategy[BlockConfig], sizes: st.SearchStrategy[dict[str, Any]]) -> Case:
    """A decoder block has all the parts of an encoder block, and more."""
    settings, options = draw(config), draw(sizes)
    queries, keys, memory_width = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    masked = {"mask": draw(masks), "memory_mask": draw(masks), "dropout": draw(dropouts)}

    def arguments(rng: np.random.Generator) -> Arguments:
        params = randomised(DecoderBlockParams.init(rng, **options, memory_width=memory_width, config=settings), rng)
        x, memory = rng.standard_normal((2, queries, options["width"])), rng.standard_normal((2, keys, memory_width))
        return {"params": params, "x": x, "memory": memory}

    def forward(params: Any, x: Any, memory: Any) -> Any:
        return decoder_block_forward(params, x, memory, **masked, config=settings)

    return Case("decoder_block", forward, decoder_block_backward, arguments)


@st.composite
def language_models(draw: Any, config: st.SearchStrategy[BlockConfig], sizes: st.SearchStrategy[dict[str, Any]]) -> Case:
    whole = LanguageModelConfig(draw(config), EmbeddingConfig(draw(st.sampled_from(["learned", "sinusoidal", "none"]))))
    options, length = draw(sizes), draw(st.integers(1, 5))
    called = {
        "positions": 1,
        "mask": draw(masks),
        "dropout": draw(dropouts),
        "label_smoothing": draw(st.sampled_from([0.0, 0.2])),
    }
    tied = draw(st.booleans())

    def arguments(rng: np.random.Generator) -> Arguments:
        drawn = LanguageModelParams.init(rng, vocabulary=7, blocks=1, context=6, tied=tied, config=whole, **options)
        ids, targets = rng.integers(0, 7, (2, 2, length))
        return {"params": randomised(drawn, rng), "ids": ids, "targets": targets}

    def forward(params: Any, ids: Any, targets: Any) -> Any:
        return language_model_loss_forward(params, ids, targets, **called, config=whole)

    return Case("language_model", forward, language_model_loss_backward, arguments)


seeds = st.integers(0, 99)


@settings(max_examples=20)
@given(decoder_blocks(configs(**ordinary), sizes_of_blocks(5)) | language_models(configs(**ordinary), sizes_of_blocks(5)), seeds)
def test_differences(case, seed):
    check_backward(case.forward, case.backward, case.draw(np.random.default_rng(seed)), directions=1, step=1e-4)


@settings(max_examples=30)
@given(decoder_blocks(configs(), sizes_of_blocks()) | language_models(configs(), sizes_of_blocks()), seeds)
def test_autodiff_of_our_forward(case, seed):
    arguments = case.draw(np.random.default_rng(seed))
    out, grads = run(case, arguments)
    assert all(np.isfinite(x).all() for x in tree_leaves(grads))
    if find_spec("torch") is None:
        return
    library = open_library("torch")
    theirs = autodiff_by_torch(case, to(arguments, library), library.xp.asarray(cotangent(case, out)))
    assert theirs.keys() == grads.keys()
    size = max(np.abs(g).max(initial=0) for g in grads.values())
    for name, g in grads.items():
        np.testing.assert_allclose(to_numpy(theirs[name]), g, rtol=1e-9, atol=1e-12 * size, err_msg=name)
