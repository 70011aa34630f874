"""The norm of a block or a stack: its parameters, and which of the two it is. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn.layers._parameters import Parameters, check_sizes
from npattn.layers.norm import (
    LayerNormSaved,
    RmsNormSaved,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
)

NormSaved = LayerNormSaved | RmsNormSaved


@with_tree_repr
class NormParams(NamedTuple):
    """The parameters of a layer norm or RMS norm, and the type of their gradients."""

    weight: Array | None = None  # (C,)
    bias: Array | None = None  # (C,); RMS norm has none

    @classmethod
    def init(cls, *, width: int, bias: bool = True, xp: Namespace = np, dtype: Any = None, device: Any = None) -> NormParams:
        """Weights of 1 and biases of 0.

        Parameters
        ----------
        width : int
            C.
        bias : bool, optional
            Whether there are biases.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.

        Returns
        -------
        NormParams

        Raises
        ------
        ValueError
            If the width is less than 1.
        """
        check_sizes("NormParams.init", width=width)
        new = Parameters(xp, dtype, device)
        return cls(new.array(np.ones(width)), new.zeros(width) if bias else None)


class NormKind(Protocol):
    """What of a config says which norm it is."""

    @property
    def norm(self) -> str: ...
    @property
    def eps(self) -> float: ...


def norm_forward(op: str, params: NormParams, x: Array, config: NormKind) -> tuple[Array, NormSaved]:
    """The config's norm of ``x``."""
    if config.norm == "layer":
        return layer_norm_forward(x, params.weight, params.bias, eps=config.eps)
    if params.bias is not None:
        raise ValueError(f"{op}: an RMS norm has no bias, got parameters with one")
    return rms_norm_forward(x, params.weight, eps=config.eps)


def norm_backward(dout: Array, saved: NormSaved) -> tuple[Array, NormParams]:
    """``dx``, and the gradient of the parameters."""
    if isinstance(saved, LayerNormSaved):
        layer = layer_norm_backward(dout, saved)
        return layer.dx, NormParams(layer.dweight, layer.dbias)
    rms = rms_norm_backward(dout, saved)
    return rms.dx, NormParams(rms.dweight)
