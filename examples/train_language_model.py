"""Train a small transformer to write: a decoder-only language model on the characters of a text.

    python examples/train_language_model.py                 minutes, on two cores
    python examples/train_language_model.py --quick         less than one
    python examples/train_language_model.py --file my.txt --plot loss.png
    python examples/train_language_model.py --save model.npz      with --resume model.npz it goes on where it was interrupted

It reads six chapters of Alice's Adventures in Wonderland, which are in the package, or a text of yours, and keeps the last
tenth to measure on. Rotary positions, gated feed-forward networks, RMS norm: the model is a small Llama. All gradients are
derived by hand.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn import Dropout, Rotary, checkpoint
from npattn._arrays.trees import tree_items
from npattn._commands.terminal import Terminal
from npattn.layers import softmax
from npattn.models import (
    BlockConfig,
    EmbeddingConfig,
    LanguageModelConfig,
    LanguageModelParams,
    language_model,
    language_model_loss,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.optim import AdamW, WarmupCosine
from npattn.texts import Text, read_text
from npattn.training import Trained, TrainingStep, train

CONFIG = LanguageModelConfig(
    BlockConfig(norm="rms", activation="silu", rotary=Rotary()),
    EmbeddingConfig(positions="none"),
)


class Sizes(NamedTuple):
    """How much there is to do."""

    width: int = 128
    heads: int = 4
    blocks: int = 3
    context: int = 96
    batch: int = 16
    steps: int = 1200
    rate: float = 3e-3
    dropout: float = 0.1
    every: int = 100  # steps between two measurements


QUICK = Sizes(width=64, blocks=2, context=64, batch=12, steps=200, rate=8e-3, dropout=0.0, every=50)
LEAST = 20 * Sizes().context  # characters of a text
SAMPLE = 320  # characters that it writes


class Measured(NamedTuple):
    """The loss on the held-out text after some steps, in nats a character."""

    step: int
    loss: float


def new_params(rng: np.random.Generator, text: Text, sizes: Sizes) -> LanguageModelParams:
    """The model for a text's alphabet."""
    return LanguageModelParams.init(
        rng,
        vocabulary=len(text.alphabet),
        blocks=sizes.blocks,
        width=sizes.width,
        heads=sizes.heads,
        hidden=8 * sizes.width // 3,
        gated=True,
        bias=False,
        config=CONFIG,
        dtype=np.float32,
    )


def learn(
    params: LanguageModelParams,
    text: Text,
    sizes: Sizes,
    seed: int,
    terminal: Terminal,
    callback: Callable[[TrainingStep], object] | None = None,
    state: Any = None,
) -> Trained:
    """Train, or go on training from a state, with progress on the terminal."""
    drops = Dropout(sizes.dropout, seed) if sizes.dropout else None

    def loss_and_gradient(
        params: LanguageModelParams, batch: tuple[np.ndarray, np.ndarray], step: int
    ) -> tuple[np.ndarray, LanguageModelParams]:
        dropout = None if drops is None else drops.fold(step)
        loss, saved = language_model_loss_forward(params, *batch, dropout=dropout, config=CONFIG)
        return loss, language_model_loss_backward(1.0, saved).dparams

    return train(
        loss_and_gradient,
        params,
        text.batches(size=sizes.batch, context=sizes.context, seed=seed),
        AdamW(beta2=0.99, weight_decay=0.1),
        steps=sizes.steps,
        state=state,
        schedule=WarmupCosine(sizes.rate, sizes.steps, warmup=max(sizes.steps // 20, 1), floor=sizes.rate / 20),
        max_norm=1.0,
        progress=terminal.stream,
        tokens=sizes.batch * sizes.context,
        callback=callback,
    )


def save(path: Path | None, params: LanguageModelParams, state: Any, notes: dict[str, Any], measured: Sequence[Measured]) -> None:
    """Write all that training goes on from, if there is a path."""
    if path is not None:
        checkpoint.save(path, params, config=CONFIG, state=state, notes={**notes, "measured": [list(m) for m in measured]})


def resume(path: Path, params: LanguageModelParams, notes: dict[str, Any]) -> checkpoint.Checkpoint:
    """Read it, for the same text and the same options."""
    found = checkpoint.load(path, like=params)
    other = [name for name, value in notes.items() if (found.notes or {}).get(name) != value]
    if found.state is None or other:
        raise ValueError(f"{path} was trained with other options or another text: {', '.join(other) or 'there is no state'}")
    return found


def held_out_loss(params: LanguageModelParams, text: Text, context: int) -> float:
    """The mean loss on the whole of the held-out text, in pieces, without dropout."""
    ids, targets = text.pieces(context)
    parts = [slice(start, start + 32) for start in range(0, len(ids), 32)]
    losses = [language_model_loss(params, ids[p], targets[p], config=CONFIG) * len(ids[p]) for p in parts]
    return float(sum(losses)) / len(ids)


def write(
    params: LanguageModelParams,
    text: Text,
    rng: np.random.Generator,
    *,
    start: str,
    length: int,
    context: int,
    temperature: float,
) -> str:
    """Characters drawn one by one from what the model expects next: the colder, the likelier."""
    ids = list(text.encode(start))
    for _ in range(length):
        logits = language_model(params, np.asarray(ids[-context:]), config=CONFIG)[-1]
        ids.append(int(rng.choice(len(text.alphabet), p=softmax(logits.astype(np.float64) / temperature))))
    return text.decode(ids)


def draw_losses(losses: Sequence[float], measured: Sequence[Measured], path: Path) -> None:
    """The loss of every batch, and on the held-out text."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.4, linewidth=0.8, label="batches")
    axes.plot([m.step for m in measured], [m.loss for m in measured], color="tab:orange", marker="o", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a character)", title="Training a language model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, metavar="PATH", help="train on this UTF-8 text instead of the one in the package")
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer steps: under a minute")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the parameters, batches, dropout and samples")
    parser.add_argument(
        "--save", type=Path, metavar="FILE.npz", help="write the model and the state of its training now and then"
    )
    parser.add_argument("--resume", type=Path, metavar="FILE.npz", help="go on from there, to the same bits, and save there too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss curve (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {options.steps}")
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "npattn[plot]"')
    for name, given in (("--save", options.save), ("--resume", options.resume)):
        if given is not None and given.suffix not in (".npz", ".safetensors"):
            parser.error(f"{name}: the file must end in .npz or .safetensors, got {given.name}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, write."""
    options, terminal = _parse(arguments), Terminal(sys.stdout)
    sizes = QUICK if options.quick else Sizes()
    sizes = sizes if options.steps is None else sizes._replace(steps=options.steps)
    try:
        text = read_text(options.file, least=LEAST)
    except (OSError, ValueError) as error:
        print(f"train_language_model: {error}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(options.seed)
    params, state, path = new_params(rng, text, sizes), None, options.resume or options.save
    notes = {"seed": options.seed, "sizes": sizes._asdict(), "alphabet": text.alphabet, "characters": len(text.train)}
    if options.resume is None:
        measured = [Measured(0, held_out_loss(params, text, sizes.context))]
    else:
        try:
            found = resume(options.resume, params, notes)
        except (OSError, ValueError) as error:
            print(f"train_language_model: {error}", file=sys.stderr)
            return 2
        params, state = found.params, found.state
        measured = [Measured(*pair) for pair in found.notes["measured"]]

    def measure(step: TrainingStep) -> None:
        if step.step % sizes.every == 0 or step.step == sizes.steps:
            measured.append(Measured(step.step, held_out_loss(step.params, text, sizes.context)))
            save(path, step.params, step.state, notes, measured)

    terminal.say(f"Text: {text.name}, {len(text.train) + len(text.held_out):,} characters, {len(text.alphabet)} distinct")
    count = sum(x.size for _, x in tree_items(params))
    shape = f"{sizes.blocks} blocks, {sizes.heads} heads, width {sizes.width}, context {sizes.context}"
    terminal.say(f"Model: {shape}, {count:,} parameters")
    terminal.say(f"Training: {sizes.steps} steps of AdamW on {sizes.batch} x {sizes.context} characters")
    started = time.monotonic()
    trained = learn(params, text, sizes, options.seed, terminal, measure, state)
    save(path, trained.params, trained.state, notes, measured)
    params, seconds = trained.params, time.monotonic() - started
    terminal.say()

    terminal.say("Loss on text that it was not trained on, in nats a character")
    terminal.say(f"   a guess among all characters         {math.log(len(text.alphabet)):.3f}")
    for step, loss in measured:
        terminal.say(f"   after {step:>5} steps                    {loss:.3f}")
    terminal.say(f"Trained for {len(trained.losses)} steps, {seconds:.0f} s")
    start = text.decode(text.held_out[:16])
    for temperature in (0.5, 0.8):
        terminal.say()
        terminal.say(f"What it writes after {start!r}, at temperature {temperature}")
        written = write(params, text, rng, start=start, length=SAMPLE, context=sizes.context, temperature=temperature)
        for line in written.split("\n"):
            terminal.say(f"   | {line}")
    if options.plot is not None:
        draw_losses(trained.losses, measured, options.plot)
        terminal.say(f"\nDrawn in {options.plot}")
    return 130 if trained.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
