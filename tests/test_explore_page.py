"""The explorer's page in a browser: its texts, hovering, clicking, the keyboard, widths, themes, and what is hostile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn import (
    Dropout,
    Explorer,
    MultiHeadParams,
    attention_forward,
    attention_steps,
    attention_steps_backward,
    causal_mask,
    explore,
    length_mask,
    multi_head_attention_forward,
    multi_head_attention_steps_backward,
    window_mask,
)
from npattn._attention.recipes import own_index
from npattn._explore.tables import BACKWARD, FORWARD
from npattn.testing.problems import attention_problem
from tests.browser import open_browser, set_screen
from tests.test_explore import EXPLAINED, HOSTILE, PROBLEMS, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.night]

WORDS = ["The", "cat", "sat", "because", "it", "was", "tired"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


class Shown:
    """A page in the browser, and what a reader does with it."""

    def __init__(self, browser: Any, folder: Path) -> None:
        self.browser, self.folder = browser, folder

    def open(self, explorer: Explorer, *, width: int = 1280, dark: bool = False) -> Shown:
        set_screen(self.browser, width, 900, dark=dark)
        explorer.write(self.folder / "page.html")
        self.browser.get((self.folder / "page.html").as_uri())
        self.wait("return !!document.querySelector('#matrix td') || !document.getElementById('trouble').hidden")
        return self

    def wait(self, script: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.browser, 10, 0.02).until(lambda browser: browser.execute_script(script))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def all(self, selector: str) -> Any:
        return self.browser.find_elements("css selector", selector)

    def text(self, name: str) -> Any:
        """What an element holds, with its blanks."""
        return self.run("return document.getElementById(arguments[0]).textContent", name)

    def step(self, name: str) -> None:
        next(button for button in self.all(".steps button") if button.text == name).click()

    def cell(self, i: int, j: int) -> Any:
        """A cell, in the middle of the screen, where the explanation does not cover it."""
        cell = self.all(f"#matrix tbody tr:nth-child({i + 1}) td:nth-child({j + 2})")[0]
        self.run("arguments[0].scrollIntoView({block: 'center'})", cell)
        return cell

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        for key in keys:
            ActionChains(self.browser).send_keys(getattr(Keys, key)).perform()

    def focused(self) -> Any:
        """The element that has the focus, in a word."""
        return self.run(
            "const e = document.activeElement;"
            "return e.id || (e.matches('td') ? 'cell' : e.parentElement.id + ': ' + e.textContent)"
        )

    def weights(self) -> Any:
        """What stands under the keys."""
        return self.run("return [...document.querySelectorAll('#keys small')].map((e) => e.textContent)")

    def texts(self, *rows: int) -> Any:
        """Every explanation, found by clicking on every cell of every step, or of some rows."""
        return self.run(
            """
            const found = {};
            for (const id of ["forward", "backward"]) {
              for (let n = 0; n < document.getElementById(id).children.length; n++) {
                document.getElementById(id).children[n].click();
                const lines = [...document.querySelectorAll("#matrix tbody tr")];
                const wanted = lines.filter((_, i) => !arguments[0].length || arguments[0].includes(i));
                found[document.getElementById("step").textContent] = wanted.map((line) =>
                  [...line.querySelectorAll("td")].map((cell) => {
                    cell.click();
                    return document.getElementById("explanation").textContent;
                  }));
              }
            }
            return found;
            """,
            rows,
        )

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser")]


@pytest.fixture
def shown(chromium: Any, tmp_path: Path) -> Iterator[Shown]:
    page = Shown(chromium, tmp_path)
    yield page
    assert page.complaints() == []


def sentence(mask: Any = None, scale: Any = None, softcap: Any = None, heads: int = 2) -> Any:
    rng = np.random.default_rng(0)
    params = MultiHeadParams.init(rng, width=8, heads=heads)
    x, dout = rng.standard_normal((2, 7, 8))
    _, saved = multi_head_attention_forward(params, x, x, mask=mask, scale=scale, softcap=softcap)
    return multi_head_attention_steps_backward(dout, saved)


# Texts ------------------------------------------------------------------------------------------------------------------------


def check_all_texts(texts: dict[str, list[list[str]]], steps: Any, at: tuple[int, ...]) -> None:
    problem = steps.steps.saved.problem
    for name in EXPLAINED:
        array = getattr(steps if hasattr(steps, name) else steps.steps, name)
        own = own_index(problem, array.shape[:-2], at)
        rows, columns = array.shape[-2:]
        assert texts[name] == [[steps.explain(name, i, j, at=own) for j in range(columns)] for i in range(rows)]


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_every_text_is_that_of_explain(shown, options):
    back = steps_of(attention_problem((2, 4, 3, 2), (1, 2, 5, 2), (2, 1, 5, 3), **options))
    shown.open(explore(back))
    check_all_texts(shown.texts(), back, (0, 0))
    for name, value in (("entry", "1"), ("head", "3")):
        shown.run(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'))",
            name,
            value,
        )
    texts = shown.texts()
    check_all_texts(texts, back, (1, 3))
    assert texts["q"][2][1] == f"q[2, 1] = {back.steps.saved.q[1, 3, 2, 1]:.4g}"


def test_numbers_of_every_kind(shown):
    values = [0.0, -0.0, 1, -1, 10, 1234.5, 9999.5, 99995, 1e-4, 9.9995e-5, 1.2e-5, 1e300, -1e300, 5e-324, 1e-100, 0.5, 120, 1e4]
    values = [*values, np.inf, -np.inf, np.nan]
    v = np.array([values])
    shown.open(explore(attention_steps(attention_forward(np.zeros((1, 1)), np.zeros((1, 1)), v)[1])))
    shown.step("v")
    assert shown.texts()["v"] == [[f"v[0, {n}] = {x:.4g}" for n, x in enumerate(values)]]


def test_long_sums_and_cut_features(shown):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((40, 30)) for _ in range(4))
    back = attention_steps_backward(dout, attention_forward(q, k, v, dropout=Dropout(0.5, 0))[1])
    shown.open(explore(back, features=9))
    texts = shown.texts(0, 39)
    for name in EXPLAINED:
        for i, row in zip((0, 39), texts[name], strict=True):
            assert row == [back.explain(name, i, j) for j in range(len(row))]
    shown.step("dv")
    assert shown.text("note") == "40 × 30; features 0 to 8 are shown"


# Hovering, clicking, switching -----------------------------------------------------------------------------------------------


def test_hovering_shows_which_keys_a_query_reads(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    steps = sentence(causal_mask())
    weights = steps.attention.steps.weights[0]
    shown.open(explore(steps, WORDS))
    queries = shown.all("#queries button")
    before = shown.weights()
    for i in (4, 2):
        ActionChains(shown.browser).move_to_element(queries[i]).perform()
        assert shown.weights() == [f"{w:.4g}" for w in weights[i]]
        hidden = shown.run("return [...document.querySelectorAll('#keys > span')].map((e) => e.classList.contains('hidden'))")
        assert hidden == [j > i for j in range(7)]
    ActionChains(shown.browser).move_to_element(shown.all("h1")[0]).perform()
    assert shown.weights() == before
    queries[3].click()
    assert shown.weights() == [f"{w:.4g}" for w in weights[3]]
    assert shown.text("explanation").startswith("weights[3, ")
    ActionChains(shown.browser).move_to_element(shown.cell(5, 1)).perform()
    assert shown.cell(5, 1).get_attribute("title") == f"was, cat: {weights[5, 1]:.4g}"


def test_clicking_a_cell(shown):
    steps = sentence(causal_mask()).attention
    shown.open(explore(steps, WORDS))
    shown.cell(4, 1).click()
    assert shown.text("explanation") == steps.explain("weights", 4, 1)
    assert shown.all("#pair")[0].text.replace("\n", " ").startswith("it reads cat made from biased[4, 1]")
    assert [th.text for th in shown.all("th.chosen")] == ["cat", "it"]
    shown.all("#sources button")[0].click()
    assert shown.text("explanation") == steps.explain("biased", 4, 1)
    shown.step("dk")  # the same key, seen as a row
    assert shown.text("explanation") == steps.explain("dk", 1, 0)
    shown.all("#sources button")[1].click()  # q of the first query
    assert shown.text("explanation") == f"q[0, 0] = {steps.steps.saved.q[0, 0, 0]:.4g}"


def test_switches_lead_to_the_runs_that_npattn_computed(shown):
    masks, scales, caps = (causal_mask(), None), (None, 1.0), (None, 1.5)
    runs = {(m, s, c): sentence(masks[m], scales[s], caps[c]) for m in (0, 1) for s in (0, 1) for c in (0, 1)}
    shown.open(explore(list(runs.values()), WORDS))
    shown.step("dscores")
    shown.cell(3, 2).click()
    for switches in [(0, 0, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (1, 1, 0)]:
        for c, n in enumerate(switches):
            shown.all(f"#choice-{c}-{n}")[0].click()
        assert shown.text("explanation") == runs[switches].attention.explain("dscores", 3, 2)
        assert shown.focused() == f"choice-2-{switches[2]}"


def test_a_switch_without_such_a_run_takes_the_nearest(shown):
    runs = [sentence(causal_mask()), sentence(None, softcap=1.5)]
    shown.open(explore(runs))
    shown.all("#choice-0-1")[0].click()
    assert shown.run("return [...document.querySelectorAll('input')].map((e) => e.checked)") == [False, True, False, True]
    shown.all("#choice-1-0")[0].click()
    assert shown.run("return [...document.querySelectorAll('input')].map((e) => e.checked)") == [True, False, True, False]


def test_heads_and_layers(shown):
    from selenium.webdriver.support.ui import Select

    layers = [sentence(heads=4), sentence(causal_mask(), heads=2)]
    shown.open(explore([layers], WORDS))
    shown.cell(4, 1).click()
    Select(shown.all("#head")[0]).select_by_index(3)
    assert shown.text("explanation") == layers[0].attention.explain("weights", 4, 1, at=(3,))
    assert shown.focused() == "head"
    Select(shown.all("#layer")[0]).select_by_index(1)  # it has two heads
    assert shown.text("explanation") == layers[1].attention.explain("weights", 4, 1, at=(1,))
    assert [o.text for o in Select(shown.all("#head")[0]).options] == ["0", "1"]


def test_shared_heads_are_named(shown):
    back = steps_of(attention_problem((4, 3, 2), (2, 5, 2), (2, 5, 3)))
    shown.open(explore(back))
    shown.step("dk")
    assert shown.text("note") == "5 × 2; shared by heads 0, 1"


def test_through_all_steps_forward_and_back(shown):
    shown.open(explore(sentence(causal_mask()), WORDS))
    order = [*FORWARD, *BACKWARD]
    shown.step("q")
    seen = [shown.text("step")]
    while shown.all("#next")[0].get_attribute("aria-disabled") == "false":
        shown.all("#next")[0].click()
        seen.append(shown.text("step"))
    assert seen == order
    while shown.all("#previous")[0].get_attribute("aria-disabled") == "false":
        shown.all("#previous")[0].click()
        seen.append(shown.text("step"))
    assert seen == order + order[-2::-1]
    repeats = [button.text for button in shown.all(".repeats")]
    assert repeats == ["capped", "dropped", "dweights", "dcapped", "dscores"]


def test_forward_alone_has_no_backward_row(shown):
    shown.open(explore(sentence().attention.steps))
    assert not shown.all("#backward-side")[0].is_displayed()
    assert len(shown.all("#forward button")) == 9


def test_dead_rows_are_hatched(shown):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 2))
    mask = np.array([[True, False], [False, False]])
    shown.open(explore(attention_steps_backward(v, attention_forward(q, k, v, mask=mask)[1])))
    hatched = "return [...document.querySelectorAll('#matrix td')].map((e) => e.classList.contains('hidden'))"
    expected = {
        "scores": [0, 0, 0, 0],
        "biased": [0, 1, 1, 1],
        "weights": [0, 1, 1, 1],
        "out": [0, 0, 1, 1],
        "dscores": [0, 1, 1, 1],
    }
    for name, flags in expected.items():
        shown.step(name)
        assert shown.run(hatched) == [bool(flag) for flag in flags]
    assert "hidden by the mask or a bias" in shown.text("legend")
    assert shown.all("#legend .hatch")[0].size["width"] > 10


# The keyboard ------------------------------------------------------------------------------------------------------------------


def test_the_keyboard_reaches_everything(shown):
    steps = [sentence(), sentence(causal_mask())]
    shown.open(explore(steps, WORDS))
    reached = []
    for _ in range(12):
        shown.press("TAB")
        reached.append(shown.focused())
        if reached[-1].startswith("sources") or reached[-1] == "BODY":
            break
    assert reached[0] == "choice-0-0"
    assert reached[1] == "head"
    assert reached[2].startswith("queries: ")
    assert reached[3:6] == ["forward: weights", "backward: dout", "previous"]
    assert reached[6:8] == ["next", "cell"]
    assert reached[8] == "sources: biased[" + reached[8].partition("[")[2]


def test_arrows(shown):
    steps = sentence(causal_mask())
    shown.open(explore(steps, WORDS))
    shown.all("#queries button")[2].click()
    shown.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert shown.focused() == "queries: it"
    assert shown.weights() == [f"{w:.4g}" for w in steps.attention.steps.weights[0, 4]]
    shown.press("HOME", "ARROW_LEFT")
    assert shown.focused() == "queries: The"
    shown.press("END")
    assert shown.focused() == "queries: tired"
    shown.step("weights")
    shown.press("ARROW_LEFT", "ARROW_LEFT")
    assert (shown.focused(), shown.text("step")) == ("forward: capped", "capped")
    shown.cell(1, 1).click()
    shown.press("ARROW_DOWN", "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_UP", "ARROW_LEFT")
    assert shown.text("explanation") == steps.attention.explain("capped", 1, 2)
    assert shown.focused() == "cell"
    assert shown.run("return document.activeElement.getAttribute('aria-label')").startswith("cat, sat: ")
    shown.press("END", "ARROW_RIGHT")
    assert shown.text("explanation") == steps.attention.explain("capped", 1, 6)
    shown.press("HOME", "ARROW_UP", "ARROW_UP", "ARROW_LEFT")
    assert shown.text("explanation") == steps.attention.explain("capped", 0, 0)


def test_the_chosen_cell_stays_in_sight(shown):
    q = np.random.default_rng(0).standard_normal((64, 2))
    shown.open(explore(attention_steps(attention_forward(q, q, q)[1])), width=360)
    inside = """
        const box = document.getElementById("matrix").getBoundingClientRect();
        const cell = document.querySelector("td.chosen").getBoundingClientRect();
        const [side, head] = ["tbody th", "thead th"].map((s) => document.querySelector("#matrix " + s).getBoundingClientRect());
        return cell.left >= side.right - 2 && cell.right <= box.right && cell.top >= head.bottom - 2 && cell.bottom <= box.bottom;
    """
    assert shown.run(inside)  # the last query, as there is no gradient
    shown.run("document.querySelector('td.chosen').focus()")
    for keys in (["HOME"], ["END"], ["ARROW_UP"] * 63, ["HOME"], ["ARROW_DOWN"] * 5):
        shown.press(*keys)
        assert shown.run(inside), keys


# Screens ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("tokens", [WORDS, [f"a rather long token {i}" for i in range(7)]], ids=["words", "long"])
def test_nothing_leaves_the_screen_or_is_covered(shown, width, dark, tokens):
    runs = [sentence(causal_mask()), sentence(window_mask(1, 1) & length_mask(5) | causal_mask(offset=-3))]
    shown.open(explore(runs, tokens), width=width, dark=dark)
    for name in ("weights", "dscores", "dk", "out"):
        shown.step(name)
        assert shown.run("return document.documentElement.scrollWidth") <= width
        outside = """
            return [...document.querySelectorAll("h1, h2, p, label, button, select, pre, #keys > span, fieldset")].filter((e) => {
              const box = e.getBoundingClientRect();
              return box.width && (box.left < 0 || box.right > arguments[0] + .5);
            }).map((e) => e.outerHTML.slice(0, 80));
        """
        assert shown.run(outside, width) == []
        overlapping = """
            const parts = [...document.querySelectorAll("button, select, #choices label, #keys > span, h1, h2, #legend")]
              .filter((e) => !e.closest("#panel")).map((e) => [e, e.getBoundingClientRect()]);
            const apart = ([a, p], [b, q]) => a.contains(b) || b.contains(a) ||
              p.right <= q.left + .5 || q.right <= p.left + .5 || p.bottom <= q.top + .5 || q.bottom <= p.top + .5;
            return parts.flatMap((one, n) => parts.slice(n + 1).filter((other) => !apart(one, other))
              .map((other) => one[0].outerHTML.slice(0, 60) + " | " + other[0].outerHTML.slice(0, 60)));
        """
        assert shown.run(overlapping) == []
    background = shown.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")


def luminance(colour: str) -> float:
    """Of a CSS colour as a browser computes it, opaque, in sRGB or OKLab."""
    kind, _, numbers = colour.rstrip(")").partition("(")
    if kind in ("rgb", "rgba"):
        channels = [float(n) / 255 for n in numbers.replace(",", " ").split()[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
    assert kind == "oklab"
    lightness, a, b = (float(n) for n in numbers.split()[:3])
    cones = np.array(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ]
    )
    rows = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    return float(np.clip(rows @ cones**3, 0, 1) @ [0.2126, 0.7152, 0.0722])


def test_luminance():
    assert luminance("rgb(255, 255, 255)") == pytest.approx(1)
    assert luminance("oklab(1 0 0)") == pytest.approx(1, abs=1e-3)
    assert luminance("oklab(0.62796 0.22486 0.12585)") == pytest.approx(luminance("rgb(255, 0, 0)"), abs=1e-3)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_numbers_can_be_read_on_their_colours(shown, dark):
    """A contrast of 4.5, as WCAG asks of text, at every strength of colour."""
    parts = np.linspace(-1, 1, 41)[:, None]
    saved = attention_forward(np.zeros((41, 1)), np.zeros((41, 1)), parts * np.abs(parts))[1]
    shown.open(explore(attention_steps(saved)), dark=dark)
    colours = """
        return [...document.querySelectorAll(arguments[0])].map((e) => {
          const style = getComputedStyle(e);
          return [style.color, style.backgroundColor, style.getPropertyValue("--part")];
        });
    """
    shown.step("v")
    found = shown.run(colours, "#matrix td")
    assert [float(part) for *_, part in found] == pytest.approx(100 * np.abs(parts).ravel(), abs=1)
    for text, back, part in [*found, *shown.run(colours, ".mark")]:
        low, high = sorted([luminance(text), luminance(back)])
        assert (high + 0.05) / (low + 0.05) > 4.5, (text, back, part)
    weights = np.clip(np.linspace(0, 1, 41) ** 2, 1e-300, 1)
    q = np.log(np.stack([weights, np.clip(1 - weights, 1e-300, 1)], axis=-1))  # with these keys the scores are q itself
    shown.open(explore(attention_steps(attention_forward(q, np.eye(2), np.eye(2), scale=1.0)[1])), dark=dark)
    for text, back, part in [
        *shown.run(colours, "#matrix td"),
        *shown.run(colours, ".mark"),
        *shown.run(colours, "#keys > span"),
    ]:
        low, high = sorted([luminance(text), luminance(back)])
        assert (high + 0.05) / (low + 0.05) > 4.5, (text, back, part)


def test_the_two_signs_and_the_shares_have_colours_of_their_own(shown):
    saved = attention_forward(np.zeros((2, 1)), np.zeros((2, 1)), np.array([[1.0, -1.0], [0.0, 0.5]]))[1]
    shown.open(explore(attention_steps(saved)))
    shown.step("v")
    colours = shown.run("return [...document.querySelectorAll('#matrix td')].map((e) => getComputedStyle(e).backgroundColor)")
    assert len(set(colours)) == 4
    shown.step("weights")
    assert shown.run("return getComputedStyle(document.querySelector('#matrix td')).backgroundColor") not in colours


# What is hostile or missing --------------------------------------------------------------------------------------------------


def test_hostile_tokens_are_text(shown):
    q = np.random.default_rng(0).standard_normal((len(HOSTILE), 2))
    shown.open(explore(attention_steps_backward(q, attention_forward(q, q, q)[1]), HOSTILE))
    shown.cell(0, 5).click()
    assert shown.all("#pair bdi")[1].text == HOSTILE[5]
    assert shown.run("return [...document.querySelectorAll('#queries button')].map((e) => e.textContent)")[:7] == HOSTILE[:7]
    assert shown.run("return document.querySelectorAll('img, main script').length") == 0
    assert len(shown.all("#matrix tbody tr")) == len(HOSTILE)


def test_nothing_is_loaded(shown):
    shown.open(explore(sentence()))
    assert shown.run("return performance.getEntriesByType('resource').length") == 0
    blocked = shown.browser.execute_async_script(
        "const done = arguments[0]; fetch('https://example.org/').then(() => done('loaded'), () => done('blocked'))"
    )
    assert blocked == "blocked"
    assert all("Content Security Policy" in message for message in shown.complaints())


def test_in_a_notebook(shown, tmp_path):
    steps = sentence(causal_mask()).attention
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{explore(steps, WORDS)._repr_html_()}", encoding="utf-8")
    shown.browser.get((tmp_path / "notebook.html").as_uri())
    shown.browser.switch_to.frame(shown.all("iframe")[0])
    shown.wait("return !!document.querySelector('#matrix td')")
    shown.cell(5, 3).click()
    assert shown.text("explanation") == steps.explain("weights", 5, 3)
    shown.browser.switch_to.default_content()


def test_an_old_browser_is_told_so(chromium, tmp_path):
    script = chromium.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": "delete window.DecompressionStream"})
    shown = Shown(chromium, tmp_path).open(explore(sentence()))
    chromium.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    assert shown.all("#trouble")[0].text == "The page cannot be shown: it needs a browser of 2023 or newer"
    assert any("2023" in message for message in shown.complaints())


def test_64_tokens_and_8_heads_are_quick(shown):
    rng = np.random.default_rng(0)
    params, (x, dout) = MultiHeadParams.init(rng, width=64, heads=8), rng.standard_normal((2, 64, 64))
    _, saved = multi_head_attention_forward(params, x, x, mask=causal_mask())
    back = multi_head_attention_steps_backward(dout, saved)
    shown.open(explore(back))
    milliseconds = shown.run(
        "const before = performance.now(); document.getElementById('next').click(); return performance.now() - before"
    )
    assert milliseconds < 1000
    shown.step("dbiased")
    shown.cell(40, 7).click()
    assert shown.text("explanation") == back.attention.explain("dbiased", 40, 7)
