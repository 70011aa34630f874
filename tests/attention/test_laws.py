"""npattn keeps every law: on every path of the tiling, library and precision, however arrays lie in memory."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from npattn._attention.tiling import Sizes
from npattn.testing.candidates import npattn_candidate
from npattn.testing.laws import LAWS, ORDINARY
from npattn.testing.layouts import LAYOUTS
from npattn.testing.libraries import Unavailable, open_library
from npattn.testing.problems import EXTREMES, attention_problem
from npattn.testing.strategies import attention_problems
from tests.attention.every_option import EVERY_OPTION
from tests.attention.paths import CANDIDATES

OURS = CANDIDATES["as chosen"]
OTHER_PATHS = [path for path in CANDIDATES if path != "as chosen"]

every_law = pytest.mark.parametrize("name", LAWS)


def slow_paths(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def hold(name, candidates, examples, **drawn):
    """A law on random problems, with draws of its own: without a seed, every law would see the same problems."""

    @settings(max_examples=examples)
    @given(problem=attention_problems(**drawn), candidate=st.sampled_from(candidates))
    def holds(problem, candidate):
        LAWS[name](candidate, problem)

    if settings().derandomize:
        holds = seed(zlib.crc32(name.encode()))(holds)
    holds()


@every_law
@pytest.mark.parametrize("path", ["as chosen", "scratch, many heads", *slow_paths("scratch", "scratch, kept", "plain, kept")])
def test_every_option(path, name):
    for problem in EVERY_OPTION.values():
        LAWS[name](CANDIDATES[path], problem)


@every_law
def test_numpy(name):
    hold(name, [OURS], 25, layouts=LAYOUTS, empty=True)


@every_law
def test_every_path(name):
    hold(name, [CANDIDATES[path] for path in OTHER_PATHS], 15, layouts=LAYOUTS, empty=True)


@every_law
def test_lower_precisions(name):
    hold(name, [OURS], 8, dtypes=["float32", "float16"], max_side=8)


def test_precision_of_many_heads():
    """Enough of them for the gradient of the sinks to be judged."""
    hold("is_as_precise_as_the_naive_formula", [OURS], 20, dtypes=["float32", "float16"], H=16, ranks=[3])


@pytest.mark.parametrize("name", [name for name in LAWS if name not in ORDINARY])
def test_extreme_numbers(name):
    hold(name, [OURS], 8, extreme=EXTREMES, dtypes=["float64", "float32"])


def test_numbers_up_to_the_largest():
    """This problem's seed makes a law draw from nearly all that float64 has."""
    problem = attention_problem((1, 2, 1, 0), (1, 2, 0, 0), (1, 2, 0, 0), seed=989, values="integers")
    LAWS["unseen_keys_leave_no_trace"](OURS, problem)


@every_law
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.night)])
@pytest.mark.slow
def test_blocks_of_keys(plain, name):
    """Long enough for masks to be looked at in blocks, and for runs of keys that nobody sees to be cut out."""
    sizes = Sizes(rows=16, keys=40, pairs=16 * 40 * 2, plain=plain, keep=False)
    hold(name, [npattn_candidate(sizes=sizes)], 2, T=(33, 70), S=(65, 97, 100), D=(1, 8), E=(1, 8), ranks=(2, 3, 4), max_side=4)


@pytest.fixture(scope="module", params=["strict", "strict-bare", "strict-device1", "torch", "cupy"])
def elsewhere(request):
    """The other libraries; JAX, which compiles every shape anew, has a file of its own."""
    try:
        return npattn_candidate(open_library(request.param))
    except Unavailable as reason:
        pytest.skip(str(reason))


@every_law
def test_other_libraries(elsewhere, name):
    hold(name, [elsewhere], 4, empty=True, max_side=4)


@every_law
@pytest.mark.night
@pytest.mark.slow
def test_many_problems(name):
    hold(name, list(CANDIDATES.values()), 500, empty=True, layouts=LAYOUTS)
