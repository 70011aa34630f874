"""The learning rate of every step."""

from __future__ import annotations

import math
from typing import NamedTuple

from npattn._arrays.checks import host_int
from npattn.optim._leaves import at_least_0


class WarmupCosine(NamedTuple):
    """A learning rate that rises in a straight line, then falls along half a cosine.

    Parameters
    ----------
    peak : float
        The highest; at least 0.
    steps : int
        After so many the rate is ``floor``; at least 1.
    warmup : int, optional
        The steps of the rise: step 0 has ``peak / warmup``, step ``warmup - 1`` has ``peak``. At most ``steps``.
    floor : float, optional
        The lowest, at the end; at least 0.

    References
    ----------
    Loshchilov, Hutter: SGDR, Stochastic Gradient Descent with Warm Restarts (2017), equation 5, without restarts.

    Examples
    --------
    >>> rate = WarmupCosine(peak=1.0, steps=12, warmup=4)
    >>> [round(rate(step), 3) for step in (0, 3, 4, 8, 12, 99)]
    [0.25, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    peak: float
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        """The rate of a step.

        Parameters
        ----------
        step : int
            Counted from 0.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            If a number is out of range.
        """
        op = "WarmupCosine"
        peak, floor = at_least_0(op, "peak", self.peak), at_least_0(op, "floor", self.floor)
        steps, warmup = host_int(op, "steps", self.steps, least=1), host_int(op, "warmup", self.warmup, least=0)
        if warmup > steps:
            raise ValueError(f"{op}: warmup must be at most steps = {steps}, got {warmup}")
        step = host_int(op, "step", step, least=0)
        if step < warmup:
            return peak * (step + 1) / warmup
        if step >= steps:
            return floor
        return floor + (peak - floor) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
