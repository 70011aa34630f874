"""npattn inside PyTorch: attention with forward mode, double backward and Hessian-vector products, on a CPU's tensors.

PyTorch's fused kernels of attention have neither forward mode nor double backward, and its plain formula holds T times S numbers
a head. `attention` below is an ``autograd.Function`` around npattn's hand-derived passes, which hold tiles. Tensors and NumPy
arrays share memory, so nothing is copied on the way.

    python examples/use_with_torch.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

import npattn

Tensor = torch.Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None, **options: Any) -> Tensor:
    """`npattn.attention` for tensors on the CPU; the options are its other ones (mask, scale, softcap, dropout)."""
    out: Tensor = _Attention.apply(q, k, v, bias, sinks, options)[0]
    return out


class _Attention(torch.autograd.Function):
    """Inputs to out. What npattn saved is a second output, without a derivative."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: dict[str, Any]) -> Any:
        arrays = [_array(x) for x in (q, k, v)]
        out, saved = npattn.attention_forward(*arrays, bias=_array(bias), sinks=_array(sinks), **options)
        return torch.from_numpy(out), saved

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.save_for_forward(*inputs[:5])
        ctx.saved, ctx.options = output[1], inputs[5]

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> Any:
        return *_Backward.apply(dout, *ctx.saved_tensors, ctx.saved), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        def tangent(*arrays: Any) -> Any:
            q, k, v, bias, sinks, *along = arrays
            options = {"bias": bias, "sinks": sinks, **ctx.options}
            return (npattn.attention_jvp(q, k, v, npattn.AttentionTangents(*along), **options)[2],)

        return _Call.apply(tangent, *ctx.saved_tensors, *tangents[:5])[0], None


class _Backward(torch.autograd.Function):
    """Inputs and dout to gradients: a function that has derivatives of its own."""

    @staticmethod
    def forward(dout: Tensor, *inputs: Any) -> Any:
        *_, saved = inputs
        return tuple(_tensor(g) for g in npattn.attention_backward(_array(dout), saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.saved = inputs[6]
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Any:
        of_gradients = npattn.AttentionGrads(*(_array(c) for c in cotangents))
        grads = npattn.attention_backward_backward(of_gradients, _array(ctx.saved_tensors[0]), ctx.saved)
        return _tensor(grads.ddout), *(_tensor(g) for g in grads[2:]), None

    @staticmethod
    def jvp(ctx: Any, tdout: Any, *tangents: Any) -> Any:
        def change(dout: Any, tdout: Any, *along: Any) -> Any:
            return npattn.attention_backward_jvp(dout, ctx.saved, npattn.AttentionTangents(*along), tdout=tdout)

        return _Call.apply(change, *ctx.saved_tensors, tdout, *tangents[:5])


class _Call(torch.autograd.Function):
    """A function of NumPy arrays, without derivatives. ``torch.func`` hides a tensor's memory from everybody but a Function."""

    @staticmethod
    def forward(f: Any, *tensors: Tensor | None) -> Any:
        return tuple(_tensor(x) for x in f(*(_array(x) for x in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def _array(x: Tensor | None) -> Any:
    """The same memory as a NumPy array."""
    return None if x is None else x.detach().numpy()


def _tensor(x: Any) -> Tensor | None:
    return None if x is None else torch.from_numpy(x)


def main() -> None:
    """Each derivative once, beside PyTorch's own of the plain formula."""
    torch.manual_seed(0)
    q, k, v, t, dout = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(5))
    causal = npattn.causal_mask()
    visible = torch.ones(6, 6, dtype=torch.bool).tril()

    def plain(q: Tensor) -> Tensor:
        scores = (q @ k.mT / 2).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1) @ v

    def ours(q: Tensor) -> Tensor:
        return attention(q, k, v, mask=causal)

    def penalty(f: Any) -> Tensor:
        x = q.clone().requires_grad_()
        (dq,) = torch.autograd.grad((f(x) * dout).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(dq.square().sum(), x)
        return torch.as_tensor(second)

    def hessian_times(f: Any) -> Tensor:
        return torch.func.jvp(torch.func.grad(lambda x: (f(x) * dout).sum()), (q,), (t,))[1]

    for name, of in (
        ("forward mode", lambda f: torch.func.jvp(f, (q,), (t,))[1]),
        ("a penalty on the gradient", penalty),
        ("Hessian times vector", hessian_times),
    ):
        difference = np.abs((of(ours) - of(plain)).numpy()).max()
        print(f"{name:<26} differs from PyTorch's of the plain formula by at most {difference:.0e}")


if __name__ == "__main__":
    main()
