"""Reading piece by piece: any way to cut a sequence gives what the whole gives, on every library, padded or not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from npattn import Rotary, alibi_bias, attention, causal_mask, length_mask, relative_bias, tree_map
from npattn._arrays.trees import tree_leaves
from npattn.models import (
    BlockConfig,
    EmbeddingConfig,
    EncoderDecoderConfig,
    EncoderDecoderParams,
    KeyValueCache,
    LanguageModelConfig,
    LanguageModelParams,
    _step,
    encoder_decoder,
    encoder_decoder_start,
    encoder_decoder_step,
    language_model,
    language_model_step,
)
from npattn.testing.libraries import Unavailable, asarray, open_library, to_numpy
from tests.models.cases import randomised

VOCABULARY, WIDTH, T = 11, 12, 9
NONE = EmbeddingConfig(positions="none")

MODELS: dict[str, tuple[LanguageModelConfig, dict[str, Any]]] = {
    "gpt2": (LanguageModelConfig(BlockConfig(activation="gelu_tanh")), {}),
    "post": (
        LanguageModelConfig(BlockConfig("post", activation="relu"), EmbeddingConfig("sinusoidal", scale=2.0)),
        {"tied": False},
    ),
    "llama": (
        LanguageModelConfig(BlockConfig(norm="rms", activation="silu", rotary=Rotary(base=100.0)), NONE),
        {"kv_heads": 2, "head_size": 4, "gated": True, "bias": False},
    ),
    "mistral": (
        LanguageModelConfig(
            BlockConfig(norm="rms", activation="silu", rotary=Rotary(pairs="interleaved", size=2), window=2), NONE
        ),
        {"kv_heads": 1, "gated": True, "bias": False},
    ),
    "gemma": (LanguageModelConfig(BlockConfig(softcap=2.0, scale=0.7, window=(1, None))), {"sinks": True, "head_size": 5}),
    "narrow": (LanguageModelConfig(BlockConfig(window=0)), {"sinks": True, "kv_heads": 2}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def model(name: str, **options: Any) -> tuple[Any, LanguageModelConfig]:
    config, sizes = MODELS[name]
    rng = np.random.default_rng(0)
    all_sizes: dict[str, Any] = {"vocabulary": VOCABULARY, "blocks": 3, "width": WIDTH, "heads": 4, "context": 16}
    return randomised(LanguageModelParams.init(rng, **{**all_sizes, **sizes, **options}, config=config), rng), config


def tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, shape)


def in_pieces(params: Any, ids: Any, cuts: Any, config: Any, starts: Any = None, **options: Any) -> np.ndarray:
    cache = KeyValueCache.init(params, capacity=ids.shape[-1], batch=ids.shape[:-1], starts=starts)
    found, at = [], 0
    for count in cuts:
        logits, cache = language_model_step(params, ids[..., at : at + count], cache, config=config, **options)
        found.append(to_numpy(logits))
        at += count
    assert cache.length == at == ids.shape[-1]
    return np.concatenate(found, axis=-2)


CUTS = [(T,), (1,) * T, (4, 5), (4, 1, 1, 3), (0, 8, 1), (1, 0, 7, 1)]


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * max(1.0, float(np.abs(expected).max())))


@every_model
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_any_split_is_the_whole(name, cuts):
    params, config = model(name)
    ids = tokens(2, T)
    close(in_pieces(params, ids, cuts, config), language_model(params, ids, config=config))


@every_model
def test_every_split_of_six(name):
    """All 32 ways to cut six tokens, without a batch."""
    params, config = model(name, blocks=2)
    ids = tokens(6)
    whole = language_model(params, ids, config=config)
    for ends in itertools.product([False, True], repeat=5):
        edges = [0, *(n + 1 for n, end in enumerate(ends) if end), 6]
        close(in_pieces(params, ids, np.diff(edges), config), whole)


@pytest.mark.parametrize(
    "bias", [alibi_bias(np.asarray([0.5, 0.2, 0.1, 0.3])), relative_bias(np.ones((8, 1)).cumsum(0))], ids=repr
)
def test_biases_move_along(bias):
    params, config = model("llama")
    ids = tokens(2, T)
    for cuts in CUTS:
        close(in_pieces(params, ids, cuts, config, bias=bias), language_model(params, ids, bias=bias, config=config))
    with pytest.raises(TypeError, match="bias must be an alibi_bias or a relative_bias"):
        in_pieces(params, ids, (T,), config, bias=np.zeros((T, T)))


@every_model
@pytest.mark.parametrize("rows", [0, 1000])
def test_both_ways_through_the_layers_agree(name, rows, monkeypatch):
    """Few rows or many: the same numbers, and the same memory for results."""
    params, config = model(name)
    ids = tokens(3, T)
    monkeypatch.setattr(_step, "ROWS", rows)
    close(in_pieces(params, ids, CUTS[3], config), language_model(params, ids, config=config))


@pytest.mark.parametrize("name", ["gpt2", "mistral", "gemma"])
def test_every_library(name, library, to_xp):
    params, config = model(name, blocks=2)
    ids = tokens(2, T)
    theirs = tree_map(to_xp, params)
    expected = language_model(params, ids, config=config)
    close(in_pieces(theirs, to_xp(ids), CUTS[3], config), expected)
    close(in_pieces(theirs, ids, CUTS[2], config), expected)  # tokens on the host


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes(dtype, library):
    if not library.has(dtype):
        pytest.skip(f"{library.name} has no {dtype}")
    params, config = model("llama", blocks=1)
    theirs = tree_map(lambda x: asarray(x, library, dtype=dtype), params)
    ids = tokens(2, T)
    whole = language_model(theirs, ids, config=config)
    cache = KeyValueCache.init(theirs, capacity=T, batch=(2,))
    logits, _ = language_model_step(theirs, ids, cache, config=config)
    assert logits.dtype == whole.dtype
    tolerance = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-1}[dtype] * float(np.abs(to_numpy(whole)).max())
    np.testing.assert_allclose(in_pieces(theirs, ids, CUTS[3], config), to_numpy(whole), rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma"])
def test_one_compiled_step_for_every_position(name):
    try:
        library = open_library("jax")
    except Unavailable as reason:
        pytest.skip(str(reason))
    import jax

    params, config = model(name, blocks=1)
    theirs = tree_map(lambda x: asarray(x, library), params)
    ids, traced = tokens(2, T), 0

    @jax.jit
    def step(ids: Any, cache: Any) -> Any:
        nonlocal traced
        traced += 1
        return language_model_step(theirs, ids, cache, config=config)

    cache = KeyValueCache.init(theirs, capacity=T + 3, batch=(2,))._replace(length=library.xp.asarray(0))
    found = []
    for n in range(T):
        logits, cache = step(asarray(ids[:, n : n + 1], library), cache)
        found.append(to_numpy(logits))
    close(np.concatenate(found, axis=-2), language_model(params, ids, config=config))
    assert traced == 1


# Padding ---------------------------------------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("cuts", [(T,), (1,) * T, (5, 1, 3)], ids=str)
def test_padding_in_front_changes_nothing(name, cuts):
    params, config = model(name)
    starts = np.asarray([0, 3, 6, 8])
    ids = tokens(4, T)
    together = in_pieces(params, ids, cuts, config, starts)
    for row, start, logits in zip(ids, starts, together, strict=True):
        close(logits[start:], language_model(params, row[start:], config=config))


def test_padding_is_not_seen_even_if_it_is_nan():
    params, config = model("llama")
    starts, ids = np.asarray([0, 3]), tokens(2, T)
    cache = KeyValueCache.init(params, capacity=T, batch=(2,), starts=starts)
    _, cache = language_model_step(params, ids[:, :5], cache, config=config)
    for x in (*cache.keys, *cache.values):
        x[1, :, :3] = np.nan
    logits, _ = language_model_step(params, ids[:, 5:], cache, config=config)
    close(logits[1], language_model(params, ids[1, 3:], config=config)[2:])


def test_padding_on_every_library(library, to_xp):
    params, config = model("mistral", blocks=2)
    ids = tokens(2, T)
    theirs = tree_map(to_xp, params)
    for starts in ([0, 4], np.asarray([0, 4]), to_xp(np.asarray([0, 4]))):
        together = in_pieces(theirs, to_xp(ids), (6, 1, 2), config, starts)
        close(together[1, 4:], language_model(params, ids[1, 4:], config=config))


# The cache -------------------------------------------------------------------------------------------------------------------


def test_it_is_written_to_where_that_can_be_done(library, to_xp):
    params, config = model("gpt2", blocks=1)
    theirs = tree_map(to_xp, params)
    cache = KeyValueCache.init(theirs, capacity=4, batch=(2,))
    _, after = language_model_step(theirs, to_xp(tokens(2, 2)), cache, config=config)
    written = library.name in ("numpy", "torch", "cupy")
    assert (after.keys[0] is cache.keys[0]) == written
    assert (np.abs(to_numpy(cache.keys[0])).sum() > 0) == written
    assert (cache.length, after.length) == (0, 2)
    assert not to_numpy(after.values[0])[:, :, 2:].any()


def test_a_copy_goes_its_own_way():
    params, config = model("gpt2", blocks=2)
    ids = tokens(2, T)
    cache = KeyValueCache.init(params, capacity=T, batch=(2,))
    _, cache = language_model_step(params, ids[:, :5], cache, config=config)
    other = cache.select([1, 1, 0])
    assert not any(np.shares_memory(a, b) for a, b in zip(cache.keys, other.keys, strict=True))
    language_model_step(params, tokens(3, 4), other, config=config)
    logits, _ = language_model_step(params, ids[:, 5:], cache, config=config)
    close(logits, language_model(params, ids, config=config)[:, 5:])
    turned, _ = language_model_step(params, ids[[1, 1, 0], 5:], other, config=config)
    close(turned, language_model(params, ids, config=config)[[1, 1, 0], 5:])


def test_parameters_and_tokens_are_not_written_to():
    params, config = model("mistral")
    for x in tree_leaves(params):
        x.flags.writeable = False
    ids = tokens(2, T)
    ids.flags.writeable = False
    in_pieces(params, ids, CUTS[3], config)


def test_what_does_not_fit():
    params, config = model("gpt2")
    cache = KeyValueCache.init(params, capacity=4, batch=(2,))
    with pytest.raises(ValueError, match=r"language_model_step: the cache has room for 4 positions, and 0 \+ 5 are too many"):
        language_model_step(params, tokens(2, 5), cache, config=config)
    with pytest.raises(ValueError, match=r"the cache is for tokens of shape \(2, T\), got \(3, 1\)"):
        language_model_step(params, tokens(3, 1), cache, config=config)
    with pytest.raises(ValueError, match=r"KeyValueCache.init: starts must have shape \(2,\) as the batch, got \(3,\)"):
        KeyValueCache.init(params, capacity=4, batch=(2,), starts=[0, 1, 2])
    with pytest.raises(TypeError, match="integer"):
        KeyValueCache.init(params, capacity=4, batch=(2,), starts=[0.0, 1.0])
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        KeyValueCache.init(params, capacity=0)
    long = KeyValueCache.init(params, capacity=20, batch=(1,))._replace(length=16)
    with pytest.raises(ValueError, match="there are 16 learned positions"):
        language_model_step(params, tokens(1, 1), long, config=config)


def test_case_8():
    """Six causal queries: all at once, four cached and two new, six single steps; with an empty cache as well."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 6, 4))
    whole = attention(q, k, v, mask=causal_mask())
    for ends in itertools.product([False, True], repeat=5):
        edges = [0, *(n + 1 for n, end in enumerate(ends) if end), 6]
        parts = [
            attention(q[:, a:b], k[:, :b], v[:, :b], mask=causal_mask(offset=a)) for a, b in itertools.pairwise([0, *edges])
        ]  # the first has no queries and no keys
        np.testing.assert_allclose(np.concatenate(parts, axis=-2), whole, rtol=0, atol=1e-12)


# Encoder and decoder ---------------------------------------------------------------------------------------------------------

TRANSLATORS: dict[str, tuple[EncoderDecoderConfig, dict[str, Any]]] = {
    "post": (EncoderDecoderConfig(BlockConfig("post"), BlockConfig("post")), {}),
    "pre": (
        EncoderDecoderConfig(embedding=EmbeddingConfig("sinusoidal")),
        {"tied": False, "target_vocabulary": 7, "kv_heads": 2},
    ),
    "gated": (
        EncoderDecoderConfig(BlockConfig(norm="rms"), BlockConfig(norm="rms", softcap=2.0, window=3)),
        {"gated": True, "sinks": True},
    ),
}


@pytest.mark.parametrize("name", TRANSLATORS)
@pytest.mark.parametrize("cuts", [(6,), (1,) * 6, (2, 0, 4)], ids=str)
def test_the_target_in_pieces(name, cuts):
    check_translator(name, cuts, lambda x: x)


def test_the_target_in_pieces_on_every_library(library, to_xp):
    check_translator("gated", (2, 0, 1, 3), to_xp)


def check_translator(name: str, cuts: tuple[int, ...], to_xp: Any) -> None:
    config, options = TRANSLATORS[name]
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"vocabulary": VOCABULARY, "context": 9, "blocks": 2, "width": WIDTH, "heads": 4}
    params = randomised(EncoderDecoderParams.init(rng, **{**sizes, **options}, config=config), rng)
    source, target = tokens(2, 8), np.random.default_rng(2).integers(0, 7, (2, 6))
    masks: dict[str, Any] = {"source_mask": length_mask([8, 3]), "memory_mask": length_mask([8, 3])}
    whole = encoder_decoder(params, source, target, **masks, config=config)
    theirs = tree_map(to_xp, params)
    cache = encoder_decoder_start(theirs, to_xp(source), capacity=6, **masks, config=config)
    found, at = [], 0
    for count in cuts:
        logits, cache = encoder_decoder_step(theirs, to_xp(target[:, at : at + count]), cache, config=config)
        found.append(to_numpy(logits))
        at += count
    close(np.concatenate(found, axis=-2), whole)
