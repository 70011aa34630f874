"""Is a backward the vector-Jacobian product of its forward? Random directions and cotangents against finite differences.

For a direction t and a cotangent g, ⟨g, J t⟩ = ⟨t, Jᵀ g⟩. Forward gives J t by central differences, backward gives Jᵀ g. Two scalars
are compared, whatever the number of elements; only a failure is worth looking at element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import FLOATS, Array, array_device, array_namespace, asarray, dtype_name
from npattn._arrays.trees import tree_items, tree_map
from npattn.testing.libraries import to_numpy

FloatArray = np.ndarray[Any, Any]
Vectors = dict[str, FloatArray]  # of every floating leaf, by name
Args = Mapping[str, Any] | Sequence[Any]

EPS = float(np.finfo(np.float64).eps)
LOOKED_AT = 400  # elements of an input that a report looks at


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
    names, values = _named(args)
    point = _leaves(names, values)
    if wrong := [f"{name} ({dtype_name(x.dtype)})" for name, x in point.items() if dtype_name(x.dtype) != "float64"]:
        raise TypeError(f"check_backward: floating arguments must be float64, got {', '.join(wrong)}")
    rng = np.random.default_rng(seed)
    out, saved = forward(*values)
    outputs = {name: to_numpy(x) for name, x in tree_items(out)}
    for _ in range(directions):
        t, g = _random(point, rng), _random(outputs, rng)
        h = step(t) if callable(step) else step
        gradients = _gradients(backward(_like(out, g), saved), names, values)
        change = _difference(lambda *moved: forward(*moved)[0], names, values, t, h)
        left_terms = [g[name] * change[name] for name in g]
        right_terms = [t[name] * gradients[name] for name in t]
        left, right = (math.fsum(float(x) for terms in side for x in terms.flat) for side in (left_terms, right_terms))
        if bound is None:
            allowed = rtol * sum(float(np.abs(terms).sum()) for terms in (*left_terms, *right_terms))
            allowed += 64 * EPS / h * sum(float(np.abs(g[name] * outputs[name]).sum()) for name in g)
        else:
            allowed = bound(t, g)
        if not abs(left - right) <= allowed:  # also where one of them is NaN
            raise AssertionError(
                f"check_backward: along a random direction t, <g, (f(x + ht) - f(x - ht)) / 2h> = {left:.12g} "
                f"but <t, backward(g)> = {right:.12g}; they differ by {abs(left - right):.3g}, allowed are {allowed:.3g}\n"
                + _report(forward, names, values, g, gradients, h, rng)
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
    directions, step, rtol, seed
        As in `check_backward`.

    Raises
    ------
    AssertionError
        If an identity does not hold.

    Examples
    --------
    >>> check_jvp(np.sin, lambda args, tangents: tangents[0] * np.cos(args[0]), [np.arange(3.0)], backward=lambda g: (g * np.cos(np.arange(3.0)),))
    """
    names, values = _named(args)
    point, rng = _leaves(names, values), np.random.default_rng(seed)
    out = forward(*values)
    for _ in range(directions):
        t = _random(point, rng)
        tangents = [_like(value, t, name) for name, value in zip(names, values, strict=True)]
        given = {name: to_numpy(x) for name, x in tree_items(jvp(values, tangents))}
        change = _difference(forward, names, values, t, step)
        outputs = {name: to_numpy(x) for name, x in tree_items(out)}
        for name, expected in change.items():
            allowed = rtol * np.abs(expected).max(initial=0) + 64 * EPS / step * np.abs(outputs[name]).max(initial=0)
            wrong = np.abs(given[name] - expected)
            if not (wrong <= allowed).all():
                at = np.unravel_index(int(np.nanargmax(wrong)), wrong.shape)
                raise AssertionError(
                    f"check_jvp: {name or 'out'}[{_index(at)}] should be {expected[at]:.12g} by finite differences, got {given[name][at]:.12g}"
                )
        if backward is not None:
            u = _random(outputs, rng)
            gradients = _gradients(backward(_like(out, u)), names, values)
            terms = [u[name] * given[name] for name in u], [t[name] * gradients[name] for name in t]
            left, right = (sum(float(x.sum()) for x in side) for side in terms)
            allowed = 1e-12 * sum(float(np.abs(x).sum()) for side in terms for x in side)
            if not abs(left - right) <= allowed:
                raise AssertionError(f"check_jvp: <u, jvp(v)> = {left:.15g} but <backward(u), v> = {right:.15g}, allowed are {allowed:.3g} between them")


def check_symmetric(gradient: Callable[[Array], Array], x: Array, *, step: float = 1e-3, rtol: float = 1e-7, seed: int = 0) -> None:
    """Raise unless the Hessian behind a gradient is symmetric: <u, H v> = <v, H u>, as for every function with second derivatives.

    Parameters
    ----------
    gradient : callable
        ``gradient(x)``, the gradient of a scalar function.
    x : float64 array
        Where to look.
    step, rtol, seed
        As in `check_backward`.

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
    u, v = (_random({"": to_numpy(x)}, rng) for _ in range(2))
    by_v, by_u = (_difference(gradient, [""], [x], t, step)[""] for t in (v, u))
    left, right = u[""] * by_v, v[""] * by_u
    allowed = rtol * float(np.abs(left).sum() + np.abs(right).sum()) + 64 * EPS / step * float(np.abs(to_numpy(gradient(x))).sum())
    if not abs(left.sum() - right.sum()) <= allowed:
        raise AssertionError(
            f"check_symmetric: <u, H v> = {left.sum():.9g} but <v, H u> = {right.sum():.9g}: this is the gradient of no function"
        )


def numerical_jacobian(f: Callable[[Array], Array], x: Array, *, step: float = 1e-3) -> FloatArray:
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
    columns = [_difference(f, [""], [x], {"": _unit(shape, at)}, step)[""] for at in np.ndindex(*shape)]
    if not columns:
        return np.zeros((*f(x).shape, *shape))
    return np.reshape(np.stack(columns, axis=-1), (*columns[0].shape, *shape))


def complex_step(f: Callable[[FloatArray], FloatArray], x: FloatArray, t: FloatArray) -> FloatArray:
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


# Trees and vectors ---------------------------------------------------------------------------------------------------------------


def _named(args: Args) -> tuple[list[str], list[Any]]:
    if isinstance(args, Mapping):
        return list(args), list(args.values())
    return [str(n) for n in range(len(args))], list(args)


def _is_floating(x: Any) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and dtype_name(x.dtype) in FLOATS


def _leaves(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """The floating leaves of all arguments by name."""
    named = ((name, x) for top, value in zip(names, values, strict=True) for name, x in tree_items(value, top))
    return {name: x for name, x in named if _is_floating(x)}


def _random(like: Mapping[str, Any], rng: np.random.Generator) -> Vectors:
    return {name: rng.standard_normal(tuple(x.shape)) for name, x in like.items()}


def _unit(shape: tuple[int, ...], at: tuple[int, ...]) -> FloatArray:
    unit = np.zeros(shape)
    unit[at] = 1.0
    return unit


def _move(x: Array, by: FloatArray) -> Array:
    xp, device = array_namespace("check", x=x), array_device(x)
    moved = x + asarray(by, xp=xp, dtype=x.dtype, device=device)
    return asarray(moved, xp=xp, dtype=x.dtype, device=device)  # NumPy makes a scalar of a 0-d array


def _like(tree: Any, vectors: Vectors, path: str = "") -> Any:
    """``vectors`` as a tree in the library and dtypes of ``tree``."""
    leaves: Iterator[FloatArray] = iter([vectors[name] for name, x in tree_items(tree, path) if _is_floating(x)])

    def leaf(x: Any) -> Any:
        if not _is_floating(x):
            return x
        return asarray(next(leaves), xp=array_namespace("check", x=x), dtype=x.dtype, device=array_device(x))

    return tree_map(leaf, tree)


def _difference(f: Callable[..., Any], names: Sequence[str], values: Sequence[Any], t: Vectors, h: float) -> Vectors:
    """J t by central differences at h and h/2, extrapolated: the error is of the order h⁴."""

    def at(shift: float) -> Vectors:
        moved = []
        for top, value in zip(names, values, strict=True):
            steps = iter([shift * t[name] for name, x in tree_items(value, top) if _is_floating(x)])
            moved.append(tree_map(lambda x, steps=steps: _move(x, next(steps)) if _is_floating(x) else x, value))
        return {name: to_numpy(x) for name, x in tree_items(f(*moved))}

    ahead, behind, half_ahead, half_behind = (at(shift) for shift in (h, -h, h / 2, -h / 2))
    return {
        name: (4 * (half_ahead[name] - half_behind[name]) / h - (ahead[name] - behind[name]) / (2 * h)) / 3 for name in ahead
    }


def _gradients(grads: Any, names: Sequence[str], values: Sequence[Any]) -> Vectors:
    """The gradient of every floating leaf by name, in NumPy; the one place that asks whether it is there and has its form."""
    found: Vectors = {}
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        inputs = {path: x for path, x in tree_items(value, name) if _is_floating(x)}
        if not inputs:
            continue
        gradient = _of_argument(grads, name, position)
        leaves = dict(tree_items(gradient, name))
        for path, x in inputs.items():
            dx = leaves.get(path)
            if dx is None:
                raise AssertionError(f"check: there is no gradient of {path}")
            if tuple(dx.shape) != tuple(x.shape) or dtype_name(dx.dtype) != dtype_name(x.dtype):
                raise AssertionError(
                    f"check: the gradient of {path} should be {dtype_name(x.dtype)} of shape {tuple(x.shape)} as {path} is, "
                    f"got {dtype_name(dx.dtype)} of shape {tuple(dx.shape)}"
                )
            found[path] = to_numpy(dx)
    return found


def _of_argument(grads: Any, name: str, position: int) -> Any:
    if isinstance(grads, Mapping):
        return grads.get(f"d{name}", grads.get(name))
    if hasattr(grads, f"d{name}"):
        return getattr(grads, f"d{name}")
    return grads[position] if isinstance(grads, (tuple, list)) and position < len(grads) else None


class _Worst(NamedTuple):
    """The element of an input whose gradient is furthest off."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    expected: float
    got: float
    looked_at: int

    def line(self) -> tuple[str, ...]:
        off = abs(self.got - self.expected)
        ratio = off / abs(self.expected) if self.expected else math.inf if off else 0.0
        place = f"[{_index(self.at)}]" if self.looked_at == math.prod(self.shape) else f"[{_index(self.at)}] of {self.looked_at} tried"
        return (self.name, str(self.shape), place, f"{self.expected:.9g}", f"{self.got:.9g}", f"{off:.2e}", f"{ratio:.2e}")


def _report(
    forward: Callable[..., tuple[Any, Any]],
    names: Sequence[str],
    values: Sequence[Any],
    g: Vectors,
    gradients: Vectors,
    h: float,
    rng: np.random.Generator,
) -> str:
    """A table with the worst element of every input, by differences along single elements."""
    point = _leaves(names, values)
    lines = [("input", "shape", "worst element", "differences", "backward", "absolute", "relative")]
    for name, x in point.items():
        every = list(np.ndindex(*x.shape))
        chosen = every if len(every) <= LOOKED_AT else [every[n] for n in rng.choice(len(every), LOOKED_AT, replace=False)]
        worst = None
        for at in chosen:
            t = {other: _unit(tuple(y.shape), at) if other == name else np.zeros(y.shape) for other, y in point.items()}
            change = _difference(lambda *moved: forward(*moved)[0], names, values, t, h)
            expected = sum(float((g[out] * change[out]).sum()) for out in g)
            here = _Worst(name, tuple(x.shape), at, expected, float(gradients[name][at]), len(chosen))
            if worst is None or not abs(here.got - here.expected) <= abs(worst.got - worst.expected):
                worst = here
        if worst is not None:
            lines.append(worst.line())
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _index(at: Sequence[Any]) -> str:
    return ", ".join(str(int(n)) for n in at)
