"""`compare`: exact, close, wrong, and where."""

from __future__ import annotations

import numpy as np
import pytest

from npattn import attention_backward, attention_forward, attention_steps, attention_steps_backward, causal_mask
from npattn.testing import compare

q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 3, 5))
OUT, SAVED = attention_forward(q, k, v, mask=causal_mask())
BACKWARD = attention_steps_backward(dout, SAVED)


def rows(found):
    return {row.name: row for row in found.rows}


def test_the_order_is_that_of_the_computation():
    assert [row.name for row in compare({}, attention_steps(SAVED)).rows] == [
        "scores", "capped", "biased", "weights", "dropped", "out",
    ]  # fmt: skip
    assert [row.name for row in compare({}, BACKWARD).rows] == [
        "dv", "ddropped", "dweights", "dbiased", "dcapped", "dscores", "dq", "dk",
    ]  # fmt: skip
    assert [row.name for row in compare({}, attention_backward(dout, SAVED)).rows] == ["dq", "dk", "dv"]
    assert [row.name for row in compare({}, {"layer": {"w": q}, "dx": k}).rows] == ["layer.w", "dx"]


def test_verdicts():
    found = compare({"dq": BACKWARD.dq, "dk": BACKWARD.dk * (1 + 1e-9), "dv": BACKWARD.dv + 1, "dx": q}, BACKWARD)
    assert {name: row.verdict for name, row in rows(found).items() if row.verdict != "not there"} == {
        "dv": "wrong",
        "dq": "exact",
        "dk": "close",
    }
    assert found.first_wrong == "dv"
    assert not found.right
    assert found.unknown == ("dx",)
    assert str(found).splitlines()[-1] == "no such name: dx"
    assert rows(found)["dk"].error == pytest.approx(1e-9, rel=1e-3)


def test_all_right_is_right_and_nothing_is_not():
    assert compare(BACKWARD, BACKWARD).right
    assert not compare({}, BACKWARD).right
    assert compare({"dq": BACKWARD.dq + 1e-3}, BACKWARD, rtol=1).right


def test_where_it_differs():
    wrong = BACKWARD.dk.copy()
    wrong[1, 2, 3] = 100
    row = rows(compare({"dk": wrong}, BACKWARD))["dk"]
    assert row.where.startswith("[1, 2, 3]: 100, not ")
    assert rows(compare({"dk": wrong[0]}, BACKWARD))["dk"].where == "its shape is (3, 5), not (2, 3, 5)"
    wrong[0, 0, 0] = np.nan
    assert rows(compare({"dk": wrong}, BACKWARD))["dk"].where.startswith("[0, 0, 0]: nan, not ")


@pytest.mark.parametrize(
    ("slip", "hint"),
    [
        (lambda x: -x, "(its sign is wrong)"),
        (lambda x: np.swapaxes(x, -1, -2), "(it is transposed)"),
        (lambda x: 2 * x, "(all of it is 2 times what it should be)"),
        (lambda x: x + 1, ""),
    ],
)
def test_likely_slips_are_named(slip, hint):
    where = rows(compare({"dq": slip(BACKWARD.dq)}, BACKWARD))["dq"].where
    assert where.endswith(hint)
    assert ("(" in where) == bool(hint)


def test_infinities_and_zeros():
    steps = attention_steps(SAVED)
    assert rows(compare({"biased": steps.biased}, steps))["biased"].verdict == "exact"
    assert rows(compare({"biased": np.where(np.isinf(steps.biased), -1e9, steps.biased)}, steps))["biased"].verdict == "wrong"
    zeros = {"x": np.zeros((2, 2))}
    assert compare({"x": np.full((2, 2), 1e-3)}, zeros).first_wrong == "x"
    assert compare({"x": 1.0}, {"x": np.asarray(2.0)}).first_wrong == "x"
