"""Train the original transformer to read dates: written out in four languages and thirteen forms, in digits afterwards.

    python examples/train_translation.py              minutes, on two cores
    python examples/train_translation.py --quick      less than one, for a model that is on its way
    python examples/train_translation.py --plot map.png

"the seventh of March, 1984", "le 7 mars 1984" and "昭和59年3月7日" are all 1984-03-07. The encoder reads the
characters, the decoder writes digits one by one, and cross-attention shows where it looks for each. Dates to measure on are
none of those that it is trained on, in no form.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npattn import attention_weights, length_mask
from npattn._arrays.trees import tree_items
from npattn._commands.terminal import Terminal
from npattn.models import (
    EncoderDecoderConfig,
    EncoderDecoderParams,
    encoder_decoder,
    encoder_decoder_forward,
    encoder_decoder_loss_backward,
    encoder_decoder_loss_forward,
)
from npattn.optim import AdamW, WarmupCosine
from npattn.training import Trained, train

# Dates in words ---------------------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


MONTHS = {
    "English": _words("January February March April May June July August September October November December"),
    "German": _words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember"),
    "French": _words("janvier février mars avril mai juin juillet août septembre octobre novembre décembre"),
}
ERAS = (("令和", date(2019, 5, 1)), ("平成", date(1989, 1, 8)), ("昭和", date(1926, 12, 25)), ("大正", date(1912, 7, 30)))
MEIJI = ("明治", date(1868, 1, 25))

ONES_EN = _words("_ one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen")
ORDINALS_EN = {1: "first", 2: "second", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth", 12: "twelfth"}
ONES_DE = _words("_ ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn")
ORDINALS_DE = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}
ONES_FR = _words("_ un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize")


def english(n: int) -> str:
    """1 to 31, in order: seventh, twenty-first."""
    if n in ORDINALS_EN:
        return ORDINALS_EN[n]
    if n < 20:
        return f"{ONES_EN[n] if n < 18 else f'{ONES_EN[n - 10]}teen'.replace('tt', 't')}th"
    tens, rest = ("twent", n - 20) if n < 30 else ("thirt", n - 30)
    return f"{tens}y-{english(rest)}" if rest else f"{tens}ieth"


def german(n: int) -> str:
    """1 to 31, in order: siebte, einundzwanzigste."""
    if n < 20:
        return ORDINALS_DE.get(n, (ONES_DE[n] if n < 18 else f"{ONES_DE[n - 10]}zehn") + "te")
    tens, rest = ("zwanzig", n - 20) if n < 30 else ("dreißig", n - 30)
    return (f"{ONES_DE[rest]}und" if rest else "") + f"{tens}ste"


def french(n: int) -> str:
    """1 to 31, of which only the first is in order: premier, sept, vingt et un."""
    if n < 20:
        return "premier" if n == 1 else ONES_FR[n] if n < 17 else f"dix-{ONES_FR[n - 10]}"
    tens, rest = ("vingt", n - 20) if n < 30 else ("trente", n - 30)
    return tens + {0: "", 1: " et un"}.get(rest, f"-{ONES_FR[rest]}")


def suffix(n: int) -> str:
    """As in 1st, 2nd, 3rd, 11th."""
    return "th" if 10 < n < 14 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")


def japanese_era(day: date) -> str:
    """昭和59年; an era's first year is 元年."""
    name, first = next((era for era in ERAS if day >= era[1]), MEIJI)
    year = day.year - first.year + 1
    return f"{name}{'元' if year == 1 else year}年{day.month}月{day.day}日"


def _month(day: date, language: str) -> str:
    return MONTHS[language][day.month - 1]


Form = Callable[[date], str]
FORMS: dict[str, Form] = {
    "English, 7 March 1984": lambda d: f"{d.day} {_month(d, 'English')} {d.year}",
    "English, March 7, 1984": lambda d: f"{_month(d, 'English')} {d.day}, {d.year}",
    "English, the 7th of March, 1984": lambda d: f"the {d.day}{suffix(d.day)} of {_month(d, 'English')}, {d.year}",
    "English, words": lambda d: f"the {english(d.day)} of {_month(d, 'English')}, {d.year}",
    "German, 7. März 1984": lambda d: f"{d.day}. {_month(d, 'German')} {d.year}",
    "German, 07.03.1984": lambda d: f"{d.day:02}.{d.month:02}.{d.year}",
    "German, words": lambda d: f"der {german(d.day)} {_month(d, 'German')} {d.year}",
    "French, 7 mars 1984": lambda d: f"{'1er' if d.day == 1 else d.day} {_month(d, 'French')} {d.year}",
    "French, 07/03/1984": lambda d: f"{d.day:02}/{d.month:02}/{d.year}",
    "French, words": lambda d: f"le {french(d.day)} {_month(d, 'French')} {d.year}",
    "Japanese, 1984年3月7日": lambda d: f"{d.year}年{d.month}月{d.day}日",
    "Japanese, 1984/03/07": lambda d: f"{d.year}/{d.month:02}/{d.day:02}",
    "Japanese, eras": japanese_era,
}

# As numbers -------------------------------------------------------------------------------------------------------------------

DAYS = [date(1900, 1, 1) + timedelta(n) for n in range((date(2100, 1, 1) - date(1900, 1, 1)).days)]
# Short forms and longer ones: dates of about one length need little padding. What is hard is seen more often.
LENGTHS = {name: max(len(form(day)) for day in DAYS[::97]) for name, form in FORMS.items()}
GROUPS = [[name for name, n in LENGTHS.items() if (n > 15) == long] for long in (False, True)]
WEIGHTS = {name: 8 if name.endswith("eras") else 3 if name.endswith("words") else 1 for name in FORMS}

PAD, START, END = range(3)


class Data(NamedTuple):
    """Dates to train on and dates to measure on, and the numbers of characters; 0 to 2 pad, start and end."""

    train: list[date]
    held_out: list[date]
    alphabet: str

    @property
    def vocabulary(self) -> int:
        """How many numbers there are."""
        return len(self.alphabet) + 3

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
        """The numbers of the characters, padded to one length, and the lengths."""
        lengths = [len(text) for text in texts]
        ids = np.full((len(texts), max(lengths)), PAD)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = [self.alphabet.index(c) + 3 for c in text]
        return ids, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """The characters up to the end, without what is none."""
        ids = list(ids)
        return "".join(self.alphabet[n - 3] for n in ids[: ids.index(END) if END in ids else None] if n > END)


def make_data() -> Data:
    """A tenth of all days of two centuries is held out."""
    shuffled = [DAYS[n] for n in np.random.default_rng(0).permutation(len(DAYS))]
    characters = {c for day in DAYS[::5] for form in FORMS.values() for c in form(day)}
    alphabet = "".join(sorted(characters | set("0123456789-")))
    return Data(shuffled[len(DAYS) // 10 :], shuffled[: len(DAYS) // 10], alphabet)


class Sizes(NamedTuple):
    """How much there is to do."""

    width: int = 64
    heads: int = 4
    blocks: int = 2
    characters: int = 1400  # read in a step
    steps: int = 1500
    rate: float = 4e-3
    measured: int = 100  # dates, each in every form
    groups: Sequence[Sequence[str]] = GROUPS

    @property
    def forms(self) -> dict[str, Form]:
        """The forms that are read."""
        return {name: FORMS[name] for names in self.groups for name in names}


QUICK = Sizes(characters=1200, steps=160, rate=5e-3, measured=10, groups=[GROUPS[0][:4]])  # without eras


class Batch(NamedTuple):
    """Dates in words, in digits with a start, and in digits with an end."""

    source: np.ndarray
    lengths: list[int]
    target: np.ndarray
    targets: np.ndarray


def make_batch(data: Data, sizes: Sizes, seed: int, step: int) -> Batch:
    """Random days to train on, in random forms of about one length; the same ones for the same step.

    The fewer, the longer they are.
    """
    rng = np.random.default_rng([seed, step])
    weights = [np.asarray([WEIGHTS[name] for name in names]) for names in sizes.groups]
    shares = np.asarray([w.sum() for w in weights])
    group = rng.choice(len(shares), p=shares / shares.sum())
    names = sizes.groups[group]
    size = sizes.characters // max(LENGTHS[name] for name in names)
    days = [data.train[n] for n in rng.integers(0, len(data.train), size)]
    forms = [FORMS[names[n]] for n in rng.choice(len(names), size, p=weights[group] / shares[group])]
    source, lengths = data.encode([form(day) for form, day in zip(forms, days, strict=True)])
    digits, _ = data.encode([day.isoformat() for day in days])
    start, end = (np.full((size, 1), token) for token in (START, END))
    return Batch(source, lengths, np.concatenate([start, digits], 1), np.concatenate([digits, end], 1))


# The model --------------------------------------------------------------------------------------------------------------------

CONTEXT = 38  # characters: no date has more
CONFIG = EncoderDecoderConfig()


def loss_and_gradient(params: EncoderDecoderParams, batch: Batch, _step: int) -> tuple[np.ndarray, EncoderDecoderParams]:
    """The mean cross-entropy of the next digits in nats, and its gradient."""
    mask = length_mask(batch.lengths)
    loss, saved = encoder_decoder_loss_forward(
        params, batch.source, batch.target, batch.targets, source_mask=mask, memory_mask=mask, config=CONFIG
    )
    return loss, encoder_decoder_loss_backward(1.0, saved).dparams


def learn(params: EncoderDecoderParams, data: Data, sizes: Sizes, seed: int, terminal: Terminal) -> Trained:
    """Train, with progress on the terminal."""
    return train(
        loss_and_gradient,
        params,
        lambda step: make_batch(data, sizes, seed, step),
        AdamW(weight_decay=0.01),
        steps=sizes.steps,
        schedule=WarmupCosine(sizes.rate, sizes.steps, warmup=sizes.steps // 20, floor=sizes.rate / 100),
        max_norm=1.0,
        progress=terminal.stream,
        tokens=sizes.characters,
    )


def translate(params: EncoderDecoderParams, data: Data, texts: Sequence[str]) -> list[str]:
    """Dates in digits: at every step the likeliest one, until all have come to an end."""
    source, lengths = data.encode(texts)
    mask = length_mask(lengths)
    target = np.full((len(texts), 1), START)
    while target.shape[1] < 12 and not (target == END).any(axis=1).all():
        logits = encoder_decoder(params, source, target, source_mask=mask, memory_mask=mask, config=CONFIG)
        target = np.concatenate([target, np.argmax(logits[:, -1:], axis=-1)], axis=1)
    return [data.decode(row) for row in target[:, 1:].tolist()]


def accuracies(params: EncoderDecoderParams, data: Data, sizes: Sizes) -> dict[str, float]:
    """Of each form, the share of held-out dates of which every digit is right."""
    days = data.held_out[: sizes.measured]
    right = [day.isoformat() for day in days]
    return {
        name: float(np.mean([a == b for a, b in zip(translate(params, data, [form(day) for day in days]), right, strict=True)]))
        for name, form in sizes.forms.items()
    }


def cross_attention(params: EncoderDecoderParams, data: Data, text: str) -> tuple[np.ndarray, str]:
    """Who looks where while a date is written: the mean over the heads of the last block, (T, S), and what is written."""
    written = translate(params, data, [text])[0]
    target = np.concatenate([[[START]], data.encode([written])[0]], axis=1)[:, :-1]
    _, saved = encoder_decoder_forward(params, data.encode([text])[0], target, config=CONFIG)
    weights = attention_weights(saved.decoder.block(-1).cross_attention.attention)
    return np.mean(weights[0], axis=0), written


# The command ------------------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four short forms and fewer steps: under a minute")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the parameters and batches (default: 0)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the cross-attention map (needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {options.steps}")
    sizes = QUICK if options.quick else Sizes()
    sizes = sizes if options.steps is None else sizes._replace(steps=options.steps)
    if options.plot is not None and find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "npattn[plot]"')

    terminal, data = Terminal(sys.stdout), make_data()
    rng = np.random.default_rng(options.seed)
    params = EncoderDecoderParams.init(
        rng,
        vocabulary=data.vocabulary,
        blocks=sizes.blocks,
        width=sizes.width,
        heads=sizes.heads,
        context=CONTEXT,
        config=CONFIG,
        dtype=np.float32,
    )
    count = sum(x.size for _, x in tree_items(params))
    terminal.say(f"{len(DAYS):,} dates of two centuries in {len(sizes.forms)} forms; {len(data.held_out):,} are held out")
    terminal.say(f"Model: {sizes.blocks} + {sizes.blocks} blocks, {sizes.heads} heads, width {sizes.width}, {count:,} parameters")
    terminal.say(f"Training: {sizes.steps} steps of AdamW on {sizes.characters:,} characters")
    started = time.monotonic()
    trained = learn(params, data, sizes, options.seed, terminal)
    params = trained.params
    terminal.say(f"Trained for {len(trained.losses)} steps, {time.monotonic() - started:.0f} s")
    terminal.say()

    terminal.say(f"Held-out dates of which every digit is right, of {sizes.measured} in each form")
    found = accuracies(params, data, sizes)
    for name, share in found.items():
        example = FORMS[name](data.held_out[0])
        terminal.say(f"   {share:>6.1%}  {name.partition(',')[0]:<9} {example} -> {translate(params, data, [example])[0]}")
    terminal.say(f"   {np.mean(list(found.values())):>6.1%}  in all")
    terminal.say()

    text = FORMS["French, 07/03/1984" if options.quick else "English, words"](date(1984, 3, 7))
    weights, written = cross_attention(params, data, text)
    terminal.say("Where the decoder looks: a row for every character that it writes, a column for every one that it reads")
    for line in terminal.heatmap(weights.tolist(), list(written), [c if c != " " else "_" for c in text]):
        terminal.say(line)
    if options.plot is not None:
        from npattn.plot import plot_attention

        plot_attention(weights, list(written), list(text)).savefig(options.plot, dpi=150)
        terminal.say(f"Drawn in {options.plot}")
    return 130 if trained.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
