"""What holds for every model: backward is the derivative of forward, on every library, and nothing is written or shared."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from npattn import tree_map
from npattn._arrays.namespace import array_device, array_namespace, dtype_name
from npattn._arrays.trees import tree_items, tree_leaves
from npattn.testing import gradients
from npattn.testing.gradients import check_backward
from npattn.testing.libraries import asarray, open_library, to_numpy
from tests.models.cases import CASES, Arguments, Case

every_case = pytest.mark.parametrize("case", CASES, ids=repr)
QUICK_ON_JAX = {"encoder_block-pre", "token_embedding-learned"}  # it compiles the others for seconds
every_case_on_jax = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case.name in QUICK_ON_JAX else [pytest.mark.slow]) for case in CASES], ids=repr
)


def seed(case: Case) -> np.random.Generator:
    return np.random.default_rng([ord(c) for c in case.name])


def is_float(x: Any) -> bool:
    return dtype_name(x.dtype) in ("float16", "bfloat16", "float32", "float64")


def to(arguments: Arguments, library: Any, dtype: str | None = None) -> Arguments:
    moved: Arguments = tree_map(lambda x: asarray(x, library, dtype=dtype if is_float(x) else None), arguments)
    return moved


def cotangent(case: Case, out: Any) -> Any:
    dout = np.asarray(seed(case).standard_normal(out.shape))
    return array_namespace("test", out=out).asarray(dout, dtype=out.dtype, device=array_device(out))


def run(case: Case, arguments: Arguments) -> tuple[Any, dict[str, Any]]:
    """out, and the gradients by name."""
    out, saved = case.forward(*arguments.values())
    return out, by_name(case.backward(cotangent(case, out), saved))


def by_name(grads: Any) -> dict[str, Any]:
    return {name: g for field, tree in zip(grads._fields, grads, strict=True) for name, g in tree_items(tree, field)}


def expected_names(arguments: Arguments) -> set[str]:
    floats = {name: x for name, x in arguments.items() if not hasattr(x, "dtype") or is_float(x)}
    return {f"d{name}" for name, _ in tree_items(floats)}


# Derivatives -----------------------------------------------------------------------------------------------------------------


def check(case: Case, backward: Any) -> None:
    """The models bend so much along a direction in all their parameters that a step of 1e-3 is long."""
    check_backward(case.forward, backward, case.draw(seed(case)), directions=2, step=1e-4)


@every_case
def test_backward_is_the_derivative_of_forward(case):
    check(case, case.backward)


@every_case
def test_a_slip_of_1e_4_is_caught(case, monkeypatch):
    monkeypatch.setattr(gradients, "worst_elements", lambda *_: "")  # which element it is takes long to find

    def slipping(dout: Any, saved: Any) -> Any:
        grads = case.backward(dout, saved)
        return grads._replace(dparams=tree_map(lambda g: 1.0001 * g, grads.dparams))

    with pytest.raises(AssertionError, match="check_backward: along a random direction"):
        check(case, slipping)


@every_case
def test_gradients_have_the_type_of_the_parameters(case):
    arguments = case.draw(seed(case))
    out, saved = case.forward(*arguments.values())
    grads = case.backward(cotangent(case, out), saved)
    assert type(grads.dparams) is type(arguments["params"])
    same = tree_map(lambda x, g: (x.shape, x.dtype) == (g.shape, g.dtype), arguments["params"], grads.dparams)
    assert all(tree_leaves(same))
    assert set(by_name(grads)) == expected_names(arguments)


@every_case
def test_backward_agrees_with_pytorch_s_autodiff_of_our_forward(case):
    pytest.importorskip("torch", reason="torch is not installed")
    check_against(case, open_library("torch"), autodiff_by_torch)


@every_case_on_jax
def test_backward_agrees_with_jax_s_autodiff_of_our_forward(case):
    pytest.importorskip("jax", reason="jax is not installed")
    check_against(case, open_library("jax"), autodiff_by_jax)


def check_against(case: Case, library: Any, autodiff: Any) -> None:
    arguments = case.draw(seed(case))
    out, grads = run(case, arguments)
    given = to(arguments, library)
    dout = asarray(cotangent(case, out), library)
    theirs = autodiff(case, given, dout)
    assert theirs.keys() == grads.keys()
    size = max(np.abs(g).max() for g in grads.values())
    for which, g in grads.items():
        np.testing.assert_allclose(to_numpy(theirs[which]), g, rtol=1e-11, atol=1e-13 * size, err_msg=which)


def autodiff_by_torch(case: Case, given: Arguments, dout: Any) -> dict[str, Any]:
    import torch

    leaves = {name: x.requires_grad_() for name, x in tree_items(given) if is_float(x)}
    found = torch.autograd.grad(case.forward(*given.values())[0], list(leaves.values()), dout)
    return {f"d{name}": g for name, g in zip(leaves, found, strict=True)}


def autodiff_by_jax(case: Case, given: Arguments, dout: Any) -> dict[str, Any]:
    import jax

    names = [name for name, x in given.items() if not hasattr(x, "dtype") or is_float(x)]

    @jax.jit  # forward and pullback as one; jax sorts the names of a dict
    def pull(values: tuple[Any, ...], dout: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            return case.forward(*{**dict(zip(given, values, strict=True)), **dict(zip(names, floats, strict=True))}.values())[0]

        return jax.vjp(of_floats, *(dict(zip(given, values, strict=True))[name] for name in names))[1](dout)

    pulled = pull(tuple(given.values()), dout)
    return {f"d{path}": g for name, tree in zip(names, pulled, strict=True) for path, g in tree_items(tree, name)}


# Libraries -------------------------------------------------------------------------------------------------------------------


@every_case
def test_every_library_computes_the_same(case, library):
    if library.name != "jax":  # which has a test of its own
        check_the_same(case, library, run)


@every_case_on_jax
def test_jax_computes_the_same_in_one_jit(case):
    pytest.importorskip("jax", reason="jax is not installed")
    check_the_same(case, open_library("jax"), run_in_one_jit)


def check_the_same(case: Case, library: Any, run_there: Any) -> None:
    arguments = case.draw(seed(case))
    out, grads = run(case, arguments)
    other_out, other_grads = run_there(case, to(arguments, library))
    np.testing.assert_allclose(to_numpy(other_out), out, rtol=1e-12, atol=1e-13)
    assert other_grads.keys() == grads.keys()
    for name, g in grads.items():
        np.testing.assert_allclose(to_numpy(other_grads[name]), g, rtol=1e-11, atol=1e-13, err_msg=name)
        if library.device is not None:
            assert array_device(other_grads[name]) == library.device


def run_in_one_jit(case: Case, arguments: Arguments) -> tuple[Any, dict[str, Any]]:
    import jax

    fields: list[str] = []

    def both(dout: Any, *values: Any) -> Any:
        out, saved = case.forward(*values)
        grads = case.backward(dout, saved)
        fields[:] = grads._fields
        return out, tuple(grads)

    out = jax.eval_shape(lambda *values: case.forward(*values)[0], *arguments.values())
    dout = jax.numpy.asarray(seed(case).standard_normal(out.shape), dtype=out.dtype)
    result, trees = jax.jit(both)(dout, *arguments.values())
    return result, {name: g for field, tree in zip(fields, trees, strict=True) for name, g in tree_items(tree, field)}


@every_case
def test_lower_precisions(case, library):
    if library.name in ("strict-bare", "strict-device1", "jax"):  # as strict; jax compiles every operation anew for a dtype
        return
    arguments = case.draw(seed(case))
    _, grads = run(case, arguments)
    for dtype, eps in (("float32", 2.0**-23), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
        if not library.has(dtype):
            continue
        out, lower = run(case, to(arguments, library, dtype))
        assert dtype_name(out.dtype) == dtype
        assert {dtype_name(g.dtype) for g in lower.values()} == {dtype}
        for name, g in grads.items():
            wrong = np.abs(to_numpy(lower[name]).astype(np.float64) - g).max()
            assert wrong <= 300 * eps * (1 + np.abs(g).max()), (dtype, name)


# Memory ----------------------------------------------------------------------------------------------------------------------


@every_case
def test_inputs_are_not_written_and_nothing_is_shared(case):
    arguments = case.draw(seed(case))
    given = tree_leaves(arguments)
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    out, saved = case.forward(*arguments.values())
    dout = cotangent(case, out)
    dout.flags.writeable = False
    grads, again = (by_name(case.backward(dout, saved)) for _ in range(2))
    for name, g in grads.items():
        np.testing.assert_array_equal(again[name], g)
        assert g.flags.writeable
    for x, y in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, y)
    kept = [x for x in tree_leaves(saved) if isinstance(x, np.ndarray)]
    mine = [out, *grads.values()]
    assert kept
    for a, b in itertools.chain(itertools.product(mine, [*given, dout, *kept]), itertools.combinations(mine, 2)):
        assert not np.shares_memory(a, b)


@every_case
def test_out_may_be_changed_before_backward(case):
    arguments = case.draw(seed(case))
    out, saved = case.forward(*arguments.values())
    dout = cotangent(case, out)
    before = by_name(case.backward(dout, saved))
    out += 1
    after = by_name(case.backward(dout, saved))
    for name, g in before.items():
        np.testing.assert_array_equal(after[name], g)


@every_case
def test_no_floating_point_warning(case):
    with np.errstate(all="raise"):
        for factor in (1.0, 1e-200, 1e150):
            arguments = tree_map(lambda x, factor=factor: x * factor if is_float(x) else x, case.draw(seed(case)))
            out, saved = case.forward(*arguments.values())
            case.backward(np.full(out.shape, 1e-200), saved)


@every_case
def test_reprs_are_shapes_and_not_numbers(case):
    arguments = case.draw(seed(case))
    out, saved = case.forward(*arguments.values())
    grads = case.backward(cotangent(case, out), saved)
    for record in (arguments["params"], saved, grads):
        assert repr(record).startswith(f"{type(record).__name__}(")
        assert "array" not in repr(record)
