"""Forward mode and second order of encoder blocks and their stack. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

from npattn._arrays.checks import check_tangent
from npattn._arrays.namespace import Array, array_namespace
from npattn.models._recompute import opened
from npattn.models._residual import add
from npattn.models._tangents import (
    branch_tangent,
    branch_tangents,
    check_tangents,
    feed_forward,
    norm_tangent,
    norm_tangents,
    self_attention,
)
from npattn.models.encoder import EncoderGrads, EncoderParams, EncoderSaved, encoder_forward
from npattn.models.encoder_block import EncoderBlockGrads, EncoderBlockParams, EncoderBlockSaved, encoder_block_forward

NONES: tuple[Any, ...] = (None,) * len(EncoderBlockParams._fields)
NOTHING = EncoderBlockParams(*NONES)


def encoder_block_jvp(
    params: EncoderBlockParams,
    x: Array,
    /,
    *,
    tparams: EncoderBlockParams | None = None,
    tx: Array | None = None,
    tbias: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """``out`` of `encoder_block` and its tangent.

    Parameters
    ----------
    params : EncoderBlockParams
        Of its parts.
    x : float array (..., T, C)
        A sequence.
    tparams : EncoderBlockParams, optional
        The tangents of the parameters; ``None``, for all or for any part, is 0.
    tx, tbias : float arrays, optional
        The tangents of x and bias; 0 by default.
    **options : optional
        As in `encoder_block_forward`.

    Returns
    -------
    out : array (..., T, C)
        As from `encoder_block`.
    tout : array (..., T, C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that is not given.
    TypeError
        If dtypes, libraries or devices differ.

    Examples
    --------
    >>> import numpy as np
    >>> params = EncoderBlockParams.init(np.random.default_rng(0), width=8, heads=2)
    >>> x, tx = np.random.default_rng(1).standard_normal((2, 3, 8))
    >>> out, tout = encoder_block_jvp(params, x, tx=tx)
    >>> moved, _ = encoder_block_jvp(params, x + 1e-6 * tx)
    >>> bool(np.allclose((moved - out) / 1e-6, tout, atol=1e-4))
    True
    """
    op = "encoder_block_jvp"
    out, saved = encoder_block_forward(params, x, **options)
    check_tangents(op, "params", params, tparams)
    check_tangent(op, "x", tx, x)
    return out, block_tangent(op, saved, tparams, _or_zeros(tx, out), tbias)


def encoder_block_backward_jvp(
    dout: Array,
    saved: EncoderBlockSaved,
    /,
    *,
    tparams: EncoderBlockParams | None = None,
    tx: Array | None = None,
    tbias: Array | None = None,
    tdout: Array | None = None,
) -> EncoderBlockGrads:
    """The tangents of the gradients of `encoder_block_backward`; with tdout 0, a Hessian-vector product of ``⟨dout, out⟩``.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : EncoderBlockSaved
        From `encoder_block_forward`.
    tparams : EncoderBlockParams, optional
        The tangents of the parameters; ``None``, for all or for any part, is 0.
    tx, tbias, tdout : float arrays, optional
        The tangents of x, bias and dout; 0 by default.

    Returns
    -------
    EncoderBlockGrads
        The tangents of ``dparams``, ``dx`` and ``dbias``, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "encoder_block_backward_jvp"
    tx, tdout = _checked(op, dout, tx, tdout)
    return block_tangents(op, dout, opened(saved), tparams, tx, tbias, tdout)[1]


def encoder_jvp(
    params: EncoderParams,
    x: Array,
    /,
    *,
    tparams: EncoderParams | None = None,
    tx: Array | None = None,
    tbias: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """``out`` of `encoder` and its tangent.

    Parameters
    ----------
    params : EncoderParams
        Of its parts.
    x : float array (..., T, C)
        A sequence.
    tparams : EncoderParams, optional
        The tangents of the parameters; ``None``, for all or for any part, is 0.
    tx, tbias : float arrays, optional
        The tangents of x and bias; 0 by default.
    **options : optional
        As in `encoder_forward`.

    Returns
    -------
    out : array (..., T, C)
        As from `encoder`.
    tout : array (..., T, C)
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "encoder_jvp"
    out, saved = encoder_forward(params, x, **options)
    check_tangents(op, "params", params, tparams)
    check_tangent(op, "x", tx, x)
    return out, stack_tangent(op, saved, tparams, _or_zeros(tx, out), tbias).out


def encoder_backward_jvp(
    dout: Array,
    saved: EncoderSaved,
    /,
    *,
    tparams: EncoderParams | None = None,
    tx: Array | None = None,
    tbias: Array | None = None,
    tdout: Array | None = None,
) -> EncoderGrads:
    """The tangents of the gradients of `encoder_backward`; with tdout 0, a Hessian-vector product of ``⟨dout, out⟩``.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : EncoderSaved
        From `encoder_forward`.
    tparams : EncoderParams, optional
        The tangents of the parameters; ``None``, for all or for any part, is 0.
    tx, tbias, tdout : float arrays, optional
        The tangents of x, bias and dout; 0 by default.

    Returns
    -------
    EncoderGrads
        The tangents of ``dparams``, ``dx`` and ``dbias``, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "encoder_backward_jvp"
    tx, tdout = _checked(op, dout, tx, tdout)
    return stack_tangents(op, dout, saved, tparams, stack_tangent(op, saved, tparams, tx, tbias), tbias, tdout)[1]


def block_tangent(op: str, saved: EncoderBlockSaved, tparams: EncoderBlockParams | None, tx: Array, tbias: Array | None) -> Array:
    """The tangent of a block's out, from what forward saved."""
    t = NOTHING if tparams is None else tparams
    tx = branch_tangent(saved.attention_branch, t.attention_norm, tx, self_attention(op, saved.attention, t.attention, tbias))
    return branch_tangent(saved.feed_forward_branch, t.feed_forward_norm, tx, feed_forward(saved.feed_forward, t.feed_forward))


def block_tangents(
    op: str,
    dout: Array,
    saved: EncoderBlockSaved,
    tparams: EncoderBlockParams | None,
    tx: Array,
    tbias: Array | None,
    tdout: Array,
) -> tuple[Array, EncoderBlockGrads]:
    """``dx`` of a block, and the tangents of its gradients."""
    t = NOTHING if tparams is None else tparams
    attend, feed = self_attention(op, saved.attention, t.attention, tbias), feed_forward(saved.feed_forward, t.feed_forward)
    tbetween = branch_tangent(saved.attention_branch, t.attention_norm, tx, attend)
    dx, tdx, fed, feed_norm = branch_tangents(dout, tdout, saved.feed_forward_branch, t.feed_forward_norm, tbetween, feed)
    dx, tdx, attended, norm = branch_tangents(dx, tdx, saved.attention_branch, t.attention_norm, tx, attend)
    return dx, EncoderBlockGrads(EncoderBlockParams(attended.dparams, fed, norm, feed_norm), tdx, attended.dbias)


class StackTangents(NamedTuple):
    """Tangents on their way through a stack: what its way back needs."""

    inputs: tuple[Array, ...]  # of every block
    last: Array  # before the last norm
    out: Array


def stack_tangent(op: str, saved: EncoderSaved, tparams: EncoderParams | None, tx: Array, tbias: Array | None) -> StackTangents:
    """The tangents of a stack's blocks and of its out, from what forward saved."""
    inputs = []
    for block, t in zip(saved.blocks, _of_blocks(op, saved, tparams), strict=True):
        inputs.append(tx)
        tx = block_tangent(op, opened(block), t, tx, tbias)
    out = tx if saved.norm is None else norm_tangent(saved.norm, None if tparams is None else tparams.norm, tx)
    return StackTangents(tuple(inputs), tx, out)


def stack_tangents(
    op: str,
    dout: Array,
    saved: EncoderSaved,
    tparams: EncoderParams | None,
    moved: StackTangents,
    tbias: Array | None,
    tdout: Array,
) -> tuple[Array, EncoderGrads]:
    """``dx`` of a stack, and the tangents of its gradients."""
    dx, tdx, tdnorm = dout, tdout, None
    if saved.norm is not None:
        dx, tdx, tdnorm = norm_tangents(dx, saved.norm, None if tparams is None else tparams.norm, moved.last, tdx)
    tdblocks: list[EncoderBlockParams] = []
    tdbias: Array | None = None
    for block, t, tx in reversed(list(zip(saved.blocks, _of_blocks(op, saved, tparams), moved.inputs, strict=True))):
        dx, change = block_tangents(op, dx, opened(block), t, tx, tbias, tdx)
        tdx, tdbias = change.dx, add(tdbias, change.dbias)
        tdblocks.insert(0, change.dparams)
    return dx, EncoderGrads(EncoderParams(tuple(tdblocks), tdnorm), tdx, tdbias)


def _of_blocks(op: str, saved: EncoderSaved, tparams: EncoderParams | None) -> Any:
    if tparams is None or tparams.blocks is None:
        return (None,) * len(saved.blocks)
    if len(tparams.blocks) != len(saved.blocks):
        raise ValueError(f"{op}: tparams must have {len(saved.blocks)} blocks, got {len(tparams.blocks)}")
    return tparams.blocks


def _checked(op: str, dout: Array, tx: Array | None, tdout: Array | None) -> tuple[Array, Array]:
    """Tangents of x and dout, which both have out's shape."""
    for name, t in (("x", tx), ("dout", tdout)):
        check_tangent(op, name, t, dout)
    return _or_zeros(tx, dout), _or_zeros(tdout, dout)


def _or_zeros(t: Array | None, like: Array) -> Array:
    return array_namespace("tangent", like=like).zeros_like(like) if t is None else t
