"""PyTorch's attention and transformer modules.

``nn.MultiheadAttention`` packs queries, keys and values as rows of one matrix, unless keys or values have another width; all
matrices multiply from the left; head h is a run of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.trees import with_tree_repr
from npattn._attention.multi_head import MultiHeadParams
from npattn.interop._entries import (
    LAYOUTS,
    Entry,
    Exported,
    Imported,
    as_state,
    bias_of_heads,
    count_layers,
    heads_to_rows,
    linear,
    packed,
    read,
    rows_to_heads,
    same,
    write,
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


# Layouts ---------------------------------------------------------------------------------------------------------------------


def _attention(theirs: str, ours: str, heads: int, *, bias: bool, apart: bool = False, widths: str = "CCC") -> list[Entry]:
    """``widths`` are the letters of the widths of queries, keys and values."""
    matrices = [f"{ours}w_q", f"{ours}w_k", f"{ours}w_v"]
    if apart:
        names = [f"{theirs}{x}_proj_weight" for x in "qkv"]
        found = [rows_to_heads(n, o, f"C{w}", heads) for n, o, w in zip(names, matrices, widths, strict=True)]
    else:
        found = [packed(f"{theirs}in_proj_weight", matrices, f"P{widths[0]}", lambda o: rows_to_heads("", o, "", heads))]
    found.append(heads_to_rows(f"{theirs}out_proj.weight", f"{ours}w_o", "CC", heads))
    if bias:
        biases = [f"{ours}b_q", f"{ours}b_k", f"{ours}b_v"]
        found.append(packed(f"{theirs}in_proj_bias", biases, "P", lambda o: bias_of_heads("", o, "", heads)))
        found.append(same(f"{theirs}out_proj.bias", f"{ours}b_o", "C"))
    return found


def _norm(theirs: str, ours: str, *, bias: bool) -> list[Entry]:
    found = [same(f"{theirs}weight", f"{ours}weight", "C")]
    return [*found, same(f"{theirs}bias", f"{ours}bias", "C")] if bias else found


def _layer(theirs: str, ours: str, heads: int, *, bias: bool, cross: bool) -> list[Entry]:
    names = ["attention", "cross_attention"] if cross else ["attention"]
    found = _attention(f"{theirs}self_attn.", f"{ours}attention.", heads, bias=bias)
    if cross:
        found += _attention(f"{theirs}multihead_attn.", f"{ours}cross_attention.", heads, bias=bias)
    found.append(linear(f"{theirs}linear1.weight", f"{ours}feed_forward.w_in", "FC"))
    found.append(linear(f"{theirs}linear2.weight", f"{ours}feed_forward.w_out", "CF"))
    if bias:
        found.append(same(f"{theirs}linear1.bias", f"{ours}feed_forward.b_in", "F"))
        found.append(same(f"{theirs}linear2.bias", f"{ours}feed_forward.b_out", "C"))
    for n, name in enumerate([*names, "feed_forward"], start=1):
        found += _norm(f"{theirs}norm{n}.", f"{ours}{name}_norm.", bias=bias)
    return found


def _stack(
    theirs: str, ours: str, heads: int, count: int, *, bias: bool, last: bool, last_bias: bool, cross: bool
) -> list[Entry]:
    found = []
    for n in range(count):
        found += _layer(f"{theirs}layers.{n}.", f"{ours}blocks.{n}.", heads, bias=bias, cross=cross)
    return [*found, *_norm(f"{theirs}norm.", f"{ours}norm.", bias=last_bias)] if last else found


def _attention_of(names: set[str], heads: int) -> list[Entry]:
    apart = "q_proj_weight" in names
    return _attention(
        "", "", heads, bias="out_proj.bias" in names or "in_proj_bias" in names, apart=apart, widths="CKV" if apart else "CCC"
    )


def _layer_of(names: set[str], heads: int, *, cross: bool) -> list[Entry]:
    return _layer("", "", heads, bias="linear1.bias" in names, cross=cross)


def _stack_of(names: set[str], heads: int, theirs: str = "", ours: str = "", *, cross: bool) -> list[Entry]:
    own = {name.removeprefix(theirs) for name in names if name.startswith(theirs)}
    return _stack(
        theirs,
        ours,
        heads,
        count_layers(own, "layers."),
        bias="layers.0.linear1.bias" in own,
        last="norm.weight" in own,
        last_bias="norm.bias" in own,
        cross=cross,
    )


def _transformer_of(names: set[str], heads: int) -> list[Entry]:
    return [
        *_stack_of(names, heads, "encoder.", "encoder.", cross=False),
        *_stack_of(names, heads, "decoder.", "decoder.", cross=True),
    ]


LAYOUTS.update(
    from_torch_attention=lambda names, heads, _: _attention_of(names, heads),
    from_torch_encoder_layer=lambda names, heads, _: _layer_of(names, heads, cross=False),
    from_torch_decoder_layer=lambda names, heads, _: _layer_of(names, heads, cross=True),
    from_torch_encoder=lambda names, heads, _: _stack_of(names, heads, cross=False),
    from_torch_decoder=lambda names, heads, _: _stack_of(names, heads, cross=True),
    from_torch_transformer=lambda names, heads, _: _transformer_of(names, heads),
)


# Settings --------------------------------------------------------------------------------------------------------------------


class _Settings(NamedTuple):
    """What a state dict does not say; ``None`` where nobody said it."""

    heads: int | None
    norm_first: bool | None
    activation: str | None
    eps: float | None

    def checked(self, op: str, source: Any) -> tuple[int, BlockConfig]:
        """H and the config, from a module where that is one, else as PyTorch's defaults are."""
        found = self
        if hasattr(source, "state_dict"):
            layer = source
            for name in ("encoder", "layers"):
                layer = getattr(layer, name, layer)
            layer = layer[0] if hasattr(layer, "__getitem__") else layer
            own = _Settings(layer.self_attn.num_heads, layer.norm_first, _activation_name(op, layer.activation), layer.norm1.eps)
            for name, said, is_so in zip(_Settings._fields, self, own, strict=True):
                if said is not None and said != is_so:
                    raise ValueError(f"{op}: {name} is {is_so!r} in the module, but {said!r} was given")
            found = own
        if found.heads is None:
            raise ValueError(f"{op}: heads is needed: a state dict does not say how many there are")
        config = BlockConfig(
            "pre" if found.norm_first else "post",
            activation="relu" if found.activation is None else found.activation,
            eps=1e-5 if found.eps is None else found.eps,
        )
        return found.heads, config


def _activation_name(op: str, activation: Any) -> str:
    name = getattr(activation, "__name__", type(activation).__name__).lower()
    if name == "gelu" and getattr(activation, "approximate", "none") == "tanh":
        name = "gelu_tanh"
    if name not in ("relu", "gelu", "gelu_tanh", "silu"):
        raise ValueError(f"{op}: npattn has no activation {name!r}")
    return name


def _check_export(op: str, config: Any) -> None:
    """Nothing that PyTorch's layers do not compute."""
    BlockConfig.checked(config, op, stack=True)
    plain = BlockConfig(config.norm_order, eps=config.eps, activation=config.activation)
    if config != plain:
        names = [name for name, ours, theirs in zip(config._fields, config, plain, strict=True) if ours != theirs]
        raise ValueError(f"{op}: PyTorch's layers have no {', '.join(names)} such as config says")


def _layer_settings(params: Any, config: BlockConfig) -> dict[str, Any]:
    """Keyword arguments of the constructor."""
    width, heads, _ = params.attention.w_q.shape
    return {
        "d_model": width,
        "nhead": heads,
        "dim_feedforward": params.feed_forward.w_in.shape[1],
        "activation": config.activation,
        "layer_norm_eps": config.eps,
        "norm_first": config.norm_order == "pre",
        "bias": params.attention.b_q is not None,
        "batch_first": True,
    }


def _heads_of(op: str, params: Any) -> int:
    """H, which must be K, of heads that together are as wide as the model."""
    for attention in (params.attention, *([params.cross_attention] if hasattr(params, "cross_attention") else [])):
        _check_heads(op, attention)
    return int(params.attention.w_q.shape[1])


def _check_heads(op: str, params: MultiHeadParams) -> None:
    width, heads, size = params.w_q.shape
    if params.w_k.shape[1] != heads:
        raise ValueError(
            f"{op}: PyTorch's attention has as many key/value heads as query heads, got K = {params.w_k.shape[1]}, H = {heads}"
        )
    if params.w_v.shape[2] != size or heads * size != width or params.w_o.shape[2] != width:
        raise ValueError(f"{op}: in PyTorch's attention D = E, and H·D is the width of queries and output, got {params}")


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
    _check_heads(op, params)
    width, heads, _ = params.w_q.shape
    kdim, vdim = params.w_k.shape[0], params.w_v.shape[0]
    zero = params.sinks is not None and not np.any(np.asarray(params.sinks))
    apart = not kdim == vdim == width
    entries = _attention("", "", heads, bias=params.b_q is not None, apart=apart, widths="CKV")
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
    heads, config = _Settings(heads, norm_first, activation, eps).checked(op, source)
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
    _check_export(op, config)
    entries = _layer("", "", _heads_of(op, params), bias=params.attention.b_q is not None, cross=False)
    return Exported(write(op, entries, params), _layer_settings(params, config))


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
    heads, config = _Settings(heads, norm_first, activation, eps).checked(op, source)
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
    _check_export(op, config)
    entries = _layer("", "", _heads_of(op, params), bias=params.attention.b_q is not None, cross=True)
    return Exported(write(op, entries, params), _layer_settings(params, config))


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
    heads, config = _Settings(heads, norm_first, activation, eps).checked(op, source)
    _check_last_eps(op, source, config)
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
    entries, settings = _stack_export(op, params, config, "", "", cross=False)
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
    heads, config = _Settings(heads, norm_first, activation, eps).checked(op, source)
    _check_last_eps(op, source, config)
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
    entries, settings = _stack_export(op, params, config, "", "", cross=True)
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
    heads, config = _Settings(heads, norm_first, activation, eps).checked(op, source)
    for name in ("encoder", "decoder"):
        _check_last_eps(op, getattr(source, name, None), config)
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
    encoder, settings = _stack_export(op, ends.encoder, config.encoder, "encoder.", "encoder.", cross=False)
    decoder, _ = _stack_export(op, ends.decoder, config.decoder, "decoder.", "decoder.", cross=True)
    counts = {"num_encoder_layers": settings.pop("num_layers"), "num_decoder_layers": len(ends.decoder.blocks)}
    return Exported(write(op, [*encoder, *decoder], ends), {**settings, **counts})


def _stack_export(
    op: str, params: Any, config: BlockConfig, theirs: str, ours: str, *, cross: bool
) -> tuple[list[Entry], dict[str, Any]]:
    _check_export(op, config)
    heads = {_heads_of(op, each) for each in params.blocks}
    if len(heads) != 1:
        raise ValueError(f"{op}: all blocks must have the same number of heads, got {sorted(heads)}")
    first, last = params.blocks[0], params.norm
    entries = _stack(
        theirs,
        ours,
        heads.pop(),
        len(params.blocks),
        bias=first.attention.b_q is not None,
        last=last is not None,
        last_bias=last is not None and last.bias is not None,
        cross=cross,
    )
    return entries, {**_layer_settings(first, config), "num_layers": len(params.blocks)}


def _check_last_eps(op: str, source: Any, config: BlockConfig) -> None:
    """A stack has one eps here."""
    last = getattr(source, "norm", None)
    if last is not None and getattr(last, "eps", config.eps) != config.eps:
        raise ValueError(f"{op}: the last norm has eps = {last.eps}, the blocks {config.eps}; a stack has one eps here")
