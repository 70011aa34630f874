"""npattn keeps every law: on every path of the tiling, library and precision, however arrays lie in memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npattn.testing.candidates import npattn_candidate
from npattn.testing.laws import LAWS, ORDINARY, is_as_precise_as_the_naive_formula
from npattn.testing.layouts import LAYOUTS
from npattn.testing.libraries import Unavailable, open_library
from npattn.testing.problems import EXTREMES
from npattn.testing.strategies import attention_problems
from tests.attention.paths import CANDIDATES

named = pytest.mark.parametrize("name", LAWS)


@named
@given(problem=attention_problems(layouts=LAYOUTS, empty=True))
@settings(max_examples=35)
def test_numpy(name, problem):
    LAWS[name](CANDIDATES["as chosen"], problem)


@named
@given(problem=attention_problems(layouts=LAYOUTS, empty=True), path=st.sampled_from([p for p in CANDIDATES if p != "as chosen"]))
@settings(max_examples=20)
def test_every_path(name, problem, path):
    LAWS[name](CANDIDATES[path], problem)


@named
@given(problem=attention_problems(dtypes=["float32", "float16"], max_side=8))
@settings(max_examples=12)
def test_lower_precisions(name, problem):
    LAWS[name](CANDIDATES["as chosen"], problem)


@given(problem=attention_problems(dtypes=["float32", "float16"], H=16, ranks=[3]))
@settings(max_examples=20)
def test_precision_of_many_heads(problem):
    """Enough of them for the gradient of the sinks to be judged."""
    is_as_precise_as_the_naive_formula(CANDIDATES["as chosen"], problem)


@pytest.mark.parametrize("name", [name for name in LAWS if name not in ORDINARY])
@given(problem=attention_problems(extreme=EXTREMES, dtypes=["float64", "float32"]))
@settings(max_examples=12)
def test_extreme_numbers(name, problem):
    LAWS[name](CANDIDATES["as chosen"], problem)


@named
@pytest.mark.parametrize("path", ["scratch", "plain"])
@given(problem=attention_problems(T=(33, 70), S=(65, 97, 100), D=(1, 8), E=(1, 8), ranks=(2, 3, 4), max_side=4))
@settings(max_examples=4)
@pytest.mark.slow
def test_blocks_of_keys(path, name, problem):
    """Long enough for masks to be looked at in blocks, and for runs of keys that nobody sees to be cut out."""
    LAWS[name](CANDIDATES[path], problem)


@pytest.fixture(scope="module", params=["strict", "strict-bare", "strict-device1", "torch", "cupy"])
def elsewhere(request):
    """The other libraries; JAX, which compiles every shape anew, has a file of its own."""
    try:
        library = open_library(request.param)
    except Unavailable as reason:
        pytest.skip(str(reason))
    return npattn_candidate(library)


@named
def test_other_libraries(elsewhere, name):
    @given(problem=attention_problems(empty=True, max_side=4))
    @settings(max_examples=4)
    def holds(problem):
        LAWS[name](elsewhere, problem)

    holds()


@given(problem=attention_problems(empty=True, layouts=LAYOUTS))
@settings(max_examples=60)
@pytest.mark.slow
def test_every_law_at_once(problem):
    for name, law in LAWS.items():
        for candidate in CANDIDATES.values():
            law(candidate, problem)
        assert name == law.__name__
