"""The benchmark as a user runs it, and its parts. No test looks at how fast anything is."""

from __future__ import annotations

import collections
import itertools
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl

import npattn
from npattn.__main__ import main
from npattn._arrays import threads
from npattn._arrays.block_products import Limits
from npattn._commands import bench, bench_backends, bench_products, bench_report, bench_rivals, bench_timing, bench_train
from npattn._commands.bench_backends import NumPyBackend
from npattn._commands.bench_cases import BOTH, CASES, FORWARD, LENGTHS, QUICK, Case, select
from npattn._commands.bench_report import Row
from npattn._commands.bench_rivals import Naive, Npattn
from npattn._commands.bench_timing import Disagreement, interleave, largest_difference
from npattn._commands.bench_train import TrainCase
from npattn._commands.terminal import Bar, Terminal
from npattn.testing.libraries import to_numpy
from tests.commands.terminals import everything

TINY = ["bench", "--quick", "--case", "tiny"]
SMALL = [  # every kind of case, small
    Case("full", 7, 7),
    Case("full", 5, 5, "float64"),
    Case("causal", 11, 11),
    Case("window", 300, 300, H=2, K=2, D=8),
    Case("padded", 13, 13, B=3, lengths=(5, 13, 2)),
    Case("decode", 1, 17),
    Case("cross", 3, 19, "float64"),
    Case("grouped", 7, 7, H=6, K=2),
    Case("tiny", 8, 8, H=2, K=2, D=16),
]


@pytest.fixture
def alone(monkeypatch):
    """A machine without PyTorch and JAX."""
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)


# The command -----------------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path):
    """The table on a terminal that has no more than cp932, and the record."""
    path = tmp_path / "figures.json"
    path.write_text("old", encoding="ascii")
    done = subprocess.run(
        [sys.executable, "-m", "npattn", *TINY, "--json", str(path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "cp932"},
        timeout=200,
        check=False,
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr
    assert "\r" not in text
    table = [line for line in text.splitlines() if line.startswith(("case ", "tiny-"))]
    assert [line.split()[1] for line in table] == ["pass", "forward", "forward+backward"]
    assert {len(line) for line in table} == {len(bench_report.HEAD)}
    assert max(len(line) for line in text.splitlines()) <= 130
    assert len(bench_report.HEAD) <= 100
    assert re.search(r"all results agreed; .*: \d\.\de-0[678] \(float32\)\.$", text, re.MULTILINE)

    record = json.loads(path.read_text(encoding="utf-8"))
    assert list(tmp_path.iterdir()) == [path]
    assert set(record) == {"date", "complete", "backend", "machine", "notes", "rows"}
    assert record["complete"] is True
    assert record["machine"]["threads"] == npattn.get_num_threads()
    assert record["machine"]["versions"]["numpy"] == np.__version__
    assert record["machine"]["blas"]
    rivals = {"naive", *(name for name in ("torch", "jax") if not any(note.startswith(name) for note in record["notes"]))}
    for row, name in zip(record["rows"], (FORWARD, BOTH), strict=True):
        check_row(row, Case("tiny", 8, 8, H=2, K=2, D=16), name, rivals)


def check_row(row, case, name, rivals):
    assert (row["case"], row["pass"]) == (case.name, name)
    assert (row["B"], row["H"], row["K"], row["T"], row["S"], row["D"]) == (case.B, case.H, case.K, case.T, case.S, case.D)
    assert row["operations"] == case.operations(name)
    assert set(row["samples"]) == set(row["seconds"]) == {"npattn", "limit", *rivals}
    assert set(row["ratios"]) == set(row["differences"]) == rivals
    assert len({len(samples) for samples in row["samples"].values()}) == 1
    for who, samples in row["samples"].items():
        assert min(samples) > 0
        assert row["seconds"][who] == statistics.median(samples)
    assert row["gflops"] == pytest.approx(row["operations"] / row["seconds"]["npattn"] / 1e9)
    assert row["share_of_limit"] > 0
    assert isinstance(row["memory_bytes"], int)
    assert 0 <= min(row["differences"].values(), default=0) <= max(row["differences"].values(), default=0) < 1e-5


def test_without_rivals(alone, capsys):
    assert main([*TINY, "--repeat", "2"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert "torch is left out: torch is not installed" in out
    assert "jax is left out: jax is not installed" in out
    assert re.search(r"^tiny-8-float32 +forward +[\d.]+ +[\d.]+ +\d+% +[\d.]+ +- +- +[\d.<]+$", out, re.MULTILINE)


def test_a_rival_that_does_not_load(alone, monkeypatch):
    def broken(name):
        raise OSError(f"lib{name}.so: cannot open shared object file\nmore lines")

    monkeypatch.setattr(bench_rivals.importlib, "import_module", broken)
    rivals, notes = bench_rivals.find_rivals(NumPyBackend(), 2, 2)
    assert [rival.name for rival in rivals] == ["naive"]
    assert notes == [f"{name} is left out: lib{name}.so: cannot open shared object file" for name in ("torch", "jax")]


def test_jax_does_not_run_against_fewer_threads(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    _, notes = bench_rivals.find_rivals(NumPyBackend(), 1, 2)
    assert notes[1] == "jax is left out: it takes all 2 CPUs, whatever the number of threads"


def test_threads_are_those_asked_for_and_put_back():
    def blas():
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    before, requested = blas(), threads._requested
    with bench.thread_count(1) as count:
        assert count == npattn.get_num_threads() == 1
        assert set(blas()) <= {1}
    assert (blas(), threads._requested) == (before, requested)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "nothing"], "no case matches 'nothing'; the cases are full-256-float32, "),
        (["--case", "tiny", "--case", "nothing"], "no case matches 'nothing'; the cases are full-256-float32, "),
        (["--dtype", "bfloat16"], "NumPy has no bfloat16"),
        (["--json", "missing/figures.json"], "cannot write missing/figures.json: No such file"),
        (["--json", "."], "cannot write .: it is a directory"),
        (["--plot", "missing/curves.png"], "cannot write missing/curves.png: No such file"),
        (["--plot", "curves.doc"], "curves.doc must end in one of "),
        (["--backend", "cupy"], "--backend cupy: cupy is not installed"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(arguments, message, tmp_path, monkeypatch, capsys):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("npattn bench: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_no_gpu(monkeypatch, capsys):
    def no_gpu(name):
        raise bench_backends.Unavailable("cupy finds no GPU: cudaErrorNoDevice: no CUDA-capable device is detected")

    monkeypatch.setattr(bench_backends, "open_library", no_gpu)
    assert main(["bench", "--backend", "cupy"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "npattn bench: --backend cupy: cupy finds no GPU: cudaErrorNoDevice: no CUDA-capable device is detected"
    ]


def test_no_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", "--plot", str(tmp_path / "curves.png")]) == 2
    assert capsys.readouterr().err.splitlines() == ['npattn bench: --plot needs matplotlib: pip install "npattn[plot]"']


def test_a_thread_count_that_is_none(monkeypatch, capsys):
    monkeypatch.setenv("NPATTN_NUM_THREADS", "many")
    monkeypatch.setattr(threads, "_requested", None)
    assert main(TINY) == 2
    assert "NPATTN_NUM_THREADS must be a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--repeat", "0"], ["--threads", "-1"], ["--dtype", "int8"], ["--backend", "torch"]])
def test_arguments_that_cannot_be_used(arguments, capsys):
    with pytest.raises(SystemExit) as status:
        main(["bench", *arguments])
    assert status.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_disagreement_is_an_error(alone, monkeypatch, capsys, tmp_path):
    """A rival that computes something else is named, and what was measured before is not lost."""
    right = bench_rivals.naive_backward

    def slipped(*arguments):
        dq, dk, dv = right(*arguments)
        return dq, 1.0001 * dk, dv

    monkeypatch.setattr(bench_rivals, "naive_backward", slipped)
    path = tmp_path / "figures.json"
    assert main([*TINY, "--repeat", "1", "--json", str(path)]) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"npattn bench: tiny-8-float32 forward\+backward, naive: dk differs from npattn's by 1\.0e-04 of its largest element, "
        r"more than 3e-05\n",
        err,
    )
    assert out.count("\ntiny-8-float32") == 1
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["complete"] is False
    assert [row["pass"] for row in record["rows"]] == [FORWARD]


def test_interrupt_keeps_what_is_finished(tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["bench", "--case", "tiny", "--repeat", "60", "--json", str(path)]
    script = "import sys; sys.modules.update(torch=None, jax=None); import npattn.__main__ as m; sys.exit(m.main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not process.stdout.readline().startswith(b"tiny-"):
        pass
    process.send_signal(signal.SIGINT)
    while not process.stdout.readline().startswith(b"npattn ms: "):
        pass
    process.send_signal(signal.SIGINT)  # an impatient user's second Ctrl-C
    with process.stdout, process.stderr:  # not communicate(), which does not know what readline has read ahead
        out, err = process.stdout.read(), process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert not err
    assert b"Interrupted after 1 of 2 rows." in out
    record = json.loads(path.read_text(encoding="utf-8"))
    assert list(tmp_path.iterdir()) == [path]
    assert record["complete"] is False
    assert [row["pass"] for row in record["rows"]] == [FORWARD]


def test_plot(tmp_path, alone):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "curves.png"
    assert main([*TINY, "--repeat", "1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_plot_draws_the_case_with_the_most_lengths(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    rows = [row(Case("tiny", 8, 8)), *(row(Case("causal", n, n), name) for n in (64, 32, 16) for name in (FORWARD, BOTH))]
    drawn = bench_report.plot(rows, tmp_path / "curves.svg", "title").decode()
    text = re.findall(r"<!-- (.*?) -->", drawn)
    assert {"forward, causal, float32", "forward+backward, causal, float32", "npattn", "bare matrix products"} <= set(text)
    assert {"16", "32", "64", "title"} <= set(text)
    assert "8" not in text


def test_the_command_imports_nothing_optional():
    script = "import npattn._commands.bench, sys; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    printed = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "npattn" in printed.split()
    assert not {"torch", "jax", "cupy", "matplotlib", "hypothesis"} & set(printed.split())


# Cases -----------------------------------------------------------------------------------------------------------------------


def test_names_tell_cases_apart():
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(QUICK) < {case.name for case in CASES}
    assert max(len(case.name) for case in CASES) < 23


@pytest.mark.parametrize("case", [*CASES, *SMALL], ids=lambda case: case.name)
def test_both_forms_of_a_mask_are_the_same(case):
    visible, mask = case.visible(), case.mask
    assert (visible is None) == (mask is None)
    if mask is not None:
        assert np.array_equal(
            np.broadcast_to(visible, (case.B, 1, case.T, case.S)).squeeze(), mask.to_array(case.T, case.S).squeeze()
        )
        assert not visible.all()


def test_operations():
    assert Case("full", 3, 5, D=7).operations(FORWARD) == 2 * 2 * 8 * 3 * 5 * 7
    assert Case("causal", 4, 4, D=7).operations(BOTH) == 6 * 2 * 8 * 10 * 7
    assert Case("padded", 4, 4, B=2, D=1, lengths=(1, 3)).operations(FORWARD) == 2 * 2 * 8 * (4 * 1 + 4 * 3)
    assert Case("window", 200, 200, D=1, H=1).keys_seen()[0].tolist() == [min(i, 128) + 1 for i in range(200)]
    assert (sum(LENGTHS) / len(LENGTHS), max(LENGTHS)) == (400, 1024)


def test_select():
    assert select(CASES) == list(CASES)
    assert [case.name for case in select(CASES, "causal*float64")] == ["causal-1024-float64"]
    assert [case.name for case in select(CASES, quick=True)] == sorted(QUICK, key=[case.name for case in CASES].index)
    assert [case.name for case in select(CASES, "tiny", "causal*float64")] == ["causal-1024-float64", "tiny-8-float32"]
    doubles = select(CASES, "1024", dtype="float64")
    assert {case.dtype for case in doubles} == {"float64"}
    assert len({case.name for case in doubles}) == len(doubles)


def test_inputs_are_the_same_every_time():
    first, second = (Case("grouped", 7, 5, K=2).inputs() for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first[:4], second[:4], strict=True))
    assert [x.shape for x in first[:4]] == [(1, 8, 7, 64), (1, 2, 5, 64), (1, 2, 5, 64), (1, 8, 7, 64)]


def test_a_step_s_operations():
    case = TrainCase(B=2, T=3, C=8, H=2, blocks=1, V=5)
    linears = 6 * (8 * 8 * (4 + 4 + 4) + 8 * 5)  # 6 rows, then d, dx and dw
    assert case.operations(bench_train.STEP) == 3 * 2 * linears + 6 * 2 * 4 * (2 * 2 * (1 + 2 + 3))


def test_a_step_is_pytorch_s():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    case = TrainCase(B=2, T=8, C=16, H=2, blocks=2, V=11, dtype="float64")
    start = case.inputs()
    own, other = bench_train.npattn_step(case, start, NumPyBackend()), bench_train.torch_step(case, start, torch, "cpu")
    losses = []
    for _ in range(3):  # every call goes on from what the last one has reached
        results = own()
        assert largest_difference(results, other(), dtype="float64", who="torch") < 1e-12
        losses.append(float(results[0]))
    assert losses[2] < losses[1] < losses[0]


def test_the_limit_of_a_step(monkeypatch):
    done = []
    matmul = np.matmul
    monkeypatch.setattr(bench_train, "prepare_products", lambda *_: lambda: ())
    case = TrainCase(B=2, T=3, C=8, H=2, blocks=2, V=5)
    products = bench_train.prepare_step_products(case, NumPyBackend())
    monkeypatch.setattr(np, "matmul", lambda a, b: (done.append(2 * a.size * b.shape[1]), matmul(a, b))[1])
    assert products() == ()
    assert sum(done) == case.operations(bench_train.STEP) - 2 * case.attention.operations(BOTH)


# Rivals ----------------------------------------------------------------------------------------------------------------------


def torch_rival():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return bench_rivals.Torch(torch, "cpu", torch.get_num_threads())


def jax_rival():
    return bench_rivals.Jax(pytest.importorskip("jax", reason="jax is not installed"))


@pytest.mark.parametrize("open_rival", [lambda: Naive(NumPyBackend()), torch_rival, jax_rival], ids=["naive", "torch", "jax"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_rivals_compute_the_same(open_rival, case):
    rival, inputs = open_rival(), case.inputs()
    kept = [x.copy() for x in inputs[:4]]
    for name in (FORWARD, BOTH):
        own, other = Npattn(NumPyBackend()).prepare(case, inputs, name)(), rival.prepare(case, inputs, name)()
        assert len(own) == len(other) == (1 if name == FORWARD else 4)
        assert [to_numpy(x).dtype.name for x in other] == len(own) * [case.dtype]
        assert largest_difference(own, other, dtype=case.dtype, who=rival.name) < bench_timing.TOLERANCES[case.dtype]
    assert all(np.array_equal(a, b) for a, b in zip(kept, inputs[:4], strict=True))


def test_half_precision():
    case = Case("causal", 16, 16, "float16")
    own = Npattn(NumPyBackend()).prepare(case, case.inputs(), BOTH)()
    assert {x.dtype.name for x in own} == {"float16"}
    assert Naive(NumPyBackend()).prepare(case, case.inputs(), BOTH) is None
    largest_difference(own, torch_rival().prepare(case, case.inputs(), BOTH)(), dtype="float16", who="torch")


def test_too_large_to_be_written_out():
    by_name = {case.name: case for case in CASES}
    assert not bench_rivals.writes_too_much(by_name["full-4096-float32"], BOTH)
    large = Case("full", 8192, 8192, H=8, K=8, D=1)
    assert Naive(NumPyBackend()).prepare(large, large.inputs(), FORWARD) is None


@pytest.mark.parametrize("name", [FORWARD, BOTH])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_how_much_the_naive_formula_writes_out(name, kind):
    case = Case(kind, 512, 512, H=1, K=1, D=1)
    peak = NumPyBackend().extra_memory(Naive(NumPyBackend()).prepare(case, case.inputs(), name))
    assert bench_rivals.MATRICES[name] - 1 < peak / case.matrix_bytes() < bench_rivals.MATRICES[name] + 0.1


# Measuring -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_slip_is_a_disagreement(dtype):
    x = np.linspace(-1, 1, 9, dtype=dtype)
    assert largest_difference([x, x], [x, x.copy()], dtype=dtype, who="") == 0
    slipped = x.copy()
    slipped[3] += 1e-4
    with pytest.raises(Disagreement, match=r"^other: dq differs from npattn's by 1\.0e-04"):
        largest_difference([x, x], [x, slipped], dtype=dtype, who="other")
    with pytest.raises(Disagreement, match="by nan"):
        largest_difference([x], [np.full_like(x, np.nan)], dtype=dtype, who="other")
    with pytest.raises(Disagreement, match="shape"):
        largest_difference([x], [x[:1]], dtype=dtype, who="other")


class Clock:
    """A time that only calls and pauses advance."""

    def __init__(self, monkeypatch):
        self.now = self.used = self.spinning = 0.0
        self.log, self.disturbed, self.lost = [], [], 0.0
        monkeypatch.setattr(bench_timing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(bench_timing.time, "process_time", lambda: self.used)
        monkeypatch.setattr(bench_timing.time, "sleep", self.sleep)
        monkeypatch.setattr(bench_timing, "stolen", lambda: self.lost)

    def advance(self, seconds):
        self.now += seconds

    def sleep(self, seconds):
        self.advance(seconds)
        self.used += min(seconds, self.spinning)
        self.spinning = max(self.spinning - seconds, 0.0)

    def call(self, name, seconds, spins=0.0):
        """A call, after which threads of its own spin for a while."""

        def run():
            self.log.append(name)
            self.disturbed.append(self.spinning)
            self.advance(seconds)
            self.spinning = spins
            return ()

        return run


def measure(calls, **options):
    ticks = []
    options = {"seconds": 1.5, "least": 5, "repeat": None, **options}
    return interleave(calls, synchronize=lambda: None, tick=ticks.append, **options), ticks


def test_interleaving(monkeypatch):
    clock = Clock(monkeypatch)
    takes = {"a": 0.1, "b": 0.2, "c": 0.3}
    samples, ticks = measure({name: clock.call(name, seconds, spins=0.1) for name, seconds in takes.items()}, repeat=4)
    assert samples == {name: pytest.approx([seconds] * 4) for name, seconds in takes.items()}
    rounds = ["".join(clock.log[n : n + 3]) for n in range(0, 15, 3)]
    assert rounds[0] == "abc"
    assert {"".join(sorted(names)) for names in rounds} == {"abc"}
    assert ticks == [0.25, 0.5, 0.75, 1]
    assert max(clock.disturbed) == pytest.approx(0)


def test_short_calls_are_repeated(monkeypatch):
    clock = Clock(monkeypatch)
    samples, _ = measure({"a": clock.call("a", 1.2e-4), "b": clock.call("b", 0.04)}, repeat=1)
    assert samples == {"a": pytest.approx([1.2e-4]), "b": pytest.approx([0.04])}
    assert "".join(clock.log) == 43 * "a" + "b" + 51 * "a" + 2 * "b"


@pytest.mark.parametrize(("seconds", "rounds"), [(0.05, 27), (0.8, 9), (2.5, 5), (1e-6, 100)])
def test_how_many_rounds(monkeypatch, seconds, rounds):
    clock = Clock(monkeypatch)
    samples, _ = measure({"a": clock.call("a", seconds)}, least=9)
    assert len(samples["a"]) == rounds


def test_a_sample_waits_for_threads_that_spin(monkeypatch):
    clock = Clock(monkeypatch)
    for spinning, waited in ((0.0, 0.005), (0.1, 0.105), (9.0, 0.3)):
        clock.spinning, started = spinning, clock.now
        bench_timing.settle()
        assert clock.now - started == pytest.approx(waited, abs=0.0051)


def test_nobody_always_comes_after_the_same_one(monkeypatch):
    clock = Clock(monkeypatch)
    measure({name: clock.call(name, 0.1) for name in "abcde"}, repeat=20)
    after = collections.Counter(itertools.pairwise(clock.log[5:]))
    assert min(after[pair] for pair in itertools.permutations("abcde", 2)) >= 2


def test_a_sample_that_the_host_disturbed_is_taken_again(monkeypatch):
    """Twice at most; then the one that lost least counts."""
    clock = Clock(monkeypatch)
    losses = iter([0.0, 0.02, 0.3, 0.0, 0.9, 0.4, 0.5])  # the first is that of the estimate

    def run():
        lost = next(losses)
        clock.lost += lost
        clock.advance(1 + lost)
        return ()

    samples, _ = measure({"a": run}, repeat=3)
    assert samples == {"a": pytest.approx([1.02, 1.0, 1.4])}
    assert next(losses, None) is None


def test_time_that_the_host_took(monkeypatch, tmp_path):
    def contents(text):
        (tmp_path / "stat").write_text(text, encoding="ascii")
        monkeypatch.setattr(bench_timing, "Path", lambda path: tmp_path / Path(path).name)
        return bench_timing.stolen()

    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert contents("cpu  1 2 3 4 5 6 7 80 9 10\ncpu0 1 2 3 4 5 6 7 8 9 10\n") == pytest.approx(80 * tick)
    assert contents("cpu  1 2 3\n") == 0
    (tmp_path / "stat").unlink()
    assert bench_timing.stolen() == 0


def test_waiting_for_the_device_is_timed(monkeypatch):
    clock = Clock(monkeypatch)
    samples = interleave(
        {"a": clock.call("a", 0.1)},
        synchronize=lambda: clock.advance(0.4),
        tick=lambda part: None,
        seconds=1,
        least=1,
        repeat=1,
    )
    assert samples == {"a": pytest.approx([0.5])}


def test_extra_memory():
    def call():
        work = np.zeros(1 << 20, dtype=np.uint8)
        return (work[: 1 << 10].copy(), np.zeros(1 << 18, dtype=np.uint8))

    assert NumPyBackend().extra_memory(call) == pytest.approx(1 << 20, rel=0.01)
    assert NumPyBackend().extra_memory(lambda: (np.zeros(1 << 20),)) < 1 << 12


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", [FORWARD, BOTH])
@pytest.mark.parametrize(
    "case", [*SMALL, Case("full", 600, 2100, H=1, K=1), *select(CASES, "padded")], ids=lambda case: case.name
)
def test_the_limit_does_all_products_of_the_pairs_that_the_mask_leaves(case, name, in_place, monkeypatch):
    done = []
    monkeypatch.setattr(bench_products, "multiplies_in_place", lambda: in_place)
    monkeypatch.setattr(bench_products, "BLOCKS", Limits(bytes=1))
    run = bench_products._run

    def recorded(xp, products, buffers, blocks):
        done.extend(products)
        run(xp, done, buffers, blocks)

    monkeypatch.setattr(bench_products, "_run", recorded)
    with bench.thread_count(1):
        call = bench_products.prepare_products(case, case.inputs(), name, NumPyBackend())
        call()
    operations = sum(2 * p.out.size * p.a.shape[-1] for p in done)
    assert operations == pytest.approx(case.operations(name), rel=0.15 if case.T < 20 else 0.01)
    assert all(p.out.dtype == case.dtype for p in done)


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jobs_of_the_limit(case, count):
    jobs = bench_products.cut_jobs(case, bench_products.ON_CPU, count)
    assert len(jobs) >= min(count, case.H)
    pairs = sum((j.heads.stop - j.heads.start) * (j.rows.stop - j.rows.start) * j.keys for j in jobs)
    assert 4 * case.D * pairs == pytest.approx(case.operations(FORWARD), rel=0.002 if case.T > 8 else 0)
    cells = {(j.entry, h, i) for j in jobs for h in range(j.heads.start, j.heads.stop) for i in range(j.rows.start, j.rows.stop)}
    assert len(cells) == case.B * case.H * case.T


def test_the_limit_on_several_threads(monkeypatch):
    """Both ways to do the products, in turn and side by side, end."""
    case = Case("full", 300, 40)
    for large in (0, 1 << 60):
        monkeypatch.setattr(bench_products, "LARGE", large)
        with bench.thread_count(2):
            assert bench_products.prepare_products(case, case.inputs(), BOTH, NumPyBackend())() == ()


# The report ------------------------------------------------------------------------------------------------------------------


def row(case, name=FORWARD, **changed):
    samples = {"npattn": [1.0, 2.0, 9.0], "naive": [1.0, 4.0, 3.0], "limit": [0.5, 0.5, 0.9]}
    return Row(case, name, samples, 3 << 20, {"naive": 1e-7})._replace(**changed)


def test_ratios_are_medians_of_ratios():
    found = row(Case("full", 8, 8))
    assert (found.ratio("naive"), found.seconds(), found.share) == (1.0, 2.0, 0.25)
    assert found.ratio("torch") is None
    assert bench_report.table_line(found).split()[1:] == ["forward", "2000", "<0.001", "25%", "1.00", "-", "-", "3.00"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (0.0004, "<0.001"),
        (0.0123, "0.012"),
        (0.5, "0.500"),
        (1.234, "1.23"),
        (12.34, "12.3"),
        (123.4, "123"),
        (12345.6, "12346"),
    ],
)
def test_figures(value, shown):
    assert bench_report.figure(value) == shown


def test_agreement_is_reported_by_dtype():
    rows = [row(Case("full", 8, 8, "float64"), differences={"naive": 1e-15, "torch": 3e-15}), row(Case("full", 8, 8))]
    assert bench_report.agreement_line(rows).endswith(": 1.0e-07 (float32), 3.0e-15 (float64).")
    assert bench_report.agreement_line([row(Case("full", 8, 8), differences={})]).startswith("There was nothing")


def test_a_busy_machine_is_said_to_be():
    found = bench_report.machine(2, 2, "blas", None, [])
    busy, quiet = (bench_report.machine_lines({**found, "load": load}) for load in (1.7, 0.1))
    assert (len(busy), len(quiet)) == (3, 2)
    assert "load 1.7" in busy[2]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "figures.json"
    bench_report.check_writable(path)
    assert not list(tmp_path.iterdir())
    bench_report.write_whole(path, b"first")
    bench_report.check_writable(path)
    bench_report.write_whole(path, b"second")

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        bench_report.write_whole(path, b"third")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("figures.json", b"second")]


def test_a_disk_that_fills_up_is_one_line(alone, monkeypatch, capsys, tmp_path):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench_report, "write_whole", full)
    assert main([*TINY, "--repeat", "1", "--json", str(tmp_path / "figures.json")]) == 2
    out, err = capsys.readouterr()
    assert "\ntiny-8-float32" in out
    assert err == "npattn bench: [Errno 28] No space left on device\n"


def test_the_bar_is_one_line_on_a_terminal():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        terminal = Terminal(stream)
        terminal.live, terminal.width = True, 60  # whatever it is here
        bar = Bar(terminal, 4)
        bar.clear()
        bar.show(0, "first")
        bar.show(2.5, "third " + 100 * "x")
        bar.clear()
        bar.clear()
    shown = everything(leader)
    assert "\n" not in shown
    first, third, cleared = shown.split("\r")[1:]
    assert first == f"[{24 * '.'}] 0/4             first\x1b[K"
    assert third.startswith(f"[{15 * '#'}{9 * '.'}] 2/4   0 s left  third xx")
    assert len(third) == 59 + len("\x1b[K")
    assert cleared == "\x1b[K"


def test_the_bar_is_nothing_elsewhere(capsys):
    bar = Bar(Terminal(sys.stdout), 4)
    bar.show(1, "first")
    bar.clear()
    assert not capsys.readouterr().out
