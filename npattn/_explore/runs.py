"""What was given to ``npattn.explore``, in order: runs of layers, the choices between them, the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from npattn._attention.biases import LazyBias
from npattn._attention.explain import number
from npattn._attention.multi_head_steps import MultiHeadAttentionSteps, MultiHeadAttentionStepsBackward
from npattn._attention.problem import Problem
from npattn._attention.steps import AttentionSteps, AttentionStepsBackward
from npattn._explore.tables import Layer

MOST = 256  # queries or keys: a page has an element for every cell

_KINDS = (AttentionSteps, AttentionStepsBackward, MultiHeadAttentionSteps, MultiHeadAttentionStepsBackward)


class Choice(NamedTuple):
    """What one can switch: its name, its values, and for every run the value that it has."""

    name: str
    values: list[str]
    of_run: list[int]


class Runs(NamedTuple):
    """All that is shown."""

    runs: list[list[Layer]]
    choices: list[Choice]
    projected: bool  # queries, keys and values come from multi-head attention's projections


def read_runs(runs: Any) -> Runs:
    """Runs by name, a sequence of runs, or one run; a run is what one layer's steps function gave, or a list of such."""
    names = None
    if isinstance(runs, Mapping):
        names, runs = [str(name) for name in runs], list(runs.values())
    elif isinstance(runs, _KINDS):
        runs = [runs]
    elif not isinstance(runs, Sequence) or isinstance(runs, (str, bytes)) or hasattr(runs, "_fields"):
        raise _wrong_kind(runs)
    given = [[run] if isinstance(run, _KINDS) else list(_layers(run)) for run in runs]
    layers = [[_layer(layer) for layer in run] for run in given]
    if not layers or not all(layers):
        raise ValueError("explore: runs must hold at least one run of at least one layer")
    if len({len(run) for run in layers}) > 1:
        raise ValueError(f"explore: every run must have as many layers as the others, got {[len(run) for run in layers]}")
    for n, layer in enumerate(layers[0]):
        for run in layers[1:]:
            if (run[n].problem.queries, run[n].problem.keys) != (layer.problem.queries, layer.problem.keys):
                raise ValueError("explore: all runs must be of the same tokens: T and S differ between them")
    choices = _by_options(layers) if names is None else [Choice("run", names, list(range(len(names))))]
    projected = any(
        isinstance(layer, (MultiHeadAttentionSteps, MultiHeadAttentionStepsBackward)) for run in given for layer in run
    )
    return Runs(layers, [c for c in choices if len(c.values) > 1], projected)


def _layers(run: Any) -> Sequence[Any]:
    if isinstance(run, (list, tuple)) and not hasattr(run, "_fields"):
        return run
    raise _wrong_kind(run)


def _layer(layer: Any) -> Layer:
    if isinstance(layer, (MultiHeadAttentionSteps, MultiHeadAttentionStepsBackward)):
        layer = layer.attention
    if not isinstance(layer, (AttentionSteps, AttentionStepsBackward)):
        raise _wrong_kind(layer)
    steps, backward = (layer, None) if isinstance(layer, AttentionSteps) else (layer.steps, layer)
    _check_size(tuple(steps.weights.shape))
    return Layer(steps, backward)


def _wrong_kind(given: Any) -> TypeError:
    return TypeError(
        "explore: a run must be what attention_steps, attention_steps_backward, multi_head_attention_steps or "
        f"multi_head_attention_steps_backward returns, or a list of layers of them, got {type(given).__name__}"
    )


def _check_size(shape: tuple[int, ...]) -> None:
    T, S = shape[-2:]
    if not math.prod(shape):
        raise ValueError(f"explore: there is nothing to show: the weights have the shape {shape}")
    if max(T, S) > MOST:
        raise ValueError(f"explore: a page shows at most {MOST} queries and keys, got T = {T}, S = {S}: take a part of them")


# Choices ----------------------------------------------------------------------------------------------------------------------


def _by_options(runs: list[list[Layer]]) -> list[Choice]:
    """One choice for every option in which runs differ."""
    settings = [[_settings(layer.problem) for layer in run] for run in runs]
    choices = []
    for name in settings[0][0]:
        values = [" | ".join(dict.fromkeys(layer[name] for layer in run)) for run in settings]
        known = list(dict.fromkeys(values))
        choices.append(Choice(name, known, [known.index(value) for value in values]))
    combined = list(zip(*(c.of_run for c in choices), strict=True))
    for n, one in enumerate(combined):
        if one in combined[:n]:
            raise ValueError(
                f"explore: runs {combined.index(one)} and {n} have the same options: give them names, "
                "as {'before': ..., 'after': ...}"
            )
    return choices


def _settings(problem: Problem) -> dict[str, str]:
    options = problem.options
    size = problem.q.shape[-1]
    usual = size > 0 and options.scale == 1 / math.sqrt(size)
    bias = options.bias
    return {
        "mask": "none" if options.mask is None else repr(options.mask),
        "scale": "1/√D" if usual else number(options.scale),
        "softcap": "none" if options.softcap is None else number(options.softcap),
        "bias": "none" if bias is None else repr(bias) if isinstance(bias, LazyBias) else f"array{tuple(bias.shape)}",
        "sinks": "none" if options.sinks is None else f"array{tuple(options.sinks.shape)}",
        "dropout": "none" if options.dropout is None else repr(options.dropout),
    }
