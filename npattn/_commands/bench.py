"""``python -m npattn bench``: npattn beside the naive formula, PyTorch and JAX, in turn in one process."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import functools
import json
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from npattn._arrays import threads
from npattn._commands import bench_report as report
from npattn._commands.bench_backends import Backend, Call, open_backend
from npattn._commands.bench_cases import CASES, Case, select
from npattn._commands.bench_products import prepare_products
from npattn._commands.bench_report import Row
from npattn._commands.bench_rivals import Npattn, Rival, Torch, find_rivals
from npattn._commands.bench_timing import Disagreement, interleave, largest_difference
from npattn._commands.bench_train import TRAININGS, TrainCase, npattn_step, prepare_step_products, torch_step
from npattn._commands.terminal import Bar, Terminal

AnyCase = Case | TrainCase
SECONDS, LEAST = 6.0, 9  # for a pass of a case, and rounds at least
QUICK_SECONDS, QUICK_LEAST = 0.25, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--case", action="append", metavar="PATTERN", help="only cases with such a name, as causal*float64; may be given again"
    )
    parser.add_argument("--quick", action="store_true", help="a few cases, in under 20 seconds")
    parser.add_argument("--repeat", type=_positive, metavar="N", help="measure everything N times, not as often as time allows")
    parser.add_argument("--threads", type=_positive, metavar="N", help="of npattn, NumPy's BLAS and PyTorch (default: all CPUs)")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32", "float64"], help="of all cases")
    parser.add_argument("--backend", choices=["numpy", "cupy"], default="numpy", help="arrays of npattn (default: numpy)")
    parser.add_argument("--generate", action="store_true", help="instead: the time of a token with a key/value cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, every sample and what they depend on")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time against T (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    with contextlib.ExitStack() as stack:
        try:
            cases: list[AnyCase] = select((*CASES, *TRAININGS), *options.case or (), quick=options.quick, dtype=options.dtype)
            backend = open_backend(options.backend)
            for dtype in dict.fromkeys(case.dtype for case in cases):
                backend.dtype(dtype)
            if options.plot is not None:
                report.check_plot(options.plot)
            for path in (options.json, options.plot):
                if path is not None:
                    report.check_writable(path)
            count = stack.enter_context(thread_count(options.threads))
        except (ValueError, OSError) as error:
            return _fail(error, 2)
        if options.generate:
            return _generate(count)
        return _run(options, cases, backend, count)


def _generate(count: int) -> int:
    from npattn._commands.bench_generate import Sizes, measure, table

    try:
        lines = table(measure(Sizes(), count), Sizes())
    except ValueError as error:
        return _fail(error, 1)
    terminal = Terminal(sys.stdout)
    for line in lines:
        terminal.say(line)
    return 0


def _run(options: argparse.Namespace, cases: list[AnyCase], backend: Backend, count: int) -> int:
    terminal, bar = Terminal(sys.stdout), Bar(Terminal(sys.stderr), sum(len(case.passes) for case in cases))
    record: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "complete": False,
        "backend": backend.name,
        "machine": None,
        "notes": [],
    }
    rows: list[Row] = []
    status = 0
    try:
        blas = report.blas_name(_blas_pools())  # before others bring theirs
        bar.show(0, "loading what there is to measure against")
        rivals, notes = find_rivals(backend, count, threads._usable_cpus())
        libraries = [name for name in ("torch", "jax", "cupy") if name in sys.modules]
        record["machine"] = report.machine(count, threads._usable_cpus(), blas, backend.device(), libraries)
        record["notes"] = notes
        bar.clear()
        for line in (*report.machine_lines(record["machine"]), *notes, "", report.HEAD):
            terminal.say(line)
        for row in measure(cases, backend, rivals, options, bar):
            rows.append(row)
            bar.clear()
            terminal.say(report.table_line(row))
        record["complete"] = True
    except KeyboardInterrupt:
        _ignore_interrupts()
        status = 130
    except Disagreement as error:
        bar.clear()
        status = _fail(error, 1)
    bar.clear()
    if rows:
        for line in ("", *report.LEGEND, report.agreement_line(rows)):
            terminal.say(line)
    if status == 130:
        terminal.say(f"\nInterrupted after {len(rows)} of {bar.total} rows.")
    try:
        if options.json is not None:
            record["rows"] = [report.row_record(row) for row in rows]
            report.write_whole(options.json, (json.dumps(record, indent=1) + "\n").encode())
        if options.plot is not None and rows:
            report.write_whole(options.plot, report.plot(rows, options.plot, report.machine_lines(record["machine"])[0]))
    except OSError as error:
        status = _fail(error, 2)
    return status


def measure(cases: list[AnyCase], backend: Backend, rivals: list[Rival], options: argparse.Namespace, bar: Bar) -> Iterator[Row]:
    """A row for every pass of every case: agreement first, then memory, then time."""
    seconds, least = (QUICK_SECONDS, QUICK_LEAST) if options.quick else (SECONDS, LEAST)
    done = 0
    for case in cases:
        for name in case.passes:
            title = f"{case.name} {name}"
            bar.show(done, f"{title}: agreement")
            own, calls, products = _prepare(case, name, backend, rivals)
            results = own()
            differences = {
                who: largest_difference(results, call(), dtype=case.dtype, who=f"{title}, {who}") for who, call in calls.items()
            }
            del results
            memory = backend.extra_memory(own)
            products()
            samples = interleave(
                {"npattn": own, **calls, report.LIMIT: products},
                synchronize=backend.synchronize,
                seconds=seconds,
                least=least,
                repeat=options.repeat,
                tick=functools.partial(_show_part, bar, done, title),
            )
            yield Row(case, name, samples, memory, differences)
            done += 1


def _prepare(case: AnyCase, name: str, backend: Backend, rivals: list[Rival]) -> tuple[Call, dict[str, Call], Call]:
    """A pass of npattn's, of its rivals', and of the bare matrix products."""
    if isinstance(case, TrainCase):
        start = case.inputs()
        steps = {x.name: torch_step(case, start, x.torch, x.device) for x in rivals if isinstance(x, Torch)}
        return npattn_step(case, start, backend), steps, prepare_step_products(case, backend)
    inputs = case.inputs()
    prepared = [(rival.name, rival.prepare(case, inputs, name)) for rival in rivals]
    calls = {who: call for who, call in prepared if call is not None}
    return Npattn(backend).prepare(case, inputs, name), calls, prepare_products(case, inputs, name, backend)


def _ignore_interrupts() -> None:
    """From now on: the second Ctrl-C of an impatient user does not lose what is about to be written."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _show_part(bar: Bar, done: int, title: str, part: float) -> None:
    bar.show(done + part, title)


@contextlib.contextmanager
def thread_count(requested: int | None) -> Iterator[int]:
    """Hold npattn and NumPy's BLAS to a number of threads, by default the one that npattn would take."""
    from threadpoolctl import threadpool_limits

    before = threads._requested
    threads.set_num_threads(requested if requested is not None else before)
    try:
        count = threads.get_num_threads()
        if all(pool["num_threads"] == count for pool in _blas_pools()):
            yield count
        else:
            with threadpool_limits(count, user_api="blas"):
                yield count
    finally:
        threads.set_num_threads(before)


def _blas_pools() -> list[dict[str, Any]]:
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def _fail(error: Exception, status: int) -> int:
    print(f"npattn bench: {error}", file=sys.stderr)
    return status


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
