"""Candidates whose gradients PyTorch or JAX make from our own forward: no formula of a backward is involved."""

from __future__ import annotations

from typing import Any
from unittest import mock

from npattn import attention_forward
from npattn._attention.ops import Fresh
from npattn.testing.candidates import Answer, Candidate, Run
from npattn.testing.inputs import bias_with
from npattn.testing.libraries import Library
from npattn.testing.problems import AttentionProblem

row_max = Fresh.row_max


def autodiff_candidate(library: Library) -> Candidate:
    """npattn's forward on PyTorch or JAX, differentiated by that library.

    The largest score of a row is a constant to it: no result depends on which number is subtracted. Through it, the derivatives
    of all keys would meet at one of them, where they cancel but for a rounding of the largest.
    """
    differentiate, constant = (_torch, _torch_constant) if library.name == "torch" else (_jax, _jax_constant)

    def run(problem: AttentionProblem, backward: bool) -> Run:
        inputs = problem.inputs(library)
        moving = {name: x for name, x in inputs.arrays().items() if name not in ("dout", "dlse")}

        def forward(values: dict[str, Any]) -> tuple[Any, Any]:
            options = dict(inputs.options)
            if "bias" in options:
                options["bias"] = bias_with(problem.bias, values["bias"])
            if "sinks" in options:
                options["sinks"] = values["sinks"]
            with mock.patch.object(Fresh, "row_max", lambda ops, a: constant(row_max(ops, a))):
                out, saved = attention_forward(values["q"], values["k"], values["v"], **options)
            return out, saved.lse

        if not backward:
            return Run(inputs.arrays(), Answer(*forward(moving)))
        out, lse, gradients = differentiate(forward, moving, inputs.dout, inputs.dlse)
        return Run(inputs.arrays(), Answer(out, lse)._replace(**{f"d{name}": dx for name, dx in gradients.items()}))

    return Candidate(f"autodiff by {library.name}", run)


def _torch_constant(x: Any) -> Any:
    return x.detach()


def _jax_constant(x: Any) -> Any:
    import jax

    return jax.lax.stop_gradient(x)


def _torch(forward: Any, moving: dict[str, Any], dout: Any, dlse: Any) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    values = {name: x.requires_grad_() for name, x in moving.items()}
    out, lse = forward(values)
    outputs, cotangents = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    if not any(x.requires_grad for x in outputs):  # nothing is seen at all
        return out, lse, {name: torch.zeros_like(x) for name, x in values.items()}
    gradients = torch.autograd.grad(outputs, list(values.values()), cotangents, materialize_grads=True)
    return out, lse, dict(zip(values, gradients, strict=True))


def _jax(forward: Any, moving: dict[str, Any], dout: Any, dlse: Any) -> tuple[Any, Any, dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    @jax.jit  # without it, every operation of every new shape is compiled on its own
    def all_at_once(moving: dict[str, Any], dout: Any, dlse: Any) -> tuple[Any, Any, dict[str, Any]]:
        (out, lse), pullback = jax.vjp(forward, moving)
        (gradients,) = pullback((dout, jnp.zeros_like(lse) if dlse is None else dlse))
        return out, lse, gradients

    out, lse, gradients = all_at_once(moving, dout, dlse)
    return out, lse, gradients
