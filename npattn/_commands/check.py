"""``python -m npattn check``: whether npattn computes correctly on this machine, with this BLAS, this GPU, these versions."""

from __future__ import annotations

import argparse
import functools
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import npattn.testing
from npattn._arrays import threads
from npattn._commands import bench_report as report
from npattn._commands.bench import _blas_pools
from npattn._commands.terminal import Bar, Terminal
from npattn.testing.candidates import Candidate, npattn_candidate
from npattn.testing.check import ORDER, check_law
from npattn.testing.law import LAWS
from npattn.testing.libraries import Library, Unavailable, open_library
from npattn.testing.multi_head import check_multi_head
from npattn.testing.vectors import as_problem, torch_gradients

BACKENDS = ("numpy", "cupy", "torch", "jax", "strict")
DTYPES = ("float64", "float32", "float16", "bfloat16")
EXAMPLES = {"jax": 1}  # it compiles every operation for every shape
DATA = Path(npattn.testing.__file__).parent / "data"
HEAD = f"{'what':<42}{'cases':>7}{'worst error':>13}{'of bound':>10}  verdict"


class Part(NamedTuple):
    """Something to be checked; ``run(worst, tick)`` returns the number of cases and raises AssertionError."""

    what: str
    cases: int
    run: Callable[[Worst, Callable[[], None]], int]


class Worst:
    """The largest error so far, and the largest share of what is allowed."""

    def __init__(self) -> None:
        self.error = self.share = 0.0
        self.measured = False

    def __call__(self, _: str, error: float, share: float) -> None:
        self.error, self.share, self.measured = max(self.error, error), max(self.share, share), True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--backend", choices=BACKENDS, default="numpy", help="whose arrays to compute with (default: numpy)")
    parser.add_argument("--dtype", choices=DTYPES, default="float64", help="of the arrays (default: float64)")
    parser.add_argument(
        "--examples",
        type=_positive,
        metavar="N",
        help="problems of every law (default: 30; 1 for JAX, which compiles every shape)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the problems (default: 0)")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status: 0, 1 if something is wrong, 2 if it cannot be checked here."""
    try:
        library = open_library(options.backend)
        if not library.has(options.dtype):
            raise Unavailable(f"{options.backend} has no {options.dtype}")
        _require_hypothesis()
    except (Unavailable, ImportError) as reason:
        print(f"npattn check: {str(reason).strip().splitlines()[0]}", file=sys.stderr)
        return 2
    terminal = Terminal(sys.stdout)
    for line in _versions(library):
        terminal.say(line)
    terminal.say(f"\n{options.backend}, {options.dtype}, seed {options.seed}\n\n{HEAD}")
    examples = options.examples or EXAMPLES.get(options.backend, 30)
    failures = check_all(list(parts(library, options.dtype, examples, options.seed)), terminal)
    for failure in failures:
        terminal.say(f"\n{failure}")
    terminal.say(f"\n{_summary(len(failures))}")
    return 1 if failures else 0


def check_all(listed: list[Part], terminal: Terminal) -> list[str]:
    """Check every part, a line each; the messages of those that fail."""
    bar, failures, done = Bar(Terminal(sys.stderr), sum(part.cases for part in listed)), [], 0
    for part in listed:
        seen = 0

        def tick(part: Part = part, done: int = done) -> None:
            nonlocal seen
            seen = min(seen + 1, part.cases)  # a failure is looked at again and again
            bar.show(done + seen, part.what)

        worst, verdict, cases = Worst(), "ok", part.cases
        bar.show(done, part.what)
        try:
            cases = part.run(worst, tick)
        except KeyboardInterrupt:
            bar.clear()
            raise
        except Exception as error:
            verdict = "FAILED"
            failures.append(f"{part.what}\n{_message(error)}")
        done += part.cases
        bar.clear()
        terminal.say(line(part.what, cases, worst, verdict))
    return failures


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def line(what: str, cases: int, worst: Worst, verdict: str) -> str:
    """A line of the table."""
    error, share = (f"{worst.error:.1e}", f"{worst.share:.2g}") if worst.measured else ("-", "-")
    return f"{what:<42}{cases:>7}{error:>13}{share:>10}  {verdict}"


def parts(library: Library, dtype: str, examples: int, seed: int) -> Iterator[Part]:
    """What is checked: numbers of others, laws, multi-head attention against loops and differences."""
    candidate = npattn_candidate(library, dtype=None if library.name == "numpy" and dtype == "float64" else dtype)
    if dtype == "float64":
        vectors = list(torch_gradients(DATA))
        yield Part("PyTorch's values and gradients", len(vectors), functools.partial(_vectors, candidate, vectors))
    draw = functools.partial(_problems, library, dtype)
    for name in ORDER:
        if name != ("is_as_precise_as_the_naive_formula" if dtype == "float64" else "gradients_are_derivatives"):
            yield Part(name, examples, functools.partial(_law, name, candidate, draw, examples, seed))
    if dtype == "float64":
        count = max(examples // 3, 1) if library.name != "jax" else 1
        yield Part("multi-head attention and its gradients", count, functools.partial(_multi_head, library, count, seed))


def _problems(library: Library, dtype: str) -> Any:
    from npattn.testing.strategies import LAYOUTS, attention_problems

    more: dict[str, Any] = {"layouts": LAYOUTS, "empty": True}
    if library.name == "jax":
        more = {"ranks": [4], "B": 2, "H": 4, "K": (2, 4), "T": 3, "S": 5, "D": 2, "E": 2, "broadcast": False}
    return attention_problems(dtypes=[dtype], **more)


def _law(
    name: str, candidate: Candidate, draw: Callable[[], Any], examples: int, seed: int, worst: Worst, tick: Callable[[], None]
) -> int:
    return check_law(LAWS[name], candidate._replace(watch=worst), draw, examples, seed, tick=tick)


def _vectors(candidate: Candidate, vectors: list[Any], worst: Worst, tick: Callable[[], None]) -> int:
    for vector in vectors:
        problem, expected = as_problem(vector)
        got = candidate.answer(problem)
        for name, wanted in expected.given().items():
            off = float(np.abs(getattr(got, name) - wanted).max(initial=0))
            worst("", off, off / 1e-12)
            if not off <= 1e-12:
                raise AssertionError(f"{vector.name}: {name} differs from PyTorch's by {off:.3g}, allowed are 1e-12")
        tick()
    return len(vectors)


def _multi_head(library: Library, count: int, seed: int, worst: Worst, tick: Callable[[], None]) -> int:
    import hypothesis

    from npattn.testing.multi_head_strategies import multi_head_problems

    @hypothesis.seed(zlib.crc32(f"{seed} multi-head".encode()))
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, derandomize=False, print_blob=False, report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip
    @hypothesis.given(multi_head_problems())
    def holds(problem: Any) -> None:
        check_multi_head(problem, library, watch=worst)
        tick()

    holds()
    return count


def _require_hypothesis() -> None:
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise Unavailable('hypothesis is not installed: pip install "npattn[test]"') from None


def _versions(library: Library) -> list[str]:
    names = [
        name for name in ("torch", "jax", "cupy", "array_api_strict") if library.name.startswith(name.removeprefix("array_api_"))
    ]
    device = None
    if library.name == "cupy":  # cupy only
        properties = library.xp.cuda.runtime.getDeviceProperties(library.xp.cuda.Device().id)
        device = str(properties["name"].decode())
    found = report.machine(threads.get_num_threads(), threads._usable_cpus(), report.blas_name(_blas_pools()), device, names)
    support = ", ".join(f"{name} {found['versions'][name]}" for name in report.SUPPORT)
    return [*report.machine_lines({**found, "load": None}), support]


def _summary(count: int) -> str:
    if not count:
        return "Everything holds."
    return f"{count} {'line fails' if count == 1 else 'lines fail'}: see above for what was expected and what came out."


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
