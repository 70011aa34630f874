"""The lesson: its figures against those of the documents it follows, its gradients against finite differences.

What is compared with here is written again in plain NumPy: nothing of npattn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "attention_by_hand.py"


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, cwd=cwd, env={**os.environ, **environment}, check=False, timeout=120)


class Shown(NamedTuple):
    """What a section returned and printed."""

    numbers: dict[str, Any]
    text: str


@pytest.fixture(scope="module")
def lesson():
    spec = importlib.util.spec_from_file_location("attention_by_hand", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shown(lesson) -> dict[str, Shown]:
    """Every section, run once."""
    found = {}
    for section in lesson.SECTIONS:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            numbers = section()
        found[section.__name__] = Shown(numbers, text.getvalue())
    return found


# The reference: plain NumPy ---------------------------------------------------------------------------------------------------


def softmax_rows(scores: Any) -> Any:
    p = np.exp(scores)
    return p / p.sum(axis=-1, keepdims=True)


def attend(q: Any, k: Any, v: Any, *, scale: float | None = None, visible: Any = True) -> Any:
    scores = np.where(visible, q @ np.swapaxes(k, -1, -2) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale), -np.inf)
    return softmax_rows(scores) @ v


def check_close(a: Any, b: Any) -> None:
    """Numbers of order 1, two ways."""
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def check_gradient(f: Any, x: Any, dx: Any, *, step: float = 1e-5, rtol: float = 1e-7) -> None:
    """Every element of ``dx`` is the central difference of the number ``f(x)``."""
    assert dx.shape == x.shape
    differences = np.zeros(x.shape)
    for at in np.ndindex(*x.shape):
        moved = np.zeros(x.shape)
        moved[at] = step
        differences[at] = (f(x + moved) - f(x - moved)) / (2 * step)
    np.testing.assert_allclose(dx, differences, rtol=rtol, atol=rtol * max(1.0, float(np.abs(differences).max())))


def test_the_check_of_gradients_sees_a_slip():
    x = np.array([0.3, -1.2])
    check_gradient(lambda y: np.sum(y**3), x, 3 * x**2)
    with pytest.raises(AssertionError):
        check_gradient(lambda y: np.sum(y**3), x, 3 * x**2 * (1 + 1e-5))


# Section by section -----------------------------------------------------------------------------------------------------------


def test_pipeline(shown):
    n = shown["pipeline"].numbers
    (w_q, w_k, w_v), x, dout, steps = n["w"], n["x"], n["dout"], n["steps"]
    assert [a.shape for a in (x, w_q, w_k, w_v)] == [(4, 8)] + [(8, 8)] * 3
    assert [a.shape for a in (steps.scores, steps.weights, n["out"])] == [(4, 4), (4, 4), (4, 8)]
    check_close(n["sums"], 1)
    assert steps.weights.min() > 0
    check_close(n["out"], attend(x @ w_q, x @ w_k, x @ w_v))
    assert n["forward"] < 1e-12
    assert n["backward"] < 1e-12

    def loss(x, w_q, w_k, w_v):
        return np.sum(dout * attend(x @ w_q, x @ w_k, x @ w_v))

    check_gradient(lambda y: loss(y, w_q, w_k, w_v), x, n["dx"])
    check_gradient(lambda w: loss(x, w, w_k, w_v), w_q, n["dw"][0])
    check_gradient(lambda w: loss(x, w_q, w, w_v), w_k, n["dw"][1])
    check_gradient(lambda w: loss(x, w_q, w_k, w), w_v, n["dw"][2])


def test_one_position(shown):
    n = shown["one_position"].numbers
    q, k, v, dout, i = (n[name] for name in ("q", "k", "v", "dout", "i"))
    assert sum(n["weights"]) == pytest.approx(1, rel=1e-14)
    check_close(n["out"], attend(q, k, v)[i])
    assert max(n[name] for name in ("row", "stacked", "alone", "summed")) < 1e-12

    def loss(q_i, k, v):
        return np.sum(dout[i] * attend(q_i[None], k, v)[0])

    check_gradient(lambda y: loss(y, k, v), q[i], n["dq"])
    check_gradient(lambda y: loss(q[i], y, v), k, n["dk"])
    check_gradient(lambda y: loss(q[i], k, y), v, n["dv"])


def test_three_faces(shown):
    n = shown["three_faces"].numbers
    for face, expected in zip(n["faces"], ([0.2, 0.9, 1.8], [0.9, 0.2, -0.7], [9.0, 2.0, 2.0]), strict=True):
        check_close(face, [expected])
    np.testing.assert_array_equal(n["plain"], n["x"])
    for w, dface, dw in zip(n["w"], n["cotangents"], n["dw"], strict=True):
        check_gradient(lambda m, dface=dface: np.sum(dface * (n["x"] @ m)), w, dw)
    check_gradient(
        lambda y: sum(np.sum(dface * (y @ w)) for w, dface in zip(n["w"], n["cotangents"], strict=True)), n["x"], n["dx"]
    )


def test_on_paper(shown):
    n, text = shown["on_paper"]
    assert n["weights"].round(3).tolist() == [0.881, 0.119]
    assert round(n["out"], 2) == 9.28  # the document rounds the weights first: 0.881 * 10 + 0.119 * 4 = 9.286
    assert round(float(n["weights"].round(3) @ [10, 4]), 2) == 9.29
    assert "= 0.8808" in text
    assert "= 9.285" in text
    assert "0.881 * 10 + 0.119 * 4 = 9.286" in " ".join(text.split())
    g, (q, k, v) = n["g"], (np.array([[2.0]]), np.array([[2.0], [1.0]]), np.array([[10.0], [4.0]]))
    check_gradient(lambda y: attend(y, k, v).item(), q, g.dq)
    check_gradient(lambda y: attend(q, y, v).item(), k, g.dk)
    check_gradient(lambda y: attend(q, k, y).item(), v, g.dv)
    check_gradient(lambda s: (softmax_rows(s) @ v).item(), np.array([[4.0, 2.0]]), g.dscores)
    assert n["nudged"] == pytest.approx(n["out"] + 0.01 * g.dq.item(), abs=1e-4)
    assert n["silent"] == pytest.approx(4 * n["weights"][1], rel=1e-14)


def test_why_sqrt(shown):
    n = shown["why_sqrt"].numbers
    widths = (4, 64, 512)
    for D, spread in zip(widths, (2.0, 8.0, 22.6), strict=True):
        assert n["spreads"]["plain", D] == pytest.approx(spread, rel=0.02)
        assert n["spreads"]["divided", D] == pytest.approx(1, rel=0.02)
    plain, divided = ([n["slopes"][way, D] for D in widths] for way in ("plain", "divided"))
    assert plain == sorted(plain, reverse=True)
    assert plain[-1] < plain[0] / 4
    assert min(divided) > 0.9 * max(divided)
    assert n["tops"]["plain", 512] > 0.9
    assert max(n["tops"]["divided", D] for D in widths) < 0.4

    spread_out, one_hot = n["weights"]
    assert spread_out.round(2).tolist() == [0.63, 0.23, 0.14]
    assert one_hot.round(4).tolist() == [0.9997, 0.0003, 0.0]
    for scores, jacobian in zip((n["scores"], 8 * n["scores"]), n["jacobians"], strict=True):
        for i in range(3):
            check_gradient(lambda s, i=i: softmax_rows(s)[i], scores, jacobian[i])
    assert n["sizes"] == pytest.approx([np.linalg.norm(j) for j in n["jacobians"]])
    assert n["sizes"][0] > 500 * n["sizes"][1]


def test_both_ways_to_the_size_of_the_jacobian(lesson):
    scores = np.array([2.0, 1.0, 0.5, -3.0])
    assert lesson.jacobian_size(softmax_rows(scores)) == pytest.approx(np.linalg.norm(lesson.softmax_jacobian(scores)))


def test_causal(shown):
    n, text = shown["causal"]
    table = [[1, 0, 0, 0], [0.3, 0.7, 0, 0], [0.1, 0.6, 0.3, 0], [0.05, 0.2, 0.45, 0.3]]
    check_close(n["weights"], table)
    future = np.triu(np.ones((4, 4), dtype=bool), 1)
    assert not n["weights"][future].any()
    assert n["unmasked"][future].min() > 0.3
    assert re.search(r"on +0\.05 +0\.20 +0\.45 +0\.30\n", text)

    q, k, v, dout, g = (n[name] for name in ("q", "k", "v", "at_sat", "g"))
    check_gradient(lambda y: np.sum(dout * attend(y, k, v, scale=1, visible=~future)), q, g.dq)
    check_gradient(lambda y: np.sum(dout * attend(q, y, v, scale=1, visible=~future)), k, g.dk)
    check_gradient(lambda y: np.sum(dout * attend(q, k, y, scale=1, visible=~future)), v, g.dv)
    assert not g.dk[3].any()
    assert not g.dv[3].any()
    assert np.abs(g.dk[:3]).min(axis=0).min() > 0
    assert n["future"] == 0
    assert n["moved"][:3].tolist() == [0, 0, 0]
    assert n["moved"][3] > 1e5


def test_cross(shown):
    n = shown["cross"].numbers
    decoder, encoder, (w_q, w_k, w_v), dout = n["decoder"], n["encoder"], n["w"], n["dout"]
    assert n["weights"].shape == (3, 5)
    assert n["out"].shape == (3, 8)
    check_close(n["out"], attend(decoder @ w_q, encoder @ w_k, encoder @ w_v))

    def loss(decoder, encoder):
        return np.sum(dout * attend(decoder @ w_q, encoder @ w_k, encoder @ w_v))

    check_gradient(lambda y: loss(y, encoder), decoder, n["d_decoder"])
    check_gradient(lambda y: loss(decoder, y), encoder, n["d_encoder"])


def concat_and_mix(x: Any, params: Any) -> Any:
    """Concat(head_1, ..., head_H) W_O."""
    _, H, _ = params.w_q.shape
    heads = [attend(x @ params.w_q[:, h], x @ params.w_k[:, h], x @ params.w_v[:, h]) for h in range(H)]
    return np.concatenate(heads, axis=-1) @ params.w_o.reshape(-1, params.w_o.shape[-1])


def test_heads(shown):
    n, text = shown["heads"]
    x, params, dout, grads = n["x"], n["params"], n["dout"], n["grads"]
    check_close(n["out"], concat_and_mix(x, params))
    assert n["forward"] < 1e-12
    assert n["backward"] < 1e-12
    for name in ("w_q", "w_k", "w_v", "w_o"):
        check_gradient(
            lambda w, name=name: np.sum(dout * concat_and_mix(x, params._replace(**{name: w}))),
            getattr(params, name),
            getattr(grads.dparams, name),
        )
    check_gradient(lambda y: np.sum(dout * concat_and_mix(y, params)), x, grads.dx_q + grads.dx_kv)
    T, C = 64, 512
    assert n["products"] == [4 * T * C * C + 2 * T * T * C] * 2
    assert f"{n['ratio']:.2f} times as long" in text  # how many is the machine's affair


def test_order(shown):
    n = shown["order"].numbers
    assert n["permuted"] < 1e-12
    assert n["back"] < 1e-12
    assert n["apart"] > 0.5
    check_gradient(lambda y: np.sum(n["dout"] * attend(y, y, y)), n["x"], n["dx"])


def test_cells(shown):
    n = shown["cells"].numbers
    np.testing.assert_array_equal(n["whole"], n["a"] @ n["b"])
    assert n["in_any_order"] == n["in_blocks"] == n["in_backward"] == 0  # whole numbers: no rounding
    check_gradient(lambda y: np.sum(n["dc"] * (y @ n["b"])), n["a"], n["da"], step=1.0)
    check_gradient(lambda y: np.sum(n["dc"] * (n["a"] @ y)), n["b"], n["db"], step=1.0)
    assert n["queries"] < 1e-12
    assert n["keys"] < 1e-12


def test_key_length(shown):
    n = shown["key_length"].numbers
    q, k, weights, cosine, j = n["q"], n["k"], n["weights"], n["cosine"], n["j"]
    check_close(weights, softmax_rows(k @ q[0] / np.sqrt(2)))
    np.testing.assert_allclose(cosine, [1, 1, np.sqrt(0.5), 0, -1, -1], atol=1e-15)
    assert weights[1] > weights[0]  # the same direction, longer
    assert weights[5] < weights[4]  # the opposite one, longer
    assert weights[j] > weights[1]  # long beats well aimed
    assert n["directions"][0] == n["directions"][1] > n["directions"][j]

    def weight(length):
        longer = k.copy()
        longer[j] *= length / n["length"][j]
        return softmax_rows(longer @ q[0] / np.sqrt(2))[j]

    check_gradient(lambda y: weight(y.item()), n["length"][j], np.asarray(n["slope"]))
    assert n["gain"] == pytest.approx(0.01 * n["slope"], rel=1e-2)


def test_gradients_of_the_faces(lesson, shown):
    n = shown["learning"].numbers
    table, start, grads = n["table"], n["start"], n["grads"]
    ids, answers, _ = lesson.sentences()
    x, it = table[ids], lesson.SENTENCE.index("it")

    def loss(faces):
        out = attend(x[:, it : it + 1] @ faces.w_q, x @ faces.w_k, x @ faces.w_v)[:, 0]
        return -np.mean(np.log(softmax_rows(out @ table.T)[np.arange(len(ids)), answers]))

    assert loss(start) == pytest.approx(n["losses"][0], rel=1e-12)
    for name in lesson.Faces._fields:
        w, dw = getattr(start, name), getattr(grads, name)
        size = np.abs(dw).max()
        check_gradient(lambda w, name=name, size=size: loss(start._replace(**{name: w})) / size, w, dw / size, rtol=1e-5)
    np.testing.assert_allclose(n["found"], n["foretold"], rtol=0.02)
    assert n["foretold"][2] < 100 * min(n["foretold"][:2])  # "nearly all of it comes through the values"


def test_learning(lesson, shown):
    n, text = shown["learning"]
    ids, answers, ours = lesson.sentences()
    assert ids.shape == (35, 7)
    assert not (ids == ours).all(axis=-1).any()
    assert {lesson.WORDS[i] for i in answers} == set(lesson.NOUNS)
    assert " ".join(lesson.WORDS[i] for i in ours[0]) == "The cat sat because it was tired"

    assert n["losses"] == sorted(n["losses"], reverse=True)
    assert n["losses"][0] > 2.5
    assert n["losses"][-1] < 0.1
    np.testing.assert_allclose(n["looks"][0], 1 / 7, atol=0.02)
    assert n["looks"][-1][1] > 0.95
    check_close(n["looks"].sum(axis=-1), 1)
    assert n["push"].argmax() == 1
    assert abs(n["push"].sum()) < 1e-12

    final, ends = n["final"], n["ends"]
    assert final["learned"][1] > 0.95
    assert final["as drawn"][1] < 0.3
    assert final["by hand"][1] <= 0.25 + 1e-12  # four words share a label
    np.testing.assert_allclose(final["by hand"][[0, 1, 2, 5]], final["by hand"][1], rtol=1e-9)
    assert ends["learned"] < 0.1
    assert min(ends["as drawn"], ends["by hand"]) > 1
    assert min(n["others"]["learned"]) > 0.75
    assert max(n["others"]["as drawn"]) < 0.25
    assert "ln 4 = 1.39" in text


def test_a_frozen_key_matrix_stays(lesson, shown):
    n = shown["learning"].numbers
    history = lesson.learn(n["start"], n["table"], frozen=True)
    assert all(np.array_equal(faces.w_k, n["start"].w_k) for faces in history)
    assert not np.allclose(history[-1].w_q, n["start"].w_q)
    assert not np.allclose(lesson.learn(n["start"], n["table"])[-1].w_k, n["start"].w_k)


def test_labels_by_hand(lesson, shown):
    n = shown["learning"].numbers
    labels = n["table"] @ lesson.labels_by_hand(n["table"], n["start"]).w_k
    of = dict(zip(lesson.WORDS, labels, strict=True))
    for word in ("cat", "sat", "was"):
        np.testing.assert_allclose(of[word], of["The"], atol=1e-12)
    assert of["because"][0] > of["tired"][0] > of["cat"][0] > of["it"][0]


def test_where_from(shown):
    weights = shown["where_from"].numbers["weights"]
    found = {name: (w.shape, int((w > 0).sum())) for name, w in weights.items()}
    assert found == {
        "self-attention": ((1, 4, 4), 16),
        "causal self-attention": ((1, 4, 4), 10),
        "cross-attention": ((1, 3, 5), 15),
        "multi-head": ((2, 4, 4), 32),
    }


# The script -------------------------------------------------------------------------------------------------------------------


def untimed(text: str) -> list[str]:
    return [line for line in text.splitlines() if "times as long" not in line]


def test_whole_lesson_where_the_terminal_cannot_show_much(lesson, shown):
    """In Windows' Japanese encoding; the same numbers as in this process."""
    done = run(str(SCRIPT), PYTHONIOENCODING="cp932")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii").replace("\r\n", "\n")
    assert max(len(line) for line in text.splitlines()) < 80
    lines, position = untimed(text), 0
    for number, section in enumerate(lesson.SECTIONS, start=1):
        position = lines.index(f"{number}. {lesson.title(section)}", position)
        printed = untimed(shown[section.__name__].text)
        begin = position + next(n for n, line in enumerate(lines[position:]) if lines[position + n :][: len(printed)] == printed)
        position = begin + len(printed)
    assert not "".join(lines[position:]).strip()


def test_commands_of_the_readme(lesson):
    commands = re.findall(r"^python (examples/\S+\.py)(.*)$", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"examples/\S+\.py", " ".join(path + rest for path, rest in commands)))
    assert named == {f"examples/{path.name}" for path in EXAMPLES.glob("*.py")}
    options = [rest.split("#")[0].split() for path, rest in commands if path.endswith(SCRIPT.name)]
    assert [] in options
    for arguments in filter(None, options):
        done = run(str(SCRIPT), *arguments)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout


def test_code_of_the_readme():
    (code,) = re.findall(r"^```python\n(.*?)^```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    done = run("-c", code, cwd=EXAMPLES.parent)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.rstrip().endswith(b"]]")


def test_one_section(lesson, capsys):
    lesson.main(["--section", "4"])
    text = capsys.readouterr().out
    assert lesson.title(lesson.on_paper) in text
    assert text.count("=" * 79) == 2


def test_list(lesson, capsys):
    lesson.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines] == [str(n) for n in range(1, 14)]


@pytest.mark.parametrize("arguments", [["--section", "0"], ["--section", "14"], ["--section", "four"], ["4"]])
def test_a_section_that_is_not_there(lesson, capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        lesson.main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_base_install_is_enough():
    optional = ["torch", "jax", "cupy", "matplotlib", "hypothesis", "pytest", "array_api_strict", "onnx"]
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); print([m for m in {optional} if m in sys.modules])"
    done = run("-c", code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"[]", b"")
