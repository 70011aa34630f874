"""Multi-head attention in the layouts of Flax, Keras and Equinox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npattn._arrays.host import to_numpy
from npattn._attention.multi_head import MultiHeadParams
from npattn.interop._entries import (
    LAYOUTS,
    Entry,
    Exported,
    Imported,
    as_state,
    bias_of_heads,
    heads_to_rows,
    read,
    rows_to_heads,
    same,
    write,
)
from npattn.interop._trees import leaves

# Flax ------------------------------------------------------------------------------------------------------------------------


def _flax(names: set[str], *_: int) -> list[Entry]:
    """Shapes have the heads."""
    return _flax_entries(biases="query.bias" in names)


def _flax_entries(*, biases: bool) -> list[Entry]:
    called = {"query": "q", "key": "k", "value": "v", "out": "o"}
    axes = {"query": "CHD", "key": "cKD", "value": "dKE", "out": "HEo"}
    found = [same(f"{name}.kernel", f"w_{end}", axes[name]) for name, end in called.items()]
    if biases:
        found += [
            same(f"{name}.bias", f"b_{end}", axes[name][2:] if name == "out" else axes[name][1:]) for name, end in called.items()
        ]
    return found


LAYOUTS["from_flax_attention"] = _flax


def from_flax_attention(source: Mapping[str, Any], /) -> Imported:
    """The weights of Flax's ``MultiHeadDotProductAttention`` or ``MultiHeadAttention``: the same arrays under other names.

    Parameters
    ----------
    source : mapping
        ``query``, ``key``, ``value`` and ``out``, each with ``kernel`` and perhaps ``bias``; nested, or with dots in the names.

    Returns
    -------
    Imported
        ``params`` (a `npattn.MultiHeadParams` of NumPy arrays) and ``config``, which is ``None``.

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over, such as the norms of
        ``normalize_qk``.
    TypeError
        If it is no mapping, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import MultiHeadParams
    >>> params = MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2)
    >>> from_flax_attention(to_flax_attention(params).state).params.w_o.shape
    (2, 2, 4)
    """
    op = "from_flax_attention"
    return Imported(leaves(MultiHeadParams, read(op, as_state(op, source), 1), ""), None)


def to_flax_attention(params: MultiHeadParams, /) -> Exported:
    """Our parameters in the layout of Flax's attention.

    Parameters
    ----------
    params : MultiHeadParams
        Without sinks; with all biases or none.

    Returns
    -------
    Exported
        ``state``, a nested dict of NumPy arrays, and ``settings``.

    Raises
    ------
    ValueError
        If Flax's module cannot hold them.

    Examples
    --------
    See `from_flax_attention`.
    """
    state = write("to_flax_attention", _flax_entries(biases=params.b_q is not None), params)
    nested: dict[str, dict[str, Any]] = {}
    for name, x in state.items():
        first, last = name.split(".")
        nested.setdefault(first, {})[last] = x
    _, heads, size = params.w_q.shape
    settings = {
        "num_heads": heads,
        "qkv_features": heads * size,
        "out_features": params.w_o.shape[2],
        "use_bias": params.b_q is not None,
    }
    return Exported(nested, settings)


# Keras -----------------------------------------------------------------------------------------------------------------------

_KERAS = ["query.kernel", "query.bias", "key.kernel", "key.bias", "value.kernel", "value.bias", "out.kernel", "out.bias"]


def from_keras_attention(weights: Sequence[Any], /) -> Imported:
    """The weights of Keras's ``MultiHeadAttention`` or ``GroupedQueryAttention``, as ``layer.get_weights()`` lists them.

    Parameters
    ----------
    weights : sequence of arrays
        Kernel and bias, or kernels alone, of query, key, value, output. (A *call* of the layer has query, value, key.)

    Returns
    -------
    Imported
        ``params`` (a `npattn.MultiHeadParams` of NumPy arrays) and ``config``, which is ``None``.

    Raises
    ------
    ValueError
        If there are not eight or four, or shapes do not fit.
    TypeError
        If dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import MultiHeadParams
    >>> params = MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2, bias=False)
    >>> from_keras_attention(to_keras_attention(params).state).params.w_q.shape
    (4, 2, 2)
    """
    op = "from_keras_attention"
    if len(weights) not in (4, 8):
        raise ValueError(
            f"{op}: expected 8 arrays (kernel and bias of query, key, value, output) or 4 without biases, got {len(weights)}"
        )
    names = _KERAS if len(weights) == 8 else _KERAS[::2]
    state = {name: to_numpy(x) for name, x in zip(names, weights, strict=True)}
    return Imported(leaves(MultiHeadParams, read(op, state, 1, layout=_flax), ""), None)


def to_keras_attention(params: MultiHeadParams, /) -> Exported:
    """Our parameters as ``layer.set_weights`` of Keras's attention takes them.

    Parameters
    ----------
    params : MultiHeadParams
        Without sinks; with all biases or none.

    Returns
    -------
    Exported
        ``state``, a list of NumPy arrays, and ``settings``; with fewer key/value heads, those of ``GroupedQueryAttention``.

    Raises
    ------
    ValueError
        If Keras's layer cannot hold them.

    Examples
    --------
    See `from_keras_attention`.
    """
    state = write("to_keras_attention", _flax_entries(biases=params.b_q is not None), params)
    _, heads, size = params.w_q.shape
    settings: dict[str, Any] = {"use_bias": params.b_q is not None}
    if params.w_k.shape[1] == heads:
        settings |= {"num_heads": heads, "key_dim": size, "value_dim": params.w_v.shape[2]}
    else:
        settings |= {"num_query_heads": heads, "num_key_value_heads": params.w_k.shape[1], "head_dim": size}
    return Exported([state[name] for name in _KERAS if name in state], settings)


# Equinox ---------------------------------------------------------------------------------------------------------------------


def _equinox(names: set[str], heads: int, kv_heads: int) -> list[Entry]:
    return _equinox_entries(heads, kv_heads, biases={n[0] for n in names if n.endswith("_proj.bias")})


def _equinox_entries(heads: int, kv_heads: int, *, biases: set[str]) -> list[Entry]:
    found = [
        rows_to_heads("query_proj.weight", "w_q", "QC", heads),
        rows_to_heads("key_proj.weight", "w_k", "Kc", kv_heads),
        rows_to_heads("value_proj.weight", "w_v", "Ud", kv_heads),
        heads_to_rows("output_proj.weight", "w_o", "oA", heads),
    ]
    if "q" in biases:
        found.append(bias_of_heads("query_proj.bias", "b_q", "Q", heads))
    if "k" in biases:
        found.append(bias_of_heads("key_proj.bias", "b_k", "K", kv_heads))
    if "v" in biases:
        found.append(bias_of_heads("value_proj.bias", "b_v", "U", kv_heads))
    if "o" in biases:
        found.append(same("output_proj.bias", "b_o", "o"))
    return found


LAYOUTS["from_equinox_attention"] = _equinox


def from_equinox_attention(source: Any, /, *, heads: int | None = None) -> Imported:
    """The weights of Equinox's ``MultiheadAttention``.

    Parameters
    ----------
    source : module or mapping
        The module itself, or ``query_proj.weight`` and so on with their arrays.
    heads : int, optional
        H; needed for a mapping.

    Returns
    -------
    Imported
        ``params`` (a `npattn.MultiHeadParams` of NumPy arrays) and ``config``, which is ``None``.

    Raises
    ------
    ValueError
        If names or shapes are not those of this module, with what is missing and left over.
    TypeError
        If it is no mapping, or dtypes differ.

    Examples
    --------
    >>> import numpy as np
    >>> from npattn import MultiHeadParams
    >>> params = MultiHeadParams.init(np.random.default_rng(0), width=4, heads=2, bias=False)
    >>> from_equinox_attention(to_equinox_attention(params).state, heads=2).params.w_q.shape
    (4, 2, 2)
    """
    op = "from_equinox_attention"
    if hasattr(source, "query_proj"):
        heads = source.num_heads
        projections = {name: getattr(source, name) for name in ("query_proj", "key_proj", "value_proj", "output_proj")}
        parts = {f"{name}.{part}": getattr(p, part) for name, p in projections.items() for part in ("weight", "bias")}
        source = {name: x for name, x in parts.items() if x is not None}
    if heads is None:
        raise ValueError(f"{op}: heads is needed: a mapping does not say how many there are")
    return Imported(leaves(MultiHeadParams, read(op, as_state(op, source), heads), ""), None)


def to_equinox_attention(params: MultiHeadParams, /) -> Exported:
    """Our parameters in the layout of Equinox's attention.

    Parameters
    ----------
    params : MultiHeadParams
        Without sinks, with as many key/value heads as query heads.

    Returns
    -------
    Exported
        ``state`` (names and NumPy arrays, for ``equinox.tree_at``) and ``settings``.

    Raises
    ------
    ValueError
        If Equinox's module cannot hold them.

    Examples
    --------
    See `from_equinox_attention`.
    """
    op = "to_equinox_attention"
    _, heads, size = params.w_q.shape
    if params.w_k.shape[1] != heads:
        raise ValueError(f"{op}: Equinox's attention has as many key/value heads as query heads, got K = {params.w_k.shape[1]}")
    biases = {end for end in "qkvo" if getattr(params, f"b_{end}") is not None}
    settings = {
        "num_heads": heads,
        "query_size": params.w_q.shape[0],
        "key_size": params.w_k.shape[0],
        "value_size": params.w_v.shape[0],
        "output_size": params.w_o.shape[2],
        "qk_size": size,
        "vo_size": params.w_v.shape[2],
        **{f"use_{name}_bias": name[0] in biases for name in ("query", "key", "value", "output")},
    }
    return Exported(write(op, _equinox_entries(heads, heads, biases=biases), params), settings)
