"""The examples that train: as a user runs them, and what they are made of."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: Any) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=900, encoding="utf-8")
    return done.returncode, done.stdout, done.stderr


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dates() -> Any:
    return load("train_translation")


@pytest.fixture(scope="module")
def language() -> Any:
    return load("train_language_model")


# Dates -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "day", "written"),
    [
        ("English, 7 March 1984", date(1984, 3, 7), "7 March 1984"),
        ("English, March 7, 1984", date(1984, 3, 7), "March 7, 1984"),
        ("English, the 7th of March, 1984", date(2011, 5, 11), "the 11th of May, 2011"),
        ("English, the 7th of March, 1984", date(2011, 5, 22), "the 22nd of May, 2011"),
        ("English, words", date(1984, 3, 7), "the seventh of March, 1984"),
        ("English, words", date(1900, 1, 12), "the twelfth of January, 1900"),
        ("English, words", date(1905, 1, 30), "the thirtieth of January, 1905"),
        ("English, words", date(2000, 1, 21), "the twenty-first of January, 2000"),
        ("English, words", date(2009, 1, 14), "the fourteenth of January, 2009"),
        ("English, words", date(2040, 1, 18), "the eighteenth of January, 2040"),
        ("English, words", date(2040, 1, 19), "the nineteenth of January, 2040"),
        ("German, 7. März 1984", date(1984, 3, 7), "7. März 1984"),
        ("German, 07.03.1984", date(1984, 3, 7), "07.03.1984"),
        ("German, words", date(1984, 3, 7), "der siebte März 1984"),
        ("German, words", date(2017, 12, 31), "der einunddreißigste Dezember 2017"),
        ("German, words", date(2001, 1, 1), "der erste Januar 2001"),
        ("German, words", date(1900, 1, 16), "der sechzehnte Januar 1900"),
        ("German, words", date(1930, 1, 20), "der zwanzigste Januar 1930"),
        ("German, words", date(1930, 1, 19), "der neunzehnte Januar 1930"),
        ("French, 7 mars 1984", date(1984, 3, 1), "1er mars 1984"),
        ("French, 07/03/1984", date(1984, 3, 7), "07/03/1984"),
        ("French, words", date(1984, 3, 7), "le sept mars 1984"),
        ("French, words", date(1900, 8, 1), "le premier août 1900"),
        ("French, words", date(1971, 8, 21), "le vingt et un août 1971"),
        ("French, words", date(1981, 8, 17), "le dix-sept août 1981"),
        ("French, words", date(1981, 8, 30), "le trente août 1981"),
        ("French, words", date(1981, 8, 22), "le vingt-deux août 1981"),
        ("Japanese, 1984年3月7日", date(1984, 3, 7), "1984年3月7日"),
        ("Japanese, eras", date(1984, 3, 7), "昭和59年3月7日"),
        ("Japanese, eras", date(1989, 1, 7), "昭和64年1月7日"),
        ("Japanese, eras", date(1989, 1, 8), "平成元年1月8日"),
        ("Japanese, eras", date(1912, 7, 29), "明治45年7月29日"),
        ("Japanese, eras", date(2019, 5, 1), "令和元年5月1日"),
    ],
)
def test_how_dates_are_written(dates, form, day, written):
    assert dates.FORMS[form](day) == written


def test_no_form_writes_two_dates_alike(dates):
    longest = 0
    for form in dates.FORMS.values():
        written = {form(day) for day in dates.DAYS}
        assert len(written) == len(dates.DAYS)
        longest = max(longest, *map(len, written))
    assert longest == dates.CONTEXT
    assert sorted(name for group in dates.GROUPS for name in group) == sorted(dates.FORMS)


def test_what_is_held_out_is_in_no_batch(dates):
    data = dates.make_data()
    assert not set(data.train) & set(data.held_out)
    assert sorted([*data.train, *data.held_out]) == dates.DAYS
    trained = {day.isoformat() for day in data.train}
    for step in range(5):
        batch = dates.make_batch(data, dates.Sizes(characters=600), 0, step)
        assert {data.decode(row) for row in batch.targets.tolist()} <= trained
        np.testing.assert_array_equal(batch.target[:, 1:], batch.targets[:, :-1])
        assert (batch.target[:, 0] == dates.START).all()
        assert (batch.targets[:, -1] == dates.END).all()
        assert ((batch.source != dates.PAD).sum(axis=1) == batch.lengths).all()


def test_accuracy_counts_whole_dates(dates, monkeypatch):
    data = dates.make_data()
    right = {form(day): day.isoformat() for form in dates.FORMS.values() for day in data.held_out[:4]}

    def translate(_params, _data, texts):
        return [right[text] if "/" in text else right[text][:-1] + "x" for text in texts]

    monkeypatch.setattr(dates, "translate", translate)
    found = dates.accuracies(None, data, dates.Sizes(measured=4))
    assert {name for name, share in found.items() if share == 1} == {"French, 07/03/1984", "Japanese, 1984/03/07"}
    assert set(found.values()) == {0.0, 1.0}


def test_translation_and_its_map_have_the_right_shape(dates):
    data = dates.make_data()
    sizes = {"vocabulary": data.vocabulary, "blocks": 1, "width": 8, "heads": 2, "context": dates.CONTEXT}
    params = dates.EncoderDecoderParams.init(np.random.default_rng(0), **sizes, config=dates.CONFIG)
    texts = ["7 March 1984", "le vingt-sept septembre 1984"]
    both = dates.translate(params, data, texts)
    assert both == [dates.translate(params, data, [text])[0] for text in texts]  # padding changes nothing
    weights, written = dates.cross_attention(params, data, texts[0])
    assert weights.shape == (len(written), len(texts[0]))
    np.testing.assert_allclose(weights.sum(axis=1), 1)


@pytest.mark.slow
def test_translation_quick(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "map.png"
    status, text, errors = run("train_translation.py", "--quick", "--plot", path)
    assert (status, errors) == (0, "")
    losses = [float(x) for x in re.findall(r"step +\d+/\d+ +loss ([\d.]+)", text)]
    assert losses[-1] < 0.3 * losses[0]
    assert len(re.findall(r"^ +[\d.]+% ", text, re.MULTILINE)) == 5
    assert text.count(" -> ") == 4
    assert path.read_bytes().startswith(b"\x89PNG")


# The language model ----------------------------------------------------------------------------------------------------------


def test_its_loss_knows_no_dropout_and_its_words_are_of_the_alphabet(language):
    text = language.read_text()
    sizes = language.Sizes(width=8, heads=2, blocks=1, context=16, batch=2, steps=2)
    params = language.new_params(np.random.default_rng(0), text, sizes)
    assert language.held_out_loss(params, text, 16) == language.held_out_loss(params, text, 16)
    options = {"start": "Alice ", "length": 9, "context": 16, "temperature": 0.5}
    written = language.write(params, text, np.random.default_rng(1), **options)
    assert written.startswith("Alice ")
    assert len(written) == 15
    assert written == language.write(params, text, np.random.default_rng(1), **options)


@pytest.mark.slow
def test_language_model_quick(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "loss.png"
    status, text, errors = run("train_language_model.py", "--quick", "--plot", path)
    assert (status, errors) == (0, "")
    measured = [float(x) for x in re.findall(r"after +\d+ steps +([\d.]+)", text)]
    assert len(measured) == 5
    assert measured == sorted(measured, reverse=True)
    assert measured[-1] < 0.6 * measured[0]
    assert text.count("What it writes after") == 2
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_loss_curve(language, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "loss.svg"
    language.draw_losses([3.0, 2.0, 1.0], [language.Measured(0, 3.5), language.Measured(3, 2.5)], path)
    drawn = path.read_text(encoding="utf-8")
    assert {"batches", "held-out text", "step"} <= set(re.findall(r"<!-- (.*?) -->", drawn))


def test_a_file_that_cannot_be_used(tmp_path, language, capsys):
    path = tmp_path / "text.txt"
    path.write_text("short", encoding="utf-8")
    assert language.main(["--file", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("train_language_model: ")
    assert "too short" in printed.err
    assert not printed.out


def test_own_text_in_a_few_steps(tmp_path, language, capsys, monkeypatch):
    monkeypatch.setattr(language, "SAMPLE", 10)
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog.\n" * 60, encoding="utf-8")
    assert language.main(["--quick", "--steps", "2", "--file", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "Trained for 2 steps" in printed
    assert "step    2/2" in printed


@pytest.mark.parametrize("name", ["train_language_model", "train_translation"])
def test_arguments_that_cannot_be_used(name, capsys):
    with pytest.raises(SystemExit, match="2"):
        load(name).main(["--steps", "0"])
    assert "--steps: must be at least 1" in capsys.readouterr().err
