"""The training loop: batches, gradients, steps, progress, an interrupt that loses nothing, a callback for all else.

It knows no model: a function gives the loss of a batch and its gradient, a rule of `npattn.optim` takes the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TextIO

from npattn._arrays.checks import host_int
from npattn._commands.terminal import Progress, Terminal
from npattn.optim import clip_global_norm

__all__ = ["Rule", "Schedule", "Trained", "TrainingStep", "train"]


class Rule(Protocol):
    """An optimiser: `npattn.optim.Adam` or another of its kind."""

    def init(self, params: Any) -> Any:
        """The state before the first step."""

    def update(self, params: Any, grads: Any, state: Any, *, lr: float | None = None) -> tuple[Any, Any]:
        """The parameters and the state after a step."""


class Schedule(Protocol):
    """The learning rate of every step, such as a `npattn.optim.WarmupCosine`."""

    def __call__(self, step: int, /) -> float:
        """The rate of a step, counted from 0."""


class TrainingStep(NamedTuple):
    """A step that is done, as the callback of `train` sees it."""

    step: int  # counted from 1
    loss: float  # of its batch, before the step
    lr: float | None  # None: that of the rule
    norm: float | None  # of the gradients before they were clipped; None if they are not
    seconds: float  # since the loop began
    params: Any  # after the step
    state: Any

    def __repr__(self) -> str:
        return f"TrainingStep(step={self.step}, loss={self.loss:.4g}, lr={self.lr}, norm={self.norm}, seconds={self.seconds:.1f})"


class Trained(NamedTuple):
    """What `train` has reached."""

    params: Any
    state: Any  # of the optimiser; state.step steps are done
    losses: tuple[float, ...]  # of this call's steps
    interrupted: bool

    def __repr__(self) -> str:
        last = f"{self.losses[-1]:.4g}" if self.losses else "none"
        return f"Trained(step={self.state.step}, last loss={last}, interrupted={self.interrupted})"


def train(
    loss_and_gradient: Callable[[Any, Any, int], tuple[Any, Any]],
    params: Any,
    batches: Callable[[int], Any],
    rule: Rule,
    /,
    *,
    steps: int,
    state: Any = None,
    schedule: Schedule | None = None,
    max_norm: float | None = None,
    progress: TextIO | None = None,
    tokens: int = 0,
    callback: Callable[[TrainingStep], Any] | None = None,
) -> Trained:
    """Take steps until there are ``steps`` of them, or the user interrupts.

    Parameters
    ----------
    loss_and_gradient : callable
        ``loss_and_gradient(params, batch, step) -> (loss, grads)``: a number and a tree like the parameters. ``step`` is there
        for dropout: ``dropout.fold(step)``.
    params : tree
        Where to begin.
    batches : callable
        ``batches(step)``: the batch of a step, counted from 0. If it depends on nothing but the step, as with
        ``numpy.random.default_rng([seed, step])``, a run that is taken up again goes on to the same bits.
    rule : Rule
        Of `npattn.optim`.
    steps : int
        How many, with those that ``state`` counts already.
    state : optional
        Of the optimiser, to take up an earlier run; a new one by default.
    schedule : callable, optional
        ``schedule(step)``: the learning rate, such as a `npattn.optim.WarmupCosine`; that of the rule by default.
    max_norm : float, optional
        Longer gradients are clipped to this norm, as by `npattn.optim.clip_global_norm`.
    progress : text stream, optional
        Where to show progress: a line that is rewritten on a terminal, a few lines elsewhere. Nowhere by default.
    tokens : int, optional
        Of a batch, to show how many there are a second.
    callback : callable, optional
        Called with a `TrainingStep` after each step: for checkpoints, measurements, plots. ``return True`` ends the loop.

    Returns
    -------
    Trained
        Parameters and state after the last whole step; after an interrupt too (``Ctrl-C``), which the caller finds in
        ``interrupted``.

    Raises
    ------
    ValueError
        If a number is out of range.
    FloatingPointError
        If a loss is infinite or NaN: from there on there is nothing to learn.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.optim import SGD
    >>> def loss_and_gradient(w, batch, step):
    ...     x, y = batch
    ...     return np.mean((x @ w - y) ** 2), 2 * x.T @ (x @ w - y) / len(y)
    >>> def batches(step):
    ...     x = np.random.default_rng([0, step]).standard_normal((8, 2))
    ...     return x, x @ [1.0, -2.0]
    >>> train(loss_and_gradient, np.zeros(2), batches, SGD(lr=0.1), steps=100).params.round(3)
    array([ 1., -2.])
    """
    host_int("train", "steps", steps, least=0)
    state = rule.init(params) if state is None else state
    reached = TrainingStep(state.step, math.nan, None, None, 0.0, params, state)
    first, losses, interrupted = reached.step, list[float](), False
    line = None if progress is None else Progress(Terminal(progress), steps, done=first, tokens=tokens)
    started = time.monotonic()
    try:
        for step in range(first, steps):
            loss, grads = loss_and_gradient(reached.params, batches(step), step)
            losses.append(_finite(float(loss), step))
            norm = None
            if max_norm is not None:
                grads, norm = clip_global_norm(grads, max_norm)
            lr = None if schedule is None else schedule(step)
            params, state = rule.update(reached.params, grads, reached.state, lr=lr)
            # one name for all of it: an interrupt comes before or after
            reached = TrainingStep(
                step + 1, losses[-1], lr, None if norm is None else float(norm), time.monotonic() - started, params, state
            )
            if line is not None:
                line.update(losses[-1])
            if callback is not None and callback(reached) is True:
                break
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if line is not None:
            line.close()
    return Trained(reached.params, reached.state, tuple(losses[: reached.step - first]), interrupted)


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"train: the loss of step {step + 1} is {loss}; try a smaller learning rate, a longer warm-up or max_norm="
        )
    return loss
