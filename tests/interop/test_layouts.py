"""Round trips, what does not fit, masks: all that needs no other library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npattn import MultiHeadParams, Rotary, causal_mask, interop, tree_map
from npattn._arrays.trees import tree_items
from npattn.interop import BertConfig, BertParams, Exported, TorchTransformerParams
from npattn.models import (
    BlockConfig,
    DecoderBlockParams,
    DecoderParams,
    EmbeddingConfig,
    EncoderBlockParams,
    EncoderDecoderConfig,
    EncoderParams,
    LanguageModelConfig,
    LanguageModelParams,
    TokenEmbeddingParams,
    encoder,
    language_model,
)
from tests.models.cases import randomised


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    ours, theirs = dict(tree_items(got)), dict(tree_items(expected))
    assert list(ours) == list(theirs)
    for name, x in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (x.dtype, x.shape), name
        np.testing.assert_array_equal(ours[name], x, err_msg=name)


def drawn(kind: Any, **options: Any) -> Any:
    rng = np.random.default_rng(0)
    return randomised(kind.init(rng, **{"width": 6, "heads": 3, **options}), rng)


def embedding(**options: Any) -> Any:
    rng = np.random.default_rng(1)
    return randomised(TokenEmbeddingParams.init(rng, vocabulary=7, width=6, **options), rng)


POST = BlockConfig("post", activation="relu", eps=1e-6)
RMS = BlockConfig(norm="rms", activation="silu", rotary=Rotary(base=5e5), eps=1e-6, window=3)
LLAMA = LanguageModelConfig(RMS, EmbeddingConfig(positions="none"))
META = LanguageModelConfig(
    RMS._replace(rotary=Rotary(base=100.0, pairs="interleaved"), window=None), EmbeddingConfig(positions="none")
)
GPT2 = LanguageModelConfig(BlockConfig(activation="gelu_tanh"))
BERT = BertConfig(EmbeddingConfig(eps=1e-12), BlockConfig("post", eps=1e-12))
LLAMA_SIZES = {"vocabulary": 7, "blocks": 2, "heads": 3, "kv_heads": 1, "head_size": 4, "gated": True, "bias": False}


def settings(exported: Exported) -> dict[str, Any]:
    """What the state dict does not say, as PyTorch's constructors call it."""
    found = exported.settings
    return {
        "heads": found["nhead"],
        "norm_first": found["norm_first"],
        "activation": found["activation"],
        "eps": found["layer_norm_eps"],
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_torch_layers_and_stacks_come_back(norm_order, bias, dtype):
    config = POST._replace(norm_order=norm_order)
    one, both, stacks = {"bias": bias}, {"bias": bias}, {"bias": bias, "blocks": 3, "last_norm": norm_order == "pre"}
    cases: list[tuple[Any, str]] = [
        (drawn(EncoderBlockParams, **one), "encoder_layer"),
        (drawn(DecoderBlockParams, **both), "decoder_layer"),
        (drawn(EncoderParams, **stacks), "encoder"),
        (drawn(DecoderParams, **stacks), "decoder"),
    ]
    for own, name in cases:
        params = tree_map(lambda x: x.astype(dtype), own)
        exported = getattr(interop, f"to_torch_{name}")(params, config)
        back = getattr(interop, f"from_torch_{name}")(exported.state, **settings(exported))
        same(back.params, params)
        assert back.config == config


def test_torch_transformer_comes_back():
    params = TorchTransformerParams(drawn(EncoderParams, blocks=2), drawn(DecoderParams, blocks=3))
    config = EncoderDecoderConfig(BlockConfig(), BlockConfig())
    exported = interop.to_torch_transformer(params, config)
    assert (exported.settings["num_encoder_layers"], exported.settings["num_decoder_layers"]) == (2, 3)
    back = interop.from_torch_transformer(exported.state, **settings(exported))
    same(back.params, params)
    assert back.config == config


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kv_width": 5}, {"kv_width": 5, "bias": False}],
    ids=["whole", "bare", "cross", "bare cross"],
)
@pytest.mark.parametrize("kind", ["torch", "flax", "keras", "equinox"])
def test_attention_comes_back(kind, options):
    params = drawn(MultiHeadParams, **options)
    exported = getattr(interop, f"to_{kind}_attention")(params)
    heads = {"heads": 3} if kind in ("torch", "equinox") else {}
    back = getattr(interop, f"from_{kind}_attention")(exported.state, **heads)
    same(back.params, params)


@pytest.mark.parametrize("kind", ["flax", "keras"])
def test_grouped_heads_come_back(kind):
    params = drawn(MultiHeadParams, kv_heads=1, head_size=4, value_size=5, out_width=8)
    same(getattr(interop, f"from_{kind}_attention")(getattr(interop, f"to_{kind}_attention")(params).state).params, params)


def test_sinks_of_0_are_a_zero_key():
    params = drawn(MultiHeadParams)._replace(sinks=np.zeros(3))
    assert interop.to_torch_attention(params).settings["add_zero_attn"]
    with pytest.raises(ValueError, match="no place for: sinks"):
        interop.to_torch_attention(params._replace(sinks=np.ones(3)))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_comes_back(tied):
    params = drawn(LanguageModelParams, vocabulary=7, context=5, blocks=2, tied=tied)
    state, settings = interop.to_gpt2(params, GPT2)
    back = interop.from_gpt2({f"transformer.{n}": x for n, x in state.items()}, config=settings)
    same(back.params, params)
    assert back.config == GPT2


def test_bert_comes_back():
    pooled = {"w_pool": np.random.default_rng(2).standard_normal((6, 6)), "b_pool": np.ones(6)}
    for pool in ({}, pooled):
        params = BertParams(embedding(context=5, types=2, norm=True), drawn(EncoderParams, blocks=2, last_norm=False), **pool)
        state, settings = interop.to_bert(params, BERT)
        back = interop.from_bert(state, config=settings)
        same(back.params, params)
        assert back.config == BERT


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_llama_comes_back(tied, bias):
    params = drawn(LanguageModelParams, config=LLAMA, **{**LLAMA_SIZES, "tied": tied})
    if bias:  # Qwen 2 has three
        biases = {"b_q": np.ones((3, 4)), "b_k": np.ones((1, 4)), "b_v": np.ones((1, 4))}
        params = params._replace(blocks=tuple(b._replace(attention=b.attention._replace(**biases)) for b in params.blocks))
    state, settings = interop.to_llama(params, LLAMA)
    assert settings["sliding_window"] == 4
    back = interop.from_llama({f"model.{n}": x for n, x in state.items()}, config=settings)
    same(back.params, params)
    assert back.config == LLAMA


def test_meta_llama_comes_back():
    params = drawn(LanguageModelParams, config=META, **{**LLAMA_SIZES, "tied": False})
    state, settings = interop.to_meta_llama(params, META)
    back = interop.from_meta_llama(state, config=settings)
    same(back.params, params)
    assert back.config == META


def test_the_two_kinds_of_rotary_positions_are_reordered():
    """The same logits, exactly the same weights after going there and back."""
    params = drawn(LanguageModelParams, config=META, **LLAMA_SIZES)
    ids = np.random.default_rng(0).integers(0, 7, (2, 5))
    halves = interop.from_llama(*interop.to_llama(params, META)[:1], config=interop.to_llama(params, META).settings)
    assert halves.config.block.rotary == Rotary(base=100.0)
    ours, theirs = language_model(params, ids, config=META), language_model(halves.params, ids, config=halves.config)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)
    with pytest.raises(AssertionError):  # and without reordering they differ
        np.testing.assert_allclose(ours, language_model(params, ids, config=halves.config), rtol=0, atol=1e-3)
    back = interop.from_meta_llama(interop.to_meta_llama(*halves).state, config=interop.to_meta_llama(*halves).settings)
    same(back.params, params)


def test_every_library_s_arrays(library, to_xp):
    """In from any library; out to NumPy."""
    params = drawn(EncoderBlockParams)
    state = interop.to_torch_encoder_layer(params, POST).state
    back = interop.from_torch_encoder_layer({n: to_xp(x) for n, x in state.items()}, heads=3)
    same(back.params, params)


def test_nothing_shares_memory():
    params = drawn(EncoderBlockParams)
    state = interop.to_torch_encoder_layer(params, POST).state
    back = interop.from_torch_encoder_layer(state, heads=3).params
    for name, x in tree_items(back):
        assert not any(np.shares_memory(x, y) for y in state.values()), name
    for y in state.values():
        assert not any(np.shares_memory(x, y) for _, x in tree_items(params))


# What does not fit -----------------------------------------------------------------------------------------------------------


def encoder_state() -> dict[str, Any]:
    return dict(interop.to_torch_encoder(drawn(EncoderParams, blocks=2), POST).state)


def test_missing_and_left_over_are_one_error():
    state = encoder_state()
    del state["layers.1.linear2.weight"], state["layers.0.norm2.bias"]
    state["head.weight"] = np.ones(2)
    with pytest.raises(ValueError, match="from_torch_encoder: ") as error:
        interop.from_torch_encoder(state, heads=3)
    assert str(error.value) == (
        "from_torch_encoder: these are not the names that it expects; missing: layers.0.norm2.bias, layers.1.linear2.weight; "
        "left over: head.weight"
    )


def test_the_function_that_would_fit_is_named():
    states = {
        "from_torch_encoder": encoder_state(),
        "from_torch_attention": interop.to_torch_attention(drawn(MultiHeadParams)).state,
        "from_torch_decoder_layer": interop.to_torch_decoder_layer(drawn(DecoderBlockParams), POST).state,
        "from_gpt2": interop.to_gpt2(drawn(LanguageModelParams, vocabulary=7, context=5, blocks=1), GPT2).state,
        "from_llama": interop.to_llama(drawn(LanguageModelParams, config=LLAMA, **LLAMA_SIZES), LLAMA).state,
        "from_meta_llama": interop.to_meta_llama(
            drawn(LanguageModelParams, config=META, **{**LLAMA_SIZES, "tied": False}), META
        ).state,
        "from_flax_attention": interop.to_flax_attention(drawn(MultiHeadParams)).state,
        "from_equinox_attention": interop.to_equinox_attention(drawn(MultiHeadParams, bias=False)).state,
    }
    for name, state in states.items():
        with pytest.raises(ValueError, match=f"from_bert: these are not .*; {name} would fit$"):
            interop.from_bert(state, config={"num_attention_heads": 3})
    params = BertParams(embedding(context=5, types=2, norm=True), drawn(EncoderParams, blocks=2, last_norm=False))
    state = interop.to_bert(params, BERT).state
    with pytest.raises(ValueError, match="left over: .*; from_bert would fit"):
        interop.from_torch_encoder(state, heads=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.0.linear1.weight": np.ones((24, 5))}, r"layers\.0\.linear1\.weight must have shape \(F, C\) with C = 6"),
        ({"layers.0.self_attn.in_proj_weight": np.ones((17, 6))}, r"in_proj_weight"),
        ({"layers.0.norm1.bias": np.ones(6, np.float32)}, "all float arrays of a call must share one dtype"),
        ({"layers.1.norm1.bias": np.ones((1, 6))}, r"layers\.1\.norm1\.bias must have shape \(C,\)"),
        ({"layers.1.norm1.bias": np.ones(6, int)}, "must have a floating dtype"),
    ],
)
def test_wrong_shapes_and_dtypes(change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        interop.from_torch_encoder({**encoder_state(), **change}, heads=3)


def test_settings_that_are_needed_or_wrong():
    state = encoder_state()
    with pytest.raises(ValueError, match="from_torch_encoder: heads is needed"):
        interop.from_torch_encoder(state)
    with pytest.raises(ValueError, match="which 4 heads cannot share"):
        interop.from_torch_encoder(state, heads=4)
    with pytest.raises(TypeError, match="the number of heads must be an integer"):
        interop.from_torch_encoder(state, heads="3")
    with pytest.raises(TypeError, match="expected a state dict"):
        interop.from_torch_encoder([1, 2], heads=3)
    with pytest.raises(ValueError, match="from_gpt2: config is needed"):
        interop.from_gpt2({})
    with pytest.raises(ValueError, match="from_llama: config has no num_attention_heads"):
        interop.from_llama({}, config={})
    with pytest.raises(ValueError, match="from_keras_attention: expected 8 arrays"):
        interop.from_keras_attention([np.ones(2)] * 3)


@pytest.mark.parametrize(
    ("function", "config", "words"),
    [
        (interop.from_gpt2, {"n_head": 3, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (interop.from_bert, {"num_attention_heads": 3, "position_embedding_type": "relative_key"}, "position_embedding_type"),
        (interop.from_llama, {"num_attention_heads": 3, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (interop.from_meta_llama, {"n_heads": 3, "use_scaled_rope": True}, "use_scaled_rope = True"),
    ],
)
def test_what_npattn_does_not_compute_is_refused(function, config, words):
    with pytest.raises(ValueError, match=words):
        function({}, config=config)


def test_rotary_positions_that_npattn_does_not_know():
    state, settings = interop.to_llama(drawn(LanguageModelParams, config=LLAMA, **LLAMA_SIZES), LLAMA)
    with pytest.raises(ValueError, match="of the kind 'llama3'"):
        interop.from_llama(state, config={**settings, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    stretched = interop.from_llama(state, config={**settings, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert stretched.config.block.rotary == Rotary(base=5e5, scale=0.25)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: interop.to_torch_encoder_layer(drawn(EncoderBlockParams), BlockConfig(window=2)), "have no window"),
        (lambda: interop.to_torch_encoder_layer(drawn(EncoderBlockParams), BlockConfig(rotary=Rotary())), "have no rotary"),
        (lambda: interop.to_torch_encoder_layer(drawn(EncoderBlockParams, kv_heads=1), POST), "as many key/value heads"),
        (
            lambda: interop.to_torch_encoder_layer(drawn(EncoderBlockParams, gated=True), POST),
            "no place for: feed_forward.b_gate",
        ),
        (lambda: interop.to_torch_encoder_layer(drawn(EncoderBlockParams, sinks=True), POST), "no place for: attention.sinks"),
        (lambda: interop.to_torch_attention(drawn(MultiHeadParams, head_size=5)), "H·D is the width"),
        (lambda: interop.to_equinox_attention(drawn(MultiHeadParams, kv_heads=1)), "as many key/value heads"),
        (lambda: interop.to_gpt2(drawn(LanguageModelParams, vocabulary=7, context=5, blocks=1), LLAMA), "has no norm, rotary"),
        (lambda: interop.to_llama(drawn(LanguageModelParams, vocabulary=7, context=5, blocks=1), GPT2), "config has none"),
        (
            lambda: interop.to_torch_transformer(
                TorchTransformerParams(drawn(EncoderParams, blocks=1), drawn(DecoderParams, blocks=1)),
                EncoderDecoderConfig(POST, BlockConfig()),
            ),
            "the same settings",
        ),
    ],
)
def test_what_the_other_library_cannot_hold_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Masks -----------------------------------------------------------------------------------------------------------------------


def test_masks_of_the_opposite_sign():
    future = np.triu(np.ones((4, 4), bool), 1)
    padding = np.asarray([[False, False, False, True], [False, False, True, True]])
    mask = interop.mask_from_torch(attn_mask=future, key_padding_mask=padding)
    assert mask.shape == (2, 1, 4, 4)
    np.testing.assert_array_equal(mask, causal_mask().to_array(4, 4) & ~padding[:, None, None, :])
    np.testing.assert_array_equal(interop.mask_to_torch(interop.mask_from_torch(attn_mask=future)), future)
    by_head = np.stack([future, ~future] * 3)
    np.testing.assert_array_equal(interop.mask_from_torch(attn_mask=by_head, heads=2)[2, 1], future)


@pytest.mark.parametrize(
    ("masks", "error", "words"),
    [
        ({}, ValueError, "there is no mask"),
        ({"attn_mask": np.zeros((2, 2))}, TypeError, r"attn_mask must be boolean, .* bias="),
        ({"attn_mask": np.zeros((4, 2, 2), bool)}, ValueError, r"attn_mask must have shape \(B·H, T, S\)"),
        ({"attn_mask": np.zeros(4, bool)}, ValueError, r"attn_mask must have shape \(T, S\)"),
        ({"key_padding_mask": np.zeros((2, 2, 2), bool)}, ValueError, "key_padding_mask must have shape"),
    ],
)
def test_masks_that_do_not_fit(masks, error, words):
    with pytest.raises(error, match=words):
        interop.mask_from_torch(**masks)


def test_imported_models_run():
    params, config = interop.from_torch_encoder(encoder_state(), heads=3)
    assert encoder(params, np.ones((2, 5, 6)), config=config).shape == (2, 5, 6)
