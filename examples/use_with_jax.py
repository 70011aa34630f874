"""npattn inside JAX: attention whose derivatives are npattn's hand-derived ones, under ``jax.jit`` too.

JAX asks a function to choose: rules for reverse mode (``custom_vjp``) or for forward mode (``custom_jvp``). `attention` below has
the first, `attention_in_forward_mode` the second. Both run npattn on JAX's own arrays. For the first, reverse mode and reverse
mode of reverse mode hold tiles and never T times S numbers. The second has every mode and every order: forward mode is npattn's,
and what lies beyond JAX makes itself, by transposing or differentiating npattn's tangents.

    python examples/use_with_jax.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

import npattn


class Options:
    """Options of `npattn.attention`, equal only to themselves, as JAX wants arguments that it does not trace."""

    def __init__(self, **options: Any) -> None:
        self.options = options


# Reverse mode ----------------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(q: Any, k: Any, v: Any, of: Options) -> Any:
    """`npattn.attention`, with npattn's backward, and with npattn's backward of backward."""
    return npattn.attention(q, k, v, **of.options)


def _forward(q: Any, k: Any, v: Any, of: Options) -> Any:
    return attention(q, k, v, of), (q, k, v)


def _backward(of: Options, inputs: Any, dout: Any) -> Any:
    return attention_backward(dout, *inputs, of)


attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention_backward(dout: Any, q: Any, k: Any, v: Any, of: Options) -> Any:
    """dq, dk and dv: a function that has a backward as well."""
    _, saved = npattn.attention_forward(q, k, v, **of.options)
    grads = npattn.attention_backward(dout, saved)
    return grads.dq, grads.dk, grads.dv


def _backward_forward(dout: Any, q: Any, k: Any, v: Any, of: Options) -> Any:
    return attention_backward(dout, q, k, v, of), (dout, q, k, v)


def _backward_backward(of: Options, inputs: Any, cotangents: Any) -> Any:
    dout, q, k, v = inputs
    _, saved = npattn.attention_forward(q, k, v, **of.options)
    grads = npattn.attention_backward_backward(npattn.AttentionGrads(*cotangents, None, None), dout, saved)
    return grads.ddout, grads.dq, grads.dk, grads.dv


attention_backward.defvjp(_backward_forward, _backward_backward)


# Forward mode ----------------------------------------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def attention_in_forward_mode(q: Any, k: Any, v: Any, of: Options) -> Any:
    """`npattn.attention`, with npattn's tangents."""
    return npattn.attention(q, k, v, **of.options)


@attention_in_forward_mode.defjvp
def _tangents(of: Options, inputs: Any, tangents: Any) -> Any:
    out, _, tout, _ = npattn.attention_jvp(*inputs, npattn.AttentionTangents(*tangents), **of.options)
    return out, tout


def main() -> None:
    """Each derivative once, beside JAX's own of the plain formula."""
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    q, k, v, t, dout = (jax.numpy.asarray(rng.standard_normal((1, 2, 6, 4))) for _ in range(5))
    causal, visible = Options(mask=npattn.causal_mask()), np.tri(6, dtype=bool)

    def plain(q: Any) -> Any:
        scores = jax.numpy.where(visible, q @ k.mT / 2, -np.inf)
        return jax.nn.softmax(scores, axis=-1) @ v

    def reverse(q: Any) -> Any:
        return attention(q, k, v, causal)

    def forward(q: Any) -> Any:
        return attention_in_forward_mode(q, k, v, causal)

    def penalty(f: Any) -> Any:
        slope = jax.grad(lambda q: (f(q) * dout).sum())
        return jax.jit(jax.grad(lambda q: (slope(q) ** 2).sum()))(q)

    def tangent(f: Any) -> Any:
        return jax.jit(lambda q, t: jax.jvp(f, (q,), (t,))[1])(q, t)

    def hessian_times(f: Any) -> Any:
        return jax.jit(lambda q, t: jax.jvp(jax.grad(lambda q: (f(q) * dout).sum()), (q,), (t,))[1])(q, t)

    for name, of, ours in (
        ("forward mode", tangent, forward),
        ("a penalty on the gradient", penalty, reverse),
        ("Hessian times vector", hessian_times, forward),
    ):
        difference = np.abs(np.asarray(of(ours) - of(plain))).max()
        print(f"{name:<26} differs from JAX's of the plain formula by at most {difference:.0e}")


if __name__ == "__main__":
    main()
