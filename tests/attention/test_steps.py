"""What happened inside: every intermediate and its gradient, and the sum or product behind a cell."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npattn import (
    AttentionSteps,
    AttentionStepsBackward,
    Dropout,
    MultiHeadParams,
    attention_backward,
    attention_forward,
    attention_steps,
    attention_steps_backward,
    attention_weights,
    causal_mask,
    length_mask,
    multi_head_attention_backward,
    multi_head_attention_forward,
    multi_head_attention_steps,
    multi_head_attention_steps_backward,
    tree_map,
    window_mask,
)
from npattn._arrays.trees import tree_leaves
from npattn.layers import Rotary, rotate
from npattn.testing.libraries import asarray, open_library, to_numpy
from npattn.testing.oracle import sum_to_shape
from npattn.testing.problems import AttentionProblem, Relative, attention_problem
from npattn.testing.strategies import attention_problems

FORWARD = ("scores", "capped", "biased", "weights", "dropped", "out")
BACKWARD = ("dv", "ddropped", "dweights", "dbiased", "dcapped", "dscores", "dq", "dk")


def run(problem: AttentionProblem) -> tuple[AttentionSteps, AttentionStepsBackward]:
    _, saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
    return attention_steps(saved), attention_steps_backward(problem.dout, saved, dlse=problem.dlse)


def whole(problem: AttentionProblem) -> tuple[Any, Any, Any]:
    """q (..., H, T, D), k and v with every head, written out."""
    q, k, v = (x[None] if x.ndim == 2 else x for x in (problem.q, problem.k, problem.v))
    k, v = (np.repeat(x, problem.heads // x.shape[-3], axis=-3) for x in (k, v))
    q, k, v = (np.broadcast_to(x, (*problem.lead, *x.shape[-3:])) for x in (q, k, v))
    return q, k, v


def default_scale(problem: AttentionProblem) -> float:
    return 1 / math.sqrt(problem.q.shape[-1]) if problem.scale is None else problem.scale


# Against dense formulas --------------------------------------------------------------------------------------------------------


@given(attention_problems())
def test_every_step(problem):
    q, k, v = whole(problem)
    seen = problem.visible()
    bias, factors, cap = problem.dense_bias(), problem.factors(), problem.softcap
    scores = default_scale(problem) * np.einsum("...td,...sd->...ts", q, k)
    capped = scores if cap is None else cap * np.tanh(scores / cap)
    with np.errstate(invalid="ignore"):
        biased = np.where(seen, capped if bias is None else capped + bias, -np.inf)
    total = np.where(seen, np.exp(biased), 0).sum(axis=-1, keepdims=True)
    total = total if problem.sinks is None else total + np.exp(problem.sinks[:, None, None])
    weights = np.where(seen, np.exp(biased), 0) / np.where(total == 0, 1, total)
    dropped = weights if factors is None else weights * factors
    expected = dict(zip(FORWARD, (scores, capped, biased, weights, dropped, dropped @ v), strict=True))
    steps, _ = run(problem)
    for name, wanted in expected.items():
        got = getattr(steps, name)
        assert got.shape == (wanted.shape if problem.has_heads else wanted.shape[-2:])
        np.testing.assert_allclose(got.reshape(wanted.shape), wanted, rtol=1e-11, atol=1e-13, err_msg=name)
        if name != "out":
            assert name in ("scores", "capped", "biased") or (got.reshape(wanted.shape)[~seen] == 0).all()
    np.testing.assert_array_equal(attention_weights(steps.saved), steps.weights)
    rows = steps.weights.sum(axis=-1)
    if problem.sinks is None:
        np.testing.assert_allclose(rows, np.broadcast_to(seen.any(axis=-1), problem.pairs[:-1]).reshape(rows.shape), rtol=1e-13)
    else:
        assert (rows < 1).all()


@given(attention_problems())
def test_every_gradient_is_that_of_backward(problem):
    """What is made whole here and in tiles there is the same, and each is the next one's chain rule."""
    steps, back = run(problem)
    grads = attention_backward(problem.dout, steps.saved, dlse=problem.dlse)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(back, name), getattr(grads, name))
    for name in FORWARD:
        np.testing.assert_array_equal(getattr(back.steps, name), getattr(steps, name))
    q, k, v = whole(problem)
    dscores = back.dscores.reshape(problem.pairs)
    group = problem.heads // problem.kv_heads
    dq = default_scale(problem) * dscores @ k
    dk = default_scale(problem) * np.swapaxes(dscores, -1, -2) @ q
    dv = np.swapaxes(steps.dropped.reshape(problem.pairs), -1, -2) @ np.broadcast_to(
        problem.dout, (*problem.pairs[:-1], v.shape[-1])
    )
    for name, full, own in (("dq", dq, problem.q), ("dk", dk, problem.k), ("dv", dv, problem.v)):
        grouped = full if name == "dq" else full.reshape(*problem.lead, problem.kv_heads, group, *full.shape[-2:]).sum(axis=-3)
        wanted = sum_to_shape(grouped, own.shape)
        np.testing.assert_allclose(getattr(back, name), wanted, rtol=1e-9, atol=1e-11, err_msg=name)
    if grads.dbias is not None and isinstance(problem.bias, np.ndarray):
        wanted = sum_to_shape(back.dbiased.reshape(problem.pairs), problem.bias.shape)
        np.testing.assert_allclose(grads.dbias, wanted, rtol=1e-9, atol=1e-11)


OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {},
    "masked": {"mask": causal_mask(1)},
    "softcap": {"softcap": 0.8},
    "bias": {"bias": (4, 3, 5), "hidden": 0.2},
    "table": {"bias": Relative(8, 4, 0, True, 5)},
    "dropout": {"dropout": Dropout(0.4, 3)},
    "sinks": {"sinks": True},
    "scale": {"scale": -0.7},
    "lse": {"dlse": True},
    "all": {
        "mask": length_mask([5, 2]) & window_mask(2, 3),
        "softcap": 1.2,
        "bias": (2, 1, 3, 5),
        "dropout": Dropout(0.3, 1),
        "sinks": True,
        "scale": 0.9,
        "dlse": True,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_torch_differentiates_every_step(options):
    """The plain formula, with the gradient of each of its intermediates kept."""
    torch = pytest.importorskip("torch")
    problem = attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), **options)
    q, k, v = (torch.tensor(np.array(x), requires_grad=True) for x in whole(problem))
    seen = torch.tensor(problem.visible())
    scores = default_scale(problem) * q @ k.mT
    capped = scores if problem.softcap is None else problem.softcap * torch.tanh(scores / problem.softcap)
    bias = problem.dense_bias()
    biased = (capped * 1 if bias is None else capped + torch.tensor(np.where(bias == -np.inf, 0, bias))).masked_fill(
        ~seen, -torch.inf
    )
    logits = biased
    if problem.sinks is not None:
        logits = torch.cat([biased, torch.tensor(np.array(problem.sinks))[:, None, None].expand(2, 4, 3, 1)], dim=-1)
    weights = logits.softmax(-1)[..., :5]
    factors = problem.factors()
    dropped = weights * (1.0 if factors is None else torch.tensor(factors))
    chain = {"dscores": scores, "dcapped": capped, "dbiased": biased, "dweights": weights, "ddropped": dropped, "dq": q}
    for x in chain.values():
        x.retain_grad()
    loss = ((dropped @ v) * torch.tensor(np.array(problem.dout))).sum()
    if problem.dlse is not None:
        loss = loss + (logits.logsumexp(-1) * torch.tensor(np.array(problem.dlse))).sum()
    loss.backward()
    _, back = run(problem)
    for name, x in chain.items():
        np.testing.assert_allclose(getattr(back, name), x.grad.numpy(), rtol=1e-11, atol=1e-13, err_msg=name)
    for name, x in (("dk", k), ("dv", v)):
        np.testing.assert_allclose(getattr(back, name), x.grad.numpy().reshape(2, 2, 2, 5, -1).sum(2), rtol=1e-11, atol=1e-13)


def test_dead_rows_and_poison():
    """A query that sees nothing: weights 0, gradients 0; what no query sees does not show from weights on."""
    problem = attention_problem(
        (3, 2), (4, 2), (4, 2), mask=np.asarray([[True, False, True, False], [False] * 4, [True, True, True, False]])
    )
    k, v, dout = (np.array(x) for x in (problem.k, problem.v, problem.dout))
    k[3], v[3], dout[1] = np.nan, np.inf, np.nan
    steps, back = run(problem.replace(k=k, v=v, dout=dout))
    clean_steps, clean_back = run(problem)
    assert np.isnan(steps.scores[:, 3]).all()
    for name in ("biased", "weights", "dropped", "out"):
        np.testing.assert_array_equal(getattr(steps, name), getattr(clean_steps, name))
    assert (steps.weights[1] == 0).all()
    assert (steps.biased[1] == -np.inf).all()
    for name in ("dbiased", "dcapped", "dscores", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(back, name), getattr(clean_back, name), rtol=1e-14)
    assert (back.dscores[1] == 0).all()


@pytest.mark.parametrize(("T", "S"), [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("lead", [(), (2, 4), (0, 2)])
def test_empty(T, S, lead):
    q, k, v, dout = np.ones((*lead, T, 2)), np.ones((*lead, S, 2)), np.ones((*lead, S, 3)), np.ones((*lead, T, 3))
    _, saved = attention_forward(q, k, v, mask=causal_mask())
    steps, back = attention_steps(saved), attention_steps_backward(dout, saved)
    for name in FORWARD[:-1]:
        assert getattr(steps, name).shape == (*lead, T, S)
    assert steps.out.shape == (*lead, T, 3)
    assert (back.dq.shape, back.dk.shape, back.dv.shape) == (q.shape, k.shape, v.shape)
    assert "dscores" in repr(back)


# Memory, libraries -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_shared(options):
    problem = attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), **options)
    steps, back = run(problem)
    results = {name: getattr(steps, name) for name in FORWARD} | {name: getattr(back, name) for name in BACKWARD}
    saved = [x for x in steps.saved if isinstance(x, np.ndarray)]
    inputs = [*saved, problem.dout] + ([] if problem.dlse is None else [problem.dlse])
    for name, x in results.items():
        assert x.flags.writeable
        for other, y in results.items():
            assert name == other or not np.shares_memory(x, y), (name, other)
        assert not any(np.shares_memory(x, y) for y in inputs), name
    again = run(problem)
    for x in results.values():
        x[...] = 7
    grads = attention_backward(problem.dout, steps.saved, dlse=problem.dlse)
    np.testing.assert_array_equal(grads.dq, again[1].dq)


def test_every_library(library):
    problem = attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), **OPTIONS["all"])
    expected = run(problem)
    given = problem.inputs(library)

    def call() -> Any:
        _, saved = attention_forward(given.q, given.k, given.v, **given.options)
        steps, back = attention_steps(saved), attention_steps_backward(given.dout, saved, dlse=given.dlse)
        return [getattr(steps, name) for name in FORWARD], [getattr(back, name) for name in BACKWARD]

    if library.name == "jax":  # also inside jit
        call = pytest.importorskip("jax").jit(call)
    for names, arrays, own in zip((FORWARD, BACKWARD), call(), expected, strict=True):
        for name, x in zip(names, arrays, strict=True):
            assert library.device is None or x.device == library.device
            np.testing.assert_allclose(to_numpy(x), getattr(own, name), rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("other", ["strict", "torch"])
def test_words_on_other_libraries(other):
    if other == "torch":
        pytest.importorskip("torch")
    problem = attention_problem((2, 3, 2), (1, 4, 2), (1, 4, 2), mask=np.asarray([[True, False, True, True]]), softcap=2.0)
    given = problem.inputs(open_library(other))
    _, saved = attention_forward(given.q, given.k, given.v, **given.options)
    back = attention_steps_backward(given.dout, saved)
    own = run(problem)[1]
    assert repr(back) == repr(own)
    for name in (*FORWARD, *BACKWARD):
        assert back.explain(name, 1, 1) == own.explain(name, 1, 1)


def test_halves_are_shown_as_computed():
    problem = attention_problem((3, 2), (4, 2), (4, 2), dtype="float16")
    steps, back = run(problem)
    assert {getattr(steps, name).dtype for name in FORWARD} == {np.dtype(np.float32)}
    assert back.dscores.dtype == np.float32
    assert back.dq.dtype == np.float16
    np.testing.assert_allclose(steps.weights.sum(-1), 1, rtol=1e-6)


# A cell in words and numbers ---------------------------------------------------------------------------------------------------


def parts(text: str) -> tuple[str, str, str, str]:
    """What `explain` says: the cell, its letters, its numbers, the result."""
    first, second = text.split("\n")
    cell, letters = first.split(" = ", 1)
    numbers, result = second.strip().removeprefix("= ").rsplit(" = ", 1)
    assert second.index("=") == first.index("=")
    return cell, letters, numbers, result


def worked_out(numbers: str) -> float:
    """The numbers as a calculator has them."""
    return float(eval(numbers, {"__builtins__": {}, "exp": math.exp, "tanh": math.tanh, "inf": math.inf, "nan": math.nan}))


def check_cell(owner: Any, array: Any, name: str, at: tuple[int, ...], i: int, j: int) -> bool:
    """The result is the array's, and the numbers give it; False where words stand in for numbers."""
    cell, letters, numbers, result = parts(owner.explain(name, i, j, at=at))
    value = float(array[(*at, i, j)])
    assert cell == f"{name}[{i}, {j}]"
    assert result == f"{value:.4g}"
    if letters.startswith(("0 where", "-inf where")):
        assert value == (0 if letters[0] == "0" else -math.inf)
        return False
    if "more)" in numbers or "nothing" in numbers:
        return False
    size = max(abs(float(n)) for n in re.findall(r"-?\d+\.?\d*(?:e[-+]\d+)?", numbers))
    found = worked_out(numbers)
    assert found == value or found == pytest.approx(value, abs=4e-3 * (1 + size)), numbers
    return True


@given(attention_problems(max_side=3, softcap=True), st.data())
def test_numbers_of_any_cell_give_the_cell(problem, data):
    steps, back = run(problem)
    name = data.draw(st.sampled_from([*FORWARD, *BACKWARD]))
    array = getattr(steps if name in FORWARD else back, name)
    if array.size:
        *at, i, j = (data.draw(st.integers(0, n - 1)) for n in array.shape)
        check_cell(back, array, name, tuple(at), i, j)
        if name in FORWARD:
            assert steps.explain(name, i, j, at=tuple(at)) == back.explain(name, i, j, at=tuple(at))


@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
@pytest.mark.parametrize(
    "options", [OPTIONS[name] for name in ("bare", "all", "table", "lse")], ids=["bare", "all", "table", "lse"]
)
def test_numbers_of_every_step(options, name):
    """Grouped heads, leading axes that broadcast; all cells of some heads."""
    problem = attention_problem((2, 4, 3, 2), (1, 2, 5, 2), (2, 1, 5, 3), **options)
    steps, back = run(problem)
    array = getattr(steps if name in FORWARD else back, name)
    outer = [at for at in np.ndindex(*array.shape[:-2]) if sum(at) % 2 == 0]
    cells = [(at, i, j) for at in outer for i, j in np.ndindex(*array.shape[-2:])]
    numeric = sum(check_cell(back, array, name, at, i, j) for at, i, j in cells)
    if name not in ("dq", "dk", "dv"):  # longer sums than are written out
        assert numeric > len(cells) / 4


LESSON = attention_problem((2, 2), (3, 2), (3, 2)).replace(
    q=np.asarray([[1.0, 2.0], [0.0, -1.0]]),
    k=np.asarray([[1.0, 0.0], [0.5, 1.0], [-1.0, 2.0]]),
    v=np.asarray([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]),
    dout=np.asarray([[1.0, 0.0], [0.0, -1.0]]),
    scale=0.5,
)


MASKED = LESSON.replace(mask=causal_mask())


@pytest.mark.parametrize(
    ("problem", "letters", "numbers"),
    [
        (LESSON, "scores[0, 1] = scale * sum_d q[0, d] * k[1, d]", "0.5 * (1*0.5 + 2*1) = 1.25"),
        (LESSON, "scores[1, 2] = scale * sum_d q[1, d] * k[2, d]", "0.5 * (0*(-1) + -1*2) = -1"),
        (LESSON, "capped[0, 1] = scores, as there is no softcap", "1.25 = 1.25"),
        (LESSON.replace(softcap=2.0), "capped[0, 1] = softcap * tanh(scores[0, 1] / softcap)", "2 * tanh(1.25 / 2) = 1.109"),
        (LESSON, "biased[0, 1] = capped, as there is no bias and no mask hides it", "1.25 = 1.25"),
        (LESSON.replace(bias=np.asarray([0.0, 0.25, 0.0])), "biased[0, 1] = capped[0, 1] + bias[0, 1]", "1.25 + 0.25 = 1.5"),
        (MASKED, "biased[0, 1] = -inf where masked", "query 0 may not attend to key 1: causal_mask() forbids it = -inf"),
        (LESSON, "weights[0, 0] = exp(biased[0, 0] - row_max[0]) / row_sum[0]", "exp(0.5 - 1.5) / 2.147 = 0.1714"),
        (LESSON.replace(mask=length_mask(0)), "weights[0, 0] = 0 where a query sees nothing", "no key to attend to = 0"),
        (LESSON, "dropped[0, 0] = weights, as there is no dropout", "0.1714 = 0.1714"),
        (LESSON, "out[0, 0] = sum_j dropped[0, j] * v[j, 0]", "(0.1714*1 + 0.3628*0 + 0.4658*2) = 1.103"),
        (LESSON, "dv[2, 1] = sum_i dropped[i, 2] * dout[i, 1]", "(0.4658*0 + 0.1863*(-1)) = -0.1863"),
        (LESSON, "ddropped[0, 2] = sum_e dout[0, e] * v[2, e]", "(1*2 + 0*2) = 2"),
        (LESSON, "dweights[0, 2] = ddropped, as there is no dropout", "2 = 2"),
        (
            LESSON,
            "dbiased[0, 2] = weights * (dweights - delta), delta = sum_j weights[0, j] * dweights[0, j]",
            "0.4658 * (2 - 1.103) = 0.4178",
        ),
        (MASKED, "dbiased[0, 2] = 0 where masked", "a pair that is hidden has no influence = 0"),
        (LESSON, "dcapped[0, 2] = dbiased: the bias is only added", "0.4178 = 0.4178"),
        (LESSON, "dscores[0, 2] = dcapped, as there is no softcap", "0.4178 = 0.4178"),
        (LESSON.replace(softcap=2.0), "dscores[0, 2] = dcapped * (1 - (capped[0, 2] / softcap)**2)", None),
        (LESSON, "dq[0, 1] = scale * sum_j dscores[0, j] * k[j, 1]", None),
        (LESSON, "dk[2, 0] = scale * sum_i dscores[i, 2] * q[i, 0]", None),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
def test_words(problem, letters, numbers):
    name, i, j = re.match(r"(\w+)\[(\d), (\d)\]", letters).groups()
    first, second = run(problem)[1].explain(name, int(i), int(j)).split("\n")
    assert first == letters
    assert numbers is None or second == f"{'':<{len(name) + 7}}= {numbers}"


def test_dropout_in_words():
    steps, back = run(attention_problem((3, 2), (4, 2), (4, 2), dropout=Dropout(0.5, 0)))
    kept = steps.dropped != 0
    assert kept.any()
    assert not kept.all()
    for (i, j), here in np.ndenumerate(kept):
        _, letters, numbers, _ = parts(back.explain("dropped", i, j))
        assert letters == ("weights / (1 - rate), as dropout keeps it" if here else "weights * 0, as dropout drops it")
        assert numbers.endswith("* 2" if here else "* 0")
        assert parts(back.explain("dweights", i, j))[1] == "ddropped * the factor that dropout gave the weight"


def test_long_sums_are_cut_short():
    problem = attention_problem((2, 9), (3, 9), (3, 2))
    _, _, numbers, _ = parts(run(problem)[0].explain("scores", 0, 0))
    assert numbers.count("*") == 1 + 5  # scale, and the first terms
    assert numbers.endswith(" + ... (4 more))")


def test_shared_keys_are_summed_over_their_heads():
    problem = attention_problem((4, 2, 3), (2, 5, 3), (2, 5, 3))
    _, back = run(problem)
    _, letters, numbers, result = parts(back.explain("dv", 1, 2, at=(1,)))
    assert letters == "sum over the heads that share it and i, dropped[i, 1] * dout[i, 2]"
    assert worked_out(numbers) == pytest.approx(float(result), rel=1e-2, abs=1e-3)
    assert numbers.count("+") == 2 * 2 - 1  # two heads, two queries
    assert (
        parts(back.explain("dk", 1, 2, at=(1,)))[1] == "scale * sum over the heads that share it and i, dscores[i, 1] * q[i, 2]"
    )


@pytest.mark.parametrize(
    ("name", "cell", "at", "message"),
    [
        (
            "score",
            (0, 0),
            (),
            "explain: there is no step 'score' here; the steps are scores, capped, biased, weights, dropped, out, dv, ddro",
        ),
        ("saved", (0, 0), (), "explain: there is no step 'saved' here"),
        ("dout", (0, 0), (), "explain: there is no step 'dout' here"),
        ("scores", (3, 0), (), r"explain: scores has 3 rows and 5 columns, so there is no cell \(3, 0\)"),
        ("scores", (0, -1), (), r"explain: scores has 3 rows and 5 columns, so there is no cell \(0, -1\)"),
        ("out", (0, 3), (), r"explain: out has 3 rows and 3 columns, so there is no cell \(0, 3\)"),
        ("dk", (5, 0), (), r"explain: dk has 5 rows and 2 columns, so there is no cell \(5, 0\)"),
        ("scores", (0, 0), (4,), r"explain: at must be an index into the leading axes and heads \(2, 4\), got \(4,\)"),
        ("scores", (0, 0), (0, -1), r"explain: at must be an index into the leading axes and heads \(2, 4\), got \(0, -1\)"),
        ("dk", (0, 0), (0, 2), r"explain: at must be an index into the leading axes and heads \(2, 2\), got \(0, 2\)"),
        ("scores", (0, 0), (0, 0, 0), r"explain: at must be an index into the leading axes and heads \(2, 4\), got \(0, 0, 0\)"),
    ],
)
def test_cells_that_are_not_there(name, cell, at, message):
    _, back = run(attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3)))
    with pytest.raises(ValueError, match=f"^{message}"):
        back.explain(name, *cell, at=at)


def test_forward_steps_know_no_gradients():
    steps, _ = run(LESSON)
    with pytest.raises(
        ValueError, match="there is no step 'dscores' here; the steps are scores, capped, biased, weights, dropped, out$"
    ):
        steps.explain("dscores", 0, 0)


def test_cotangents_are_checked():
    _, saved = attention_forward(LESSON.q, LESSON.k, LESSON.v)
    with pytest.raises(ValueError, match="^attention_backward: dout must have shape"):
        attention_steps_backward(np.ones((3, 2)), saved)
    with pytest.raises(ValueError, match="^attention_backward: dlse must have shape"):
        attention_steps_backward(LESSON.dout, saved, dlse=np.ones(3))


# Tables ------------------------------------------------------------------------------------------------------------------------


def test_table_of_small_matrices():
    steps, back = run(LESSON)
    lines = repr(steps).split("\n")
    assert lines[0].split() == ["step", "formula", "shape"]
    names = [line.split()[0] for line in lines if line[0] != " "]
    assert names == ["step", *FORWARD]
    at = lines.index(next(line for line in lines if line.startswith("weights")))
    assert lines[at] == f"{'weights':<10}{'exp(biased - row_max) / row_sum':<40}(2, 3)"
    for i in range(2):
        assert [float(n) for n in lines[at + 1 + i].split()] == [float(f"{x:.4g}") for x in steps.weights[i]]
    assert len(lines) == 1 + len(FORWARD) * (1 + 2)
    assert [line.split()[0] for line in repr(back).split("\n") if line[0] != " "] == ["step", *BACKWARD]


def test_table_of_large_or_many_matrices():
    """Shapes only: one line a step."""
    for shape in ((2, 4, 3, 2), (7, 2), (2, 9, 2)):
        steps, back = run(attention_problem(shape, shape, shape))
        assert len(repr(steps).split("\n")) == 1 + len(FORWARD)
        assert len(repr(back).split("\n")) == 1 + len(BACKWARD)
        assert str(tuple(steps.scores.shape)) in repr(steps)


# Multi-head --------------------------------------------------------------------------------------------------------------------


def test_multi_head_steps():
    rng = np.random.default_rng(0)
    params = tree_map(
        lambda x: rng.standard_normal(x.shape), MultiHeadParams.init(rng, width=6, heads=4, kv_heads=2, head_size=3)
    )
    x_q, x_kv, dout = rng.standard_normal((2, 3, 6)), rng.standard_normal((2, 5, 6)), rng.standard_normal((2, 3, 6))
    out, saved = multi_head_attention_forward(params, x_q, x_kv, mask=causal_mask(2))
    steps = multi_head_attention_steps(saved)
    back = multi_head_attention_steps_backward(dout, saved)
    project = "btc,chd->bhtd"
    for name, x, w, b in (
        ("q", x_q, params.w_q, params.b_q),
        ("k", x_kv, params.w_k, params.b_k),
        ("v", x_kv, params.w_v, params.b_v),
    ):
        np.testing.assert_allclose(getattr(steps, name), np.einsum(project, x, w) + b[:, None], rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(steps.out, out)
    np.testing.assert_allclose(
        np.einsum("bhte,hec->btc", steps.attention.out, params.w_o) + params.b_o, out, rtol=1e-12, atol=1e-13
    )
    np.testing.assert_array_equal(steps.attention.weights, attention_weights(saved.attention))

    np.testing.assert_allclose(back.dheads, np.einsum("btc,hec->bhte", dout, params.w_o), rtol=1e-12, atol=1e-13)
    dx_q = np.einsum("bhtd,chd->btc", back.attention.dq, params.w_q)
    dx_kv = sum(np.einsum("bhsd,chd->bsc", d, w) for d, w in ((back.attention.dk, params.w_k), (back.attention.dv, params.w_v)))
    np.testing.assert_allclose(back.grads.dx_q, dx_q, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(back.grads.dx_kv, dx_kv, rtol=1e-11, atol=1e-12)
    for got, expected in zip(tree_leaves(back.grads), tree_leaves(multi_head_attention_backward(dout, saved)), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert "dscores[0, 1]" in back.attention.explain("dscores", 0, 1, at=(1, 3))

    results = [steps.q, steps.k, steps.v, steps.out, *(getattr(steps.attention, name) for name in FORWARD)]
    borrowed = [*tree_leaves(params), x_q, x_kv, saved.attention.q, saved.attention.k, saved.attention.v, saved.out.x]
    for n, x in enumerate(results):
        assert not any(np.shares_memory(x, y) for y in [*borrowed, *results[n + 1 :]])


def test_rotated_steps():
    """The projections are as without rotation; what attention receives is beside them."""
    rng = np.random.default_rng(0)
    params, x = MultiHeadParams.init(rng, width=4, heads=2, kv_heads=1), rng.standard_normal((3, 4))
    rotary = Rotary(key_positions=2)
    out, saved = multi_head_attention_forward(params, x, x, rotary=rotary)
    steps = multi_head_attention_steps(saved)
    plain = multi_head_attention_steps(multi_head_attention_forward(params, x, x)[1])
    assert plain.rotated_q is None
    assert plain.rotated_k is None
    for name in "qkv":
        np.testing.assert_array_equal(getattr(steps, name), getattr(plain, name))
    np.testing.assert_array_equal(steps.rotated_q, rotate(steps.q, rotary))
    np.testing.assert_array_equal(steps.rotated_k, rotate(steps.k, Rotary(positions=2)))
    np.testing.assert_array_equal(steps.out, out)
    scores = np.einsum("htd,hsd->hts", steps.rotated_q, np.repeat(steps.rotated_k, 2, axis=0)) / np.sqrt(2)
    np.testing.assert_allclose(steps.attention.scores, scores, rtol=1e-13, atol=1e-14)
    results = [x for x in steps if isinstance(x, np.ndarray)]
    assert len(results) == 6
    for n, result in enumerate(results):
        assert not any(np.shares_memory(result, y) for y in [*results[n + 1 :], saved.attention.q, saved.attention.k])
    lines = repr(steps).splitlines()
    assert "rotated_q q rotated by its positions: q below     (2, 3, 2)" in lines
    assert not any("rotated" in line for line in repr(plain).splitlines())


def test_multi_head_tables():
    params = MultiHeadParams.identity(width=2)
    _, saved = multi_head_attention_forward(params, np.eye(2), np.eye(2))
    text = repr(multi_head_attention_steps(saved))
    names = [line.split()[0] for line in text.split("\n") if line[0] != " "]
    assert names == ["step", "q", "k", "v", *FORWARD[:-1], "heads", "out"]
    back = multi_head_attention_steps_backward(np.ones((2, 2)), saved)
    assert [line.split()[0] for line in repr(back).split("\n") if line[0] != " "] == ["step", *BACKWARD]


def test_steps_of_a_saved_tree_on_torch():
    torch = pytest.importorskip("torch")
    library = open_library("torch")
    params = tree_map(lambda x: asarray(x, library), MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2))
    x = torch.ones(3, 4, dtype=torch.float64)
    _, saved = multi_head_attention_forward(params, x, x)
    steps = multi_head_attention_steps(saved)
    np.testing.assert_allclose(steps.attention.weights.numpy(), 1 / 3, rtol=1e-14)  # equal keys share alike
