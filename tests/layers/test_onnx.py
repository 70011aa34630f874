"""ONNX's own node cases of its normalisations and activations: numbers that nobody here computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npattn.layers import gelu, gelu_tanh, layer_norm_forward, relu, rms_norm, silu

onnx = pytest.importorskip("onnx", minversion="1.23.2", reason="onnx >= 1.23.2 is not installed")

from tests.attention.onnx_adapter import Arrays, node_cases  # noqa: E402

COUNTS = {"LayerNormalization": 19, "RMSNormalization": 19, "Gelu": 4, "Swish": 1, "Relu": 1}  # of onnx 1.23.2
CASES = {op: node_cases(op) for op in COUNTS}


def run_node(op: str, inputs: Arrays, attributes: dict[str, Any]) -> Arrays:
    """The operator's outputs, made by npattn; their names as its schema has them."""
    x, options = inputs["X"], dict(attributes)
    if op == "Relu":
        out = {"Y": relu(x)}
    elif op == "Swish":
        assert options.pop("alpha", 1.0) == 1.0
        out = {"Y": silu(x)}
    elif op == "Gelu":
        out = {"Y": {b"none": gelu, b"tanh": gelu_tanh}[options.pop("approximate", b"none")](x)}
    else:
        first = options.pop("axis", -1)
        axes = tuple(range(first % x.ndim, x.ndim))
        eps = options.pop("epsilon", 1e-5)
        if op == "RMSNormalization":
            out = {"Y": rms_norm(x, inputs["scale"], eps=eps, axes=axes)}
        else:
            y, saved = layer_norm_forward(x, inputs["Scale"], inputs.get("B"), eps=eps, axes=axes)
            out = {"Y": y, "Mean": saved.mean, "InvStdDev": saved.rstd}
    assert not options
    return out


def test_nothing_is_left_out():
    for op, count in COUNTS.items():
        assert len(CASES[op]) == count if onnx.__version__ == "1.23.2" else len(CASES[op]) >= count


@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op, cases in CASES.items() for case in cases], ids=lambda part: getattr(part, "name", "")
)
def test_node(op, case):
    got = run_node(op, case.inputs, case.attributes)
    assert set(case.outputs) <= set(got)
    for name, expected in case.outputs.items():
        assert got[name].dtype == expected.dtype
        np.testing.assert_allclose(got[name], expected, rtol=2e-6, atol=1e-6, err_msg=name)
