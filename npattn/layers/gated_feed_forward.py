"""The gated feed-forward network (SwiGLU and its kind): one half of the hidden features lets the other through. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn.layers._curves import check_activation
from npattn.layers._parameters import Parameters, check_parameters, check_sizes
from npattn.layers.gate import GateSaved, gate_backward, gate_forward
from npattn.layers.linear import LinearSaved, linear_backward, linear_forward


@with_tree_repr
class GatedFeedForwardParams(NamedTuple):
    """The parameters of `gated_feed_forward`, and the type of their gradients."""

    w_gate: Array  # (C, F)
    w_in: Array  # (C, F)
    w_out: Array  # (F, C)
    b_gate: Array | None = None  # (F,)
    b_in: Array | None = None  # (F,)
    b_out: Array | None = None  # (C,)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        width: int,
        hidden: int,
        bias: bool = False,
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
    ) -> GatedFeedForwardParams:
        """Xavier-uniform weights, and zero biases if they are wanted.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the weights are drawn from.
        width : int
            C, of input and output.
        hidden : int
            F. With two thirds of what the plain network has, there are as many weights.
        bias : bool, optional
            Whether the linear maps have biases.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.

        Returns
        -------
        GatedFeedForwardParams

        Raises
        ------
        ValueError
            If a size is less than 1.

        Examples
        --------
        >>> import numpy as np
        >>> GatedFeedForwardParams.init(np.random.default_rng(0), width=6, hidden=16).w_gate.shape
        (6, 16)
        """
        check_sizes("GatedFeedForwardParams.init", width=width, hidden=hidden)
        new = Parameters(xp, dtype, device)
        return cls(
            new.xavier(rng, width, hidden, inputs=width),
            new.xavier(rng, width, hidden, inputs=width),
            new.xavier(rng, hidden, width, inputs=hidden),
            new.zeros(hidden) if bias else None,
            new.zeros(hidden) if bias else None,
            new.zeros(width) if bias else None,
        )


@with_tree_repr
class GatedFeedForwardSaved(NamedTuple):
    """What `gated_feed_forward_backward` needs: what its parts saved.

    The parameters, borrowed, are there for `gated_feed_forward_backward_jvp`.
    """

    gates: LinearSaved
    hidden: LinearSaved
    gated: GateSaved
    out: LinearSaved
    params: GatedFeedForwardParams


@with_tree_repr
class GatedFeedForwardGrads(NamedTuple):
    """Gradients of `gated_feed_forward`."""

    dparams: GatedFeedForwardParams
    dx: Array


def gated_feed_forward(params: GatedFeedForwardParams, x: Array, /, *, activation: str = "silu") -> Array:
    """``(activation(x w_gate) * x w_in) w_out``; see `gated_feed_forward_forward`."""
    return gated_feed_forward_forward(params, x, activation=activation)[0]


def gated_feed_forward_forward(
    params: GatedFeedForwardParams, x: Array, /, *, activation: str = "silu"
) -> tuple[Array, GatedFeedForwardSaved]:
    """``out = (activation(x w_gate + b_gate) * (x w_in + b_in)) w_out + b_out``, the same network for every row.

    Parameters
    ----------
    params : GatedFeedForwardParams
        Weights, and biases where there are any.
    x : float array (..., C)
        Any leading axes; each row is mapped by itself.
    activation : str, optional
        ``"silu"`` (SwiGLU: Llama), ``"gelu"`` or ``"gelu_tanh"`` (GeGLU: T5, Gemma), ``"relu"``.

    Returns
    -------
    out : array (..., C)
        In the dtype of the inputs.
    saved : GatedFeedForwardSaved
        For `gated_feed_forward_backward`. Holds three arrays (..., F).

    Raises
    ------
    ValueError
        If shapes do not fit or there is no such activation.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    feed_forward_forward : Without a gate.

    References
    ----------
    Shazeer: GLU Variants Improve Transformer (2020), equation 6; docs/derivation.md, "Feed-forward".

    Examples
    --------
    >>> import numpy as np
    >>> params = GatedFeedForwardParams.init(np.random.default_rng(0), width=6, hidden=16)
    >>> out, saved = gated_feed_forward_forward(params, np.ones((3, 6)))
    >>> gated_feed_forward_backward(out, saved).dparams.w_gate.shape
    (6, 16)
    """
    check_parameters("gated_feed_forward", {"x": x, **params._asdict()}, _AXES)
    check_activation("gated_feed_forward", activation)
    gates, saved_gates = linear_forward(x, params.w_gate, params.b_gate)
    hidden, saved_hidden = linear_forward(x, params.w_in, params.b_in)
    gated, saved_gated = gate_forward(hidden, gates, activation=activation)
    out, saved_out = linear_forward(gated, params.w_out, params.b_out)
    return out, GatedFeedForwardSaved(saved_gates, saved_hidden, saved_gated, saved_out, params)


_AXES = {"x": "...C", "w_gate": "CF", "w_in": "CF", "w_out": "Fo", "b_gate": "F", "b_in": "F", "b_out": "o"}


def gated_feed_forward_backward(dout: Array, saved: GatedFeedForwardSaved, /) -> GatedFeedForwardGrads:
    """The vector-Jacobian product of `gated_feed_forward_forward`.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : GatedFeedForwardSaved
        From `gated_feed_forward_forward`.

    Returns
    -------
    GatedFeedForwardGrads
        ``dparams`` (a GatedFeedForwardParams) and ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    out = linear_backward(dout, saved.out)
    gated = gate_backward(out.dx, saved.gated)
    hidden = linear_backward(gated.dx, saved.hidden)
    gates = linear_backward(gated.dgates, saved.gates)
    dparams = GatedFeedForwardParams(gates.dw, hidden.dw, out.dw, gates.db, hidden.db, out.db)
    return GatedFeedForwardGrads(dparams, hidden.dx + gates.dx)
