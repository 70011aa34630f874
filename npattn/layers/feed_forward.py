"""The position-wise feed-forward network of a transformer: from the width C to a larger one, F, and back. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn.layers._curves import check_activation
from npattn.layers._parameters import Parameters, check_parameters, check_sizes
from npattn.layers.activation import ReluSaved, relu_backward, relu_forward, silu_backward, silu_forward
from npattn.layers.gelu import gelu_backward, gelu_forward, gelu_tanh_backward, gelu_tanh_forward
from npattn.layers.linear import LinearSaved, linear_backward, linear_forward

ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "relu": (relu_forward, relu_backward),
    "silu": (silu_forward, silu_backward),
    "gelu": (gelu_forward, gelu_backward),
    "gelu_tanh": (gelu_tanh_forward, gelu_tanh_backward),
}


@with_tree_repr
class FeedForwardParams(NamedTuple):
    """The parameters of `feed_forward`, and the type of their gradients."""

    w_in: Array  # (C, F)
    w_out: Array  # (F, C)
    b_in: Array | None = None  # (F,)
    b_out: Array | None = None  # (C,)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        width: int,
        hidden: int,
        bias: bool = True,
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
    ) -> FeedForwardParams:
        """Xavier-uniform weights and zero biases.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the weights are drawn from.
        width : int
            C, of input and output.
        hidden : int
            F.
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
        FeedForwardParams

        Raises
        ------
        ValueError
            If a size is less than 1.

        Examples
        --------
        >>> import numpy as np
        >>> FeedForwardParams.init(np.random.default_rng(0), width=4, hidden=16)
        FeedForwardParams(w_in=float64[4, 16], w_out=float64[16, 4], b_in=float64[16], b_out=float64[4])
        """
        check_sizes("FeedForwardParams.init", width=width, hidden=hidden)
        new = Parameters(xp, dtype, device)
        return cls(
            new.xavier(rng, width, hidden, inputs=width),
            new.xavier(rng, hidden, width, inputs=hidden),
            new.zeros(hidden) if bias else None,
            new.zeros(width) if bias else None,
        )


@with_tree_repr
class FeedForwardSaved(NamedTuple):
    """What `feed_forward_backward` needs: what its parts saved, and which activation it was.

    The parameters, borrowed, are there for `feed_forward_backward_jvp`.
    """

    hidden: LinearSaved
    activated: ReluSaved
    out: LinearSaved
    activation: str
    params: FeedForwardParams


@with_tree_repr
class FeedForwardGrads(NamedTuple):
    """Gradients of `feed_forward`."""

    dparams: FeedForwardParams
    dx: Array


def feed_forward(params: FeedForwardParams, x: Array, /, *, activation: str = "gelu") -> Array:
    """``activation(x w_in + b_in) w_out + b_out``; see `feed_forward_forward`."""
    return feed_forward_forward(params, x, activation=activation)[0]


def feed_forward_forward(params: FeedForwardParams, x: Array, /, *, activation: str = "gelu") -> tuple[Array, FeedForwardSaved]:
    """``out = activation(x w_in + b_in) w_out + b_out``, the same network for every row.

    Parameters
    ----------
    params : FeedForwardParams
        Weights, and biases where there are any.
    x : float array (..., C)
        Any leading axes; each row is mapped by itself.
    activation : str, optional
        ``"relu"`` (the original transformer), ``"gelu"``, ``"gelu_tanh"`` (GPT-2) or ``"silu"``.

    Returns
    -------
    out : array (..., C)
        In the dtype of the inputs.
    saved : FeedForwardSaved
        For `feed_forward_backward`. Holds two arrays (..., F): the activated hidden rows, and their slopes.

    Raises
    ------
    ValueError
        If shapes do not fit or there is no such activation.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    gated_feed_forward_forward : With a gate in the place of the activation.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.3; docs/derivation.md, "Feed-forward".

    Examples
    --------
    >>> import numpy as np
    >>> params = FeedForwardParams.init(np.random.default_rng(0), width=4, hidden=16)
    >>> out, saved = feed_forward_forward(params, np.ones((2, 3, 4)), activation="relu")
    >>> feed_forward_backward(out, saved).dx.shape
    (2, 3, 4)
    """
    check_parameters("feed_forward", {"x": x, **params._asdict()}, _AXES)
    check_activation("feed_forward", activation)
    hidden, saved_hidden = linear_forward(x, params.w_in, params.b_in)
    activated, saved_activated = ACTIVATIONS[activation][0](hidden)
    out, saved_out = linear_forward(activated, params.w_out, params.b_out)
    return out, FeedForwardSaved(saved_hidden, saved_activated, saved_out, activation, params)


_AXES = {"x": "...C", "w_in": "CF", "w_out": "Fo", "b_in": "F", "b_out": "o"}


def feed_forward_backward(dout: Array, saved: FeedForwardSaved, /) -> FeedForwardGrads:
    """The vector-Jacobian product of `feed_forward_forward`.

    Parameters
    ----------
    dout : float array (..., C)
        The cotangent of out.
    saved : FeedForwardSaved
        From `feed_forward_forward`.

    Returns
    -------
    FeedForwardGrads
        ``dparams`` (a FeedForwardParams) and ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    out = linear_backward(dout, saved.out)
    activated = ACTIVATIONS[saved.activation][1](out.dx, saved.activated)
    hidden = linear_backward(activated.dx, saved.hidden)
    return FeedForwardGrads(FeedForwardParams(hidden.dw, out.dw, hidden.db, out.db), hidden.dx)
