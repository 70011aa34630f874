"""The time of a token: what is measured computes the same, and does not grow as it would without a cache."""

from __future__ import annotations

import time

import numpy as np
import pytest

from npattn._commands.bench_generate import Row, Sizes, check_same, measure, table, with_npattn
from npattn.models import LanguageModelParams

SMALL = Sizes(vocabulary=11, width=16, heads=2, blocks=2, lengths=(3, 9))


def test_both_ways_agree_and_are_timed():
    rows = measure(SMALL, 1, rounds=1, tokens=2)
    assert [row.length for row in rows] == [3, 9]
    assert all(seconds > 0 for row in rows for seconds in row.seconds.values())
    assert len(table(rows, SMALL)) == 4


def test_logits_that_differ_are_an_error():
    with pytest.raises(ValueError, match="logits differ by 1.0e-01"):
        check_same([np.ones(3), np.asarray([1.0, 1.1, 1.0])])


def test_the_table():
    lines = table([Row(64, {"npattn": 0.002, "torch": 0.001})], Sizes())
    assert lines[-1].split() == ["64", "2.000", "1.000", "2.00"]
    assert table([Row(64, {"npattn": 0.002})], Sizes())[-1].split() == ["64", "2.000"]


def test_a_token_takes_time_in_proportion_to_what_it_sees():
    """Sixteen times the length: far less than sixteen times the time, where the square would be 256 times."""
    params = LanguageModelParams.init(
        np.random.default_rng(0), vocabulary=11, blocks=1, width=64, heads=4, context=4200, dtype=np.float32
    )
    step = with_npattn(params, 4200)

    def seconds(position: int) -> float:
        times = []
        for n in range(9):
            started = time.process_time()
            for _ in range(5):
                step(1, position + n)
            times.append(time.process_time() - started)
        return min(times)

    seconds(0)
    assert seconds(4096) < 16 * seconds(256)
