"""The decoder-only language model: embedding, blocks with a causal mask, logits of the next token. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn._attention.biases import LazyBias
from npattn._attention.mask_kinds import causal_mask
from npattn._attention.masks import Mask
from npattn.layers._parameters import Parameters
from npattn.layers.dropout import Dropout
from npattn.layers.loss import CrossEntropySaved, cross_entropy_backward, cross_entropy_forward
from npattn.models._logits import LogitsSaved, logits_backward, logits_forward
from npattn.models._residual import add, fold
from npattn.models.config import LanguageModelConfig
from npattn.models.encoder import EncoderParams, EncoderSaved, encoder_backward, encoder_forward
from npattn.models.encoder_block import EncoderBlockParams, EncoderBlockSaved
from npattn.models.norm import NormParams
from npattn.models.token_embedding import (
    TokenEmbeddingParams,
    TokenEmbeddingSaved,
    token_embedding_backward,
    token_embedding_forward,
)


@with_tree_repr
class LanguageModelParams(NamedTuple):
    """The parameters of `language_model`, and the type of their gradients.

    Without ``w_out`` the logits are made with the tokens' table.
    """

    embedding: TokenEmbeddingParams
    blocks: tuple[EncoderBlockParams, ...]
    norm: NormParams | None = None  # after the last block
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
        context: int | None = None,
        tied: bool = True,
        config: LanguageModelConfig = LanguageModelConfig(),  # noqa: B008 - it is frozen
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> LanguageModelParams:
        """New parameters.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where they are drawn from.
        vocabulary : int
            V.
        blocks : int
            How many.
        width, heads : int
            C and H.
        context : int, optional
            The number of learned positions; needed where the config says that they are learned.
        tied : bool, optional
            Whether the logits are made with the tokens' table; a matrix of their own otherwise, without a bias.
        config : LanguageModelConfig, optional
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
        LanguageModelParams

        Raises
        ------
        ValueError
            If a size is less than 1, or does not divide another, or the context is missing.

        Examples
        --------
        >>> import numpy as np
        >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
        >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
        >>> params.embedding.tokens.shape, len(params.blocks), params.w_out
        ((50, 8), 2, None)
        """
        place: dict[str, Any] = {"xp": xp, "dtype": dtype, "device": device}
        tables: dict[str, Any] = {"vocabulary": vocabulary, "width": width, "context": context, "config": config.embedding}
        embedding = TokenEmbeddingParams.init(rng, **tables, **place)
        stack = EncoderParams.init(rng, blocks=blocks, width=width, heads=heads, config=config.block, **options, **place)
        w_out = None if tied else Parameters(xp, dtype, device).xavier(rng, width, vocabulary, inputs=width)
        return cls(embedding, stack.blocks, stack.norm, w_out)


@with_tree_repr
class LanguageModelSaved(NamedTuple):
    """What `language_model_backward` needs: what its parts saved."""

    embedding: TokenEmbeddingSaved
    stack: EncoderSaved
    logits: LogitsSaved

    def block(self, n: int) -> EncoderBlockSaved:
        """What block ``n`` saved, made again if the pass was to be recomputed."""
        return self.stack.block(n)


@with_tree_repr
class LanguageModelGrads(NamedTuple):
    """Gradients of `language_model`; ``dbias`` is ``None`` if there was no bias."""

    dparams: LanguageModelParams
    dbias: Array | None


def language_model(
    params: LanguageModelParams,
    ids: Any,
    /,
    *,
    positions: Any = 0,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: LanguageModelConfig = LanguageModelConfig(),  # noqa: B008
) -> Array:
    """Logits of the next token at every position; see `language_model_forward`."""
    options: dict[str, Any] = {"positions": positions, "mask": mask, "bias": bias, "dropout": dropout}
    return language_model_forward(params, ids, **options, recompute=recompute, config=config)[0]


def language_model_forward(
    params: LanguageModelParams,
    ids: Any,
    /,
    *,
    positions: Any = 0,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: LanguageModelConfig = LanguageModelConfig(),  # noqa: B008
) -> tuple[Array, LanguageModelSaved]:
    """Embedding, blocks in which every token sees itself and those before it, and logits.

    Parameters
    ----------
    params : LanguageModelParams
        Of its parts.
    ids : integer array (..., T), or Python integers
        Tokens.
    positions : int or integer array (..., T), optional
        The position of the first token, or of every one, for learned, sinusoidal and rotary positions.
    mask : Mask or bool array, optional
        True where a token may attend to another, beside the causal mask that there always is: `npattn.length_mask` for padding,
        `npattn.segment_mask` for packed texts.
    bias : float array or LazyBias, optional
        Added to the scores of every block, such as `npattn.alibi_bias`.
    dropout : Dropout, optional
        Drops elements of the embedding, and in the blocks as in `encoder_block_forward`. Fold it for every step of training.
    recompute : bool, optional
        As in `encoder_forward`.
    config : LanguageModelConfig, optional
        Of embedding and blocks.

    Returns
    -------
    out : array (..., T, V)
        Logits, in the dtype of the parameters.
    saved : LanguageModelSaved
        For `language_model_backward`. ``saved.block(n)`` is what block n saved.

    Raises
    ------
    ValueError
        If shapes do not fit, an id on the host is out of range, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Radford et al.: Language Models are Unsupervised Multitask Learners (2019), section 2.3; docs/derivation.md,
    "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> out, saved = language_model_forward(params, [[3, 1, 4], [1, 5, 9]])
    >>> out.shape, language_model_backward(out, saved).dparams.norm.weight.shape
    ((2, 3, 50), (8,))
    """
    op = "language_model"
    LanguageModelConfig.checked(config, op)
    block = config.block
    if block.rotary is not None:
        block = block._replace(rotary=block.rotary._replace(positions=positions))
    x, embedding = token_embedding_forward(
        params.embedding, ids, positions=positions, dropout=fold(dropout, 0), config=config.embedding
    )
    x, stack = encoder_forward(
        EncoderParams(params.blocks, params.norm),
        x,
        mask=causal_mask() if mask is None else causal_mask() & mask,
        bias=bias,
        dropout=fold(dropout, 1),
        recompute=recompute,
        config=block,
    )
    out, logits = logits_forward(op, x, params.embedding.tokens, params.w_out, params.b_out)
    return out, LanguageModelSaved(embedding, stack, logits)


def language_model_backward(dout: Array, saved: LanguageModelSaved, /) -> LanguageModelGrads:
    """The vector-Jacobian product of `language_model_forward`.

    Parameters
    ----------
    dout : float array (..., T, V)
        The cotangent of the logits.
    saved : LanguageModelSaved
        From `language_model_forward`.

    Returns
    -------
    LanguageModelGrads
        ``dparams`` (a LanguageModelParams) and ``dbias``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    logits = logits_backward(dout, saved.logits)
    stack = encoder_backward(logits.dx, saved.stack)
    embedding = token_embedding_backward(stack.dx, saved.embedding).dparams
    embedding = embedding._replace(tokens=add(embedding.tokens, logits.dtable))
    dparams = LanguageModelParams(embedding, *stack.dparams, logits.dw, logits.db)
    return LanguageModelGrads(dparams, stack.dbias)


@with_tree_repr
class LanguageModelLossSaved(NamedTuple):
    """What `language_model_loss_backward` needs: what its parts saved."""

    model: LanguageModelSaved
    loss: CrossEntropySaved


def language_model_loss(params: LanguageModelParams, ids: Any, targets: Any, /, **options: Any) -> Array:
    """The mean cross-entropy of the next tokens; see `language_model_loss_forward`."""
    return language_model_loss_forward(params, ids, targets, **options)[0]


def language_model_loss_forward(
    params: LanguageModelParams,
    ids: Any,
    targets: Any,
    /,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Array | None = None,
    **options: Any,
) -> tuple[Array, LanguageModelLossSaved]:
    """``cross_entropy(language_model(ids), targets)``: what training makes small.

    Parameters
    ----------
    params : LanguageModelParams
        Of its parts.
    ids : integer array (..., T), or Python integers
        Tokens.
    targets : integer array (..., T), or Python integers
        The token that follows each.
    label_smoothing, ignore_index, weights : optional
        As in `npattn.layers.cross_entropy_forward`.
    **options : optional
        As in `language_model_forward`.

    Returns
    -------
    out : array ()
        In nats a token.
    saved : LanguageModelLossSaved
        For `language_model_loss_backward`.

    Raises
    ------
    ValueError
        If shapes do not fit, an id on the host is out of range, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    Examples
    --------
    >>> import numpy as np
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> loss, saved = language_model_loss_forward(params, [[3, 1, 4]], [[1, 4, 1]])
    >>> grads = language_model_loss_backward(1.0, saved)
    >>> bool(abs(loss - np.log(50)) < 0.2), grads.dparams.embedding.tokens.shape
    (True, (50, 8))
    """
    out, model = language_model_forward(params, ids, **options)
    loss, saved = cross_entropy_forward(out, targets, label_smoothing=label_smoothing, ignore_index=ignore_index, weights=weights)
    return loss, LanguageModelLossSaved(model, saved)


def language_model_loss_backward(dout: Array | float, saved: LanguageModelLossSaved, /) -> LanguageModelGrads:
    """The gradient of the loss, times ``dout``.

    Parameters
    ----------
    dout : float array () or number
        The cotangent of out; 1 for the gradient itself.
    saved : LanguageModelLossSaved
        From `language_model_loss_forward`.

    Returns
    -------
    LanguageModelGrads
        ``dparams`` (a LanguageModelParams) and ``dbias``.

    Raises
    ------
    TypeError
        If dtypes, libraries or devices differ.
    """
    return language_model_backward(cross_entropy_backward(dout, saved.loss).dlogits, saved.model)
