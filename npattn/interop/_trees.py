"""Our trees, from arrays by the names of their places."""

from __future__ import annotations

from typing import Any, TypeVar

from npattn._attention.multi_head import MultiHeadParams
from npattn.interop._entries import State
from npattn.layers.feed_forward import FeedForwardParams
from npattn.layers.gated_feed_forward import GatedFeedForwardParams
from npattn.models.decoder_block import DecoderBlockParams
from npattn.models.encoder_block import EncoderBlockParams
from npattn.models.norm import NormParams

Params = TypeVar("Params")


def leaves(kind: type[Params], arrays: State, prefix: str) -> Params:
    """A NamedTuple of arrays; ``None`` where there is none."""
    return kind(*(arrays.get(f"{prefix}{name}") for name in kind._fields))  # type: ignore[attr-defined]


def norm(arrays: State, prefix: str) -> NormParams | None:
    """A norm, if there is one."""
    return leaves(NormParams, arrays, prefix) if f"{prefix}weight" in arrays else None


def block(arrays: State, prefix: str) -> Any:
    """An encoder block, or a decoder block if it has cross-attention."""
    gated = f"{prefix}feed_forward.w_gate" in arrays
    network: Any = leaves(GatedFeedForwardParams if gated else FeedForwardParams, arrays, f"{prefix}feed_forward.")
    attentions = [
        leaves(MultiHeadParams, arrays, f"{prefix}{name}.")
        for name in ("attention", "cross_attention")
        if f"{prefix}{name}.w_q" in arrays
    ]
    kind: Any = EncoderBlockParams if len(attentions) == 1 else DecoderBlockParams
    norms = [norm(arrays, f"{prefix}{name}.") for name in kind._fields if name.endswith("_norm")]
    return kind(*attentions, network, *norms)


def blocks(arrays: State, prefix: str) -> tuple[Any, ...]:
    """As many as there are."""
    numbers = {int(name.removeprefix(prefix).split(".")[0]) for name in arrays if name.startswith(prefix)}
    return tuple(block(arrays, f"{prefix}{n}.") for n in sorted(numbers))
