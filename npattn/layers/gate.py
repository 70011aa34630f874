"""A gate: one array lets another through, as far as an activation of it says."""

from __future__ import annotations

from typing import Any, NamedTuple

from npattn._arrays.blocks import map_elements
from npattn._arrays.checks import shape_error
from npattn._arrays.namespace import Array, array_namespace, compute_dtype, float_dtype
from npattn._arrays.trees import tree_repr
from npattn.layers._curves import check_activation, times_slopes


class GateSaved(NamedTuple):
    """What `gate_backward` needs: how out answers to x and to gates, in the dtype it is computed in; and the dtype of x.

    ``activation`` is there for `gate_backward_jvp`.
    """

    by_x: Array
    by_gates: Array
    dtype: Any
    activation: str

    def __repr__(self) -> str:
        return tree_repr(self)


class GateGrads(NamedTuple):
    """Gradients of `gate`."""

    dx: Array
    dgates: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def gate(x: Array, gates: Array, /, *, activation: str = "silu") -> Array:
    """``x * activation(gates)``; see `gate_forward`."""
    return gate_forward(x, gates, activation=activation)[0]


def gate_forward(x: Array, gates: Array, /, *, activation: str = "silu") -> tuple[Array, GateSaved]:
    """``out = x * activation(gates)``, element by element.

    Parameters
    ----------
    x : float array (...)
        What is let through.
    gates : float array (...)
        In x's shape.
    activation : str, optional
        ``"silu"`` (as in SwiGLU), ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.

    Returns
    -------
    out : array (...)
        In x's shape and dtype; float16 and bfloat16 are computed in float32.
    saved : GateSaved
        For `gate_backward`. Holds two arrays of x's shape, and borrows nothing.

    Raises
    ------
    ValueError
        If shapes differ or there is no such activation.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Derivation: docs/derivation.md, "Gates".

    References
    ----------
    Shazeer: GLU Variants Improve Transformer (2020), equation 5.

    Examples
    --------
    >>> import numpy as np
    >>> gate(np.asarray([10.0, 10.0]), np.asarray([-2.0, 2.0]), activation="relu")
    array([ 0., 20.])
    """
    xp = array_namespace("gate", x=x, gates=gates)
    dtype = float_dtype("gate", x=x, gates=gates)
    curve = check_activation("gate", activation)
    if tuple(gates.shape) != tuple(x.shape):
        shape_error("gate", "gates", f"(...) = {tuple(x.shape)} as x has", gates.shape)
    compute = compute_dtype(dtype, xp=xp)

    def block(x: Array, gates: Array) -> tuple[Array, ...]:
        x, gates = (xp.astype(a, compute, copy=False) for a in (x, gates))
        activated, slope = curve.value_and_slope(gates, xp)
        return xp.astype(x * activated, dtype, copy=False), activated, x * slope

    out, by_x, by_gates = map_elements(block, x, gates, xp=xp)
    return out, GateSaved(by_x, by_gates, dtype, activation)


def gate_backward(dout: Array, saved: GateSaved, /) -> GateGrads:
    """``dx = dout activation(gates)``, ``dgates = dout x activation'(gates)``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : GateSaved
        From `gate_forward`.

    Returns
    -------
    GateGrads
        ``dx`` and ``dgates``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return GateGrads(*times_slopes("gate_backward", dout, saved.by_x, saved.by_gates, dtype=saved.dtype))
