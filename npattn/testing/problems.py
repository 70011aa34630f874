"""A whole attention problem as one value: inputs, options and cotangents, with a repr that is the code which rebuilds it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.biases import LazyBias, alibi_bias, relative_bias
from npattn.layers.dropout import Dropout
from npattn.testing.as_code import call_code, literal_code
from npattn.testing.dense import dense_bias, dense_mask
from npattn.testing.inputs import Inputs, bias_with, mask_in
from npattn.testing.layouts import laid_out
from npattn.testing.libraries import Library, asarray
from npattn.testing.precision import FloatInfo, float_info, to_bfloat16

EXTREMES = ("large scores", "far keys", "far bias", "huge values", "tiny values", "tiny keys")
INFINITE = ("infinite bias",)  # rows that see it are NaN, and with them the gradients of keys that they share


class Alibi(NamedTuple):
    """Stands for an ``alibi_bias`` with random slopes."""

    heads: int
    offset: int = 0


class Relative(NamedTuple):
    """Stands for a ``relative_bias`` with a random table."""

    buckets: int
    heads: int
    offset: int = 0
    bidirectional: bool = True
    max_distance: int = 16


class AttentionProblem(NamedTuple):
    """Inputs, options and cotangents of one attention, in NumPy arrays; `attention_problem` makes one.

    ``repr`` is code: evaluate it with npattn's and npattn.testing's names at hand to have the same arrays again.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array | None = None
    mask: Any = None
    bias: Any = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Array | None = None
    dropout: Dropout | None = None
    rounded: str | None = None  # "bfloat16" where the float32 arrays hold numbers that it has, and results are rounded to it
    seed: int = 0
    code: str = ""

    def __repr__(self) -> str:
        return self.code or literal_code(self)

    def replace(self, **changes: Any) -> AttentionProblem:
        """The same problem with other arrays or options."""
        return self._replace(code="", **changes)

    def rng(self, purpose: str) -> np.random.Generator:
        """Random numbers that depend on the problem's seed and on what they are for."""
        return np.random.default_rng([self.seed, *purpose.encode()])

    @property
    def dtype(self) -> Any:
        """The dtype of the inputs, in native byte order."""
        return self.q.dtype.newbyteorder("=")

    @property
    def precision(self) -> str:
        """The name of what results are rounded to."""
        return self.rounded or str(self.dtype.name)

    @property
    def is_half(self) -> bool:
        """Whether that is a float of 16 bits."""
        return self.precision in ("float16", "bfloat16")

    @property
    def has_heads(self) -> bool:
        """Whether some input has rank 3 or more."""
        return any(x.ndim > 2 for x in (self.q, self.k, self.v))

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes, broadcast."""
        return np.broadcast_shapes(*(x.shape[:-3] for x in (self.q, self.k, self.v)))

    @property
    def heads(self) -> int:
        """H."""
        return self.q.shape[-3] if self.q.ndim > 2 else 1

    @property
    def kv_heads(self) -> int:
        """K."""
        of_k, of_v = (x.shape[-3] if x.ndim > 2 else 1 for x in (self.k, self.v))
        return of_k if of_v == 1 else of_v

    @property
    def pairs(self) -> tuple[int, ...]:
        """(..., H, T, S)."""
        return (*self.lead, self.heads, self.q.shape[-2], self.k.shape[-2])

    def dense_mask(self) -> Array | None:
        """The mask by its definition, (..., H, T, S)."""
        return dense_mask(self.mask, self.lead, *self.pairs[-3:])

    def dense_bias(self) -> Array | None:
        """The bias, a lazy one by its definition, in float64, broadcasting to (..., H, T, S)."""
        return dense_bias(self.bias, *self.pairs[-3:])

    def visible(self) -> Array:
        """Which query sees which key by mask and bias, (..., H, T, S)."""
        seen = np.ones(self.pairs, dtype=bool)
        mask, bias = self.dense_mask(), self.dense_bias()
        if mask is not None:
            seen &= mask
        return seen if bias is None else seen & (bias != -np.inf)

    def factors(self) -> Array | None:
        """Dropout's factors, (..., H, T, S), in float64."""
        if self.dropout is None:
            return None
        *lead, heads, queries, keys = self.pairs
        index = np.indices((math.prod(lead), heads, queries, keys), dtype=np.int32)
        kept = self.dropout.factors(*index, xp=np, dtype=np.float64) != 0  # the numbers by definition, not the package's
        return np.where(kept, 1 / (1 - self.dropout.rate), 0.0).reshape(self.pairs)

    def dense_options(self) -> dict[str, Any]:
        """The options as `naive_forward` takes them."""
        return {
            "mask": self.dense_mask(),
            "bias": self.dense_bias(),
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "factors": self.factors(),
        }

    def options(self) -> dict[str, Any]:
        """The options that are given, as ``npattn.attention`` takes them."""
        named = {name: getattr(self, name) for name in ("mask", "bias", "scale", "softcap", "sinks", "dropout")}
        return {name: value for name, value in named.items() if value is not None}

    def inputs(self, library: Library | None = None, dtype: str | None = None) -> Inputs:
        """The problem in another library; as it lies in memory if neither library nor dtype is given."""
        if library is None and dtype is None:
            return Inputs(self.q, self.k, self.v, self.options(), self.dout, self.dlse)
        library = library or Library("numpy", np)
        name = dtype or self.dtype.name

        def convert(x: Array | None, to: str = name) -> Any:
            return None if x is None else asarray(x, library, dtype=to)

        options = self.options()
        if "mask" in options:
            options["mask"] = mask_in(self.mask, lambda x: asarray(x, library))
        if "bias" in options:
            parameters = self.bias.parameters if isinstance(self.bias, LazyBias) else self.bias
            options["bias"] = bias_with(self.bias, convert(parameters))
        if "sinks" in options:
            options["sinks"] = convert(self.sinks)
        lifted = "float32" if name in ("float16", "bfloat16") else name
        q, k, v, dout = (convert(x) for x in (self.q, self.k, self.v, self.dout))
        return Inputs(q, k, v, options, dout, convert(self.dlse, lifted))


def attention_problem(
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    *,
    seed: int = 0,
    dtype: str = "float64",
    values: str = "normal",
    mask: Any = None,
    bias: Sequence[int] | Alibi | Relative | None = None,
    hidden: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dropout: Dropout | None = None,
    dlse: bool = False,
    extreme: Sequence[str] = (),
    layouts: Mapping[str, str] | None = None,
) -> AttentionProblem:
    """A problem of these shapes with random numbers from a seed.

    Parameters
    ----------
    q, k, v : sequence of int
        The shapes (..., H, T, D), (..., K, S, D), (..., K, S, E).
    seed : int, optional
        Every array has random numbers of its own from it, so that leaving an option out changes no other array.
    dtype : str, optional
        ``float64``, ``float32`` or ``float16``; or ``bfloat16``, whose numbers stand in float32 arrays.
    values : str, optional
        ``normal``, or ``integers``: small whole numbers, with many ties.
    mask : Mask or bool array, optional
        As ``npattn.attention`` takes it.
    bias : sequence of int, Alibi or Relative, optional
        The shape of a dense bias, or a lazy one.
    hidden : float, optional
        The share of a dense bias that is -inf.
    scale, softcap : float, optional
        As ``npattn.attention`` takes them.
    sinks : bool, optional
        Whether there are sinks.
    dropout : Dropout, optional
        As ``npattn.attention`` takes it.
    dlse : bool, optional
        Whether the log-sum-exp has a cotangent.
    extreme : sequence of str, optional
        Names from ``EXTREMES``, or ``infinite bias``: +inf in a bias.
    layouts : mapping of str to str, optional
        How arrays lie in memory, by name (q, k, v, bias, sinks, dout, dlse): names from ``layouts.LAYOUTS``. ``broadcast`` and
        ``overlapping`` repeat numbers, and so change the values.

    Returns
    -------
    AttentionProblem

    Examples
    --------
    >>> attention_problem((2, 3), (4, 3), (4, 5), softcap=2.0).dout.shape
    (2, 5)
    """
    given = dict(locals())
    layouts = layouts or {}

    rounded, held = ("bfloat16", "float32") if dtype == "bfloat16" else (None, dtype)

    def draw(name: str, shape: Sequence[int], to: str = dtype) -> Array:
        rng = np.random.default_rng([seed, *name.encode()])
        x = rng.integers(-2, 3, tuple(shape)) if values == "integers" else rng.standard_normal(tuple(shape))
        x = _extreme(name, np.asarray(x, dtype=np.float64), extreme, float_info(to), rng)
        if name == "bias" and hidden:
            x = np.where(rng.random(x.shape) < hidden, -np.inf, x)
        with np.errstate(all="ignore"):
            x = to_bfloat16(x) if to == "bfloat16" else x.astype(to)
        return laid_out(x, layouts.get(name, "read-only"))

    q_array, k_array, v_array = draw("q", q), draw("k", k), draw("v", v)
    made: Any = None
    if isinstance(bias, Alibi):
        made = alibi_bias(draw("bias", (bias.heads,)), offset=bias.offset)
    elif isinstance(bias, Relative):
        made = relative_bias(
            draw("bias", (bias.buckets, bias.heads)), **{k: v for k, v in bias._asdict().items() if k not in ("buckets", "heads")}
        )
    elif bias is not None:
        made = draw("bias", bias)
    problem = AttentionProblem(
        q_array, k_array, v_array, q_array, None, mask, made, scale, softcap, None, dropout, rounded, seed, call_code(given)
    )
    rows = problem.pairs[:-1] if problem.has_heads else problem.pairs[-2:-1]
    return problem._replace(
        dout=draw("dout", (*rows, v[-1])),
        dlse=draw("dlse", rows, "float32" if dtype == "float16" else held) if dlse else None,
        sinks=draw("sinks", (problem.heads,)) if sinks else None,
    )


def _extreme(name: str, x: Array, extreme: Sequence[str], info: FloatInfo, rng: np.random.Generator) -> Array:
    """Numbers far from 1 where asked for."""
    small, huge = info.smallest_normal, info.max
    for kind in extreme:
        if kind not in (*EXTREMES, *INFINITE):
            raise ValueError(f"attention_problem: extreme must be among {', '.join((*EXTREMES, *INFINITE))}, got {kind!r}")
        if kind == "large scores" and name in ("q", "k"):
            x = x * 30
        elif kind == "far keys" and name == "k":
            x = x + 100
        elif kind == "far bias" and name == "bias":
            x = x * 1e3 + 1e3 * rng.standard_normal()
        elif kind == "infinite bias" and name == "bias":
            chosen = rng.random(x.shape)
            x = np.where((chosen < 0.2) | (chosen == chosen.max(initial=0)), np.inf, x)
        elif kind == "huge values" and name == "v":
            x = x * math.sqrt(huge)
        elif (kind == "tiny values" and name == "v") or (kind == "tiny keys" and name == "k"):
            x = x * small / 8  # below the normal numbers
    return x
