"""Ways to call every model, with parameters that are nowhere 0 or 1 and axes of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from npattn import Dropout, Rotary, alibi_bias, causal_mask, length_mask, tree_map
from npattn.models import (
    BlockConfig,
    DecoderBlockParams,
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
    decoder_block_backward,
    decoder_block_forward,
    decoder_forward,
    encoder_backward,
    encoder_block_backward,
    encoder_block_forward,
    encoder_decoder_backward,
    encoder_decoder_forward,
    encoder_decoder_loss_backward,
    encoder_decoder_loss_forward,
    encoder_forward,
    language_model_backward,
    language_model_forward,
    language_model_loss_backward,
    language_model_loss_forward,
    token_embedding_backward,
    token_embedding_forward,
)

Arguments = dict[str, Any]
WIDTH, HEADS, VOCABULARY, CONTEXT = 6, 2, 11, 9
PRE, POST = BlockConfig(), BlockConfig("post")
LLAMA = BlockConfig(norm="rms", eps=1e-6, activation="silu", rotary=Rotary(base=100.0, size=2), window=2)
T5 = BlockConfig("post", norm="rms", activation="gelu_tanh", scale=1.0, softcap=3.0)


class Case(NamedTuple):
    """One way to call one model: ``forward(*arguments)`` and its backward."""

    name: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    draw: Callable[[np.random.Generator], Arguments]

    def __repr__(self) -> str:
        return self.name


def randomised(params: Any, rng: np.random.Generator) -> Any:
    """No bias is 0 and no norm does nothing."""
    return tree_map(lambda x: x + 0.3 * rng.standard_normal(x.shape), params)


def _of(params: Callable[..., Any], arrays: Mapping[str, tuple[int, ...]], **options: Any) -> Callable[..., Arguments]:
    """Draws parameters by their ``init``, then arrays of these shapes; ids where a name says so."""

    def draw(rng: np.random.Generator) -> Arguments:
        drawn: Arguments = {"params": randomised(params(rng, **options), rng)}
        for name, shape in arrays.items():
            is_ids = name in ("ids", "source", "target", "targets")
            drawn[name] = rng.integers(0, VOCABULARY, shape) if is_ids else rng.standard_normal(shape)
        return drawn

    return draw


def _with(forward: Any, **options: Any) -> Any:
    """``forward`` with options, of which ``bias`` may be an argument."""

    def call(*arguments: Any) -> tuple[Any, Any]:
        own = dict(options)
        arguments = list(arguments)  # type: ignore[assignment]
        if make_bias := own.pop("bias_of", None):
            own["bias"] = make_bias(arguments.pop())  # type: ignore[attr-defined]
        result: tuple[Any, Any] = forward(*arguments, **own)
        return result

    return call


def _block_cases() -> Iterator[Case]:
    sizes = {"width": WIDTH, "heads": HEADS, "hidden": 7}
    x = {"x": (2, 5, WIDTH)}
    more: Arguments
    for name, options, config, more in (
        ("pre", {}, PRE, {"mask": causal_mask()}),
        ("post", {}, POST, {"mask": length_mask([3, 5])}),
        ("gated", {"gated": True, "bias": False, "kv_heads": 1, "sinks": True}, LLAMA, {"mask": causal_mask()}),
        ("dropout", {"head_size": 5}, POST, {"dropout": Dropout(0.3, 7)}),
    ):
        call = _with(encoder_block_forward, config=config, **more)
        draw = _of(EncoderBlockParams.init, x, **sizes, config=config, **options)
        yield Case(f"encoder_block-{name}", call, encoder_block_backward, draw)
    call = _with(encoder_block_forward, config=T5, bias_of=lambda bias: bias)
    draw = _of(EncoderBlockParams.init, {"x": (5, WIDTH), "bias": (HEADS, 1, 5)}, **sizes, config=T5)
    yield Case("encoder_block-bias", call, encoder_block_backward, draw)

    memory = {"x": (2, 5, WIDTH), "memory": (2, 3, 4)}
    for name, options, config, more in (
        ("pre", {}, PRE, {"mask": causal_mask(), "memory_mask": length_mask([2, 3])}),
        ("post", {}, POST, {"mask": causal_mask()}),
        ("gated", {"gated": True, "bias": False, "kv_heads": 1}, LLAMA, {"mask": causal_mask(), "dropout": Dropout(0.3, 7)}),
    ):
        call = _with(decoder_block_forward, config=config, **more)
        draw = _of(DecoderBlockParams.init, memory, **sizes, memory_width=4, config=config, **options)
        yield Case(f"decoder_block-{name}", call, decoder_block_backward, draw)


def _stack_cases() -> Iterator[Case]:
    sizes = {"blocks": 2, "width": WIDTH, "heads": HEADS, "hidden": 7}
    windows = POST._replace(window=(1, None))
    call = _with(encoder_forward, config=windows, mask=causal_mask())
    yield Case("encoder-post", call, encoder_backward, _of(EncoderParams.init, {"x": (2, 5, WIDTH)}, **sizes, config=windows))
    call = _with(encoder_forward, bias_of=alibi_bias, dropout=Dropout(0.2, 3))
    draw = _of(EncoderParams.init, {"x": (2, 5, WIDTH), "bias": (HEADS,)}, **sizes)
    yield Case("encoder-alibi", call, encoder_backward, draw)
    call = _with(decoder_forward, bias_of=alibi_bias, mask=causal_mask())
    draw = _of(DecoderParams.init, {"x": (2, 5, WIDTH), "memory": (2, 3, WIDTH), "bias": (HEADS,)}, **sizes)
    yield Case("decoder-pre", call, decoder_backward, draw)


def _embedding_cases() -> Iterator[Case]:
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "std": 1.0}
    for name, config, options, more in (
        ("learned", EmbeddingConfig(), {"context": CONTEXT}, {"positions": 2}),
        ("types", EmbeddingConfig(eps=1e-12), {"context": CONTEXT, "types": 2, "norm": True}, {"types": [0, 0, 1, 1, 1]}),
        ("sinusoidal", EmbeddingConfig("sinusoidal", scale=2.5), {}, {"positions": [[0, 1, 2, 3, 4], [7, 8, 0, 1, 0]]}),
        ("none", EmbeddingConfig("none", norm="rms"), {"norm": True}, {"dropout": Dropout(0.3, 5)}),
    ):
        call = _with(token_embedding_forward, config=config, **more)
        draw = _of(TokenEmbeddingParams.init, {"ids": (2, 5)}, **sizes, config=config, **options)
        yield Case(f"token_embedding-{name}", call, token_embedding_backward, draw)


def _model_cases() -> Iterator[Case]:
    sizes = {"vocabulary": VOCABULARY, "blocks": 1, "width": WIDTH, "heads": HEADS, "hidden": 7}
    gpt2 = LanguageModelConfig(BlockConfig(activation="gelu_tanh"))
    llama = LanguageModelConfig(LLAMA, EmbeddingConfig("none"))
    call = _with(language_model_forward, config=gpt2)
    draw = _of(LanguageModelParams.init, {"ids": (2, 5)}, **{**sizes, "blocks": 2}, context=CONTEXT, config=gpt2)
    yield Case("language_model-tied", call, language_model_backward, draw)
    call = _with(language_model_forward, config=llama, positions=3, mask=length_mask([5, 2]))
    options = {"tied": False, "gated": True, "bias": False, "kv_heads": 1, "config": llama}
    draw = _of(LanguageModelParams.init, {"ids": (2, 5)}, **sizes, **options)
    yield Case("language_model-gated", call, language_model_backward, draw)
    none = LanguageModelConfig(embedding=EmbeddingConfig("none"))
    call = _with(language_model_loss_forward, config=none, bias_of=alibi_bias, dropout=Dropout(0.1, 3), ignore_index=0)
    arrays = {"ids": (2, 5), "targets": (2, 5), "bias": (HEADS,)}
    draw = _of(LanguageModelParams.init, arrays, **sizes, config=none)
    yield Case("language_model_loss", call, language_model_loss_backward, draw)

    original = EncoderDecoderConfig(POST, POST, EmbeddingConfig("sinusoidal", scale=WIDTH**0.5))
    both = {"source": (2, 4), "target": (2, 3)}
    call = _with(encoder_decoder_forward, config=original, source_mask=length_mask([4, 2]), memory_mask=length_mask([4, 2]))
    yield Case(
        "encoder_decoder-shared", call, encoder_decoder_backward, _of(EncoderDecoderParams.init, both, **sizes, config=original)
    )
    call = _with(encoder_decoder_loss_forward, label_smoothing=0.1, dropout=Dropout(0.1, 3), target_mask=length_mask([3, 2]))
    options = {"target_vocabulary": 13, "tied": False, "context": CONTEXT, "decoder_blocks": 1}
    draw = _of(EncoderDecoderParams.init, {**both, "targets": (2, 3)}, **sizes, **options)
    yield Case("encoder_decoder_loss", call, encoder_decoder_loss_backward, draw)


CASES = [*_block_cases(), *_stack_cases(), *_embedding_cases(), *_model_cases()]
