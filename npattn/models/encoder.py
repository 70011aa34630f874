"""The encoder: a stack of encoder blocks, and a last norm if there is one. Wiring only."""

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
from npattn.models.encoder_block import (
    EncoderBlockParams,
    EncoderBlockSaved,
    encoder_block_backward,
    encoder_block_forward,
)
from npattn.models.norm import NormParams, NormSaved


@with_tree_repr
class EncoderParams(NamedTuple):
    """The parameters of `encoder`, and the type of their gradients."""

    blocks: tuple[EncoderBlockParams, ...]
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
    ) -> EncoderParams:
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
            ``hidden``, ``kv_heads``, ``head_size``, ``gated``, ``bias``, ``sinks``: as in `EncoderBlockParams.init`.

        Returns
        -------
        EncoderParams

        Raises
        ------
        ValueError
            If a size is less than 1, or does not divide another.

        Examples
        --------
        >>> import numpy as np
        >>> params = EncoderParams.init(np.random.default_rng(0), blocks=3, width=8, heads=2)
        >>> len(params.blocks), params.norm
        (3, NormParams(weight=float64[8], bias=float64[8]))
        """
        check_blocks("EncoderParams.init", blocks)
        place: dict[str, Any] = {"xp": xp, "dtype": dtype, "device": device}
        sizes: dict[str, Any] = {"width": width, "heads": heads, "config": config, **options}
        made = tuple(EncoderBlockParams.init(rng, **sizes, **place) for _ in range(blocks))
        return cls(made, init_norm(last_norm, width, config, **place, **options))


@with_tree_repr
class EncoderSaved(NamedTuple):
    """What `encoder_backward` needs: what its parts saved."""

    blocks: tuple[EncoderBlockSaved | BlockInputs, ...]
    norm: NormSaved | None

    def block(self, n: int) -> EncoderBlockSaved:
        """What block ``n`` saved, made again if the pass was to be recomputed."""
        saved: EncoderBlockSaved = opened(self.blocks[n])
        return saved


@with_tree_repr
class EncoderGrads(NamedTuple):
    """Gradients of `encoder`; ``dbias`` is ``None`` if there was no bias, else the sum over the blocks."""

    dparams: EncoderParams
    dx: Array
    dbias: Array | None


def encoder(
    params: EncoderParams,
    x: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> Array:
    """Block after block; see `encoder_forward`."""
    return encoder_forward(params, x, mask=mask, bias=bias, dropout=dropout, recompute=recompute, config=config)[0]


def encoder_forward(
    params: EncoderParams,
    x: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    dropout: Dropout | None = None,
    recompute: bool = False,
    config: BlockConfig = BlockConfig(),  # noqa: B008
) -> tuple[Array, EncoderSaved]:
    """``x = encoder_block(block, x)`` for every block, and the last norm.

    Parameters
    ----------
    params : EncoderParams
        Of its blocks, one at least, and of the last norm if there is one.
    x : float array (..., T, C)
        A sequence.
    mask : Mask or bool array, optional
        True where a position may attend to another, in every block.
    bias : float array or LazyBias, optional
        Added to the scores of every block.
    dropout : Dropout, optional
        As in `encoder_block_forward`, in block n by the rule ``dropout.fold(n)``.
    recompute : bool, optional
        Blocks save nothing but their inputs, and backward runs each once more. It takes the time of a forward pass, and memory
        for one block in the place of all; the gradients are the same bits.
    config : BlockConfig, optional
        Of the blocks and of the last norm.

    Returns
    -------
    out : array (..., T, C)
        In the dtype of x.
    saved : EncoderSaved
        For `encoder_backward`. ``saved.block(n)`` is what block n saved.

    Raises
    ------
    ValueError
        If shapes do not fit, there is no block, or a setting is not known.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.1. Chen et al.: Training Deep Nets with Sublinear Memory Cost
    (2016), for recomputation. docs/derivation.md, "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import attention_weights
    >>> params = EncoderParams.init(np.random.default_rng(0), blocks=2, width=8, heads=2)
    >>> out, saved = encoder_forward(params, np.ones((3, 8)))
    >>> attention_weights(saved.block(1).attention.attention).shape
    (2, 3, 3)
    """
    op = "encoder"
    BlockConfig.checked(config, op, stack=True)
    check_blocks(op, len(params.blocks))
    check_sequences(op, x=x)
    saved = []
    for n, block in enumerate(params.blocks):
        options: dict[str, Any] = {"mask": mask, "bias": bias, "dropout": fold(dropout, n), "config": config.of_block(n)}
        x, saved_block = block_forward(encoder_block_forward, block, x, recompute=recompute, **options)
        saved.append(saved_block)
    x, saved_norm = last_norm_forward(op, params.norm, x, config)
    return x, EncoderSaved(tuple(saved), saved_norm)


def encoder_backward(dout: Array, saved: EncoderSaved, /) -> EncoderGrads:
    """The vector-Jacobian product of `encoder_forward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : EncoderSaved
        From `encoder_forward`.

    Returns
    -------
    EncoderGrads
        ``dparams`` (an EncoderParams), ``dx`` and ``dbias``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    dx, dnorm = last_norm_backward(dout, saved.norm)
    dblocks: list[EncoderBlockParams] = []
    dbias: Array | None = None
    for block in reversed(saved.blocks):
        grads = encoder_block_backward(dx, opened(block))
        dx, dbias = grads.dx, add(dbias, grads.dbias)
        dblocks.insert(0, grads.dparams)
    return EncoderGrads(EncoderParams(tuple(dblocks), dnorm), dx, dbias)
