"""npattn as a function of JAX: its rules by JAX's own check."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npattn
from npattn.testing.libraries import Unavailable, open_library

try:
    open_library("jax")  # with float64
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

import jax
from jax.test_util import check_grads

SCRIPT = Path(__file__).parents[2] / "examples" / "use_with_jax.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("use_with_jax", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs() -> list[Any]:
    rng = np.random.default_rng(0)
    return [jax.numpy.asarray(rng.standard_normal(shape)) for shape in ((2, 3, 2), (1, 4, 2), (1, 4, 3))]


check = partial(check_grads, order=2, atol=1e-7, rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modes"), [("attention", ["rev"]), ("attention_in_forward_mode", ["fwd", "rev"])])
def test_second_order(example, name, modes):
    of = example.Options(mask=npattn.causal_mask(), softcap=2.0)
    check(jax.jit(lambda *x: getattr(example, name)(*x, of)), inputs(), modes=modes)


@pytest.mark.slow
def test_second_order_of_attention_itself():
    """Without a rule of ours, JAX differentiates the text of `npattn.attention`."""
    f = jax.jit(lambda *x: npattn.attention(*x, mask=npattn.causal_mask(), softcap=2.0))
    check(f, inputs(), modes=["fwd", "rev"])


def test_what_it_prints(example, capsys):
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(float(line.split()[-1]) < 1e-14 for line in lines)
