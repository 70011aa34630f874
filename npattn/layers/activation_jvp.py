"""Tangents of the activations and of the gate, of results and of gradients.

An activation saves its slope and not its input, so that the curvature, which the second order needs, takes x once more.
"""

from __future__ import annotations

from typing import Any

from npattn._arrays.blocks import map_elements
from npattn._arrays.checks import check_cotangent, check_tangent
from npattn._arrays.namespace import Array, array_namespace
from npattn.layers._curves import CURVES, times_slopes, value_and_slope
from npattn.layers.activation import ReluGrads, ReluSaved, SiluGrads, SiluSaved
from npattn.layers.gate import GateGrads, GateSaved, gate_forward
from npattn.layers.gelu import GeluGrads, GeluSaved, GeluTanhGrads, GeluTanhSaved


def relu_jvp(x: Array, /, *, tx: Array) -> tuple[Array, Array]:
    """``out`` of `relu` and ``tout = tx`` times the slope, ``1 where x is positive, else 0``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.
    tx : float array (...)
        The tangent of x.

    Returns
    -------
    out : array (...)
        As from `relu`.
    tout : array (...)
        The tangent of out.

    Raises
    ------
    ValueError
        If tx has not the shape of x.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return _jvp("relu", x, tx)


def relu_backward_jvp(
    dout: Array, saved: ReluSaved, /, *, x: Array, tx: Array | None = None, tdout: Array | None = None
) -> ReluGrads:
    """``tdx = tdout`` times the slope, and ``dout tx`` times the curvature: 0: `relu` has no curvature, but for its kink.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : ReluSaved
        From `relu_forward`.
    x : float array (...)
        What `relu_forward` was given.
    tx, tdout : float arrays, optional
        The tangents of x and dout; 0 by default.

    Returns
    -------
    ReluGrads
        The tangent of dx, in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return ReluGrads(_backward_jvp("relu", dout, saved, x, tx, tdout))


def silu_jvp(x: Array, /, *, tx: Array) -> tuple[Array, Array]:
    """``out`` of `silu` and ``tout = tx`` times the slope, ``σ + x σ (1 - σ)``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.
    tx : float array (...)
        The tangent of x.

    Returns
    -------
    out : array (...)
        As from `silu`.
    tout : array (...)
        The tangent of out.

    Raises
    ------
    ValueError
        If tx has not the shape of x.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return _jvp("silu", x, tx)


def silu_backward_jvp(
    dout: Array, saved: SiluSaved, /, *, x: Array, tx: Array | None = None, tdout: Array | None = None
) -> SiluGrads:
    """``tdx = tdout`` times the slope, and ``dout tx`` times the curvature: ``σ (1 - σ) (2 + x (1 - 2 σ))``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : SiluSaved
        From `silu_forward`.
    x : float array (...)
        What `silu_forward` was given.
    tx, tdout : float arrays, optional
        The tangents of x and dout; 0 by default.

    Returns
    -------
    SiluGrads
        The tangent of dx, in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return SiluGrads(_backward_jvp("silu", dout, saved, x, tx, tdout))


def gelu_jvp(x: Array, /, *, tx: Array) -> tuple[Array, Array]:
    """``out`` of `gelu` and ``tout = tx`` times the slope, ``Φ(x) + x φ(x)``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.
    tx : float array (...)
        The tangent of x.

    Returns
    -------
    out : array (...)
        As from `gelu`.
    tout : array (...)
        The tangent of out.

    Raises
    ------
    ValueError
        If tx has not the shape of x.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return _jvp("gelu", x, tx)


def gelu_backward_jvp(
    dout: Array, saved: GeluSaved, /, *, x: Array, tx: Array | None = None, tdout: Array | None = None
) -> GeluGrads:
    """``tdx = tdout`` times the slope, and ``dout tx`` times the curvature: ``φ(x) (2 - x²)``, with the normal density φ.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : GeluSaved
        From `gelu_forward`.
    x : float array (...)
        What `gelu_forward` was given.
    tx, tdout : float arrays, optional
        The tangents of x and dout; 0 by default.

    Returns
    -------
    GeluGrads
        The tangent of dx, in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return GeluGrads(_backward_jvp("gelu", dout, saved, x, tx, tdout))


def gelu_tanh_jvp(x: Array, /, *, tx: Array) -> tuple[Array, Array]:
    """``out`` of `gelu_tanh` and ``tout = tx`` times the slope, ``σ + x σ (1 - σ) 2u'``.

    Parameters
    ----------
    x : float array (...)
        Of any shape.
    tx : float array (...)
        The tangent of x.

    Returns
    -------
    out : array (...)
        As from `gelu_tanh`.
    tout : array (...)
        The tangent of out.

    Raises
    ------
    ValueError
        If tx has not the shape of x.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return _jvp("gelu_tanh", x, tx)


def gelu_tanh_backward_jvp(
    dout: Array, saved: GeluTanhSaved, /, *, x: Array, tx: Array | None = None, tdout: Array | None = None
) -> GeluTanhGrads:
    """``tdx = tdout`` times the slope, and ``dout tx`` times the curvature: ``σ (1 - σ) (2 w + x ((1 - 2 σ) w² + w'))``.

    Here w is the slope of 2u.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : GeluTanhSaved
        From `gelu_tanh_forward`.
    x : float array (...)
        What `gelu_tanh_forward` was given.
    tx, tdout : float arrays, optional
        The tangents of x and dout; 0 by default.

    Returns
    -------
    GeluTanhGrads
        The tangent of dx, in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    return GeluTanhGrads(_backward_jvp("gelu_tanh", dout, saved, x, tx, tdout))


def gate_jvp(
    x: Array, gates: Array, /, *, tx: Array | None = None, tgates: Array | None = None, activation: str = "silu"
) -> tuple[Array, Array]:
    """``out`` of `gate` and ``tout = tx activation(gates) + x activation'(gates) tgates``.

    Parameters
    ----------
    x : float array (...)
        What is let through.
    gates : float array (...)
        In x's shape.
    tx, tgates : float arrays, optional
        The tangents of x and gates; 0 by default.
    activation : str, optional
        As in `gate_forward`.

    Returns
    -------
    out : array (...)
        As from `gate`.
    tout : array (...)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes differ or there is no such activation.
    TypeError
        If dtypes, libraries or devices differ.
    """
    out, saved = gate_forward(x, gates, activation=activation)
    for name, t, of in (("x", tx, x), ("gates", tgates, gates)):
        check_tangent("gate_jvp", name, t, of)
    return out, gate_tangent(saved, tx, tgates)


def gate_tangent(saved: GateSaved, tx: Array | None, tgates: Array | None) -> Array:
    """The tangent of `gate`'s out, from what forward saved."""
    return _sum_of_products(((tx, saved.by_x), (tgates, saved.by_gates)), saved.by_x, saved.dtype)


def gate_backward_jvp(
    dout: Array,
    saved: GateSaved,
    /,
    *,
    x: Array,
    gates: Array,
    tx: Array | None = None,
    tgates: Array | None = None,
    tdout: Array | None = None,
) -> GateGrads:
    """The tangents of ``dx = dout activation(gates)`` and ``dgates = dout x activation'(gates)``.

    Parameters
    ----------
    dout : float array (...)
        The cotangent of out.
    saved : GateSaved
        From `gate_forward`.
    x, gates : float array (...)
        What `gate_forward` was given.
    tx, tgates, tdout : float arrays, optional
        The tangents of x, gates and dout; 0 by default.

    Returns
    -------
    GateGrads
        The tangents of dx and dgates, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "gate_backward_jvp"
    xp = array_namespace(op, saved=saved.by_x, dout=dout, x=x, gates=gates)
    check_cotangent(op, "dout", dout, "(...)", saved.by_x.shape, saved.dtype)
    for name, t, of in (("x", tx, x), ("gates", tgates, gates), ("dout", tdout, dout)):
        check_tangent(op, name, t, of)
    curve, compute = CURVES[saved.activation], saved.by_x.dtype

    def block(x: Array, gates: Array) -> tuple[Array, Array]:
        x, gates = (xp.astype(a, compute, copy=False) for a in (x, gates))
        return curve.value_and_slope(gates, xp)[1], x * curve.curvature(gates, xp)

    slope, bend = map_elements(block, x, gates, xp=xp) if tx is not None or tgates is not None else (None, None)
    # dx = dout activation(gates), dgates = dout x activation'(gates)
    return GateGrads(
        _sum_of_products(((tdout, saved.by_x), (dout, tgates, slope)), saved.by_x, saved.dtype),
        _sum_of_products(((tdout, saved.by_gates), (dout, tx, slope), (dout, tgates, bend)), saved.by_x, saved.dtype),
    )


def _jvp(op: str, x: Array, tx: Array) -> tuple[Array, Array]:
    check_tangent(f"{op}_jvp", "x", tx, x)
    out, slope, dtype = value_and_slope(op, x)
    return out, *times_slopes(f"{op}_jvp", tx, slope, dtype=dtype)


def _backward_jvp(op: str, dout: Array, saved: ReluSaved, x: Array, tx: Array | None, tdout: Array | None) -> Array:
    slope, dtype = saved
    name = f"{op}_backward_jvp"
    xp = array_namespace(name, saved=slope, dout=dout, x=x)
    check_cotangent(name, "dout", dout, "(...)", slope.shape, dtype)
    for of, t, like in (("x", tx, x), ("dout", tdout, dout)):
        check_tangent(name, of, t, like)
    curvature = None
    if tx is not None:

        def block(x: Array) -> tuple[Array]:
            return (CURVES[op].curvature(xp.astype(x, slope.dtype, copy=False), xp),)

        (curvature,) = map_elements(block, x, xp=xp)
    # dx = dout slope
    return _sum_of_products(((tdout, slope), (dout, tx, curvature)), slope, dtype)


def _sum_of_products(products: tuple[tuple[Array | None, ...], ...], like: Array, dtype: Any) -> Array:
    """The sum of products of arrays, of which those with a ``None`` are 0, computed in the dtype of ``like``."""
    xp = array_namespace("activation", like=like)
    there = [factors for factors in products if all(a is not None for a in factors)]
    if not there:
        return xp.astype(xp.zeros_like(like), dtype, copy=False)

    def block(*arrays: Array) -> tuple[Array]:
        given, total = iter(arrays), None
        for factors in there:
            product = xp.astype(next(given), like.dtype, copy=False)
            for _ in factors[1:]:
                product = product * xp.astype(next(given), like.dtype, copy=False)
            total = product if total is None else total + product
        return (xp.astype(total, dtype, copy=False),)

    return map_elements(block, *(a for factors in there for a in factors), xp=xp)[0]
