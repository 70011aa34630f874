"""Is a backward the vector-Jacobian product of its forward? Random directions and cotangents against finite differences.

For a direction t and a cotangent g, ⟨g, J t⟩ = ⟨t, Jᵀ g⟩. Forward gives J t by central differences, backward gives Jᵀ g. Two
scalars are compared, whatever the number of elements; only a failure is worth looking at element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from npattn._arrays.namespace import Array, dtype_name
from npattn._arrays.trees import tree_items
from npattn.testing.gradient_report import index_text, worst_elements
from npattn.testing.libraries import to_numpy
from npattn.testing.vector_trees import (
    Args,
    Vectors,
    as_tree,
    difference_along,
    floating_leaves,
    gradients_of,
    named,
    random_vectors,
    unit_vector,
)

EPS = float(np.finfo(np.float64).eps)


def check_backward(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[[Any, Any], Any],
    args: Args,
    *,
    directions: int = 3,
    step: float | Callable[[Vectors], float] = 1e-3,
    bound: Callable[[Vectors, Vectors], float] | None = None,
    rtol: float = 1e-8,
    seed: int = 0,
    watch: Callable[[float, float], None] | None = None,
) -> None:
    """Raise unless ``backward`` is the vector-Jacobian product of ``forward``.

    Parameters
    ----------
    forward : callable
        ``forward(*args) -> (out, saved)``; out is an array or a tree of arrays.
    backward : callable
        ``backward(dout, saved) -> grads``, dout in the form of out. The gradient of the argument ``x`` is the field ``dx`` of a
        NamedTuple, the entry ``x`` or ``dx`` of a dict, or what stands at its position.
    args : mapping of str to arguments, or sequence
        What forward takes, in order: float64 arrays of any library or trees of them. Anything else is passed on untouched.
    directions : int, optional
        How many pairs of a random direction and a random cotangent to try.
    step : float or callable, optional
        The step of the differences, or a function of the directions by name.
    bound : callable, optional
        ``bound(directions, cotangents)``: the largest difference allowed, where more is known of the function than its values.
        By default ``rtol`` times the sum of all absolute terms of both sides, and the rounding error of the differences, which
        lets gradients be exactly zero.
    rtol : float, optional
        For the default bound.
    seed : int, optional
        Of directions and cotangents.
    watch : callable, optional
        ``watch(difference, allowed)`` is told of every pair.

    Raises
    ------
    AssertionError
        If the two sides differ, or a gradient is missing or has another shape or dtype than its input. The message is a report:
        of every input the worst element, its index, both values, and their absolute and relative difference.
    TypeError
        If a floating argument is not float64: differences are blind in lower precisions.

    Examples
    --------
    >>> def square(x):
    ...     return x * x, x
    >>> check_backward(square, lambda dout, x: (2 * x * dout,), [np.arange(3.0)])
    """
    names, values = named(args)
    point = floating_leaves(names, values)
    if wrong := [f"{name} ({dtype_name(x.dtype)})" for name, x in point.items() if dtype_name(x.dtype) != "float64"]:
        raise TypeError(f"check_backward: floating arguments must be float64, got {', '.join(wrong)}")
    rng = np.random.default_rng(seed)
    out, saved = forward(*values)
    outputs = {name: to_numpy(x) for name, x in tree_items(out)}
    for _ in range(directions):
        t, g = random_vectors(point, rng), random_vectors(outputs, rng)
        h = step(t) if callable(step) else step
        gradients = gradients_of(backward(as_tree(out, g), saved), names, values)
        change = difference_along(lambda *moved: forward(*moved)[0], names, values, t, h)
        left_terms = [g[name] * change[name] for name in g]
        right_terms = [t[name] * gradients[name] for name in t]
        left, right = total(left_terms), total(right_terms)
        if bound is None:
            allowed = rtol * sum(float(np.abs(terms).sum()) for terms in (*left_terms, *right_terms))
            allowed += 64 * EPS / h * sum(float(np.abs(g[name] * outputs[name]).sum()) for name in g)
        else:
            allowed = bound(t, g)
        if watch is not None:
            watch(abs(left - right), allowed)
        if not (math.isfinite(left - right) and abs(left - right) <= allowed):
            raise AssertionError(
                f"check_backward: along a random direction t, <g, (f(x + ht) - f(x - ht)) / 2h> = {left:.12g} "
                f"but <t, backward(g)> = {right:.12g}; they differ by {abs(left - right):.3g}, allowed are {allowed:.3g}\n"
                + worst_elements(forward, names, values, g, gradients, h, rng)
            )


def check_jvp(
    forward: Callable[..., Any],
    jvp: Callable[[Sequence[Any], Sequence[Any]], Any],
    args: Args,
    *,
    backward: Callable[[Any], Any] | None = None,
    directions: int = 3,
    step: float = 1e-3,
    rtol: float = 1e-8,
    seed: int = 0,
) -> None:
    """Raise unless ``jvp`` is the Jacobian-vector product of ``forward``, and the transpose of ``backward``.

    Parameters
    ----------
    forward : callable
        ``forward(*args) -> out``, an array or a tree of arrays.
    jvp : callable
        ``jvp(args, tangents) -> tout``, with the tangents in the form of the arguments.
    args : mapping of str to arguments, or sequence
        As in `check_backward`; every argument is floating.
    backward : callable, optional
        ``backward(dout) -> grads`` at these arguments: the adjoint identity <u, Jv> = <Jᵀu, v> is checked to rounding.
    directions : int, optional
        How many random tangents to try.
    step : float, optional
        The step of the differences.
    rtol : float, optional
        Relative to the largest element of each output's change.
    seed : int, optional
        Of tangents and cotangents.

    Raises
    ------
    AssertionError
        If an identity does not hold.

    Examples
    --------
    >>> x = np.arange(3.0)
    >>> check_jvp(np.sin, lambda args, tangents: tangents[0] * np.cos(args[0]), [x], backward=lambda g: (g * np.cos(x),))
    """
    names, values = named(args)
    point, rng = floating_leaves(names, values), np.random.default_rng(seed)
    out = forward(*values)
    for _ in range(directions):
        t = random_vectors(point, rng)
        tangents = [as_tree(value, t, name) for name, value in zip(names, values, strict=True)]
        given = {name: to_numpy(x) for name, x in tree_items(jvp(values, tangents))}
        change = difference_along(forward, names, values, t, step)
        outputs = {name: to_numpy(x) for name, x in tree_items(out)}
        for name, expected in change.items():
            allowed = rtol * np.abs(expected).max(initial=0) + 64 * EPS / step * np.abs(outputs[name]).max(initial=0)
            wrong = np.abs(given[name] - expected)
            if not (np.isfinite(wrong) & (wrong <= allowed)).all():
                at = np.unravel_index(int(np.where(np.isnan(wrong), np.inf, wrong).argmax()), wrong.shape)
                raise AssertionError(
                    f"check_jvp: {name or 'out'}[{index_text(at)}] should be {expected[at]:.12g} by finite differences, "
                    f"got {given[name][at]:.12g}"
                )
        if backward is not None:
            u = random_vectors(outputs, rng)
            gradients = gradients_of(backward(as_tree(out, u)), names, values)
            terms = [u[name] * given[name] for name in u], [t[name] * gradients[name] for name in t]
            left, right = (total(side) for side in terms)
            allowed = 1e-12 * sum(float(np.abs(x).sum()) for side in terms for x in side)
            if not (math.isfinite(left - right) and abs(left - right) <= allowed):
                raise AssertionError(
                    f"check_jvp: <u, jvp(v)> = {left:.15g} but <backward(u), v> = {right:.15g}; "
                    f"they differ by {abs(left - right):.3g}, allowed are {allowed:.3g}"
                )


def total(terms: Sequence[Array]) -> float:
    """The sum of all elements of all arrays; of infinities too."""
    with np.errstate(invalid="ignore"):
        return float(sum(float(x.sum()) for x in terms))


def check_symmetric(
    gradient: Callable[[Array], Array], x: Array, *, step: float = 1e-3, rtol: float = 1e-7, seed: int = 0
) -> None:
    """Raise unless the Hessian behind a gradient is symmetric: <u, H v> = <v, H u>, as it is for every smooth function.

    Parameters
    ----------
    gradient : callable
        ``gradient(x)``, the gradient of a scalar function.
    x : float64 array
        Where to look.
    step : float, optional
        The step of the differences.
    rtol : float, optional
        Relative to the sum of the absolute terms of both sides.
    seed : int, optional
        Of the two directions.

    Raises
    ------
    AssertionError
        If it is not symmetric: then it is the gradient of nothing.

    Examples
    --------
    >>> check_symmetric(lambda x: x * np.sum(x * x), np.arange(3.0))
    >>> check_symmetric(lambda x: x * np.sum(x), np.arange(3.0))
    Traceback (most recent call last):
        ...
    AssertionError: check_symmetric: <u, H v> = 0.867118721 but <v, H u> = 1.06547907: this is the gradient of no function
    """
    rng = np.random.default_rng(seed)
    u, v = (random_vectors({"": to_numpy(x)}, rng) for _ in range(2))
    by_v, by_u = (difference_along(gradient, [""], [x], t, step)[""] for t in (v, u))
    left, right = u[""] * by_v, v[""] * by_u
    allowed = rtol * float(np.abs(left).sum() + np.abs(right).sum()) + 64 * EPS / step * float(
        np.abs(to_numpy(gradient(x))).sum()
    )
    difference = abs(float(left.sum() - right.sum()))
    if not (math.isfinite(difference) and difference <= allowed):
        raise AssertionError(
            f"check_symmetric: <u, H v> = {left.sum():.9g} but <v, H u> = {right.sum():.9g}: this is the gradient of no function"
        )


def numerical_jacobian(f: Callable[[Array], Array], x: Array, *, step: float = 1e-3) -> Array:
    """The Jacobian of ``f`` at ``x``, one column after another, by central differences with Richardson extrapolation.

    Parameters
    ----------
    f : callable
        Array to array, of any library.
    x : float64 array
        Where.
    step : float, optional
        Of the differences.

    Returns
    -------
    numpy.ndarray
        Of the shape of f(x) followed by that of x.

    Examples
    --------
    >>> numerical_jacobian(lambda x: x * x, np.asarray([1.0, 3.0])).round(6)
    array([[2., 0.],
           [0., 6.]])
    """
    shape = tuple(x.shape)
    columns = [difference_along(f, [""], [x], {"": unit_vector(shape, at)}, step)[""] for at in np.ndindex(*shape)]
    if not columns:
        return np.zeros((*f(x).shape, *shape))
    return np.reshape(np.stack(columns, axis=-1), (*columns[0].shape, *shape))


def complex_step(f: Callable[[Array], Array], x: Array, t: Array) -> Array:
    """The derivative of an analytic NumPy function along ``t``, to rounding: Im f(x + iht) / h has no difference in it.

    Parameters
    ----------
    f : callable
        Made of analytic functions: no maximum, absolute value or comparison.
    x, t : float64 array
        Where, and the direction.

    Returns
    -------
    numpy.ndarray
        J t.

    References
    ----------
    Squire, Trapp: Using Complex Variables to Estimate Derivatives of Real Functions (1998).

    Examples
    --------
    >>> complex_step(np.exp, np.asarray([0.0]), np.asarray([2.0]))
    array([2.])
    """
    step = 1e-30
    return np.imag(f(x + 1j * step * t)) / step
