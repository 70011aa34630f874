"""``python -m npattn demo``: train a small transformer with hand-derived gradients, and look at what it has learned."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from npattn import Rotary, attention_weights
from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_items, tree_map
from npattn._commands.terminal import Terminal
from npattn.layers import softmax
from npattn.models import (
    BlockConfig,
    EmbeddingConfig,
    LanguageModelConfig,
    LanguageModelParams,
    language_model,
    language_model_forward,
    language_model_loss,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.optim import AdamW, WarmupCosine
from npattn.texts import Text, read_text
from npattn.training import Trained, train

CONTEXT = 64  # characters that the model looks back at
BLOCKS, WIDTH, HEADS = 2, 64, 4
CONFIG = LanguageModelConfig(BlockConfig(rotary=Rotary()), EmbeddingConfig(positions="none"))
BATCH = 16
LEARNING_RATE = 8e-3
LEAST = 20 * CONTEXT  # characters of a text: both parts must hold a piece and more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--file", type=Path, metavar="PATH", help="train on this UTF-8 text instead of the one in the package")
    parser.add_argument("--steps", type=_positive, default=300, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the parameters, batches and sample (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    terminal = Terminal(sys.stdout)
    try:
        text = read_text(options.file, least=LEAST)
    except (OSError, ValueError) as error:
        print(f"npattn demo: {error}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(options.seed)
    params = new_params(rng, text)

    terminal.say(f"Text: {text.name}, {len(text.train) + len(text.held_out):,} characters, {len(text.alphabet)} distinct")
    count = sum(x.size for _, x in tree_items(params))
    shape = f"{BLOCKS} blocks, {HEADS} heads, width {WIDTH}, context {CONTEXT}"
    terminal.say(f"Model: a decoder-only transformer, {shape}, {count:,} parameters")
    terminal.say()
    terminal.say("1. The hand-derived gradient against finite differences (float64, along random directions)")
    for line in gradient_report(params, text, rng):
        terminal.say(line)
    terminal.say()
    before = held_out_loss(params, text)
    terminal.say(f"2. Training: {options.steps} steps of AdamW on {BATCH} x {CONTEXT} characters")
    started = time.monotonic()
    trained = learn(params, text, options.seed, options.steps, terminal)
    params, done = trained.params, len(trained.losses)
    seconds = time.monotonic() - started
    terminal.say()
    terminal.say("3. What it has learned, on text that it was not trained on (nats a character)")
    for name, value in (
        ("a guess among all characters", float(np.log(len(text.alphabet)))),
        ("this model before training", before),
        ("entropy of single characters", entropy(text.train, text.held_out, len(text.alphabet))),
        (f"this model after {done} steps, {seconds:.0f} s", held_out_loss(params, text)),
    ):
        terminal.say(f"   {name:<40}{value:.3f}")
    terminal.say()
    terminal.say("4. A sample")
    for line in sample(params, text, rng, 240).split("\n"):
        terminal.say(f"   | {line}")
    terminal.say()
    terminal.say("5. Who looks at whom in the last block: rows look at columns, darker is more; the largest weight of the heads")
    shown = text.held_out[:28]
    labels = [_label(text.alphabet[i]) for i in shown]
    _, saved = language_model_forward(params, shown, config=CONFIG)
    weights = np.max(attention_weights(saved.block(BLOCKS - 1).attention.attention), axis=0)
    for line in terminal.heatmap(weights.tolist(), labels, labels):
        terminal.say(line)
    if trained.interrupted:
        terminal.say(f"\nInterrupted after {done} of {options.steps} steps; the figures above are of that moment.")
        return 130
    return 0


def new_params(rng: np.random.Generator, text: Text) -> LanguageModelParams:
    """The model for a text's alphabet."""
    sizes = {"vocabulary": len(text.alphabet), "blocks": BLOCKS, "width": WIDTH, "heads": HEADS}
    return LanguageModelParams.init(rng, **sizes, tied=False, config=CONFIG, dtype=np.float32)


def loss_and_gradient(
    params: LanguageModelParams, batch: tuple[Array, Array], _step: int = 0
) -> tuple[Array, LanguageModelParams]:
    """The mean cross-entropy of the next characters in nats, and its gradient."""
    loss, saved = language_model_loss_forward(params, *batch, config=CONFIG)
    return loss, language_model_loss_backward(1.0, saved).dparams


def learn(params: LanguageModelParams, text: Text, seed: int, steps: int, terminal: Terminal) -> Trained:
    """Train, with progress on the terminal."""
    return train(
        loss_and_gradient,
        params,
        text.batches(size=BATCH, context=CONTEXT, seed=seed),
        AdamW(weight_decay=0.1),
        steps=steps,
        schedule=WarmupCosine(LEARNING_RATE, steps, warmup=min(40, steps), floor=LEARNING_RATE / 10),
        max_norm=1.0,
        progress=terminal.stream,
        tokens=BATCH * CONTEXT,
    )


def gradient_report(params: LanguageModelParams, text: Text, rng: np.random.Generator) -> list[str]:
    """Every part's gradient along a random direction, by hand and by central differences with Richardson extrapolation."""
    params = tree_map(lambda x: x.astype(np.float64), params)
    batch = text.batches(size=4, context=16)(0)
    grads = dict(tree_items(loss_and_gradient(params, batch)[1]))
    lines = [f"   {'part':<26}{'by hand':>16}{'by differences':>16}{'difference':>12}"]
    parts = dict.fromkeys(_part(name) for name in grads)
    for part in parts:
        direction = {name: rng.standard_normal(g.shape) for name, g in grads.items() if _part(name) == part}

        def slope(h: float, direction: dict[str, Array] = direction) -> float:
            ahead, behind = (language_model_loss(_moved(params, direction, s * h), *batch, config=CONFIG) for s in (1, -1))
            return float(ahead - behind) / (2 * h)

        by_differences = (4 * slope(1e-5) - slope(2e-5)) / 3
        by_hand = float(sum(np.sum(grads[name] * t) for name, t in direction.items()))
        lines.append(f"   {part:<26}{by_hand:>16.9f}{by_differences:>16.9f}{abs(by_hand - by_differences):>12.1e}")
    return lines


def _part(name: str) -> str:
    """``blocks.0.attention`` for ``blocks.0.attention.w_q``."""
    parts = name.split(".")
    return ".".join(parts[: 3 if parts[0] == "blocks" else 1])


def _moved(params: LanguageModelParams, direction: dict[str, Array], h: float) -> LanguageModelParams:
    values = iter([x + h * direction[name] if name in direction else x for name, x in tree_items(params)])
    moved: LanguageModelParams = tree_map(lambda _: next(values), params)
    return moved


def held_out_loss(params: LanguageModelParams, text: Text) -> float:
    """The mean loss on the whole of the held-out text, in pieces."""
    ids, targets = text.pieces(CONTEXT)
    parts = [slice(start, start + 32) for start in range(0, len(ids), 32)]
    losses = [language_model_loss(params, ids[p], targets[p], config=CONFIG) * len(ids[p]) for p in parts]
    return float(sum(losses)) / len(ids)


def entropy(train_ids: Array, held_out: Array, alphabet: int) -> float:
    """The loss of guessing each character by how often it stands in the training text."""
    counts = np.bincount(train_ids, minlength=alphabet) + 1.0  # a character may stand in the held-out text alone
    return float(-np.mean(np.log(counts / counts.sum())[held_out]))


def sample(params: LanguageModelParams, text: Text, rng: np.random.Generator, length: int) -> str:
    """Characters drawn one by one from what the model expects next."""
    ids = list(text.held_out[:1])
    for _ in range(length):
        logits = language_model(params, np.asarray(ids[-CONTEXT:]), config=CONFIG)[-1]
        ids.append(int(rng.choice(len(text.alphabet), p=softmax(logits.astype(np.float64) / 0.8))))
    return text.decode(ids)


def _label(character: str) -> str:
    return character if character.isprintable() and character != " " else "_"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
