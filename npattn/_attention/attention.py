"""Scaled dot-product attention as a caller sees it: ``attention``, its forward and its hand-derived backward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import with_tree_repr
from npattn._attention import formula
from npattn._attention.biases import LazyBias
from npattn._attention.gathering import Backward
from npattn._attention.masks import Mask
from npattn._attention.passes import Forward, backward, forward
from npattn._attention.problem import Problem, check_cotangent, make_problem
from npattn._attention.tiling import ONE_TILE, Sizes, choose_sizes
from npattn.layers.dropout import Dropout


class Tiling(NamedTuple):
    """How forward was organised; backward is organised alike."""

    problem: Problem
    sizes: Sizes
    done: Forward

    def __repr__(self) -> str:
        size = "one tile" if self.sizes is ONE_TILE else f"{self.sizes.rows} rows, {self.sizes.keys} keys"
        return f"Tiling({size}{', weights kept' if self.done.kept else ''})"


@with_tree_repr
class AttentionSaved(NamedTuple):
    """What `attention_backward` needs: the inputs, borrowed, and three results of forward, unrounded.

    These are ``out`` and, of every row, ``row_max`` and ``row_sum``; with ``lse`` they are (..., H, T), in float32 or float64.
    """

    q: Array
    k: Array
    v: Array
    mask: Mask | Array | None
    bias: Array | LazyBias | None
    scale: float | None
    softcap: float | None
    sinks: Array | None
    dropout: Dropout | None
    out: Array
    tiling: Tiling

    @property
    def problem(self) -> Problem:
        """The inputs, checked and grouped."""
        return self.tiling.problem

    @property
    def row_max(self) -> Array:
        """The largest score of every row, a sink among them; -inf where a query sees neither."""
        return self.problem.result(self.tiling.done.row_max[..., 0])

    @property
    def row_sum(self) -> Array:
        """Every row's sum of exp(score - row_max), the sink's among them."""
        return self.problem.result(self.tiling.done.row_sum[..., 0])

    @property
    def lse(self) -> Array:
        """The log of every row's sum of exponentials, row_max + log row_sum; -inf where a query sees no key and no sink."""
        with np.errstate(all="ignore"):
            return formula.log_sum_exp(self.row_max, self.row_sum, self.problem.xp)


@with_tree_repr
class AttentionGrads(NamedTuple):
    """Gradients of `attention`, each in the shape and dtype of its input; ``None`` for an input that was not given."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None


def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
) -> Array:
    """Scaled dot-product attention, ``softmax(scale·q kᵀ) v``; see `attention_forward` for everything.

    See Also
    --------
    attention_forward, attention_backward

    Examples
    --------
    >>> import numpy as np
    >>> attention(np.array([[2.0]]), np.array([[2.0], [1.0]]), np.array([[10.0], [4.0]])).round(2)
    array([[9.28]])
    """
    problem = make_problem("attention", q, k, v, mask, bias, scale, softcap, sinks, dropout)
    done = forward(problem, choose_sizes(problem, backward=False), keep=False)
    return own(problem, problem.result(done.out), shared=False)


def attention_forward(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
) -> tuple[Array, AttentionSaved]:
    """``out = dropout(softmax(softcap(scale·q kᵀ) + bias, where mask)) v``, and what backward needs.

    Parameters
    ----------
    q : float array (..., H, T, D)
        Queries. From rank 3 on, axis -3 is the head axis; (T, D) has none.
    k : float array (..., K, S, D)
        Keys. K divides H; query head h reads key/value head ``h // (H / K)``. Leading axes broadcast.
    v : float array (..., K, S, E)
        Values.
    mask : Mask or bool array, optional
        True where a query may attend to a key; broadcasts, right-aligned, to (..., H, T, S). See `causal_mask`, `window_mask`,
        `length_mask`, `segment_mask`; they combine with ``& | ~``.
    bias : float array or LazyBias, optional
        Added to the scores; broadcasts to (..., H, T, S). -inf hides a pair. `alibi_bias` and `relative_bias` are never
        written out.
    scale : float, optional
        1/√D by default.
    softcap : float, optional
        Bounds the scores: ``softcap·tanh(scores / softcap)``, before bias and mask.
    sinks : float array (H,), optional
        One logit a head that joins the denominator and has no value.
    dropout : Dropout, optional
        Which weights are dropped: ``Dropout(rate, seed)``, replayed in backward.

    Returns
    -------
    out : array (..., H, T, E)
        In the dtype of the inputs; shares memory with nothing. 0 where a query sees no key.
    saved : AttentionSaved
        For `attention_backward` and `attention_steps`. ``saved.lse`` (..., H, T) is the log-sum-exp of every row, -inf where
        a query sees neither key nor sink; in float32 for float16 and bfloat16.

    Raises
    ------
    ValueError
        If shapes do not fit or a number is out of range.
    TypeError
        If dtypes, libraries or devices differ, or the mask is not boolean.

    Notes
    -----
    ``saved`` borrows the inputs: write to none of them before backward has run. It holds out, row_max and row_sum besides,
    T·(E + 2) numbers a head; memory beyond that does not grow with T·S. float16 and bfloat16 are computed in float32.
    Derivation: docs/derivation.md; the rules for masks, dead rows, windows and NaN: docs/conventions.md.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), equation 1 (their n is T = S, d_k is D, d_v is E). Dao et al.:
    FlashAttention (2022), for the tiles. Gemma 2 (2024), for the softcap. Xiao et al.: Efficient Streaming Language Models
    with Attention Sinks (2023).

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import causal_mask
    >>> q = k = v = np.eye(2)
    >>> out, saved = attention_forward(q, k, v, mask=causal_mask())
    >>> out.round(2)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    >>> attention_backward(np.array([[0.0, 0.0], [1.0, 2.0]]), saved).dv.round(2)
    array([[0.33, 0.66],
           [0.67, 1.34]])
    """
    problem = make_problem("attention", q, k, v, mask, bias, scale, softcap, sinks, dropout)
    sizes = choose_sizes(problem)
    # with a softcap backward needs the scores too, and makes the numerators from them
    done = forward(problem, sizes, keep=sizes.keep and problem.options.softcap is None)
    out = problem.result(done.out)
    saved = AttentionSaved(q, k, v, mask, bias, scale, softcap, sinks, dropout, out, Tiling(problem, sizes, done))
    return own(problem, out, shared=True), saved


def attention_backward(dout: Array, saved: AttentionSaved, /, *, dlse: Array | None = None) -> AttentionGrads:
    """The vector-Jacobian product of `attention_forward`, derived by hand.

    Parameters
    ----------
    dout : float array (..., H, T, E)
        The cotangent of out, in its dtype.
    saved : AttentionSaved
        From `attention_forward`.
    dlse : float array (..., H, T), optional
        The cotangent of ``saved.lse``, in its dtype.

    Returns
    -------
    AttentionGrads
        ``dq``, ``dk``, ``dv``, ``dbias`` and ``dsinks``, each in the shape and dtype of its input, ``None`` for an input that
        was not given; ``dbias`` of a lazy bias is the gradient of its parameters. Read them by name. 0 for pairs that are
        hidden.

    Raises
    ------
    ValueError
        If a cotangent has not the shape of its result.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    The weights are made again, tile by tile. Derivation: docs/derivation.md.

    References
    ----------
    Dao et al.: FlashAttention (2022), appendix B.
    """
    problem, sizes, done = saved.tiling
    if not type(dout) is type(saved.out) is np.ndarray or dout.shape != saved.out.shape or dout.dtype is not problem.dtype:
        check_cotangent(problem, "dout", dout, problem.v.shape[-1])
    if dlse is not None:
        check_cotangent(problem, "dlse", dlse, lifted=True)
        dlse = problem.with_heads(dlse[..., None])
    return as_grads(saved, backward(problem, sizes, done, problem.with_heads(dout), dlse))


def as_grads(saved: AttentionSaved, grads: Backward) -> AttentionGrads:
    """Gradients in the shape and dtype of the caller's inputs."""
    problem, (dq, dk, dv, dbias, dsinks) = saved.tiling.problem, grads
    return AttentionGrads(
        problem.gradient(dq, saved.q),
        problem.gradient(dk, saved.k),
        problem.gradient(dv, saved.v),
        None if dbias is None else _back_to_bias(problem, problem.options.bias, dbias),
        None if dsinks is None else problem.rounded(problem.xp.reshape(dsinks, (-1,))),
    )


def own(problem: Problem, out: Array, *, shared: bool) -> Array:
    """The result in the caller's dtype; a copy if ``saved`` holds it too, since callers write ``out += x``."""
    if problem.dtype is not problem.compute and problem.dtype != problem.compute:
        return problem.rounded(out)
    if not shared:
        return out
    # PyTorch's asarray warns where autograd is on; NumPy's takes a third of the time of astype
    return out.copy() if problem.xp is np else problem.xp.astype(out, out.dtype)


def _back_to_bias(problem: Problem, bias: Array | LazyBias, dbias: Array) -> Array:
    xp = problem.xp
    if isinstance(bias, LazyBias):  # what is summed there is summed before it is rounded
        with np.errstate(all="ignore"):
            return problem.rounded(bias.gradient(xp.reshape(dbias, (-1, dbias.shape[-1])), xp))
    return xp.reshape(problem.rounded(dbias), bias.shape)
