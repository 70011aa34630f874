"""npattn and what it is measured against, each made ready to run a pass of a case on arrays of its own."""

from __future__ import annotations

import importlib
import math
import os
from typing import Any, Protocol

from npattn import attention, attention_backward, attention_forward
from npattn._arrays.namespace import Array, Namespace
from npattn._commands.bench_backends import Backend, Call
from npattn._commands.bench_cases import BOTH, FORWARD, Case, Inputs

MOST_BYTES = 2 << 30  # that the written-out matrices of a rival may take
MATRICES = {FORWARD: 3, BOTH: 4}  # of the size of the scores that the written-out formula holds at a time


class Rival(Protocol):
    """Something that computes attention."""

    name: str

    def prepare(self, case: Case, inputs: Inputs, name: str) -> Call | None:
        """A pass, ready to run on arrays that are in place; None if this rival leaves it out."""


class Npattn:
    """This package."""

    name = "npattn"

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def prepare(self, case: Case, inputs: Inputs, name: str) -> Call:
        q, k, v, dout = (self.backend.array(x, case.dtype) for x in inputs[:4])
        mask = case.mask

        def both() -> tuple[Array, ...]:
            out, saved = attention_forward(q, k, v, mask=mask)
            grads = attention_backward(dout, saved)
            return out, grads.dq, grads.dk, grads.dv

        return (lambda: (attention(q, k, v, mask=mask),)) if name == FORWARD else both


class Naive:
    """The formula as textbooks write it, on the backend's arrays."""

    name = "naive"

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def prepare(self, case: Case, inputs: Inputs, name: str) -> Call | None:
        if writes_too_much(case, name):
            return None
        if self.backend.name == "numpy" and case.dtype == "float16":  # no BLAS takes it: minutes
            return None
        xp, group = self.backend.xp, case.H // case.K
        q, k, v, dout = (self.backend.array(x, case.dtype) for x in inputs[:4])
        visible = None if inputs.visible is None else xp.asarray(inputs.visible)

        def forward() -> tuple[Array, ...]:
            every_k, every_v = (_repeat(x, group) for x in (k, v))
            return (naive_forward(q, every_k, every_v, visible, xp)[0],)

        def both() -> tuple[Array, ...]:
            every_k, every_v = (_repeat(x, group) for x in (k, v))
            out, weights = naive_forward(q, every_k, every_v, visible, xp)
            dq, dk, dv = naive_backward(dout, q, every_k, every_v, weights)
            if group > 1:
                dk, dv = (x.reshape(case.B, case.K, group, case.S, case.D).sum(axis=2) for x in (dk, dv))
            return out, dq, dk, dv

        return forward if name == FORWARD else both


def naive_forward(q: Array, k: Array, v: Array, visible: Array | None, xp: Namespace) -> tuple[Array, Array]:
    """Out and weights."""
    scores = q @ k.swapaxes(-1, -2) * (1 / math.sqrt(q.shape[-1]))
    if visible is not None:
        scores = xp.where(visible, scores, -math.inf)
    exponentials = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return weights @ v, weights


def naive_backward(dout: Array, q: Array, k: Array, v: Array, weights: Array) -> tuple[Array, Array, Array]:
    """dq, dk and dv."""
    dv = weights.swapaxes(-1, -2) @ dout
    dweights = dout @ v.swapaxes(-1, -2)
    dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True)) * (1 / math.sqrt(q.shape[-1]))
    return dscores @ k, dscores.swapaxes(-1, -2) @ q, dv


def _repeat(x: Array, group: int) -> Array:
    """Keys or values, once for every query head that reads them."""
    return x.repeat(group, axis=1) if group > 1 else x


def writes_too_much(case: Case, name: str) -> bool:
    """Whether the matrices of a formula that is not fused are too large to be written out."""
    return MATRICES[name] * case.matrix_bytes() > MOST_BYTES


class Torch:
    """PyTorch's ``scaled_dot_product_attention``, with the kernel that it chooses."""

    name = "torch"

    def __init__(self, torch: Any, device: str, threads: int) -> None:
        self.torch, self.device = torch, device
        torch.set_num_threads(threads)

    def prepare(self, case: Case, inputs: Inputs, name: str) -> Call | None:
        torch, dtype = self.torch, getattr(self.torch, case.dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        q, k, v, dout = (torch.from_numpy(x).to(self.device, dtype) for x in inputs[:4])
        causal = case.kind == "causal"
        visible = None if causal or inputs.visible is None else torch.from_numpy(inputs.visible).to(self.device)
        options = {"attn_mask": visible, "is_causal": causal, "enable_gqa": case.K < case.H}

        def forward() -> tuple[Array, ...]:
            with torch.no_grad():
                return (attend(q, k, v, **options),)

        def both() -> tuple[Array, ...]:
            out = attend(q, k, v, **options)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

        if name == FORWARD:
            return forward
        for x in (q, k, v):
            x.requires_grad_()
        return both


class Jax:
    """The formula compiled by JAX for the CPU, which has no fused attention there."""

    name = "jax"

    def __init__(self, jax: Any) -> None:
        self.jax = jax
        jax.config.update("jax_enable_x64", True)

    def prepare(self, case: Case, inputs: Inputs, name: str) -> Call | None:
        if writes_too_much(case, name):
            return None
        jax, jnp, group = self.jax, self.jax.numpy, case.H // case.K
        device = jax.devices("cpu")[0]
        q, k, v, dout = (jax.device_put(x.astype(case.dtype), device) for x in inputs[:4])
        visible = None if inputs.visible is None else jax.device_put(inputs.visible, device)

        def attend(q: Array, k: Array, v: Array) -> Array:
            k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
            scores = jnp.matmul(q, jnp.swapaxes(k, -1, -2)) * (1 / math.sqrt(case.D))
            if visible is not None:
                scores = jnp.where(visible, scores, -jnp.inf)
            return jnp.matmul(jax.nn.softmax(scores, axis=-1), v)

        def attend_both(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
            out, backward = jax.vjp(attend, q, k, v)
            return (out, *backward(dout))

        if name == FORWARD:
            compiled = jax.jit(attend)
            return lambda: (jax.block_until_ready(compiled(q, k, v)),)
        compiled = jax.jit(attend_both)
        return lambda: tuple(jax.block_until_ready(compiled(q, k, v, dout)))


def find_rivals(backend: Backend, threads: int, cpus: int) -> tuple[list[Rival], list[str]]:
    """What there is to measure against, and a line for each that is left out."""
    rivals: list[Rival] = [Naive(backend)]
    notes: list[str] = []
    torch = _import("torch", notes)
    if torch is not None and backend.name == "numpy":
        rivals.append(Torch(torch, "cpu", threads))
    elif torch is not None and torch.cuda.is_available():  # cupy only
        rivals.append(Torch(torch, "cuda", threads))
    elif torch is not None:  # cupy only
        notes.append("torch is left out: it finds no GPU")
    if backend.name != "numpy":  # cupy only
        notes.append("jax is left out: it is measured on the CPU alone")
    elif threads != cpus:
        notes.append(f"jax is left out: it takes all {cpus} CPUs, whatever the number of threads")
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax = _import("jax", notes)
        if jax is not None:
            rivals.append(Jax(jax))
    return rivals, notes


def _import(name: str, notes: list[str]) -> Any:
    """A library, or None and a note why it is not there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        notes.append(f"{name} is left out: {error.name} is not installed")
    except (ImportError, OSError) as error:  # installed, but broken
        notes.append(f"{name} is left out: {str(error).strip().splitlines()[0]}")
    return None
