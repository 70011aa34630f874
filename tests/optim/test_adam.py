"""Adam: PyTorch's numbers, trees, dtypes, libraries, errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn import tree_map
from npattn._arrays.namespace import array_device, dtype_name
from npattn._arrays.trees import tree_leaves
from npattn.optim import Adam, AdamState
from npattn.testing.libraries import to_numpy


class Params(NamedTuple):
    w: Any
    b: Any
    inner: Any


def make_params(rng: np.random.Generator) -> Params:
    return Params(rng.standard_normal((3, 5)), None, {"x": np.asarray(rng.standard_normal()), "more": [rng.standard_normal(7)]})


def gradients(params: Any, step: int) -> Any:
    """Those of some function that is not quadratic, with a scale that changes a hundredfold."""
    return tree_map(lambda x: np.asarray(np.sin(3 * x + step) * 10.0 ** (step % 3 - 1)), params)


def test_fifty_steps_are_those_of_pytorch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    params = make_params(np.random.default_rng(0))
    theirs = [torch.tensor(x, requires_grad=True) for x in tree_leaves(params)]
    rule, optimizer = Adam(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6), torch.optim.Adam(theirs, 0.01, (0.8, 0.95), 1e-6)
    state = rule.init(params)
    for step in range(50):
        lr = 0.01 / (1 + step % 7)
        grads = gradients(params, step)
        for x, g in zip(theirs, tree_leaves(grads), strict=True):
            x.grad = torch.tensor(g)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        params, state = rule.update(params, grads, state, lr=lr)
        for x, y in zip(tree_leaves(params), theirs, strict=True):
            np.testing.assert_allclose(x, y.detach().numpy(), rtol=1e-12, atol=1e-12)
    assert state.step == 50


def test_fifty_steps_of_the_paper_s_algorithm():
    params = np.random.default_rng(0).standard_normal(5)
    x, m, v = params.copy(), np.zeros(5), np.zeros(5)
    rule = Adam()
    state = rule.init(params)
    for t in range(1, 51):
        g = gradients(x, t)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        x = x - 1e-3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        params, state = rule.update(params, gradients(params, t), state)
        np.testing.assert_allclose(params, x, rtol=1e-12)
    np.testing.assert_allclose(state.mean, m, rtol=1e-12)
    np.testing.assert_allclose(state.variance, v, rtol=1e-12)


def test_the_first_step_is_lr_along_the_sign():
    params = np.asarray([1.0, 1.0, 1.0])
    moved, _ = Adam(lr=0.25, eps=0.0).update(params, np.asarray([3.0, -1e-5, 1e5]), Adam().init(params))
    np.testing.assert_allclose(moved, [0.75, 1.25, 0.75], rtol=1e-15)


def test_every_library_takes_the_same_steps(library, to_xp):
    params = make_params(np.random.default_rng(0))
    ours = tree_map(to_xp, params)
    rule = Adam(lr=0.1)
    state, our_state = rule.init(params), rule.init(ours)
    for step in range(3):
        grads = gradients(params, step)
        params, state = rule.update(params, grads, state)
        ours, our_state = rule.update(ours, tree_map(to_xp, grads), our_state)
    assert type(ours) is Params
    assert ours.b is None
    assert our_state.mean.b is None
    for x, y in zip(tree_leaves((params, state)), tree_leaves((ours, our_state)), strict=True):
        np.testing.assert_allclose(y if isinstance(y, int) else to_numpy(y), x, rtol=1e-14)
        if library.device is not None and not isinstance(y, int):
            assert array_device(y) == library.device


def test_nothing_is_written_or_shared():
    params = make_params(np.random.default_rng(0))
    grads = gradients(params, 1)
    rule = Adam(lr=0.0)
    state = rule.update(params, grads, rule.init(params))[1]
    given = [x for x in tree_leaves((params, grads, state)) if isinstance(x, np.ndarray)]
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    results = rule.update(params, grads, state)
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)
    new = [x for x in tree_leaves(results) if isinstance(x, np.ndarray)]
    assert len(new) == 9
    assert not any(np.shares_memory(x, y) for x in new for y in given)
    for x, y in zip(tree_leaves(results[0]), tree_leaves(params), strict=True):
        np.testing.assert_array_equal(x, y)  # lr 0
    assert all(isinstance(x, np.ndarray) for x in tree_leaves(results[0]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", ">f8"])
def test_parameters_keep_their_dtype(dtype, library, to_xp):
    if dtype == ">f8":
        params = np.zeros(3, ">f8") if library.name == "numpy" else to_xp(np.zeros(3))
    elif library.has(dtype):
        params = to_xp(np.zeros(3), dtype)
    else:
        return
    rule = Adam(lr=np.float64(0.5), beta1=np.float64(0.9), eps=np.float32(1e-8))
    state = rule.init(params)
    for _ in range(2):
        params, state = rule.update(params, params + 1, state, lr=np.float64(0.5))
    wide = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype.replace(">f8", "float64"))
    assert dtype_name(params.dtype) == dtype.replace(">f8", "float64")
    assert {dtype_name(state.mean.dtype), dtype_name(state.variance.dtype)} == {wide}
    assert (to_numpy(params) < -0.6).all()


def test_small_gradients_count_in_float16():
    """Their squares, and eps, are 0 in float16: the moments are kept in float32."""
    params = np.ones(1, np.float16)
    rule = Adam(lr=0.25)
    moved, _ = rule.update(params, np.full(1, 1e-6, np.float16), rule.init(params))
    assert moved == pytest.approx(0.75, abs=0.01)


def test_zero_gradients_move_nothing_and_raise_no_warning():
    params = np.ones(2)
    with np.errstate(all="raise"):
        rule = Adam(eps=1e-8)
        state = rule.init(params)
        for _ in range(3):
            params, state = rule.update(params, np.zeros(2), state)
    assert params.tolist() == [1, 1]


def test_an_empty_tree_and_empty_arrays():
    rule = Adam()
    for params in (None, {}, (), np.zeros((0, 3))):
        moved, state = rule.update(params, params, rule.init(params))
        assert type(moved) is type(params)
        assert state.step == 1


def test_rule_and_state_are_plain_values():
    assert Adam() == (1e-3, 0.9, 0.999, 1e-8)
    assert Adam(lr=0.1)._replace(lr=0.2).lr == 0.2
    assert repr(AdamState(3, {"w": np.zeros(2)}, None)).startswith("AdamState(step=3, mean=")
    with pytest.raises(AttributeError):
        Adam().lr = 1.0


def test_errors():
    rule, params = Adam(), {"w": np.ones((2, 3))}
    state = rule.init(params)
    with pytest.raises(
        ValueError, match=r"^Adam.update: the gradient of w must have shape \(2, 3\) as the parameter, got \(3,\)"
    ):
        rule.update(params, {"w": np.ones(3)}, state)
    with pytest.raises(TypeError, match="^Adam.update: w is float64 but the gradient of w is float32"):
        rule.update(params, {"w": np.ones((2, 3), np.float32)}, state)
    with pytest.raises(ValueError, match="the trees differ at the root"):
        rule.update(params, {"b": np.ones((2, 3))}, state)
    with pytest.raises(ValueError, match="the trees differ at w"):
        rule.update(params, {"w": None}, state)
    with pytest.raises(TypeError, match="^Adam.init: x must have a floating dtype"):
        rule.init({"w": np.ones(2, int)})
    for wrong, name in (({"lr": -1.0}, "lr"), ({"eps": -1e-9}, "eps"), ({"beta1": 1.0}, "beta1"), ({"beta2": -0.1}, "beta2")):
        with pytest.raises(ValueError, match=f"^Adam.init: {name} must be at least 0"):
            Adam(**wrong).init(params)
        with pytest.raises(ValueError, match=f"^Adam.update: {name} must be at least 0"):
            Adam(**wrong).update(params, params, state)
    with pytest.raises(ValueError, match="^Adam.update: lr must be at least 0, got -1"):
        rule.update(params, params, state, lr=-1)
    with pytest.raises(TypeError, match="^Adam.update: lr must be a number on the host, got ndarray"):
        rule.update(params, params, state, lr=np.ones(2))
