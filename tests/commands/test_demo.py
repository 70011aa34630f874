"""The demo as a user runs it: a process, its output and its exit status."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from npattn._commands import demo
from npattn._commands.demo import loss_and_gradient
from npattn._commands.terminal import Progress, Terminal
from npattn.texts import read_text
from tests.commands.terminals import everything

COMMAND = [sys.executable, "-m", "npattn", "demo"]
PANGRAM = "The quick brown fox jumps over the lazy dog. "


def run(*arguments, **environment):
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, env={**os.environ, **environment}, timeout=600, check=False
    )


def figure(text, label):
    return float(re.search(rf"{label}.*?([0-9.]+)$", text, re.MULTILINE)[1])


def test_demo_learns_and_shows_it():
    done = run("--steps", "60", PYTHONIOENCODING="utf-8")
    text = done.stdout.decode("utf-8")
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr
    differences = [float(x) for x in re.findall(r"^   [\w.]+ +-?[0-9.]+ +-?[0-9.]+ +([0-9.e+-]+)$", text, re.MULTILINE)]
    assert len(differences) == 11
    assert max(differences) < 1e-8
    before, after = figure(text, "before training"), figure(text, "this model after 60 steps")
    assert after < figure(text, "entropy of single characters") < before
    assert re.search(r"step +60/60 +loss 2\.\d+ +[0-9,]+ tokens/s +0 s left", text)
    assert "\r" not in text
    assert "█" in text


def test_the_gradient_report_can_fail(monkeypatch):
    """A backward with a slip of one in a thousand stands out in the table."""

    def slipped(params, batch):
        loss, grads = loss_and_gradient(params, batch)
        return loss, grads._replace(w_out=1.001 * grads.w_out)

    monkeypatch.setattr(demo, "loss_and_gradient", slipped)
    rng, text = np.random.default_rng(0), read_text()
    params = demo.new_params(rng, text)
    off = {line.split()[0]: float(line.split()[-1]) for line in demo.gradient_report(params, text, rng)[1:]}
    assert off["w_out"] > 1e-6 > 100 * max(value for name, value in off.items() if name != "w_out")


def test_ascii_where_the_terminal_cannot_show_more(tmp_path):
    path = tmp_path / "umlauts.txt"
    path.write_text(40 * "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. ", encoding="utf-8")
    done = run("--steps", "2", "--file", str(path), PYTHONIOENCODING="cp932")
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode("cp932")
    assert "█" not in text
    assert "##" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "too short: 0 characters"),
        (b"short", "too short: 5 characters"),
        (b"\xff\xfe\x00\x01" * 1000, "not UTF-8 text"),
        (b"abc\0" * 1000, "zero bytes"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    done = run("--file", str(path))
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 2
    assert len(lines) == 1
    assert lines[0].startswith("npattn demo: ")
    assert message in lines[0]
    assert not done.stdout


def test_a_directory_is_no_file(tmp_path):
    done = run("--file", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.decode().splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "many"], ["--unknown"]])
def test_arguments_that_cannot_be_used(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert b"error: " in done.stderr


def test_own_text_of_the_least_size(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text((PANGRAM * 30)[: demo.LEAST], encoding="utf-8-sig", newline="\r\n")
    done = run("--file", str(path), "--steps", "3")
    assert done.returncode == 0, done.stderr.decode()


def test_interrupt_is_clean():
    """Ctrl-C during training ends it, shows what has been reached and gives status 130."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([*COMMAND, "--steps", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    while b"step " not in process.stdout.readline():  # it trains
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert not err
    assert re.search(rb"Interrupted after \d+ of 200 steps", out)


def test_a_reader_that_leaves(tmp_path):
    process = subprocess.Popen([*COMMAND, "--steps", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)


def test_progress_is_one_line_on_a_terminal():
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w", encoding="utf-8") as stream:
        terminal = Terminal(stream)
        terminal.live = True  # whatever TERM says here
        progress = Progress(terminal, 50)
        for step in range(50):
            progress.update(3.0 - step / 50)
        progress.close()
    text = everything(leader)
    assert "step   50/50" in text
    assert text.count("\n") == 1
    assert text.count("\r") >= 2


def test_a_flat_sparkline_and_an_empty_progress(capsys):
    terminal = Terminal(sys.stdout)
    assert len(set(terminal.sparkline([1.0, 1.0], 24))) == 1
    Progress(terminal, 1).close()
    assert not capsys.readouterr().out
