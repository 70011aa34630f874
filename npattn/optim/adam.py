"""Adam, and AdamW, which also makes weights smaller, and which of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.blocks import Results
from npattn._arrays.checks import host_int
from npattn._arrays.namespace import Array, array_namespace
from npattn._arrays.trees import tree_repr
from npattn.optim._leaves import at_least_0, check_gradients, less_than_1, map_leaves, zeros


class AdamState(NamedTuple):
    """What `Adam` and `AdamW` remember: the number of steps done, and for every parameter two moments of its gradients.

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
        _check("Adam.init", self)
        return AdamState(0, zeros("Adam.init", params), zeros("Adam.init", params))

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
        return _update("Adam.update", self, params, grads, state, lr, lambda _name, _x: 0.0)


def decays_matrices(name: str, x: Array) -> bool:
    """Whether decay makes a parameter smaller: matrices and tables, but no biases, norms and sinks.

    Parameters
    ----------
    name : str
        Such as ``blocks.0.attention.w_q``.
    x : array
        The parameter.

    Returns
    -------
    bool
        True for two axes and more, unless the last part of the name begins with ``b_``: biases of heads have two.

    Examples
    --------
    >>> import numpy as np
    >>> decays_matrices("blocks.0.attention.w_q", np.zeros((8, 2, 4))), decays_matrices("norm.weight", np.zeros(8))
    (True, False)
    """
    return x.ndim >= 2 and not name.rpartition(".")[2].startswith("b_")


class AdamW(NamedTuple):
    """Adam with decoupled weight decay: every step also makes the weights smaller, whatever their gradients are.

    Parameters
    ----------
    lr, beta1, beta2, eps : float
        As in `Adam`.
    weight_decay : float
        A step multiplies what decays by ``1 - lr * weight_decay``, before it moves; at least 0.
    decays : callable
        ``decays(name, x)``: whether the parameter of this name is one of them. `decays_matrices` by default.

    Notes
    -----
    The same numbers as ``torch.optim.AdamW``, whose parameter groups stand for ``decays``.

    References
    ----------
    Loshchilov, Hutter: Decoupled Weight Decay Regularization (2019), algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> rule, params = AdamW(lr=0.5, weight_decay=0.1), {"w": np.ones((1, 2)), "b": np.ones(2)}
    >>> params, state = rule.update(params, {"w": np.zeros((1, 2)), "b": np.zeros(2)}, rule.init(params))
    >>> params["w"].tolist(), params["b"].tolist()
    ([[0.95, 0.95]], [1.0, 1.0])
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    decays: Callable[[str, Array], bool] = decays_matrices

    def init(self, params: Any) -> AdamState:
        """The state before the first step; as in `Adam.init`.

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
        _check("AdamW.init", self)
        at_least_0("AdamW.init", "weight_decay", self.weight_decay)
        return AdamState(0, zeros("AdamW.init", params), zeros("AdamW.init", params))

    def update(self, params: Any, grads: Any, state: AdamState, *, lr: float | None = None) -> tuple[Any, AdamState]:
        """One step; as in `Adam.update`.

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
        decay = at_least_0("AdamW.update", "weight_decay", self.weight_decay)
        return _update("AdamW.update", self, params, grads, state, lr, lambda name, x: decay if self.decays(name, x) else 0.0)


def _check(op: str, rule: Adam | AdamW) -> tuple[float, float, float]:
    """beta1, beta2 and eps as host numbers, or a clear error."""
    at_least_0(op, "lr", rule.lr)
    beta1, beta2 = less_than_1(op, "beta1", rule.beta1), less_than_1(op, "beta2", rule.beta2)
    return beta1, beta2, at_least_0(op, "eps", rule.eps)


def _update(
    op: str,
    rule: Adam | AdamW,
    params: Any,
    grads: Any,
    state: AdamState,
    lr: float | None,
    decay_of: Callable[[str, Array], float],
) -> tuple[Any, AdamState]:
    beta1, beta2, eps = _check(op, rule)
    rate = at_least_0(op, "lr", rule.lr if lr is None else lr)
    check_gradients(op, params, grads)
    step = host_int(op, "state.step", state.step, least=0) + 1
    # the moments start at 0: these undo what that takes away from them
    size = rate / (1 - beta1**step)
    correction = 1 / math.sqrt(1 - beta2**step)

    def leaf(name: str, x: Array) -> Callable[..., Results]:
        xp, shrink = array_namespace(op, x=x), 1 - rate * decay_of(name, x)

        def elements(x: Array, g: Array, mean: Array, variance: Array) -> Results:
            mean = mean + (1 - beta1) * (g - mean)
            variance = beta2 * variance + (1 - beta2) * g * g
            moved = (x if shrink == 1 else x * shrink) - size * mean / (xp.sqrt(variance) * correction + eps)
            return moved, mean, variance

        return elements

    with np.errstate(all="ignore"):
        params, mean, variance = map_leaves(leaf, (0, 2, 3), params, grads, state.mean, state.variance)
    return params, AdamState(step, mean, variance)
