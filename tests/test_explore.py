"""The explorer's page without a browser: every number and text on it, its size, what may be given, what is hostile.

tests/test_explore_page.py has the page itself, in a browser.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import npattn
from npattn import (
    Dropout,
    MultiHeadParams,
    attention_forward,
    attention_steps,
    attention_steps_backward,
    causal_mask,
    explore,
    length_mask,
    multi_head_attention_forward,
    multi_head_attention_steps,
    multi_head_attention_steps_backward,
    window_mask,
)
from npattn._attention.recipes import own_index
from npattn._explore.numbers import Packer, printed
from npattn._explore.tables import BACKWARD, FORWARD
from npattn.layers import Rotary
from npattn.testing.problems import Alibi, AttentionProblem, Relative, attention_problem
from tests.pages import Page, written

SCRIPT = (Path(npattn.__file__).parent / "_explore" / "page.js").read_text(encoding="ascii")
EXPLAINED = [name for name in FORWARD + BACKWARD if name not in ("q", "k", "v", "dout")]


def steps_of(problem: AttentionProblem) -> Any:
    _, saved = attention_forward(problem.q, problem.k, problem.v, **problem.options())
    return attention_steps_backward(problem.dout, saved, dlse=problem.dlse)


def small(**options: Any) -> Any:
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 3, 4))
    return attention_steps_backward(dout, attention_forward(q, k, v, **options)[1])


# Numbers ----------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(width=64) | st.sampled_from([0.0, -0.0, 9999.5, 99995.0, 0.00099995, 9.9995e-5, 5e-324]), min_size=1))
def test_numbers_are_written_as_explain_prints_them(values):
    codes, digits = printed(np.asarray(values))
    assert [written(int(c), str(1000 + int(d))) for c, d in zip(codes, digits, strict=True)] == [f"{x:.4g}" for x in values]


def test_arrays_are_stored_once():
    packer = Packer()
    a, b = np.arange(6.0).reshape(1, 2, 3), np.arange(6.0).reshape(1, 3, 2)
    assert [packer.numbers(a), packer.numbers(b), packer.numbers(a.copy())] == [0, 1, 0]
    assert packer.numbers(np.where(a == 0, -0.0, a)) == 2  # its text is another
    assert packer.count == 18
    hidden = np.where(a > 3, -np.inf, a)
    assert packer.hidden(hidden, 0) == packer.hidden(hidden, 0) == 4
    assert packer.blocks[4] == {"kind": "hidden", "shape": [1, 2, 3], "shown": 0, "where": 3}
    assert packer.count == 18


# The text of every cell is explain's --------------------------------------------------------------------------------------

PROBLEMS: dict[str, dict[str, Any]] = {
    "bare": {},
    "masked": {"mask": causal_mask(1)},
    "reasons": {"mask": (window_mask(1, 1) | length_mask([1, 0])) & causal_mask(3)},
    "array": {"mask": np.random.default_rng(1).random((4, 3, 5)) < 0.5},
    "softcap": {"softcap": 0.8},
    "bias": {"bias": (4, 3, 5), "hidden": 0.2},
    "alibi": {"bias": Alibi(4, 0)},
    "table": {"bias": Relative(8, 4, 0, True, 5)},
    "dropout": {"dropout": Dropout(0.4, 3)},
    "sinks": {"sinks": True, "mask": length_mask([0, 4])},
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


def check_texts(page: Page, layer: dict[str, Any], steps: Any, names: list[str]) -> None:
    """Every shown cell of every step of every leading index and query head."""
    problem = (steps.saved if hasattr(steps, "saved") else steps.steps.saved).problem
    for name in names:
        owner = steps if hasattr(steps, name) else steps.steps
        array = getattr(owner, name)
        _, rows, columns = page.data["blocks"][layer["tables"][name]["block"]]["shape"]
        assert rows == array.shape[-2]
        assert columns == array.shape[-1] or columns >= 8
        for g, at in enumerate(np.ndindex(*layer["outer"])):
            own = own_index(problem, array.shape[:-2], at)
            for i, j in np.ndindex(rows, columns):
                assert page.explain(layer, name, g, i, j) == steps.explain(name, i, j, at=own)


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_every_text_is_that_of_explain(options):
    """Grouped heads, leading axes that broadcast."""
    back = steps_of(attention_problem((2, 4, 3, 2), (1, 2, 5, 2), (2, 1, 5, 3), **options))
    page = Page(explore(back))
    check_texts(page, page.data["runs"][0][0], back, EXPLAINED)
    forward = Page(explore(back.steps))
    check_texts(forward, forward.data["runs"][0][0], back.steps, [name for name in EXPLAINED if name in FORWARD])


@pytest.mark.parametrize(("q", "k", "v"), [((3, 2), (4, 2), (4, 3)), ((9, 7), (8, 7), (8, 20)), ((3, 0), (2, 0), (2, 1))])
def test_texts_without_heads_and_with_long_sums(q, k, v):
    back = steps_of(attention_problem(q, k, v, mask=causal_mask()))
    page = Page(explore(back, features=9))
    check_texts(page, page.data["runs"][0][0], back, EXPLAINED)


def test_poison_is_shown_as_it_is():
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 3, 3))
    k[2], v[2], dout[0, 0] = np.nan, np.inf, -0.0
    back = attention_steps_backward(dout, attention_forward(q, k, v, mask=length_mask(2))[1])
    page = Page(explore(back))
    check_texts(page, page.data["runs"][0][0], back, EXPLAINED)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(dtype):
    back = steps_of(attention_problem((3, 2), (4, 2), (4, 2), dtype=dtype))
    page = Page(explore(back))
    check_texts(page, page.data["runs"][0][0], back, EXPLAINED)


def test_every_library_gives_the_same_page(library):
    problem = attention_problem((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), **PROBLEMS["all"])
    given = problem.inputs(library)
    _, saved = attention_forward(given.q, given.k, given.v, **given.options)
    found = Page(explore(attention_steps_backward(given.dout, saved, dlse=given.dlse)))
    own = Page(explore(steps_of(problem)))
    layer, expected = found.data["runs"][0][0], own.data["runs"][0][0]
    for name in ("weights", "dbiased", "dq", "bias", "factor", "masked"):
        for i, j in np.ndindex(3, 2):
            assert found.number(layer, name, 5, i, j) == own.number(expected, name, 5, i, j)
    assert found.explain(layer, "biased", 1, 2, 4) == own.explain(expected, "biased", 1, 2, 4)


def test_what_was_given_is_shown():
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 3, 4))
    page = Page(explore(attention_steps_backward(dout, attention_forward(q, k, v)[1])))
    layer = page.data["runs"][0][0]
    for name, array in (("q", q), ("k", k), ("v", v), ("dout", dout)):
        for g, i, j in np.ndindex(2, 3, 4):
            assert page.number(layer, name, g, i, j) == f"{array[g, i, j]:.4g}"


def test_the_script_computes_nothing():
    """It turns text into numbers in one place, for colours; and it knows no function that attention needs."""
    assert set(re.findall(r"Math\.(\w+)", SCRIPT)) == {"abs", "floor", "max", "min", "round", "sqrt"}
    colour = re.search(r"  function colour\(.*?\n  }\n", SCRIPT, re.DOTALL)[0]
    assert SCRIPT.count("Number(") == colour.count("Number(") == 2
    assert "parseFloat" not in SCRIPT
    assert "**" not in SCRIPT


# Size, and what stands in the file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, causal_mask()], ids=["all", "causal"])
def test_64_tokens_and_8_heads_take_less_than_500_kilobytes(mask):
    rng = np.random.default_rng(0)
    params, (x, dout) = MultiHeadParams.init(rng, width=512, heads=8), rng.standard_normal((2, 64, 512))
    _, saved = multi_head_attention_forward(params, x, x, mask=mask)
    explorer = explore(multi_head_attention_steps_backward(dout, saved), [f"token {i}" for i in range(64)])
    assert 200_000 < len(explorer.html) < 500_000
    page = Page(explorer)
    layer = page.data["runs"][0][0]
    assert page.data["blocks"][layer["tables"]["dq"]["block"]]["shape"] == [8, 64, 8]
    assert layer["whole"]["dq"] == [64, 64]
    assert page.explain(layer, "dk", 7, 63, 7) == multi_head_attention_steps_backward(dout, saved).attention.explain(
        "dk", 63, 7, at=(7,)
    )


def test_features_are_all_shown_where_there_is_room():
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 2, 6, 128))
    page = Page(explore(attention_steps_backward(dout, attention_forward(q, k, v)[1])))
    layer = page.data["runs"][0][0]
    assert page.data["blocks"][layer["tables"]["dv"]["block"]]["shape"] == [2, 6, 128]
    page = Page(explore(attention_steps_backward(dout, attention_forward(q, k, v)[1]), features=20))
    assert page.data["blocks"][page.data["runs"][0][0]["tables"]["dv"]["block"]]["shape"] == [2, 6, 20]


def test_the_file_needs_nothing_else(tmp_path):
    explorer = explore(small())
    explorer.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("ascii") == explorer.html
    assert "default-src 'none'" in explorer.html
    assert not re.search(r"https?:|//\w|\bsrc=|<link|@import|url\(|import\(", re.sub(r'id="numbers">.*?<', "", explorer.html))
    assert "@@" not in explorer.html
    assert repr(explorer) == f"Explorer(runs=1, layers=1, heads=2, T=3, S=3, kB={len(explorer.html) / 1000:.0f})"


def test_a_notebook_shows_it_in_a_frame():
    explorer = explore(small(), ['"', "<", "&"])
    frame = explorer._repr_html_()
    match = re.fullmatch(r'<iframe title="[^"]+" sandbox="allow-scripts" style="[^"]+" srcdoc="([^"]+)"></iframe>', frame)
    assert html.unescape(match[1]) == explorer.html


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "@@numbers@@",
    "{i}",
    "&lt;b&gt;",
    '"><img src=x onerror=alert(1)>',
    "${alert(1)}",
    "\u2028\u202eabc",
    "\0\n\t",
    "\ud800",
    " the ",
    "   ",
    "",
    "猫👩\u200d🚀",
]


def test_tokens_cannot_leave_their_place():
    q = np.random.default_rng(0).standard_normal((len(HOSTILE), 2))
    plain, explorer = (explore(attention_steps(attention_forward(q, q, q)[1]), tokens) for tokens in (None, HOSTILE))
    for tag in ("<script", "</script", "<!--", "<img"):
        assert explorer.html.count(tag) == plain.html.count(tag)
    tokens, _ = Page(explorer).data["tokens"][0]
    assert tokens[:7] == HOSTILE[:7]
    assert tokens[7:] == ["\\u2028\\u202eabc", "\\x00\\n\\t", "\\ud800", "␣the␣", "␣␣␣", "", HOSTILE[-1]]
    assert Page(explorer).part("numbers") == Page(plain).part("numbers")


# Runs, layers, tokens ------------------------------------------------------------------------------------------------------


def test_choices_are_the_options_in_which_runs_differ():
    runs = [
        small(mask=mask, softcap=cap, scale=s)
        for mask in (causal_mask(), None)
        for cap, s in ((None, None), (2.0, None), (2.0, 1.0))
    ]
    page = Page(explore(runs))
    assert page.data["choices"] == [
        {"name": "mask", "values": ["causal_mask()", "none"], "of_run": [0, 0, 0, 1, 1, 1]},
        {"name": "scale", "values": ["1/√D", "1"], "of_run": [0, 0, 1, 0, 0, 1]},
        {"name": "softcap", "values": ["none", "2"], "of_run": [0, 1, 1, 0, 1, 1]},
    ]
    for n, choices in enumerate([(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 1)]):
        check_texts(page, page.run(*choices)[0], runs[n], ["capped", "weights", "dscores"])


def test_all_options_become_choices():
    options = [
        {},
        {"bias": np.zeros((3, 3))},
        {"bias": npattn.alibi_bias(np.ones(2))},
        {"sinks": np.ones(2)},
        {"dropout": Dropout(0.5, 1)},
    ]
    choices = {c["name"]: c["values"] for c in Page(explore([small(**o) for o in options])).data["choices"]}
    assert choices == {
        "bias": ["none", "array(3, 3)", "alibi_bias((2,))"],
        "sinks": ["none", "array(2,)"],
        "dropout": ["none", "Dropout(rate=0.5, seed=1, origin=())"],
    }


def test_runs_with_names():
    page = Page(explore({"before": small(), "after": small()}))
    assert page.data["choices"] == [{"name": "run", "values": ["before", "after"], "of_run": [0, 1]}]
    assert Page(explore({"only": small()})).data["choices"] == []
    assert Page(explore([small()])).data["choices"] == []


def test_layers_may_differ_in_keys_and_heads():
    """As in a decoder: self-attention, then cross-attention."""
    rng = np.random.default_rng(0)
    x, memory = rng.standard_normal((2, 3, 8)), rng.standard_normal((2, 5, 8))
    layers = []
    for heads, kv, mask in ((4, x, causal_mask()), (2, memory, None)):
        params = MultiHeadParams.init(rng, width=8, heads=heads, kv_heads=2)
        out, saved = multi_head_attention_forward(params, x, kv, mask=mask, rotary=Rotary(key_positions=0))
        layers.append(multi_head_attention_steps_backward(out, saved))
    explorer = explore([layers])
    page = Page(explorer)
    assert "layers=2" in repr(explorer)
    assert page.data["tokens"] == [[["0", "1", "2"], ["0", "1", "2"]], [["0", "1", "2"], ["0", "1", "2", "3", "4"]]]
    assert page.data["formulas"]["k"] == "projected from x_kv"
    for layer, steps in zip(page.data["runs"][0], layers, strict=True):
        check_texts(page, layer, steps.attention, ["scores", "dk"])
    assert [layer["outer"] for layer in page.data["runs"][0]] == [[2, 4], [2, 2]]


def test_multi_head_steps_without_gradients():
    params = MultiHeadParams.identity(width=2)
    _, saved = multi_head_attention_forward(params, np.eye(2), np.eye(2))
    page = Page(explore({"a": multi_head_attention_steps(saved)}))
    assert page.data["steps"] == list(FORWARD)


def test_steps_are_those_that_all_runs_have():
    back = small()
    assert Page(explore({"a": back, "b": back.steps})).data["steps"] == list(FORWARD)


def test_the_page_opens_where_the_largest_gradient_arrives():
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2))
    dout = np.zeros((5, 2))
    dout[3] = -1
    back = attention_steps_backward(dout, attention_forward(q, k, v)[1])
    assert Page(explore(back)).data["start"] == [3, back.steps.weights[3].argmax()]
    assert Page(explore(back.steps)).data["start"] == [4, back.steps.weights[4].argmax()]


def test_colours_end_at_the_largest_of_all_heads_and_runs():
    runs = [small(), small(scale=3.0)]
    marks = Page(explore(runs)).data["marks"][0]
    most = max(np.abs(run.steps.scores).max() for run in runs)
    assert marks["scores"] == [f"{part * most:.4g}" for part in (-1, -1 / 4, 0, 1 / 4, 1)]
    most = max(run.steps.weights.max() for run in runs)
    assert marks["weights"] == [f"{part * most:.4g}" for part in (0, 1 / 16, 1 / 4, 9 / 16, 1)]
    assert Page(explore(small(mask=length_mask(0)))).data["marks"][0]["weights"] == ["0"]


def test_tokens_of_queries_and_keys():
    q, k = np.zeros((2, 3)), np.zeros((3, 3))
    steps = attention_steps(attention_forward(q, k, k)[1])
    assert Page(explore(steps, (["a", "b"], ("c", "d", "e")))).data["tokens"] == [[["a", "b"], ["c", "d", "e"]]]
    both = attention_steps(attention_forward(q, q, q)[1])
    assert Page(explore(both, ["a", "b"])).data["tokens"] == [[["a", "b"], ["a", "b"]]]


def zeros(T: int, S: int) -> Any:
    return attention_steps(attention_forward(np.zeros((T, 1)), np.zeros((S, 1)), np.zeros((S, 1)))[1])


@pytest.mark.parametrize(
    ("runs", "tokens", "error", "message"),
    [
        (lambda: 7, None, TypeError, "a run must be what attention_steps, .* got int"),
        (lambda: "text", None, TypeError, "got str"),
        (lambda: [3], None, TypeError, "got int"),
        (lambda: [[3]], None, TypeError, "got int"),
        (lambda: attention_forward(*np.zeros((3, 2, 2)))[1], None, TypeError, "got AttentionSaved"),
        (lambda: [attention_forward(*np.zeros((3, 2, 2)))[1]], None, TypeError, "got AttentionSaved"),
        (list, None, ValueError, "runs must hold at least one run"),
        (dict, None, ValueError, "runs must hold at least one run"),
        (lambda: [[]], None, ValueError, "at least one layer"),
        (lambda: [zeros(1, 1), [zeros(1, 1)] * 2], None, ValueError, r"as many layers as the others, got \[1, 2\]"),
        (lambda: {"a": zeros(2, 3), "b": zeros(2, 4)}, None, ValueError, "of the same tokens"),
        (lambda: [small(), small(softcap=1.0), small()], None, ValueError, "runs 0 and 2 have the same options: give them names"),
        (lambda: zeros(0, 2), None, ValueError, r"nothing to show: the weights have the shape \(0, 2\)"),
        (lambda: zeros(2, 0), None, ValueError, "nothing to show"),
        (lambda: zeros(2, 257), None, ValueError, "at most 256 queries and keys, got T = 2, S = 257"),
        (small, "abc", TypeError, "tokens must be a sequence of strings, .* got str"),
        (small, 3, TypeError, "got int"),
        (small, [1, 2, 3], TypeError, "the tokens of the queries must be strings"),
        (small, (["a"] * 3, [0] * 3), TypeError, "the tokens of the keys must be strings"),
        (small, ["a", "b"], ValueError, "there must be T = 3 tokens for the queries, got 2"),
        (small, (["a"] * 3, ["b"]), ValueError, "there must be S = 3 tokens for the keys, got 1"),
    ],
)
def test_what_cannot_be_shown(runs, tokens, error, message):
    with pytest.raises(error, match=f"^explore: .*{message}"):
        explore(runs(), tokens)


@pytest.mark.parametrize("features", [0, -1, 2.5, "8"])
def test_features_must_be_a_number(features):
    with pytest.raises(ValueError, match="^explore: features must be a positive integer"):
        explore(small(), features=features)
