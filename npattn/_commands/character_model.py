"""The demo's model: causal multi-head self-attention that guesses the next character, and its backward. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn import (
    MultiHeadAttentionSaved,
    MultiHeadParams,
    causal_mask,
    multi_head_attention_backward,
    multi_head_attention_forward,
)
from npattn._arrays.namespace import Array
from npattn._arrays.trees import with_tree_repr
from npattn.layers import (
    cross_entropy_backward,
    cross_entropy_forward,
    embedding_backward,
    embedding_forward,
    linear_backward,
    linear_forward,
)


@with_tree_repr
class CharacterParams(NamedTuple):
    """The model's parameters, and the type of their gradients."""

    characters: Array  # (V, C)
    positions: Array  # (T, C)
    attention: MultiHeadParams
    w_out: Array  # (C, V)
    b_out: Array  # (V,)

    @classmethod
    def init(
        cls, rng: np.random.Generator, *, alphabet: int, context: int, width: int, heads: int, dtype: Any
    ) -> CharacterParams:
        """Small random parameters."""

        def normal(*shape: int, scale: float) -> Array:
            return (scale * rng.standard_normal(shape)).astype(dtype)

        return cls(
            normal(alphabet, width, scale=1.0),
            normal(context, width, scale=1.0),
            MultiHeadParams.init(rng, width=width, heads=heads, dtype=dtype),
            normal(width, alphabet, scale=0.1 * width**-0.5),  # near an even guess
            np.zeros(alphabet, dtype),
        )


class CharacterSaved(NamedTuple):
    """What `character_model_backward` needs."""

    characters: Any
    positions: Any
    attention: MultiHeadAttentionSaved
    out: Any


def character_model(params: CharacterParams, ids: Array) -> Array:
    """Logits of the next character at every position, (..., T, V); see `character_model_forward`."""
    return character_model_forward(params, ids)[0]


def character_model_forward(params: CharacterParams, ids: Array) -> tuple[Array, CharacterSaved]:
    """``logits = (x + attention(x, x)) w_out + b_out`` with ``x = characters[ids] + positions``.

    Parameters
    ----------
    params : CharacterParams
        The parameters.
    ids : integer array (..., T)
        Numbers of characters.

    Returns
    -------
    logits : array (..., T, V)
        What is guessed after each character.
    saved : CharacterSaved
        For the backward.
    """
    characters, saved_characters = embedding_forward(params.characters, ids)
    positions, saved_positions = embedding_forward(params.positions, np.arange(ids.shape[-1]))
    x = characters + positions
    attended, saved_attention = multi_head_attention_forward(params.attention, x, x, mask=causal_mask())
    logits, saved_out = linear_forward(x + attended, params.w_out, params.b_out)
    return logits, CharacterSaved(saved_characters, saved_positions, saved_attention, saved_out)


def character_model_backward(dlogits: Array, saved: CharacterSaved) -> CharacterParams:
    """The gradient of the parameters: the children's backwards in reverse order."""
    out = linear_backward(dlogits, saved.out)
    attention = multi_head_attention_backward(out.dx, saved.attention)
    dx = out.dx + attention.dx_q + attention.dx_kv
    characters = embedding_backward(dx, saved.characters)
    positions = embedding_backward(np.sum(dx, axis=tuple(range(dx.ndim - 2))), saved.positions)
    return CharacterParams(characters.dtable, positions.dtable, attention.dparams, out.dw, out.db)


def loss_and_gradient(params: CharacterParams, ids: Array, targets: Array) -> tuple[float, CharacterParams]:
    """The mean cross-entropy of the next characters in nats, and its gradient."""
    logits, saved = character_model_forward(params, ids)
    loss, saved_loss = cross_entropy_forward(logits, targets)
    dlogits = cross_entropy_backward(np.ones_like(loss), saved_loss).dlogits
    return float(loss), character_model_backward(dlogits, saved)
