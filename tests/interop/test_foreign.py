"""Models of other libraries: what they gave and what gradients they had (tests/data/foreign_layouts.npz, and the vectors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn import interop, length_mask, multi_head_attention
from npattn._arrays.trees import tree_items
from npattn.models import (
    encoder_backward,
    encoder_forward,
    language_model_backward,
    language_model_forward,
    token_embedding_backward,
    token_embedding_forward,
)

FILE = Path(__file__).parents[1] / "data" / "foreign_layouts.npz"
with np.load(FILE) as ARRAYS:
    FOUND = {name: ARRAYS[name] for name in ARRAYS.files}
SETTINGS = json.loads(str(FOUND["settings"]))


def of(case: str, kind: str) -> dict[str, np.ndarray]:
    prefix = f"{case}/{kind}/"
    return {name.removeprefix(prefix): x for name, x in FOUND.items() if name.startswith(prefix)}


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def trees_close(got: Any, expected: Any) -> None:
    ours, theirs = dict(tree_items(got)), dict(tree_items(expected))
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_language_models(case):
    load = getattr(interop, f"from_{case}")
    params, config = load(of(case, "state"), config=SETTINGS[case])
    result = of(case, "result")
    out, saved = language_model_forward(params, of(case, "input")["input_ids"], config=config)
    close(out, result["out"])
    grads = language_model_backward(result["cotangent"], saved).dparams
    gradient = of(case, "gradient")
    if case == "gpt2":
        assert params.w_out is None
    trees_close(grads, load(gradient, config=SETTINGS[case]).params)


def test_bert():
    params, config = interop.from_bert(of("bert", "state"), config=SETTINGS["bert"])
    inputs, result = of("bert", "input"), of("bert", "result")
    ids, types = inputs["input_ids"], inputs["token_type_ids"]
    x, embedded = token_embedding_forward(params.embedding, ids, types=types, config=config.embedding)
    mask = length_mask(inputs["attention_mask"].sum(1))
    out, saved = encoder_forward(params.encoder, x, mask=mask, config=config.block)
    close(out, result["out"])
    grads = encoder_backward(result["cotangent"], saved)
    dembedding = token_embedding_backward(grads.dx, embedded).dparams
    expected = dict(of("bert", "gradient"))
    unused = {name: np.zeros_like(x) for name, x in of("bert", "state").items() if name.startswith("pooler.")}
    theirs = interop.from_bert({**expected, **unused}, config=SETTINGS["bert"]).params
    trees_close(interop.BertParams(dembedding, grads.dparams, theirs.w_pool, theirs.b_pool), theirs)


@pytest.mark.parametrize("kind", ["flax", "keras", "equinox"])
def test_attention(kind):
    state, inputs = of(kind, "state"), of(kind, "input")
    if kind == "keras":
        params = interop.from_keras_attention([state[str(n)] for n in range(8)]).params
    elif kind == "flax":
        params = interop.from_flax_attention(state).params
    else:
        params = interop.from_equinox_attention(state, heads=3).params
    close(multi_head_attention(params, inputs["x_q"], inputs["x_kv"]), of(kind, "result")["out"])
