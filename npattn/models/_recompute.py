"""Blocks that save their inputs alone, and compute the rest once more when backward, or a reader, asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from npattn._arrays.namespace import Array


class BlockInputs(NamedTuple):
    """What a recomputed block saves: how it was called."""

    forward: Callable[..., tuple[Array, Any]]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"BlockInputs({self.forward.__name__})"

    def open(self) -> Any:
        """What the block would have saved, computed once more: the same bits."""
        return self.forward(*self.arguments, **self.options)[1]


def block_forward(
    forward: Callable[..., tuple[Array, Any]], *arguments: Any, recompute: bool, **options: Any
) -> tuple[Array, Any]:
    """The block's out, and what it saved or how to make that again."""
    out, saved = forward(*arguments, **options)
    return out, BlockInputs(forward, arguments, options) if recompute else saved


def opened(saved: Any) -> Any:
    """What the block saved, made again if it is not there."""
    return saved.open() if isinstance(saved, BlockInputs) else saved
