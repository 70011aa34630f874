"""The decoder block: self-attention, cross-attention, a feed-forward network, each in a residual branch. Wiring only."""

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
    cross_attention_backward,
    cross_attention_forward,
    feed,
    feed_backward,
    init_feed_forward,
    self_attention_backward,
    self_attention_forward,
)
from npattn.models.config import BlockConfig
from npattn.models.norm import NormParams


@with_tree_repr
class DecoderBlockParams(NamedTuple):
    """The parameters of `decoder_block`, and the type of their gradients. The feed-forward network's type says which it is."""

    attention: MultiHeadParams
    cross_attention: MultiHeadParams
    feed_forward: FeedForwardParams | GatedFeedForwardParams
    attention_norm: NormParams
    cross_attention_norm: NormParams
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
        memory_width: int | None = None,
        gated: bool = False,
        bias: bool = True,
        sinks: bool = False,
        config: BlockConfig = BlockConfig(),  # noqa: B008 - it is frozen
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
    ) -> DecoderBlockParams:
        """Xavier-uniform weights, zero biases, norms that change nothing but size.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the weights are drawn from.
        width : int
            C.
        heads : int
            H, of both attentions.
        hidden : int, optional
            F, of the feed-forward network; 4 C by default.
        kv_heads, head_size : int, optional
            As in `npattn.MultiHeadParams.init`.
        memory_width : int, optional
            C of the memory; ``width`` by default.
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
        DecoderBlockParams

        Raises
        ------
        ValueError
            If a size is less than 1, or does not divide another.

        Examples
        --------
        >>> import numpy as np
        >>> DecoderBlockParams.init(np.random.default_rng(0), width=8, heads=2, memory_width=6).cross_attention.w_k.shape
        (6, 2, 4)
        """
        place: dict[str, Any] = {"xp": xp, "dtype": dtype, "device": device}
        heads_of: dict[str, Any] = {"width": width, "heads": heads, "kv_heads": kv_heads, "head_size": head_size}
        norm_bias = bias and config.norm == "layer"
        return cls(
            MultiHeadParams.init(rng, **heads_of, bias=bias, sinks=sinks, **place),
            MultiHeadParams.init(rng, **heads_of, kv_width=memory_width, bias=bias, sinks=sinks, **place),
            init_feed_forward(rng, width=width, hidden=hidden, gated=gated, bias=bias, **place),
            *(NormParams.init(width=width, bias=norm_bias, **place) for _ in range(3)),
        )


@with_tree_repr
class DecoderBlockSaved(NamedTuple):
    """What `decoder_block_backward` needs: what its parts saved.

    ``npattn.attention_weights(saved.cross_attention.attention)`` says which tokens of the memory every token looked at.
    """

    attention: MultiHeadAttentionSaved
    cross_attention: MultiHeadAttentionSaved
    feed_forward: FeedForwardSaved | GatedFeedForwardSaved
    attention_branch: BranchSaved
    cross_attention_branch: BranchSaved
    feed_forward_branch: BranchSaved


@with_tree_repr
class DecoderBlockGrads(NamedTuple):
    """Gradients of `decoder_block`; ``dbias`` is ``None`` if there was no bias."""

    dparams: DecoderBlockParams
    dx: Array
    dmemory: Array
    dbias: Array | None


def decoder_block(
    params: DecoderBlockParams,
    x: Array,
    memory: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> Array:
    """Self-attention, cross-attention and a feed-forward network; see `decoder_block_forward`."""
    return decoder_block_forward(
        params, x, memory, mask=mask, memory_mask=memory_mask, bias=bias, dropout=dropout, config=config
    )[0]


def decoder_block_forward(
    params: DecoderBlockParams,
    x: Array,
    memory: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> tuple[Array, DecoderBlockSaved]:
    """Self-attention, attention over ``memory``, a feed-forward network: each ``x + f(norm(x))``, or ``norm(x + f(x))``.

    Parameters
    ----------
    params : DecoderBlockParams
        Of its parts.
    x : float array (..., T, C)
        The target sequence.
    memory : float array (..., S, C)
        What the encoder made of the source; its C may differ from that of x.
    mask : Mask or bool array, optional
        True where a position of x may attend to another one of x: `npattn.causal_mask` if it is to be causal.
    memory_mask : Mask or bool array, optional
        True where a position of x may attend to one of the memory.
    bias : float array or LazyBias, optional
        Added to the scores of self-attention.
    dropout : Dropout, optional
        Drops weights of both attentions and elements of what the branches add, each by a rule that is folded from this one.
    config : BlockConfig, optional
        Order and kind of the norms, activation, scale, softcap; rotary positions and window of self-attention.

    Returns
    -------
    out : array (..., T, C)
        In the dtype of x.
    saved : DecoderBlockSaved
        For `decoder_block_backward`.

    Raises
    ------
    ValueError
        If shapes do not fit or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    encoder_block_forward : Without cross-attention.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.1; docs/derivation.md, "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import causal_mask
    >>> params = DecoderBlockParams.init(np.random.default_rng(0), width=8, heads=2)
    >>> out, saved = decoder_block_forward(params, np.ones((3, 8)), np.ones((5, 8)), mask=causal_mask())
    >>> grads = decoder_block_backward(np.ones((3, 8)), saved)
    >>> grads.dx.shape, grads.dmemory.shape
    ((3, 8), (5, 8))
    """
    op = "decoder_block"
    BlockConfig.checked(config, op)
    check_sequences(op, x=x, memory=memory)

    def attend(x: Array) -> tuple[Array, MultiHeadAttentionSaved]:
        return self_attention_forward(params.attention, x, mask=mask, bias=bias, dropout=fold(dropout, 0), config=config)

    def attend_to_memory(x: Array) -> tuple[Array, MultiHeadAttentionSaved]:
        options: dict[str, Any] = {"mask": memory_mask, "dropout": fold(dropout, 2), "config": config}
        return cross_attention_forward(params.cross_attention, x, memory, **options)

    def feed_on(x: Array) -> tuple[Array, FeedForwardSaved | GatedFeedForwardSaved]:
        return feed(params.feed_forward, x, config)

    x, attended, branch = branch_forward(op, params.attention_norm, x, attend, config, fold(dropout, 1))
    x, crossed, cross_branch = branch_forward(op, params.cross_attention_norm, x, attend_to_memory, config, fold(dropout, 3))
    x, fed, feed_branch = branch_forward(op, params.feed_forward_norm, x, feed_on, config, fold(dropout, 4))
    return x, DecoderBlockSaved(attended, crossed, fed, branch, cross_branch, feed_branch)


def decoder_block_backward(dout: Array, saved: DecoderBlockSaved, /) -> DecoderBlockGrads:
    """The vector-Jacobian product of `decoder_block_forward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : DecoderBlockSaved
        From `decoder_block_forward`.

    Returns
    -------
    DecoderBlockGrads
        ``dparams`` (a DecoderBlockParams), ``dx``, ``dmemory`` and ``dbias``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    saved = opened(saved)
    dx, fed, feed_norm = branch_backward(dout, saved.feed_forward_branch, lambda d: feed_backward(d, saved.feed_forward))
    dx, crossed, cross_norm = branch_backward(
        dx, saved.cross_attention_branch, lambda d: cross_attention_backward(d, saved.cross_attention)
    )
    dx, attended, norm = branch_backward(dx, saved.attention_branch, lambda d: self_attention_backward(d, saved.attention))
    dparams = DecoderBlockParams(attended.dparams, crossed.dparams, fed, norm, cross_norm, feed_norm)
    return DecoderBlockGrads(dparams, dx, crossed.dx_kv, attended.dbias)
