"""The examples that need second derivatives: what they are made of against differences, and that they do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn import tree_map
from npattn.models import language_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slope(f: Any, x: Any, t: Any) -> Any:
    """The derivative of f along t, by Richardson's extrapolation."""

    def at(step: float) -> Any:
        return (f(tree_map(lambda a, b: a + step * b, x, t)) - f(tree_map(lambda a, b: a - step * b, x, t))) / (2 * step)

    return (4 * at(5e-4) - at(1e-3)) / 3


# Gradient penalty ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def penalty():
    return load("gradient_penalty")


@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_the_gradient_of_a_loss_with_a_penalty(penalty, strength):
    rng = np.random.default_rng(0)
    critic, t = penalty.Critic.init(rng), penalty.Critic.init(rng)
    sets = penalty._sets(rng, 7)
    _, grads, _ = penalty.penalised_loss(critic, *sets, strength)
    want = slope(lambda c: penalty.penalised_loss(c, *sets, strength)[0], critic, t)
    got = sum(np.vdot(a, b) for a, b in zip(grads, t, strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-8)


def test_the_slope_of_the_critic(penalty):
    rng = np.random.default_rng(1)
    critic, (x, t) = penalty.Critic.init(rng), rng.standard_normal((2, 3, penalty.POINTS, penalty.WIDTH))
    want = slope(lambda x: penalty.critic_and_slope(critic, x).values, x, t)
    np.testing.assert_allclose(np.sum(penalty.critic_and_slope(critic, x).dx * t, axis=(1, 2)), want, rtol=1e-8)


def test_the_penalty_holds_the_slope_and_finds_the_distance(penalty):
    distance, length = penalty.train(100.0, steps=250)
    loose, steep = penalty.train(0.0, steps=150)
    assert abs(length - 1) < 0.05
    assert abs(distance / penalty.DISTANCE - 1) < 0.15
    assert min(steep, loose / penalty.DISTANCE) > 10


# Gauss-Newton ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def newton():
    return load("newton_cg")


def random_like(tree: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return tree_map(lambda x: 0.1 * rng.standard_normal(x.shape), tree)


def test_products_are_those_of_the_gauss_newton_matrix(newton):
    """⟨s, G t⟩ = ⟨J s, H J t⟩, with J by differences and H = (diag(p) - p pᵀ) / tokens written out."""
    problem = newton.Problem.make()
    s, t = (random_like(problem.params, seed) for seed in (0, 1))

    def logits(params: Any) -> Any:
        return language_model(params, problem.ids)

    js, jt = (slope(logits, problem.params, x) for x in (s, t))
    p = np.exp(logits(problem.params))
    p /= p.sum(-1, keepdims=True)
    hjt = p * (jt - np.sum(p * jt, -1, keepdims=True)) / problem.ids.size
    product = newton.gauss_newton(problem, problem.params, problem.loss(problem.params)[1])
    np.testing.assert_allclose(newton.inner(s, product(t)), np.vdot(js, hjt), rtol=1e-6)
    np.testing.assert_allclose(newton.inner(s, product(t)), newton.inner(product(s), t), rtol=1e-10)
    assert newton.inner(t, product(t)) > 0


def test_conjugate_gradients_solve_a_system(newton):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((6, 6))
    a = a @ a.T + np.eye(6)
    gradient = {"x": rng.standard_normal(6)}
    x, value = newton.conjugate_gradients(lambda t: {"x": a @ t["x"]}, gradient, 20, tolerance=1e-12)
    np.testing.assert_allclose(x["x"], np.linalg.solve(a, -gradient["x"]), rtol=1e-8)
    np.testing.assert_allclose(value, gradient["x"] @ x["x"] + x["x"] @ a @ x["x"] / 2, rtol=1e-8)
    early, value = newton.conjugate_gradients(lambda t: {"x": a @ t["x"]}, gradient, 2)
    np.testing.assert_allclose(value, gradient["x"] @ early["x"] + early["x"] @ a @ early["x"] / 2, rtol=1e-8)


def test_what_it_prints_and_draws(newton, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "newton.png"
    ours, theirs = newton.main(["--steps", "3", "--adam-steps", "4", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [len(fit.losses) for fit in (ours, theirs)] == [3, 4]
    assert ours.losses[0] == theirs.losses[0]
    assert ours.losses[-1] < ours.losses[0]
    assert "steps to 0.1 : Gauss-Newton None, Adam None" in capsys.readouterr().out


@pytest.mark.slow
def test_it_takes_a_third_of_adams_steps_or_less(newton):
    problem = newton.Problem.make()
    ours, theirs = newton.newton_cg(problem, 13), newton.adam(problem, 90, lr=1e-2)
    assert all(b <= a for a, b in zip(ours.losses, ours.losses[1:], strict=False))
    mine, other = ours.steps_to(0.1), theirs.steps_to(0.1)
    assert mine is not None
    assert other is not None
    assert 3 * mine <= other
