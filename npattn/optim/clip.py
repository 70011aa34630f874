"""The norm of all gradients together, and gradients made shorter to fit one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from npattn._arrays.blocks import Results, map_rows
from npattn._arrays.checks import host_float
from npattn._arrays.namespace import Array, array_device, array_namespace, asarray, compute_dtype, float_dtype
from npattn._arrays.trees import tree_items
from npattn.optim._leaves import at_least_0, map_leaves


def global_norm(tree: Any) -> Array:
    """The root of the sum of the squares of all elements of all leaves.

    Parameters
    ----------
    tree : tree
        Of floating arrays, one at least.

    Returns
    -------
    array ()
        In the leaves' dtype; float32 for float16 and bfloat16.

    Raises
    ------
    ValueError
        If the tree has no leaf.
    TypeError
        If a leaf is not a floating array, or dtypes, libraries or devices differ.

    Examples
    --------
    >>> import numpy as np
    >>> global_norm({"w": np.asarray([[3.0]]), "b": np.asarray([4.0])})
    array(5.)
    """
    named = {name or "the leaf": x for name, x in tree_items(tree)}
    if not named:
        raise ValueError("global_norm: the tree must have a leaf, got none")
    xp = array_namespace("global_norm", **named)
    compute = compute_dtype(float_dtype("global_norm", **named), xp=xp)

    def squares(x: Array) -> Results:
        x = xp.astype(x, compute, copy=False)
        return (xp.sum(x * x, dtype=compute),)

    sums: list[Array] = [map_rows(squares, xp.reshape(x, (-1,)), xp=xp, totals=1)[0] for x in named.values()]
    with np.errstate(all="ignore"):
        total = sums[0]
        for other in sums[1:]:
            total = total + other
        return asarray(xp.sqrt(total), xp=xp, dtype=compute, device=array_device(next(iter(named.values()))))


def clip_global_norm(grads: Any, max_norm: float, *, eps: float = 1e-6) -> tuple[Any, Array]:
    """All gradients times one factor, so that their norm together is at most ``max_norm``.

    Parameters
    ----------
    grads : tree
        Of floating arrays, one at least.
    max_norm : float
        At least 0.
    eps : float, optional
        Added to the norm before it divides; at least 0.

    Returns
    -------
    grads : tree
        The same direction: ``grads * min(1, max_norm / (norm + eps))``.
    norm : array ()
        What it was before. If it is infinite or NaN, so are the gradients: look at it before a step.

    Raises
    ------
    ValueError
        If the tree has no leaf, or a number is negative.
    TypeError
        If a leaf is not a floating array, or dtypes, libraries or devices differ.

    Notes
    -----
    The same numbers as ``torch.nn.utils.clip_grad_norm_``.

    References
    ----------
    Pascanu, Mikolov, Bengio: On the Difficulty of Training Recurrent Neural Networks (2013), section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> grads, norm = clip_global_norm({"w": np.asarray([3.0, 4.0])}, 1.0)
    >>> grads["w"].round(3), norm
    (array([0.6, 0.8]), array(5.))
    """
    op = "clip_global_norm"
    at_least_0(op, "max_norm", max_norm)
    at_least_0(op, "eps", eps)
    norm = global_norm(grads)
    xp = array_namespace(op, norm=norm)
    with np.errstate(all="ignore"):
        factor = xp.clip(host_float(op, "max_norm", max_norm) / (norm + host_float(op, "eps", eps)), 0.0, 1.0)

    def leaf(_name: str, _x: Array) -> Callable[..., Results]:
        return lambda g: (g * factor,)

    return map_leaves(leaf, (0,), grads)[0], norm
