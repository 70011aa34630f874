"""Tokens that follow: the likeliest ones, ones drawn by chance, or the best of several beginnings."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_float, host_int, shape_error
from npattn._arrays.host import to_numpy
from npattn._arrays.trees import with_tree_repr
from npattn._attention.biases import LazyBias
from npattn._attention.mask_kinds import length_mask
from npattn.layers._ids import as_ids
from npattn.layers.softmax import log_softmax, softmax
from npattn.models.cache import KeyValueCache
from npattn.models.config import EncoderDecoderConfig, LanguageModelConfig
from npattn.models.decoding import EncoderDecoderCache, encoder_decoder_start, encoder_decoder_step, last_logits
from npattn.models.encoder_decoder import EncoderDecoderParams
from npattn.models.language_model import LanguageModelParams


def generate(
    params: LanguageModelParams,
    prompts: Any,
    /,
    *,
    count: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    bias: LazyBias | None = None,
    config: LanguageModelConfig = LanguageModelConfig(),  # noqa: B008 - it is frozen
) -> np.ndarray[Any, Any]:
    """Tokens that follow a prompt, or several.

    Parameters
    ----------
    params : LanguageModelParams
        Of the model.
    prompts : integer array (T,) or (B, T), or lists of Python integers
        One prompt or several, of one token at least. Lists of different lengths are padded on their left, where nobody sees it.
    count : int
        How many tokens.
    temperature : float, optional
        0 takes the likeliest token every time. Above 0 tokens are drawn from softmax(logits / temperature).
    top_k : int, optional
        Draw from the k likeliest only (and from those that are as likely as the last of them).
    top_p : float, optional
        Draw from the likeliest tokens only that together have this probability; after ``top_k``.
    seed : int, optional
        Of the draws: the same seed, prompts and options give the same tokens.
    stop : int, optional
        A token that ends a sequence; all that follows it is this token too.
    bias : LazyBias, optional
        As in `language_model_step`.
    config : LanguageModelConfig, optional
        Of the model.

    Returns
    -------
    integer NumPy array (count,) or (B, count)
        The new tokens.

    Raises
    ------
    ValueError
        If a prompt is empty, a number is out of range, or the model has too few positions.
    TypeError
        If prompts are not integers.

    References
    ----------
    Holtzman et al.: The Curious Case of Neural Text Degeneration (2020), for ``top_p``.

    Examples
    --------
    >>> import numpy as np
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> generate(params, [[3, 1, 4], [1]], count=4, temperature=0.8, top_k=5, seed=1).shape
    (2, 4)
    """
    op = "generate"
    steps = host_int(op, "count", count, least=0)
    draw = _Draw.checked(op, temperature, top_k, top_p, seed)
    ids, starts = _padded(op, prompts)
    many = ids if ids.ndim == 2 else ids[None, :]
    out = np.zeros((many.shape[0], steps), np.int64)
    cache = KeyValueCache.init(params, capacity=many.shape[1] + max(steps, 1), batch=many.shape[:1], starts=starts)
    done = np.zeros(many.shape[0], bool)
    tokens = many
    for n in range(steps):
        logits, cache = last_logits(params, tokens, cache, bias, config)
        chosen = draw(to_numpy(logits).astype(np.float64))
        if stop is not None:
            chosen = np.where(done, stop, chosen)
            done |= chosen == stop
        out[:, n] = chosen
        if done.all():
            out[:, n + 1 :] = stop
            break
        tokens = chosen[:, None]
    return out if ids.ndim == 2 else out[0]


def _padded(op: str, prompts: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """Prompts as one array, and where each begins if they differ in length."""
    starts = None
    if isinstance(prompts, (list, tuple)) and any(isinstance(p, (list, tuple)) or np.ndim(p) for p in prompts):
        rows = [np.asarray(to_numpy(as_ids(op, "prompts", p)), np.int64) for p in prompts]
        longest = max(row.shape[0] for row in rows)
        missing = [longest - row.shape[0] for row in rows]
        if any(n == longest for n in missing):
            raise ValueError(f"{op}: a prompt has one token at least, got an empty one")
        prompts = np.stack([np.pad(row, (n, 0)) for row, n in zip(rows, missing, strict=True)])
        starts = np.asarray(missing) if any(missing) else None
    ids = to_numpy(as_ids(op, "prompts", prompts))
    if ids.ndim not in (1, 2):
        shape_error(op, "prompts", "(T,) or (B, T)", ids.shape)
    if not ids.shape[-1]:
        raise ValueError(f"{op}: a prompt has one token at least, got an empty one")
    return ids, starts


class _Draw(NamedTuple):
    """How a token is taken from logits (B, V)."""

    temperature: float
    top_k: int | None
    top_p: float | None
    rng: np.random.Generator

    @classmethod
    def checked(cls, op: str, temperature: Any, top_k: Any, top_p: Any, seed: Any) -> _Draw:
        heat = host_float(op, "temperature", temperature)
        if heat < 0:
            raise ValueError(f"{op}: temperature must be at least 0, got {heat}")
        if top_k is not None:
            top_k = host_int(op, "top_k", top_k, least=1)
        if top_p is not None:
            top_p = host_float(op, "top_p", top_p)
            if not 0 < top_p <= 1:
                raise ValueError(f"{op}: top_p must be more than 0 and at most 1, got {top_p}")
        return cls(heat, top_k, top_p, np.random.default_rng(host_int(op, "seed", seed, least=0)))

    def __call__(self, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """One token a row."""
        if self.temperature == 0:
            return np.asarray(logits.argmax(axis=-1))
        weights = self.weights(logits)
        edges = np.cumsum(weights, axis=-1)
        # the last edge is what 1 has become by rounding
        return np.asarray((edges <= self.rng.random((len(edges), 1)) * edges[:, -1:]).sum(axis=-1))

    def weights(self, logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The probability of every token, 0 for those that are not to be drawn."""
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = np.partition(logits, -self.top_k, axis=-1)[:, -self.top_k, None]
            logits = np.where(logits < least, -np.inf, logits)
        weights: np.ndarray[Any, Any] = softmax(logits / self.temperature)
        if self.top_p is not None:
            order = np.argsort(-weights, axis=-1, kind="stable")
            falling = np.take_along_axis(weights, order, axis=-1)
            # a token stays if those before it have less than top_p
            kept = np.where(np.cumsum(falling, axis=-1) - falling < self.top_p, falling, 0.0)
            np.put_along_axis(weights, order, kept, axis=-1)
        return weights


@with_tree_repr
class BeamSearchResult(NamedTuple):
    """The best sequences that a beam search has found, the best first."""

    ids: np.ndarray[Any, Any]  # (..., beams, count), filled up with the stop token
    scores: np.ndarray[Any, Any]  # (..., beams)


def beam_search(
    params: EncoderDecoderParams,
    source: Any,
    /,
    *,
    start: int,
    stop: int,
    count: int,
    beams: int = 4,
    length_penalty: float = 0.0,
    source_lengths: Any = None,
    config: EncoderDecoderConfig = EncoderDecoderConfig(),  # noqa: B008
) -> BeamSearchResult:
    """The likeliest targets of a source, as far as keeping the best ``beams`` beginnings finds them.

    Parameters
    ----------
    params : EncoderDecoderParams
        Of the model.
    source : integer array (S,) or (B, S), or Python integers
        Tokens of one source or several.
    start : int
        The token that a target begins with; it is not among the results.
    stop : int
        The token that ends a target.
    count : int
        How many tokens a target has at most, the stop token among them.
    beams : int, optional
        How many beginnings are kept; 1 takes the likeliest token every time.
    length_penalty : float, optional
        A score is the log-probability of a target, divided by its number of tokens to the power of this: above 0, long targets
        suffer less from having many factors.
    source_lengths : integers (B,), optional
        How many tokens each source has; what stands behind them is padding.
    config : EncoderDecoderConfig, optional
        Of the model.

    Returns
    -------
    BeamSearchResult
        ``ids`` (..., beams, count) and ``scores`` (..., beams), the best first.

    Raises
    ------
    ValueError
        If shapes do not fit, a token or a number is out of range, or the model has too few positions.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Wu et al.: Google's Neural Machine Translation System (2016), section 7, for penalties of the length.

    Examples
    --------
    >>> import numpy as np
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = EncoderDecoderParams.init(np.random.default_rng(0), **sizes)
    >>> beam_search(params, [[3, 1, 4], [1, 5, 9]], start=0, stop=1, count=6, beams=3)
    BeamSearchResult(ids=int64[2, 3, 6], scores=float64[2, 3])
    """
    op = "beam_search"
    width, steps = host_int(op, "beams", beams, least=1), host_int(op, "count", count, least=1)
    penalty = host_float(op, "length_penalty", length_penalty)
    own = params.source if params.target is None else params.target
    vocabulary = own.tokens.shape[0]
    for name, token in (("start", start), ("stop", stop)):
        if not 0 <= host_int(op, name, token) < vocabulary:
            raise ValueError(f"{op}: {name} must be at least 0 and less than V = {vocabulary}, got {token}")
    source = as_ids(op, "source", source)
    if source.ndim not in (1, 2):
        shape_error(op, "source", "(S,) or (B, S)", source.shape)
    rows = np.repeat(np.atleast_2d(to_numpy(source)), width, axis=0)
    mask = None
    if source_lengths is not None:
        lengths = np.atleast_1d(np.asarray(source_lengths))
        if lengths.shape != (len(rows) // width,):
            shape_error(op, "source_lengths", f"({len(rows) // width},), one for each source,", lengths.shape)
        mask = length_mask(np.repeat(lengths, width))
    cache = encoder_decoder_start(params, rows, capacity=steps, source_mask=mask, memory_mask=mask, config=config)
    search = _Beams(params, cache, width, start, stop, config)
    for _ in range(steps):
        search.step()
        if search.done.all():
            break
    result = search.result(steps, penalty)
    return result if source.ndim == 2 else BeamSearchResult(result.ids[0], result.scores[0])


class _Beams:
    """The beginnings of every source that are kept so far. In the model's batch the beams of a source stand side by side."""

    def __init__(
        self,
        params: EncoderDecoderParams,
        cache: EncoderDecoderCache,
        width: int,
        start: int,
        stop: int,
        config: EncoderDecoderConfig,
    ) -> None:
        self.params, self.config, self.width, self.stop = params, config, width, stop
        batch = cache.keys[0].shape[0] // width
        self.cache = cache
        self.scores = np.full((batch, width), -math.inf)
        self.scores[:, 0] = 0.0  # they begin alike: all but one would be the same
        self.done = np.zeros((batch, width), bool)
        self.lengths = np.zeros((batch, width), np.int64)
        self.ids = np.zeros((batch, width, 0), np.int64)
        self.last = np.full((batch, width), start, np.int64)

    def step(self) -> None:
        """One more token for every beginning; the best that come of it are kept."""
        batch, width = self.scores.shape
        logits, cache = encoder_decoder_step(self.params, self.last.reshape(-1, 1), self.cache, config=self.config)
        chances = log_softmax(to_numpy(logits).astype(np.float64)).reshape(batch, width, -1)
        chances[self.done] = -math.inf
        chances[self.done, self.stop] = 0.0  # a target that has ended stays as it is
        total = (self.scores[..., None] + chances).reshape(batch, -1)
        best = np.argsort(-total, axis=-1, kind="stable")[:, :width]
        parents, self.last = best // chances.shape[-1], best % chances.shape[-1]
        self.scores = np.take_along_axis(total, best, axis=-1)
        done = np.take_along_axis(self.done, parents, axis=-1)
        self.lengths = np.take_along_axis(self.lengths, parents, axis=-1) + ~done
        self.done = done | (self.last == self.stop)
        before = np.take_along_axis(self.ids, parents[..., None], axis=1)
        self.ids = np.concatenate([before, self.last[..., None]], axis=-1)
        places = (parents + np.arange(batch)[:, None] * width).reshape(-1)
        self.cache = cache._replace(target=cache.target.select(places))  # the source is the same for all beams

    def result(self, steps: int, penalty: float) -> BeamSearchResult:
        scores = self.scores / np.maximum(self.lengths, 1) ** penalty
        order = np.argsort(-scores, axis=-1, kind="stable")
        ids = np.take_along_axis(self.ids, order[..., None], axis=1)
        filled = np.pad(ids, ((0, 0), (0, 0), (0, steps - ids.shape[-1])), constant_values=self.stop)
        return BeamSearchResult(filled, np.take_along_axis(scores, order, axis=-1))
