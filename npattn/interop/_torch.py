"""PyTorch's attention and transformer modules."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.trees import with_tree_repr
from npattn._attention.multi_head import MultiHeadParams
from npattn.interop._entries import Exported, Imported, as_state, read, write
from npattn.interop._torch_layouts import (
    Settings,
    attention_entries,
    check_export,
    check_heads,
    check_last_eps,
    heads_of,
    layer_entries,
    layer_settings,
    stack_export,
)
from npattn.interop._trees import block, blocks, leaves, norm
from npattn.models.config import BlockConfig, EncoderDecoderConfig
from npattn.models.decoder import DecoderParams
from npattn.models.decoder_block import DecoderBlockParams
from npattn.models.encoder import EncoderParams
from npattn.models.encoder_block import EncoderBlockParams


@with_tree_repr
class TorchTransformerParams(NamedTuple):
    """The parameters of PyTorch's ``nn.Transformer``: an encoder and a decoder, without embeddings and without logits."""

    encoder: EncoderParams
    decoder: DecoderParams


# Attention -------------------------------------------------------------------------------------------------------------------


def from_torch_attention(source: Any, /, *, heads: int | None = None) -> Imported:
    """The weights of ``nn.MultiheadAttention``.

    Parameters
    ----------
    source : module or state dict
        The module itself, or names and arrays of any library.
    heads : int, optional
        H; needed for a state dict.

    Returns
    -------
    Imported
        ``params`` (a `npattn.MultiHeadParams` of NumPy arrays) and ``config``, which is ``None``. ``add_zero_attn`` becomes sinks
        of 0.

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over; ``add_bias_kv`` has no place here.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> state = {"in_proj_weight": np.ones((12, 4)), "out_proj.weight": np.ones((4, 4))}
    >>> from_torch_attention(state, heads=2).params.w_q.shape
    (4, 2, 2)
    """
    op = "from_torch_attention"
    if hasattr(source, "num_heads"):
        if heads not in (None, source.num_heads):
            raise ValueError(f"{op}: heads is {source.num_heads} in the module, but {heads} was given")
        heads = source.num_heads
    if heads is None:
        raise ValueError(f"{op}: heads is needed: a state dict does not say how many there are")
    arrays = read(op, as_state(op, source), heads)
    params = leaves(MultiHeadParams, arrays, "")
    if getattr(source, "add_zero_attn", False):
        params = params._replace(sinks=np.zeros(heads, params.w_q.dtype))
    return Imported(params, None)


def to_torch_attention(params: MultiHeadParams, /) -> Exported:
    """Our parameters in the layout of ``nn.MultiheadAttention``.

    Parameters
    ----------
    params : MultiHeadParams
        As many key/value heads as query heads.

    Returns
    -------
    Exported
        ``state`` (names and NumPy arrays) and ``settings``, the keyword arguments of the module.

    Raises
    ------
    ValueError
        If PyTorch's module cannot hold them.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import MultiHeadParams
    >>> to_torch_attention(MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2)).settings
    {'embed_dim': 4, 'num_heads': 2, 'kdim': 4, 'vdim': 4, 'bias': True, 'add_zero_attn': False, 'batch_first': True}
    """
    op = "to_torch_attention"
    check_heads(op, params)
    width, heads, _ = params.w_q.shape
    kdim, vdim = params.w_k.shape[0], params.w_v.shape[0]
    zero = params.sinks is not None and not np.any(np.asarray(params.sinks))
    apart = not kdim == vdim == width
    entries = attention_entries("", "", heads, bias=params.b_q is not None, apart=apart, widths="CKV")
    settings = {
        "embed_dim": width,
        "num_heads": heads,
        "kdim": kdim,
        "vdim": vdim,
        "bias": params.b_q is not None,
        "add_zero_attn": zero,
        "batch_first": True,
    }
    return Exported(write(op, entries, params._replace(sinks=None) if zero else params), settings)


# Layers ----------------------------------------------------------------------------------------------------------------------


def from_torch_encoder_layer(
    source: Any,
    /,
    *,
    heads: int | None = None,
    norm_first: bool | None = None,
    activation: str | None = None,
    eps: float | None = None,
) -> Imported:
    """The weights of ``nn.TransformerEncoderLayer``.

    Parameters
    ----------
    source : module or state dict
        The module itself, which also says the rest, or names and arrays of any library.
    heads : int, optional
        H; needed for a state dict.
    norm_first : bool, optional
        False by default, as in PyTorch.
    activation : str, optional
        ``"relu"`` by default, as in PyTorch.
    eps : float, optional
        1e-5 by default, as in PyTorch.

    Returns
    -------
    Imported
        ``params`` (an `npattn.models.EncoderBlockParams` of NumPy arrays) and ``config`` (a `npattn.models.BlockConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over, or a setting contradicts the module.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, EncoderBlockParams
    >>> params = EncoderBlockParams.init(np.random.default_rng(0), width=4, heads=2)
    >>> state = to_torch_encoder_layer(params, BlockConfig("post", activation="relu")).state
    >>> from_torch_encoder_layer(state, heads=2).config.norm_order
    'post'
    """
    op = "from_torch_encoder_layer"
    heads, config = Settings(heads, norm_first, activation, eps).checked(op, source)
    return Imported(block(read(op, as_state(op, source), heads), ""), config)


def to_torch_encoder_layer(params: EncoderBlockParams, config: BlockConfig, /) -> Exported:
    """Our parameters in the layout of ``nn.TransformerEncoderLayer``.

    Parameters
    ----------
    params : EncoderBlockParams
        As many key/value heads as query heads, a feed-forward network without a gate.
    config : BlockConfig
        What they were made for.

    Returns
    -------
    Exported
        ``state`` (names and NumPy arrays) and ``settings``, the keyword arguments of the module. By name it knows ``relu`` and
        ``gelu``; another activation must be given as a function.

    Raises
    ------
    ValueError
        If PyTorch's module cannot hold them, or does not compute what config says.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, EncoderBlockParams
    >>> params = EncoderBlockParams.init(np.random.default_rng(0), width=4, heads=2)
    >>> to_torch_encoder_layer(params, BlockConfig("pre")).settings["norm_first"]
    True
    """
    op = "to_torch_encoder_layer"
    check_export(op, config)
    entries = layer_entries("", "", heads_of(op, params), bias=params.attention.b_q is not None, cross=False)
    return Exported(write(op, entries, params), layer_settings(params, config))


def from_torch_decoder_layer(
    source: Any,
    /,
    *,
    heads: int | None = None,
    norm_first: bool | None = None,
    activation: str | None = None,
    eps: float | None = None,
) -> Imported:
    """The weights of ``nn.TransformerDecoderLayer``.

    Parameters
    ----------
    source : module or state dict
        The module itself, which also says the rest, or names and arrays of any library.
    heads, norm_first, activation, eps : optional
        As in `from_torch_encoder_layer`.

    Returns
    -------
    Imported
        ``params`` (a `npattn.models.DecoderBlockParams` of NumPy arrays) and ``config`` (a `npattn.models.BlockConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over, or a setting contradicts the module.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, DecoderBlockParams
    >>> params = DecoderBlockParams.init(np.random.default_rng(0), width=4, heads=2)
    >>> state = to_torch_decoder_layer(params, BlockConfig("pre")).state
    >>> from_torch_decoder_layer(state, heads=2, norm_first=True, activation="gelu").config == BlockConfig("pre")
    True
    """
    op = "from_torch_decoder_layer"
    heads, config = Settings(heads, norm_first, activation, eps).checked(op, source)
    return Imported(block(read(op, as_state(op, source), heads), ""), config)


def to_torch_decoder_layer(params: DecoderBlockParams, config: BlockConfig, /) -> Exported:
    """Our parameters in the layout of ``nn.TransformerDecoderLayer``.

    Parameters
    ----------
    params : DecoderBlockParams
        With as many key/value heads as query heads, and a memory as wide as the target.
    config : BlockConfig
        What they were made for.

    Returns
    -------
    Exported
        As from `to_torch_encoder_layer`.

    Raises
    ------
    ValueError
        If PyTorch's module cannot hold them, or does not compute what config says.

    Examples
    --------
    See `from_torch_decoder_layer`.
    """
    op = "to_torch_decoder_layer"
    check_export(op, config)
    entries = layer_entries("", "", heads_of(op, params), bias=params.attention.b_q is not None, cross=True)
    return Exported(write(op, entries, params), layer_settings(params, config))


# Stacks ----------------------------------------------------------------------------------------------------------------------


def from_torch_encoder(
    source: Any,
    /,
    *,
    heads: int | None = None,
    norm_first: bool | None = None,
    activation: str | None = None,
    eps: float | None = None,
) -> Imported:
    """The weights of ``nn.TransformerEncoder``.

    Parameters
    ----------
    source : module or state dict
        The module itself, which also says the rest, or names and arrays of any library.
    heads, norm_first, activation, eps : optional
        As in `from_torch_encoder_layer`.

    Returns
    -------
    Imported
        ``params`` (an `npattn.models.EncoderParams` of NumPy arrays) and ``config`` (a `npattn.models.BlockConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over, or a setting contradicts the module.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, EncoderParams
    >>> params = EncoderParams.init(np.random.default_rng(0), blocks=2, width=4, heads=2)
    >>> state = to_torch_encoder(params, BlockConfig("pre")).state
    >>> imported = from_torch_encoder(state, heads=2, norm_first=True, activation="gelu")
    >>> len(imported.params.blocks), bool(np.all(imported.params.blocks[1].attention.w_q == params.blocks[1].attention.w_q))
    (2, True)
    """
    op = "from_torch_encoder"
    heads, config = Settings(heads, norm_first, activation, eps).checked(op, source)
    check_last_eps(op, source, config)
    arrays = read(op, as_state(op, source), heads)
    return Imported(EncoderParams(blocks(arrays, "blocks."), norm(arrays, "norm.")), config)


def to_torch_encoder(params: EncoderParams, config: BlockConfig, /) -> Exported:
    """Our parameters in the layout of ``nn.TransformerEncoder``.

    Parameters
    ----------
    params : EncoderParams
        Blocks as in `to_torch_encoder_layer`.
    config : BlockConfig
        What they were made for.

    Returns
    -------
    Exported
        ``state``, and ``settings``: the keyword arguments of a layer, and ``num_layers``.

    Raises
    ------
    ValueError
        If PyTorch's modules cannot hold them, or do not compute what config says.

    Examples
    --------
    See `from_torch_encoder`.
    """
    op = "to_torch_encoder"
    entries, settings = stack_export(op, params, config, "", "", cross=False)
    return Exported(write(op, entries, params), settings)


def from_torch_decoder(
    source: Any,
    /,
    *,
    heads: int | None = None,
    norm_first: bool | None = None,
    activation: str | None = None,
    eps: float | None = None,
) -> Imported:
    """The weights of ``nn.TransformerDecoder``.

    Parameters
    ----------
    source : module or state dict
        The module itself, which also says the rest, or names and arrays of any library.
    heads, norm_first, activation, eps : optional
        As in `from_torch_encoder_layer`.

    Returns
    -------
    Imported
        ``params`` (a `npattn.models.DecoderParams` of NumPy arrays) and ``config`` (a `npattn.models.BlockConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over, or a setting contradicts the module.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, DecoderParams
    >>> params = DecoderParams.init(np.random.default_rng(0), blocks=2, width=4, heads=2)
    >>> from_torch_decoder(to_torch_decoder(params, BlockConfig("post")).state, heads=2).params.norm
    NormParams(weight=float64[4], bias=float64[4])
    """
    op = "from_torch_decoder"
    heads, config = Settings(heads, norm_first, activation, eps).checked(op, source)
    check_last_eps(op, source, config)
    arrays = read(op, as_state(op, source), heads)
    return Imported(DecoderParams(blocks(arrays, "blocks."), norm(arrays, "norm.")), config)


def to_torch_decoder(params: DecoderParams, config: BlockConfig, /) -> Exported:
    """Our parameters in the layout of ``nn.TransformerDecoder``.

    Parameters
    ----------
    params : DecoderParams
        Blocks as in `to_torch_decoder_layer`.
    config : BlockConfig
        What they were made for.

    Returns
    -------
    Exported
        ``state``, and ``settings``: the keyword arguments of a layer, and ``num_layers``.

    Raises
    ------
    ValueError
        If PyTorch's modules cannot hold them, or do not compute what config says.

    Examples
    --------
    See `from_torch_decoder`.
    """
    op = "to_torch_decoder"
    entries, settings = stack_export(op, params, config, "", "", cross=True)
    return Exported(write(op, entries, params), settings)


def from_torch_transformer(
    source: Any,
    /,
    *,
    heads: int | None = None,
    norm_first: bool | None = None,
    activation: str | None = None,
    eps: float | None = None,
) -> Imported:
    """The weights of ``nn.Transformer``, which has neither embeddings nor logits.

    Parameters
    ----------
    source : module or state dict
        The module itself, which also says the rest, or names and arrays of any library.
    heads, norm_first, activation, eps : optional
        As in `from_torch_encoder_layer`.

    Returns
    -------
    Imported
        ``params`` (a `TorchTransformerParams`, for `npattn.models.encoder` and `npattn.models.decoder`) and ``config`` (a
        `npattn.models.EncoderDecoderConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over, or a setting contradicts the module.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import DecoderParams, EncoderDecoderConfig, EncoderParams
    >>> rng, sizes = np.random.default_rng(0), dict(blocks=1, width=4, heads=2)
    >>> params = TorchTransformerParams(EncoderParams.init(rng, **sizes), DecoderParams.init(rng, **sizes))
    >>> state = to_torch_transformer(params, EncoderDecoderConfig()).state
    >>> from_torch_transformer(state, heads=2).config.decoder.activation
    'relu'
    """
    op = "from_torch_transformer"
    heads, config = Settings(heads, norm_first, activation, eps).checked(op, source)
    for name in ("encoder", "decoder"):
        check_last_eps(op, getattr(source, name, None), config)
    arrays = read(op, as_state(op, source), heads)
    encoder = EncoderParams(blocks(arrays, "encoder.blocks."), norm(arrays, "encoder.norm."))
    decoder = DecoderParams(blocks(arrays, "decoder.blocks."), norm(arrays, "decoder.norm."))
    return Imported(TorchTransformerParams(encoder, decoder), EncoderDecoderConfig(config, config))


def to_torch_transformer(params: TorchTransformerParams, config: EncoderDecoderConfig, /) -> Exported:
    """Our parameters in the layout of ``nn.Transformer``.

    Parameters
    ----------
    params : TorchTransformerParams
        An encoder and a decoder; those of an `npattn.models.EncoderDecoderParams` serve as well.
    config : EncoderDecoderConfig
        What they were made for; in PyTorch, encoder and decoder have the same settings.

    Returns
    -------
    Exported
        ``state`` and ``settings``, the keyword arguments of the module.

    Raises
    ------
    ValueError
        If PyTorch's module cannot hold them, or does not compute what config says.

    Examples
    --------
    See `from_torch_transformer`.
    """
    op = "to_torch_transformer"
    EncoderDecoderConfig.checked(config, op)
    if config.encoder != config.decoder:
        raise ValueError(
            f"{op}: encoder and decoder have the same settings in PyTorch, got {config.encoder} and {config.decoder}"
        )
    ends = TorchTransformerParams(params.encoder, params.decoder)
    encoder, settings = stack_export(op, ends.encoder, config.encoder, "encoder.", "encoder.", cross=False)
    decoder, _ = stack_export(op, ends.decoder, config.decoder, "decoder.", "decoder.", cross=True)
    counts = {"num_encoder_layers": settings.pop("num_layers"), "num_decoder_layers": len(ends.decoder.blocks)}
    return Exported(write(op, [*encoder, *decoder], ends), {**settings, **counts})
