"""ONNX's own node cases of its Attention operator: numbers that nobody here computed."""

import numpy as np
import pytest

from npattn._attention.tiling import forced

onnx = pytest.importorskip(
    "onnx", minversion="1.23.2", reason="onnx >= 1.23.2 is not installed (older ones hold two wrong cases)"
)

from .onnx_adapter import node_cases, run_node  # noqa: E402
from .paths import PATHS  # noqa: E402

CASES = node_cases()
# float16: ONNX's own; bfloat16: that of its test runner. Its numbers are rounded after every step and ours once. float32: ours
RTOL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 2**-6}


def test_nothing_is_left_out():
    expected = 93  # node cases of onnx 1.23.2
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(CASES) == expected if onnx.__version__ == "1.23.2" else len(CASES) >= expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_node(case, path):
    with forced(PATHS[path]):
        got = run_node(case.inputs, case.attributes)
    assert set(case.outputs) <= set(got)
    for name, expected in case.outputs.items():
        assert got[name].dtype == expected.dtype, name
        rtol = RTOL[expected.dtype.name]
        assert rtol <= max(case.rtol, 2**-6)
        np.testing.assert_allclose(got[name].astype(float), expected.astype(float), rtol=rtol, atol=case.atol, err_msg=name)


@pytest.mark.parametrize("case", [c for c in CASES if c.outputs["Y"].dtype.name == "bfloat16"], ids=lambda case: case.name)
def test_bfloat16_is_rounded_once(case):
    """ONNX's own tolerance for bfloat16 is wide; ours is the float64 result, rounded."""
    inputs = {name: x.astype(float) if x.dtype.name == "bfloat16" else x for name, x in case.inputs.items()}
    exact, got = (run_node(given, case.attributes)["Y"].astype(float) for given in (inputs, case.inputs))
    np.testing.assert_allclose(got, exact, rtol=1.001 * 2**-8, atol=0)


def test_what_the_adapter_does_not_know_is_no_silent_pass():
    case = CASES[0]
    with pytest.raises(ValueError, match=r"no meaning is known for the inputs \['x'\] and the attributes \['y'\]"):
        run_node({**case.inputs, "x": np.zeros(1)}, {**case.attributes, "y": 1})


def test_whole_numbers_are_added():
    """The schema allows an integer mask; no case has one."""
    q = np.zeros((1, 1, 1, 1), dtype=np.float32)
    k, v = np.zeros((1, 1, 2, 1), dtype=np.float32), np.asarray([[[[1.0], [2.0]]]], dtype=np.float32)
    y = run_node({"Q": q, "K": k, "V": v, "attn_mask": np.asarray([[1, 0]])}, {})["Y"]
    np.testing.assert_allclose(y, (np.e + 2) / (np.e + 1), rtol=1e-6)


@pytest.mark.parametrize("mask", [np.asarray([[True]]), np.asarray([[0.0]], dtype=np.float32)], ids=["bool", "float"])
def test_a_mask_that_ends_early_hides_the_rest(mask):
    """In every case that has one, the keys after it are hidden by their number too."""
    q, k = np.zeros((1, 1, 1, 1), dtype=np.float32), np.zeros((1, 1, 3, 1), dtype=np.float32)
    v = np.asarray([[[[5.0], [np.nan], [7.0]]]], dtype=np.float32)
    np.testing.assert_array_equal(run_node({"Q": q, "K": k, "V": v, "attn_mask": mask}, {})["Y"], [[[[5]]]])
