"""The encoder block: self-attention, then a feed-forward network, each in a residual branch. Wiring only.

With a causal mask it is the block of a decoder-only language model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn._attention.biases import LazyBias
from npattn._attention.masks import Mask
from npattn._attention.multi_head import MultiHeadAttentionSaved, MultiHeadParams
from npattn.layers.dropout import Dropout
from npattn.layers.feed_forward import FeedForwardParams, FeedForwardSaved
from npattn.layers.gated_feed_forward import GatedFeedForwardParams, GatedFeedForwardSaved
from npattn.models._recompute import opened
from npattn.models._residual import BranchSaved, branch_backward, branch_forward, fold
from npattn.models._sublayers import (
    check_sequences,
    feed,
    feed_backward,
    init_feed_forward,
    self_attention_backward,
    self_attention_forward,
)
from npattn.models.config import BlockConfig
from npattn.models.norm import NormParams


@with_tree_repr
class EncoderBlockParams(NamedTuple):
    """The parameters of `encoder_block`, and the type of their gradients. The feed-forward network's type says which it is."""

    attention: MultiHeadParams
    feed_forward: FeedForwardParams | GatedFeedForwardParams
    attention_norm: NormParams
    feed_forward_norm: NormParams

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        width: int,
        heads: int,
        hidden: int | None = None,
        kv_heads: int | None = None,
        head_size: int | None = None,
        gated: bool = False,
        bias: bool = True,
        sinks: bool = False,
        config: BlockConfig = BlockConfig(),  # noqa: B008 - it is frozen
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
    ) -> EncoderBlockParams:
        """Xavier-uniform weights, zero biases, norms that change nothing but size.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the weights are drawn from.
        width : int
            C.
        heads : int
            H.
        hidden : int, optional
            F, of the feed-forward network; 4 C by default.
        kv_heads, head_size : int, optional
            As in `npattn.MultiHeadParams.init`.
        gated : bool, optional
            Whether the feed-forward network has a gate.
        bias : bool, optional
            Whether linear maps and layer norms have biases.
        sinks : bool, optional
            Whether every head has a learned sink.
        config : BlockConfig, optional
            An RMS norm has no bias.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.

        Returns
        -------
        EncoderBlockParams

        Raises
        ------
        ValueError
            If a size is less than 1, or does not divide another.

        Examples
        --------
        >>> import numpy as np
        >>> params = EncoderBlockParams.init(np.random.default_rng(0), width=8, heads=2)
        >>> params.attention.w_q.shape, params.feed_forward.w_in.shape
        ((8, 2, 4), (8, 32))
        """
        place: dict[str, Any] = {"xp": xp, "dtype": dtype, "device": device}
        sizes: dict[str, Any] = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_size": head_size}
        norm_bias = bias and config.norm == "layer"
        return cls(
            MultiHeadParams.init(rng, **sizes, bias=bias, sinks=sinks, **place),
            init_feed_forward(rng, width=width, hidden=hidden, gated=gated, bias=bias, **place),
            NormParams.init(width=width, bias=norm_bias, **place),
            NormParams.init(width=width, bias=norm_bias, **place),
        )


@with_tree_repr
class EncoderBlockSaved(NamedTuple):
    """What `encoder_block_backward` needs: what its parts saved.

    ``npattn.multi_head_attention_steps(saved.attention)`` shows what happened in its attention.
    """

    attention: MultiHeadAttentionSaved
    feed_forward: FeedForwardSaved | GatedFeedForwardSaved
    attention_branch: BranchSaved
    feed_forward_branch: BranchSaved


@with_tree_repr
class EncoderBlockGrads(NamedTuple):
    """Gradients of `encoder_block`; ``dbias`` is ``None`` if there was no bias."""

    dparams: EncoderBlockParams
    dx: Array
    dbias: Array | None


def encoder_block(
    params: EncoderBlockParams,
    x: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> Array:
    """Self-attention and a feed-forward network; see `encoder_block_forward`."""
    return encoder_block_forward(params, x, mask=mask, bias=bias, dropout=dropout, config=config)[0]


def encoder_block_forward(
    params: EncoderBlockParams,
    x: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> tuple[Array, EncoderBlockSaved]:
    """``x = x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; or with each norm after its sum.

    Parameters
    ----------
    params : EncoderBlockParams
        Of its parts.
    x : float array (..., T, C)
        A sequence.
    mask : Mask or bool array, optional
        True where a position may attend to another; as in `npattn.attention_forward`.
    bias : float array or LazyBias, optional
        Added to the scores; as in `npattn.attention_forward`.
    dropout : Dropout, optional
        Drops weights of attention and elements of what both branches add, each by a rule that is folded from this one.
    config : BlockConfig, optional
        Order and kind of the norms, activation, rotary positions, window, scale, softcap.

    Returns
    -------
    out : array (..., T, C)
        In the dtype of x.
    saved : EncoderBlockSaved
        For `encoder_block_backward`.

    Raises
    ------
    ValueError
        If shapes do not fit or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    decoder_block_forward : With cross-attention.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.1. Xiong et al.: On Layer Normalization in the Transformer
    Architecture (2020), for the two orders. docs/derivation.md, "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import causal_mask
    >>> params = EncoderBlockParams.init(np.random.default_rng(0), width=8, heads=2)
    >>> out, saved = encoder_block_forward(params, np.ones((3, 8)), mask=causal_mask())
    >>> grads = encoder_block_backward(np.ones((3, 8)), saved)
    >>> grads.dparams.attention.w_q.shape, grads.dx.shape
    ((8, 2, 4), (3, 8))
    """
    op = "encoder_block"
    BlockConfig.checked(config, op)
    check_sequences(op, x=x)

    def attend(x: Array) -> tuple[Array, MultiHeadAttentionSaved]:
        return self_attention_forward(params.attention, x, mask=mask, bias=bias, dropout=fold(dropout, 0), config=config)

    def feed_on(x: Array) -> tuple[Array, FeedForwardSaved | GatedFeedForwardSaved]:
        return feed(params.feed_forward, x, config)

    x, attention, attention_branch = branch_forward(op, params.attention_norm, x, attend, config, fold(dropout, 1))
    x, fed, feed_branch = branch_forward(op, params.feed_forward_norm, x, feed_on, config, fold(dropout, 2))
    return x, EncoderBlockSaved(attention, fed, attention_branch, feed_branch)


def encoder_block_backward(dout: Array, saved: EncoderBlockSaved, /) -> EncoderBlockGrads:
    """The vector-Jacobian product of `encoder_block_forward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : EncoderBlockSaved
        From `encoder_block_forward`.

    Returns
    -------
    EncoderBlockGrads
        ``dparams`` (an EncoderBlockParams), ``dx`` and ``dbias``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    saved = opened(saved)
    dx, fed, feed_norm = branch_backward(dout, saved.feed_forward_branch, lambda d: feed_backward(d, saved.feed_forward))
    dx, attended, norm = branch_backward(dx, saved.attention_branch, lambda d: self_attention_backward(d, saved.attention))
    return EncoderBlockGrads(EncoderBlockParams(attended.dparams, fed, norm, feed_norm), dx, attended.dbias)
