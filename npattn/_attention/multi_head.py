"""Where queries, keys and values come from: multi-head attention, self- and cross-attention alike.

Wiring only: project queries, project keys and values, rotate, attend, merge the heads. Self-attention gives the same array twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import host_int
from npattn._arrays.namespace import Array, Namespace
from npattn._arrays.trees import with_tree_repr
from npattn._attention.attention import AttentionSaved, attention_backward, attention_forward
from npattn._attention.biases import LazyBias
from npattn._attention.masks import Mask
from npattn.layers._parameters import Parameters, check_parameters, check_sizes
from npattn.layers.dropout import Dropout
from npattn.layers.heads import (
    MergeHeadsSaved,
    ProjectHeadsSaved,
    merge_heads_backward,
    merge_heads_forward,
    project_heads_backward,
    project_heads_forward,
)
from npattn.layers.positions import Rotary, RotateSaved, rotate_backward, rotate_forward


@with_tree_repr
class MultiHeadParams(NamedTuple):
    """The parameters of `multi_head_attention`, and the type of their gradients.

    H query heads, K key/value heads of sizes D and E; the widths C of queries, keys/values and output may all differ.
    """

    w_q: Array  # (C, H, D)
    w_k: Array  # (C, K, D)
    w_v: Array  # (C, K, E)
    w_o: Array  # (H, E, C)
    b_q: Array | None = None  # (H, D)
    b_k: Array | None = None  # (K, D)
    b_v: Array | None = None  # (K, E)
    b_o: Array | None = None  # (C,)
    sinks: Array | None = None  # (H,)

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_size: int | None = None,
        value_size: int | None = None,
        kv_width: int | None = None,
        out_width: int | None = None,
        bias: bool = True,
        sinks: bool = False,
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
    ) -> MultiHeadParams:
        """Xavier-uniform weights, zero biases and sinks.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the weights are drawn from.
        width : int
            C of the queries.
        heads : int
            H.
        kv_heads : int, optional
            K, a divisor of H; H by default, 1 for multi-query attention.
        head_size, value_size : int, optional
            D and E; ``width // heads`` and D by default.
        kv_width, out_width : int, optional
            C of the keys and values, and of the output; ``width`` by default.
        bias : bool, optional
            Whether the projections have biases.
        sinks : bool, optional
            Whether every head has a learned sink.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.

        Returns
        -------
        MultiHeadParams

        Raises
        ------
        ValueError
            If ``heads`` does not divide ``width`` and no head size is given, ``kv_heads`` does not divide ``heads``, or a size is
            less than 1.

        Examples
        --------
        >>> import numpy as np
        >>> MultiHeadParams.init(np.random.default_rng(0), width=8, heads=2, bias=False).w_q.shape
        (8, 2, 4)
        """
        kv_heads = heads if kv_heads is None else kv_heads
        head_size = _head_size("MultiHeadParams.init", width, heads) if head_size is None else head_size
        value_size = head_size if value_size is None else value_size
        kv_width = width if kv_width is None else kv_width
        out_width = width if out_width is None else out_width
        op = "MultiHeadParams.init"
        check_sizes(op, width=width, heads=heads, kv_heads=kv_heads, head_size=head_size, value_size=value_size)
        check_sizes(op, kv_width=kv_width, out_width=out_width)
        if heads % kv_heads:
            raise ValueError(f"{op}: kv_heads must divide heads = {heads}, got {kv_heads}")
        new = Parameters(xp, dtype, device)
        return cls(
            new.xavier(rng, width, heads, head_size, inputs=width),
            new.xavier(rng, kv_width, kv_heads, head_size, inputs=kv_width),
            new.xavier(rng, kv_width, kv_heads, value_size, inputs=kv_width),
            new.xavier(rng, heads, value_size, out_width, inputs=heads * value_size),
            new.zeros(heads, head_size) if bias else None,
            new.zeros(kv_heads, head_size) if bias else None,
            new.zeros(kv_heads, value_size) if bias else None,
            new.zeros(out_width) if bias else None,
            new.zeros(heads) if sinks else None,
        )

    @classmethod
    def identity(
        cls, *, width: int, heads: int = 1, xp: Namespace = np, dtype: Any = None, device: Any = None
    ) -> MultiHeadParams:
        """Projections that do nothing, for lessons: head h sees the features h·D to (h+1)·D of its inputs as they are.

        Parameters
        ----------
        width : int
            C, of everything.
        heads : int, optional
            H, a divisor of C.
        xp, dtype, device : optional
            As in `init`.

        Returns
        -------
        MultiHeadParams
            Without biases and sinks.

        Raises
        ------
        ValueError
            If ``heads`` does not divide ``width``.

        Examples
        --------
        >>> import numpy as np
        >>> from npattn import attention
        >>> x = np.eye(2)
        >>> one_head = MultiHeadParams.identity(width=2)
        >>> bool(np.allclose(multi_head_attention(one_head, x, x), attention(x, x, x)))
        True
        """
        head_size = _head_size("MultiHeadParams.identity", width, heads)
        eye = Parameters(xp, dtype, device).array(np.eye(width))
        w_q, w_k, w_v = (xp.asarray(xp.reshape(eye, (width, heads, head_size)), copy=True) for _ in range(3))
        return cls(w_q, w_k, w_v, xp.reshape(eye, (heads, head_size, width)))


def _head_size(op: str, width: int, heads: int) -> int:
    if host_int(op, "width", width, least=1) % host_int(op, "heads", heads, least=1):
        raise ValueError(f"{op}: heads must divide width = {width}, got {heads}; or give head_size")
    return width // heads


@with_tree_repr
class MultiHeadAttentionSaved(NamedTuple):
    """What `multi_head_attention_backward` needs: the parameters, borrowed, and what its parts saved."""

    params: MultiHeadParams
    q: ProjectHeadsSaved
    k: ProjectHeadsSaved
    v: ProjectHeadsSaved
    attention: AttentionSaved
    out: MergeHeadsSaved
    rotated_q: RotateSaved | None = None
    rotated_k: RotateSaved | None = None


@with_tree_repr
class MultiHeadAttentionGrads(NamedTuple):
    """Gradients of `multi_head_attention`. For self-attention the gradient of x is ``dx_q + dx_kv``."""

    dparams: MultiHeadParams
    dx_q: Array
    dx_kv: Array
    dbias: Array | None


def multi_head_attention(
    params: MultiHeadParams,
    x_q: Array,
    x_kv: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    rotary: Rotary | None = None,
) -> Array:
    """Multi-head attention of ``x_q`` over ``x_kv``; see `multi_head_attention_forward`."""
    return multi_head_attention_forward(
        params, x_q, x_kv, mask=mask, bias=bias, scale=scale, softcap=softcap, dropout=dropout, rotary=rotary
    )[0]


def multi_head_attention_forward(
    params: MultiHeadParams,
    x_q: Array,
    x_kv: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    rotary: Rotary | None = None,
) -> tuple[Array, MultiHeadAttentionSaved]:
    """``out = Σ_h attention(x_q w_q, x_kv w_k, x_kv w_v)_h w_o``: several heads are one more axis.

    Self-attention is ``(params, x, x)``, cross-attention ``(params, decoder, encoder)``.

    Parameters
    ----------
    params : MultiHeadParams
        Weights, and biases and sinks where there are any.
    x_q : float array (..., T, C)
        Where the queries come from.
    x_kv : float array (..., S, C)
        Where keys and values come from; its C may differ from that of x_q.
    mask, bias, scale, softcap, dropout : optional
        As in `attention_forward`, for heads (..., H, T, S). Sinks stand in the parameters.
    rotary : Rotary, optional
        Queries and keys are rotated by their positions before they meet, as in `npattn.layers.rotate_forward`.

    Returns
    -------
    out : array (..., T, C)
        In the dtype of the inputs. A query that sees nothing gives ``b_o``.
    saved : MultiHeadAttentionSaved
        For `multi_head_attention_backward` and `multi_head_attention_steps`.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.2.2.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> params = MultiHeadParams.init(rng, width=8, heads=2)
    >>> x = rng.standard_normal((3, 8))
    >>> out, saved = multi_head_attention_forward(params, x, x)
    >>> grads = multi_head_attention_backward(np.ones((3, 8)), saved)
    >>> dx = grads.dx_q + grads.dx_kv
    >>> dx.shape
    (3, 8)
    """
    check_parameters("multi_head_attention", {"x_q": x_q, "x_kv": x_kv, **params._asdict()}, _AXES)
    q, saved_q = project_heads_forward(x_q, params.w_q, params.b_q)
    k, saved_k = project_heads_forward(x_kv, params.w_k, params.b_k)
    v, saved_v = project_heads_forward(x_kv, params.w_v, params.b_v)
    rotated_q = rotated_k = None
    if rotary is not None:
        q, rotated_q = rotate_forward(q, rotary)
        k, rotated_k = rotate_forward(k, rotary.of_keys())
    heads, saved_attention = attention_forward(
        q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=params.sinks, dropout=dropout
    )
    out, saved_out = merge_heads_forward(heads, params.w_o, params.b_o)
    return out, MultiHeadAttentionSaved(params, saved_q, saved_k, saved_v, saved_attention, saved_out, rotated_q, rotated_k)


_AXES = {
    "x_q": "...TC",
    "x_kv": "...Sc",
    "w_q": "CHD",
    "w_k": "cKD",
    "w_v": "cKE",
    "w_o": "HEo",
    "b_q": "HD",
    "b_k": "KD",
    "b_v": "KE",
    "b_o": "o",
    "sinks": "H",
}


def multi_head_attention_backward(dout: Array, saved: MultiHeadAttentionSaved, /) -> MultiHeadAttentionGrads:
    """The vector-Jacobian product of `multi_head_attention_forward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : MultiHeadAttentionSaved
        From `multi_head_attention_forward`.

    Returns
    -------
    MultiHeadAttentionGrads
        ``dparams`` (a MultiHeadParams), ``dx_q``, ``dx_kv``, ``dbias``. For self-attention add ``dx_q + dx_kv``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    """
    merged = merge_heads_backward(dout, saved.out)
    attended = attention_backward(merged.dx, saved.attention)
    dq = attended.dq if saved.rotated_q is None else rotate_backward(attended.dq, saved.rotated_q).dx
    dk = attended.dk if saved.rotated_k is None else rotate_backward(attended.dk, saved.rotated_k).dx
    q = project_heads_backward(dq, saved.q)
    k = project_heads_backward(dk, saved.k)
    v = project_heads_backward(attended.dv, saved.v)
    dparams = MultiHeadParams(q.dw, k.dw, v.dw, merged.dw, q.db, k.db, v.db, merged.db, attended.dsinks)
    return MultiHeadAttentionGrads(dparams, q.dx, k.dx + v.dx, attended.dbias)
