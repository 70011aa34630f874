"""Training that was interrupted and taken up again ends in the same bits as training in one go."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn import checkpoint
from npattn._arrays.trees import tree_items

ROOT = Path(__file__).parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module("train_language_model")
    small = module.Sizes(width=16, heads=2, blocks=1, context=16, batch=4, steps=6, dropout=0.1, every=2)
    monkeypatch.setattr(module, "QUICK", small)
    monkeypatch.setattr(module, "SAMPLE", 8)
    monkeypatch.setattr(module, "held_out_loss", lambda *_: 1.0)
    yield module
    sys.modules.pop("train_language_model")


def test_the_same_bits(example, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    assert example.main(["--quick", "--save", str(whole)]) == 0
    forward, calls = example.language_model_loss_forward, 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return forward(*arguments, **options)

    monkeypatch.setattr(example, "language_model_loss_forward", interrupted)
    assert example.main(["--quick", "--save", str(parts)]) == 130
    assert checkpoint.load(parts).state.step == 3
    assert example.main(["--quick", "--resume", str(parts)]) == 0
    ours, theirs = checkpoint.load(whole), checkpoint.load(parts)
    assert (theirs.state.step, theirs.notes) == (6, ours.notes)
    for a, b in zip((ours.params, ours.state), (theirs.params, theirs.state), strict=True):
        for (name, x), (_, y) in zip(tree_items(a), tree_items(b), strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
    assert whole.read_bytes() == parts.read_bytes()


def test_what_cannot_be_resumed(example, tmp_path, capsys):
    path = tmp_path / "a.npz"
    assert example.main(["--quick", "--save", str(path)]) == 0
    assert example.main(["--quick", "--seed", "1", "--resume", str(path)]) == 2
    assert "was trained with other options or another text: seed" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-1])
    assert example.main(["--quick", "--resume", str(path)]) == 2
    assert "is cut off" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example.main(["--quick", "--save", str(tmp_path / "a.pt")])
