"""Tokens as vectors: a row of a table for each, with their positions and types added, and a norm. Wiring only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.broadcast import broadcast_shapes, unbroadcast
from npattn._arrays.checks import host_int, shape_error
from npattn._arrays.namespace import Array, Namespace, array_device, array_namespace, float_dtype
from npattn._arrays.trees import with_tree_repr
from npattn.layers._ids import as_ids
from npattn.layers._parameters import Parameters, check_sizes
from npattn.layers.dropout import Dropout, DropoutSaved
from npattn.layers.embedding import EmbeddingSaved, embedding_backward, embedding_forward
from npattn.layers.positions import sinusoidal_positions
from npattn.models._residual import add, drop_backward, drop_forward
from npattn.models.config import EmbeddingConfig
from npattn.models.norm import NormParams, NormSaved, norm_backward, norm_forward


@with_tree_repr
class TokenEmbeddingParams(NamedTuple):
    """The parameters of `token_embedding`, and the type of their gradients."""

    tokens: Array  # (V, C)
    positions: Array | None = None  # (P, C): as many as can be told apart
    types: Array | None = None  # (N, C): BERT has two, for the first and the second sentence
    norm: NormParams | None = None

    @classmethod
    def init(
        cls,
        rng: np.random.Generator,
        *,
        vocabulary: int,
        width: int,
        context: int | None = None,
        types: int | None = None,
        norm: bool = False,
        std: float = 0.02,
        config: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008 - it is frozen
        xp: Namespace = np,
        dtype: Any = None,
        device: Any = None,
    ) -> TokenEmbeddingParams:
        """Normal tables.

        Parameters
        ----------
        rng : numpy.random.Generator
            Where the tables are drawn from.
        vocabulary : int
            V.
        width : int
            C.
        context : int, optional
            P, the number of learned positions; needed where the config says that they are learned.
        types : int, optional
            N; without it tokens have no types.
        norm : bool, optional
            Whether the sum is normalised.
        std : float, optional
            The standard deviation of the tables' elements.
        config : EmbeddingConfig, optional
            Where positions come from, and the kind of the norm.
        xp : namespace, optional
            The library of the parameters.
        dtype : dtype, optional
            The library's default float dtype by default (NumPy: float64).
        device : device, optional
            For libraries with devices.

        Returns
        -------
        TokenEmbeddingParams

        Raises
        ------
        ValueError
            If a size is less than 1, or the context is missing.

        Examples
        --------
        >>> import numpy as np
        >>> TokenEmbeddingParams.init(np.random.default_rng(0), vocabulary=50, width=8, context=16)
        TokenEmbeddingParams(tokens=float64[50, 8], positions=float64[16, 8], types=None, norm=None)
        """
        op = "TokenEmbeddingParams.init"
        check_sizes(op, vocabulary=vocabulary, width=width)
        if context is None and config.positions == "learned":
            raise ValueError(f"{op}: context is needed, the number of positions: the config says that they are learned")
        new = Parameters(xp, dtype, device)

        def table(name: str, rows: int | None) -> Array:
            return new.array(std * rng.standard_normal((host_int(op, name, rows, least=1), width)))

        return cls(
            table("vocabulary", vocabulary),
            table("context", context) if config.positions == "learned" else None,
            None if types is None else table("types", types),
            NormParams.init(width=width, bias=config.norm == "layer", xp=xp, dtype=dtype, device=device) if norm else None,
        )


@with_tree_repr
class TokenEmbeddingSaved(NamedTuple):
    """What `token_embedding_backward` needs: what its parts saved."""

    tokens: EmbeddingSaved
    positions: EmbeddingSaved | None
    types: EmbeddingSaved | None
    norm: NormSaved | None
    dropout: DropoutSaved | None


@with_tree_repr
class TokenEmbeddingGrads(NamedTuple):
    """Gradients of `token_embedding`."""

    dparams: TokenEmbeddingParams


def token_embedding(
    params: TokenEmbeddingParams,
    ids: Any,
    /,
    *,
    types: Any = None,
    positions: Any = 0,
    dropout: Dropout | None = None,
    config: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008
) -> Array:
    """Rows of tables, added; see `token_embedding_forward`."""
    return token_embedding_forward(params, ids, types=types, positions=positions, dropout=dropout, config=config)[0]


def token_embedding_forward(
    params: TokenEmbeddingParams,
    ids: Any,
    /,
    *,
    types: Any = None,
    positions: Any = 0,
    dropout: Dropout | None = None,
    config: EmbeddingConfig = EmbeddingConfig(),  # noqa: B008
) -> tuple[Array, TokenEmbeddingSaved]:
    """``out = dropout(norm(scale · tokens[ids] + positions + types))``, of which only the first must be there.

    Parameters
    ----------
    params : TokenEmbeddingParams
        Tables, and the norm if there is one.
    ids : integer array (..., T), or Python integers
        Tokens, as in `npattn.layers.embedding_forward`.
    types : integer array (..., T), or Python integers, optional
        Of the tokens; type 0 by default where the parameters have types.
    positions : int or integer array (..., T), optional
        The position of the first token, or of every one. Sinusoidal positions are host data.
    dropout : Dropout, optional
        Drops elements of out.
    config : EmbeddingConfig, optional
        Where positions come from, the scale, and the kind of the norm.

    Returns
    -------
    out : array (..., T, C)
        In the tables' dtype.
    saved : TokenEmbeddingSaved
        For `token_embedding_backward`.

    Raises
    ------
    ValueError
        If shapes do not fit, an id or a position on the host is out of range, or the parameters lack what the config asks for.
    TypeError
        If dtypes, libraries or devices differ.

    References
    ----------
    Vaswani et al.: Attention Is All You Need (2017), sections 3.4 and 3.5; docs/derivation.md, "Blocks and models".

    Examples
    --------
    >>> import numpy as np
    >>> params = TokenEmbeddingParams.init(np.random.default_rng(0), vocabulary=50, width=8, context=16)
    >>> out, saved = token_embedding_forward(params, [[3, 1, 4], [1, 5, 9]])
    >>> out.shape, token_embedding_backward(out, saved).dparams.tokens.shape
    ((2, 3, 8), (50, 8))
    """
    op = "token_embedding"
    EmbeddingConfig.checked(config, op)
    ids = as_ids(op, "ids", ids)
    if ids.ndim < 1:
        shape_error(op, "ids", "(..., T)", ids.shape)
    x, saved_tokens = embedding_forward(params.tokens, ids, scale=config.scale)
    placed, saved_positions = _positions_forward(op, params, ids, positions, config)
    typed, saved_types = (None, None) if params.types is None else _types_forward(op, params, ids, types)
    x = add(x, placed, typed)
    saved_norm: NormSaved | None = None
    if params.norm is not None:
        x, saved_norm = norm_forward(op, params.norm, x, config)
    x, saved_dropout = drop_forward(x, dropout)
    return x, TokenEmbeddingSaved(saved_tokens, saved_positions, saved_types, saved_norm, saved_dropout)


def token_embedding_backward(dout: Array, saved: TokenEmbeddingSaved, /) -> TokenEmbeddingGrads:
    """The vector-Jacobian product of `token_embedding_forward`.

    Parameters
    ----------
    dout : float array (..., T, C)
        The cotangent of out.
    saved : TokenEmbeddingSaved
        From `token_embedding_forward`.

    Returns
    -------
    TokenEmbeddingGrads
        ``dparams`` (a TokenEmbeddingParams).

    Raises
    ------
    ValueError
        If dout has not the shape of out.
    TypeError
        If dtypes, libraries or devices differ.
    """
    dx, dnorm = drop_backward(dout, saved.dropout), None
    if saved.norm is not None:
        dx, dnorm = norm_backward(dx, saved.norm)
    tokens, positions, types = (None if s is None else _rows_backward(dx, s) for s in saved[:3])
    return TokenEmbeddingGrads(TokenEmbeddingParams(tokens, positions, types, dnorm))


def _rows_backward(dx: Array, saved: EmbeddingSaved) -> Array:
    """Rows that were added to several sequences have the sum of their cotangents."""
    xp = array_namespace("token_embedding_backward", dout=dx)
    return embedding_backward(unbroadcast(dx, (*saved.ids.shape, dx.shape[-1]), xp=xp), saved).dtable


def _positions_forward(
    op: str, params: TokenEmbeddingParams, ids: Array, positions: Any, config: EmbeddingConfig
) -> tuple[Array | None, EmbeddingSaved | None]:
    """What is added for the positions, and what the learned ones save."""
    if (config.positions == "learned") != (params.positions is not None):
        there = "has no" if params.positions is None else "has a"
        raise ValueError(f"{op}: the config says that positions are {config.positions}, but params {there} table of positions")
    if config.positions == "none":
        return None, None
    places = as_ids(op, "positions", positions)
    if places.ndim == 0 and isinstance(places, np.ndarray):
        places = places + np.arange(ids.shape[-1])
    elif places.ndim == 0:
        xp = array_namespace(op, positions=places)
        places = places + xp.arange(ids.shape[-1], dtype=places.dtype, device=array_device(places))
    if broadcast_shapes(places.shape, ids.shape) != tuple(ids.shape):
        shape_error(op, "positions", f"() or (..., T) that broadcasts to that of ids, {tuple(ids.shape)},", places.shape)
    if params.positions is None:
        return _sinusoids(op, params.tokens, places), None
    count = params.positions.shape[0]
    if isinstance(places, np.ndarray) and places.size and int(places.max()) >= count:
        raise ValueError(f"{op}: there are {count} learned positions, got a token at position {int(places.max())}")
    return embedding_forward(params.positions, places)


def _sinusoids(op: str, tokens: Array, places: Array) -> Array:
    """The rows of the table at positions on the host."""
    if not isinstance(places, np.ndarray):
        raise TypeError(f"{op}: sinusoidal positions must be integers on the host, got an array of another library")
    xp = array_namespace(op, tokens=tokens)
    first, last = (int(places.min()), int(places.max())) if places.size else (0, 0)
    place: dict[str, Any] = {"xp": xp, "dtype": float_dtype(op, tokens=tokens), "device": array_device(tokens)}
    table = sinusoidal_positions(last - first + 1, tokens.shape[1], offset=first, **place)
    return embedding_forward(table, places - first)[0]


def _types_forward(op: str, params: TokenEmbeddingParams, ids: Array, types: Any) -> tuple[Array, EmbeddingSaved]:
    types = np.zeros(ids.shape[-1:], dtype=np.int64) if types is None else as_ids(op, "types", types)
    if broadcast_shapes(types.shape, ids.shape) != tuple(ids.shape):
        shape_error(op, "types", f"(..., T) that broadcasts to that of ids, {tuple(ids.shape)},", types.shape)
    return embedding_forward(params.types, types)
