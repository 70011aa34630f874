"""What only models have: recomputed blocks, a look inside any layer, order, sharing, settings, errors."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from npattn import Dropout, attention_weights, causal_mask, multi_head_attention_steps, window_mask
from npattn._arrays.trees import tree_items, tree_leaves
from npattn._attention.memory import drop_spare_memory
from npattn.layers import cross_entropy
from npattn.models import (
    BlockConfig,
    DecoderParams,
    EmbeddingConfig,
    EncoderBlockParams,
    EncoderDecoderConfig,
    EncoderDecoderParams,
    EncoderParams,
    LanguageModelConfig,
    LanguageModelParams,
    TokenEmbeddingParams,
    decoder_backward,
    decoder_forward,
    encoder,
    encoder_backward,
    encoder_block,
    encoder_decoder,
    encoder_decoder_backward,
    encoder_decoder_forward,
    encoder_decoder_loss,
    encoder_forward,
    language_model,
    language_model_backward,
    language_model_forward,
    language_model_loss,
    token_embedding,
)

RNG = np.random.default_rng
SIZES: dict[str, Any] = {"vocabulary": 11, "context": 9, "blocks": 3, "width": 8, "heads": 2}


def language_params(**options: Any) -> LanguageModelParams:
    return LanguageModelParams.init(RNG(0), **{**SIZES, **options})


# Recomputation ---------------------------------------------------------------------------------------------------------------


def same_bits(one: Any, other: Any) -> None:
    ones, others = dict(tree_items(one)), dict(tree_items(other))
    assert ones.keys() == others.keys()
    for name, x in ones.items():
        np.testing.assert_array_equal(x, others[name], err_msg=name)


@pytest.mark.parametrize("dropout", [None, Dropout(0.4, 3)], ids=["", "dropout"])
def test_recomputed_blocks_have_the_same_gradients_bit_for_bit(dropout):
    rng = RNG(1)
    ids = rng.integers(0, 11, (2, 7))
    model = language_params()
    dout = rng.standard_normal((2, 7, 11))
    for forward, backward, arguments, cotangent in (
        (language_model_forward, language_model_backward, (model, ids), dout),
        (encoder_forward, encoder_backward, (EncoderParams.init(rng, blocks=2, width=8, heads=2), dout[..., :8]), dout[..., :8]),
        (
            decoder_forward,
            decoder_backward,
            (DecoderParams.init(rng, blocks=2, width=8, heads=2), dout[..., :8], dout[..., 3:]),
            dout[..., :8],
        ),
        (encoder_decoder_forward, encoder_decoder_backward, (EncoderDecoderParams.init(rng, **SIZES), ids[:, :4], ids), dout),
    ):
        out, saved = forward(*arguments, dropout=dropout)
        again, inputs = forward(*arguments, dropout=dropout, recompute=True)
        np.testing.assert_array_equal(again, out)
        same_bits(tuple(backward(cotangent, inputs)), tuple(backward(cotangent, saved)))


def test_recomputed_blocks_save_their_inputs_alone():
    params = LanguageModelParams.init(RNG(0), vocabulary=11, context=64, blocks=6, width=32, heads=2)
    ids = RNG(1).integers(0, 11, (4, 64))

    def held(recompute: bool) -> int:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            _, saved = language_model_forward(params, ids, recompute=recompute)
            assert saved is not None
            drop_spare_memory()  # what waits for the next call is not held by this one
            return tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()

    held(False)  # what is imported and looked up once
    inputs = 6 * 4 * 64 * 32 * 8
    assert held(True) < 2 * inputs < 10 * inputs < held(False)


# Inside ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_maps_and_steps_of_every_layer(recompute):
    params, ids = language_params(), RNG(1).integers(0, 11, (2, 7))
    _, saved = language_model_forward(params, ids, recompute=recompute)
    for n in range(3):
        inside = saved.block(n).attention
        weights = attention_weights(inside.attention)
        assert weights.shape == (2, 2, 7, 7)
        np.testing.assert_allclose(weights.sum(-1), 1)
        assert not np.triu(weights, 1).any()
        steps = multi_head_attention_steps(inside)
        assert "scores" in str(steps)
    both = EncoderDecoderParams.init(RNG(0), **SIZES)
    _, saved_both = encoder_decoder_forward(both, ids[:, :4], ids, recompute=recompute)
    assert attention_weights(saved_both.decoder.block(2).cross_attention.attention).shape == (2, 2, 7, 4)
    assert attention_weights(saved_both.encoder.block(0).attention.attention).shape == (2, 2, 4, 4)


# Order -----------------------------------------------------------------------------------------------------------------------


def test_a_language_model_sees_no_future():
    params, ids = language_params(), RNG(1).integers(0, 11, (3, 7))
    changed = ids.copy()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    one, other = language_model(params, ids), language_model(params, changed)
    np.testing.assert_array_equal(one[:, :4], other[:, :4])
    assert (one[:, 4:] != other[:, 4:]).any(axis=-1).all()


def test_a_decoder_sees_no_future_and_the_whole_source():
    params, rng = EncoderDecoderParams.init(RNG(0), **SIZES), RNG(1)
    source, target = rng.integers(0, 11, (3, 5)), rng.integers(0, 11, (3, 7))
    out = encoder_decoder(params, source, target)
    later = target.copy()
    later[:, 4:] = (later[:, 4:] + 1) % 11
    np.testing.assert_array_equal(encoder_decoder(params, source, later)[:, :4], out[:, :4])
    last = source.copy()
    last[:, -1] = (last[:, -1] + 1) % 11
    assert (encoder_decoder(params, last, target) != out).any(axis=-1).all()


def test_windows_of_the_blocks_in_turn():
    rng = RNG(0)
    params, x = EncoderParams.init(rng, blocks=3, width=8, heads=2, last_norm=False), rng.standard_normal((2, 6, 8))
    expected = x
    for block, mask in zip(params.blocks, (window_mask(1, 1), None, window_mask(1, 1)), strict=True):
        expected = encoder_block(block, expected, mask=mask)
    np.testing.assert_array_equal(encoder(params, x, config=BlockConfig(window=(1, None))), expected)
    near = encoder_block(params.blocks[0], x, mask=causal_mask(), config=BlockConfig(window=2))
    np.testing.assert_array_equal(near, encoder_block(params.blocks[0], x, mask=causal_mask() & window_mask(2, 2)))


def test_every_block_and_step_drops_by_a_rule_of_its_own():
    params = language_params(blocks=1)
    ids = RNG(1).integers(0, 11, (2, 7))
    outs = [language_model(params, ids, dropout=Dropout(0.5, 3).fold(step)) for step in (0, 0, 1)]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert (outs[0] != outs[2]).any()
    twice = EncoderParams(2 * EncoderParams.init(RNG(0), blocks=1, width=8, heads=2).blocks, None)
    x = RNG(1).standard_normal((5, 8))
    _, saved = encoder_forward(twice, x, dropout=Dropout(0.5, 3))
    one, other = (saved.block(n).attention_branch.dropout for n in (0, 1))
    assert one is not None
    assert other is not None
    assert one.dropout != other.dropout


# Parameters ------------------------------------------------------------------------------------------------------------------


def test_tied_and_shared_tables():
    assert language_params().w_out is None
    own = language_params(tied=False)
    assert own.w_out is not None
    assert own.w_out.shape == (8, 11)
    shared = EncoderDecoderParams.init(RNG(0), **SIZES)
    assert shared.target is None
    apart = EncoderDecoderParams.init(RNG(0), **SIZES, target_vocabulary=13)
    assert apart.target is not None
    assert apart.target.tokens.shape == (13, 8)
    assert encoder_decoder(apart, [[1, 2]], [[12]]).shape == (1, 1, 13)


def test_initial_logits_are_nearly_even():
    """So that training begins at the loss of a guess."""
    rng = RNG(0)
    params = LanguageModelParams.init(rng, vocabulary=50, context=16, blocks=2, width=32, heads=4)
    ids = rng.integers(0, 50, (4, 16))
    assert language_model_loss(params, ids, ids) == pytest.approx(np.log(50), rel=0.1)


def test_the_loss_is_cross_entropy_of_the_logits():
    params, rng = language_params(), RNG(1)
    ids, targets, weights = rng.integers(0, 11, (2, 7)), rng.integers(0, 11, (2, 7)), rng.random((2, 7))
    options: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": 3, "weights": weights}
    expected = cross_entropy(language_model(params, ids), targets, **options)
    np.testing.assert_array_equal(language_model_loss(params, ids, targets, **options), expected)
    both = EncoderDecoderParams.init(RNG(0), **SIZES)
    expected = cross_entropy(encoder_decoder(both, ids, targets), targets, **options)
    np.testing.assert_array_equal(encoder_decoder_loss(both, ids, targets, targets, **options), expected)


def test_types_and_lists_of_tokens():
    params = TokenEmbeddingParams.init(RNG(0), vocabulary=5, width=4, context=3, types=2, norm=True)
    one = token_embedding(params, [[1, 2, 3]], types=[[0, 0, 1]])
    np.testing.assert_array_equal(one, token_embedding(params, np.asarray([[1, 2, 3]]), types=np.asarray([0, 0, 1])))
    assert all(x.dtype == np.float64 for x in tree_leaves(params))


# Errors ----------------------------------------------------------------------------------------------------------------------


OF_BLOCKS: Any = BlockConfig()


def block(**options: Any) -> Any:
    return encoder_block(EncoderBlockParams.init(RNG(0), width=8, heads=2), np.zeros((5, 8)), **options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: block(config=BlockConfig("middle")), ValueError, "encoder_block: norm_order of config must be one of pre, post"),
        (lambda: block(config=BlockConfig(norm="batch")), ValueError, "encoder_block: norm of config must be one of layer, rms"),
        (lambda: block(config="pre"), TypeError, "encoder_block: config must be a BlockConfig, got str"),
        (lambda: block(config=BlockConfig(window=-1)), ValueError, "encoder_block: the window of config must be at least 0"),
        (lambda: block(config=BlockConfig(activation="tanh")), ValueError, "tanh"),
        (
            lambda: encoder(EncoderParams((), None), np.zeros((5, 8))),
            ValueError,
            "encoder: the number of blocks must be at least 1",
        ),
        (
            lambda: encoder(EncoderParams.init(RNG(0), blocks=1, width=8, heads=2), np.zeros(8)),
            ValueError,
            r"encoder: x must have shape \(..., T, C\), got \(8,\)",
        ),
        (
            lambda: encoder(
                EncoderParams.init(RNG(0), blocks=1, width=8, heads=2), np.zeros((5, 8)), config=BlockConfig(window=())
            ),
            ValueError,
            "the window of config must be an integer, None, or a tuple",
        ),
        (lambda: language_model(language_params(), [11]), ValueError, "11"),
        (lambda: language_model(language_params(), list(range(10))), ValueError, "there are 9 learned positions, got a token at"),
        (
            lambda: language_model(language_params(), [1], config=LanguageModelConfig(embedding=EmbeddingConfig("none"))),
            ValueError,
            "the config says that positions are none, but params has a table of positions",
        ),
        (lambda: language_model(language_params(), [1], config=OF_BLOCKS), TypeError, "config must be a LanguageModelConfig"),
        (lambda: language_params(blocks=0), ValueError, "the number of blocks must be at least 1"),
        (lambda: language_params(context=None), ValueError, "context is needed, the number of positions"),
        (lambda: language_params(heads=3), ValueError, "3"),
        (lambda: language_model(language_params()._replace(b_out=np.zeros(11)), [1]), ValueError, "b_out needs w_out"),
        (
            lambda: encoder_decoder(EncoderDecoderParams.init(RNG(0), **SIZES), [1], [2], config=OF_BLOCKS),
            TypeError,
            "encoder_decoder: config must be an EncoderDecoderConfig, got BlockConfig",
        ),
        (
            lambda: encoder_decoder(
                EncoderDecoderParams.init(RNG(0), **SIZES),
                [1],
                [2],
                config=EncoderDecoderConfig(embedding=EmbeddingConfig("rope")),
            ),
            ValueError,
            "positions of config must be one of learned, sinusoidal, none, got 'rope'",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
