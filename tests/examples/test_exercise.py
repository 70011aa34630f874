"""The exercise and its checker: from blank to right, with the first wrong line named on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples import check_exercise

EXERCISE = Path(check_exercise.__file__).with_name("exercise_backward.py")
SOLUTION = {
    "dv": "weights.T @ dout",
    "dweights": "dout @ v.T",
    "dscores": "weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))",
    "dq": "scale * (dscores @ k)",
    "dk": "scale * (dscores.T @ q)",
}


@pytest.fixture
def check(tmp_path, capsys):
    """The checker on the exercise with these lines filled in."""

    def run(**lines):
        text = EXERCISE.read_text(encoding="utf-8")
        for name, line in lines.items():
            assert text.count(f"    {name} = None\n") == 1
            text = text.replace(f"    {name} = None\n", f"    {name} = {line}\n")
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        return check_exercise.main([str(path)]), capsys.readouterr().out

    return run


def test_blank(capsys):
    done = subprocess.run([sys.executable, check_exercise.__file__], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert not done.stderr
    assert "Nothing is filled in yet. Next: dv. out[i] = sum over j" in done.stdout


def test_filled_in_line_by_line(check):
    lines = {}
    for n, (name, line) in enumerate(SOLUTION.items()):
        lines[name] = line
        status, out = check(**lines)
        rows = {row.split()[0]: row.split()[1] for row in out.splitlines()[1:6]}
        assert all(rows[done] in ("exact", "close") for done in lines)
        if n < 4:
            assert status == 1
            assert f"Right so far. Next: {list(SOLUTION)[n + 1]}." in out
    assert status == 0
    assert "All right." in out


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("dv", "2 * dout", "its shape is (3, 7), not (5, 7)"),
        ("dweights", "-dout @ v.T", "(its sign is wrong)"),
        ("dscores", "weights * (dweights - (weights * dweights).sum())", "   <- the first that is wrong"),
        ("dscores", "weights * dweights", "   <- the first that is wrong"),
        ("dq", "dscores @ k", "(all of it is 1.41421 times what it should be)"),
        ("dk", "scale * (q.T @ dscores)", "(it is transposed)"),
    ],
)
def test_the_first_wrong_line_is_named(name, wrong, message, check):
    status, out = check(**{**SOLUTION, name: wrong})
    assert status == 1
    assert message in next(row for row in out.splitlines() if row.startswith(name))
    assert f"Look at {name} first. {check_exercise.HINTS[name]}" in out


def test_a_line_that_does_not_run(check):
    status, out = check(dv="weights @ dout")
    assert status == 1
    assert "could not be run:\nValueError: matmul" in out
    assert out.endswith(": dv = weights @ dout\n")


def test_files_that_are_none(tmp_path, capsys):
    assert check_exercise.main([str(tmp_path / "nothing.py")]) == 1
    assert "FileNotFoundError" in capsys.readouterr().out
    (tmp_path / "text.txt").touch()
    assert check_exercise.main([str(tmp_path / "text.txt")]) == 1
    assert "text.txt is no Python file" in capsys.readouterr().out


def test_every_step_has_a_hint():
    assert tuple(check_exercise.HINTS) == check_exercise.ASKED == tuple(SOLUTION)
