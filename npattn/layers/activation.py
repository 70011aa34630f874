"""ReLU and SiLU: functions of one number, applied to every element.

An activation saves its own slope at every element. That takes the memory that its input would take, and makes backward a product.
The curves and their slopes stand side by side in npattn/layers/_curves.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_repr
from npattn.layers._curves import times_slopes, value, value_and_slope


class ReluSaved(NamedTuple):
    """What `relu_backward` needs: the slope at every element, in the dtype it is computed in; and the dtype of x."""

    slope: Array
    dtype: Any

    def __repr__(self) -> str:
        return tree_repr(self)


class ReluGrads(NamedTuple):
    """Gradients of `relu`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def relu(x: Array, /) -> Array:
    """``x`` where that is positive, else 0; see `relu_forward`."""
    return value("relu", x)


def relu_forward(x: Array, /) -> tuple[Array, ReluSaved]:
    """``out = max(x, 0)``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.

    Returns
    -------
    out : array (...)
        In x's shape and dtype.
    saved : ReluSaved
        For `relu_backward`. Holds the slope, an array of x's shape, and borrows nothing.

    Raises
    ------
    TypeError
        If x is not a floating array.

    Notes
    -----
    At 0 the slope is taken to be 0. Derivation: docs/derivation.md, "Activations".

    Examples
    --------
    >>> import numpy as np
    >>> relu(np.asarray([-1.0, 2.0]))
    array([0., 2.])
    """
    out, slope, dtype = value_and_slope("relu", x)
    return out, ReluSaved(slope, dtype)


def relu_backward(dout: Array, saved: ReluSaved, /) -> ReluGrads:
    """``dx = dout`` where x was positive, else 0.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : ReluSaved
        From `relu_forward`.

    Returns
    -------
    ReluGrads
        ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return ReluGrads(*times_slopes("relu_backward", dout, saved.slope, dtype=saved.dtype))


class SiluSaved(ReluSaved):
    """What `silu_backward` needs: the same as `ReluSaved`."""

    __slots__ = ()


class SiluGrads(NamedTuple):
    """Gradients of `silu`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def silu(x: Array, /) -> Array:
    """``x σ(x)``; see `silu_forward`."""
    return value("silu", x)


def silu_forward(x: Array, /) -> tuple[Array, SiluSaved]:
    """``out = x σ(x)``, with the logistic function ``σ(x) = 1 / (1 + exp(-x))``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.

    Returns
    -------
    out : array (...)
        In x's shape and dtype; float16 and bfloat16 are computed in float32.
    saved : SiluSaved
        For `silu_backward`. Holds the slope, an array of x's shape, and borrows nothing.

    Raises
    ------
    TypeError
        If x is not a floating array.

    Notes
    -----
    Also called swish. Derivation: docs/derivation.md, "Activations".

    References
    ----------
    Elfwing, Uchibe, Doya: Sigmoid-Weighted Linear Units (2017), equation 4.

    Examples
    --------
    >>> import numpy as np
    >>> silu(np.asarray([-1.0, 0.0, 1.0])).round(4)
    array([-0.2689,  0.    ,  0.7311])
    """
    out, slope, dtype = value_and_slope("silu", x)
    return out, SiluSaved(slope, dtype)


def silu_backward(dout: Array, saved: SiluSaved, /) -> SiluGrads:
    """``dx = dout (σ + x σ (1 - σ))``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : SiluSaved
        From `silu_forward`.

    Returns
    -------
    SiluGrads
        ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return SiluGrads(*times_slopes("silu_backward", dout, saved.slope, dtype=saved.dtype))
