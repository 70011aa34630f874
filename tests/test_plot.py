"""Plots: the numbers they show, their scales, what is hatched, where text stands, and what they leave alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import npattn
from npattn import (
    Dropout,
    MultiHeadParams,
    attention_forward,
    attention_steps_backward,
    causal_mask,
    multi_head_attention_forward,
    multi_head_attention_steps,
    multi_head_attention_steps_backward,
    segment_mask,
    tree_map,
    window_mask,
)
from npattn.plot import plot_attention, plot_gradient_flow, plot_mask, plot_steps
from npattn.testing.libraries import asarray

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
WORDS = ["The", "cat", "sat", "because", "it", "was", "tired"]


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    """Figures are closed afterwards, and nothing shows one."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "show", lambda *_, **__: pytest.fail("a plot was shown"))
    yield plt
    plt.close("all")


def run(T: int, S: int, H: int | None = None, **options: Any) -> Any:
    rng = np.random.default_rng(0)
    lead = () if H is None else (H,)
    q, k, v = (rng.standard_normal((*lead, n, 4)) for n in (T, S, S))
    out, saved = attention_forward(q, k, v, **options)
    return attention_steps_backward(rng.standard_normal(out.shape), saved)


def panels(figure: Any) -> list[Any]:
    """The Axes with a map, in order."""
    return [ax for ax in figure.axes if ax.images]


def bars(figure: Any) -> list[Any]:
    """The Axes of colour bars."""
    return [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]


def limits(ax: Any) -> Any:
    return ax.images[0].get_clim()


def hatched(ax: Any, mark: str) -> Any:
    """The cells under rectangles with a mark."""
    shape = ax.images[0].get_array().shape
    found = np.zeros(shape, bool)
    for patch in ax.patches:
        if patch.get_label() == mark:
            assert mark == "absent" or patch.get_hatch()
            x, y, width, height = patch.get_x() + 0.5, patch.get_y() + 0.5, patch.get_width(), patch.get_height()
            found[int(y) : int(y + height), int(x) : int(x + width)] = True
    return found


# What they show ----------------------------------------------------------------------------------------------------------------


def test_weights_of_one_head():
    weights = run(7, 7, mask=causal_mask()).steps.weights
    figure = plot_attention(weights, WORDS, WORDS)
    (ax,) = panels(figure)
    np.testing.assert_array_equal(ax.images[0].get_array(), weights)
    assert [t.get_text() for t in ax.get_yticklabels()] == [t.get_text() for t in ax.get_xticklabels()] == WORDS
    assert (ax.get_xlabel(), ax.get_ylabel(), bars(figure)[0].get_ylabel()) == ("key", "query", "weight")
    assert limits(ax) == (0, weights.max())
    shown = [float(text.get_text()) for text in ax.texts]
    np.testing.assert_allclose(shown, weights.ravel(), rtol=0.05)
    assert [text.get_position() for text in ax.texts] == [(j, i) for i in range(7) for j in range(7)]


def test_a_grid_of_heads_has_one_scale():
    weights = run(3, 5, H=6).steps.weights
    figure = plot_attention(weights)
    assert [ax.get_title() for ax in panels(figure)] == [f"head {h}" for h in range(6)]
    for ax, head in zip(panels(figure), weights, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), head)
        assert limits(ax) == (0, weights.max())
    assert len(bars(figure)) == 1
    places = [ax.get_subplotspec() for ax in panels(figure)]
    assert [(p.rowspan.start, p.colspan.start) for p in places] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


@pytest.mark.parametrize("stack", [list, np.stack])
def test_layers_by_heads(stack):
    layers = [run(3, 5, H=2, scale=s).steps.weights for s in (1.0, 2.0, 3.0)]
    figure = plot_attention(stack(layers))
    assert [ax.get_title() for ax in panels(figure)] == [f"layer {n}, head {h}" for n in range(3) for h in range(2)]
    for ax, head in zip(panels(figure), [head for layer in layers for head in layer], strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), head)
    places = [ax.get_subplotspec() for ax in panels(figure)]
    assert [(p.rowspan.start, p.colspan.start) for p in places] == list(itertools.product(range(3), range(2)))


def test_dead_rows_are_hatched():
    weights = run(5, 4, mask=causal_mask(-2)).steps.weights
    figure = plot_attention(weights)
    (ax,) = panels(figure)
    np.testing.assert_array_equal(hatched(ax, "dead"), np.broadcast_to((np.arange(5) < 2)[:, None], (5, 4)))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a query that sees no key"]
    assert len(ax.texts) == 3 * 4  # no numbers under the hatch
    assert not plot_attention(run(5, 4).steps.weights).legends


def test_what_is_not_a_number_is_crossed():
    weights = np.array([[0.5, np.nan], [0.25, 0.75]])
    figure = plot_attention(weights)
    (ax,) = panels(figure)
    np.testing.assert_array_equal(hatched(ax, "odd"), np.isnan(weights))
    assert limits(ax) == (0, 0.75)


def test_steps_and_gradients():
    back = run(7, 7)
    figure = plot_steps(back.steps, back, tokens_q=WORDS, tokens_k=WORDS)
    names = ["scores", "weights", "out", "dscores", "dweights", "dout"]
    assert [ax.get_title() for ax in panels(figure)] == names
    for ax, name in zip(panels(figure), names, strict=True):
        array = getattr(back if name.startswith("d") else back.steps, name)
        np.testing.assert_array_equal(ax.images[0].get_array(), array)
        low, high = limits(ax)
        assert (low, high) == ((0 if name == "weights" else -np.abs(array).max()), np.abs(array).max())
        np.testing.assert_allclose([float(text.get_text()) for text in ax.texts], array.ravel(), rtol=0.06)
        assert name == "weights" or float(ax.images[0].norm(0.0)) == 0.5
    expected = ["scores", "weights", "out", "gradients of scores", "gradients of weights", "gradients of out"]
    assert [bar.get_xlabel() for bar in bars(figure)] == expected
    assert [ax.get_ylabel() for ax in panels(figure)] == ["query", "", ""] * 2
    assert [ax.get_xlabel() for ax in panels(figure)] == [""] * 3 + ["key", "key", "feature"]


def test_steps_that_the_options_ask_for():
    mask = window_mask(1, 1) & causal_mask(-1)
    back = run(5, 6, H=2, mask=mask, softcap=1.0, dropout=Dropout(0.3, 1))
    figure = plot_steps(back.steps, back, at=(1,))
    names = ["scores", "capped", "biased", "weights", "dropped", "out"]
    assert [ax.get_title() for ax in panels(figure)] == names + [f"d{name}" for name in names]
    by_name = {ax.get_title(): ax for ax in panels(figure)}
    hidden = ~mask.to_array(5, 6)
    dead = np.broadcast_to(hidden.all(axis=-1)[:, None], (5, 6))
    for name, ax in by_name.items():
        own = getattr(back if name.startswith("d") and name != "dropped" else back.steps, name)[1]
        np.testing.assert_array_equal(ax.images[0].get_array().filled(-np.inf), own)
        if not name.endswith("out"):
            marked = name in ("biased", "weights", "dropped", "dscores", "dcapped", "dbiased")
            np.testing.assert_array_equal(
                hatched(ax, "hidden") | hatched(ax, "dead"), hidden if marked else np.zeros_like(hidden)
            )
            np.testing.assert_array_equal(hatched(ax, "dead"), dead if marked else np.zeros_like(dead))
    assert len({limits(by_name[name]) for name in ("scores", "capped", "biased")}) == 1
    assert len({limits(by_name[name]) for name in ("weights", "dropped")}) == 1
    assert len({limits(by_name[name]) for name in ("dscores", "dcapped", "dbiased")}) == 1
    assert len(bars(figure)) == 6
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["hidden", "a query that sees no key"]


def test_multi_head_steps():
    rng = np.random.default_rng(0)
    params, x = MultiHeadParams.init(rng, width=6, heads=2), rng.standard_normal((3, 4, 6))
    out, saved = multi_head_attention_forward(params, x, x)
    steps, back = multi_head_attention_steps(saved), multi_head_attention_steps_backward(out, saved)
    figure = plot_steps(steps, back, at=(2, 1))
    np.testing.assert_array_equal(panels(figure)[1].images[0].get_array(), steps.attention.weights[2, 1])
    np.testing.assert_array_equal(panels(figure)[5].images[0].get_array(), back.dheads[2, 1])
    assert len(panels(plot_steps(steps))) == 3


def test_masks():
    mask = window_mask(2, 1) | segment_mask([0] * 4 + [1] * 6)
    figure = plot_mask(mask, 10, 10)
    (ax,) = panels(figure)
    np.testing.assert_array_equal(ax.images[0].get_array(), mask.to_array(10, 10))
    np.testing.assert_array_equal(hatched(ax, "hidden"), ~mask.to_array(10, 10))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["may attend", "hidden"]
    assert not bars(figure)
    by_head = np.random.default_rng(0).random((3, 4, 5)) < 0.5
    np.testing.assert_array_equal(panels(plot_mask(by_head, 4, 5, at=(2,)))[0].images[0].get_array(), by_head[2])
    (ax,) = panels(plot_mask(causal_mask(-2), 6, 8))
    np.testing.assert_array_equal(hatched(ax, "dead")[:, 0], np.arange(6) < 2)


def test_gradient_flow():
    rng = np.random.default_rng(0)
    layers = [
        tree_map(lambda x, n=n: rng.standard_normal(x.shape) * 10.0**-n, MultiHeadParams.init(rng, width=6, heads=2))
        for n in range(12)
    ]
    layers[3] = layers[3]._replace(w_q=0 * layers[3].w_q, w_v=np.nan * layers[3].w_v, b_o=None)
    figure = plot_gradient_flow({"blocks": layers, "table": rng.standard_normal((5, 5))})
    (ax,) = panels(figure)
    rows = [t.get_text() for t in ax.get_yticklabels()]
    assert rows == [f"blocks.{name}" for name in ("w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")] + ["table"]
    assert [t.get_text() for t in ax.get_xticklabels()] == [*map(str, range(12)), "-"]  # 10 after 9
    shown = ax.images[0].get_array()
    for n, layer in enumerate(layers):
        for m, x in enumerate(layer[:8]):  # all but sinks
            marks = [mark for mark in ("zero", "odd", "absent") if hatched(ax, mark)[m, n]]
            expected = {(3, 0): ["zero"], (3, 2): ["odd"], (3, 7): ["absent"]}.get((n, m), [])
            assert marks == expected
            if not expected:
                assert shown[m, n] == pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-12)
    assert hatched(ax, "absent")[8, :12].all()
    assert limits(ax) == (shown.min(), shown.max())
    assert bars(figure)[0].get_ylabel() == "root mean square of the gradient"


def test_gradients_of_nearly_one_size_look_alike():
    (ax,) = panels(plot_gradient_flow({"a": np.full(3, 1.0), "b": np.full(3, 0.9), "c": np.zeros(3)}))
    assert ax.images[0].norm(0.9) > 0.95
    assert ax.images[0].norm(1.0) == 1
    assert [text.get_text() for text in ax.texts] == ["1", "0.9"]
    (ax,) = panels(plot_gradient_flow([np.zeros(3)]))
    assert hatched(ax, "zero").all()


def test_arrays_of_every_library(library):
    weights = run(3, 4).steps.weights
    (ax,) = panels(plot_attention(asarray(weights, library)))
    np.testing.assert_array_equal(ax.images[0].get_array(), weights)
    (ax,) = panels(plot_mask(asarray(weights > 0.2, library), 3, 4))
    np.testing.assert_array_equal(ax.images[0].get_array(), weights > 0.2)
    (ax,) = panels(plot_gradient_flow([asarray(weights, library)]))
    assert ax.images[0].get_array().item() == pytest.approx(np.sqrt(np.mean(weights**2)))


# How they look ----------------------------------------------------------------------------------------------------------------

STRANGE = ["$x_1$", "$\\frac{$", "</b>", "a very long token, much longer than there is room for", " d ", "\n", ""]


def big(T: int, S: int) -> Any:
    return run(T, S, mask=causal_mask()).steps.weights


FIGURES: dict[str, Any] = {
    "one head": lambda: plot_attention(big(7, 7), WORDS, WORDS),
    "strange": lambda: plot_attention(big(7, 7), STRANGE, STRANGE),
    "heads": lambda: plot_attention(run(7, 7, H=6).steps.weights, WORDS, WORDS),
    "layers": lambda: plot_attention([run(12, 12, H=3).steps.weights] * 2, [f"token {n}" for n in range(12)], None),
    "64": lambda: plot_attention(big(64, 64), [f"token {n}" for n in range(64)], [f"token {n}" for n in range(64)]),
    "200": lambda: plot_attention(big(200, 150)),
    "wide": lambda: plot_attention(big(2, 40)),
    "one": lambda: plot_attention(big(1, 1)),
    "dead": lambda: plot_attention(run(5, 4, mask=causal_mask(-2)).steps.weights),
    "steps": lambda: plot_steps(run(7, 7).steps, run(7, 7), tokens_q=WORDS, tokens_k=WORDS),
    "all steps": lambda: plot_steps(
        run(5, 6, mask=causal_mask(-1), softcap=1.0, dropout=Dropout(0.3, 1)).steps,
        run(5, 6, mask=causal_mask(-1), softcap=1.0, dropout=Dropout(0.3, 1)),
    ),
    "large steps": lambda: plot_steps(run(40, 40).steps, run(40, 40)),
    "mask": lambda: plot_mask(causal_mask(), 10, 10),
    "large mask": lambda: plot_mask(window_mask(5, 3), 100, 120),
    "flow": lambda: plot_gradient_flow(
        {"blocks": [{"attention.w_q": np.full(3, 10.0**-n), "b": np.zeros(2)} for n in range(30)], "embedding": np.ones(2)}
    ),
    "flow of one": lambda: plot_gradient_flow(MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2)),
}


SLOW = {"heads", "layers", "200", "steps", "all steps", "large steps", "large mask"}


@pytest.mark.parametrize(
    "make", [pytest.param(make, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, make in FIGURES.items()]
)
def test_no_text_is_clipped_or_covers_another(make):
    from matplotlib.text import Text

    figure = make()
    figure.canvas.draw()
    whole = figure.bbox.padded(1)
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and not outside_view(text)
    ]
    assert boxes
    for text, box in boxes:
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, (one, other)


def outside_view(text: Any) -> bool:
    """Ticks beyond the ends of a scale have labels that are not drawn."""
    for axis in (axis for ax in text.get_figure(root=True).axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if text in (tick.label1, tick.label2):
                return not low - 1e-9 * abs(low) <= tick.get_loc() <= high + 1e-9 * abs(high)
    return False


def relative_luminance(colour: Any) -> float:
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("make", [FIGURES["one head"], FIGURES["steps"], FIGURES["flow of one"]])
def test_numbers_can_be_read_on_their_colours(make):
    for ax in panels(make()):
        image = ax.images[0]
        for text in ax.texts:
            j, i = text.get_position()
            back = relative_luminance(image.cmap(image.norm(image.get_array()[i, j])))
            low, high = sorted([back, relative_luminance(text.get_color())])
            assert (high + 0.05) / (low + 0.05) > 4.5, text


# Machado, Oliveira and Fernandes (2009), complete deuteranopia and protanopia
BLIND = {
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}


@pytest.mark.parametrize("matrix", BLIND.values(), ids=BLIND)
def test_colours_can_be_told_apart_without_colour_vision(matrix):
    back = run(3, 3)
    shown = {ax.images[0].cmap.name: ax.images[0].cmap for ax in panels(plot_steps(back.steps, back))}
    shown |= {ax.images[0].cmap.name: ax.images[0].cmap for ax in panels(plot_gradient_flow([np.ones(2)]))}
    assert len(shown) == 3
    for name, cmap in shown.items():
        colours = np.clip(cmap(np.linspace(0, 1, 9))[:, :3] @ np.transpose(matrix), 0, 1)
        lightness = np.array([relative_luminance(c) for c in colours])
        if name == "PuOr_r":
            assert (np.diff(lightness[:5]) > 0).all()
            assert (np.diff(lightness[4:]) < 0).all()
            assert np.abs(colours[:3] - colours[:-4:-1]).max(axis=-1).min() > 0.25
        else:
            assert len(set(np.sign(np.diff(lightness)))) == 1


# What they take and leave alone -----------------------------------------------------------------------------------------------


def test_given_axes(figures):
    back = run(3, 4, H=2)
    figure, grid = figures.subplots(2, 6)
    assert plot_steps(back.steps, back, ax=grid[:, :3]) is figure
    assert plot_attention(back.steps.weights, ax=list(grid[0, 3:5])) is figure
    assert plot_mask(causal_mask(), 3, 3, ax=grid[1, 3]) is figure
    assert plot_gradient_flow([np.ones(2)], ax=grid[1, 4]) is figure
    assert figures.get_fignums() == [1]
    for place, array in ((grid[0, 1], back.steps.weights[0]), (grid[0, 4], back.steps.weights[1]), (grid[1, 2], back.dout[0])):
        np.testing.assert_array_equal(place.images[0].get_array(), array)
    assert not grid[0, 5].images


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_many_axes(figures, count):
    axes = [figures.figure().add_subplot() for _ in range(count)]
    with pytest.raises(ValueError, match=f"^plot_attention: ax must be 2 Axes, one for each panel, got {count}$"):
        plot_attention(run(3, 3, H=2).steps.weights, ax=axes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plot_attention(np.ones(3)), ValueError, r"weights must have shape \(T, S\), .* got \(3,\)"),
        (lambda: plot_attention(np.ones((1, 1, 1, 2, 2))), ValueError, r"got \(1, 1, 1, 2, 2\)"),
        (lambda: plot_attention(np.ones((0, 2))), ValueError, "nothing to show: an array is empty"),
        (lambda: plot_attention(np.ones((0, 2, 2))), ValueError, "nothing to show"),
        (lambda: plot_attention(np.ones((2, 2)), ["a"]), ValueError, "there must be T = 2 tokens for the queries, got 1"),
        (lambda: plot_attention(np.ones((2, 2)), None, [1, 2]), TypeError, "the tokens of the keys must be strings"),
        (lambda: plot_steps(3), TypeError, "steps must be AttentionSteps or MultiHeadAttentionSteps, got int"),
        (lambda: plot_steps(run(2, 2)), TypeError, "steps must be AttentionSteps .* got AttentionStepsBackward"),
        (lambda: plot_steps(run(2, 2).steps, run(2, 2).steps), TypeError, "grads must be AttentionStepsBackward"),
        (lambda: plot_steps(run(2, 2, H=2).steps, at=(2,)), ValueError, r"at must be an index into .* \(2,\), got \(2,\)"),
        (lambda: plot_steps(run(2, 2).steps, at=(0,)), ValueError, r"at must be an index into .* \(\), got \(0,\)"),
        (lambda: plot_mask(np.ones((2, 2)), 2, 2), TypeError, "mask must be boolean"),
        (lambda: plot_mask(causal_mask(), 0, 2), ValueError, "nothing to show"),
        (lambda: plot_gradient_flow({}), ValueError, "there are no arrays in the tree"),
    ],
)
def test_what_cannot_be_plotted(call, error, message):
    with pytest.raises(error, match=f"^plot_\\w+: .*{message}"):
        call()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_matplotlib_is_imported_when_it_is_used():
    assert python("import npattn.plot, sys; print('matplotlib' in sys.modules)") == "False"


def test_without_matplotlib_the_message_says_what_to_do():
    code = "import sys; sys.modules['matplotlib'] = None\nimport numpy as np, npattn.plot\n"
    code += "try: npattn.plot.plot_attention(np.ones((2, 2)))\nexcept ImportError as error: print(error)"
    assert python(code) == 'plot_attention needs matplotlib: pip install "npattn[plot]"'


def test_public_names():
    assert npattn.plot.__all__ == ["plot_attention", "plot_gradient_flow", "plot_mask", "plot_steps"]
