"""The curves of the activations, each with its slope beside it; and how they are applied to arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from npattn._arrays.blocks import map_elements
from npattn._arrays.checks import check_cotangent
from npattn._arrays.namespace import Array, Namespace, array_namespace, compute_dtype, float_dtype
from npattn.layers._normal import PEAK, bell_and_tail

Value: TypeAlias = Callable[[Array, Namespace], Array]
ValueAndSlope: TypeAlias = Callable[[Array, Namespace], tuple[Array, Array]]

INF = float("inf")
FAR = 1000.0  # here every curve is at one of its ends; an infinity times a slope of 0 would be NaN, where the limit is 0


def relu(x: Array, xp: Namespace) -> Array:
    return xp.clip(x, 0.0, INF)


def relu_curvature(x: Array, xp: Namespace) -> Array:
    return xp.zeros_like(x)


def relu_slope(x: Array, xp: Namespace) -> tuple[Array, Array]:
    return relu(x, xp), xp.astype(x > 0, x.dtype)


def silu(x: Array, xp: Namespace) -> Array:
    return xp.clip(x, -FAR, INF) * logistic(x, xp)


def silu_slope(x: Array, xp: Namespace) -> tuple[Array, Array]:
    sigma = logistic(x, xp)
    # out = x σ(x), σ' = σ (1 - σ)
    return xp.clip(x, -FAR, INF) * sigma, sigma + xp.clip(x, -FAR, FAR) * (sigma * (1 - sigma))


def silu_curvature(x: Array, xp: Namespace) -> Array:
    sigma, near = logistic(x, xp), xp.clip(x, -FAR, FAR)
    # slope = σ + x σ (1 - σ)
    return sigma * (1 - sigma) * (2 + near * (1 - 2 * sigma))


def logistic(x: Array, xp: Namespace) -> Array:
    return 1 / (1 + xp.exp(-x))


def gelu(x: Array, xp: Namespace) -> Array:
    t, _, tail = bell_and_tail(x, xp=xp)
    # x Φ(x) is -t Φ(-t) left of 0, and x - t Φ(-t) right of it
    return relu(x, xp) - t * tail


def gelu_slope(x: Array, xp: Namespace) -> tuple[Array, Array]:
    t, bell, tail = bell_and_tail(x, xp=xp)
    out = relu(x, xp) - t * tail
    # Φ(x) + x φ(x) is Φ(-t) - t φ(t) left of 0, and 1 less that right of it
    left = tail - t * bell * PEAK
    return out, left + xp.astype(x > 0, x.dtype) * (1 - 2 * left)


def gelu_curvature(x: Array, xp: Namespace) -> Array:
    t, bell, _ = bell_and_tail(x, xp=xp)
    # slope = Φ(x) + x φ(x), φ' = -x φ
    return bell * PEAK * (2 - t * t)


def gelu_tanh(x: Array, xp: Namespace) -> Array:
    near = xp.clip(x, -FAR, FAR)
    return xp.clip(x, -FAR, INF) * logistic(near * (TANH_SLOPE + TANH_CUBE * (near * near)), xp)


def gelu_tanh_slope(x: Array, xp: Namespace) -> tuple[Array, Array]:
    near = xp.clip(x, -FAR, FAR)
    square = near * near
    sigma = logistic(near * (TANH_SLOPE + TANH_CUBE * square), xp)
    # out = x σ(2u), 2u = √(8/π) (x + 0.044715 x³)
    slope = sigma + near * (sigma * (1 - sigma)) * (TANH_SLOPE + 3 * TANH_CUBE * square)
    return xp.clip(x, -FAR, INF) * sigma, slope


def gelu_tanh_curvature(x: Array, xp: Namespace) -> Array:
    near = xp.clip(x, -FAR, FAR)
    square = near * near
    sigma = logistic(near * (TANH_SLOPE + TANH_CUBE * square), xp)
    # slope = σ + x σ (1 - σ) w, w = √(8/π) (1 + 3 · 0.044715 x²) the slope of 2u
    w = TANH_SLOPE + 3 * TANH_CUBE * square
    return sigma * (1 - sigma) * (2 * w + near * ((1 - 2 * sigma) * w * w + 6 * TANH_CUBE * near))


TANH_SLOPE = math.sqrt(8 / math.pi)
TANH_CUBE = 0.044715 * TANH_SLOPE


class Curve(NamedTuple):
    """An activation's value, its value and slope together (most of the work is the same), and its curvature."""

    value: Value
    value_and_slope: ValueAndSlope
    curvature: Value


CURVES = {
    "relu": Curve(relu, relu_slope, relu_curvature),
    "silu": Curve(silu, silu_slope, silu_curvature),
    "gelu": Curve(gelu, gelu_slope, gelu_curvature),
    "gelu_tanh": Curve(gelu_tanh, gelu_tanh_slope, gelu_tanh_curvature),
}


def check_activation(op: str, name: Any) -> Curve:
    """The curve of this name."""
    if name not in CURVES:
        raise ValueError(f"{op}: activation must be one of {', '.join(CURVES)}, got {name!r}")
    return CURVES[name]


def value(op: str, x: Array) -> Array:
    """The curve named ``op`` at every element of x."""
    xp = array_namespace(op, x=x)
    dtype = float_dtype(op, x=x)
    compute = compute_dtype(dtype, xp=xp)

    def block(x: Array) -> tuple[Array]:
        return (xp.astype(CURVES[op].value(xp.astype(x, compute, copy=False), xp), dtype, copy=False),)

    return map_elements(block, x, xp=xp)[0]


def value_and_slope(op: str, x: Array) -> tuple[Array, Array, Any]:
    """The same, with the slope in the dtype it is computed in, and the dtype of x."""
    xp = array_namespace(op, x=x)
    dtype = float_dtype(op, x=x)
    compute = compute_dtype(dtype, xp=xp)

    def block(x: Array) -> tuple[Array, Array]:
        out, slope = CURVES[op].value_and_slope(xp.astype(x, compute, copy=False), xp)
        return xp.astype(out, dtype, copy=False), slope

    return (*map_elements(block, x, xp=xp), dtype)


def times_slopes(op: str, dout: Array, *slopes: Array, dtype: Any) -> tuple[Array, ...]:
    """``dout * slope``, for every slope."""
    xp = array_namespace(op, saved=slopes[0], dout=dout)
    check_cotangent(op, "dout", dout, "(...)", slopes[0].shape, dtype)

    def block(dout: Array, *slopes: Array) -> tuple[Array, ...]:
        dout = xp.astype(dout, slopes[0].dtype, copy=False)
        return tuple(xp.astype(dout * slope, dtype, copy=False) for slope in slopes)

    return map_elements(block, dout, *slopes, xp=xp)
