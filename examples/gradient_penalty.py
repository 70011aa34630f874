"""A gradient penalty by double backward: how far apart are two kinds of sets?

The Wasserstein distance of two distributions is the largest mean difference that a critic can find whose slope is nowhere more
than 1. Here the critic attends to a set of points. It is trained to tell sets from shifted sets, while a penalty keeps the length
of its gradient in the set near 1 (Gulrajani et al., 2017). The loss is made of a gradient, so training needs the backward of
backward: `npattn.attention_backward_backward`. For shifted sets the true distance is known, the length of the shift. Without the
penalty the critic's answer has no bound.

    python examples/gradient_penalty.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import npattn
from npattn.optim import Adam

POINTS, WIDTH, HEAD, QUERIES = 5, 3, 4, 2
SHIFT = np.array([0.6, -0.3, 0.2])  # of every point of a set
DISTANCE = float(np.sqrt(POINTS) * np.linalg.norm(SHIFT))  # of the sets, as vectors of all their numbers


class Critic(NamedTuple):
    """``critic(x) = Σ u∘attention(q, x w_k, x w_v)``: learned queries look at a set; also the type of its gradients."""

    q: Any  # (QUERIES, HEAD)
    w_k: Any  # (WIDTH, HEAD)
    w_v: Any  # (WIDTH, HEAD)
    u: Any  # (QUERIES, HEAD)

    @classmethod
    def init(cls, rng: np.random.Generator) -> Critic:
        """Small random parameters."""
        shapes = ((QUERIES, HEAD), (WIDTH, HEAD), (WIDTH, HEAD), (QUERIES, HEAD))
        return cls(*(0.3 * rng.standard_normal(shape) for shape in shapes))


class Pass(NamedTuple):
    """The critic's values of B sets, and how they answer to the sets."""

    values: Any  # (B,)
    dx: Any  # (B, POINTS, WIDTH), of each set's own value
    dout: Any
    saved: Any
    grads: Any


def critic_and_slope(critic: Critic, x: Any) -> Pass:
    """Forward, and backward to the sets."""
    out, saved = npattn.attention_forward(np.broadcast_to(critic.q, (len(x), QUERIES, HEAD))[:, None], *_keys(critic, x))
    dout = np.broadcast_to(critic.u, out.shape)
    grads = npattn.attention_backward(dout, saved)
    # out = attention(q, k, v), k = x w_k, v = x w_v
    dx = grads.dk[:, 0] @ critic.w_k.T + grads.dv[:, 0] @ critic.w_v.T
    return Pass(np.sum(critic.u * out, axis=(1, 2, 3)), dx, dout, saved, grads)


def _keys(critic: Critic, x: Any) -> Any:
    return (x @ critic.w_k)[:, None], (x @ critic.w_v)[:, None]


def gradient_of_values(x: Any, done: Pass, dvalues: Any) -> Critic:
    """Plain backward: the gradient of Σ dvalues · values."""
    by = np.reshape(dvalues, (-1, 1, 1))
    grads = npattn.attention_backward(by[..., None] * done.dout, done.saved)
    rows = x.reshape(-1, WIDTH).T
    du = np.sum(by * done.saved.out[:, 0], axis=0)
    return Critic(grads.dq.sum((0, 1)), rows @ _rows(grads.dk), rows @ _rows(grads.dv), du)


def gradient_of_slope(critic: Critic, x: Any, done: Pass, ddx: Any) -> Critic:
    """Backward of backward: the gradient of Σ ddx · dx."""
    # dx = dk w_kᵀ + dv w_vᵀ
    cotangents = npattn.AttentionGrads(None, (ddx @ critic.w_k)[:, None], (ddx @ critic.w_v)[:, None], None, None)
    twice = npattn.attention_backward_backward(cotangents, done.dout, done.saved)
    # and the weights are used in forward too: k = x w_k, v = x w_v
    rows, drows = x.reshape(-1, WIDTH).T, ddx.reshape(-1, WIDTH).T
    dw_k = drows @ _rows(done.grads.dk) + rows @ _rows(twice.dk)
    dw_v = drows @ _rows(done.grads.dv) + rows @ _rows(twice.dv)
    return Critic(twice.dq.sum((0, 1)), dw_k, dw_v, twice.ddout.sum((0, 1)))


def _rows(x: Any) -> Any:
    return x.reshape(-1, HEAD)


def penalised_loss(critic: Critic, here: Any, there: Any, between: Any, strength: float) -> tuple[float, Critic, float]:
    """Minus the mean difference, plus the penalty; its gradient; and the mean length of the slope."""
    count = len(here)
    near, far = critic_and_slope(critic, here), critic_and_slope(critic, there)
    loss = float(np.mean(near.values) - np.mean(far.values))
    share = np.full(count, 1 / count)
    parts = [gradient_of_values(here, near, share), gradient_of_values(there, far, -share)]
    middle = critic_and_slope(critic, between)
    length = np.sqrt(np.sum(middle.dx**2, axis=(1, 2)))
    if strength:
        loss += strength * float(np.mean((length - 1) ** 2))
        ddx = (strength * 2 * (length - 1) / (length * count))[:, None, None] * middle.dx
        parts.append(gradient_of_slope(critic, between, middle, ddx))
    return loss, Critic(*(sum(gs) for gs in zip(*parts, strict=True))), float(length.mean())


def train(strength: float, *, steps: int = 300, batch: int = 64, seed: int = 0) -> tuple[float, float]:
    """The critic's estimate of the distance on new sets, and the length of its slope there."""
    rng = np.random.default_rng(seed)
    critic, rule = Critic.init(rng), Adam(lr=2e-2)
    state = rule.init(critic)
    for _ in range(steps):
        _, grads, _ = penalised_loss(critic, *_sets(rng, batch), strength)
        critic, state = rule.update(critic, grads, state)
    here, there, between = _sets(rng, 1000)
    loss, _, length = penalised_loss(critic, here, there, between, 0.0)
    return -loss, length


def _sets(rng: np.random.Generator, count: int) -> tuple[Any, Any, Any]:
    """Sets, shifted sets, and sets on the way from one to the other."""
    here, there = rng.standard_normal((2, count, POINTS, WIDTH))
    there = there + SHIFT
    return here, there, here + rng.random((count, 1, 1)) * (there - here)


def main() -> None:
    """With and without the penalty."""
    print(f"true distance {DISTANCE:.2f}")
    for name, strength in (("with the penalty", 100.0), ("without", 0.0)):
        distance, length = train(strength)
        print(f"{name:<17} estimate {distance:8.2f}, length of the gradient {length:8.2f}")


if __name__ == "__main__":
    main()
