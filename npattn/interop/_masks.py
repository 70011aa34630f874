"""Masks of PyTorch's modules, in which True says what is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._arrays.checks import check_bool, host_int, shape_error
from npattn._arrays.host import to_numpy
from npattn._arrays.namespace import Array


def mask_from_torch(*, attn_mask: Any = None, key_padding_mask: Any = None, heads: int | None = None) -> Array:
    """The masks of PyTorch's modules as one of ours: True where a query may attend to a key.

    Parameters
    ----------
    attn_mask : bool array (T, S) or (B·H, T, S), optional
        True where a pair is ignored: ``attn_mask``, ``src_mask``, ``tgt_mask``, ``memory_mask``.
    key_padding_mask : bool array (B, S) or (S,), optional
        True where a key is ignored.
    heads : int, optional
        H, for an ``attn_mask`` with three axes.

    Returns
    -------
    bool NumPy array
        It broadcasts to (B, H, T, S).

    Raises
    ------
    TypeError
        If a mask is not boolean: one of numbers is added to the scores, and goes to ``bias=``.
    ValueError
        If there is no mask, or a shape does not fit.

    Notes
    -----
    ``torch.nn.functional.scaled_dot_product_attention`` has masks of our sign, which need no conversion.

    Examples
    --------
    >>> import numpy as np
    >>> mask_from_torch(key_padding_mask=np.asarray([[False, False, True]]))
    array([[[[ True,  True, False]]]])
    """
    op, parts = "mask_from_torch", []
    if attn_mask is not None:
        pairs = _ignored(op, "attn_mask", attn_mask)
        if pairs.ndim == 3:
            if heads is None or pairs.shape[0] % host_int(op, "heads", heads, least=1):
                shape_error(op, "attn_mask", f"(B·H, T, S) with H = heads = {heads}", pairs.shape)
            pairs = pairs.reshape(-1, heads, *pairs.shape[1:])
        elif pairs.ndim != 2:
            shape_error(op, "attn_mask", "(T, S) or (B·H, T, S)", pairs.shape)
        parts.append(pairs)
    if key_padding_mask is not None:
        keys = _ignored(op, "key_padding_mask", key_padding_mask)
        if keys.ndim not in (1, 2):
            shape_error(op, "key_padding_mask", "(B, S) or (S,)", keys.shape)
        parts.append(keys[..., None, None, :])
    if not parts:
        raise ValueError(f"{op}: there is no mask")
    return ~parts[0] if len(parts) == 1 else ~(parts[0] | parts[1])


def mask_to_torch(mask: Any, /) -> Array:
    """One of our masks as an array in which True says what is ignored.

    Parameters
    ----------
    mask : bool array
        True where a query may attend to a key; ``mask.to_array(T, S)`` makes one of a Mask.

    Returns
    -------
    bool NumPy array
        Of the same shape. Modules of PyTorch take (T, S) and (B·H, T, S).

    Raises
    ------
    TypeError
        If the mask is not boolean.

    Examples
    --------
    >>> from npattn import causal_mask
    >>> mask_to_torch(causal_mask().to_array(2, 2))
    array([[False,  True],
           [False, False]])
    """
    found = to_numpy(mask)
    check_bool("mask_to_torch", "mask", found)
    return np.logical_not(found)


def _ignored(op: str, name: str, mask: Any) -> np.ndarray[Any, Any]:
    found = to_numpy(mask)
    check_bool(op, name, found, "something is ignored")
    return found
