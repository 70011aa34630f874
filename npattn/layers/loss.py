"""Cross-entropy from logits: log-softmax and the choice of the target in one op, whose gradient is softmax - target."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.checks import check_cotangent, host_float, host_int, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, compute_dtype, float_dtype
from npattn._arrays.trees import tree_repr
from npattn.layers._ids import as_ids, beside, check_range, foreign
from npattn.layers._rows import host_cotangent, or_one, reciprocal, row_max, shift


class CrossEntropySaved(NamedTuple):
    """What `cross_entropy_backward` needs: the inputs, borrowed, and three numbers a token, unrounded."""

    logits: Array
    targets: Array
    label_smoothing: float
    ignore_index: int | None
    weights: Array | None
    row_max: Array
    row_sum: Array
    losses: Array

    def __repr__(self) -> str:
        return tree_repr(self)


class CrossEntropyGrads(NamedTuple):
    """Gradients of `cross_entropy`; ``dweights`` is ``None`` if there were no weights."""

    dlogits: Array
    dweights: Array | None

    def __repr__(self) -> str:
        return tree_repr(self)


def cross_entropy(
    logits: Array,
    targets: Any,
    /,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Array | None = None,
) -> Array:
    """The mean of ``-log softmax(logits)[target]``; see `cross_entropy_forward`."""
    return cross_entropy_forward(logits, targets, label_smoothing=label_smoothing, ignore_index=ignore_index, weights=weights)[0]


def cross_entropy_forward(
    logits: Array,
    targets: Any,
    /,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    weights: Array | None = None,
) -> tuple[Array, CrossEntropySaved]:
    """``out = Σ w l / Σ w`` over the tokens that count, where ``l = -Σ_v q_v log softmax(logits)_v``.

    The target distribution q is ``1 - label_smoothing`` at the target plus ``label_smoothing / V`` everywhere.

    Parameters
    ----------
    logits : float array (..., V)
        Unnormalised log-probabilities, a row a token.
    targets : integer array (...), or Python integers
        At least 0 and less than V, or ``ignore_index``. Python and NumPy integers are host data, allowed with logits of any
        library, and their range is checked; a device array is never read back.
    label_smoothing : float, optional
        From 0 to 1.
    ignore_index : int, optional
        Tokens with this target do not count, and what stands in their logits has no influence. (PyTorch's default is -100.)
    weights : float array (...), optional
        How much every token counts, at least 0; 1 by default.

    Returns
    -------
    out : array ()
        In the dtype of the logits, computed in float32 at least; 0 where nothing counts.
    saved : CrossEntropySaved
        For `cross_entropy_backward`. Borrows logits, targets and weights, and holds three numbers a token.

    Raises
    ------
    ValueError
        If shapes do not fit, or a number or a target on the host is out of range.
    TypeError
        If logits or weights are not floating arrays of one dtype, the targets are not integers, or libraries or devices differ.

    Notes
    -----
    The same number as ``torch.nn.functional.cross_entropy`` with logits (N, V). A token whose target has the logit -inf has the
    loss inf. Derivation: docs/derivation.md, "Cross-entropy".

    Examples
    --------
    >>> import numpy as np
    >>> cross_entropy(np.zeros((3, 4)), [0, 1, 3])
    array(1.38629436)
    """
    op = "cross_entropy"
    targets = as_ids(op, "targets", targets)
    xp = array_namespace(op, logits=logits, weights=weights, targets=foreign(targets))
    dtype = float_dtype(op, logits=logits, weights=weights)
    label_smoothing = host_float(op, "label_smoothing", label_smoothing)
    ignore_index = None if ignore_index is None else host_int(op, "ignore_index", ignore_index)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be at least 0 and at most 1, got {label_smoothing}")
    if logits.ndim < 1:
        shape_error(op, "logits", "(..., V)", logits.shape)
    for name, x in (("targets", targets), ("weights", weights)):
        if x is not None and x.shape != logits.shape[:-1]:
            shape_error(op, name, f"(...) = {tuple(logits.shape[:-1])} as logits (..., V) has", x.shape)
    check_range(op, "targets", targets, logits.shape[-1], "V", ignored=ignore_index)

    with np.errstate(all="ignore"):
        lifted = xp.astype(logits, compute_dtype(dtype, xp=xp), copy=False)
        rows = _measure(lifted, targets, label_smoothing, ignore_index, xp)
        saved = CrossEntropySaved(logits, targets, label_smoothing, ignore_index, weights, *rows)
        return xp.astype(mean_loss(saved.losses, what_counts(saved, xp), xp), dtype), saved


def cross_entropy_backward(dout: Array | float, saved: CrossEntropySaved, /) -> CrossEntropyGrads:
    """``dlogits = dout w / Σw (softmax(logits) - q)``, ``dweights = dout (l - out) / Σw``.

    Parameters
    ----------
    dout : float array () or number
        The cotangent of out; 1 for the gradient of the loss itself.
    saved : CrossEntropySaved
        From `cross_entropy_forward`.

    Returns
    -------
    CrossEntropyGrads
        ``dlogits``, 0 for tokens that do not count, and ``dweights``, 0 for tokens that are ignored. Everything is 0 where
        nothing counts.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "cross_entropy_backward"
    logits, label_smoothing = saved.logits, saved.label_smoothing
    xp = array_namespace(op, logits=logits)
    dtype = float_dtype(op, logits=logits)
    dout = host_cotangent(dout, logits, xp=xp)
    array_namespace(op, logits=logits, dout=dout)
    check_cotangent(op, "dout", dout, "()", (), dtype)
    with np.errstate(all="ignore"):
        targets, counts, weights, total = counted = what_counts(saved, xp)
        # out = Σ w l / Σ w
        factor = xp.astype(dout, weights.dtype) * reciprocal(total, xp=xp)
        dlosses = weights * factor
        dweights = None
        if saved.weights is not None:
            slope = (saved.losses - mean_loss(saved.losses, counted, xp)) * factor
            dweights = xp.astype(xp.where(counts & (total != 0), slope, 0.0), dtype, copy=False)
        # l = -Σ_v q_v log softmax(logits)_v
        lifted = xp.astype(logits, weights.dtype, copy=False)
        scale = dlosses[..., None] * reciprocal(saved.row_sum, xp=xp)
        dlogits = xp.exp(lifted - shift(saved.row_max, xp=xp)) * scale
        dlogits = _subtract_at(dlogits, targets, dlosses, xp)
        if label_smoothing:  # first the targets, then what is taken from them and given to all: exactly 0 if there is one class
            dlogits = dlogits - dlosses[..., None] * (label_smoothing / max(logits.shape[-1], 1))
            dlogits = _subtract_at(dlogits, targets, -label_smoothing * dlosses, xp)
        # selection, not multiplication: the logits of a token that does not count may be NaN
        live = (weights != 0) & (saved.row_sum[..., 0] != 0)
        if xp is not np or not live.all():
            dlogits = xp.where(live[..., None], dlogits, 0.0)
        return CrossEntropyGrads(xp.astype(dlogits, dtype, copy=False), dweights)


def _measure(
    logits: Array, targets: Array, label_smoothing: float, ignore_index: int | None, xp: Namespace
) -> tuple[Array, Array, Array]:
    """row_max and row_sum (..., 1), and the loss of every token (...), from lifted logits."""
    largest = row_max(logits, -1, xp=xp)
    shifted = logits - shift(largest, xp=xp)
    row_sum = xp.sum(xp.exp(shifted), axis=-1, keepdims=True, dtype=logits.dtype)
    picked = _pick(shifted, _safe(targets, logits, ignore_index, xp)[0], xp)
    losses = xp.log(or_one(row_sum[..., 0], xp=xp)) - (1 - label_smoothing) * picked
    if label_smoothing:
        losses = losses - label_smoothing / max(logits.shape[-1], 1) * xp.sum(shifted, axis=-1, dtype=logits.dtype)
    return largest, row_sum, losses


class _Counted(NamedTuple):
    """Which tokens count, and how much."""

    targets: Array  # (...), in range everywhere
    counts: Array  # (...), False where ignored
    weights: Array  # (...), 0 where ignored
    total: Array  # (), the sum of the weights


def what_counts(saved: CrossEntropySaved, xp: Namespace) -> _Counted:
    """Which tokens of a call count."""
    targets, counts = _safe(saved.targets, saved.logits, saved.ignore_index, xp)
    like = saved.losses
    weights = xp.ones_like(like) if saved.weights is None else xp.astype(saved.weights, like.dtype, copy=False)
    weights = xp.where(counts, weights, 0.0)
    return _Counted(targets, counts, weights, xp.sum(weights, dtype=like.dtype))


def _safe(targets: Array, logits: Array, ignore_index: int | None, xp: Namespace) -> tuple[Array, Array]:
    """The targets beside the logits, with 0 in the place of the ignored ones, and which are not ignored."""
    targets = beside(targets, logits, xp=xp)
    if ignore_index is None:
        return targets, targets == targets  # noqa: PLR0124 - all True, in the library and shape at hand
    counts = targets != ignore_index
    return xp.where(counts, targets, 0), counts


def mean_loss(losses: Array, counted: _Counted, xp: Namespace) -> Array:
    """Σ w l / Σ w; what does not count may be NaN or inf."""
    products = xp.where(counted.weights != 0, counted.weights * losses, 0.0)
    return xp.where(counted.total == 0, 0.0, xp.sum(products, dtype=losses.dtype) / or_one(counted.total, xp=xp))


def _pick(x: Array, targets: Array, xp: Namespace) -> Array:
    """``x[..., target]`` of every row."""
    if x.shape[-1] == 0:
        return xp.zeros(targets.shape, dtype=x.dtype, device=array_device(x))
    return xp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]


def _subtract_at(x: Array, targets: Array, amounts: Array, xp: Namespace) -> Array:
    """``x`` less an amount at the target of every row; a fresh ``x`` is NumPy's to overwrite."""
    if xp is not np:
        every = xp.arange(x.shape[-1], dtype=targets.dtype, device=array_device(x))
        return xp.where(every == targets[..., None], x - amounts[..., None], x)
    if x.shape[-1]:
        x[(*np.indices(targets.shape, sparse=True), targets)] -= amounts
    return x
