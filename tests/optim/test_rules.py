"""The other rules: PyTorch's numbers over 50 steps, on trees, on every library; what decays, and errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn import tree_map
from npattn._arrays.namespace import array_device, dtype_name
from npattn._arrays.trees import tree_items, tree_leaves
from npattn.optim import SGD, Adam, AdamW, SGDState, WarmupCosine, clip_global_norm, decays_matrices, global_norm
from npattn.testing.libraries import to_numpy


class Params(NamedTuple):
    w: Any
    b: Any
    inner: Any


def make_params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    inner = {"table": rng.standard_normal((4, 3)), "b_heads": rng.standard_normal((2, 2)), "x": np.asarray(rng.standard_normal())}
    return Params(rng.standard_normal((3, 5, 2)), None, inner)


def gradients(params: Any, step: int) -> Any:
    """Those of some function that is not quadratic, with a scale that changes a hundredfold."""
    return tree_map(lambda x: np.asarray(np.sin(3 * x + step) * 10.0 ** (step % 3 - 1)), params)


def agree_over_fifty_steps(rule: Any, optimizer_of: Any, schedule: Any = None, max_norm: float | None = None) -> None:
    """``optimizer_of(torch, named)`` of PyTorch takes the same steps."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    params = make_params()
    theirs = {name: torch.tensor(x, requires_grad=True) for name, x in tree_items(params)}
    optimizer = optimizer_of(torch, theirs)
    state = rule.init(params)
    for step in range(50):
        grads, lr = gradients(params, step), None if schedule is None else schedule(step)
        for x, g in zip(theirs.values(), tree_leaves(grads), strict=True):
            x.grad = torch.tensor(g)
        if max_norm is not None:
            grads, norm = clip_global_norm(grads, max_norm)
            assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)), rel=1e-14)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        optimizer.step()
        params, state = rule.update(params, grads, state, lr=lr)
        for (name, x), y in zip(tree_items(params), theirs.values(), strict=True):
            np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-12, atol=1e-12, err_msg=f"{name}, step {step}")
    assert state.step == 50


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.8, True)], ids=["plain", "momentum", "nesterov"]
)
def test_sgd_is_pytorch_s(momentum, nesterov):
    def optimizer_of(torch: Any, theirs: Any) -> Any:
        return torch.optim.SGD(theirs.values(), 0.02, momentum=momentum, nesterov=nesterov)

    agree_over_fifty_steps(SGD(0.02, momentum, nesterov), optimizer_of)


def adamw(torch: Any, theirs: Any) -> Any:
    """A group for what decays and one for what does not."""
    decaying = ("w", "inner.table")
    groups = [
        {"params": [x for name, x in theirs.items() if (name in decaying) == decays], "weight_decay": 0.3 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, 0.01, (0.8, 0.95), 1e-6)


def test_adamw_is_pytorch_s():
    agree_over_fifty_steps(AdamW(0.01, 0.8, 0.95, 1e-6, weight_decay=0.3), adamw)


def test_adamw_with_a_schedule_and_clipping_is_pytorch_s():
    schedule = WarmupCosine(0.05, 40, warmup=7, floor=0.001)
    agree_over_fifty_steps(AdamW(0.01, 0.8, 0.95, 1e-6, weight_decay=0.3), adamw, schedule, max_norm=0.5)


def test_adamw_without_decay_is_adam():
    params = make_params()
    grads = gradients(params, 1)
    one, other = Adam(0.1), AdamW(0.1, weight_decay=0.0)
    a, b = one.update(params, grads, one.init(params)), other.update(params, grads, other.init(params))
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_decay_is_decoupled():
    """Without a gradient a matrix shrinks by lr times decay, whatever the moments are."""
    params = {"w": np.ones((2, 2)), "b_q": np.ones((2, 2)), "norm": np.ones(2)}
    rule = AdamW(lr=0.1, weight_decay=0.5)
    moved, _ = rule.update(params, tree_map(np.zeros_like, params), rule.init(params))
    np.testing.assert_allclose(moved["w"], 0.95, rtol=1e-15)
    assert (moved["b_q"] == 1).all()
    assert (moved["norm"] == 1).all()
    every = rule._replace(decays=lambda name, _x: name != "w")
    moved, _ = every.update(params, tree_map(np.zeros_like, params), every.init(params))
    assert (moved["w"] == 1).all()
    np.testing.assert_allclose(moved["norm"], 0.95, rtol=1e-15)


def test_what_decays():
    assert decays_matrices("blocks.0.attention.w_q", np.zeros((8, 2, 4)))
    assert decays_matrices("embedding.tokens", np.zeros((8, 2)))
    assert not decays_matrices("blocks.0.attention.b_q", np.zeros((2, 4)))
    assert not decays_matrices("norm.weight", np.zeros(8))
    assert not decays_matrices("blocks.0.attention.sinks", np.zeros(2))


RULES = [SGD(0.1), SGD(0.1, 0.5, True), AdamW(0.1, weight_decay=0.2)]


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "nesterov", "adamw"])
def test_every_library_takes_the_same_steps(rule, library, to_xp):
    params = make_params()
    ours = tree_map(to_xp, params)
    state, our_state = rule.init(params), rule.init(ours)
    for step in range(3):
        grads, norm = clip_global_norm(gradients(params, step), 1.0)
        our_grads, our_norm = clip_global_norm(tree_map(to_xp, gradients(params, step)), 1.0)
        np.testing.assert_allclose(to_numpy(our_norm), norm, rtol=1e-14)
        params, state = rule.update(params, grads, state)
        ours, our_state = rule.update(ours, our_grads, our_state)
    assert type(ours) is Params
    assert ours.b is None
    for x, y in zip(tree_leaves((params, state)), tree_leaves((ours, our_state)), strict=True):
        np.testing.assert_allclose(y if isinstance(y, int) else to_numpy(y), x, rtol=1e-13)
        if library.device is not None and not isinstance(y, int):
            assert array_device(y) == library.device


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parameters_keep_their_dtype(rule, dtype):
    params = tree_map(lambda x: np.asarray(x, dtype), make_params())
    state = rule.init(params)
    moved, state = rule.update(params, params, state)
    assert {dtype_name(x.dtype) for x in tree_leaves(moved)} == {dtype}
    moments = [x for x in tree_leaves(state) if not isinstance(x, int)]
    assert all(dtype_name(x.dtype) == "float32" for x in moments)
    clipped, norm = clip_global_norm(params, 0.1)
    assert {dtype_name(x.dtype) for x in tree_leaves(clipped)} == {dtype}
    assert norm.dtype == np.float32


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize(("dtype", "large"), [("float64", 1e200), ("float32", 1e30), ("float16", 2e4)])
def test_no_floating_point_warning(rule, dtype, large):
    for size in (1 / large, large):
        params = tree_map(lambda x, size=size: np.asarray(x * size).astype(dtype), make_params())
        with np.errstate(all="raise"):
            state = rule.init(params)
            for _ in range(3):
                params, state = rule._replace(lr=3.0).update(params, params, state)
            clip_global_norm(params, large)


@pytest.mark.parametrize("rule", RULES, ids=["sgd", "nesterov", "adamw"])
def test_nothing_is_written_or_shared(rule):
    params = make_params()
    grads = gradients(params, 1)
    state = rule.update(params, grads, rule.init(params))[1]
    given = [x for x in tree_leaves((params, grads, state)) if isinstance(x, np.ndarray)]
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    results = rule.update(params, grads, state)
    clipped, _ = clip_global_norm(grads, 1e9)
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)
    new = [x for x in tree_leaves((results, clipped)) if isinstance(x, np.ndarray)]
    assert not any(np.shares_memory(x, y) for x in new for y in given)


def test_clipping():
    grads = {"w": np.asarray([3.0, 4.0]), "b": None}
    same, norm = clip_global_norm(grads, 5.1)
    assert norm == 5
    assert same["w"].tolist() == [3, 4]
    assert same["b"] is None
    short, _ = clip_global_norm(grads, 0.5, eps=0.0)
    np.testing.assert_allclose(short["w"], [0.3, 0.4], rtol=1e-15)
    assert clip_global_norm(grads, 0.0)[0]["w"].tolist() == [0, 0]
    with np.errstate(all="raise"):
        assert np.isinf(global_norm([np.asarray([1e200]), np.asarray([1e200])]))
        assert np.isnan(clip_global_norm([np.asarray([np.nan, 1.0])], 1.0)[1])
        zero, nothing = clip_global_norm([np.zeros(3)], 1.0)
    assert nothing == 0
    assert zero[0].tolist() == [0, 0, 0]


def test_the_norm_of_many_blocks():
    x = np.random.default_rng(0).standard_normal((700, 911))
    np.testing.assert_allclose(global_norm({"x": x, "y": x[0]}), np.sqrt((x**2).sum() + (x[0] ** 2).sum()), rtol=1e-13)


def test_the_schedule():
    rate = WarmupCosine(2.0, 30, warmup=10, floor=0.5)
    assert [rate(n) for n in (0, 4, 9)] == [0.2, 1.0, 2.0]
    assert rate(10) == 2.0
    assert rate(20) == pytest.approx(1.25)
    assert rate(29) == pytest.approx(0.5 + 0.75 * (1 + np.cos(np.pi * 19 / 20)))
    assert rate(30) == rate(10**9) == 0.5
    falling = [rate(n) for n in range(10, 31)]
    assert falling == sorted(falling, reverse=True)
    assert WarmupCosine(1.0, 4, warmup=4)(4) == 0


def test_rules_are_plain_values():
    assert SGD() == (1e-2, 0.0, False)
    assert AdamW()[:5] == (1e-3, 0.9, 0.999, 1e-8, 0.01)
    assert repr(SGDState(3, {"w": np.zeros(2)})).startswith("SGDState(step=3, velocity=")


def test_errors():
    params = {"w": np.ones((2, 3))}
    for rule, name in (
        (SGD(lr=-1.0), "lr"),
        (SGD(momentum=1.0), "momentum"),
        (SGD(momentum=-0.1), "momentum"),
        (AdamW(beta1=1.0), "beta1"),
    ):
        with pytest.raises(ValueError, match=rf"^{type(rule).__name__}\.init: {name} must be at least 0"):
            rule.init(params)
    with pytest.raises(ValueError, match="^AdamW.update: weight_decay must be at least 0, got -1"):
        AdamW(weight_decay=-1).update(params, params, AdamW().init(params))
    with pytest.raises(ValueError, match="^SGD.init: nesterov needs a momentum, got 0"):
        SGD(nesterov=True).init(params)
    with pytest.raises(ValueError, match=r"^SGD.update: the gradient of w must have shape \(2, 3\) as the parameter, got \(3,\)"):
        SGD().update(params, {"w": np.ones(3)}, SGD().init(params))
    with pytest.raises(ValueError, match="^clip_global_norm: max_norm must be at least 0, got -1"):
        clip_global_norm(params, -1)
    with pytest.raises(ValueError, match="^global_norm: the tree must have a leaf, got none"):
        global_norm({"b": None})
    with pytest.raises(TypeError, match="^global_norm: b is float32 but w is float64"):
        global_norm({"w": np.ones(2), "b": np.ones(2, np.float32)})
    for wrong, words in (
        ({"peak": -1.0}, "peak must be at least 0"),
        ({"steps": 0}, "steps must be"),
        ({"warmup": 11}, "warmup must be at most steps = 10"),
        ({"floor": -0.1}, "floor must be at least 0"),
    ):
        with pytest.raises(ValueError, match=f"^WarmupCosine: {words}"):
            WarmupCosine(**{"peak": 1.0, "steps": 10, **wrong})(0)
    with pytest.raises(ValueError, match="^WarmupCosine: step must be"):
        WarmupCosine(1.0, 10)(-1)
