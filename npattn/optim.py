"""Optimisers over trees of parameters: pure functions ``init`` and ``update`` of a rule that never changes.

``state = rule.init(params)``, then ``params, state = rule.update(params, grads, state)`` once a step. The gradient of a tree is a
tree of the same type, and so are the moments.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_float, host_int, shape_error
from npattn._arrays.namespace import Array, array_device, array_namespace, asarray, compute_dtype, float_dtype
from npattn._arrays.trees import tree_items, tree_map, tree_repr

__all__ = ["Adam", "AdamState"]


class AdamState(NamedTuple):
    """What `Adam` remembers: the number of steps done, and for every parameter two moments of its gradients.

    ``mean`` and ``variance`` are trees like the parameters, in their dtypes; in float32 for float16 and bfloat16.
    """

    step: int
    mean: Any
    variance: Any

    def __repr__(self) -> str:
        return tree_repr(self)


class Adam(NamedTuple):
    """Adam: steps along the mean gradient, divided by the root of its mean square.

    Parameters
    ----------
    lr : float
        The learning rate; at least 0.
    beta1, beta2 : float
        How much of the two moments is kept from step to step; at least 0 and less than 1.
    eps : float
        Added to the root of the second moment; at least 0.

    Notes
    -----
    The same numbers as ``torch.optim.Adam``.

    References
    ----------
    Kingma, Ba: Adam, a Method for Stochastic Optimization (2015), algorithm 1; its m and v are ``mean`` and ``variance``.

    Examples
    --------
    >>> import numpy as np
    >>> rule, params = Adam(lr=0.1), {"x": np.asarray([5.0, -3.0])}
    >>> state = rule.init(params)
    >>> for _ in range(200):
    ...     grads = {"x": 2 * (params["x"] - 1)}
    ...     params, state = rule.update(params, grads, state)
    >>> bool(np.allclose(params["x"], 1, atol=1e-3)), state.step
    (True, 200)
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, params: Any) -> AdamState:
        """The state before the first step: moments of 0.

        Parameters
        ----------
        params : tree
            Of floating arrays.

        Returns
        -------
        AdamState

        Raises
        ------
        TypeError
            If a leaf is not a floating array.
        """
        self._checked("Adam.init")
        return AdamState(0, tree_map(_zeros, params), tree_map(_zeros, params))

    def update(self, params: Any, grads: Any, state: AdamState, *, lr: float | None = None) -> tuple[Any, AdamState]:
        """One step. Nothing that is given is written to.

        Parameters
        ----------
        params : tree
            Of floating arrays.
        grads : tree
            Their gradients, in the same form; ``None`` where a parameter is ``None``.
        state : AdamState
            From `init` or the last `update`.
        lr : float, optional
            The learning rate of this step, for schedules; that of the rule by default.

        Returns
        -------
        params : tree
            The parameters after the step, in their own dtypes.
        state : AdamState
            For the next one.

        Raises
        ------
        ValueError
            If the trees differ, or a gradient has another shape than its parameter.
        TypeError
            If a leaf is not a floating array, or dtypes, libraries or devices differ.
        """
        _, beta1, beta2, eps = self._checked("Adam.update")
        rate = _at_least_0("Adam.update", "lr", self.lr if lr is None else lr)
        _check_gradients("Adam.update", params, grads)
        step = host_int("Adam.update", "state.step", state.step, least=0) + 1
        # the moments start at 0: these undo what that takes away from them
        size = rate / (1 - beta1**step)
        correction = 1 / math.sqrt(1 - beta2**step)

        def average(g: Array, mean: Array) -> Array:
            return _as_leaf(mean + (1 - beta1) * (_lifted(g) - mean), like=mean)

        def average_square(g: Array, variance: Array) -> Array:
            g = _lifted(g)
            return _as_leaf(beta2 * variance + (1 - beta2) * g * g, like=variance)

        def move(x: Array, mean: Array, variance: Array) -> Array:
            root = array_namespace("Adam.update", x=x).sqrt(variance)
            return _as_leaf(_lifted(x) - size * mean / (root * correction + eps), like=x)

        with np.errstate(all="ignore"):
            mean = tree_map(average, grads, state.mean)
            variance = tree_map(average_square, grads, state.variance)
            return tree_map(move, params, mean, variance), AdamState(step, mean, variance)

    def _checked(self, op: str) -> Adam:
        """The same with host numbers, or a clear error."""
        betas = [host_float(op, name, value) for name, value in (("beta1", self.beta1), ("beta2", self.beta2))]
        for name, beta in zip(("beta1", "beta2"), betas, strict=True):
            if not 0 <= beta < 1:
                raise ValueError(f"{op}: {name} must be at least 0 and less than 1, got {beta}")
        return self._replace(
            lr=_at_least_0(op, "lr", self.lr), beta1=betas[0], beta2=betas[1], eps=_at_least_0(op, "eps", self.eps)
        )


def _check_gradients(op: str, params: Any, grads: Any) -> None:
    """Every parameter has a gradient of its own shape, dtype, library and device."""
    tree_map(lambda *_: None, params, grads)  # raises where the trees differ
    for (name, x), (_, g) in zip(tree_items(params), tree_items(grads), strict=True):
        both = {name or "the parameter": x, f"the gradient of {name or 'the parameter'}": g}
        array_namespace(op, **both)
        float_dtype(op, **both)
        if tuple(x.shape) != tuple(g.shape):
            shape_error(op, f"the gradient of {name or 'the parameter'}", f"{tuple(x.shape)} as the parameter", g.shape)


def _lifted(x: Array) -> Array:
    """In the dtype that steps are computed in: float32 for float16 and bfloat16, else its own."""
    xp = array_namespace("lifted", x=x)
    return xp.astype(x, compute_dtype(float_dtype("lifted", x=x), xp=xp), copy=False)


def _as_leaf(x: Array, *, like: Array) -> Array:
    """An array in the dtype of ``like``; NumPy's arithmetic makes scalars of 0-d arrays."""
    xp = array_namespace("as_leaf", like=like)
    return asarray(x, xp=xp, dtype=like.dtype, device=array_device(like))


def _zeros(x: Array) -> Array:
    xp = array_namespace("Adam.init", x=x)
    return xp.zeros_like(x, dtype=compute_dtype(float_dtype("Adam.init", x=x), xp=xp))


def _at_least_0(op: str, name: str, value: Any) -> float:
    number = host_float(op, name, value)
    if number < 0:
        raise ValueError(f"{op}: {name} must be at least 0, got {number}")
    return number
