"""A truncated Gauss-Newton fit of a small language model beside Adam: far fewer steps, each of them dearer.

Near its end a fit is a valley: steep across and flat along. Adam scales each parameter by itself and zigzags. A Newton step
solves ``(G + damping) step = -gradient`` with a matrix G of curvatures, which knows the valley's shape. G has a row for every
parameter and is never built: conjugate gradients need only products ``G t``. With J the Jacobian from parameters to logits and H
the Hessian of cross-entropy in the logits,

    G t = Jᵀ H J t

is three calls: `language_model_jvp` for J t, `cross_entropy_backward_jvp` for H, `language_model_backward` for Jᵀ. H has no
negative curvature, and so neither has G, which conjugate gradients rely on. (The whole Hessian is `language_model_loss_hvp`; it
has negative curvature far from a minimum.) The damping follows Levenberg and Marquardt: less of it where the quadratic model
predicts the loss well, more where it does not.

    python examples/newton_cg.py                    # needs the base install
    python examples/newton_cg.py --plot newton.png  # and the loss by steps and by seconds (needs matplotlib)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn import tree_map
from npattn.layers import cross_entropy_backward_jvp
from npattn.models import (
    LanguageModelParams,
    language_model_backward,
    language_model_jvp,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.optim import Adam

TEXT = "the queries ask, the keys answer, and the values are what is told. "
CONTEXT, ROWS = 16, 12


class Fit(NamedTuple):
    """The loss before every step, and the seconds until then."""

    losses: list[float]
    seconds: list[float]

    def steps_to(self, loss: float) -> int | None:
        """After how many steps the loss was reached."""
        return next((n for n, reached in enumerate(self.losses) if reached <= loss), None)


class Problem(NamedTuple):
    """Pieces of a text, all of which make one batch, and the parameters to begin with."""

    params: LanguageModelParams
    ids: Any  # (ROWS, CONTEXT)
    targets: Any

    @classmethod
    def make(cls, seed: int = 0) -> Problem:
        """A model of one block."""
        alphabet = sorted(set(TEXT))
        numbers = np.array([alphabet.index(c) for c in TEXT * 2])
        starts = np.arange(ROWS) * 5
        pieces = np.stack([numbers[s : s + CONTEXT + 1] for s in starts])
        sizes = {"vocabulary": len(alphabet), "context": CONTEXT, "blocks": 1, "width": 16, "heads": 2}
        params = LanguageModelParams.init(np.random.default_rng(seed), **sizes)
        return cls(params, pieces[:, :-1], pieces[:, 1:])

    def loss(self, params: Any) -> tuple[float, Any]:
        """The mean cross-entropy, and what backward needs."""
        loss, saved = language_model_loss_forward(params, self.ids, self.targets)
        return float(loss), saved


# Trees as vectors: parameters, gradients and steps alike --------------------------------------------------------------------


def inner(a: Any, b: Any) -> float:
    """⟨a, b⟩ over all leaves."""
    total = []
    tree_map(lambda x, y: total.append(float(np.vdot(x, y))), a, b)
    return sum(total)


def plus(a: Any, factor: float, b: Any) -> Any:
    """a + factor b."""
    return tree_map(lambda x, y: x + factor * y, a, b)


# The two ways ----------------------------------------------------------------------------------------------------------------


def adam(problem: Problem, steps: int, lr: float) -> Fit:
    """Every step with the whole batch."""
    params, rule = problem.params, Adam(lr=lr)
    state, fit, started = rule.init(params), Fit([], []), time.perf_counter()
    for _ in range(steps):
        loss, saved = problem.loss(params)
        fit.losses.append(loss)
        fit.seconds.append(time.perf_counter() - started)
        grads = language_model_loss_backward(1.0, saved).dparams
        params, state = rule.update(params, grads, state)
    return fit


def newton_cg(problem: Problem, steps: int, *, products: int = 30, damping: float = 0.1) -> Fit:
    """Every step by at most so many products with G."""
    params, fit, started = problem.params, Fit([], []), time.perf_counter()
    loss, saved = problem.loss(params)
    for _ in range(steps):
        fit.losses.append(loss)
        fit.seconds.append(time.perf_counter() - started)
        gradient = language_model_loss_backward(1.0, saved).dparams
        step, change = conjugate_gradients(gauss_newton(problem, params, saved, damping), gradient, products)
        moved_loss, moved_saved = problem.loss(plus(params, 1.0, step))
        # change = ⟨gradient, step⟩ + ⟨step, (G + damping) step⟩ / 2 is what the quadratic model promised
        quality = (moved_loss - loss) / change
        damping *= 0.5 if quality > 0.75 else 3.0 if quality < 0.25 else 1.0
        if moved_loss < loss:
            params, loss, saved = plus(params, 1.0, step), moved_loss, moved_saved
    return fit


def gauss_newton(problem: Problem, params: Any, saved: Any, damping: float = 0.0) -> Callable[[Any], Any]:
    """t → Jᵀ H J t + damping t."""

    def product(t: Any) -> Any:
        _, tlogits = language_model_jvp(params, problem.ids, tparams=t)
        tdlogits = cross_entropy_backward_jvp(1.0, saved.loss, tlogits=tlogits).dlogits
        return plus(language_model_backward(tdlogits, saved.model).dparams, damping, t)

    return product


def conjugate_gradients(product: Callable[[Any], Any], gradient: Any, most: int, tolerance: float = 0.05) -> tuple[Any, float]:
    """About the least of ⟨gradient, x⟩ + ⟨x, A x⟩ / 2, and its value there; A t is ``product(t)``, and positive definite."""
    x = tree_map(np.zeros_like, gradient)
    residual = tree_map(np.negative, gradient)
    direction, size = residual, inner(residual, residual)
    enough = tolerance**2 * size
    for _ in range(most):
        along = product(direction)
        length = size / inner(direction, along)
        x, residual = plus(x, length, direction), plus(residual, -length, along)
        size, before = inner(residual, residual), size
        if size <= enough:
            break
        direction = plus(residual, size / before, direction)
    # A x = -gradient - residual
    return x, (inner(gradient, x) - inner(residual, x)) / 2


def main(arguments: Sequence[str] | None = None) -> tuple[Fit, Fit]:
    """Both fits, in words and as a plot."""
    parser = argparse.ArgumentParser(description="A truncated Gauss-Newton fit beside Adam.")
    parser.add_argument("--steps", type=int, default=20, help="of Gauss-Newton (default 20)")
    parser.add_argument("--adam-steps", type=int, default=300, help="of Adam (default 300)")
    parser.add_argument("--lr", type=float, default=1e-2, help="of Adam (default 0.01)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the losses")
    options = parser.parse_args(arguments)
    problem = Problem.make()
    ours, theirs = newton_cg(problem, options.steps), adam(problem, options.adam_steps, options.lr)
    for name, fit in (("Gauss-Newton", ours), ("Adam", theirs)):
        print(f"{name:<13} loss {fit.losses[0]:.3f} to {fit.losses[-1]:.2e} in {len(fit.losses)} steps, {fit.seconds[-1]:.1f} s")
    for loss in (1.0, 0.1, 0.03):
        counts = [fit.steps_to(loss) for fit in (ours, theirs)]
        seconds = ["" if n is None else f" ({fit.seconds[n]:.1f} s)" for n, fit in zip(counts, (ours, theirs), strict=True)]
        print(f"steps to {loss:<4g}: Gauss-Newton {counts[0]}{seconds[0]}, Adam {counts[1]}{seconds[1]}")
    if options.plot:
        draw(ours, theirs, options.plot)
    return ours, theirs


def draw(ours: Fit, theirs: Fit, path: str) -> None:
    """The losses, by steps and by seconds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('a plot needs matplotlib: pip install "npattn[plot]"') from None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for ax, by in zip(figure.subplots(1, 2, sharey=True), ("steps", "seconds"), strict=True):
        for name, fit in (("Gauss-Newton", ours), ("Adam", theirs)):
            ax.semilogy(range(len(fit.losses)) if by == "steps" else fit.seconds, fit.losses, label=name)
        ax.set_xlabel(by)
        ax.set_xscale("log" if by == "steps" else "linear")
    ax.legend()
    figure.axes[0].set_ylabel("loss (nats a character)")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
