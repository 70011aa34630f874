"""``python -m npattn bench --generate``: the time of a token with a cache, beside PyTorch with one of the same kind."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._commands.bench_timing import settle
from npattn.models import BlockConfig, KeyValueCache, LanguageModelConfig, LanguageModelParams, language_model_step

CONFIG = LanguageModelConfig(BlockConfig(activation="gelu_tanh"))
Step = Callable[[int, int], Array]  # (token, position) -> logits (V,), after a start at position 0
TOLERANCE = 3e-5  # of the largest logit, in float32


class Sizes(NamedTuple):
    """A small GPT-2."""

    vocabulary: int = 1000
    width: int = 256
    heads: int = 8
    blocks: int = 4
    lengths: tuple[int, ...] = (64, 256, 1024)  # of what is in the cache


class Row(NamedTuple):
    """The time of a token behind so many others, in seconds."""

    length: int
    seconds: dict[str, float]


def measure(sizes: Sizes, threads: int, rounds: int = 3, tokens: int = 24) -> list[Row]:
    """Rounds of tokens around every length, in turn, each way's median.

    Raises
    ------
    ValueError
        If the ways do not agree.
    """
    params = LanguageModelParams.init(
        np.random.default_rng(0),
        vocabulary=sizes.vocabulary,
        blocks=sizes.blocks,
        width=sizes.width,
        heads=sizes.heads,
        context=max(sizes.lengths) + tokens,
        dtype=np.float32,
    )
    ways = {"npattn": with_npattn(params, max(sizes.lengths) + tokens)}
    if importlib.util.find_spec("torch") is not None:
        ways["torch"] = with_torch(params, max(sizes.lengths) + tokens, sizes.heads, threads)
    rows, at = [], 0
    drawn = np.random.default_rng(1).integers(0, sizes.vocabulary, max(sizes.lengths) + tokens)
    for length in sizes.lengths:
        for position in range(at, length):
            logits = [step(int(drawn[position]), position) for step in ways.values()]
        check_same(logits)
        at = length
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, step in ways.items():
                settle()
                for n in range(tokens):
                    started = time.perf_counter()
                    step(int(drawn[length + n]), length + n)
                    samples[name].append(time.perf_counter() - started)
        rows.append(Row(length, {name: statistics.median(found) for name, found in samples.items()}))
    return rows


def check_same(logits: list[Array]) -> None:
    """Raise if two ways differ."""
    for other in logits[1:]:
        apart = float(np.abs(other - logits[0]).max() / np.abs(logits[0]).max())
        if not apart <= TOLERANCE:
            raise ValueError(f"generate: logits differ by {apart:.1e} of the largest, more than {TOLERANCE:.0e}")


def with_npattn(params: LanguageModelParams, capacity: int) -> Step:
    """One step of a batch of one."""
    empty = KeyValueCache.init(params, capacity=capacity, batch=(1,))

    def step(token: int, position: int) -> Array:
        # the arrays are those that were written to: where to go on is a number
        return language_model_step(params, [[token]], empty._replace(length=position), config=CONFIG)[0][0, 0]

    return step


def with_torch(params: LanguageModelParams, capacity: int, heads: int, threads: int) -> Step:
    """The same model written with PyTorch's functions: one matrix for queries, keys and values, a preallocated cache."""
    from npattn.interop import to_gpt2

    torch: Any = importlib.import_module("torch")
    functional = torch.nn.functional
    torch.set_num_threads(threads)
    weights: dict[str, Any] = {}
    for name, x in to_gpt2(params, CONFIG).state.items():
        matrix = name.endswith("weight") and x.ndim == 2 and not name.startswith("w")
        weights[name] = torch.from_numpy(np.ascontiguousarray(x.T) if matrix else x)
    width, count = weights["wte.weight"].shape[1], len(params.blocks)
    caches = [torch.zeros(2, 1, heads, capacity, width // heads) for _ in range(count)]

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], CONFIG.block.eps)

    def step(token: int, position: int) -> Array:
        x = weights["wte.weight"][torch.tensor([[token]])] + weights["wpe.weight"][position]
        for n, cache in enumerate(caches):
            qkv = linear(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn").view(1, 1, 3, heads, -1).permute(2, 0, 3, 1, 4)
            cache[:, :, :, position : position + 1] = qkv[1:]
            keys, values = cache[:, :, :, : position + 1]
            out = functional.scaled_dot_product_attention(qkv[0], keys, values).transpose(1, 2).reshape(1, 1, -1)
            x = x + linear(out, f"h.{n}.attn.c_proj")
            hidden = functional.gelu(linear(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc"), approximate="tanh")
            x = x + linear(hidden, f"h.{n}.mlp.c_proj")
        logits: Array = functional.linear(norm(x, "ln_f"), weights["wte.weight"]).numpy()[0, 0]
        return logits

    whole: Step = torch.inference_mode()(step)
    return whole


def table(rows: list[Row], sizes: Sizes) -> list[str]:
    """What is printed."""
    names = list(rows[0].seconds)
    head = f"a token of a model with C = {sizes.width}, {sizes.blocks} blocks, V = {sizes.vocabulary}, float32, batch 1; ms"
    ratio = ["npattn/torch"] if "torch" in names else []
    lines = [head, "  behind  " + "".join(f"{name:>14}" for name in [*names, *ratio])]
    for row in rows:
        shown = [f"{1e3 * row.seconds[name]:14.3f}" for name in names]
        shown += [f"{row.seconds['npattn'] / row.seconds['torch']:14.2f}"] if ratio else []
        lines.append(f"{row.length:8}  " + "".join(shown))
    return lines
