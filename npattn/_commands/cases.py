"""``python -m npattn cases``: problems with float64 answers as files, and the check of a folder of answers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from npattn._commands.check import Worst, line
from npattn._commands.terminal import Bar, Terminal
from npattn.testing.golden import KINDS, OPTIONS, RESULTS, Lengths, Verdict, random_problem, verify, write_cases

SHOWN = 5  # wrong answers that are told in full


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="write the cases there")
    parser.add_argument("--verify", type=Path, metavar="DIR", help="check the answers there, to the cases there or in -o DIR")
    parser.add_argument("--count", type=int, default=100, metavar="N", help="how many cases (default: 100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the cases (default: 0)")
    for axis, values in Lengths()._asdict().items():
        default = {"K": "divisors of H", "S": "as T", "E": "D"}.get(axis) or " ".join(map(str, values))
        parser.add_argument(f"--{axis}", type=int, nargs="+", metavar="N", help=f"lengths of {axis} (default: {default})")
    parser.add_argument("--dtype", choices=["float64", "float32", "float16", "bfloat16"], default="float32", help="of the inputs")
    parser.add_argument("--masks", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of masks (default: all)")
    parser.add_argument(
        "--options", nargs="*", choices=OPTIONS, default=[], help="what half of the cases have (default: nothing)"
    )
    parser.add_argument("--tolerance", type=float, default=1.0, metavar="X", help="with --verify: multiply every bound by X")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status: 0, 1 if an answer is wrong, 2 for what cannot be used."""
    try:
        if options.verify is not None:
            return _verify(options.output or options.verify, options.verify, options.tolerance)
        if options.output is None:
            raise ValueError("where to? -o DIR writes cases, --verify DIR checks answers")
        return _write(options)
    except OSError as error:
        print(f"npattn cases: {error.filename or options.output}: {error.strerror or error}", file=sys.stderr)
    except ValueError as error:
        print(f"npattn cases: {error}", file=sys.stderr)
    return 2


def _write(options: argparse.Namespace) -> int:
    given = {axis: getattr(options, axis) for axis in Lengths._fields if getattr(options, axis) is not None}
    if options.count < 1 or options.seed < 0 or any(n < 1 for values in given.values() for n in values):
        raise ValueError("--count and all lengths must be at least 1, --seed at least 0")
    rng, lengths = np.random.default_rng(options.seed), Lengths(**given)
    problems = [
        random_problem(rng, lengths, dtype=options.dtype, masks=options.masks, options=options.options)
        for _ in range(options.count)
    ]
    bar, done = Bar(Terminal(sys.stderr), options.count), 0

    def tick() -> None:
        nonlocal done
        done += 1
        bar.show(done, "answers in float64, by loops")

    bar.show(0, "answers in float64, by loops")
    try:
        write_cases(options.output, problems, note=f"seed {options.seed}", tick=tick)
    finally:
        bar.clear()
    size = sum(path.stat().st_size for path in options.output.iterdir()) / 1e6
    cases = f"{options.count} case{'s' * (options.count > 1)}"
    Terminal(sys.stdout).say(f"Wrote {cases} to {options.output}, {size:.1f} MB; index.json says what is where.")
    return 0


def _verify(cases: Path, answers: Path, tolerance: float) -> int:
    terminal, verdicts = Terminal(sys.stdout), list(verify(cases, answers, tolerance=tolerance))
    wrong = [verdict for verdict in verdicts if verdict.message]
    terminal.say(f"{'answer':<42}{'cases':>7}{'worst error':>13}{'of bound':>10}  verdict")
    for result in RESULTS:
        if own := [verdict for verdict in verdicts if verdict.result == result]:
            terminal.say(_line(result, own))
    for verdict in wrong[:SHOWN]:
        terminal.say(f"\n{verdict.message}")
    if len(wrong) > SHOWN:
        terminal.say(f"\n... and {len(wrong) - SHOWN} more")
    terminal.say(
        f"\n{len(wrong)} of {len(verdicts)} answers are wrong." if wrong else f"\nAll {len(verdicts)} answers are right."
    )
    return 1 if wrong else 0


def _line(result: str, verdicts: list[Verdict]) -> str:
    worst = Worst()
    for verdict in verdicts:
        worst(result, verdict.error, verdict.share)
    return line(result, len(verdicts), worst, "FAILED" if any(verdict.message for verdict in verdicts) else "ok")
