"""Numbers that nobody here computed: PyTorch's gradients, and worked examples from tests and tutorials."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npattn import attention, attention_forward, attention_weights, length_mask, window_mask
from npattn.testing.candidates import naive_candidate
from npattn.testing.vectors import as_problem, published_examples, torch_gradients
from tests.attention.paths import CANDIDATES

DATA = Path(__file__).parents[1] / "data"
TORCH = {vector.name: vector for vector in torch_gradients(DATA, "scaled_dot_product_attention")}
PUBLISHED = {vector.name: (vector, atol) for vector, atol, _ in published_examples(DATA)}


def test_they_are_all_there():
    assert len(TORCH) == 20
    assert len(list(torch_gradients(DATA))) == 40
    assert len(PUBLISHED) == 15
    assert sum(vector.expected.get("dmask") is not None for vector in TORCH.values()) >= 3


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("candidate", [naive_candidate, *CANDIDATES.values()], ids=["the naive loops", *CANDIDATES])
def test_pytorch_gradients(candidate, name):
    problem, expected = as_problem(TORCH[name])
    got = candidate.answer(problem)
    for what, wanted in expected.given().items():
        np.testing.assert_allclose(getattr(got, what), wanted, rtol=0, atol=1e-12, err_msg=what)
    assert (got.dbias is None) == (problem.bias is None)


def weights(q, k, **options):
    _, saved = attention_forward(q, k, np.ones((*k.shape[:-1], 1)), **options)
    return attention_weights(saved)


def karim(inputs):
    x, w_q, w_k = inputs["x"], inputs["Wq"], inputs["Wk"]
    return weights(x @ w_q, x @ w_k, scale=1.0)


def raschka(inputs):
    return weights(inputs["x"], inputs["x"], scale=1.0)[:2]


def d2l(inputs):
    """Any queries will do: all keys are alike. A batch without heads is written with a head axis."""
    q = np.random.default_rng(0).standard_normal((2, 1, 1, 2))
    v = np.broadcast_to(np.arange(40.0).reshape(1, 1, 10, 4), (2, 1, 10, 4))
    return attention(q, np.ones((2, 1, 10, 2)), v, mask=length_mask(inputs["valid_lens"]))[:, 0]


# How each worked example that is an attention is written with npattn; `inputs` are its arrays.
AS_OURS = {
    "keras_attention_dot_out": lambda inputs: attention(inputs["q"], inputs["k"], inputs["v"], scale=1.0),
    "keras_attention_value_mask_weights": lambda inputs: weights(inputs["q"], inputs["k"], scale=1.0, mask=inputs["mask_keep"]),
    "equinox_weights": lambda inputs: weights(inputs["q"], inputs["k"]),
    "equinox_out": lambda inputs: attention(inputs["q"], inputs["k"], inputs["v"]),
    "onnx_bidirectional_window": lambda inputs: attention(inputs["q"], inputs["k"], inputs["v"], mask=window_mask(1, 2)),
    "karim_weights": karim,
    "raschka_weights_rows01": raschka,
    "d2l_valid_lens": d2l,
}


@pytest.mark.parametrize("name", AS_OURS)
def test_published_examples(name):
    vector, atol = PUBLISHED[name]
    np.testing.assert_allclose(AS_OURS[name](vector.inputs), vector.expected["out"], rtol=0, atol=atol)
