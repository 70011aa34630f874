"""Forward mode and second order of attention: tangents of results, tangents of gradients, and the backward of backward.

``t…`` is a tangent, ``d…`` a cotangent, everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from npattn._arrays.checks import check_tangent
from npattn._arrays.namespace import Array
from npattn._arrays.trees import with_tree_repr
from npattn._attention import formula
from npattn._attention.attention import AttentionGrads, AttentionSaved, as_grads, own
from npattn._attention.biases import LazyBias
from npattn._attention.jvp_passes import Cotangents, backward_jvp, jvp
from npattn._attention.masks import Mask
from npattn._attention.problem import Problem, aligned, check_cotangent, make_problem
from npattn._attention.tiling import choose_sizes
from npattn.layers.dropout import Dropout


@with_tree_repr
class AttentionTangents(NamedTuple):
    """A direction to look along: tangents of the inputs of `attention`, each in the shape and dtype of its input.

    ``None`` is a tangent of 0, and saves the work. ``tbias`` of a lazy bias is the tangent of its parameters.
    """

    tq: Array | None = None
    tk: Array | None = None
    tv: Array | None = None
    tbias: Array | None = None
    tsinks: Array | None = None


@with_tree_repr
class AttentionBackwardGrads(NamedTuple):
    """Gradients of `attention_backward`, each in the shape and dtype of its input; ``None`` for one that was not given."""

    ddout: Array
    ddlse: Array | None
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None


def attention_jvp(
    q: Array,
    k: Array,
    v: Array,
    tangents: AttentionTangents,
    /,
    *,
    mask: Mask | Array | None = None,
    bias: Array | LazyBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The results of attention and how they answer to a small change of its inputs: the Jacobian-vector product.

    Parameters
    ----------
    q : float array (..., H, T, D)
        Queries.
    k : float array (..., K, S, D)
        Keys.
    v : float array (..., K, S, E)
        Values.
    tangents : AttentionTangents
        The change of every input.
    mask : Mask or bool array, optional
        As in `attention_forward`, and so are all options.
    bias : float array or LazyBias, optional
        Added to the scores.
    scale : float, optional
        1/√D by default.
    softcap : float, optional
        Bounds the scores.
    sinks : float array (H,), optional
        One logit a head.
    dropout : Dropout, optional
        Which weights are dropped.

    Returns
    -------
    out : array (..., H, T, E)
        As from `attention`.
    lse : array (..., H, T)
        The log-sum-exp of every row, as ``saved.lse``.
    tout : array (..., H, T, E)
        The tangent of out, in its dtype. 0 where a query sees no key.
    tlse : array (..., H, T)
        The tangent of lse, in its dtype. 0 where lse is -inf.

    Raises
    ------
    ValueError
        If shapes do not fit, a number is out of range, or there is a tangent of a bias or of sinks that are not given.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    attention_backward_jvp : The tangents of the gradients.

    Notes
    -----
    One pass over the tiles, six matrix products a tile where `attention` has two. Memory does not grow with T·S. What stands
    at hidden pairs, at keys that no query sees and at queries that see no key influences nothing, in tangents as in inputs.
    Derivation: docs/derivation.md, "Tangents".

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.array([[2.0]]), np.array([[2.0], [1.0]]), np.array([[10.0], [4.0]])
    >>> out, lse, tout, tlse = attention_jvp(q, k, v, AttentionTangents(tq=np.array([[1.0]])))
    >>> tout.round(2), tlse.round(2)
    (array([[0.63]]), array([1.88]))
    """
    problem = make_problem("attention_jvp", q, k, v, mask, bias, scale, softcap, sinks, dropout)
    along = _along(problem, tangents, {"q": q, "k": k, "v": v}, "attention_jvp")
    done = jvp(problem, along, choose_sizes(problem))
    with np.errstate(all="ignore"):
        lse = formula.log_sum_exp(done.row_max, done.row_sum, problem.xp)
    out, tout = (own(problem, problem.result(x), shared=False) for x in (done.out, done.tout))
    return out, problem.result(lse[..., 0]), tout, problem.result(done.tlse[..., 0])


def attention_backward_jvp(
    dout: Array,
    saved: AttentionSaved,
    tangents: AttentionTangents,
    /,
    *,
    dlse: Array | None = None,
    tdout: Array | None = None,
    tdlse: Array | None = None,
) -> AttentionGrads:
    """How the gradients of `attention_backward` answer to a small change of inputs and cotangents: forward over reverse.

    Parameters
    ----------
    dout : float array (..., H, T, E)
        The cotangent of out.
    saved : AttentionSaved
        From `attention_forward`.
    tangents : AttentionTangents
        The change of every input of forward.
    dlse : float array (..., H, T), optional
        The cotangent of ``saved.lse``.
    tdout : float array (..., H, T, E), optional
        The change of dout; 0 by default.
    tdlse : float array (..., H, T), optional
        The change of dlse; 0 by default.

    Returns
    -------
    AttentionGrads
        The tangents of ``dq``, ``dk``, ``dv``, ``dbias`` and ``dsinks``, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias or of sinks that were not given.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    attention_hvp : Without a change of the cotangents.

    Notes
    -----
    Tile by tile: 14 matrix products where `attention_backward` has five, 17 where the keys are cut. Memory does not grow with
    T·S. Derivation: docs/derivation.md, "Tangents of the gradients".

    Examples
    --------
    The gradients are linear in dout: with no other change, the change of dout makes that of the gradients.

    >>> import numpy as np
    >>> from npattn import attention_backward, attention_forward
    >>> q, k, v, tdout = np.random.default_rng(0).standard_normal((4, 3, 2))
    >>> out, saved = attention_forward(q, k, v)
    >>> change = attention_backward_jvp(out, saved, AttentionTangents(), tdout=tdout)
    >>> bool(np.allclose(change.dq, attention_backward(tdout, saved).dq))
    True
    """
    return tangents_of_gradients("attention_backward_jvp", dout, saved, tangents, dlse=dlse, tdout=tdout, tdlse=tdlse)[0]


def attention_hvp(
    dout: Array, saved: AttentionSaved, tangents: AttentionTangents, /, *, dlse: Array | None = None
) -> AttentionGrads:
    """The product of a vector and the Hessian of ``⟨dout, out⟩ + ⟨dlse, lse⟩``: how the gradients answer to the inputs.

    Parameters
    ----------
    dout : float array (..., H, T, E)
        The cotangent of out, held fixed.
    saved : AttentionSaved
        From `attention_forward`.
    tangents : AttentionTangents
        The vector.
    dlse : float array (..., H, T), optional
        The cotangent of ``saved.lse``, held fixed.

    Returns
    -------
    AttentionGrads
        A part of the product for every input.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of a bias or of sinks that were not given.
    TypeError
        If dtypes, libraries or devices differ.

    See Also
    --------
    attention_backward_jvp : With cotangents that change, as those of a loss that is not linear in out do.

    Examples
    --------
    The Hessian is symmetric:

    >>> import numpy as np
    >>> from npattn import attention_forward
    >>> q, k, v, dout, a, b = np.random.default_rng(0).standard_normal((6, 3, 2))
    >>> _, saved = attention_forward(q, k, v)
    >>> of_a, of_b = (attention_hvp(dout, saved, AttentionTangents(tq=t)).dq for t in (a, b))
    >>> bool(np.isclose(np.vdot(b, of_a), np.vdot(a, of_b)))
    True
    """
    return tangents_of_gradients("attention_hvp", dout, saved, tangents, dlse=dlse)[0]


def attention_backward_backward(
    cotangents: AttentionGrads, dout: Array, saved: AttentionSaved, /, *, dlse: Array | None = None
) -> AttentionBackwardGrads:
    """The vector-Jacobian product of `attention_backward`: for a loss that is made of gradients.

    Parameters
    ----------
    cotangents : AttentionGrads
        The cotangents of ``dq``, ``dk``, ``dv``, ``dbias`` and ``dsinks``, each in the field of its gradient; ``None`` is 0.
    dout : float array (..., H, T, E)
        What backward was given.
    saved : AttentionSaved
        From `attention_forward`.
    dlse : float array (..., H, T), optional
        What backward was given.

    Returns
    -------
    AttentionBackwardGrads
        ``ddout`` and ``ddlse``, the gradients of dout and dlse, and ``dq``, ``dk``, ``dv``, ``dbias``, ``dsinks``, through
        backward alone: a loss that is made of out as well adds `attention_backward`.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a cotangent of a gradient that is ``None``.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    ``⟨cotangents, backward(dout)⟩`` is ``⟨dout, jvp(cotangents)⟩``. So the cotangents are the tangents of a JVP, whose tout is
    ddout, and of a Hessian-vector product, which is all the rest. Derivation: docs/derivation.md, "The backward of backward".

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import AttentionGrads, attention_forward
    >>> q, k, v, dout, c = np.random.default_rng(0).standard_normal((5, 3, 2))
    >>> _, saved = attention_forward(q, k, v)
    >>> grads = attention_backward_backward(AttentionGrads(c, None, None, None, None), dout, saved)
    >>> _, _, tout, _ = attention_jvp(q, k, v, AttentionTangents(tq=c))
    >>> bool(np.allclose(grads.ddout, tout))
    True
    """
    op = "attention_backward_backward"
    grads, tout, tlse = tangents_of_gradients(op, dout, saved, AttentionTangents(*cotangents), dlse=dlse)
    return AttentionBackwardGrads(tout, None if dlse is None else tlse, *grads)


def tangent_of_out(op: str, saved: AttentionSaved, tangents: AttentionTangents) -> Array:
    """The tangent of out, for a call of forward that has been."""
    problem, sizes, _ = saved.tiling
    along = _along(problem, tangents, {"q": saved.q, "k": saved.k, "v": saved.v}, op)
    return own(problem, problem.result(jvp(problem, along, sizes).tout), shared=False)


def tangents_of_gradients(
    op: str,
    dout: Array,
    saved: AttentionSaved,
    tangents: AttentionTangents,
    *,
    dlse: Array | None = None,
    tdout: Array | None = None,
    tdlse: Array | None = None,
) -> tuple[AttentionGrads, Array, Array]:
    """The tangents of the gradients, and those of out and lse."""
    problem, sizes, _ = saved.tiling
    value_size = problem.v.shape[-1]
    check_cotangent(problem, "dout", dout, value_size, op=op)
    if tdout is not None:
        check_cotangent(problem, "tdout", tdout, value_size, op=op)
    for name, x in (("dlse", dlse), ("tdlse", tdlse)):
        if x is not None:
            check_cotangent(problem, name, x, lifted=True, op=op)
    along = _along(problem, tangents, {"q": saved.q, "k": saved.k, "v": saved.v}, op)
    of_out = (None if x is None else problem.with_heads(x) for x in (dout, tdout))
    of_lse = (None if x is None else problem.with_heads(x[..., None]) for x in (dlse, tdlse))
    (dout, tdout), (dlse, tdlse) = of_out, of_lse
    grads, tout, tlse = backward_jvp(
        problem, along, sizes, saved.tiling.done._replace(kept=None), Cotangents(dout, dlse, tdout, tdlse)
    )
    return as_grads(saved, grads), own(problem, problem.result(tout), shared=False), problem.result(tlse[..., 0])


def _along(problem: Problem, tangents: AttentionTangents, inputs: Mapping[str, Array], op: str) -> Problem:
    """The problem with tangents in the place of its inputs; ``None`` where they are 0."""
    tq, tk, tv, tbias, tsinks = tangents
    bias, sinks, xp = problem.options.bias, problem.options.sinks, problem.xp
    like = {**inputs, "bias": bias.parameters if isinstance(bias, LazyBias) else bias, "sinks": sinks}
    for name, t in zip(like, (tq, tk, tv, tbias, tsinks), strict=True):
        check_tangent(op, name, t, like[name])

    def placed(t: Array | None, x: Array) -> Array | None:
        if t is None:
            return None
        t = aligned(t, len(problem.lead), xp)
        return t if t.shape == x.shape else xp.broadcast_to(t, x.shape)

    if tbias is not None and isinstance(bias, LazyBias):
        tbias = bias.with_parameters(tbias)
    options = problem.options._replace(bias=tbias, sinks=tsinks)
    return problem._replace(q=placed(tq, problem.q), k=placed(tk, problem.k), v=placed(tv, problem.v), options=options)
