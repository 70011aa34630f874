"""Forward mode and second order of the language model and of its loss. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

from npattn._arrays.checks import check_tangent
from npattn._arrays.namespace import Array, array_namespace
from npattn.layers.embedding import EmbeddingSaved, embedding
from npattn.layers.loss import cross_entropy_backward
from npattn.layers.loss_jvp import cross_entropy_backward_jvp, cross_entropy_jvp
from npattn.models._logits import logits_backward
from npattn.models._residual import add, drop_backward
from npattn.models._tangents import check_tangents, drop_tangent, logits_tangent, logits_tangents, norm_tangent, norm_tangents
from npattn.models.encoder import EncoderParams
from npattn.models.encoder_jvp import StackTangents, stack_tangent, stack_tangents
from npattn.models.language_model import (
    LanguageModelGrads,
    LanguageModelLossSaved,
    LanguageModelParams,
    LanguageModelSaved,
    language_model_forward,
)
from npattn.models.token_embedding import TokenEmbeddingParams, TokenEmbeddingSaved, token_embedding_backward

NOTHING: Any = LanguageModelParams(None, None)  # type: ignore[arg-type]
NO_TABLES: Any = TokenEmbeddingParams(None)


def language_model_jvp(
    params: LanguageModelParams,
    ids: Any,
    /,
    *,
    tparams: LanguageModelParams,
    tbias: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """``out`` of `language_model` and its tangent: how the logits answer to a small change of the parameters.

    Parameters
    ----------
    params : LanguageModelParams
        Of its parts.
    ids : integer array (..., T), or Python integers
        Tokens.
    tparams : LanguageModelParams
        The tangents of the parameters; ``None`` in the place of any part is 0.
    tbias : float array, optional
        The tangent of bias; 0 by default.
    **options : optional
        As in `language_model_forward`.

    Returns
    -------
    out : array (..., T, V)
        As from `language_model`.
    tout : array (..., T, V)
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
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> out, tout = language_model_jvp(params, [[3, 1, 4]], tparams=params)
    >>> tout.shape
    (1, 3, 50)
    """
    op = "language_model_jvp"
    out, saved = language_model_forward(params, ids, **options)
    check_tangents(op, "params", params, tparams)
    return out, _model_tangent(op, saved, tparams, tbias).logits


def language_model_backward_jvp(
    dout: Array,
    saved: LanguageModelSaved,
    /,
    *,
    tparams: LanguageModelParams | None = None,
    tbias: Array | None = None,
    tdout: Array | None = None,
) -> LanguageModelGrads:
    """The tangents of the gradients of `language_model_backward`; with tdout 0, a Hessian-vector product of ``⟨dout, out⟩``.

    Parameters
    ----------
    dout : float array (..., T, V)
        The cotangent of the logits.
    saved : LanguageModelSaved
        From `language_model_forward`.
    tparams : LanguageModelParams, optional
        The tangents of the parameters; ``None``, for all or for any part, is 0.
    tbias, tdout : float arrays, optional
        The tangents of bias and dout; 0 by default.

    Returns
    -------
    LanguageModelGrads
        The tangents of ``dparams`` and ``dbias``, each in the field of its gradient.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that was not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op, t = "language_model_backward_jvp", NOTHING if tparams is None else tparams
    check_tangent(op, "dout", tdout, dout)
    return _model_tangents(dout, saved, t, tbias, _model_tangent(op, saved, t, tbias), tdout)


def language_model_loss_jvp(
    params: LanguageModelParams,
    ids: Any,
    targets: Any,
    /,
    *,
    tparams: LanguageModelParams,
    tbias: Array | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """``out`` of `language_model_loss` and its tangent: the slope of the loss along a direction.

    Parameters
    ----------
    params : LanguageModelParams
        Of its parts.
    ids : integer array (..., T), or Python integers
        Tokens.
    targets : integer array (..., T), or Python integers
        The token that follows each.
    tparams : LanguageModelParams
        The tangents of the parameters; ``None`` in the place of any part is 0.
    tbias : float array, optional
        The tangent of bias; 0 by default.
    label_smoothing, ignore_index, weights : optional
        As in `npattn.layers.cross_entropy_forward`.
    **options : optional
        As in `language_model_forward`.

    Returns
    -------
    out : array ()
        In nats a token.
    tout : array ()
        The tangent of out.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that is not given.
    TypeError
        If dtypes, libraries or devices differ.
    """
    logits, tlogits = language_model_jvp(params, ids, tparams=tparams, tbias=tbias, **options)
    of_loss: dict[str, Any] = {"label_smoothing": label_smoothing, "ignore_index": ignore_index, "weights": weights}
    return cross_entropy_jvp(logits, targets, tlogits=tlogits, **of_loss)


def language_model_loss_hvp(
    saved: LanguageModelLossSaved, /, *, tparams: LanguageModelParams, tbias: Array | None = None
) -> LanguageModelGrads:
    """The product of a vector and the Hessian of the loss: how its gradient answers to the parameters.

    Parameters
    ----------
    saved : LanguageModelLossSaved
        From `language_model_loss_forward`.
    tparams : LanguageModelParams
        The vector; ``None`` in the place of any part is 0.
    tbias : float array, optional
        The vector's part for the bias; 0 by default.

    Returns
    -------
    LanguageModelGrads
        A part of the product for every parameter, and ``dbias``.

    Raises
    ------
    ValueError
        If shapes do not fit, or there is a tangent of something that was not given.
    TypeError
        If dtypes, libraries or devices differ.

    Notes
    -----
    Nothing of forward is computed again but for the blocks that were to be recomputed, so that many products, as a Newton step
    takes them, share one `language_model_loss_forward`.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn.models import language_model_loss_forward
    >>> sizes = dict(vocabulary=50, context=16, blocks=2, width=8, heads=2)
    >>> params = LanguageModelParams.init(np.random.default_rng(0), **sizes)
    >>> loss, saved = language_model_loss_forward(params, [[3, 1, 4]], [[1, 4, 1]])
    >>> product = language_model_loss_hvp(saved, tparams=params)
    >>> product.dparams.blocks[0].attention.w_q.shape
    (8, 2, 4)
    """
    moved = _model_tangent("language_model_loss_hvp", saved.model, tparams, tbias)
    dlogits = cross_entropy_backward(1.0, saved.loss).dlogits
    tdlogits = cross_entropy_backward_jvp(1.0, saved.loss, tlogits=moved.logits).dlogits
    return _model_tangents(dlogits, saved.model, tparams, tbias, moved, tdlogits)


class ModelTangents(NamedTuple):
    """Tangents on their way through the model: what its way back needs."""

    summed: Array  # before the norm of the embedding
    stack: StackTangents
    logits: Array


def _model_tangent(op: str, saved: LanguageModelSaved, t: LanguageModelParams, tbias: Array | None) -> ModelTangents:
    tables = _tables(t)
    summed = _rows(op, tables.tokens, saved.embedding.tokens)
    for table, lookup in zip(tables[1:3], saved.embedding[1:3], strict=True):
        if table is not None and lookup is not None:
            summed = add(summed, _rows(op, table, lookup))
    norm = saved.embedding.norm
    normed = summed if norm is None else norm_tangent(norm, tables.norm, summed)
    stack = stack_tangent(op, saved.stack, _stack(t), drop_tangent(normed, saved.embedding.dropout), tbias)
    return ModelTangents(summed, stack, logits_tangent(op, saved.logits, stack.out, tables.tokens, t.w_out, t.b_out))


def _rows(op: str, table: Array | None, saved: EmbeddingSaved) -> Array:
    """The tangent of a lookup."""
    check_tangent(op, "table", table, saved.table)
    if table is None:
        table = array_namespace(op, table=saved.table).zeros_like(saved.table)
    return embedding(table, saved.ids, scale=saved.scale)


def _model_tangents(
    dout: Array,
    saved: LanguageModelSaved,
    t: LanguageModelParams,
    tbias: Array | None,
    moved: ModelTangents,
    tdout: Array | None,
) -> LanguageModelGrads:
    tables = _tables(t)
    logits = logits_tangents(dout, saved.logits, moved.stack.out, tables.tokens, t.w_out, tdout)
    dx = logits_backward(dout, saved.logits).dx
    dx, change = stack_tangents("language_model_backward_jvp", dx, saved.stack, _stack(t), moved.stack, tbias, logits.dx)
    embedded = _embedding_tangents(dx, saved.embedding, tables, moved.summed, change.dx)
    embedded = embedded._replace(tokens=add(embedded.tokens, logits.dtable))
    return LanguageModelGrads(LanguageModelParams(embedded, *change.dparams, logits.dw, logits.db), change.dbias)


def _embedding_tangents(
    dout: Array, saved: TokenEmbeddingSaved, tables: TokenEmbeddingParams, tsummed: Array, tdout: Array
) -> TokenEmbeddingParams:
    """The tangents of the gradients of the tables, in which they are linear, and of the norm."""
    if saved.norm is None:
        return token_embedding_backward(tdout, saved).dparams
    dnormed, tdnormed = (drop_backward(d, saved.dropout) for d in (dout, tdout))
    _, tdsummed, tdnorm = norm_tangents(dnormed, saved.norm, tables.norm, tsummed, tdnormed)
    return token_embedding_backward(tdsummed, saved._replace(norm=None, dropout=None)).dparams._replace(norm=tdnorm)


def _tables(t: LanguageModelParams) -> TokenEmbeddingParams:
    tables: TokenEmbeddingParams = NO_TABLES if t.embedding is None else t.embedding
    return tables


def _stack(t: LanguageModelParams) -> EncoderParams:
    return EncoderParams(t.blocks, t.norm)
