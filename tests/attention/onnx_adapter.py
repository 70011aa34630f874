"""The ``Attention`` operator of ONNX (opsets 23 to 25) as a call of npattn, and the node cases that the onnx package has for it.

Only the package's own Python modules are read; importing them takes half a second and makes the numbers.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from npattn import attention_forward, attention_steps, causal_mask, length_mask, window_mask
from npattn._attention.masks import Mask, as_mask

Arrays = dict[str, np.ndarray[Any, Any]]

STEPS = ("scores", "capped", "biased", "weights")  # what qk_matmul_output_mode 0 to 3 asks for


class Case(NamedTuple):
    """One node with its inputs and expected outputs, by their names in the operator's schema."""

    name: str
    inputs: Arrays
    attributes: dict[str, Any]
    outputs: Arrays
    rtol: float
    atol: float


def node_cases(op: str = "Attention") -> list[Case]:
    """Every case whose graph is one node of this operator: the others repeat these with it written out in simpler ones."""
    import onnx
    from onnx.backend.test.case import node as suite

    importlib.import_module(f"onnx.backend.test.case.node.{op.lower()}")  # which adds its cases to the suite
    names = onnx.defs.get_schema(op)
    found = []
    for case in suite._NodeTestCases:
        node, *more = case.model.graph.node
        if node.op_type != op or more:
            continue
        ((inputs, outputs),) = case.data_sets
        found.append(
            Case(
                case.name.removeprefix("test_"),
                _by_name(names.inputs, node.input, inputs),
                {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute},
                _by_name(names.outputs, node.output, outputs),
                case.rtol,
                case.atol,
            )
        )
    return found


def _by_name(schema: Any, used: Any, arrays: Any) -> Arrays:
    """An optional input or output that is left out has an empty name, and no array."""
    given = iter(arrays)
    return {formal.name: np.asarray(next(given)) for formal, actual in zip(schema, used, strict=False) if actual}


def run_node(inputs: Arrays, attributes: dict[str, Any]) -> Arrays:
    """The operator's four outputs, made by npattn."""
    arrays, options = dict(inputs), dict(attributes)
    q, k, v = (arrays.pop(name) for name in "QKV")
    flat = q.ndim == 3  # (B, T, H·D): the heads lie side by side
    if flat:
        kv_heads = options.pop("kv_num_heads")
        q, k, v = _into_heads(q, options.pop("q_num_heads")), _into_heads(k, kv_heads), _into_heads(v, kv_heads)
    past = 0
    if "past_key" in arrays:
        past = arrays["past_key"].shape[-2]
        k = np.concatenate([arrays.pop("past_key"), k], axis=-2)
        v = np.concatenate([arrays.pop("past_value"), v], axis=-2)

    masks: list[Mask] = []
    offset: Any = past  # the position of the first query among the keys
    if "nonpad_kv_seqlen" in arrays:
        lengths = arrays.pop("nonpad_kv_seqlen")
        masks.append(length_mask(lengths))
        offset = lengths - q.shape[-2]
    if options.pop("is_causal", 0):
        masks.append(causal_mask(offset))
    left, right = (options.pop(f"{side}_window_size", -1) for side in ("left", "right"))
    masks.append(window_mask(None if left == -1 else left, None if right == -1 else right, offset))
    bias = None
    if "attn_mask" in arrays:
        pairs = arrays.pop("attn_mask")
        missing = [(0, 0)] * (pairs.ndim - 1) + [(0, k.shape[-2] - pairs.shape[-1])]  # it may end early: no query sees the rest
        if pairs.dtype == bool:
            masks.append(as_mask("onnx", np.pad(pairs, missing)))
        else:  # numbers are added, whole ones too
            bias = np.pad(pairs.astype(q.dtype), missing, constant_values=-np.inf)

    mode = options.pop("qk_matmul_output_mode", 0)
    options.pop("softmax_precision", None)  # npattn's is float32 at least, for any input
    known = {name: options.pop(name) for name in ("scale", "softcap") if name in options}
    if arrays or options:
        raise ValueError(f"no meaning is known for the inputs {list(arrays)} and the attributes {list(options)}")

    out, saved = attention_forward(q, k, v, mask=functools.reduce(lambda a, b: a & b, masks), bias=bias, **known)
    qk = getattr(attention_steps(saved), STEPS[mode])
    out = np.reshape(np.moveaxis(out, 1, 2), (out.shape[0], out.shape[2], -1)) if flat else out
    return {"Y": out, "present_key": k, "present_value": v, "qk_matmul_output": qk.astype(q.dtype)}


def _into_heads(x: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    return np.moveaxis(np.reshape(x, (*x.shape[:-1], heads, -1)), -2, 1)
