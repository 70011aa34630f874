"""``python -m npattn demo``: train a small attention model with hand-derived gradients, and look at what it has learned."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npattn import attention_weights
from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_items, tree_map
from npattn._commands.character_model import CharacterParams, character_model, character_model_forward, loss_and_gradient
from npattn._commands.terminal import Progress, Terminal
from npattn.layers import softmax
from npattn.optim import Adam

CONTEXT = 32  # characters that the model looks back at
WIDTH, HEADS = 64, 4
BATCH = 32
LEARNING_RATE = 1e-2
LEAST = 20 * CONTEXT  # characters of a text: both parts must hold a few contexts


class Text(NamedTuple):
    """A text as numbers: the first nine tenths to train on, the rest to measure on."""

    name: str
    alphabet: str
    train: Array
    held_out: Array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--file", type=Path, metavar="PATH", help="train on this UTF-8 text instead of the one in the package")
    parser.add_argument("--steps", type=_positive, default=300, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the parameters, batches and sample (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    terminal = Terminal(sys.stdout)
    try:
        text = read_text(options.file)
    except (OSError, ValueError) as error:
        print(f"npattn demo: {error}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(options.seed)
    size = {"alphabet": len(text.alphabet), "context": CONTEXT, "width": WIDTH, "heads": HEADS}
    params = CharacterParams.init(rng, **size, dtype=np.float32)

    terminal.say(f"Text: {text.name}, {len(text.train) + len(text.held_out):,} characters, {len(text.alphabet)} distinct")
    count = sum(x.size for _, x in tree_items(params))
    terminal.say(f"Model: causal self-attention, {HEADS} heads, width {WIDTH}, context {CONTEXT}, {count:,} parameters")
    terminal.say()
    terminal.say("1. The hand-derived gradient against finite differences (float64, along random directions)")
    for line in gradient_report(params, text, rng):
        terminal.say(line)
    terminal.say()
    before = held_out_loss(params, text)
    terminal.say(f"2. Training: {options.steps} steps of Adam on {BATCH} x {CONTEXT} characters")
    started = time.monotonic()
    params, done = train(params, text, rng, options.steps, terminal)
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
    terminal.say("5. Who looks at whom: rows look at columns, darker is more; the largest weight of the heads")
    shown = text.held_out[:28]
    labels = [_label(text.alphabet[i]) for i in shown]
    _, saved = character_model_forward(params, shown)
    for line in terminal.heatmap(np.max(attention_weights(saved.attention.attention), axis=0).tolist(), labels, labels):
        terminal.say(line)
    if done < options.steps:
        terminal.say(f"\nInterrupted after {done} of {options.steps} steps; the figures above are of that moment.")
        return 130
    return 0


def read_text(path: Path | None) -> Text:
    """The package's text or a file's, or an error of one line."""
    if path is None:
        name = "Alice's Adventures in Wonderland, chapters I-VI (Lewis Carroll, 1865)"
        characters = resources.files("npattn._commands").joinpath("text.txt").read_text("ascii")
    else:
        name = str(path)
        try:
            characters = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        except OSError as error:
            raise OSError(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
        if "\0" in characters:
            raise ValueError(f"{path} is not text: it holds zero bytes")
        if len(characters) < LEAST:
            raise ValueError(f"{path} is too short: {len(characters)} characters, at least {LEAST} are needed")
    alphabet = "".join(sorted(set(characters)))
    codes = np.asarray([*alphabet.encode("utf-32-le")], dtype=np.uint8).view("<u4")
    ids = np.searchsorted(codes, np.frombuffer(characters.encode("utf-32-le"), dtype="<u4"))
    split = len(ids) * 9 // 10
    return Text(name, alphabet, ids[:split], ids[split:])


def batch(ids: Array, rng: np.random.Generator, size: int = BATCH) -> tuple[Array, Array]:
    """Random pieces of the text, and the same one character later."""
    starts = rng.integers(0, len(ids) - CONTEXT, size)
    pieces = ids[starts[:, None] + np.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def train(
    params: CharacterParams, text: Text, rng: np.random.Generator, steps: int, terminal: Terminal
) -> tuple[CharacterParams, int]:
    """The trained parameters, and how many steps were done before the end or an interrupt."""
    rule = Adam(lr=LEARNING_RATE)
    state = rule.init(params)
    progress = Progress(terminal, steps)
    try:
        for step in range(steps):
            loss, grads = loss_and_gradient(params, *batch(text.train, rng))
            rate = LEARNING_RATE * min((step + 1) / 20, 1.0) * (1 - step / steps)
            params, state = rule.update(params, grads, state, lr=rate)
            progress.update(loss)
    except KeyboardInterrupt:
        pass
    finally:
        progress.close()
    return params, len(progress.losses)


def gradient_report(params: CharacterParams, text: Text, rng: np.random.Generator) -> list[str]:
    """Every parameter's gradient along a random direction, by hand and by central differences with Richardson extrapolation."""
    params = tree_map(lambda x: x.astype(np.float64), params)
    ids, targets = batch(text.train, rng, 4)
    _, grads = loss_and_gradient(params, ids, targets)
    lines = [f"   {'parameter':<22}{'by hand':>16}{'by differences':>16}{'difference':>12}"]
    named = dict(tree_items(grads))
    for name, x in tree_items(params):
        direction = rng.standard_normal(x.shape)

        def slope(h: float, name: str = name, direction: Array = direction) -> float:
            ahead, behind = (_moved(params, name, s * h * direction) for s in (1, -1))
            return (loss_and_gradient(ahead, ids, targets)[0] - loss_and_gradient(behind, ids, targets)[0]) / (2 * h)

        by_differences = (4 * slope(1e-4) - slope(2e-4)) / 3
        by_hand = float(np.sum(named[name] * direction))
        lines.append(f"   {name:<22}{by_hand:>16.9f}{by_differences:>16.9f}{abs(by_hand - by_differences):>12.1e}")
    return lines


def _moved(params: CharacterParams, name: str, change: Array) -> CharacterParams:
    leaves = dict(tree_items(params))
    leaves[name] = leaves[name] + change
    values = iter(leaves.values())
    moved: CharacterParams = tree_map(lambda _: next(values), params)
    return moved


def held_out_loss(params: CharacterParams, text: Text) -> float:
    """The mean loss on the whole of the held-out text, in pieces."""
    ids = text.held_out
    count = (len(ids) - 1) // CONTEXT
    pieces = ids[: count * CONTEXT].reshape(count, CONTEXT), ids[1 : count * CONTEXT + 1].reshape(count, CONTEXT)
    losses = [loss_and_gradient(params, *(x[n : n + 64] for x in pieces))[0] * min(64, count - n) for n in range(0, count, 64)]
    return sum(losses) / count


def entropy(train: Array, held_out: Array, alphabet: int) -> float:
    """The loss of guessing each character by how often it stands in the training text."""
    counts = np.bincount(train, minlength=alphabet) + 1.0  # a character may stand in the held-out text alone
    return float(-np.mean(np.log(counts / counts.sum())[held_out]))


def sample(params: CharacterParams, text: Text, rng: np.random.Generator, length: int) -> str:
    """Characters drawn one by one from what the model expects next."""
    ids = list(text.held_out[:1])
    for _ in range(length):
        logits = character_model(params, np.asarray(ids[-CONTEXT:]))[-1]
        ids.append(int(rng.choice(len(text.alphabet), p=softmax(logits.astype(np.float64) / 0.8))))
    return "".join(text.alphabet[i] for i in ids)


def _label(character: str) -> str:
    return character if character.isprintable() and character != " " else "_"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
