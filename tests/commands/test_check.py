"""The check of a machine, as a user runs it: what it prints, and its exit status."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

from npattn.__main__ import main
from npattn._commands import check
from npattn._commands.terminal import Terminal
from npattn.testing import LAWS, LawBroken, npattn_candidate
from npattn.testing.vectors import torch_gradients
from tests.attention.test_vectors import TORCH
from tests.commands.terminals import everything


def test_the_command():
    command = [sys.executable, "-W", "error", "-m", "npattn", "check", "--examples", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.search(r"npattn \d+\.\d+\.\d+\S*, numpy " + re.escape(np.__version__), done.stdout)
    assert "numpy, float64, seed 0" in lines
    table = lines[lines.index(check.HEAD) + 1 : -2]
    assert lines[-1] == "Everything holds."
    assert [row.split()[-1] for row in table] == ["ok"] * len(table)
    laws = {row.split()[0] for row in table}
    assert laws >= set(LAWS) - {"is_as_precise_as_the_naive_formula"}
    assert re.match(r"PyTorch's values and gradients +12 +\d\.\de-1\d +0\.\d+ +ok$", table[0])
    assert re.match(r"multi-head attention and its gradients +1 +\d\.\de-\d\d +\S+ +ok$", table[-1])


def quick(monkeypatch, *names):
    """Only these lines of the table."""
    every = check.parts
    monkeypatch.setattr(check, "parts", lambda *a: [part for part in every(*a) if part.what in names])


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("strict", "float64"), ("torch", "bfloat16"), ("numpy", "float16"), pytest.param("jax", "float32", marks=pytest.mark.slow)],
)
def test_other_libraries_and_dtypes(backend, dtype, monkeypatch, capsys):
    if reason := missing(backend):
        pytest.skip(reason)
    quick(monkeypatch, "is_what_the_loops_say", "dtype_and_device_are_kept", "multi-head attention and its gradients")
    assert main(["check", "--backend", backend, "--dtype", dtype, "--examples", "1"]) == 0
    out, err = capsys.readouterr()
    assert f"{backend}, {dtype}, seed 0" in out
    assert not err
    assert ("multi-head" in out) == (dtype == "float64")


def missing(backend):
    try:
        check.open_library(backend)
    except check.Unavailable as reason:
        return str(reason)
    return ""


def test_a_fault_fails(monkeypatch, capsys):
    """Numbers of others, laws and multi-head attention, each with its own message; status 1."""
    right = npattn_candidate()

    def wrong(problem, backward):
        run = right.run(problem, backward)
        return run._replace(results=run.results._replace(out=run.results.out * (1 + 1e-9)))

    monkeypatch.setattr(check, "npattn_candidate", lambda *a, **o: right._replace(run=wrong))
    monkeypatch.setattr(check, "check_multi_head", lambda *a, **o: 1 / 0)
    quick(
        monkeypatch,
        "PyTorch's values and gradients",
        "is_what_the_loops_say",
        "multi-head attention and its gradients",
        "nothing_is_shared",
    )
    assert main(["check", "--examples", "15"]) == 1
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.endswith(("FAILED", "  ok"))]
    assert [line.split()[-1] for line in table] == ["FAILED", "ok", "FAILED", "FAILED"]
    assert re.search(r"^sdpa_\S+: out differs from PyTorch's by \S+, allowed are 1e-12$", out, re.MULTILINE)
    assert "breaks is_what_the_loops_say: out = softmax(" in out
    assert "problem: attention_problem(" in out
    assert "ZeroDivisionError: division by zero" in out
    assert out.endswith("3 lines fail: see above for what was expected and what came out.\n")


def test_one_line_fails():
    assert check._summary(1).startswith("1 line fails:")


def test_an_interrupt(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "parts", lambda *a: [check.Part("something", 3, interrupted)])
    assert main(["check"]) == 130


@pytest.mark.parametrize(
    ("arguments", "hidden", "message"),
    [
        (["--backend", "torch"], "torch", "torch is not installed"),
        (["--backend", "cupy"], "cupy", "cupy is not installed"),
        (["--dtype", "bfloat16"], None, "numpy has no bfloat16"),
        ([], "hypothesis", 'hypothesis is not installed: pip install "npattn[test]"'),
    ],
)
def test_what_is_missing_gets_one_line(arguments, hidden, message, monkeypatch, capsys):
    if hidden:
        monkeypatch.setitem(sys.modules, hidden, None)
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"npattn check: {message}\n")


@pytest.mark.parametrize(
    "arguments", [["--backend", "tensorflow"], ["--dtype", "int8"], ["--examples", "0"], ["--examples", "x"]]
)
def test_arguments_that_cannot_be_used(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", *arguments])
    assert caught.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_progress_on_a_terminal(monkeypatch):
    """A bar on the terminal of stderr, and no trace of it at the end."""
    leader, follower = pty.openpty()
    monkeypatch.setattr(sys, "stderr", os.fdopen(follower, "w"))
    monkeypatch.setenv("TERM", "xterm")
    shown = io.StringIO()
    part = check.Part("something", 4, lambda worst, tick: [tick() for _ in range(9)] and 4)
    assert check.check_all([part], Terminal(shown)) == []
    sys.stderr.close()
    written = everything(leader)
    assert "0/4" in written
    assert "4/4" in written
    assert "5/4" not in written
    assert written.endswith("\r\x1b[K")
    assert shown.getvalue().splitlines()[-1].startswith("something")


def test_the_seed_draws_other_problems(monkeypatch):
    seen: list[list[str]] = []

    def keys_have_no_order(candidate, problem):
        seen[-1].append(repr(problem))

    monkeypatch.setitem(LAWS, "keys_have_no_order", keys_have_no_order)
    for seed in (0, 1, 0):
        seen.append([])
        (part,) = [p for p in check.parts(check.open_library("numpy"), "float64", 6, seed) if p.what == "keys_have_no_order"]
        part.run(check.Worst(), lambda: None)
    assert seen[0] == seen[2] != seen[1]


def test_the_numbers_in_the_package_are_those_of_the_tests():
    packed = list(torch_gradients(check.DATA))
    assert len(packed) == 12
    for vector in packed:
        for name, x in vector.inputs.items():
            np.testing.assert_array_equal(x, TORCH[vector.name].inputs[name])
        for name, x in vector.expected.items():
            np.testing.assert_array_equal(x, TORCH[vector.name].expected[name])


def test_broken_laws_are_assertion_errors():
    assert check._message(LawBroken("a law")) == "a law"
