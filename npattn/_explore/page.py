"""The page: its text, style and script from files of the package, and the data between them."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import numpy as np

from npattn._attention.explain import FORMULAS, number
from npattn._explore.numbers import Packer
from npattn._explore.runs import Runs
from npattn._explore.tables import BACKWARD, FORWARD, LEAST, pack
from npattn._explore.tokens import token_pair

GIVEN = {"q": "given", "k": "given", "v": "given", "dout": "given: the gradient that arrives at out"}
PROJECTED = {
    "q": "projected from x_q",
    "k": "projected from x_kv",
    "v": "projected from x_kv",
    "dout": "from the projection that merges the heads",
}


def make_page(given: Runs, tokens: Any, features: int | None) -> str:
    """One HTML document, in ASCII."""
    packer = Packer()
    shown = [n for n in FORWARD + BACKWARD if all(n in layer.arrays for run in given.runs for layer in run)]
    if features is None:
        features = min(layer.features() for run in given.runs for layer in run)
    features = max(features, LEAST)
    data: dict[str, Any] = {
        "steps": shown,
        "forward": [name for name in shown if name in FORWARD],
        "start": _start(given),
        "formulas": FORMULAS | (PROJECTED if given.projected else GIVEN),
        "choices": [choice._asdict() for choice in given.choices],
        "tokens": [token_pair("explore", tokens, layer.problem.queries, layer.problem.keys) for layer in given.runs[0]],
        "runs": [[pack(layer, packer, features) for layer in run] for run in given.runs],
        "marks": [
            {name: _marks(name, [run[n].arrays[name][..., :features] for run in given.runs]) for name in shown}
            for n in range(len(given.runs[0]))
        ],
    }
    data |= {"blocks": packer.blocks, "count": packer.count}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {"style": _file("page.css"), "script": _file("page.js"), "data": text, "numbers": packer.text()}
    return re.sub("@@(" + "|".join(parts) + ")@@", lambda gap: parts[gap[1]], _file("page.html"))  # once: parts may hold gaps


def _file(name: str) -> str:
    return resources.files("npattn._explore").joinpath(name).read_text("ascii")


def _start(given: Runs) -> list[int]:
    """The query at whose output the largest gradient arrives, and the key that it reads most, in the first head of all."""
    arrays = given.runs[0][0].arrays
    query = arrays["weights"].shape[1] - 1
    if "dout" in arrays:
        query = int(np.argmax(np.nan_to_num(np.abs(arrays["dout"][0])).sum(axis=-1)))
    return [query, int(np.argmax(np.nan_to_num(arrays["weights"][0, query])))]


def _marks(name: str, arrays: list[Any]) -> list[str]:
    """The numbers that a step's colours are explained by, up to the largest: the same for all heads and runs of a layer."""
    finite = [np.abs(x[np.isfinite(x)]) for x in arrays]
    most = max((float(x.max()) for x in finite if x.size), default=0.0)
    parts = (0, 1 / 16, 1 / 4, 9 / 16, 1) if name in ("weights", "dropped") else (-1, -1 / 4, 0, 1 / 4, 1)
    return [number(part * most) for part in parts] if most else ["0"]
