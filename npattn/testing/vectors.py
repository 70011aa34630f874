"""Numbers that nobody here computed, read as problems with their answers: see tests/data/README.md for where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.mask_kinds import causal_mask
from npattn.testing.candidates import Answer
from npattn.testing.problems import AttentionProblem


class Vector(NamedTuple):
    """A case of someone else's: what went in and what came out, by name."""

    name: str
    op: str
    settings: dict[str, Any]  # flags, masks and sizes as the source describes them
    inputs: dict[str, Array]
    cotangent: Array | None
    expected: dict[str, Array]  # out, and the gradient of the input x as dx
    parameters: dict[str, Array] = {}  # noqa: RUF012 - never written to
    parameter_gradients: dict[str, Array] = {}  # noqa: RUF012


def torch_gradients(folder: Path, op: str | None = None) -> Iterator[Vector]:
    """PyTorch's float64 autograd.

    Parameters
    ----------
    folder : Path
        With torch_gradients.json and torch_gradients.npz.
    op : str, optional
        Only the cases of this operation.

    Yields
    ------
    Vector
        With the loss sum(out * cotangent).
    """
    listed = json.loads((folder / "torch_gradients.json").read_text())["cases"]
    with np.load(folder / "torch_gradients.npz") as arrays:
        for case in listed:
            if op not in (None, case["op"]):
                continue
            prefix = f"{case['name']}/"
            own = {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}
            yield Vector(
                case["name"],
                case["op"],
                {name: value for name, value in case.items() if name not in ("name", "op")},
                _starting_with("in_", own),
                own["g_out"],
                {"out": own["out"], **{f"d{name}": dx for name, dx in _starting_with("d_", own).items()}},
                _starting_with("p_", own),
                _starting_with("dp_", own),
            )


def _starting_with(prefix: str, arrays: dict[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def as_problem(vector: Vector) -> tuple[AttentionProblem, Answer]:
    """A ``scaled_dot_product_attention`` of PyTorch as our problem and its answer.

    Parameters
    ----------
    vector : Vector
        Of `torch_gradients`.

    Returns
    -------
    problem : AttentionProblem
        A float mask is a bias; a boolean one says True where a query may attend, as ours do; causal is top-left.
    answer : Answer
        out, dq, dk, dv, and dbias where PyTorch has it.
    """
    flags, mask = vector.settings["flags"], vector.inputs.get("mask")
    masks: dict[str, Any] = {"mask": causal_mask()} if flags.get("is_causal") else {}
    if mask is not None:
        masks["mask" if mask.dtype == bool else "bias"] = mask
    inputs = vector.inputs
    assert vector.cotangent is not None
    problem = AttentionProblem(inputs["q"], inputs["k"], inputs["v"], vector.cotangent, scale=flags.get("scale"), **masks)
    expected = vector.expected
    return problem, Answer(expected["out"], None, expected["dq"], expected["dk"], expected["dv"], expected.get("dmask"))


def published_examples(folder: Path) -> Iterator[tuple[Vector, float, str]]:
    """Worked examples from tests and tutorials.

    Parameters
    ----------
    folder : Path
        With published_examples.json.

    Yields
    ------
    vector : Vector
        Its expected out under ``out``; arrays as nested lists have them.
    atol : float
        The digits that were printed.
    source : str
        Where it stands.
    """
    for case in json.loads((folder / "published_examples.json").read_text()):
        inputs = {name: np.asarray(value) for name, value in case["inputs"].items() if name != "dtype"}
        expected = {"out": np.asarray(case["expected"], dtype=np.float64)}
        yield Vector(case["id"], case["op"], case["params"], inputs, None, expected), case["atol"], case["source"]


def torch_layers(folder: Path) -> Iterator[Vector]:
    """Whole encoders, decoders and transformers, printed in PyTorch's own tests.

    Parameters
    ----------
    folder : Path
        With torch_layers.json.

    Yields
    ------
    Vector
        Inputs as nested lists have them, (T, B, C), and masks in which True is ignored; ``out`` to five or six digits, or nothing
        expected where PyTorch gave NaN.
    """
    settings = ("kind", "activation", "layers", "enc_layers", "dec_layers", "final_norm", "src_causal")
    for case in json.loads((folder / "torch_layers.json").read_text())["cases"]:
        expected = {} if isinstance(case["expected"], str) else {"out": np.asarray(case["expected"])}
        inputs = {name: value for name, value in case.items() if name not in (*settings, "name", "expected")}
        kept = {name: case[name] for name in settings if name in case}
        yield Vector(case["name"], case["kind"], kept, inputs, None, expected)
