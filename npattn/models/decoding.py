"""Models that read on: some tokens at a time, with what was read before in a cache. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.blas import one_blas_thread
from npattn._arrays.namespace import Array
from npattn._arrays.trees import with_tree_repr
from npattn._attention.attention import attention
from npattn._attention.biases import LazyBias
from npattn._attention.masks import Mask
from npattn.layers._ids import as_ids
from npattn.layers.heads import project_heads
from npattn.models._stack import last_norm_forward
from npattn.models._step import Reader
from npattn.models.cache import KeyValueCache
from npattn.models.config import EncoderDecoderConfig, LanguageModelConfig
from npattn.models.encoder import encoder
from npattn.models.encoder_decoder import EncoderDecoderParams
from npattn.models.language_model import LanguageModelParams
from npattn.models.token_embedding import token_embedding


def language_model_step(
    params: LanguageModelParams,
    ids: Any,
    cache: KeyValueCache,
    /,
    *,
    bias: LazyBias | None = None,
    config: LanguageModelConfig = LanguageModelConfig(),  # noqa: B008 - it is frozen
) -> tuple[Array, KeyValueCache]:
    """Read some more tokens: the logits after each, as `language_model` gives them for the whole, and the cache with them in it.

    Parameters
    ----------
    params : LanguageModelParams
        Of its parts.
    ids : integer array (..., T), or Python integers
        The next tokens: a prompt, a piece of one, or a single token.
    cache : KeyValueCache
        What was read before. On NumPy, CuPy and PyTorch it is written to: continue with what is returned.
    bias : LazyBias, optional
        As for the whole sequence, such as `npattn.alibi_bias`.
    config : LanguageModelConfig, optional
        Of embedding and blocks.

    Returns
    -------
    logits : array (..., T, V)
        In the dtype of the parameters.
    cache : KeyValueCache
        T positions longer.

    Raises
    ------
    ValueError
        If shapes do not fit, the cache has no room, or an id or a position on the host is out of range.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Any way to cut a sequence gives the same logits, to rounding. A step takes the time of T tokens and of their attention over
    what is in the cache; with a window, over the window. Inside ``jax.jit`` let ``cache.length`` be an array: the same compiled
    step then serves every position.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import language_model
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> cache = KeyValueCache.init(params, capacity=5)
    >>> first, cache = language_model_step(params, [3, 1, 4], cache)
    >>> last, cache = language_model_step(params, [1, 5], cache)
    >>> whole = language_model(params, [3, 1, 4, 1, 5])
    >>> bool(np.allclose(np.concatenate([first, last]), whole)), cache.length
    (True, 5)
    """
    x, reader, cache = _read(params, ids, cache, bias, config)
    with one_blas_thread(), np.errstate(all="ignore"):
        return reader.layers.logits("language_model_step", x, params.embedding.tokens, params.w_out, params.b_out), cache


def last_logits(
    params: LanguageModelParams, ids: Any, cache: KeyValueCache, bias: LazyBias | None, config: LanguageModelConfig
) -> tuple[Array, KeyValueCache]:
    """`language_model_step` with the logits after the last token alone, (..., V): the others are large and nobody asks."""
    x, reader, cache = _read(params, ids, cache, bias, config)
    with one_blas_thread(), np.errstate(all="ignore"):
        table, w_out = params.embedding.tokens, params.w_out
        return reader.layers.logits("language_model_step", x[..., -1:, :], table, w_out, params.b_out)[..., 0, :], cache


def _read(
    params: LanguageModelParams, ids: Any, cache: KeyValueCache, bias: LazyBias | None, config: LanguageModelConfig
) -> tuple[Array, Reader, KeyValueCache]:
    """The last norm's rows (..., T, C)."""
    op = "language_model_step"
    LanguageModelConfig.checked(config, op)
    ids = as_ids(op, "ids", ids)
    with one_blas_thread(), np.errstate(all="ignore"):
        x = token_embedding(params.embedding, ids, positions=cache.positions(ids.shape[-1]), config=config.embedding)
        reader = Reader(op, cache, x, bias)
        for n, block in enumerate(params.blocks):
            x = reader.block(block, x, config.block.of_block(n))
        if params.norm is not None:
            x = reader.layers.norm(op, params.norm, x, config.block)
    return x, reader, reader.after()


@with_tree_repr
class EncoderDecoderCache(NamedTuple):
    """What the decoder remembers of the target, and every block's keys and values of the source."""

    target: KeyValueCache
    keys: tuple[Array, ...]  # of each block (..., K, S, D)
    values: tuple[Array, ...]  # of each block (..., K, S, E)
    memory_mask: Mask | Array | None = None


def encoder_decoder_start(
    params: EncoderDecoderParams,
    source: Any,
    /,
    *,
    capacity: int,
    source_mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    config: EncoderDecoderConfig = EncoderDecoderConfig(),  # noqa: B008
) -> EncoderDecoderCache:
    """Read the source: the encoder's work, done once, and room for a target.

    Parameters
    ----------
    params : EncoderDecoderParams
        Of its parts.
    source : integer array (..., S), or Python integers
        Tokens of the source.
    capacity : int
        How many tokens of the target there is room for.
    source_mask, memory_mask : Mask or bool array, optional
        As in `encoder_decoder_forward`: a `npattn.length_mask` for padding in both.
    config : EncoderDecoderConfig, optional
        Of embeddings and blocks.

    Returns
    -------
    EncoderDecoderCache
        For `encoder_decoder_step`.

    Raises
    ------
    ValueError
        If shapes do not fit, a token on the host is out of range, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    Examples
    --------
    See `encoder_decoder_step`.
    """
    EncoderDecoderConfig.checked(config, "encoder_decoder_start")
    x = token_embedding(params.source, source, config=config.embedding)
    memory = encoder(params.encoder, x, mask=source_mask, config=config.encoder)
    attentions = [block.cross_attention for block in params.decoder.blocks]
    keys = tuple(project_heads(memory, a.w_k, a.b_k) for a in attentions)
    values = tuple(project_heads(memory, a.w_v, a.b_v) for a in attentions)
    target = KeyValueCache.init(params.decoder, capacity=capacity, batch=memory.shape[:-2])
    return EncoderDecoderCache(target, keys, values, memory_mask)


def encoder_decoder_step(
    params: EncoderDecoderParams,
    ids: Any,
    cache: EncoderDecoderCache,
    /,
    *,
    config: EncoderDecoderConfig = EncoderDecoderConfig(),  # noqa: B008
) -> tuple[Array, EncoderDecoderCache]:
    """Read some more tokens of the target: the logits after each, as `encoder_decoder` gives them, and the cache with them in it.

    Parameters
    ----------
    params : EncoderDecoderParams
        Of its parts.
    ids : integer array (..., T), or Python integers
        The next tokens of the target; a start token first.
    cache : EncoderDecoderCache
        From `encoder_decoder_start` or the last step. On NumPy, CuPy and PyTorch it is written to: continue with what is
        returned.
    config : EncoderDecoderConfig, optional
        Of embeddings and blocks.

    Returns
    -------
    logits : array (..., T, V)
        In the dtype of the parameters.
    cache : EncoderDecoderCache
        T positions longer.

    Raises
    ------
    ValueError
        If shapes do not fit, the cache has no room, or a token or a position on the host is out of range.
    TypeError
        If dtypes, libraries or devices differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import encoder_decoder
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = EncoderDecoderParams.init(np.random.default_rng(0), **sizes)
    >>> cache = encoder_decoder_start(params, [3, 1, 4, 1], capacity=3)
    >>> first, cache = encoder_decoder_step(params, [0, 7], cache)
    >>> last, cache = encoder_decoder_step(params, [5], cache)
    >>> bool(np.allclose(np.concatenate([first, last]), encoder_decoder(params, [3, 1, 4, 1], [0, 7, 5])))
    True
    """
    op = "encoder_decoder_step"
    EncoderDecoderConfig.checked(config, op)
    own = params.source if params.target is None else params.target
    ids = as_ids(op, "ids", ids)
    with one_blas_thread(), np.errstate(all="ignore"):
        x = token_embedding(own, ids, positions=cache.target.positions(ids.shape[-1]), config=config.embedding)
        reader = Reader(op, cache.target, x, None)
        for n, block in enumerate(params.decoder.blocks):
            block_config = config.decoder.of_block(n)
            crossed = block.cross_attention
            options: dict[str, Any] = {"scale": block_config.scale, "softcap": block_config.softcap, "sinks": crossed.sinks}

            def cross(x: Array, n: int = n, crossed: Any = crossed, options: dict[str, Any] = options) -> Array:
                q = reader.layers.heads(x, crossed.w_q, crossed.b_q)
                out = attention(q, cache.keys[n], cache.values[n], mask=cache.memory_mask, **options)
                return reader.layers.merge(out, crossed.w_o, crossed.b_o)

            x = reader.block(block, x, block_config, cross)
        x, _ = last_norm_forward(op, params.decoder.norm, x, config.decoder)
        logits = reader.layers.logits(op, x, own.tokens, params.w_out, params.b_out)
    return logits, cache._replace(target=reader.after())
