"""What a model is beside its parameters: frozen settings, passed along with them. Sizes are read off the parameters' shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from npattn._arrays.checks import host_int
from npattn.layers.positions import Rotary

Window = int | None | tuple[int | None, ...]


class BlockConfig(NamedTuple):
    """The blocks of a stack, beside their parameters.

    Parameters
    ----------
    norm_order : str, optional
        ``"pre"``: ``x + f(norm(x))`` (GPT-2, Llama). ``"post"``: ``norm(x + f(x))`` (the original transformer, BERT).
    norm : str, optional
        ``"layer"`` or ``"rms"``.
    eps : float, optional
        Of the norms.
    activation : str, optional
        Of the feed-forward network, or of its gate: ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
    rotary : Rotary, optional
        Turns queries and keys of self-attention by their positions.
    window : int or tuple, optional
        In self-attention a query sees so many neighbours on each side, itself not counted; ``None`` is without limit. A tuple
        has those of the blocks in turn: with ``(1024, None)`` every other block has a window.
    scale : float, optional
        Of the scores; 1/√D by default.
    softcap : float, optional
        Bounds the scores.

    Examples
    --------
    >>> BlockConfig(norm="rms", activation="silu", rotary=Rotary(base=500000.0)).norm_order
    'pre'
    """

    norm_order: str = "pre"
    norm: str = "layer"
    eps: float = 1e-5
    activation: str = "gelu"
    rotary: Rotary | None = None
    window: Window = None
    scale: float | None = None
    softcap: float | None = None

    def of_block(self, n: int) -> BlockConfig:
        """The setting of block ``n`` of a stack: its own window.

        Parameters
        ----------
        n : int
            Counted from 0.

        Returns
        -------
        BlockConfig
        """
        return self._replace(window=self.window[n % len(self.window)]) if isinstance(self.window, tuple) else self

    def checked(self, op: str, *, stack: bool = False) -> BlockConfig:
        """The same, or a clear error for what the layers would not refuse in words that the caller knows."""
        if not isinstance(self, BlockConfig):
            raise TypeError(f"{op}: config must be a BlockConfig, got {type(self).__name__}")
        _check_choice(op, "norm_order", self.norm_order, ("pre", "post"))
        _check_choice(op, "norm", self.norm, ("layer", "rms"))
        windows = self.window if stack and isinstance(self.window, tuple) else (self.window,)
        if not windows:
            raise ValueError(f"{op}: the window of config must be an integer, None, or a tuple of one or more of them, got ()")
        for window in windows:
            if window is not None:
                host_int(op, "the window of config", window, least=0)
        return self


class EmbeddingConfig(NamedTuple):
    """How tokens become vectors, beside the parameters.

    Parameters
    ----------
    positions : str, optional
        ``"learned"``: a row of a table for each position. ``"sinusoidal"``: the table of sines and cosines. ``"none"``: nothing
        is added; a causal model can do without, and so can one with rotary positions or a bias.
    scale : float, optional
        The tokens' rows are multiplied by it: √C in the original transformer.
    norm : str, optional
        ``"layer"`` or ``"rms"``, for parameters that have a norm.
    eps : float, optional
        Of that norm.
    """

    positions: str = "learned"
    scale: float = 1.0
    norm: str = "layer"
    eps: float = 1e-5

    def checked(self, op: str) -> EmbeddingConfig:
        """The same, or a clear error."""
        if not isinstance(self, EmbeddingConfig):
            raise TypeError(f"{op}: config must be an EmbeddingConfig, got {type(self).__name__}")
        _check_choice(op, "positions", self.positions, ("learned", "sinusoidal", "none"))
        _check_choice(op, "norm", self.norm, ("layer", "rms"))
        return self


class LanguageModelConfig(NamedTuple):
    """A decoder-only language model, beside its parameters.

    Parameters
    ----------
    block : BlockConfig, optional
        The blocks.
    embedding : EmbeddingConfig, optional
        Tokens and positions.

    Examples
    --------
    >>> gpt2 = LanguageModelConfig(BlockConfig(activation="gelu_tanh"))
    >>> llama = LanguageModelConfig(
    ...     BlockConfig(norm="rms", activation="silu", rotary=Rotary()), EmbeddingConfig(positions="none")
    ... )
    >>> gpt2.embedding.positions, llama.block.norm
    ('learned', 'rms')
    """

    block: BlockConfig = BlockConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()

    def checked(self, op: str) -> LanguageModelConfig:
        """The same, or a clear error."""
        if not isinstance(self, LanguageModelConfig):
            raise TypeError(f"{op}: config must be a LanguageModelConfig, got {type(self).__name__}")
        BlockConfig.checked(self.block, op, stack=True)
        EmbeddingConfig.checked(self.embedding, op)
        return self


class EncoderDecoderConfig(NamedTuple):
    """An encoder-decoder, beside its parameters.

    Parameters
    ----------
    encoder : BlockConfig, optional
        The encoder's blocks.
    decoder : BlockConfig, optional
        The decoder's blocks.
    embedding : EmbeddingConfig, optional
        Tokens and positions, of source and target.
    """

    encoder: BlockConfig = BlockConfig()
    decoder: BlockConfig = BlockConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()

    def checked(self, op: str) -> EncoderDecoderConfig:
        """The same, or a clear error."""
        if not isinstance(self, EncoderDecoderConfig):
            raise TypeError(f"{op}: config must be an EncoderDecoderConfig, got {type(self).__name__}")
        BlockConfig.checked(self.encoder, op, stack=True)
        BlockConfig.checked(self.decoder, op, stack=True)
        EmbeddingConfig.checked(self.embedding, op)
        return self


def _check_choice(op: str, name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} of config must be one of {', '.join(choices)}, got {value!r}")
