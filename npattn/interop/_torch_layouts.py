"""How PyTorch lays out the weights of its attention and transformer modules, and what its modules are told besides.

``nn.MultiheadAttention`` packs queries, keys and values as rows of one matrix, unless keys or values have another width; all
matrices multiply from the left; head h is a run of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from npattn._attention.multi_head import MultiHeadParams
from npattn.interop._entries import (
    LAYOUTS,
    Entry,
    bias_of_heads,
    count_layers,
    heads_to_rows,
    linear,
    packed,
    rows_to_heads,
    same,
)
from npattn.models.config import BlockConfig

# Layouts ---------------------------------------------------------------------------------------------------------------------


def attention_entries(theirs: str, ours: str, heads: int, *, bias: bool, apart: bool = False, widths: str = "CCC") -> list[Entry]:
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


def layer_entries(theirs: str, ours: str, heads: int, *, bias: bool, cross: bool) -> list[Entry]:
    names = ["attention", "cross_attention"] if cross else ["attention"]
    found = attention_entries(f"{theirs}self_attn.", f"{ours}attention.", heads, bias=bias)
    if cross:
        found += attention_entries(f"{theirs}multihead_attn.", f"{ours}cross_attention.", heads, bias=bias)
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
        found += layer_entries(f"{theirs}layers.{n}.", f"{ours}blocks.{n}.", heads, bias=bias, cross=cross)
    return [*found, *_norm(f"{theirs}norm.", f"{ours}norm.", bias=last_bias)] if last else found


def _attention_of(names: set[str], heads: int) -> list[Entry]:
    apart = "q_proj_weight" in names
    return attention_entries(
        "", "", heads, bias="out_proj.bias" in names or "in_proj_bias" in names, apart=apart, widths="CKV" if apart else "CCC"
    )


def _layer_of(names: set[str], heads: int, *, cross: bool) -> list[Entry]:
    return layer_entries("", "", heads, bias="linear1.bias" in names, cross=cross)


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


class Settings(NamedTuple):
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
            own = Settings(layer.self_attn.num_heads, layer.norm_first, _activation_name(op, layer.activation), layer.norm1.eps)
            for name, said, is_so in zip(Settings._fields, self, own, strict=True):
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


def check_export(op: str, config: Any) -> None:
    """Nothing that PyTorch's layers do not compute."""
    BlockConfig.checked(config, op, stack=True)
    plain = BlockConfig(config.norm_order, eps=config.eps, activation=config.activation)
    if config != plain:
        names = [name for name, ours, theirs in zip(config._fields, config, plain, strict=True) if ours != theirs]
        raise ValueError(f"{op}: PyTorch's layers have no {', '.join(names)} such as config says")


def layer_settings(params: Any, config: BlockConfig) -> dict[str, Any]:
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


def heads_of(op: str, params: Any) -> int:
    """H, which must be K, of heads that together are as wide as the model."""
    for attention in (params.attention, *([params.cross_attention] if hasattr(params, "cross_attention") else [])):
        check_heads(op, attention)
    return int(params.attention.w_q.shape[1])


def check_heads(op: str, params: MultiHeadParams) -> None:
    width, heads, size = params.w_q.shape
    if params.w_k.shape[1] != heads:
        raise ValueError(
            f"{op}: PyTorch's attention has as many key/value heads as query heads, got K = {params.w_k.shape[1]}, H = {heads}"
        )
    if params.w_v.shape[2] != size or heads * size != width or params.w_o.shape[2] != width:
        raise ValueError(f"{op}: in PyTorch's attention D = E, and H·D is the width of queries and output, got {params}")


def stack_export(
    op: str, params: Any, config: BlockConfig, theirs: str, ours: str, *, cross: bool
) -> tuple[list[Entry], dict[str, Any]]:
    check_export(op, config)
    heads = {heads_of(op, each) for each in params.blocks}
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
    return entries, {**layer_settings(first, config), "num_layers": len(params.blocks)}


def check_last_eps(op: str, source: Any, config: BlockConfig) -> None:
    """A stack has one eps here."""
    last = getattr(source, "norm", None)
    if last is not None and getattr(last, "eps", config.eps) != config.eps:
        raise ValueError(f"{op}: the last norm has eps = {last.eps}, the blocks {config.eps}; a stack has one eps here")
