"""The laws: each says what it is, each is broken by a fault of its kind, and a broken one says how."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from npattn.testing import LAWS, ORDINARY, Answer, Candidate, LawBroken, Run, attention_problem, attention_problems, laws, naive
from npattn.testing.laws import is_what_the_loops_say
from npattn.testing.parts import whole
from npattn.testing.state_laws import shares_memory


def variant(change, name="wrong"):
    """The naive loops with another problem, or another answer."""

    def run(problem, backward):
        return Run(problem.inputs().arrays(), change(problem))

    return Candidate(name, run)


def with_answer(**changes):
    """The right answer, with results replaced: name=function(value, problem)."""

    def change(problem):
        answer = naive(problem)
        return answer._replace(
            **{n: f(getattr(answer, n), problem) for n, f in changes.items() if getattr(answer, n) is not None}
        )

    return variant(change)


def with_problem(change):
    """The right answer to another problem."""
    return variant(lambda problem: naive(change(problem)))


def everywhere(x, problem):
    return x + 1e-3


def leaky(problem):
    """Masked pairs get a large negative bias instead."""
    seen = problem.visible()
    bias = np.where(
        seen, 0.0 if problem.bias is None else np.where(np.isinf(problem.dense_bias()), 0, problem.dense_bias()), -30.0
    )
    return whole(problem).replace(mask=None, bias=bias)


def stateful():
    calls = []

    def change(problem):
        calls.append(problem)
        return naive(problem)._replace(out=naive(problem).out + 1e-3 * len(calls))

    return variant(change)


def writing(problem, backward):
    inputs = {name: x.copy() for name, x in problem.inputs().arrays().items()}
    answer = naive(problem)
    inputs["v"] += 1.0
    return Run(inputs, answer)


def sharing(problem, backward):
    inputs = problem.inputs().arrays()
    answer = naive(problem)
    return Run(inputs, answer._replace(dv=inputs["v"]))


def mixing_heads(x, problem):
    return x[..., ::-1, :, :] if problem.has_heads else x


def causal_off_by_one(problem):
    from npattn import window_mask
    from npattn.testing.dense import Band

    mask = problem.mask
    if isinstance(mask, Band) and mask.name == "causal_mask":
        return problem.replace(mask=window_mask(None, 1, offset=mask.offset))
    return problem


# For every law a candidate that breaks it, by a fault that the law is there for.
BREAKS = {
    "a_number_added_to_a_row_changes_nothing": with_problem(
        lambda p: p.replace(bias=np.abs(p.bias)) if isinstance(p.bias, np.ndarray) else p
    ),
    "batched_is_looped": with_problem(lambda p: p.replace(k=p.k[::-1]) if p.k.ndim > 3 else p),
    "broadcasting_is_repeating": with_answer(dq=lambda x, p: x * (2 if p.q.ndim < p.k.ndim else 1)),
    "cotangents_enter_linearly": with_answer(dv=lambda x, p: np.abs(x)),
    "cuts_merge_to_the_whole": with_answer(lse=lambda x, p: np.where(np.isinf(x), x, x * 1.01)),
    "dead_rows_are_zero": with_answer(out=everywhere),
    "decoding_is_the_whole": with_problem(causal_off_by_one),
    "dtype_and_device_are_kept": with_answer(dk=lambda x, p: x.astype(np.float32)),
    "gradients_are_derivatives": with_answer(dk=lambda x, p: -x),
    "grouped_is_repeated": with_answer(dv=lambda x, p: x / (p.heads / max(p.kv_heads, 1))),
    "heads_are_independent": with_answer(out=mixing_heads),
    "inputs_are_not_written": Candidate("writing", writing),
    "is_as_precise_as_the_naive_formula": with_answer(out=lambda x, p: x.astype(np.float16)),
    "is_what_the_loops_say": with_answer(out=lambda x, p: x * (1 + 1e-10)),
    "keys_have_no_order": with_problem(lambda p: p.replace(v=p.v * np.arange(1, p.v.shape[-2] + 1)[:, None])),
    "keys_moved_together_have_no_gradient": with_answer(dk=everywhere),
    "memory_layout_does_not_matter": with_problem(
        lambda p: p if p.q.flags.c_contiguous else p.replace(q=p.q + 1e-3)
    ),
    "moving_all_keys_changes_nothing": with_problem(lambda p: p.replace(k=np.abs(p.k))),
    "nothing_is_shared": Candidate("sharing", sharing),
    "outputs_lie_between_the_values": with_answer(out=lambda x, p: x * 1.5),
    "poison_stays_where_it_is_seen": with_problem(lambda p: p.replace(v=p.v + 0 * p.k.sum())),
    "poison_stays_out": variant(
        lambda p: naive(p)._replace(dv=naive(p).dv + 0 * p.v, out=naive(p).out + 0 * np.sum(p.v))
    ),
    "products_with_gradients_agree": with_answer(dv=lambda x, p: 2 * x),
    "queries_are_independent": with_answer(out=lambda x, p: np.cumsum(x, axis=-2)),
    "repeated_keys_share_their_weight": with_problem(lambda p: p.replace(scale=1 / np.sqrt(max(p.k.shape[-2], 1)))),
    "scale_multiplies_the_scores": with_problem(
        lambda p: p.replace(scale=1 / max(p.q.shape[-1], 1)) if p.scale is None else p
    ),
    "score_gradients_of_a_row_sum_to_zero": with_answer(dbias=everywhere),
    "the_same_bits_again": stateful(),
    "unseen_keys_leave_no_trace": with_problem(leaky),
    "values_enter_linearly": with_answer(out=lambda x, p: np.tanh(x)),
    "weights_sum_to_one_or_nothing": with_answer(out=lambda x, p: x * 1.001),
}  # fmt: skip


def check(name, candidate, **drawn):
    drawn = {"max_side": 4, "layouts": ["fortran", "contiguous"], **drawn}

    @settings(
        max_examples=80, phases=[Phase.generate], database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )  # fmt: skip
    @given(attention_problems(**drawn))
    def holds(problem):
        with np.errstate(all="ignore"):
            LAWS[name](candidate, problem)

    holds()


@pytest.mark.parametrize("name", LAWS)
def test_a_fault_of_its_kind_breaks_it(name):
    drawn = {"dtypes": ["float32"], "max_side": 6} if "precise" in name else {}
    with pytest.raises(LawBroken, match=name):
        check(name, BREAKS[name], **drawn)


@pytest.mark.parametrize("name", LAWS)
def test_each_states_itself_and_what_it_catches(name):
    statement, _, rest = LAWS[name].__doc__.partition("\n")
    assert LAWS[name].__name__ == name
    assert getattr(laws, name) is LAWS[name]
    assert statement.endswith(".")
    assert "Catches" in rest


def test_they_are_all_listed():
    assert set(laws.__all__) == {*LAWS, "LAWS", "OF_GRADIENTS", "ORDINARY", "Law", "LawBroken"}
    assert set(LAWS) >= ORDINARY


def test_a_broken_law_says_which_and_how():
    problem = attention_problem((2, 3), (4, 3), (4, 5), seed=3)

    def off(x, _):
        x = x.copy()
        x[1, 2] += 0.5
        return x

    with pytest.raises(LawBroken) as caught:
        is_what_the_loops_say(with_answer(dv=off), problem)
    first, second, third = str(caught.value).splitlines()
    assert first.startswith("wrong breaks is_what_the_loops_say: out = softmax(")
    assert re.match(r"dv\[1, 2\]: expected .*, got .*; they may differ by .*; 1 of 20 elements are wrong$", second)
    assert third == "problem: attention_problem(q=(2, 3), k=(4, 3), v=(4, 5), seed=3)"


def test_a_result_of_another_shape_or_none():
    problem = attention_problem((2, 3), (4, 3), (4, 5))
    with pytest.raises(LawBroken, match=r"out has shape \(2, 4\), expected is \(2, 5\)"):
        is_what_the_loops_say(with_answer(out=lambda x, p: x[:, :4]), problem)
    with pytest.raises(LawBroken, match="nan"):
        is_what_the_loops_say(with_answer(out=lambda x, p: x * np.nan), problem)


def test_a_candidate_without_gradients_is_judged_by_its_output():
    problem = attention_problem((2, 4, 3), (1, 4, 3), (1, 4, 5), mask=np.tri(4) > 0)
    forward_only = variant(lambda p: Answer(naive(p, backward=False).out))
    for name, law in LAWS.items():
        if name not in laws.OF_GRADIENTS:
            law(forward_only, problem)
    with pytest.raises(LawBroken):
        LAWS["weights_sum_to_one_or_nothing"](variant(lambda p: Answer(2 * naive(p, backward=False).out)), problem)


def test_shares_memory():
    x = np.zeros((3, 4))
    assert shares_memory(x, x[1:])
    assert not shares_memory(x, x.copy())
    assert not shares_memory(x, x[:0])
    torch = pytest.importorskip("torch")
    y = torch.zeros(3, 4)
    assert shares_memory(y, y[1:])
    assert not shares_memory(y, y.clone())
    strict = pytest.importorskip("array_api_strict")
    z = strict.zeros((3, 4))
    assert shares_memory(z, z[1:, :])
    assert not shares_memory(z, strict.asarray(z, copy=True))


def test_hypothesis_is_imported_only_for_strategies():
    code = """
import sys, npattn.testing
assert "hypothesis" not in sys.modules
assert callable(npattn.testing.check_backward)
assert "hypothesis" not in sys.modules
npattn.testing.attention_problems
assert "hypothesis" in sys.modules
try:
    npattn.testing.nothing_of_this_name
except AttributeError as error:
    assert "nothing_of_this_name" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
