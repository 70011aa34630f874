"""GELU, and its approximation by a hyperbolic tangent: two functions, each under its own name.

Both save their slope, as every activation does (npattn/layers/activation.py).
"""

from __future__ import annotations

from typing import NamedTuple

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_repr
from npattn.layers._curves import times_slopes, value, value_and_slope
from npattn.layers.activation import ReluSaved


class GeluSaved(ReluSaved):
    """What `gelu_backward` needs: the same as `ReluSaved`."""

    __slots__ = ()


class GeluGrads(NamedTuple):
    """Gradients of `gelu`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def gelu(x: Array, /) -> Array:
    """``x Φ(x)``; see `gelu_forward`."""
    return value("gelu", x)


def gelu_forward(x: Array, /) -> tuple[Array, GeluSaved]:
    """``out = x Φ(x)``, with the normal distribution ``Φ(x) = (1 + erf(x / √2)) / 2``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.

    Returns
    -------
    out : array (...)
        In x's shape and dtype. Its relative error is at most ``1e-15 (1 + x²)`` in float64 and ``5e-7 (1 + x²)`` in float32
        wherever Φ(x) is a normal number, the far negative tail included; float16 and bfloat16 are computed in float32.
    saved : GeluSaved
        For `gelu_backward`. Holds the slope, an array of x's shape, and borrows nothing.

    Raises
    ------
    TypeError
        If x is not a floating array.

    See Also
    --------
    gelu_tanh_forward : Its approximation by a hyperbolic tangent, another function.

    Notes
    -----
    The same as ``torch.nn.functional.gelu`` and ``jax.nn.gelu(approximate=False)``. Derivation: docs/derivation.md,
    "Activations".

    References
    ----------
    Hendrycks, Gimpel: Gaussian Error Linear Units (2016), section 2.

    Examples
    --------
    >>> import numpy as np
    >>> gelu(np.asarray([-1.0, 0.0, 1.0])).round(4)
    array([-0.1587,  0.    ,  0.8413])
    >>> gelu(np.asarray(-37.0))
    array(-2.11846135e-298)
    """
    out, slope, dtype = value_and_slope("gelu", x)
    return out, GeluSaved(slope, dtype)


def gelu_backward(dout: Array, saved: GeluSaved, /) -> GeluGrads:
    """``dx = dout (Φ(x) + x φ(x))``, with the normal density ``φ = exp(-x²/2) / √(2π)``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : GeluSaved
        From `gelu_forward`.

    Returns
    -------
    GeluGrads
        ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return GeluGrads(*times_slopes("gelu_backward", dout, saved.slope, dtype=saved.dtype))


class GeluTanhSaved(ReluSaved):
    """What `gelu_tanh_backward` needs: the same as `ReluSaved`."""

    __slots__ = ()


class GeluTanhGrads(NamedTuple):
    """Gradients of `gelu_tanh`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def gelu_tanh(x: Array, /) -> Array:
    """``x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2``; see `gelu_tanh_forward`."""
    return value("gelu_tanh", x)


def gelu_tanh_forward(x: Array, /) -> tuple[Array, GeluTanhSaved]:
    """``out = x (1 + tanh(u)) / 2`` with ``u = √(2/π) (x + 0.044715 x³)``: an approximation of GELU, to about 0.0005.

    Parameters
    ----------
    x : float array (...)
        Of any shape.

    Returns
    -------
    out : array (...)
        In x's shape and dtype; float16 and bfloat16 are computed in float32.
    saved : GeluTanhSaved
        For `gelu_tanh_backward`. Holds the slope, an array of x's shape, and borrows nothing.

    Raises
    ------
    TypeError
        If x is not a floating array.

    See Also
    --------
    gelu_forward : The function itself.

    Notes
    -----
    The same as ``torch.nn.functional.gelu(approximate="tanh")`` and the default of ``jax.nn.gelu``; GPT-2 was trained with it.
    ``(1 + tanh u) / 2`` is computed as ``σ(2u)``, which is accurate where tanh is near -1. Derivation: docs/derivation.md,
    "Activations".

    References
    ----------
    Hendrycks, Gimpel: Gaussian Error Linear Units (2016), section 2.

    Examples
    --------
    >>> import numpy as np
    >>> gelu_tanh(np.asarray([-1.0, 0.0, 1.0])).round(4)
    array([-0.1588,  0.    ,  0.8412])
    """
    out, slope, dtype = value_and_slope("gelu_tanh", x)
    return out, GeluTanhSaved(slope, dtype)


def gelu_tanh_backward(dout: Array, saved: GeluTanhSaved, /) -> GeluTanhGrads:
    """``dx = dout (σ + x σ (1 - σ) 2u')`` with ``σ = (1 + tanh u) / 2`` and ``u' = √(2/π) (1 + 3 · 0.044715 x²)``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : GeluTanhSaved
        From `gelu_tanh_forward`.

    Returns
    -------
    GeluTanhGrads
        ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return GeluTanhGrads(*times_slopes("gelu_tanh_backward", dout, saved.slope, dtype=saved.dtype))
