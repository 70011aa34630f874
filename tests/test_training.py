"""The training loop, and the texts that it learns from."""

from __future__ import annotations

import io
import re
import signal

import numpy as np
import pytest

from npattn.optim import SGD, Adam, AdamState, WarmupCosine
from npattn.texts import read_text
from npattn.training import TrainingStep, train


def loss_and_gradient(w, batch, _step=0):
    x, y = batch
    error = x @ w - y
    return np.mean(error**2), 2 * x.T @ error / len(y)


def batches(step):
    x = np.random.default_rng([0, step]).standard_normal((8, 2))
    return x, x @ [1.0, -2.0]


def loop(**options):
    return train(loss_and_gradient, np.zeros(2), batches, SGD(lr=0.1), **{"steps": 10, **options})


def test_it_takes_the_steps_of_the_rule():
    trained = loop(steps=7)
    w, rule, losses = np.zeros(2), SGD(lr=0.1), []
    state = rule.init(w)
    for step in range(7):
        loss, grads = loss_and_gradient(w, batches(step))
        losses.append(float(loss))
        w, state = rule.update(w, grads, state)
    np.testing.assert_array_equal(trained.params, w)
    assert trained.losses == tuple(losses)
    assert trained.state == state
    assert not trained.interrupted
    assert repr(trained) == f"Trained(step=7, last loss={losses[-1]:.4g}, interrupted=False)"


def test_a_run_that_is_taken_up_again_goes_on_to_the_same_bits():
    rule = Adam(lr=0.1)
    whole = train(loss_and_gradient, np.zeros(2), batches, rule, steps=9)
    kept: list[TrainingStep] = []
    first = train(loss_and_gradient, np.zeros(2), batches, rule, steps=9, callback=lambda s: kept.append(s) or s.step == 4)
    assert [s.step for s in kept] == [1, 2, 3, 4]
    assert isinstance(kept[-1].state, AdamState)
    assert first.state.step == kept[-1].state.step == 4
    rest = train(loss_and_gradient, kept[-1].params, batches, rule, steps=9, state=kept[-1].state)
    np.testing.assert_array_equal(rest.params, whole.params)
    assert first.losses + rest.losses == whole.losses
    assert train(loss_and_gradient, rest.params, batches, rule, steps=9, state=rest.state).losses == ()


def test_schedule_and_clipping():
    seen: list[TrainingStep] = []
    loop(schedule=WarmupCosine(0.1, 10, warmup=5), max_norm=0.5, callback=seen.append)
    assert [s.lr for s in seen[:5]] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.1])
    _, grads = loss_and_gradient(np.zeros(2), batches(0))
    assert seen[0].norm == pytest.approx(np.linalg.norm(grads))
    assert np.linalg.norm(seen[0].params) == pytest.approx(0.02 * 0.5, rel=1e-5)
    assert seen[0].seconds <= seen[-1].seconds
    assert repr(seen[0]).startswith("TrainingStep(step=1, loss=")


def test_dropout_can_know_the_step():
    steps = []

    def with_step(w, batch, step):
        steps.append(step)
        return loss_and_gradient(w, batch)

    train(with_step, np.zeros(2), batches, SGD(), steps=3)
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("where", ["loss", "callback"])
def test_an_interrupt_keeps_the_last_whole_step(where):
    def stop():
        signal.raise_signal(signal.SIGINT)

    def interrupting(w, batch, step):
        if where == "loss" and step == 3:
            stop()
        return loss_and_gradient(w, batch)

    def callback(step):
        if where == "callback" and step.step == 3:
            stop()

    trained = train(interrupting, np.zeros(2), batches, SGD(lr=0.1), steps=10, callback=callback)
    assert trained.interrupted
    assert len(trained.losses) == trained.state.step == 3
    np.testing.assert_array_equal(trained.params, loop(steps=3).params)


def test_progress_with_loss_and_tokens():
    stream = io.StringIO()
    trained = loop(steps=20, progress=stream, tokens=16)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"  step +2/20  loss \d+\.\d{3} +[\d,]+ tokens/s +\d+ s left", lines[0])
    again = io.StringIO()
    train(loss_and_gradient, trained.params, batches, SGD(lr=0.1), steps=40, state=trained.state, progress=again)
    assert again.getvalue().startswith("  step   22/40  loss 0.")
    assert "tokens" not in again.getvalue()


def test_a_loss_that_is_no_number_ends_it():
    with pytest.raises(FloatingPointError, match=r"^train: the loss of step 2 is nan; try a smaller learning rate"):
        train(lambda w, _batch, step: (np.nan if step else 1.0, w), np.zeros(2), batches, SGD(), steps=3)
    with pytest.raises(ValueError, match="^train: steps must be"):
        loop(steps=-1)


# Texts -----------------------------------------------------------------------------------------------------------------------


def test_the_packaged_text():
    text = read_text()
    assert text.decode(text.train[:28]) == "CHAPTER I. Down the Rabbit-H"
    assert len(text.held_out) == pytest.approx((len(text.train) + len(text.held_out)) / 10, abs=1)
    np.testing.assert_array_equal(text.encode("Alice"), [text.alphabet.index(c) for c in "Alice"])
    with pytest.raises(ValueError, match=r"^Text.encode: 'é' is not in the alphabet"):
        text.encode("é")


def test_own_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbfab\r\n" + "ü𝄞".encode())
    text = read_text(path)
    assert text.alphabet == "\nabü𝄞"
    assert text.decode([*text.train, *text.held_out]) == "ab\nü𝄞"


def test_batches_are_pieces_and_the_same_one_later():
    text = read_text()
    ids, targets = text.batches(size=5, context=7, seed=3)(11)
    assert ids.shape == targets.shape == (5, 7)
    np.testing.assert_array_equal(ids[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(text.batches(size=5, context=7, seed=3)(11)[0], ids)
    assert not np.array_equal(text.batches(size=5, context=7, seed=3)(12)[0], ids)
    whole = text.decode(text.train)
    assert all(text.decode([*row, last]) in whole for row, last in zip(ids, targets[:, -1], strict=True))


def test_pieces_cover_what_is_held_out():
    text = read_text()
    ids, targets = text.pieces(100)
    np.testing.assert_array_equal(ids.ravel(), text.held_out[: ids.size])
    np.testing.assert_array_equal(targets.ravel(), text.held_out[1 : ids.size + 1])
    assert len(text.held_out) - ids.size <= 100


def test_a_text_that_is_too_short(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijk", encoding="utf-8")
    text = read_text(path)
    with pytest.raises(ValueError, match=r"^Text.batches: there are 9 characters, which must be more than context = 9"):
        text.batches(size=1, context=9)
    with pytest.raises(ValueError, match=r"^Text.pieces: there are 2 characters"):
        text.pieces(2)
    with pytest.raises(ValueError, match="is too short: 11 characters, at least 12 are needed"):
        read_text(path, least=12)
