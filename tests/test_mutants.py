"""Can the tests fail? Faults in formula, masks, tiling, multi-head attention, one at a time: seconds of laws catch each."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, NO_START, killer, run_all


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_its_place_is_there(mutant):
    compile(mutant.source(), mutant.path, "exec")


def test_there_are_many_and_each_is_another():
    assert len(MUTANTS) >= 40
    assert len({(mutant.module, mutant.old, mutant.new) for mutant in MUTANTS}) == len({m.what for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.night
@pytest.mark.slow
def test_without_a_fault_nothing_is_caught():
    assert killer(None) == ""


@pytest.mark.night
@pytest.mark.slow
def test_every_mutant_is_killed(capsys):
    found = run_all(range(len(MUTANTS)))
    with capsys.disabled():
        print(f"\nmutants: killed {sum(map(bool, found.values()))} / {len(MUTANTS)}")
    assert [MUTANTS[n].what for n, by in found.items() if not by] == []
    assert [by for by in found.values() if by.startswith(NO_START)] == []
