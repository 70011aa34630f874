"""Where a token stands: the sinusoidal table, and rotary positions.

Learned positions are an embedding of the positions: ``embedding(table, np.arange(T))``, added to the tokens. Tables and angles
are computed in float64 wherever positions are numbers on the host, and cast last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.blocks import map_rows
from npattn._arrays.checks import check_broadcasts, check_cotangent, host_float, host_int, shape_error
from npattn._arrays.namespace import (
    Array,
    Namespace,
    array_device,
    array_namespace,
    asarray,
    compute_dtype,
    dtype_name,
    float_dtype,
)
from npattn._arrays.trees import tree_repr
from npattn.layers._ids import as_ids, beside, foreign


def sinusoidal_positions(
    T: int, C: int, *, base: float = 10000.0, offset: int = 0, xp: Namespace = np, dtype: Any = None, device: Any = None
) -> Array:
    """``table[p, 2i] = sin(p / base^(2i/C))``, ``table[p, 2i + 1] = cos(p / base^(2i/C))``: what is added to the tokens.

    Parameters
    ----------
    T : int
        How many positions.
    C : int
        The width of the tokens. If it is odd, the last sine has no cosine.
    base : float, optional
        The ratio of the longest wavelength to the shortest, about.
    offset : int, optional
        The first position: ``offset=n`` continues a table of n rows.
    xp : namespace, optional
        The library of the table.
    dtype : dtype, optional
        The library's default float dtype by default (NumPy: float64).
    device : device, optional
        For libraries with devices.

    Returns
    -------
    array (T, C)
        Computed in float64 and then cast.

    Raises
    ------
    ValueError
        If a size is negative or base is not positive.
    TypeError
        If a size or the offset is not an integer.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), section 3.5; docs/derivation.md, "Positions".

    Examples
    --------
    >>> sinusoidal_positions(2, 3).round(4)
    array([[0.    , 1.    , 0.    ],
           [0.8415, 0.5403, 0.0022]])
    """
    op = "sinusoidal_positions"
    rows, columns = host_int(op, "T", T, least=0), host_int(op, "C", C, least=0)
    base, offset = host_float(op, "base", base, positive=True), host_int(op, "offset", offset)
    pairs = -(-columns // 2)
    angles = (offset + np.arange(rows))[:, None] * base ** (-2.0 * np.arange(pairs) / max(columns, 1))
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(rows, 2 * pairs)[:, :columns]
    return asarray(np.ascontiguousarray(table), xp=xp, device=device, dtype=xp.zeros(1).dtype if dtype is None else dtype)


class Rotary(NamedTuple):
    """How `rotate` turns vectors: a frozen setting, to stand beside parameters.

    Pair n of the features of a vector at position p is turned by the angle ``p * scale * base ** (-2n / size)``.

    Parameters
    ----------
    base : float, optional
        The larger, the slower the slowest pairs turn.
    pairs : str, optional
        ``"halves"``: pair n is features n and n + size/2 (GPT-NeoX, Llama in most libraries). ``"interleaved"``: features 2n
        and 2n + 1 (the paper, GPT-J). Weights of the one kind are no weights of the other.
    scale : float, optional
        Positions are multiplied by it: with 0.25 a model made for 2048 positions reaches 8192.
    size : int, optional
        Only the first ``size`` features turn; all by default.
    positions : int or integer array (..., T), optional
        The position of the first row (also as an array without axes, such as a number on a device), or of every row, where the
        leading axes are those before the head axis.
    key_positions : int or integer array (..., S), optional
        Those of the keys in `npattn.multi_head_attention`; ``positions`` by default.

    Examples
    --------
    >>> Rotary(base=500000.0)._replace(positions=7).positions
    7
    """

    base: float = 10000.0
    pairs: str = "halves"
    scale: float = 1.0
    size: int | None = None
    positions: Any = 0
    key_positions: Any = None

    def of_keys(self) -> Rotary:
        """The same for keys: their positions in the place of the queries'."""
        return self if self.key_positions is None else self._replace(positions=self.key_positions)

    def checked(self, op: str, x: Array) -> Rotary:
        """The same with host numbers, and the number of x's features that turn; or a clear error."""
        if not isinstance(self, Rotary):
            raise TypeError(f"{op}: rotary must be a Rotary(base, pairs, ...), got {type(self).__name__}")
        if self.pairs not in ("halves", "interleaved"):
            raise ValueError(f"{op}: the pairs of rotary must be 'halves' or 'interleaved', got {self.pairs!r}")
        size = x.shape[-1] if self.size is None else host_int(op, "the size of rotary", self.size, least=0)
        if size > x.shape[-1] or size % 2:
            raise ValueError(f"{op}: the size of rotary must be even and at most D = {x.shape[-1]}, got {size}")
        positions = as_ids(op, "the positions of rotary", self.positions)
        check_broadcasts(op, "the positions of rotary", positions.shape, (*x.shape[:-3], x.shape[-2]), "(..., T)")
        base = host_float(op, "the base of rotary", self.base, positive=True)
        scale = host_float(op, "the scale of rotary", self.scale)
        return self._replace(base=base, scale=scale, size=size, positions=positions)


class RotateSaved(NamedTuple):
    """What `rotate_backward` needs: the setting, and the shape and dtype of x; no array but positions on a device."""

    rotary: Rotary
    shape: tuple[int, ...]
    dtype: Any


class RotateGrads(NamedTuple):
    """Gradients of `rotate`."""

    dx: Array

    def __repr__(self) -> str:
        return tree_repr(self)


def rotate(x: Array, /, rotary: Rotary = Rotary()) -> Array:  # noqa: B008 - it is frozen
    """Turn pairs of features by angles that grow with the position; see `rotate_forward`."""
    return rotate_forward(x, rotary)[0]


def rotate_forward(x: Array, /, rotary: Rotary = Rotary()) -> tuple[Array, RotateSaved]:  # noqa: B008
    """``out = R_p x``: every pair ``(a, b)`` of the features at position p becomes ``(a cos - b sin, b cos + a sin)``.

    Parameters
    ----------
    x : float array (..., H, T, D)
        Queries or keys of H heads; (T, D) without heads.
    rotary : Rotary, optional
        Which features are pairs, how fast they turn, and the positions.

    Returns
    -------
    out : array (..., H, T, D)
        In x's dtype; float16 and bfloat16 are computed in float32. Angles are computed in float64 where the library has it.
    saved : RotateSaved
        For `rotate_backward`. Holds no array: the angles are made again.

    Raises
    ------
    ValueError
        If the number of features that turn is odd or exceeds D, positions do not fit, or a number is out of range.
    TypeError
        If x is not a floating array, or libraries or devices differ.

    Notes
    -----
    Lengths do not change, and the inner product of a rotated query and a rotated key depends on the difference of their positions
    alone. Derivation: docs/derivation.md, "Positions".

    References
    ----------
    Su et al.: RoFormer: Enhanced Transformer with Rotary Position Embedding (2021), equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> rotate(np.asarray([[1.0, 0.0], [1.0, 0.0]])).round(4)
    array([[1.    , 0.    ],
           [0.5403, 0.8415]])
    """
    xp = array_namespace("rotate", x=x)
    dtype = float_dtype("rotate", x=x)
    if x.ndim < 2:
        shape_error("rotate", "x", "(..., H, T, D) or (T, D)", x.shape)
    saved = RotateSaved(Rotary.checked(rotary, "rotate", x), tuple(x.shape), dtype)
    array_namespace("rotate", x=x, positions=foreign(saved.rotary.positions))
    return _turn(x, saved, 1.0, xp), saved


def rotate_backward(dout: Array, saved: RotateSaved, /) -> RotateGrads:
    """``dx = R_pᵀ dout``: turned back, by the negative angles.

    Parameters
    ----------
    dout : float array (..., H, T, D)
        The cotangent of out.
    saved : RotateSaved
        From `rotate_forward`.

    Returns
    -------
    RotateGrads
        ``dx``.

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    op = "rotate_backward"
    xp = array_namespace(op, dout=dout, positions=foreign(saved.rotary.positions))
    check_cotangent(op, "dout", dout, "(..., H, T, D)", saved.shape, saved.dtype)
    return RotateGrads(_turn(dout, saved, -1.0, xp))


def _turn(x: Array, saved: RotateSaved, direction: float, xp: Namespace) -> Array:
    """Forwards or backwards."""
    rotary, _, dtype = saved
    size = rotary.size or 0
    compute = compute_dtype(dtype, xp=xp)

    def rows_turned(x: Array, cos: Array, sin: Array) -> tuple[Array]:
        x = xp.astype(x, compute, copy=False)
        if xp is np:
            x = np.ascontiguousarray(x)  # heads are often a view, whose products are slow
        turning = x[..., :size]
        # (a, b) becomes (a, b) cos + (-b, a) sin, with the sign in sin
        turned = turning * cos + _partners(turning, rotary.pairs, xp) * sin
        turned = turned if size == x.shape[-1] else xp.concat([turned, x[..., size:]], axis=-1)
        return (xp.astype(turned, dtype, copy=False),)

    cos, sin = _waves(rotary, x, direction, compute, xp)
    return map_rows(rows_turned, x, cos, sin, xp=xp)[0]


def _partners(x: Array, pairs: str, xp: Namespace) -> Array:
    """``x`` with the two features of every pair exchanged."""
    half = x.shape[-1] // 2
    axis, split = (-1, (half, 2)) if pairs == "interleaved" else (-2, (2, half))
    return xp.reshape(xp.flip(xp.reshape(x, (*x.shape[:-1], *split)), axis=axis), x.shape)


def _waves(rotary: Rotary, x: Array, direction: float, dtype: Any, xp: Namespace) -> tuple[Array, Array]:
    """cos and signed sin of the angle of every feature, which broadcast to (..., H, T, size), with the first axis whole."""
    size, positions, device = rotary.size or 0, rotary.positions, array_device(x)
    pairs, signs = np.arange(size // 2), np.asarray([-1.0, 1.0]) * direction  # of the first and the second of a pair
    frequencies = rotary.scale * rotary.base ** (-2.0 * pairs / max(size, 1))
    if isinstance(positions, np.ndarray):
        positions = positions + np.arange(x.shape[-2]) if positions.ndim == 0 else positions
        angles = positions[..., None] * frequencies
        waves = [asarray(wave, xp=xp, dtype=dtype, device=device) for wave in (np.cos(angles), np.sin(angles))]
    else:
        exact = xp.float64 if dtype_name(xp.asarray(0).dtype) == "int64" else xp.float32  # a JAX without 64-bit dtypes
        if positions.ndim == 0:
            positions = positions + xp.arange(x.shape[-2], dtype=positions.dtype, device=device)
        angles = xp.astype(positions, exact)[..., None] * asarray(frequencies, xp=xp, dtype=exact, device=device)
        waves = [xp.astype(wave, dtype) for wave in (xp.cos(angles), xp.sin(angles))]
    if rotary.pairs == "interleaved":
        pair_of, sign_of = np.repeat(pairs, 2), np.tile(signs, size // 2)
    else:
        pair_of, sign_of = np.tile(pairs, 2), np.repeat(signs, size // 2)
    pair_of, sign_of = beside(pair_of, x, xp=xp), asarray(sign_of, xp=xp, dtype=dtype, device=device)
    cos, sin = (xp.take(wave, pair_of, axis=-1) for wave in waves)
    # (T, size), or with leading axes, after which the head axis has its place
    lead = cos.shape[:-2]
    shape = (*(1,) * (x.ndim - 3 - len(lead)), *lead, *(1,) * (x.ndim > 2), *cos.shape[-2:])
    whole = (x.shape[0], *shape[1:])
    return xp.broadcast_to(xp.reshape(cos, shape), whole), xp.broadcast_to(xp.reshape(sin * sign_of, shape), whole)
