"""The other autodiff: PyTorch and JAX differentiate our own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from npattn.testing.libraries import Library, Unavailable, asarray, open_library, to_numpy

Vjp = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="session", params=["torch", "jax"])
def autodiff(request: pytest.FixtureRequest) -> Vjp:
    """``autodiff(f, args, dout)``: by name the gradients of the float64 arguments of ``f(*args)``, NumPy in and out."""
    try:
        library = open_library(request.param)
    except Unavailable as reason:
        pytest.skip(str(reason))
    differentiate = _torch if request.param == "torch" else _jax

    def gradients(f: Callable[..., Any], args: Mapping[str, Any], dout: np.ndarray) -> dict[str, np.ndarray]:
        given = {name: asarray(x, library) if isinstance(x, np.ndarray) else x for name, x in args.items()}
        names = [name for name, x in args.items() if isinstance(x, np.ndarray) and x.dtype == np.float64]
        return dict(zip(names, map(to_numpy, differentiate(f, given, names, dout, library)), strict=True))

    return gradients


def _torch(f: Callable[..., Any], given: dict[str, Any], names: list[str], dout: np.ndarray, library: Library) -> list[Any]:
    import torch

    for name in names:
        given[name].requires_grad_()
    return list(torch.autograd.grad(f(*given.values()), [given[name] for name in names], asarray(dout, library)))


def _jax(f: Callable[..., Any], given: dict[str, Any], names: list[str], dout: np.ndarray, library: Library) -> list[Any]:
    import jax

    def of_floats(*values: Any) -> Any:
        return f(*(given | dict(zip(names, values, strict=True))).values())

    return list(jax.vjp(of_floats, *(given[name] for name in names))[1](asarray(dout, library)))
