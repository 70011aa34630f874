"""npattn as a function of PyTorch: every derivative by PyTorch's own checks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import npattn

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # its own, when forward mode is first used
SCRIPT = Path(__file__).parents[2] / "examples" / "use_with_torch.py"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": npattn.causal_mask(), "softcap": 2.0},
    {"mask": npattn.length_mask([3, 0]), "dropout": npattn.Dropout(0.3, seed=1), "scale": 0.7},
]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("use_with_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs() -> list[Any]:
    """q, k, v, bias and sinks: grouped heads, a batch of two, and a bias that broadcasts."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 3, 2), (2, 1, 4, 2), (2, 1, 4, 3), (2, 1, 4), (2,))
    return [torch.randn(*s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_backward_and_forward_mode(example, options):
    assert torch.autograd.gradcheck(lambda *x: example.attention(*x, **options), inputs(), check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_double_backward_and_forward_over_reverse(example, options):
    def f(*x: Any) -> Any:
        return example.attention(*x, **options)

    assert torch.autograd.gradgradcheck(f, inputs(), check_fwd_over_rev=True, fast_mode=True)


@pytest.mark.slow
def test_every_element_of_both(example):
    """The same without random projections."""
    options = {"mask": npattn.causal_mask_end(), "softcap": 2.0, "dropout": npattn.Dropout(0.2, seed=3)}

    def f(*x: Any) -> Any:
        return example.attention(*x, **options)

    assert torch.autograd.gradcheck(f, inputs(), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, inputs(), check_fwd_over_rev=True)


def test_without_bias_and_sinks_and_with_some_inputs_at_rest(example):
    q, k, v, *_ = inputs()
    k, v = k.detach(), v.detach()
    assert torch.autograd.gradcheck(lambda q: example.attention(q, k, v), q, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda q: example.attention(q, k, v), q, check_fwd_over_rev=True, fast_mode=True)


def test_an_input_that_was_written_to_is_noticed(example):
    q, k, v, *_ = inputs()
    moving = q.clone()
    out = example.attention(moving, k, v)
    moving.data.mul_(1)
    with torch.no_grad():
        moving.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_it_prints(example, capsys):
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(float(line.split()[-1]) < 1e-14 for line in lines)
