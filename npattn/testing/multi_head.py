"""A whole multi-head attention as one value, and the naive form that it is held against: projections, loops, a sum over heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_map
from npattn._attention.multi_head import MultiHeadParams, multi_head_attention_backward, multi_head_attention_forward
from npattn.layers.dropout import Dropout
from npattn.testing.as_code import code_of
from npattn.testing.gradients import check_backward
from npattn.testing.inputs import mask_in
from npattn.testing.libraries import Library, asarray, to_numpy
from npattn.testing.oracle import naive_forward
from npattn.testing.problems import AttentionProblem


class MultiHeadProblem(NamedTuple):
    """Parameters, inputs, options and a cotangent of one multi-head attention; `multi_head_problem` makes one.

    ``repr`` is the code that rebuilds it.
    """

    params: MultiHeadParams
    x_q: Array
    x_kv: Array
    dout: Array
    options: dict[str, Any]
    seed: int
    code: str

    def __repr__(self) -> str:
        return self.code

    def inner(self) -> AttentionProblem:
        """The attention inside, on projected queries, keys and values; its cotangents are not those of this problem."""
        params = self.params

        def project(x: Array, w: Array, b: Array | None) -> Array:
            heads = np.einsum("...tc,chd->...htd", x, w)
            return heads if b is None else heads + b[:, None, :]

        q = project(self.x_q, params.w_q, params.b_q)
        k, v = project(self.x_kv, params.w_k, params.b_k), project(self.x_kv, params.w_v, params.b_v)
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
        dout = np.ones((*lead, *q.shape[-3:-1], v.shape[-1]))
        return AttentionProblem(q, k, v, dout, sinks=params.sinks, seed=self.seed, **self.options)


def multi_head_problem(
    x_q: Sequence[int],
    x_kv: Sequence[int],
    *,
    heads: int,
    kv_heads: int | None = None,
    head_size: int = 2,
    value_size: int | None = None,
    out_width: int | None = None,
    biased: bool = True,
    sinks: bool = False,
    mask: Any = None,
    bias: Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: Dropout | None = None,
    seed: int = 0,
) -> MultiHeadProblem:
    """A problem of these shapes with random numbers from a seed, in float64.

    Parameters
    ----------
    x_q, x_kv : sequence of int
        The shapes (..., T, C) and (..., S, C) of what queries, and keys and values, come from.
    heads, kv_heads, head_size, value_size, out_width : int
        H, K, D, E and the width of the output, as `MultiHeadParams.init` takes them.
    biased, sinks : bool, optional
        Whether there are biases of the projections, and sinks; both random.
    mask : Mask or bool array, optional
        As `multi_head_attention` takes it.
    bias : sequence of int, optional
        The shape of an additive bias.
    scale, softcap : float, optional
        As `multi_head_attention` takes them.
    dropout : Dropout, optional
        As `multi_head_attention` takes it.
    seed : int, optional
        Of everything.

    Returns
    -------
    MultiHeadProblem

    Examples
    --------
    >>> multi_head_problem((3, 4), (5, 6), heads=2, kv_heads=1).params.w_k.shape
    (6, 1, 2)
    """
    given = dict(locals())
    rng = np.random.default_rng(seed)
    params = MultiHeadParams.init(
        rng,
        width=x_q[-1],
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=value_size,
        kv_width=x_kv[-1],
        out_width=out_width,
        bias=biased,
        sinks=sinks,
    )
    params = tree_map(lambda x: x if x.any() else rng.standard_normal(x.shape), params)  # no bias and no sink is 0
    lead = np.broadcast_shapes(tuple(x_q)[:-2], tuple(x_kv)[:-2])
    options: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "dropout": dropout}
    options["bias"] = None if bias is None else rng.standard_normal(tuple(bias))
    dout = rng.standard_normal((*lead, x_q[-2], params.w_o.shape[-1]))
    return MultiHeadProblem(
        params,
        rng.standard_normal(tuple(x_q)),
        rng.standard_normal(tuple(x_kv)),
        dout,
        {name: value for name, value in options.items() if value is not None},
        seed,
        _code(given),
    )


def _code(given: dict[str, Any]) -> str:
    shapes = ", ".join(str(tuple(given.pop(name))) for name in ("x_q", "x_kv"))
    defaults = {"head_size": 2, "biased": True, "sinks": False, "seed": 0}
    options = [
        f"{name}={code_of(value)}"
        for name, value in given.items()
        if value is not None and (name == "mask" or defaults.get(name) != value)
    ]
    return f"multi_head_problem({', '.join([shapes, *options])})"


def naive_multi_head(problem: MultiHeadProblem) -> Array:
    """The output as a sum over heads of attention in plain loops.

    Parameters
    ----------
    problem : MultiHeadProblem
        Any.

    Returns
    -------
    numpy.ndarray
        (..., T, C), in float64.
    """
    inner = problem.inner()
    heads = naive_forward(inner.q, inner.k, inner.v, **inner.dense_options()).out
    out = np.einsum("...hte,hec->...tc", heads, problem.params.w_o)
    return out if problem.params.b_o is None else out + problem.params.b_o


def check_multi_head(
    problem: MultiHeadProblem, library: Library | None = None, *, watch: Callable[[str, float, float], None] | None = None
) -> None:
    """Raise unless npattn's multi-head attention has the naive form's values, and the gradients that differences have.

    Parameters
    ----------
    problem : MultiHeadProblem
        Any.
    library : Library, optional
        Whose arrays to compute with; NumPy's by default.
    watch : callable, optional
        Told of every comparison: what, the error, its share of the bound.

    Raises
    ------
    AssertionError
        With the problem as code.
    """
    library = library or Library("numpy", np)

    def convert(x: Array) -> Any:
        return asarray(x, library)

    options = dict(problem.options)
    if "mask" in options:
        options["mask"] = mask_in(options["mask"], convert)
    bias = options.pop("bias", None)
    args = {"params": tree_map(convert, problem.params), "x_q": convert(problem.x_q), "x_kv": convert(problem.x_kv)}
    if bias is not None:
        args["bias"] = convert(bias)

    def forward(params: Any, x_q: Any, x_kv: Any, bias: Any = None) -> Any:
        return multi_head_attention_forward(params, x_q, x_kv, bias=bias, **options)

    with library.active():
        expected, got = naive_multi_head(problem), to_numpy(forward(*args.values())[0])
        same = got.shape == expected.shape
        off, allowed = np.abs(got - expected).max(initial=0) if same else np.inf, 1e-12 * (1 + np.abs(expected).max(initial=0))
        told = watch or (lambda *_: None)
        told("out", float(off), float(off / allowed))
        if not off <= allowed:
            raise AssertionError(f"multi_head_attention: expected {expected}, got {got}\nproblem: {problem!r}")
        try:
            check_backward(
                forward,
                multi_head_attention_backward,
                args,
                seed=problem.seed,
                watch=lambda off, bound: told("gradients", off, off / bound if bound else 0.0),
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\nproblem: {problem!r}") from None
