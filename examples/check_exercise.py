"""Check an exercise: `backward` of a file beside npattn's gradients, step by step.

    python examples/check_exercise.py examples/exercise_backward.py

The exit status is 0 once every line is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from npattn import attention_forward, attention_steps, attention_steps_backward
from npattn.testing import compare

ASKED = ("dv", "dweights", "dscores", "dq", "dk")
HINTS = {
    "dv": "out[i] = sum over j of weights[i, j] v[j]: v[j] reaches every out[i], with that weight. Which product is it?",
    "dweights": "weights[i, j] reaches out[i] alone, times v[j]: what dout[i] says of it is a dot product.",
    "dscores": "softmax of a row: weights * (dweights - the row's sum of weights * dweights). Does that sum keep its axis?",
    "dq": "scores[i, j] = scale * q[i]·k[j]: q[i] meets every k[j]. Is the scale there, once?",
    "dk": "scores[i, j] = scale * q[i]·k[j]: k[j] meets every q[i]. Which of the two is to be transposed?",
}


def main(arguments: list[str] | None = None) -> int:
    """Check a file; the exit status."""
    parser = argparse.ArgumentParser(description="Check an exercise: backward beside npattn's gradients, step by step.")
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_name("exercise_backward.py"))
    path = parser.parse_args(arguments).file
    try:
        exercise = load(path)
        q, k, v, dout = problem()
        given = exercise.backward(dout, q, k, v, exercise.forward(q, k, v))
    except Exception as error:
        print(f"{path} could not be run:\n{''.join(traceback.format_exception_only(error)).strip()}{where(error, path)}")
        return 1
    return judge({name: x for name, x in given.items() if x is not None})


def load(path: Path) -> Any:
    """The file as a module."""
    spec = importlib.util.spec_from_file_location("exercise", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def where(error: Exception, path: Path) -> str:
    """The line of the file in which it happened."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()]
    lines += [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"\nin line {lines[-1].lineno}: {lines[-1].line}" if lines else ""


def problem() -> Any:
    """q, k, v and dout of lengths that all differ, so that no transposition hides."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape) for shape in ((3, 2), (5, 2), (5, 7), (3, 7)))


def judge(given: dict[str, Any]) -> int:
    """Print how the lines compare; the exit status."""
    q, k, v, dout = problem()
    saved = attention_forward(q, k, v)[1]
    ours = attention_steps_backward(dout, saved)._asdict()
    found = compare(given, {name: ours[name] for name in ASKED})
    print(found)
    left = [name for name in ASKED if name not in given]
    if found.first_wrong is not None:
        print(f"\nLook at {found.first_wrong} first. {HINTS[found.first_wrong]}")
    elif left:
        print(f"\n{'Right so far' if given else 'Nothing is filled in yet'}. Next: {left[0]}. {HINTS[left[0]]}")
    else:
        print(f"\nAll right. The weights they went through:\n{attention_steps(saved).weights.round(3)}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
