"""`check_attention`: what a candidate is given, what its failures say, and which laws are asked."""

from __future__ import annotations

import unittest
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import npattn
from npattn import Dropout, causal_mask, causal_mask_end, length_mask, window_mask
from npattn.testing import (
    LAWS,
    CandidateRaised,
    LawBroken,
    Unavailable,
    attention_checks,
    attention_problem,
    check_attention,
    multiples_of,
    naive,
)
from npattn.testing.check import CATCH_ALL, ORDER
from npattn.testing.libraries import open_library, to_numpy
from npattn.testing.plain import OPTIONS, SHAPES, Takes, Unsupported, plain_candidate
from npattn.testing.precision import coarsest, float_info, to_bfloat16


def ours(q, k, v, *, lengths=None, causal=False, causal_end=False, window=None, mask=None, factors=None, **options):
    """npattn's attention in plain terms; where dropout comes as factors, they are mixed in by hand."""
    masks = [m for m, given in ((causal_mask(), causal), (causal_mask_end(), causal_end)) if given]
    masks += [] if window is None else [window_mask(*window)]
    masks += [] if lengths is None else [length_mask(lengths)]
    whole = None if mask is None else mask
    for m in masks:
        whole = m if whole is None else whole & m
    out, saved = npattn.attention_forward(q, k, v, mask=whole, **options)
    return out, saved.lse


def ours_vjp(dout, q, k, v, *, dlse=None, lengths=None, causal=False, causal_end=False, window=None, mask=None, **options):
    masks = [m for m, given in ((causal_mask(), causal), (causal_mask_end(), causal_end)) if given]
    masks += [] if window is None else [window_mask(*window)]
    masks += [] if lengths is None else [length_mask(lengths)]
    whole = None if mask is None else mask
    for m in masks:
        whole = m if whole is None else whole & m
    out, saved = npattn.attention_forward(q, k, v, mask=whole, **options)
    return {"out": out, "lse": saved.lse, **npattn.attention_backward(dout, saved, dlse=dlse)._asdict()}


EVERYTHING = [option for option in (*OPTIONS, *SHAPES) if option != "factors"]


def test_npattn_passes_with_every_option():
    held = check_attention(ours, vjp=ours_vjp, options=EVERYTHING, ranks=(2, 3, 4, 5), examples=5)
    assert set(held) == set(LAWS) - {"is_as_precise_as_the_naive_formula"}
    assert min(held.values()) > 0


@pytest.mark.parametrize(
    ("dtype", "lib"), [("float16", "numpy"), ("bfloat16", "numpy"), ("bfloat16", "torch"), ("float32", "strict")]
)
def test_lower_precisions(dtype, lib):
    """NumPy has no bfloat16: it gets its numbers in float32, and what it returns is not rounded more than those."""
    try:
        open_library(lib)
    except Unavailable as reason:
        pytest.skip(str(reason))
    seen = set()

    def candidate(q, k, v, **options):
        seen.add(str(q.dtype).rpartition(".")[2])
        if (dtype, lib) == ("bfloat16", "numpy"):
            np.testing.assert_array_equal(q, to_bfloat16(q))
        return ours(q, k, v, **options)[0]

    check_attention(candidate, options=("causal", "scale", "dead rows"), dtype=dtype, library=lib, examples=3)
    assert seen == {"float32" if (dtype, lib) == ("bfloat16", "numpy") else dtype}


def rounding(precision):
    """Weights and values rounded before they meet, as on tensor cores."""

    def candidate(q, k, v):
        scores = (q @ k.swapaxes(-1, -2)) * np.float32(q.shape[-1] ** -0.5)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        weights = e / e.sum(-1, keepdims=True)
        return to_bfloat16(weights) @ to_bfloat16(v)

    return candidate


def test_products_of_a_coarser_precision_must_be_declared():
    only = ["is_what_the_loops_say"]
    with pytest.raises(LawBroken, match="is_what_the_loops_say"):
        check_attention(rounding("bfloat16"), dtype="float32", only=only)
    check_attention(rounding("bfloat16"), dtype="float32", products="bfloat16", only=only)
    with pytest.raises(LawBroken, match="is_what_the_loops_say"):
        check_attention(
            lambda q, k, v: rounding("bfloat16")(q, k, v) * np.float32(1.2), dtype="float32", products="bfloat16", only=only
        )


def test_a_tolerance_multiplies_the_bounds():
    def off(q, k, v):
        return ours(q, k, v)[0] * (1 + 1e-12)

    only = ["is_what_the_loops_say"]
    with pytest.raises(LawBroken):
        check_attention(off, only=only)
    check_attention(off, only=only, tolerance=1000)


# What a candidate is given ---------------------------------------------------------------------------------------------------


def given(problem, *options, ranks=(4,), **changes):
    """What a candidate that takes these options is called with."""
    calls = []

    def candidate(q, k, v, **options):
        calls.append(((q, k, v), options))
        return np.zeros((*q.shape[:-1], v.shape[-1]))

    takes = Takes(frozenset(options), ranks, open_library("numpy"), "float64", layouts=False)
    plain_candidate("mine", candidate, None, takes._replace(**changes)).run(problem, False)
    return calls[0]


def problem(*shapes, **options):
    q, k, v = shapes or ((2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 6))
    return attention_problem(q, k, v, **options)


@pytest.mark.parametrize(
    ("mask", "takes", "expected"),
    [
        (causal_mask(), ["causal", "mask"], {"causal": True}),
        (causal_mask_end(), ["causal", "causal_end"], {"causal_end": True}),
        (causal_mask(1), ["causal", "causal_end"], {"causal_end": True}),  # the same, since S = T + 1
        (window_mask(1, 0), ["window"], {"window": (1, 0)}),
        (window_mask(None, 1), ["window"], {"window": (None, 1)}),
        (window_mask(2, 1) & window_mask(1, 3), ["window"], {"window": (1, 1)}),
        (length_mask([5, 2]), ["lengths"], {"lengths": [5, 2]}),
        (causal_mask() & length_mask([1, 3]), ["causal", "lengths"], {"causal": True, "lengths": [1, 3]}),
        (window_mask(1, 1) & length_mask([1, 3]), ["window", "lengths"], {"window": (1, 1), "lengths": [1, 3]}),
        (np.tri(4, 5) > 0, ["causal"], {"causal": True}),
    ],
)
def test_masks_arrive_as_plain_values(mask, takes, expected):
    _, options = given(problem(mask=mask), *takes, "dead rows")
    assert set(options) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(np.array(options[name], dtype=object), np.array(value, dtype=object))


def test_a_dense_mask_arrives_whole():
    _, options = given(problem(mask=np.tri(4, 5) > 0), "causal", "mask")
    np.testing.assert_array_equal(options["mask"], np.broadcast_to(np.tri(4, 5) > 0, (2, 3, 4, 5)))
    _, options = given(problem(mask=causal_mask(1) | causal_mask_end()), "mask")
    assert options["mask"].shape == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mask": causal_mask(-1)}, "mask"),
        ({"mask": window_mask(0, 0)}, "mask"),
        ({"bias": (3, 4, 5)}, "bias"),
        ({"scale": 0.5}, "scale"),
        ({"softcap": 0.5}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"dropout": Dropout(0.5, 0)}, "dropout"),
        ({"dlse": True}, "dlse"),
    ],
)
def test_what_it_does_not_take_is_not_given(options, what):
    with pytest.raises(Unsupported, match=f"does not take: {what}") as caught:
        given(problem(**options), "causal")
    assert caught.value.what == what


def test_hiding_biases_and_dead_rows_are_asked_for():
    with pytest.raises(Unsupported) as caught:
        given(problem(bias=(3, 4, 5), hidden=0.5), "bias", "dead rows")
    assert caught.value.what == "bias"
    hiding = problem(bias=(1, 1), hidden=1.0)
    with pytest.raises(Unsupported) as caught:
        given(hiding, "bias", "hiding bias")
    assert caught.value.what == "bias"
    _, options = given(hiding, "bias", "hiding bias", "dead rows")
    assert options["bias"].shape == (2, 3, 4, 5)
    with pytest.raises(Unsupported) as caught:
        given(problem(mask=length_mask(0)), "lengths")
    assert caught.value.what == "mask"


def test_every_other_option_arrives():
    given_problem = problem(scale=0.5, softcap=2.0, sinks=True, dropout=Dropout(0.5, 0), bias=(3, 1, 5))
    (q, k, v), options = given(given_problem, *OPTIONS)
    assert (options["scale"], options["softcap"]) == (0.5, 2.0)
    np.testing.assert_array_equal(options["sinks"], given_problem.sinks)
    np.testing.assert_array_equal(options["factors"], given_problem.factors())
    np.testing.assert_array_equal(options["bias"], np.broadcast_to(given_problem.bias, (2, 3, 4, 5)))
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        np.testing.assert_array_equal(x, getattr(given_problem, name))
        assert x.flags.writeable
    _, options = given(given_problem, *OPTIONS, "broadcast")
    assert options["bias"].shape == (3, 1, 5)


@pytest.mark.parametrize(
    ("shapes", "ranks", "expected"),
    [
        ([(4, 2), (5, 2), (5, 2)], (4,), (1, 1, 4, 2)),
        ([(4, 2), (5, 2), (5, 2)], (3,), (1, 4, 2)),
        ([(3, 4, 2), (3, 5, 2), (3, 5, 2)], (4,), (1, 3, 4, 2)),
        ([(2, 3, 3, 4, 2), (2, 3, 3, 5, 2), (2, 3, 3, 5, 2)], (4,), (6, 3, 4, 2)),
        ([(2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 2)], (5,), (2, 1, 3, 4, 2)),
        ([(2, 3, 4, 2), (3, 5, 2), (1, 3, 5, 2)], (4,), (2, 3, 4, 2)),
        ([(1, 1, 4, 2), (1, 1, 5, 2), (1, 1, 5, 2)], (2,), (4, 2)),
    ],
)
def test_other_ranks_are_brought_to_one_that_is_taken(shapes, ranks, expected):
    (q, k, v), options = given(problem(*shapes, bias=(4, 5), mask=causal_mask()), "bias", "mask", ranks=ranks)
    assert q.shape == expected
    assert k.shape == v.shape == (*expected[:-2], 5, 2)
    assert options["bias"].shape == options["mask"].shape == (*expected[:-2], 4, 5)
    results = attention_checks(ours, vjp=ours_vjp, options=EVERYTHING, ranks=ranks, only=["batched_is_looped"], examples=5)
    assert results[0].run() > 0


def test_ranks_that_cannot_be_reached():
    for shapes in ([(2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 2)], [(3, 4, 2), (3, 5, 2), (3, 5, 2)]):
        with pytest.raises(Unsupported, match="ranks"):
            given(problem(*shapes), ranks=(2,))


def test_grouped_heads_are_asked_for():
    with pytest.raises(Unsupported, match="grouped"):
        given(problem((4, 3, 2), (2, 3, 2), (2, 3, 2)), ranks=(3,))


def test_results_come_back_in_the_problems_shape():
    takes = Takes(frozenset(EVERYTHING) - {"broadcast"}, (4,), open_library("numpy"), "float64", layouts=False)
    candidate = plain_candidate("ours", ours, ours_vjp, takes)
    for given_problem in (
        problem((4, 2), (5, 2), (5, 3), bias=(5,), sinks=True, dlse=True),
        problem((3, 4, 4, 2), (2, 5, 2), (1, 2, 5, 3), bias=(4, 1, 5), mask=causal_mask()),
        problem((2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 2), bias=(3, 1, 5), hidden=0.3),
    ):
        got, expected = candidate.answer(given_problem), naive(given_problem)
        assert set(got.given()) == set(expected.given())
        for name, x in expected.given().items():
            np.testing.assert_allclose(getattr(got, name), x, rtol=0, atol=1e-12)
            assert getattr(got, name).shape == x.shape


# Pinned axes -----------------------------------------------------------------------------------------------------------------


def test_pinned_axes_are_kept_to():
    seen = Counter()

    def kernel(q, k, v, *, mask=None):
        T, S, D, E = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        if T % 4 or S != T or D not in (2, 8) or E != D:
            raise ValueError(f"no kernel for {T}, {S}, {D}, {E}")
        seen[T, D] += 1
        return ours(q, k, v, mask=mask)[0]

    only = ["batched_is_looped", "decoding_is_the_whole", "heads_are_independent", "is_what_the_loops_say"]
    held = check_attention(
        kernel, options=["mask", "dead rows"], T=multiples_of(4, most=12), S="T", D=(2, 8), E="D", B=2, examples=12, only=only
    )
    assert set(seen) >= {(4, 2), (4, 8), (8, 2), (12, 8)}
    assert held["batched_is_looped"] == 0  # B is 2, always
    assert held["decoding_is_the_whole"] == 0
    assert held["is_what_the_loops_say"] == 12


def test_a_strategy_pins_too():
    """Of a strategy nothing is known but what it drew."""
    lengths = set()

    def kernel(q, k, v):
        lengths.add(k.shape[-2])
        return ours(q, k, v)[0]

    only = ["repeated_keys_share_their_weight", "values_enter_linearly"]
    assert check_attention(kernel, S=st.sampled_from([2, 5]), only=only, examples=10) == {
        "values_enter_linearly": 10,
        "repeated_keys_share_their_weight": 0,
    }
    assert lengths == {2, 5}


def test_a_law_with_nothing_to_look_at_is_skipped():
    (check,) = attention_checks(ours, only=["decoding_is_the_whole"], examples=3)
    with pytest.raises(unittest.SkipTest, match="decoding_is_the_whole has nothing to look at"):
        check()
    (check,) = attention_checks(ours, only=["dead_rows_are_zero"], examples=3)
    check()
    assert str(check) == "dead_rows_are_zero"


# What it says ----------------------------------------------------------------------------------------------------------------


def test_laws_are_asked_in_an_order_that_names_faults():
    assert set(ORDER) == set(LAWS)
    assert len(ORDER) == len(LAWS)
    assert set(ORDER[-3:]) == set(CATCH_ALL)
    names = [str(check) for check in attention_checks(ours, vjp=ours_vjp, options=["mask"], dtype="float32")]
    assert names == [name for name in ORDER if name != "gradients_are_derivatives"]
    names = [str(check) for check in attention_checks(ours, skip=["keys_have_no_order"])]
    assert "keys_have_no_order" not in names
    assert "products_with_gradients_agree" not in names
    assert "broadcasting_is_repeating" not in names


def test_a_failure_is_one_readable_message():
    def wrong(q, k, v, *, causal=False):
        return ours(q, k, v)[0]

    with pytest.raises(LawBroken) as caught:
        check_attention(wrong, options=["causal"], name="without a mask")
    error = caught.value
    assert error.law == "unseen_keys_leave_no_trace"
    first, second, third = str(error).splitlines()
    assert first.startswith("without a mask breaks unseen_keys_leave_no_trace: Other finite numbers at the keys")
    assert second.startswith("out[0]: expected ")
    assert (
        third
        == "problem: attention_problem(q=(1, 1, 1, 1), k=(1, 1, 2, 1), v=(1, 1, 2, 1), values='integers', mask=causal_mask())"
    )
    assert not error.__notes__


def test_the_problem_is_code_also_where_an_option_was_left_out():
    """Permuted keys need a dense mask, which is not taken: the law is checked without the mask."""

    def wrong(q, k, v, *, causal=False):
        return ours(q, k + 0.1 * np.arange(k.shape[-2])[:, None] ** 2, v, causal=causal)[0]

    with pytest.raises(LawBroken) as caught:
        check_attention(wrong, options=["causal"], only=["keys_have_no_order"], T=3, S=3)
    code = str(caught.value).partition("problem: ")[2]
    assert code.startswith("attention_problem(")
    names = {**vars(npattn), **vars(npattn.testing)}
    rebuilt = eval(code, names)
    with pytest.raises(LawBroken):
        check_attention(wrong, options=["causal"], only=["keys_have_no_order"], T=3, S=3, examples=20)
    assert rebuilt.mask is None or code.endswith("causal_mask())")


def test_an_error_of_the_candidate():
    def square(q, k, v):
        if q.shape != k.shape:
            raise ValueError("not square")
        return ours(q, k, v)[0]

    with pytest.raises(CandidateRaised, match="square raised ValueError: not square") as caught:
        check_attention(square)
    assert caught.value.law == "dtype_and_device_are_kept"
    assert "of the problem: attention_problem(q=(1, 1, 1, 1), k=(1, 1, 2, 1)" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_candidate_that_fails_now_and_then():
    calls = Counter()

    def moody(q, k, v):
        calls[q.tobytes()] += 1
        return ours(q, k, v)[0] + (calls[q.tobytes()] == 1)

    with pytest.raises(LawBroken, match="on the first call with this problem, and not on every one"):
        check_attention(moody, only=["is_what_the_loops_say"])


class Grads(NamedTuple):
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def test_forms_of_gradients():
    def tuple_of(dout, q, k, v):
        g = ours_vjp(dout, q, k, v)
        return g["out"], g["dq"], g["dk"], g["dv"]

    only = ["products_with_gradients_agree"]
    for vjp in (tuple_of, lambda *a: Grads(*tuple_of(*a)), lambda *a: Grads(*tuple_of(*a))._asdict()):
        assert check_attention(ours, vjp=vjp, only=only, examples=3) == {only[0]: 3}
    with pytest.raises(CandidateRaised, match=r"vjp gave 3 arrays, not \(out, dq, dk, dv\)"):
        check_attention(ours, vjp=lambda *a: tuple_of(*a)[:3], only=only, examples=3)
    with pytest.raises(CandidateRaised, match="vjp gave dx; its results are out, lse, dq"):
        check_attention(ours, vjp=lambda *a: {"dx": 0}, only=only, examples=3)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"options": ["causel"]}, "options must be among causal, .*, got causel"),
        ({"skip": ["no_law"]}, "skip must be among .*, got no_law"),
        ({"only": ["no_law"]}, "only must be among .*, got no_law"),
        ({"X": 3}, "axes must be among B, H, K, T, S, D, E, got X"),
        ({"dtype": "float8"}, "dtype must be among float64, .*, got float8"),
        ({"products": "int8"}, "products must be among .*, got int8"),
        ({"library": "numpi"}, "name must be one of numpy"),
    ],
)
def test_unknown_names(how, message):
    with pytest.raises(ValueError, match=message):
        attention_checks(ours, **how)


# Precisions ------------------------------------------------------------------------------------------------------------------


def test_bfloat16_by_its_bits():
    x = np.array(
        [1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -(2.0**-133), 3e38, np.inf, np.nan], dtype=np.float32
    )
    expected = [1.0, 1.0, 1 + 2.0**-6, 1 + 2.0**-7, -(2.0**-133), 3.004055e38, np.inf, np.nan]
    np.testing.assert_allclose(to_bfloat16(x), expected, rtol=2e-3)
    np.testing.assert_array_equal(to_bfloat16(x)[:5], np.array(expected[:5], dtype=np.float32))
    assert np.isinf(to_bfloat16(np.float64(1e39)))


def test_bfloat16_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    x = (np.random.default_rng(0).standard_normal(10000) * 10.0 ** np.arange(-38, 38, 0.0076)[:10000]).astype(np.float32)
    np.testing.assert_array_equal(to_bfloat16(x), to_numpy(torch.from_numpy(x).to(torch.bfloat16).to(torch.float32)))


def test_float_info():
    assert float_info("bfloat16").eps == 2 * float_info("float16").eps * 4
    assert float_info(np.float32).max == float(np.finfo(np.float32).max)
    assert coarsest("float64", None, "tf32", "float32") == "tf32"
    assert float_info("bfloat16").max == float(to_bfloat16(np.float32(3.3895e38)))


def test_a_problem_in_bfloat16():
    given_problem = attention_problem((3, 2), (4, 2), (4, 2), dtype="bfloat16", dlse=True, layouts={"k": "fortran"})
    assert given_problem.q.dtype == np.float32
    assert given_problem.precision == "bfloat16"
    assert given_problem.is_half
    np.testing.assert_array_equal(given_problem.k, to_bfloat16(given_problem.k))
    assert "dtype='bfloat16'" in repr(given_problem)
    assert "rounded='bfloat16'" in repr(given_problem.replace(scale=1.0))
