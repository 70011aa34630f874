"""``python -m npattn explore``: a page that shows attention and its gradients inside a small model of words."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn import attention_steps, attention_steps_backward, causal_mask, explore
from npattn._arrays.namespace import Array
from npattn._commands.terminal import Terminal
from npattn._commands.word_model import (
    NO_QUESTION,
    NOUNS,
    SENTENCE,
    STEPS,
    WORDS,
    Faces,
    answer_forward,
    dout_of,
    learn,
    random_start,
    sentences,
)

MOST = 64  # words
SOFTCAP = 2.0


class Question(NamedTuple):
    """A text as the model reads it: the vectors of its words, and which noun "it" stands for, if that can be told."""

    words: list[str]
    new: list[str]  # to the model
    table: Array  # of the model's words, and after them of the new ones
    ids: Array
    asking: int | None
    answer: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    sentence = " ".join(SENTENCE)
    parser.add_argument("text", nargs="?", default=sentence, metavar="TEXT", help=f'words to look at (default: "{sentence}")')
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("attention.html"), metavar="FILE.html", help="where to (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help="training steps; 0: before any (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the words' vectors and the matrices (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    terminal = Terminal(sys.stdout)
    try:
        words = read_words(options.text)
        if options.steps < 0 or options.seed < 0:
            raise ValueError("--steps and --seed must not be negative")
        table, start = random_start(options.seed)
        question = ask(words, table, options.seed)
        faces = learn(start, table, steps=options.steps)[-1]
        runs = look(question, faces)
        page = explore(runs, words)
        page.write(options.output)
    except OSError as error:
        return _fail(f"cannot write {options.output}: {error.strerror or error}")
    except ValueError as error:
        return _fail(str(error))
    ids, answers, _ = sentences()
    loss, _ = answer_forward(faces, table, ids, answers)
    guess = f"that of a guess among {len(NOUNS)} is {np.log(len(NOUNS)):.3f}"
    learned = f"after {options.steps} steps its loss is {float(loss):.3f}, {guess}"
    terminal.say(f'The word model learns which noun "it" stands for: {learned}.')
    for line in report(question, runs[0]):
        terminal.say(line)
    terminal.say(f"Wrote {options.output}, {len(page.html) / 1000:.0f} kB: open it in a browser.")
    return 0


def _fail(message: str) -> int:
    print(f"npattn explore: {message}", file=sys.stderr)
    return 2


def read_words(text: str) -> list[str]:
    """What stands between blanks."""
    words = text.split()
    if not words:
        raise ValueError("there are no words in the text")
    if len(words) > MOST:
        raise ValueError(f"the text has {len(words)} words, at most {MOST} fit on a page")
    return words


def ask(words: list[str], table: Array, seed: int) -> Question:
    """The model's view of a text. Capitals and punctuation make no difference to it; new words get random vectors."""
    known = {word.casefold(): i for i, word in enumerate(WORDS)}
    plain = [word.strip(".,;:!?\"'()").casefold() for word in words]
    for word in plain:
        known.setdefault(word, len(known))
    new = [*known][len(WORDS) :]
    vectors = np.random.default_rng([seed, 1]).standard_normal((len(new), table.shape[-1]))
    vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    ids = np.array([known[word] for word in plain])
    asking = plain.index("it") if "it" in plain else 0
    nouns = [i for i, word in zip(ids, plain[:asking], strict=False) if word in NOUNS]
    table = np.concatenate([table, vectors])
    return Question(words, new, table, ids, asking, nouns[0]) if nouns else Question(words, new, table, ids, None, NO_QUESTION)


def look(question: Question, faces: Faces) -> list[Any]:
    """The steps of every run: all words ask, with and without a causal mask, the scale and a softcap; "it" has the loss."""
    answers = np.full((1, len(question.ids)), NO_QUESTION)
    if question.asking is not None:
        answers[0, question.asking] = question.answer
    runs: list[Any] = []
    for mask, scale, softcap in itertools.product((None, causal_mask()), (None, 1.0), (None, SOFTCAP)):
        options: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap}
        _, saved = answer_forward(faces, question.table, question.ids[None], answers, asking=slice(None), **options)
        asked = question.asking is not None
        runs.append(attention_steps_backward(dout_of(saved), saved.attention) if asked else attention_steps(saved.attention))
    return runs


def report(question: Question, run: Any) -> list[str]:
    """What the model makes of the text."""
    lines = [f"New to it, and so with random vectors: {', '.join(question.new)}."] if question.new else []
    if question.asking is None:
        nouns = ", ".join(NOUNS)
        return [*lines, f'Nothing is asked here: it takes an "it" after one of {nouns}. So there is no loss, and no gradient.']
    weights = run.steps.weights[0, 0, question.asking]
    most = int(np.argmax(weights))
    looks = f'"it" reads "{question.words[most]}" most, with weight {weights[most]:.3f}'
    return [*lines, f'Here {looks}. The answer whose loss is sent back is "{WORDS[question.answer]}".']
