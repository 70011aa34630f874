"""Language models and encoders in the names of Hugging Face's library: GPT-2, BERT and their kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import with_tree_repr
from npattn.interop._entries import (
    LAYOUTS,
    Entry,
    Exported,
    Imported,
    State,
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
from npattn.interop._trees import blocks, norm
from npattn.models.config import BlockConfig, EmbeddingConfig, LanguageModelConfig
from npattn.models.encoder import EncoderParams
from npattn.models.language_model import LanguageModelParams
from npattn.models.token_embedding import TokenEmbeddingParams

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def settings_of(op: str, source: Any, config: Any) -> dict[str, Any]:
    """The config of a model: given as a dict or an object with attributes, or the module's own."""
    found = getattr(source, "config", None) if config is None else config
    if found is None:
        raise ValueError(f"{op}: config is needed: the contents of the model's config.json, which say what its arrays do not")
    return dict(found) if isinstance(found, Mapping) else {n: v for n, v in vars(found).items() if not n.startswith("_")}


def setting(op: str, settings: Mapping[str, Any], name: str) -> Any:
    """One that must be there."""
    if settings.get(name) is None:
        raise ValueError(f"{op}: config has no {name}")
    return settings[name]


def refuse(op: str, settings: Mapping[str, Any], **usual: Any) -> None:
    """Settings that npattn does not compute: a value other than the usual one is an error, not a surprise."""
    for name, value in usual.items():
        if settings.get(name, value) != value:
            raise ValueError(f"{op}: config says {name} = {settings[name]!r}; npattn computes {value!r} only")


def activation_of(op: str, name: Any) -> str:
    """Ours, of theirs."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{op}: npattn has no activation {name!r}")
    return ACTIVATIONS[name]


# GPT-2 -----------------------------------------------------------------------------------------------------------------------


def _columns_to_heads(theirs: str, ours: str, axes: str, heads: int) -> Entry:
    """(C, H·D) there, (C, H, D) here."""
    plain = bias_of_heads(theirs, ours, axes, heads)
    return Entry(
        theirs,
        (ours,),
        axes,
        lambda w: [plain.split(w.T)[0].transpose(2, 0, 1)],
        lambda w: w.reshape(w.shape[0], -1),
    )


def _gpt2(names: set[str], heads: int, _: int) -> list[Entry]:
    return _gpt2_entries(count_layers(names, "h."), heads, own_logits="lm_head.weight" in names)


def _gpt2_entries(count: int, heads: int, *, own_logits: bool) -> list[Entry]:
    found = [
        same("wte.weight", "embedding.tokens", "VC"),
        same("wpe.weight", "embedding.positions", "PC"),
        same("ln_f.weight", "norm.weight", "C"),
        same("ln_f.bias", "norm.bias", "C"),
    ]
    if own_logits:
        found.append(linear("lm_head.weight", "w_out", "VC"))
    for n in range(count):
        theirs, ours = f"h.{n}.", f"blocks.{n}."
        matrices, biases = ([f"{ours}attention.{kind}_{x}" for x in "qkv"] for kind in "wb")
        found += [
            same(f"{theirs}ln_1.weight", f"{ours}attention_norm.weight", "C"),
            same(f"{theirs}ln_1.bias", f"{ours}attention_norm.bias", "C"),
            packed(f"{theirs}attn.c_attn.weight", matrices, "CQ", lambda o: _columns_to_heads("", o, "", heads), axis=1),
            packed(f"{theirs}attn.c_attn.bias", biases, "Q", lambda o: bias_of_heads("", o, "", heads)),
            bias_of_heads(f"{theirs}attn.c_proj.weight", f"{ours}attention.w_o", "CC", heads)._replace(
                join=lambda w: w.reshape(-1, w.shape[-1])
            ),
            same(f"{theirs}attn.c_proj.bias", f"{ours}attention.b_o", "C"),
            same(f"{theirs}ln_2.weight", f"{ours}feed_forward_norm.weight", "C"),
            same(f"{theirs}ln_2.bias", f"{ours}feed_forward_norm.bias", "C"),
            same(f"{theirs}mlp.c_fc.weight", f"{ours}feed_forward.w_in", "CF"),
            same(f"{theirs}mlp.c_fc.bias", f"{ours}feed_forward.b_in", "F"),
            same(f"{theirs}mlp.c_proj.weight", f"{ours}feed_forward.w_out", "FC"),
            same(f"{theirs}mlp.c_proj.bias", f"{ours}feed_forward.b_out", "C"),
        ]
    return found


LAYOUTS["from_gpt2"] = _gpt2


def from_gpt2(source: Any, /, *, config: Any = None, ignore: Iterable[str] = ()) -> Imported:
    """The weights of GPT-2 in Hugging Face's names.

    Parameters
    ----------
    source : module or state dict
        ``GPT2Model`` or ``GPT2LMHeadModel``, or names and arrays of any library, such as `npattn.checkpoint.read_safetensors`
        gives.
    config : dict or object, optional
        The contents of ``config.json``; needed for a state dict.
    ignore : iterable of str, optional
        Names that begin so are left out.

    Returns
    -------
    Imported
        ``params`` (a `npattn.models.LanguageModelParams` of NumPy arrays) and ``config`` (a `npattn.models.LanguageModelConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this model, with what is missing and left over, or config says what npattn does not
        compute.
    TypeError
        If it is no state dict, or dtypes differ.

    Notes
    -----
    A prefix ``transformer.`` is taken off. The buffers ``attn.bias`` and ``attn.masked_bias`` are no weights. ``lm_head.weight``
    is left out where it is the table of the tokens.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, LanguageModelConfig, LanguageModelParams
    >>> sizes = dict(vocabulary=9, context=5, blocks=1, width=4, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> state, settings = to_gpt2(params, LanguageModelConfig(BlockConfig(activation="gelu_tanh")))
    >>> from_gpt2(state, config=settings).config.block.activation
    'gelu_tanh'
    """
    op = "from_gpt2"
    settings = settings_of(op, source, config)
    refuse(op, settings, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    state = as_state(op, source, prefixes=["transformer."], ignore=ignore)
    state = {name: x for name, x in state.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    state = without_tied_logits(state, "wte.weight")
    arrays = read(op, state, setting(op, settings, "n_head"))
    block = BlockConfig(
        activation=activation_of(op, settings.get("activation_function", "gelu_new")),
        eps=settings.get("layer_norm_epsilon", 1e-5),
    )
    return Imported(_language_model(arrays), LanguageModelConfig(block))


def without_tied_logits(state: State, table: str) -> State:
    """Without a matrix of the logits that is the table of the tokens."""
    logits, tokens = state.get("lm_head.weight"), state.get(table)
    tied = logits is not None and tokens is not None and np.array_equal(logits, tokens)
    return {name: x for name, x in state.items() if not (tied and name == "lm_head.weight")}


def _language_model(arrays: State) -> LanguageModelParams:
    embedding = TokenEmbeddingParams(arrays["embedding.tokens"], arrays.get("embedding.positions"))
    return LanguageModelParams(embedding, blocks(arrays, "blocks."), norm(arrays, "norm."), arrays.get("w_out"))


def to_gpt2(params: LanguageModelParams, config: LanguageModelConfig, /) -> Exported:
    """Our parameters in the layout of GPT-2.

    Parameters
    ----------
    params : LanguageModelParams
        With learned positions, biases, as many key/value heads as query heads, and a last norm.
    config : LanguageModelConfig
        What they were made for.

    Returns
    -------
    Exported
        ``state``, in the names of ``GPT2Model`` with ``lm_head.weight`` if the logits have a matrix of their own, and
        ``settings``, the arguments of ``GPT2Config``.

    Raises
    ------
    ValueError
        If GPT-2 cannot hold them, or does not compute what config says.

    Examples
    --------
    See `from_gpt2`.
    """
    op = "to_gpt2"
    LanguageModelConfig.checked(config, op)
    check_config(op, config.block, BlockConfig(activation=config.block.activation, eps=config.block.eps))
    check_config(op, config.embedding, EmbeddingConfig(norm=config.embedding.norm, eps=config.embedding.eps))
    heads = heads_of(op, params.blocks)
    state = write(op, _gpt2_entries(len(params.blocks), heads, own_logits=params.w_out is not None), params)
    settings = {
        "vocab_size": params.embedding.tokens.shape[0],
        "n_positions": state["wpe.weight"].shape[0],
        "n_embd": params.embedding.tokens.shape[1],
        "n_layer": len(params.blocks),
        "n_head": heads,
        "n_inner": params.blocks[0].feed_forward.w_in.shape[1],
        "activation_function": _NAMES[config.block.activation],
        "layer_norm_epsilon": config.block.eps,
        "tie_word_embeddings": params.w_out is None,
    }
    return Exported(state, settings)


def check_config(op: str, config: Any, possible: Any) -> None:
    """Nothing that the other model does not compute."""
    names = [name for name, ours, theirs in zip(config._fields, config, possible, strict=True) if ours != theirs]
    if names:
        raise ValueError(f"{op}: that model has no {', '.join(names)} such as config says")


def heads_of(op: str, layers: tuple[Any, ...], *, grouped: bool = False) -> int:
    """H, the same in all blocks."""
    shapes = {(block.attention.w_q.shape[1], block.attention.w_k.shape[1]) for block in layers}
    if len(shapes) != 1:
        raise ValueError(f"{op}: all blocks must have the same numbers of heads, got {sorted(shapes)}")
    heads, kv_heads = shapes.pop()
    if heads != kv_heads and not grouped:
        raise ValueError(f"{op}: that model has as many key/value heads as query heads, got K = {kv_heads}, H = {heads}")
    return int(heads)


# BERT ------------------------------------------------------------------------------------------------------------------------


@with_tree_repr
class BertParams(NamedTuple):
    """The parameters of BERT: embeddings, an encoder, and what makes one vector of the first token's, if there is that.

    ``token_embedding(params.embedding, ids, types=types, config=config.embedding)``, then
    ``encoder(params.encoder, x, mask=mask, config=config.block)``.
    """

    embedding: TokenEmbeddingParams
    encoder: EncoderParams
    w_pool: Array | None = None  # (C, C)
    b_pool: Array | None = None  # (C,)


class BertConfig(NamedTuple):
    """BERT, beside its parameters: the embeddings and the blocks."""

    embedding: EmbeddingConfig
    block: BlockConfig


def _bert(names: set[str], heads: int, _: int) -> list[Entry]:
    return _bert_entries(count_layers(names, "encoder.layer."), heads, pooled="pooler.dense.weight" in names)


def _dense(theirs: str, ours: str, end: str, axes: str) -> list[Entry]:
    return [linear(f"{theirs}.weight", f"{ours}w_{end}", axes), same(f"{theirs}.bias", f"{ours}b_{end}", axes[0])]


def _bert_norm(theirs: str, ours: str) -> list[Entry]:
    return [same(f"{theirs}.weight", f"{ours}.weight", "C"), same(f"{theirs}.bias", f"{ours}.bias", "C")]


def _bert_entries(count: int, heads: int, *, pooled: bool) -> list[Entry]:
    found = [
        same("embeddings.word_embeddings.weight", "embedding.tokens", "VC"),
        same("embeddings.position_embeddings.weight", "embedding.positions", "PC"),
        same("embeddings.token_type_embeddings.weight", "embedding.types", "NC"),
        *_bert_norm("embeddings.LayerNorm", "embedding.norm"),
    ]
    for n in range(count):
        theirs, ours = f"encoder.layer.{n}.", f"encoder.blocks.{n}."
        for name in ("query", "key", "value"):
            end = {"query": "q", "key": "k", "value": "v"}[name]
            found.append(rows_to_heads(f"{theirs}attention.self.{name}.weight", f"{ours}attention.w_{end}", "CC", heads))
            found.append(bias_of_heads(f"{theirs}attention.self.{name}.bias", f"{ours}attention.b_{end}", "C", heads))
        found += [
            heads_to_rows(f"{theirs}attention.output.dense.weight", f"{ours}attention.w_o", "CC", heads),
            same(f"{theirs}attention.output.dense.bias", f"{ours}attention.b_o", "C"),
            *_bert_norm(f"{theirs}attention.output.LayerNorm", f"{ours}attention_norm"),
            *_dense(f"{theirs}intermediate.dense", f"{ours}feed_forward.", "in", "FC"),
            *_dense(f"{theirs}output.dense", f"{ours}feed_forward.", "out", "CF"),
            *_bert_norm(f"{theirs}output.LayerNorm", f"{ours}feed_forward_norm"),
        ]
    return [*found, *_dense("pooler.dense", "", "pool", "CC")] if pooled else found


LAYOUTS["from_bert"] = _bert


def from_bert(source: Any, /, *, config: Any = None, ignore: Iterable[str] = ()) -> Imported:
    """The weights of BERT, and of models with its layout such as MiniLM, in Hugging Face's names.

    Parameters
    ----------
    source : module or state dict
        ``BertModel``, or names and arrays of any library, such as `npattn.checkpoint.read_safetensors` gives.
    config : dict or object, optional
        The contents of ``config.json``; needed for a state dict.
    ignore : iterable of str, optional
        Names that begin so are left out: ``["cls."]`` for the heads of ``BertForPreTraining``.

    Returns
    -------
    Imported
        ``params`` (a `BertParams` of NumPy arrays) and ``config`` (a `BertConfig`).

    Raises
    ------
    ValueError
        If names or shapes are not those of this model, with what is missing and left over, or config says what npattn does not
        compute.
    TypeError
        If it is no state dict, or dtypes differ.

    Notes
    -----
    A prefix ``bert.`` is taken off. The buffers ``position_ids`` and ``token_type_ids`` are no weights.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import BlockConfig, EmbeddingConfig, EncoderParams, TokenEmbeddingParams
    >>> rng = np.random.default_rng(0)
    >>> embedding = TokenEmbeddingParams.init(rng, vocabulary=9, width=4, context=5, types=2, norm=True)
    >>> params = BertParams(embedding, EncoderParams.init(rng, blocks=1, width=4, heads=2, last_norm=False))
    >>> state, settings = to_bert(params, BertConfig(EmbeddingConfig(eps=1e-12), BlockConfig("post", eps=1e-12)))
    >>> from_bert(state, config=settings).config.block.norm_order
    'post'
    """
    op = "from_bert"
    settings = settings_of(op, source, config)
    refuse(op, settings, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    state = as_state(op, source, prefixes=["bert."], ignore=ignore)
    state = {name: x for name, x in state.items() if name not in ("embeddings.position_ids", "embeddings.token_type_ids")}
    arrays = read(op, state, setting(op, settings, "num_attention_heads"))
    tables = {name: arrays[f"embedding.{name}"] for name in ("tokens", "positions", "types")}
    embedding = TokenEmbeddingParams(**tables, norm=norm(arrays, "embedding.norm."))
    params = BertParams(embedding, EncoderParams(blocks(arrays, "encoder.blocks.")), arrays.get("w_pool"), arrays.get("b_pool"))
    eps = settings.get("layer_norm_eps", 1e-12)
    block = BlockConfig("post", activation=activation_of(op, settings.get("hidden_act", "gelu")), eps=eps)
    return Imported(params, BertConfig(EmbeddingConfig(eps=eps), block))


def to_bert(params: BertParams, config: BertConfig, /) -> Exported:
    """Our parameters in the layout of BERT.

    Parameters
    ----------
    params : BertParams
        With learned positions, types and a norm in the embedding, and biases everywhere; the encoder without a last norm.
    config : BertConfig
        What they were made for.

    Returns
    -------
    Exported
        ``state``, in the names of ``BertModel``, and ``settings``, the arguments of ``BertConfig`` there.

    Raises
    ------
    ValueError
        If BERT cannot hold them, or does not compute what config says.

    Examples
    --------
    See `from_bert`.
    """
    op = "to_bert"
    BlockConfig.checked(config.block, op, stack=True)
    check_config(op, config.block, BlockConfig("post", activation=config.block.activation, eps=config.block.eps))
    check_config(op, config.embedding, EmbeddingConfig(eps=config.block.eps))
    heads = heads_of(op, params.encoder.blocks)
    state = write(op, _bert_entries(len(params.encoder.blocks), heads, pooled=params.w_pool is not None), params)
    settings = {
        "vocab_size": params.embedding.tokens.shape[0],
        "hidden_size": params.embedding.tokens.shape[1],
        "num_hidden_layers": len(params.encoder.blocks),
        "num_attention_heads": heads,
        "intermediate_size": params.encoder.blocks[0].feed_forward.w_in.shape[1],
        "hidden_act": _NAMES[config.block.activation],
        "max_position_embeddings": state["embeddings.position_embeddings.weight"].shape[0],
        "type_vocab_size": state["embeddings.token_type_embeddings.weight"].shape[0],
        "layer_norm_eps": config.block.eps,
    }
    return Exported(state, settings)
