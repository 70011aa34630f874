"""Llama and models of its kind, in the names of Hugging Face's library and of Meta's own files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from npattn._arrays.host import to_numpy
from npattn._arrays.namespace import Array
from npattn._attention.multi_head import MultiHeadParams
from npattn.interop._entries import (
    LAYOUTS,
    Entry,
    Exported,
    Imported,
    Layout,
    State,
    as_state,
    bias_of_heads,
    count_layers,
    heads_to_rows,
    linear,
    read,
    rows_to_heads,
    same,
    write,
)
from npattn.interop._hugging_face import activation_of, check_config, heads_of, refuse, setting, settings_of, without_tied_logits
from npattn.interop._trees import blocks, norm
from npattn.layers.positions import Rotary
from npattn.models.config import BlockConfig, EmbeddingConfig, LanguageModelConfig
from npattn.models.language_model import LanguageModelParams
from npattn.models.token_embedding import TokenEmbeddingParams

_HUGGING_FACE = {
    "tokens": "embed_tokens",
    "layer": "layers.{n}.",
    "w_q": "self_attn.q_proj",
    "w_k": "self_attn.k_proj",
    "w_v": "self_attn.v_proj",
    "w_o": "self_attn.o_proj",
    "w_gate": "mlp.gate_proj",
    "w_in": "mlp.up_proj",
    "w_out": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "logits": "lm_head",
}
_META = {
    "tokens": "tok_embeddings",
    "layer": "layers.{n}.",
    "w_q": "attention.wq",
    "w_k": "attention.wk",
    "w_v": "attention.wv",
    "w_o": "attention.wo",
    "w_gate": "feed_forward.w1",
    "w_in": "feed_forward.w3",
    "w_out": "feed_forward.w2",
    "attention_norm": "attention_norm",
    "feed_forward_norm": "ffn_norm",
    "logits": "output",
}
_ROWS = {"b_q": "Q", "b_k": "K", "b_v": "U", "b_o": "C"}  # the letters of the biases' lengths


def _entries(
    called: dict[str, str], count: int, heads: int, kv_heads: int, *, own_logits: bool, biases: Sequence[str] = ()
) -> list[Entry]:
    found = [same(f"{called['tokens']}.weight", "embedding.tokens", "VC"), same("norm.weight", "norm.weight", "C")]
    if own_logits:
        found.append(linear(f"{called['logits']}.weight", "w_out", "VC"))
    for n in range(count):
        theirs, ours = called["layer"].format(n=n), f"blocks.{n}."
        found += [
            rows_to_heads(f"{theirs}{called['w_q']}.weight", f"{ours}attention.w_q", "QC", heads),
            rows_to_heads(f"{theirs}{called['w_k']}.weight", f"{ours}attention.w_k", "KC", kv_heads),
            rows_to_heads(f"{theirs}{called['w_v']}.weight", f"{ours}attention.w_v", "UC", kv_heads),
        ]
        found.append(heads_to_rows(f"{theirs}{called['w_o']}.weight", f"{ours}attention.w_o", "CQ", heads))
        for b in biases:
            name = f"{theirs}{called[b.replace('b_', 'w_')]}.bias"
            if b == "b_o":
                found.append(same(name, f"{ours}attention.b_o", "C"))
            else:
                found.append(bias_of_heads(name, f"{ours}attention.{b}", _ROWS[b], heads if b == "b_q" else kv_heads))
        found += [
            linear(f"{theirs}{called['w_gate']}.weight", f"{ours}feed_forward.w_gate", "FC"),
            linear(f"{theirs}{called['w_in']}.weight", f"{ours}feed_forward.w_in", "FC"),
            linear(f"{theirs}{called['w_out']}.weight", f"{ours}feed_forward.w_out", "CF"),
            same(f"{theirs}{called['attention_norm']}.weight", f"{ours}attention_norm.weight", "C"),
            same(f"{theirs}{called['feed_forward_norm']}.weight", f"{ours}feed_forward_norm.weight", "C"),
        ]
    return found


def _layout(called: dict[str, str]) -> Layout:
    def entries(names: set[str], heads: int, kv_heads: int) -> list[Entry]:
        first = called["layer"].format(n=0)
        biases = [b for b in _ROWS if f"{first}{called[b.replace('b_', 'w_')]}.bias" in names]
        own_logits = f"{called['logits']}.weight" in names
        return _entries(called, count_layers(names, "layers."), heads, kv_heads, own_logits=own_logits, biases=biases)

    return entries


LAYOUTS.update(from_llama=_layout(_HUGGING_FACE), from_meta_llama=_layout(_META))


def from_llama(source: Any, /, *, config: Any = None, ignore: Iterable[str] = ()) -> Imported:
    """The weights of Llama, and of models with its layout (Mistral, Qwen 2), in Hugging Face's names.

    Parameters
    ----------
    source : module or state dict
        ``LlamaForCausalLM``, or names and arrays of any library, such as `npattn.checkpoint.read_safetensors` gives.
    config : dict or object, optional
        The contents of ``config.json``; needed for a state dict.
    ignore : iterable of str, optional
        Names that begin so are left out.

    Returns
    -------
    Imported
        ``params`` (a `npattn.models.LanguageModelParams` of NumPy arrays) and ``config`` (a `npattn.models.LanguageModelConfig`)
        with rotary positions of the kind ``halves``.

    Raises
    ------
    ValueError
        If names or shapes are not those of this model, with what is missing and left over, or config says what npattn does not
        compute.
    TypeError
        If it is no state dict, or dtypes differ.

    Notes
    -----
    A prefix ``model.`` is taken off. ``lm_head.weight`` is left out where it is the table of the tokens. A sliding window of n
    tokens there counts the token itself; `npattn.models.BlockConfig` does not. Of the ways to stretch rotary positions, only
    ``linear`` is known.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import Rotary
    >>> from npattn.models import BlockConfig, EmbeddingConfig, LanguageModelConfig, LanguageModelParams
    >>> block = BlockConfig(norm="rms", activation="silu", rotary=Rotary(base=5e5))
    >>> config = LanguageModelConfig(block, EmbeddingConfig(positions="none"))
    >>> sizes = dict(vocabulary=9, blocks=1, width=8, heads=2, kv_heads=1, gated=True, bias=False)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), config=config, **sizes)
    >>> state, settings = to_llama(params, config)
    >>> from_llama(state, config=settings).config.block.rotary.base
    500000.0
    """
    op = "from_llama"
    settings = settings_of(op, source, config)
    refuse(op, settings, attention_multiplier=None, residual_multiplier=1.0, embedding_multiplier=1.0, logits_scaling=1.0)
    refuse(op, settings, final_logit_softcapping=None, attn_logit_softcapping=None)
    state = as_state(op, source, prefixes=["model."], ignore=(*ignore, "rotary_emb."))
    state = {name: x for name, x in state.items() if not name.endswith("rotary_emb.inv_freq")}
    state = without_tied_logits(state, "embed_tokens.weight")
    heads = setting(op, settings, "num_attention_heads")
    params = _read(op, state, heads, settings.get("num_key_value_heads") or heads)
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    block = BlockConfig(
        norm="rms",
        eps=settings.get("rms_norm_eps", 1e-6),
        activation=activation_of(op, settings.get("hidden_act", "silu")),
        rotary=_rotary(op, settings, params),
        window=None if window is None else window - 1,
    )
    return Imported(params, LanguageModelConfig(block, EmbeddingConfig(positions="none")))


def _rotary(op: str, settings: dict[str, Any], params: LanguageModelParams) -> Rotary:
    """Older configs have ``rope_theta`` and ``rope_scaling``, newer ones both in ``rope_parameters``."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear"):
        raise ValueError(f"{op}: config says that rotary positions are of the kind {kind!r}; npattn knows default and linear")
    share = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    head_size = params.blocks[0].attention.w_q.shape[2]
    return Rotary(
        base=float(rope.get("rope_theta", settings.get("rope_theta", 10000.0))),
        scale=1.0 / rope["factor"] if kind == "linear" else 1.0,
        size=None if share == 1 else int(share * head_size),
    )


def _read(op: str, state: State, heads: int, kv_heads: int) -> LanguageModelParams:
    arrays = read(op, state, heads, kv_heads)
    embedding = TokenEmbeddingParams(arrays["embedding.tokens"])
    return LanguageModelParams(embedding, blocks(arrays, "blocks."), norm(arrays, "norm."), arrays.get("w_out"))


def to_llama(params: LanguageModelParams, config: LanguageModelConfig, /) -> Exported:
    """Our parameters in the layout of Llama in Hugging Face's library.

    Parameters
    ----------
    params : LanguageModelParams
        With gated feed-forward networks, RMS norms, a last norm, and no learned positions.
    config : LanguageModelConfig
        What they were made for. Weights for ``interleaved`` rotary positions are reordered to ``halves``.

    Returns
    -------
    Exported
        ``state``, in the names of ``LlamaForCausalLM`` without the prefix ``model.``, and ``settings``, the arguments of
        ``LlamaConfig``; with a window, of ``MistralConfig``.

    Raises
    ------
    ValueError
        If Llama cannot hold them, or does not compute what config says.

    Examples
    --------
    See `from_llama`.
    """
    op = "to_llama"
    rotary, heads = _check_llama(op, params, config)
    if rotary.pairs == "interleaved":
        params = _reorder(params, _to_halves)
    first = params.blocks[0]
    settings = {
        "vocab_size": params.embedding.tokens.shape[0],
        "hidden_size": params.embedding.tokens.shape[1],
        "num_hidden_layers": len(params.blocks),
        "num_attention_heads": heads,
        "num_key_value_heads": first.attention.w_k.shape[1],
        "head_dim": first.attention.w_q.shape[2],
        "intermediate_size": first.feed_forward.w_in.shape[1],
        "hidden_act": config.block.activation,
        "rms_norm_eps": config.block.eps,
        "rope_theta": rotary.base,
        "attention_bias": first.attention.b_q is not None,
        "tie_word_embeddings": params.w_out is None,
    }
    if rotary.scale != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": 1 / rotary.scale}
    window = config.block.window
    if isinstance(window, tuple):
        raise ValueError(f"{op}: Llama has one window for all blocks, got {window}")
    if window is not None:
        settings["sliding_window"] = window + 1
    return Exported(_write(op, _HUGGING_FACE, params, heads), settings)


def from_meta_llama(source: Any, /, *, config: Any, ignore: Iterable[str] = ()) -> Imported:
    """The weights of Llama in the names of Meta's own files, made for ``interleaved`` rotary positions.

    Parameters
    ----------
    source : state dict
        Names and arrays of any library.
    config : dict or object
        The contents of ``params.json``: ``n_heads``, and ``n_kv_heads``, ``norm_eps``, ``rope_theta`` where they are there.
    ignore : iterable of str, optional
        Names that begin so are left out.

    Returns
    -------
    Imported
        As from `from_llama`, with rotary positions of the kind ``interleaved``: no weight is reordered.

    Raises
    ------
    ValueError
        If names or shapes are not those of this model, with what is missing and left over, or config says what npattn does not
        compute.
    TypeError
        If it is no state dict, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import Rotary
    >>> from npattn.models import BlockConfig, EmbeddingConfig, LanguageModelConfig, LanguageModelParams
    >>> block = BlockConfig(norm="rms", activation="silu", rotary=Rotary(pairs="interleaved"))
    >>> config = LanguageModelConfig(block, EmbeddingConfig(positions="none"))
    >>> sizes = dict(vocabulary=9, blocks=1, width=8, heads=2, gated=True, bias=False, tied=False)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), config=config, **sizes)
    >>> state, settings = to_meta_llama(params, config)
    >>> from_meta_llama(state, config=settings).config.block.rotary.pairs
    'interleaved'
    """
    op = "from_meta_llama"
    settings = settings_of(op, source, config)
    refuse(op, settings, use_scaled_rope=False)
    state = as_state(op, source, ignore=(*ignore, "rope.freqs"))
    heads = setting(op, settings, "n_heads")
    params = _read(op, state, heads, settings.get("n_kv_heads") or heads)
    rotary = Rotary(base=float(settings.get("rope_theta", 10000.0)), pairs="interleaved")
    block = BlockConfig(norm="rms", eps=settings.get("norm_eps", 1e-5), activation="silu", rotary=rotary)
    return Imported(params, LanguageModelConfig(block, EmbeddingConfig(positions="none")))


def to_meta_llama(params: LanguageModelParams, config: LanguageModelConfig, /) -> Exported:
    """Our parameters in the layout of Meta's own files.

    Parameters
    ----------
    params : LanguageModelParams
        As for `to_llama`.
    config : LanguageModelConfig
        What they were made for, with SiLU. Weights for rotary positions in ``halves`` are reordered to ``interleaved``.

    Returns
    -------
    Exported
        ``state``, and ``settings`` as in ``params.json``.

    Raises
    ------
    ValueError
        If Llama cannot hold them, or does not compute what config says.

    Examples
    --------
    See `from_meta_llama`.
    """
    op = "to_meta_llama"
    rotary, heads = _check_llama(op, params, config)
    check_config(op, config.block._replace(rotary=None), BlockConfig(norm="rms", activation="silu", eps=config.block.eps))
    check_config(op, rotary, Rotary(base=rotary.base, pairs=rotary.pairs))
    if rotary.pairs == "halves":
        params = _reorder(params, _to_interleaved)
    settings = {
        "dim": params.embedding.tokens.shape[1],
        "n_layers": len(params.blocks),
        "n_heads": heads,
        "n_kv_heads": params.blocks[0].attention.w_k.shape[1],
        "vocab_size": params.embedding.tokens.shape[0],
        "norm_eps": config.block.eps,
        "rope_theta": rotary.base,
    }
    return Exported(_write(op, _META, params, heads), settings)


def _write(op: str, called: dict[str, str], params: LanguageModelParams, heads: int) -> State:
    attention = params.blocks[0].attention
    biases = [b for b in _ROWS if getattr(attention, b) is not None]
    own_logits = params.w_out is not None
    entries = _entries(called, len(params.blocks), heads, attention.w_k.shape[1], own_logits=own_logits, biases=biases)
    return write(op, entries, params)


def _check_llama(op: str, params: LanguageModelParams, config: LanguageModelConfig) -> tuple[Rotary, int]:
    """The rotary positions, which there must be, and H."""
    LanguageModelConfig.checked(config, op)
    block, rotary = config.block, config.block.rotary
    if rotary is None:
        raise ValueError(f"{op}: Llama has rotary positions, config has none")
    possible = BlockConfig(norm="rms", eps=block.eps, activation=block.activation, rotary=rotary, window=block.window)
    check_config(op, block, possible)
    check_config(op, config.embedding, EmbeddingConfig("none", norm=config.embedding.norm, eps=config.embedding.eps))
    check_config(op, rotary, Rotary(base=rotary.base, pairs=rotary.pairs, scale=rotary.scale))
    return rotary, heads_of(op, params.blocks, grouped=True)


def _reorder(params: LanguageModelParams, order: Callable[[Array], Array]) -> LanguageModelParams:
    """Queries and keys with their features in another order; scores do not change."""

    def attention(old: MultiHeadParams) -> MultiHeadParams:
        names = [name for name in ("w_q", "w_k", "b_q", "b_k") if getattr(old, name) is not None]
        return old._replace(**{name: order(to_numpy(getattr(old, name))) for name in names})

    return params._replace(blocks=tuple(block._replace(attention=attention(block.attention)) for block in params.blocks))


def _to_halves(x: Array) -> Array:
    """Features 2n and 2n + 1 become n and n + D/2."""
    return np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def _to_interleaved(x: Array) -> Array:
    """And back."""
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)
