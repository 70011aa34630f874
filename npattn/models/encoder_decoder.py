"""The encoder-decoder: the original transformer, from the tokens of a source to logits of the next target token. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import tree_map, with_tree_repr
from npattn._attention.mask_kinds import causal_mask
from npattn._attention.masks import Mask
from npattn.layers._parameters import Parameters
from npattn.layers.dropout import Dropout
from npattn.layers.loss import CrossEntropySaved, cross_entropy_backward, cross_entropy_forward
from npattn.models._logits import LogitsSaved, logits_backward, logits_forward
from npattn.models._residual import add, fold
from npattn.models.config import EncoderDecoderConfig
from npattn.models.decoder import DecoderParams, DecoderSaved, decoder_backward, decoder_forward
from npattn.models.encoder import EncoderParams, EncoderSaved, encoder_backward, encoder_forward
from npattn.models.token_embedding import (
    TokenEmbeddingParams,
    TokenEmbeddingSaved,
    token_embedding_backward,
    token_embedding_forward,
)


@with_tree_repr
class EncoderDecoderParams(NamedTuple):
    """The parameters of `encoder_decoder`, and the type of their gradients.

    Without ``target`` the target's tokens have the source's tables; without ``w_out`` the logits are made with the target's.
    """

    source: TokenEmbeddingParams
    encoder: EncoderParams
    decoder: DecoderParams
    target: TokenEmbeddingParams | None = None
    w_out: Array | None = None  # (C, V)
    b_out: Array | None = None  # (V,)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        vocabulary: int,
        blocks: int,
        width: int,
        heads: int,
        decoder_blocks: int | None = None,
        target_vocabulary: int | None = None,
        context: int | None = None,
        tied: bool = True,
        config: EncoderDecoderConfig = EncoderDecoderConfig(),  # noqa: B008 - it is frozen
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> EncoderDecoderParams:
        """New parameters.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where they are drawn from.
        vocabulary : int
            V of the source; of the target too, with the same tables, unless that has its own.
        blocks : int
            How many, of the encoder.
        width, heads : int
            C and H.
        decoder_blocks : int, optional
            As many as the encoder has by default.
        target_vocabulary : int, optional
            V of the target, which then has tables of its own.
        context : int, optional
            The number of learned positions; needed where the config says that they are learned.
        tied : bool, optional
            Whether the logits are made with the target tokens' table; a matrix of their own otherwise, without a bias.
        config : EncoderDecoderConfig, optional
            Positions, kind and order of the norms.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.
        **options : optional
            ``hidden``, ``kv_heads``, ``head_size``, ``gated``, ``bias``, ``sinks``, ``last_norm``: as in `EncoderParams.init`.

        Returns
        -------
        EncoderDecoderParams

        Raises
        ------
        ValueError
            If a size is less than 1, or does not divide another, or the context is missing.

        Examples
        --------
        >>> import numpy as np
        >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
        >>> params = EncoderDecoderParams.init(np.random.default_rng(0), **sizes)
        >>> len(params.encoder.blocks), len(params.decoder.blocks), params.target
        (2, 2, None)
        """
        place: dict[str, Any] = {"xp": xp, "dtype": dtype, "device": device}
        tables: dict[str, Any] = {"width": width, "context": context, "config": config.embedding, **place}
        sizes: dict[str, Any] = {"width": width, "heads": heads, **options, **place}
        last = vocabulary if target_vocabulary is None else target_vocabulary
        return cls(
            TokenEmbeddingParams.init(rng, vocabulary=vocabulary, **tables),
            EncoderParams.init(rng, blocks=blocks, config=config.encoder, **sizes),
            DecoderParams.init(rng, blocks=blocks if decoder_blocks is None else decoder_blocks, config=config.decoder, **sizes),
            None if target_vocabulary is None else TokenEmbeddingParams.init(rng, vocabulary=last, **tables),
            None if tied else Parameters(xp, dtype, device).xavier(rng, width, last, inputs=width),
        )


@with_tree_repr
class EncoderDecoderSaved(NamedTuple):
    """What `encoder_decoder_backward` needs: what its parts saved."""

    source: TokenEmbeddingSaved
    encoder: EncoderSaved
    target: TokenEmbeddingSaved
    decoder: DecoderSaved
    logits: LogitsSaved
    shared: bool  # whether source and target have the same tables


@with_tree_repr
class EncoderDecoderGrads(NamedTuple):
    """Gradients of `encoder_decoder`."""

    dparams: EncoderDecoderParams


def encoder_decoder(
    params: EncoderDecoderParams,
    source: Any,
    target: Any,
    /,
    *,
    source_mask: Mask | Array | None = None,
    target_mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: EncoderDecoderConfig = EncoderDecoderConfig(),  # noqa: B008
) -> Array:
    """Logits of the next target token at every position; see `encoder_decoder_forward`."""
    masks: dict[str, Any] = {"source_mask": source_mask, "target_mask": target_mask, "memory_mask": memory_mask}
    return encoder_decoder_forward(params, source, target, **masks, dropout=dropout, recompute=recompute, config=config)[0]


def encoder_decoder_forward(
    params: EncoderDecoderParams,
    source: Any,
    target: Any,
    /,
    *,
    source_mask: Mask | Array | None = None,
    target_mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: EncoderDecoderConfig = EncoderDecoderConfig(),  # noqa: B008
) -> tuple[Array, EncoderDecoderSaved]:
    """The encoder reads the source; the decoder reads the target from its start, looks at the source, and says what comes next.

    Parameters
    ----------
    params : EncoderDecoderParams
        Of its parts.
    source : integer array (..., S), or Python integers
        Tokens of the source.
    target : integer array (..., T), or Python integers
        Tokens of the target, a start token first. Each sees itself and those before it.
    source_mask : Mask or bool array, optional
        True where a token of the source may attend to another one: `npattn.length_mask` for padding.
    target_mask : Mask or bool array, optional
        The same for the target, beside its causal mask.
    memory_mask : Mask or bool array, optional
        True where a token of the target may attend to one of the source. A `npattn.length_mask` serves as this and as the
        source's.
    dropout : Dropout, optional
        Drops elements of the embeddings, and in the blocks as in `decoder_block_forward`. Fold it for every step of training.
    recompute : bool, optional
        As in `encoder_forward`.
    config : EncoderDecoderConfig, optional
        Of embeddings and blocks.

    Returns
    -------
    out : array (..., T, V)
        Logits, in the dtype of the parameters.
    saved : EncoderDecoderSaved
        For `encoder_decoder_backward`. ``saved.decoder.block(n)`` is what the decoder's block n saved.

    Raises
    ------
    ValueError
        If shapes do not fit, a token on the host is out of range, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), figure 1; docs/derivation.md, "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = EncoderDecoderParams.init(np.random.default_rng(0), **sizes)
    >>> out, saved = encoder_decoder_forward(params, [[3, 1, 4, 1], [5, 9, 2, 6]], [[0, 7], [0, 8]])
    >>> out.shape, encoder_decoder_backward(out, saved).dparams.source.tokens.shape
    ((2, 2, 50), (50, 8))
    """
    op = "encoder_decoder"
    EncoderDecoderConfig.checked(config, op)
    own = params.source if params.target is None else params.target
    same = {"recompute": recompute}
    x, saved_source = token_embedding_forward(params.source, source, dropout=fold(dropout, 0), config=config.embedding)
    memory, saved_encoder = encoder_forward(
        params.encoder, x, mask=source_mask, dropout=fold(dropout, 1), config=config.encoder, **same
    )
    x, saved_target = token_embedding_forward(own, target, dropout=fold(dropout, 2), config=config.embedding)
    x, saved_decoder = decoder_forward(
        params.decoder,
        x,
        memory,
        mask=causal_mask() if target_mask is None else causal_mask() & target_mask,
        memory_mask=memory_mask,
        dropout=fold(dropout, 3),
        config=config.decoder,
        **same,
    )
    out, logits = logits_forward(op, x, own.tokens, params.w_out, params.b_out)
    return out, EncoderDecoderSaved(saved_source, saved_encoder, saved_target, saved_decoder, logits, params.target is None)


def encoder_decoder_backward(dout: Array, saved: EncoderDecoderSaved, /) -> EncoderDecoderGrads:
    """The vector-Jacobian product of `encoder_decoder_forward`.

    Parameters
    ----------
    dout : float array (..., T, V)
        The cotangent of the logits.
    saved : EncoderDecoderSaved
        From `encoder_decoder_forward`.

    Returns
    -------
    EncoderDecoderGrads
        ``dparams`` (an EncoderDecoderParams).

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    logits = logits_backward(dout, saved.logits)
    decoded = decoder_backward(logits.dx, saved.decoder)
    target: TokenEmbeddingParams | None = token_embedding_backward(decoded.dx, saved.target).dparams
    encoded = encoder_backward(decoded.dmemory, saved.encoder)
    source = token_embedding_backward(encoded.dx, saved.source).dparams
    assert target is not None
    target = target._replace(tokens=add(target.tokens, logits.dtable))
    if saved.shared:  # tables that are used twice
        source, target = tree_map(add, source, target), None
    return EncoderDecoderGrads(EncoderDecoderParams(source, encoded.dparams, decoded.dparams, target, logits.dw, logits.db))


@with_tree_repr
class EncoderDecoderLossSaved(NamedTuple):
    """What `encoder_decoder_loss_backward` needs: what its parts saved."""

    model: EncoderDecoderSaved
    loss: CrossEntropySaved


def encoder_decoder_loss(params: EncoderDecoderParams, source: Any, target: Any, targets: Any, /, **options: Any) -> Array:
    """The mean cross-entropy of the next target tokens; see `encoder_decoder_loss_forward`."""
    return encoder_decoder_loss_forward(params, source, target, targets, **options)[0]


def encoder_decoder_loss_forward(
    params: EncoderDecoderParams,
    source: Any,
    target: Any,
    targets: Any,
    /,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Array | None = None,
    **options: Any,
) -> tuple[Array, EncoderDecoderLossSaved]:
    """``cross_entropy(encoder_decoder(source, target), targets)``: what training makes small.

    Parameters
    ----------
    params : EncoderDecoderParams
        Of its parts.
    source : integer array (..., S), or Python integers
        Tokens of the source.
    target : integer array (..., T), or Python integers
        Tokens of the target, a start token first.
    targets : integer array (..., T), or Python integers
        The token that follows each.
    label_smoothing, ignore_index, weights : optional
        As in `npattn.layers.cross_entropy_forward`.
    **options : optional
        As in `encoder_decoder_forward`.

    Returns
    -------
    out : array ()
        In nats a token.
    saved : EncoderDecoderLossSaved
        For `encoder_decoder_loss_backward`.

    Raises
    ------
    ValueError
        If shapes do not fit, a token on the host is out of range, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    Examples
    --------
    >>> import numpy as np
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = EncoderDecoderParams.init(np.random.default_rng(0), **sizes)
    >>> loss, saved = encoder_decoder_loss_forward(params, [[3, 1, 4]], [[0, 7]], [[7, 0]])
    >>> encoder_decoder_loss_backward(1.0, saved).dparams.source.tokens.shape
    (50, 8)
    """
    out, model = encoder_decoder_forward(params, source, target, **options)
    loss, saved = cross_entropy_forward(out, targets, label_smoothing=label_smoothing, ignore_index=ignore_index, weights=weights)
    return loss, EncoderDecoderLossSaved(model, saved)


def encoder_decoder_loss_backward(dout: Array | float, saved: EncoderDecoderLossSaved, /) -> EncoderDecoderGrads:
    """The gradient of the loss, times ``dout``.

    Parameters
    ----------
    dout : float array () or number
        The cotangent of out; 1 for the gradient itself.
    saved : EncoderDecoderLossSaved
        From `encoder_decoder_loss_forward`.

    Returns
    -------
    EncoderDecoderGrads
        ``dparams`` (an EncoderDecoderParams).

    Raises
    ------
    TypeError
        If dtypes, libraries or devices differ.
    """
    return encoder_decoder_backward(cross_entropy_backward(dout, saved.loss).dlogits, saved.model)
