"""Random directions for whole problems, npattn's tangents along them, and those of other libraries' forward mode."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from npattn import (
    AttentionTangents,
    attention_backward,
    attention_backward_jvp,
    attention_forward,
    attention_jvp,
)
from npattn._attention.tiling import Sizes, forced
from npattn.testing.inputs import Inputs, bias_with
from npattn.testing.libraries import Library, asarray, to_numpy
from npattn.testing.problems import AttentionProblem
from tests.attention.tangent_matrices import Along, Results

INPUTS = ("q", "k", "v", "bias", "sinks")


def directions(problem: AttentionProblem, purpose: str = "tangents", *, share: float = 1.0) -> dict[str, np.ndarray]:
    """A random tangent of every input and cotangent, or of a ``share`` of them."""
    rng = problem.rng(purpose)
    named = {
        name: rng.standard_normal(x.shape).astype(x.dtype.newbyteorder("=")) for name, x in problem.inputs().arrays().items()
    }
    return {name: t for name, t in named.items() if rng.random() < share}


def attention_tangents(along: Mapping[str, Any]) -> AttentionTangents:
    """As npattn takes them."""
    return AttentionTangents(*(along.get(name) for name in INPUTS))


def in_library(problem: AttentionProblem, along: Along, library: Library | None) -> tuple[Inputs, dict[str, Any]]:
    """The problem's inputs, and the tangents, in a library's arrays; the problem's own without one."""
    inputs = problem.inputs(library)
    return inputs, dict(along) if library is None else {name: asarray(t, library) for name, t in along.items()}


def tangents_of(inputs: Inputs, along: Mapping[str, Any]) -> Results:
    """npattn's, in the arrays of the inputs."""
    t = attention_tangents(along)
    _, _, tout, tlse = attention_jvp(inputs.q, inputs.k, inputs.v, t, **inputs.options)
    _, saved = attention_forward(inputs.q, inputs.k, inputs.v, **inputs.options)
    given = {"dlse": inputs.dlse, "tdout": along.get("dout"), "tdlse": along.get("dlse")}
    return Results(tout, tlse, *attention_backward_jvp(inputs.dout, saved, t, **given))


def ours(problem: AttentionProblem, along: Along, *, sizes: Sizes | None = None, library: Library | None = None) -> Results:
    """npattn's tangents in NumPy, with tile sizes forced, or on another library."""
    inputs, t = in_library(problem, along, library)
    with (
        contextlib.nullcontext() if sizes is None else forced(sizes),
        contextlib.nullcontext() if library is None else library.active(),
    ):
        found = tangents_of(inputs, t)
    return Results(*(None if x is None else to_numpy(x) for x in found))


def autodiff(problem: AttentionProblem, along: Along, library: Library) -> Results:
    """Forward mode of PyTorch or JAX through npattn's own forward and backward."""
    inputs, given = in_library(problem, along, library)
    point = inputs.arrays()
    t = {name: given[name] if name in given else library.xp.zeros_like(x) for name, x in point.items()}

    def both(values: dict[str, Any]) -> tuple[Any, ...]:
        options = dict(inputs.options)
        if "bias" in options:
            options["bias"] = bias_with(problem.bias, values["bias"])
        if "sinks" in options:
            options["sinks"] = values["sinks"]
        out, saved = attention_forward(values["q"], values["k"], values["v"], **options)
        grads = attention_backward(values["dout"], saved, dlse=values.get("dlse"))
        return out, saved.lse, *(g for g in grads if g is not None)

    tout, tlse, *grads = _jvp(both, point, t, library)
    names = [f"td{name}" for name in INPUTS if name in point]
    found = dict(zip(names, (to_numpy(g) for g in grads), strict=True))
    tlse = to_numpy(tlse)
    return Results(
        to_numpy(tout), np.where(np.isnan(tlse), 0, tlse), *(found.get(f"td{name}") for name in INPUTS)
    )  # of a constant -inf they say NaN


def _jvp(f: Any, point: Any, t: Any, library: Library) -> Any:
    if library.name == "torch":
        import torch

        return torch.func.jvp(f, (point,), (t,))[1]
    import jax

    return jax.jit(lambda p, t: jax.jvp(f, (p,), (t,))[1])(point, t)  # at once: eagerly every operation is compiled alone
