"""Cross-entropy: PyTorch's numbers, tokens that do not count, weights, extremes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from npattn.layers import cross_entropy, cross_entropy_backward, cross_entropy_forward, log_softmax
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import open_library, to_numpy

INF, NAN = math.inf, math.nan


def twin(logits: np.ndarray, targets: np.ndarray, smoothing: float, ignore: int | None, weights: np.ndarray | None) -> float:
    """Token by token and class by class."""
    total, losses = 0.0, []
    for at in np.ndindex(*targets.shape):
        if targets[at] == ignore:
            continue
        top = max(logits[at])
        lse = top + math.log(math.fsum(math.exp(x - top) for x in logits[at]))
        weight = 1.0 if weights is None else float(weights[at])
        chances = [smoothing / len(logits[at]) + (1 - smoothing) * (v == targets[at]) for v in range(len(logits[at]))]
        losses.append(weight * -math.fsum(q * (x - lse) for q, x in zip(chances, logits[at], strict=True)))
        total += weight
    return math.fsum(losses) / total if total else 0.0


@st.composite
def problems(draw: Any) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    classes, shape = draw(st.integers(1, 5)), tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    targets = np.asarray(rng.integers(0, classes, shape))
    ignore = draw(st.sampled_from([None, -100, 0, classes - 1]))
    if ignore == -100:
        targets = np.where(rng.random(shape) < 0.3, -100, targets)
    weights = np.asarray(rng.random(shape) * (rng.random(shape) < 0.8)) if draw(st.booleans()) else None
    options = {"label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])), "ignore_index": ignore, "weights": weights}
    return rng.standard_normal((*shape, classes)) * draw(st.sampled_from([1.0, 30.0])), targets, options


@given(problems())
def test_values_are_those_of_plain_loops(problem):
    logits, targets, options = problem
    loss = cross_entropy(logits, targets, **options)
    assert isinstance(loss, np.ndarray)
    assert loss.shape == ()
    expected = twin(logits, targets, options["label_smoothing"], options["ignore_index"], options["weights"])
    assert loss == pytest.approx(expected, rel=1e-13, abs=1e-14)


@given(problems())
@example((np.asarray([0.5]), np.asarray(0), {"label_smoothing": 0.1, "ignore_index": None, "weights": None}))
@example((np.asarray([-4.0, 19.2]), np.asarray(1), {"label_smoothing": 0.0, "ignore_index": None, "weights": None}))
@settings(max_examples=50)
def test_backward_over_random_problems(problem):
    logits, targets, options = problem
    weights = options.pop("weights")
    args = {"logits": logits} | ({} if weights is None else {"weights": weights})
    if weights is not None and weights.size:
        weights.flat[0] += 1  # the mean of tokens whose weights sum to 0 has no derivative there

    def call(logits: np.ndarray, weights: Any = None) -> Any:
        loss, saved = cross_entropy_forward(logits, targets, weights=weights, **options)
        # the loss of a sure token is the logarithm of a sum near 1, and is rounded as 1 is
        return np.asarray(loss + 1.0), saved

    if weights is None or (weights * (targets != options["ignore_index"])).sum() > 0.5:
        check_backward(call, cross_entropy_backward, args)


@pytest.mark.parametrize(("smoothing", "ignore"), [*itertools.product([0.0, 0.1, 1.0], [-100, 2])])
def test_pytorch_gives_the_same(smoothing, ignore):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(0)
    logits, targets = 3 * rng.standard_normal((11, 7)), rng.integers(0, 7, 11)
    targets[[2, 5]] = ignore
    loss, saved = cross_entropy_forward(logits, targets, label_smoothing=smoothing, ignore_index=ignore)
    theirs = torch.tensor(logits, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(theirs, torch.tensor(targets), label_smoothing=smoothing, ignore_index=ignore)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-14)
    np.testing.assert_allclose(cross_entropy_backward(1.0, saved).dlogits, theirs.grad.numpy(), rtol=0, atol=1e-16)


def test_pytorch_gives_the_same_weighted_mean():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(1)
    logits, targets, weights = rng.standard_normal((2, 5, 7)), rng.integers(0, 7, (2, 5)), rng.random((2, 5))
    loss, saved = cross_entropy_forward(logits, targets, weights=weights)
    x, w = (torch.tensor(a, requires_grad=True) for a in (logits, weights))
    each = torch.nn.functional.cross_entropy(x.reshape(-1, 7), torch.tensor(targets).reshape(-1), reduction="none").reshape(2, 5)
    expected = (w * each).sum() / w.sum()
    expected.backward()
    grads = cross_entropy_backward(1.0, saved)
    assert loss == pytest.approx(expected.item(), rel=1e-14)
    np.testing.assert_allclose(grads.dlogits, x.grad.numpy(), rtol=0, atol=1e-16)
    np.testing.assert_allclose(grads.dweights, w.grad.numpy(), rtol=0, atol=1e-15)


def test_log_softmax_gives_the_same():
    rng = np.random.default_rng(2)
    logits, targets = rng.standard_normal((11, 7)), rng.integers(0, 7, 11)
    assert cross_entropy(logits, targets) == pytest.approx(-log_softmax(logits)[np.arange(11), targets].mean(), rel=1e-14)


# What does not count -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stray", [NAN, INF, -INF, 1e300])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_logits_have_no_influence(stray, smoothing, to_xp):
    rng = np.random.default_rng(0)
    logits, targets, weights = rng.standard_normal((3, 5)), np.asarray([4, -1, 0]), np.asarray([1.0, 2.0, 3.0])
    results = []
    for values in (logits, np.where(targets[:, None] == -1, stray, logits)):
        loss, saved = cross_entropy_forward(
            to_xp(values), to_xp(targets), ignore_index=-1, label_smoothing=smoothing, weights=to_xp(weights)
        )
        results.append([to_numpy(x) for x in (loss, *cross_entropy_backward(2.0, saved))])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not results[1][1][1].any()
    assert results[1][2][1] == 0
    assert results[0][1][0].any()


def test_logits_of_weight_zero_have_no_influence(to_xp):
    """Their own weight does have a derivative: how much the mean would change if they counted."""
    logits, targets, weights = np.asarray([[1.0, 2.0], [0.0, 0.0], [3.0, 1.0]]), [0, 1, 0], np.asarray([1.0, 0.0, 2.0])
    loss, saved = cross_entropy_forward(to_xp(logits), targets, weights=to_xp(weights))
    without = cross_entropy(logits[[0, 2]], [0, 0], weights=weights[[0, 2]])
    assert to_numpy(loss) == pytest.approx(without, rel=1e-15)
    assert to_numpy(cross_entropy_backward(1.0, saved).dweights)[1] == pytest.approx((math.log(2) - without) / 3, rel=1e-14)
    logits[1] = NAN
    other, saved = cross_entropy_forward(to_xp(logits), targets, weights=to_xp(weights))
    grads = cross_entropy_backward(1.0, saved)
    assert to_numpy(other) == to_numpy(loss)
    assert to_numpy(grads.dlogits)[1].tolist() == [0, 0]
    assert np.isfinite(to_numpy(grads.dlogits)).all()
    assert np.isfinite(to_numpy(grads.dweights)[[0, 2]]).all()


@pytest.mark.parametrize("what", ["all ignored", "all of weight 0", "no tokens", "no tokens and no axis of them", "no classes"])
def test_nothing_counts(what, to_xp):
    shape = {"no tokens": (0, 7), "no tokens and no axis of them": (2, 0, 7), "no classes": (2, 0)}.get(what, (2, 7))
    targets = np.full(shape[:-1], 3 if what == "all of weight 0" else -1)
    weights = np.zeros(shape[:-1]) if what == "all of weight 0" else np.ones(shape[:-1])
    for smoothing in (0.0, 0.1):
        loss, saved = cross_entropy_forward(
            to_xp(np.full(shape, NAN)), to_xp(targets), ignore_index=-1, weights=to_xp(weights), label_smoothing=smoothing
        )
        assert to_numpy(loss) == 0
        grads = cross_entropy_backward(1.0, saved)
        assert tuple(grads.dlogits.shape) == shape
        assert tuple(grads.dweights.shape) == shape[:-1]
        assert not to_numpy(grads.dlogits).any()
        assert not to_numpy(grads.dweights).any()


# Extremes ----------------------------------------------------------------------------------------------------------------------


def test_confident_logits():
    with np.errstate(all="raise"):
        loss, saved = cross_entropy_forward(np.asarray([[1e4, 0.0], [0.0, 1e4]]), [0, 0])
        assert loss == 5000
        assert cross_entropy_backward(1.0, saved).dlogits.tolist() == [[0, 0], [-0.5, 0.5]]
    # where softmax rounds to 1, the loss is still there
    assert cross_entropy(np.asarray([0.0, -40.0]), 1) == 40
    assert cross_entropy(np.asarray([40.0, 0.0]), 0) == pytest.approx(math.exp(-40), rel=1e-15, abs=1e-17)


def test_impossible_targets(to_xp):
    """-inf at the target: the loss is inf, and the gradient still says where to go; nothing possible at all: gradient 0."""
    loss, saved = cross_entropy_forward(to_xp([[-INF, 0.0, 0.0]]), [0])
    assert to_numpy(loss) == INF
    assert to_numpy(cross_entropy_backward(1.0, saved).dlogits).tolist() == [[-1, 0.5, 0.5]]
    loss, saved = cross_entropy_forward(to_xp([[-INF, -INF]]), [0])
    assert to_numpy(loss) == INF
    assert to_numpy(cross_entropy_backward(1.0, saved).dlogits).tolist() == [[0, 0]]
    loss, saved = cross_entropy_forward(to_xp([[-INF, 0.0, 0.0]]), [1])
    assert to_numpy(loss) == pytest.approx(math.log(2), rel=1e-15)
    assert to_numpy(cross_entropy_backward(1.0, saved).dlogits).tolist() == [[0, -0.5, 0.5]]


def test_a_visible_nan_is_seen():
    loss, saved = cross_entropy_forward(np.asarray([[NAN, 0.0], [0.0, 0.0]]), [0, 1])
    assert np.isnan(loss)
    dlogits = cross_entropy_backward(1.0, saved).dlogits
    assert np.isnan(dlogits[0]).all()
    assert dlogits[1].tolist() == [0.25, -0.25]


def test_float16_is_computed_in_float32():
    logits = np.zeros((1, 5000), np.float16)
    loss, saved = cross_entropy_forward(logits, [3])
    assert loss.dtype == np.float16
    assert loss == np.float16(math.log(5000))  # the sum of 5000 ones would stop at 2048
    assert {saved.row_max.dtype.name, saved.row_sum.dtype.name, saved.losses.dtype.name} == {"float32"}
    many = cross_entropy(np.zeros((70000, 2), np.float16), np.zeros(70000, int))
    assert many == np.float16(math.log(2))  # a sum in float16 would be inf


# What may be given -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dout", [2, 2.0, np.float64(2), np.float32(2), np.int64(2)], ids=repr)
def test_the_cotangent_may_be_a_number(dout, to_xp):
    loss, saved = cross_entropy_forward(to_xp([[0.0, 1.0]], "float32"), [0])
    dlogits = cross_entropy_backward(dout, saved).dlogits
    assert dlogits.dtype == loss.dtype
    one = cross_entropy_backward(to_xp(np.asarray(1.0), "float32"), saved).dlogits
    np.testing.assert_array_equal(to_numpy(dlogits), 2 * to_numpy(one))


@pytest.mark.parametrize("targets", [[1, 0], (1, 0), np.asarray([1, 0], "uint8"), np.asarray([1, 0], ">i8")], ids=repr)
def test_host_targets_beside_any_library(targets, to_xp):
    logits = np.random.default_rng(0).standard_normal((2, 3))
    expected, expected_saved = cross_entropy_forward(logits, np.asarray([1, 0]))
    loss, saved = cross_entropy_forward(to_xp(logits), targets, ignore_index=-100)
    assert to_numpy(loss) == pytest.approx(expected, rel=1e-15)
    np.testing.assert_allclose(
        to_numpy(cross_entropy_backward(1.0, saved).dlogits), cross_entropy_backward(1.0, expected_saved).dlogits, rtol=1e-14
    )


@pytest.mark.parametrize("number", [np.float64(0.1), np.asarray(0.1), np.float32(0.1)], ids=repr)
def test_numbers_change_no_dtype(number):
    logits = np.zeros((2, 3), np.float32)
    loss, saved = cross_entropy_forward(logits, [0, 1], label_smoothing=number, ignore_index=np.int64(7))
    assert loss.dtype == np.float32
    assert cross_entropy_backward(np.float64(1), saved).dlogits.dtype == np.float32


def test_saved_borrows_and_holds_three_numbers_a_token():
    logits, targets, weights = np.zeros((2, 3, 5)), np.zeros((2, 3), int), np.ones((2, 3))
    saved = cross_entropy_forward(logits, targets, weights=weights)[1]
    assert saved.logits is logits
    assert saved.targets is targets
    assert saved.weights is weights
    assert saved.row_max.shape == saved.row_sum.shape == (2, 3, 1)
    assert saved.losses.shape == (2, 3)


def test_errors():
    logits = np.zeros((2, 3))
    with pytest.raises(
        ValueError, match=r"^cross_entropy: targets must have shape \(...\) = \(2,\) as logits \(..., V\) has, got \(3,\)"
    ):
        cross_entropy(logits, [0, 1, 2])
    with pytest.raises(
        ValueError, match=r"^cross_entropy: weights must have shape \(...\) = \(2,\) as logits \(..., V\) has, got \(1,\)"
    ):
        cross_entropy(logits, [0, 1], weights=np.ones(1))
    with pytest.raises(ValueError, match=r"^cross_entropy: logits must have shape \(..., V\), got \(\)"):
        cross_entropy(np.asarray(1.0), 0)
    with pytest.raises(ValueError, match=r"^cross_entropy: targets must be at least 0 and less than V = 3, got 3 at \[1\]$"):
        cross_entropy(logits, [0, 3])
    with pytest.raises(ValueError, match=r"less than V = 3, or ignore_index = -100, got -1 at \[0\]$"):
        cross_entropy(logits, [-1, -100], ignore_index=-100)
    for smoothing in (-0.1, 1.5):
        with pytest.raises(ValueError, match="^cross_entropy: label_smoothing must be at least 0 and at most 1, got"):
            cross_entropy(logits, [0, 1], label_smoothing=smoothing)
    with pytest.raises(TypeError, match="^cross_entropy: ignore_index must be an integer, got float"):
        cross_entropy(logits, [0, 1], ignore_index=1.0)
    with pytest.raises(TypeError, match="^cross_entropy: targets must have an integer dtype, got float64"):
        cross_entropy(logits, logits)
    with pytest.raises(TypeError, match="^cross_entropy: logits is float64 but weights is float32"):
        cross_entropy(logits, [0, 1], weights=np.ones(2, np.float32))
    with pytest.raises(TypeError, match="^cross_entropy: logits must have a floating dtype"):
        cross_entropy(logits.astype(int), [0, 1])
    strict = open_library("strict").xp
    with pytest.raises(TypeError, match="^cross_entropy: logits is an array of numpy but targets is one of array_api_strict"):
        cross_entropy(logits, strict.asarray([0, 1]))
    saved = cross_entropy_forward(logits, [0, 1])[1]
    with pytest.raises(ValueError, match=r"^cross_entropy_backward: dout must have shape \(\) = \(\) as the result, got \(1,\)"):
        cross_entropy_backward(np.ones(1), saved)
    with pytest.raises(TypeError, match="^cross_entropy_backward: dout must be an array"):
        cross_entropy_backward([1.0], saved)
