"""The example that tests attentions with the kit: the right ones pass, every wrong one is caught by the law that names it."""

from __future__ import annotations

import pytest

from examples import test_your_own_attention as example
from examples.test_your_own_attention import test_numpy

__all__ = ["test_numpy", "test_torch"]  # collected here too
test_torch = pytest.mark.slow(example.test_torch)

QUICK = ("the scale comes twice", "query head h reads key head h % K")


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in QUICK else [pytest.mark.slow]) for fault in example.WRONG]
)
def test_every_wrong_one_is_caught(fault):
    example.test_wrong_ones_are_caught(fault)


def test_there_are_many():
    assert len(example.WRONG) >= 25
    assert len({law for *_, law in example.WRONG.values()}) >= 15
