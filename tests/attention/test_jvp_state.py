"""Tangents: what may not influence them, precisions, libraries, memory, threads, errors."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npattn import (
    AttentionGrads,
    AttentionTangents,
    Dropout,
    alibi_bias,
    attention_backward_backward,
    attention_backward_jvp,
    attention_forward,
    attention_hvp,
    attention_jvp,
    causal_mask,
    set_num_threads,
)
from npattn._arrays.namespace import array_device, dtype_name
from npattn._attention.tiling import forced
from npattn.testing.inputs import bias_with
from npattn.testing.layouts import LAYOUTS, laid_out
from npattn.testing.libraries import NAMES, Unavailable, asarray, open_library
from npattn.testing.parts import whole
from npattn.testing.problems import Alibi, attention_problem
from npattn.testing.state_laws import shares_memory
from npattn.testing.strategies import attention_problems
from tests.attention.every_option import EVERY_OPTION
from tests.attention.paths import PATHS, no_problem_too_small
from tests.attention.peaks import peak
from tests.attention.tangent_laws import agree, agrees_to_rounding, rounding
from tests.attention.tangent_matrices import Results, matrix_tangents, tangent_scales
from tests.attention.tangents import attention_tangents, directions, in_library, ours, tangents_of
from tests.attention.test_threads import LARGE

paths = st.sampled_from(sorted(PATHS))
every_path = pytest.mark.parametrize("path", PATHS)


def written_out(problem):
    """The problem with nothing broadcast, and tangents for it; those of a lazy bias written out too."""
    full = whole(problem)
    return full, directions(full)


def assert_same(got, expected, where=None):
    for name, x in expected.given().items():
        y = getattr(got, name)
        np.testing.assert_array_equal(y if where is None else y[where], x if where is None else x[where], err_msg=name)


def backward_backward(problem, along, sizes=None):
    """With the tangents as cotangents of the gradients."""
    inputs = problem.inputs()
    with contextlib.nullcontext() if sizes is None else forced(sizes):
        _, saved = attention_forward(inputs.q, inputs.k, inputs.v, **inputs.options)
        return attention_backward_backward(AttentionGrads(*attention_tangents(along)), inputs.dout, saved, dlse=inputs.dlse)


# What may not be seen --------------------------------------------------------------------------------------------------------


@given(problem=attention_problems(), path=paths)
@settings(max_examples=60)
def test_poison_stays_out(problem, path):
    """NaN and infinities at keys that no query sees and at queries that see no key, in inputs and tangents, change nothing."""
    full, along = written_out(problem)
    seen, rng = full.visible(), full.rng("poison")
    group = full.heads // full.kv_heads
    dead_keys = ~seen.any(axis=-2).reshape(*full.lead, full.kv_heads, group, full.pairs[-1]).any(axis=-2)[..., None]
    dead_rows = ~seen.any(axis=-1)[..., None]

    def poisoned(x, where):
        return np.where(where, rng.choice([np.nan, np.inf, -np.inf], size=x.shape), x)

    dead = {"q": dead_rows, "k": dead_keys, "v": dead_keys, "dout": dead_rows, "bias": ~seen}
    if full.sinks is None and full.dlse is not None:
        dead["dlse"] = dead_rows[..., 0]
    changed = full.replace(**{name: poisoned(getattr(full, name), where) for name, where in dead.items() if name != "bias"})
    wrong = {name: poisoned(t, dead[name]) if name in dead else t for name, t in along.items()}
    assert_same(ours(changed, wrong, sizes=PATHS[path]), ours(full, along, sizes=PATHS[path]))


@given(problem=attention_problems(), path=paths)
@settings(max_examples=60)
def test_what_a_query_may_not_see_changes_no_bit(problem, path):
    """Finite numbers, even such as overflow, at hidden keys and their tangents."""
    full, along = written_out(problem)
    rng, seen = full.rng("unseen"), full.visible()
    row = tuple(int(rng.integers(n)) for n in full.pairs[:-1])
    *batch, head, _ = row
    hidden = np.flatnonzero(~seen[row])
    at = (*batch, head // (full.heads // full.kv_heads))
    expected = ours(full, along, sizes=PATHS[path])
    for size in (1.0, 1.5e308):
        k, v, tk, tv = (x.copy() for x in (full.k, full.v, along["k"], along["v"]))
        for x in (k, v, tk, tv):
            x[at][hidden] = size * rng.uniform(-1, 1, (len(hidden), x.shape[-1]))
        got = ours(full.replace(k=k, v=v), {**along, "k": tk, "v": tv}, sizes=PATHS[path])
        for name in ("tout", "tlse", "tdq"):
            np.testing.assert_array_equal(getattr(got, name)[row], getattr(expected, name)[row], err_msg=name)


@every_path
def test_rows_that_see_nothing_have_no_tangents(path):
    problem = whole(attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), mask=causal_mask(-2), dlse=True))
    got = ours(problem, directions(problem), sizes=PATHS[path])
    for name in ("tout", "tlse", "tdq"):
        assert (getattr(got, name)[:, :, :2] == 0).all()
    for name in ("tdk", "tdv"):
        assert (getattr(got, name)[:, :, 3:] == 0).all()


@every_path
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_is_zero_whatever_others_see(path, sinks):
    problem = whole(
        attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), mask=causal_mask(-1), sinks=sinks, dropout=Dropout(0.5, 1))
    )
    for name in ("k", "v"):
        for where in ("inputs", "tangents"):
            along = directions(problem)
            x = getattr(problem, name).copy() if where == "inputs" else along[name]
            x[:, :, 0] = np.nan
            here = problem.replace(**{name: x}) if where == "inputs" else problem
            got = ours(here, along, sizes=PATHS[path])
            assert np.isnan(got.tdq).any()
            assert (backward_backward(here, along, PATHS[path]).ddout[:, :, 0] == 0).all()
            assert (got.tout[:, :, 0] == 0).all()
            assert (got.tdq[:, :, 0] == 0).all()
            np.testing.assert_array_equal(got.tlse[:, :, 0], along["sinks"] + np.zeros((2, 2)) if sinks else np.zeros((2, 2)))


@every_path
def test_a_row_that_sees_its_sink_alone_moves_with_it(path):
    problem = whole(attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), mask=causal_mask(-2), dlse=True, sinks=True))
    along = directions(problem)
    got = ours(problem, along, sizes=PATHS[path])
    assert (got.tout[:, :, :2] == 0).all()
    np.testing.assert_array_equal(got.tlse[:, :, :2], np.broadcast_to(along["sinks"][:, None], (2, 2, 2)))


@every_path
def test_a_sink_of_minus_infinity_is_none(path):
    problem = whole(attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), mask=causal_mask(-1), dlse=True))
    along = directions(problem)
    without = ours(problem, along, sizes=PATHS[path])
    with_none = problem.replace(sinks=np.full(2, -np.inf))
    for tsinks in (np.ones(2), np.full(2, np.inf), np.full(2, np.nan)):
        got = ours(with_none, {**along, "sinks": tsinks}, sizes=PATHS[path])
        agree(problem, got._replace(tdsinks=None), without, {name: 1e-13 + 0 * x for name, x in without.given().items()})
        np.testing.assert_array_equal(got.tdsinks, [0, 0])


@every_path
def test_nan_in_a_tangent_of_a_query_stays_in_its_row(path):
    problem = whole(attention_problem((2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2), softcap=2.0, sinks=True))
    along = directions(problem)
    plain = ours(problem, along, sizes=PATHS[path])
    along["q"][1, 0, 3, 2] = np.nan
    got = ours(problem, along, sizes=PATHS[path])
    for name in ("tout", "tdq"):
        assert np.isnan(getattr(got, name)[1, 0, 3]).all()
    others = (slice(None), slice(None), [0, 1, 2, 4])
    for name in ("tout", "tlse", "tdq"):
        np.testing.assert_array_equal(getattr(got, name)[others], getattr(plain, name)[others])


# Precisions, libraries -------------------------------------------------------------------------------------------------------


@given(problem=attention_problems(dtypes=["float32"], H=16, ranks=[3]), path=paths)
@settings(max_examples=25)
def test_float32_is_as_precise_as_the_naive_formula(problem, path):
    along = directions(problem)
    got = ours(problem, along, sizes=PATHS[path])
    exact, naive, sizes = (
        matrix_tangents(problem, along),
        matrix_tangents(problem, along, dtype=np.float32),
        tangent_scales(problem, along),
    )
    eps = float(np.finfo(np.float32).eps)
    for name, x in exact.given().items():
        bound = 2 * np.abs(getattr(naive, name) - x).max(initial=0) + 2 * eps * getattr(sizes, name)
        assert getattr(got, name).dtype == np.float32
        assert (np.abs(getattr(got, name) - x) <= bound).all(), name


@given(problem=attention_problems(dtypes=["float16"]), path=paths)
@example(
    problem=attention_problem((1, 1, 1, 1, 1), (1, 1, 1, 4, 1), (1, 1, 1, 4, 1), seed=1, dtype="float16", bias=Alibi(1)),
    path="as chosen",
)
@settings(max_examples=25)
def test_float16_is_rounded_once(problem, path):
    along = directions(problem)
    got, exact, sizes = (
        ours(problem, along, sizes=PATHS[path]),
        matrix_tangents(problem, along),
        rounding(problem, along, np.float32),
    )
    for name, x in exact.given().items():
        y = getattr(got, name)
        assert y.dtype == (np.float32 if name == "tlse" else np.float16)
        half = 0 if name == "tlse" else 2.0**-11 * np.abs(x) + 2.0**-24
        wrong = np.abs(y.astype(np.float64) - x) > half + getattr(sizes, name)
        assert not wrong[np.isfinite(y)].any(), name
        assert (np.abs(x)[~np.isfinite(y)] > 6e4).all(), name


def test_bfloat16():
    library = open_library_or_skip("torch")
    inputs, along = in_library(EVERY_OPTION["bare"], directions(EVERY_OPTION["bare"]), library)
    xp = library.xp
    half = inputs._replace(**{name: xp.astype(getattr(inputs, name), xp.bfloat16) for name in ("q", "k", "v", "dout")})
    got = tangents_of(half, {name: xp.astype(t, xp.bfloat16) for name, t in along.items()})
    exact = tangents_of(inputs, along)
    for name, x in exact.given().items():
        y = getattr(got, name)
        assert dtype_name(y.dtype) == ("float32" if name == "tlse" else "bfloat16")
        assert float(xp.max(xp.abs(xp.astype(y, xp.float64) - x))) < 0.1 * float(xp.max(xp.abs(x)))


def open_library_or_skip(name):
    return open_library(name) if name == "numpy" else pytest.importorskip(name) and open_library(name)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("jax")])  # it compiles, and is tested below
@pytest.mark.parametrize("case", EVERY_OPTION)
def test_every_library(case, name):
    try:
        library = open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    problem = EVERY_OPTION[case]
    along = directions(problem)
    agrees_to_rounding(lambda p, t: ours(p, t, library=library), problem, along, ours(problem, along))
    inputs, given_tangents = in_library(problem, along, library)
    with library.active():
        for x in tangents_of(inputs, given_tangents).given().values():
            assert array_device(x) == array_device(inputs.q)
            assert type(x) is type(inputs.q)


@pytest.mark.parametrize(
    "case",
    ["causal, grouped, capped, with a sink", pytest.param("hiding bias, dropout, broadcast values", marks=pytest.mark.slow)],
)
def test_in_a_jit(case):
    jax = pytest.importorskip("jax")
    library = open_library("jax")
    problem = EVERY_OPTION[case]
    along = directions(problem)
    inputs, given_tangents = in_library(problem, along, library)

    @jax.jit
    def all_at_once(arrays, t):
        options = {**inputs.options, **{name: arrays[name] for name in ("sinks",) if name in arrays}}
        if "bias" in arrays:
            options["bias"] = bias_with(problem.bias, arrays["bias"])
        here = inputs._replace(**{name: arrays.get(name) for name in ("q", "k", "v", "dout", "dlse")}, options=options)
        return tuple(tangents_of(here, t))

    got = Results(*(None if x is None else np.asarray(x) for x in all_at_once(inputs.arrays(), given_tangents)))
    agrees_to_rounding(lambda p, t: got, problem, along, ours(problem, along))


# Memory, threads -------------------------------------------------------------------------------------------------------------


@given(
    problem=attention_problems(layouts=LAYOUTS), layouts=st.lists(st.sampled_from(LAYOUTS), min_size=7, max_size=7), path=paths
)
@settings(max_examples=40)
def test_memory_layout_does_not_matter(problem, layouts, path):
    along = {
        name: laid_out(t, layout)
        for (name, t), layout in zip(directions(problem).items(), itertools.cycle(layouts), strict=False)
    }
    plain = {name: np.array(t, dtype=t.dtype.newbyteorder("=")) for name, t in along.items()}
    agrees_to_rounding(lambda p, t: ours(p, t, sizes=PATHS[path]), problem, along, matrix_tangents(problem, plain))


@every_path
@pytest.mark.parametrize("case", EVERY_OPTION)
def test_nothing_is_written_or_shared(case, path):
    problem = EVERY_OPTION[case]
    along = directions(problem)
    for t in along.values():
        t.flags.writeable = False
    inputs = problem.inputs()
    with contextlib.nullcontext() if PATHS[path] is None else forced(PATHS[path]):
        got = Results(*tangents_of(inputs, along))
    second = backward_backward(problem, along, PATHS[path])
    results = [*got.given().values(), *(x for x in second if x is not None)]
    others = [*inputs.arrays().values(), *along.values()]
    for x, y in itertools.chain(itertools.product(results, others), itertools.combinations(results, 2)):
        assert not shares_memory(x, y)
    assert all(x.flags.writeable for x in results)


@pytest.mark.parametrize("kind", LARGE)
def test_the_same_bits_from_any_number_of_threads(kind):
    problem = attention_problem((2, 4, 300, 8), (2, 2, 300, 8), (2, 2, 300, 8), **LARGE[kind])
    along, found = directions(problem), []
    try:
        for count in (1, 2, 5):
            set_num_threads(count)
            with no_problem_too_small():
                found.append(ours(problem, along))
    finally:
        set_num_threads(None)
    for other in found[1:]:
        assert_same(other, found[0])


def extra_memory(f):
    """What a call has at most, beside what it returns."""
    f()
    most, results = peak(f)
    return most - sum(x.nbytes for x in results if x is not None)


def of_second_order(length, heads, size):
    rng = np.random.default_rng(0)
    q, k, v, dout, tq, tk, tv, tdout = (rng.standard_normal((1, heads, length, size), dtype=np.float32) for _ in range(8))
    t = AttentionTangents(tq, tk, tv)
    _, saved = attention_forward(q, k, v)
    return lambda: attention_jvp(q, k, v, t), lambda: attention_backward_jvp(dout, saved, t, tdout=tdout)


def test_memory_does_not_grow_with_the_number_of_pairs():
    for half, whole_length in zip(of_second_order(2048, 1, 4), of_second_order(4096, 1, 4), strict=True):
        assert extra_memory(whole_length) < 1.2 * extra_memory(half)


@pytest.mark.night
@pytest.mark.slow
def test_96_mib_are_enough():
    for f in of_second_order(8192, 8, 64):
        assert extra_memory(f) <= 96 << 20


# Errors ----------------------------------------------------------------------------------------------------------------------

Q, K, V = np.ones((2, 3, 5)), np.ones((2, 4, 5)), np.ones((2, 4, 6))


def jvp(t, **options):
    return lambda: attention_jvp(Q, K, V, t, **options)


def second(function, t=AttentionTangents(), dout=np.ones((2, 3, 6)), **given_options):  # noqa: B008 - it is frozen
    _, saved = attention_forward(Q, K, V)
    return lambda: (
        function(t, dout, saved) if function is attention_backward_backward else function(dout, saved, t, **given_options)
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (jvp(AttentionTangents(tq=Q[:, 0])), ValueError, r"attention_jvp: tq must have shape \(2, 3, 5\) as q has, got \(2, 5\)"),
        (jvp(AttentionTangents(tk=K.astype("f4"))), TypeError, "attention_jvp: tk must be float64 as k is, got float32"),
        (jvp(AttentionTangents(tbias=np.ones((3, 4)))), ValueError, "attention_jvp: tbias is given, but there is no bias"),
        (jvp(AttentionTangents(tsinks=np.ones(2))), ValueError, "attention_jvp: tsinks is given, but there is no sinks"),
        (
            jvp(AttentionTangents(tbias=np.ones((3, 4))), bias=np.ones(4)),
            ValueError,
            r"attention_jvp: tbias must have shape \(4,\) as bias has, got \(3, 4\)",
        ),
        (
            jvp(AttentionTangents(tbias=np.ones(1)), bias=alibi_bias(np.ones(2))),
            ValueError,
            r"attention_jvp: tbias must have shape \(2,\) as bias has, got \(1,\)",
        ),
        (jvp(AttentionTangents(), bias=np.ones((3, 3))), ValueError, "attention_jvp: bias must broadcast to"),
        (
            second(attention_backward_jvp, dout=V),
            ValueError,
            r"attention_backward_jvp: dout must have shape \(..., H, T, E\) = \(2, 3, 6\), got",
        ),
        (
            second(attention_backward_jvp, tdout=np.ones((2, 3, 6), "f4")),
            TypeError,
            "attention_backward_jvp: tdout must be float64, got float32",
        ),
        (
            second(attention_backward_jvp, tdlse=np.ones((3, 2))),
            ValueError,
            r"attention_backward_jvp: tdlse must have shape \(..., H, T\) = \(2, 3\), got \(3, 2\)",
        ),
        (second(attention_hvp, AttentionTangents(tv=K)), ValueError, "attention_hvp: tv must have shape"),
        (
            second(attention_backward_backward, AttentionGrads(None, None, None, None, np.ones(2))),
            ValueError,
            "attention_backward_backward: tsinks is given, but there is no sinks",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_arrays_of_two_libraries():
    strict = open_library("strict")
    with pytest.raises(TypeError, match="attention_jvp: q is an array of numpy but tq is one of array_api_strict"):
        attention_jvp(Q, K, V, AttentionTangents(tq=asarray(Q, strict)))


def test_reprs_are_shapes():
    t = AttentionTangents(tq=Q)
    assert repr(t) == "AttentionTangents(tq=float64[2, 3, 5], tk=None, tv=None, tbias=None, tsinks=None)"
    _, saved = attention_forward(Q, K, V, dropout=Dropout(0.1, 0))
    grads = attention_backward_backward(AttentionGrads(Q, None, None, None, None), np.ones((2, 3, 6)), saved)
    assert repr(grads).startswith("AttentionBackwardGrads(ddout=float64[2, 3, 6], ddlse=None, dq=float64[2, 3, 5]")
