"""The command that makes a page, as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn import Explorer, tree_map
from npattn.__main__ import main
from npattn._commands.word_model import (
    NO_QUESTION,
    WORDS,
    answer_backward,
    answer_forward,
    dout_of,
    learn,
    random_start,
    sentences,
)
from npattn.testing.gradients import check_backward
from tests.browser import open_browser
from tests.pages import Page


class Done(NamedTuple):
    """What a command left: its exit status and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """The command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: Done(main(["explore", *arguments]), *capsys.readouterr())


def process(*arguments: str, cwd: Path, **environment: str) -> Any:
    """The command in a process of its own."""
    command = [sys.executable, "-W", "error", "-m", "npattn", "explore", *arguments]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", cwd=cwd, env=environment, timeout=60, check=False
    )


def read(path: Path) -> Page:
    return Page(Explorer(path.read_text("ascii"), ""))


def weights_of(page: Page, layer: Any, i: int, count: int) -> list[float]:
    return [float(page.number(layer, "weights", 0, i, j)) for j in range(count)]


def test_the_sentence_of_the_lesson(tmp_path):
    done = process("The cat sat because it was tired", "-o", "page.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"The word model .* after 40 steps its loss is 0\.0\d\d, that of a guess among 4 is 1\.386\.", lines[0])
    assert re.fullmatch(r'Here "it" reads "cat" most, with weight 0\.9\d\d\. The answer .* is "cat"\.', lines[1])
    assert re.fullmatch(r"Wrote page\.html, \d+ kB: open it in a browser\.", lines[2])
    page = read(tmp_path / "page.html")
    assert page.data["tokens"] == [[["The", "cat", "sat", "because", "it", "was", "tired"]] * 2]
    assert [(c["name"], c["values"]) for c in page.data["choices"]] == [
        ("mask", ["none", "causal_mask()"]),
        ("scale", ["1/√D", "1"]),
        ("softcap", ["none", "2"]),
    ]
    assert len(page.data["runs"]) == 8
    assert page.data["start"] == [4, 1]

    table, start = random_start(0)
    faces = learn(start, table)[-1]
    _, _, ours = sentences()
    _, saved = answer_forward(faces, table, ours, ours[:, 1])
    expected = saved.attention.q[0, 0, 0] @ saved.attention.k[0, 0].T / 2
    expected = np.exp(expected) / np.exp(expected).sum()
    (layer,) = page.run(0, 0, 0)
    np.testing.assert_allclose(weights_of(page, layer, 4, 7), expected, rtol=1e-3)
    (layer,) = page.run(1, 0, 0)
    assert weights_of(page, layer, 4, 7)[5:] == [0, 0]
    assert page.explain(layer, "dbiased", 0, 4, 6).endswith("a pair that is hidden has no influence = 0")
    assert page.number(layer, "dout", 0, 3, 0) == "0"  # only "it" has a loss


def test_without_arguments(run, tmp_path):
    done = run()
    assert done.returncode == 0
    assert read(tmp_path / "attention.html").data["tokens"][0][0] == ["The", "cat", "sat", "because", "it", "was", "tired"]


def test_words_that_are_new_and_untidy(run, tmp_path):
    done = run('"the" DOG ran; It  said <b>"no"</b>!', "-o", "page.html", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert 'New to it, and so with random vectors: said, <b>"no"</b>.' in done.stdout
    assert 'The answer whose loss is sent back is "dog".' in done.stdout
    page = read(tmp_path / "page.html")
    assert page.data["tokens"][0][0] == ['"the"', "DOG", "ran;", "It", "said", '<b>"no"</b>!']
    assert "dq" in page.data["steps"]


@pytest.mark.parametrize("text", ["Hello world", "it was the cat", "The cat ran", "cat"])
def test_without_a_question_there_is_no_gradient(run, tmp_path, text):
    done = run(text, "-o", "page.html")
    assert done.returncode == 0, done.stderr
    assert 'Nothing is asked here: it takes an "it" after one of cat, dog, bird, fox.' in done.stdout
    assert "dout" not in read(tmp_path / "page.html").data["steps"]


def test_before_any_training(run, tmp_path):
    done = run("--steps", "0", "-o", "page.html")
    assert "after 0 steps its loss is 2.6" in done.stdout
    page = read(tmp_path / "page.html")
    np.testing.assert_allclose(weights_of(page, page.run(0, 0, 0)[0], 4, 7), 1 / 7, atol=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "-o", "page.html"], "there are no words in the text"),
        (["a " * 65, "-o", "page.html"], "the text has 65 words, at most 64 fit on a page"),
        (["cat", "-o", "nowhere/page.html"], "cannot write nowhere/page.html: No such file or directory"),
        (["cat", "-o", "."], "cannot write .: Is a directory"),
        (["cat", "--steps", "-1"], "--steps and --seed must not be negative"),
        (["cat", "--seed", "-1"], "--steps and --seed must not be negative"),
    ],
)
def test_what_cannot_be_done(run, tmp_path, arguments, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"npattn explore: {message}\n"
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_unknown(tmp_path):
    done = process("--steps", "many", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_64_words_fit(run, tmp_path):
    assert run("The cat ran because it " + "was " * 59, "-o", "page.html").returncode == 0
    assert len(read(tmp_path / "page.html").data["tokens"][0][0]) == 64


def test_a_terminal_without_the_letters(tmp_path):
    done = process("Katze 猫 it", "-o", "page.html", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "New to it, and so with random vectors: katze, ?." in done.stdout
    assert read(tmp_path / "page.html").data["tokens"][0][0][1] == "猫"


def test_gradients_of_all_words_asking():
    """What the page shows of backward: the loss of one word among many that ask."""
    table, faces = random_start(1)
    ids = np.array([[WORDS.index(word) for word in ("The", "fox", "ran", "it")]])
    answers = np.array([[NO_QUESTION] * 3 + [WORDS.index("fox")]])

    def forward(faces: Any) -> Any:
        return answer_forward(faces, table, ids, answers, asking=slice(None))

    def backward(dloss: Any, saved: Any) -> Any:
        return (tree_map(lambda g: dloss * g, answer_backward(saved)),)

    check_backward(forward, backward, [faces])
    _, saved = forward(faces)
    assert not dout_of(saved)[0, 0, :3].any()
    assert dout_of(saved)[0, 0, 3].any()


@pytest.mark.slow
def test_the_page_works_in_a_browser(run, tmp_path):
    assert run("-o", "page.html").returncode == 0
    page = read(tmp_path / "page.html")
    with open_browser() as browser:
        browser.get((tmp_path / "page.html").as_uri())
        browser.implicitly_wait(10)
        browser.find_element("css selector", "#matrix td.chosen")
        assert browser.find_element("id", "pair").text.replace("\n", " ").startswith("it reads cat")
        for masked in (0, 1):
            browser.find_element("id", f"choice-0-{masked}").click()
            text = browser.find_element("id", "explanation").get_property("textContent")
            assert text == page.explain(page.run(masked, 0, 0)[0], "weights", 0, 4, 1)
        assert browser.get_log("browser") == []
