"""Gradient descent, with momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from npattn._arrays.blocks import Results
from npattn._arrays.checks import host_int
from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_repr
from npattn.optim._leaves import at_least_0, check_gradients, less_than_1, map_leaves, zeros


class SGDState(NamedTuple):
    """What `SGD` remembers: the number of steps done, and the velocity of every parameter.

    ``velocity`` is a tree like the parameters, in their dtypes; in float32 for float16 and bfloat16. ``None`` without momentum.
    """

    step: int
    velocity: Any

    def __repr__(self) -> str:
        return tree_repr(self)


class SGD(NamedTuple):
    """Stochastic gradient descent: steps against the gradient, or against a sum of past ones that fades.

    Parameters
    ----------
    lr : float
        The learning rate; at least 0.
    momentum : float
        How much of the velocity is kept from step to step; at least 0 and less than 1.
    nesterov : bool
        Whether a step looks ahead: along the gradient plus the momentum of the new velocity.

    Notes
    -----
    The same numbers as ``torch.optim.SGD``.

    References
    ----------
    Sutskever et al.: On the Importance of Initialization and Momentum in Deep Learning (2013), section 2; as PyTorch does, the
    learning rate is not in the velocity.

    Examples
    --------
    >>> import numpy as np
    >>> rule, params = SGD(lr=0.1, momentum=0.5), {"x": np.asarray([5.0, -3.0])}
    >>> state = rule.init(params)
    >>> for _ in range(60):
    ...     params, state = rule.update(params, {"x": 2 * (params["x"] - 1)}, state)
    >>> bool(np.allclose(params["x"], 1))
    True
    """

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False

    def init(self, params: Any) -> SGDState:
        """The state before the first step: velocities of 0.

        Parameters
        ----------
        params : tree
            Of floating arrays.

        Returns
        -------
        SGDState

        Raises
        ------
        TypeError
            If a leaf is not a floating array.
        """
        velocity = zeros("SGD.init", params)
        return SGDState(0, velocity if self._checked("SGD.init") else None)

    def update(self, params: Any, grads: Any, state: SGDState, *, lr: float | None = None) -> tuple[Any, SGDState]:
        """One step. Nothing that is given is written to.

        Parameters
        ----------
        params : tree
            Of floating arrays.
        grads : tree
            Their gradients, in the same form; ``None`` where a parameter is ``None``.
        state : SGDState
            From `init` or the last `update`.
        lr : float, optional
            The learning rate of this step, for schedules; that of the rule by default.

        Returns
        -------
        params : tree
            The parameters after the step, in their own dtypes.
        state : SGDState
            For the next one.

        Raises
        ------
        ValueError
            If the trees differ, or a gradient has another shape than its parameter.
        TypeError
            If a leaf is not a floating array, or dtypes, libraries or devices differ.
        """
        momentum = self._checked("SGD.update")
        rate = at_least_0("SGD.update", "lr", self.lr if lr is None else lr)
        check_gradients("SGD.update", params, grads)
        step = host_int("SGD.update", "state.step", state.step, least=0) + 1

        def plain(x: Array, g: Array) -> Results:
            return (x - rate * g,)

        def with_velocity(x: Array, g: Array, velocity: Array) -> Results:
            velocity = momentum * velocity + g
            return x - rate * (g + momentum * velocity if self.nesterov else velocity), velocity

        def leaf(_name: str, _x: Array) -> Callable[..., Results]:
            return with_velocity if momentum else plain

        if not momentum:
            return map_leaves(leaf, (0,), params, grads)[0], SGDState(step, None)
        params, velocity = map_leaves(leaf, (0, 2), params, grads, state.velocity)
        return params, SGDState(step, velocity)

    def _checked(self, op: str) -> float:
        """The momentum as a host number, or a clear error."""
        at_least_0(op, "lr", self.lr)
        momentum = less_than_1(op, "momentum", self.momentum)
        if self.nesterov and not momentum:
            raise ValueError(f"{op}: nesterov needs a momentum, got 0")
        return momentum
