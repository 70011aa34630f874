"""The decoder: a stack of decoder blocks over the memory of an encoder, and a last norm if there is one. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn._attention.biases import LazyBias
from npattn._attention.masks import Mask
from npattn.layers.dropout import Dropout
from npattn.models._recompute import BlockInputs, block_forward, opened
from npattn.models._residual import add, fold
from npattn.models._stack import check_blocks, init_norm, last_norm_backward, last_norm_forward
from npattn.models._sublayers import check_sequences
from npattn.models.config import BlockConfig
from npattn.models.decoder_block import (
    DecoderBlockParams,
    DecoderBlockSaved,
    decoder_block_backward,
    decoder_block_forward,
)
from npattn.models.norm import NormParams, NormSaved


@with_tree_repr
class DecoderParams(NamedTuple):
    """The parameters of `decoder`, and the type of their gradients."""

    blocks: tuple[DecoderBlockParams, ...]
    norm: NormParams | None = None  # after the last block

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        blocks: int,
        width: int,
        heads: int,
        last_norm: bool | None = None,
        config: BlockConfig = BlockConfig(),  # noqa: B008 - it is frozen
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
        **options: Any,
    ) -> DecoderParams:
        """The parameters of so many blocks.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the weights are drawn from.
        blocks : int
            How many.
        width, heads : int
            C and H.
        last_norm : bool, optional
            Whether there is a norm after the last block; by default where the blocks' own come before what they do.
        config : BlockConfig, optional
            Kind and order of the norms.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.
        **options : optional
            ``hidden``, ``kv_heads``, ``head_size``, ``memory_width``, ``gated``, ``bias``, ``sinks``: as in
            `DecoderBlockParams.init`.

        Returns
        -------
        DecoderParams

        Raises
        ------
        ValueError
            If a size is less than 1, or does not divide another.

        Examples
        --------
        >>> import numpy as np
        >>> len(DecoderParams.init(np.random.default_rng(0), blocks=3, width=8, heads=2).blocks)
        3
        """
        check_blocks("DecoderParams.init", blocks)
        place: dict[str, Any] = {"xp": xp, "dtype": dtype, "device": device}
        sizes: dict[str, Any] = {"width": width, "heads": heads, "config": config, **options}
        made = tuple(DecoderBlockParams.init(rng, **sizes, **place) for _ in range(blocks))
        return cls(made, init_norm(last_norm, width, config, **place, **options))


@with_tree_repr
class DecoderSaved(NamedTuple):
    """What `decoder_backward` needs: what its parts saved."""

    blocks: tuple[DecoderBlockSaved | BlockInputs, ...]
    norm: NormSaved | None

    def block(self, n: int) -> DecoderBlockSaved:
        """What block ``n`` saved, made again if the pass was to be recomputed."""
        saved: DecoderBlockSaved = opened(self.blocks[n])
        return saved


@with_tree_repr
class DecoderGrads(NamedTuple):
    """Gradients of `decoder`; ``dbias`` is ``None`` if there was no bias, else the sum over the blocks."""

    dparams: DecoderParams
    dx: Array
    dmemory: Array
    dbias: Array | None


def decoder(
    params: DecoderParams,
    x: Array,
    memory: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> Array:
    """Block after block; see `decoder_forward`."""
    options: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask, "bias": bias, "dropout": dropout}
    return decoder_forward(params, x, memory, **options, recompute=recompute, config=config)[0]


def decoder_forward(
    params: DecoderParams,
    x: Array,
    memory: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    memory_mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> tuple[Array, DecoderSaved]:
    """``x = decoder_block(block, x, memory)`` for every block, and the last norm.

    Parameters
    ----------
    params : DecoderParams
        Of its blocks, one at least, and of the last norm if there is one.
    x : float array (..., T, C)
        The target sequence.
    memory : float array (..., S, C)
        What the encoder made of the source; every block attends to it.
    mask : Mask or bool array, optional
        True where a position of x may attend to another one of x: `npattn.causal_mask` if it is to be causal.
    memory_mask : Mask or bool array, optional
        True where a position of x may attend to one of the memory.
    bias : float array or LazyBias, optional
        Added to the scores of every block's self-attention.
    dropout : Dropout, optional
        As in `decoder_block_forward`, in block n by the rule ``dropout.fold(n)``.
    recompute : bool, optional
        Blocks save nothing but their inputs, and backward runs each once more. It takes the time of a forward pass, and memory
        for one block in the place of all; the gradients are the same bits.
    config : BlockConfig, optional
        Of the blocks and of the last norm.

    Returns
    -------
    out : array (..., T, C)
        In the dtype of x.
    saved : DecoderSaved
        For `decoder_backward`. ``saved.block(n)`` is what block n saved.

    Raises
    ------
    ValueError
        If shapes do not fit, there is no block, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.1; docs/derivation.md, "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_weights, causal_mask
    >>> params = DecoderParams.init(np.random.default_rng(0), blocks=2, width=8, heads=2)
    >>> out, saved = decoder_forward(params, np.ones((3, 8)), np.ones((5, 8)), mask=causal_mask())
    >>> attention_weights(saved.block(1).cross_attention.attention).shape
    (2, 3, 5)
    """
    op = "decoder"
    BlockConfig.checked(config, op, stack=True)
    check_blocks(op, len(params.blocks))
    check_sequences(op, x=x, memory=memory)
    same: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask, "bias": bias, "recompute": recompute}
    saved = []
    for n, block in enumerate(params.blocks):
        own: dict[str, Any] = {"dropout": fold(dropout, n), "config": config.of_block(n)}
        x, saved_block = block_forward(decoder_block_forward, block, x, memory, **same, **own)
        saved.append(saved_block)
    x, saved_norm = last_norm_forward(op, params.norm, x, config)
    return x, DecoderSaved(tuple(saved), saved_norm)


def decoder_backward(dout: Array, saved: DecoderSaved, /) -> DecoderGrads:
    """The vector-Jacobian product of `decoder_forward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : DecoderSaved
        From `decoder_forward`.

    Returns
    -------
    DecoderGrads
        ``dparams`` (a DecoderParams), ``dx``, ``dmemory`` and ``dbias``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    dx, dnorm = last_norm_backward(dout, saved.norm)
    dblocks: list[DecoderBlockParams] = []
    dmemory: Array | None = None
    dbias: Array | None = None
    for block in reversed(saved.blocks):
        grads = decoder_block_backward(dx, opened(block))
        dx, dmemory, dbias = grads.dx, add(dmemory, grads.dmemory), add(dbias, grads.dbias)
        dblocks.insert(0, grads.dparams)
    return DecoderGrads(DecoderParams(tuple(dblocks), dnorm), dx, dmemory, dbias)
