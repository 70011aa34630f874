"""A plain function as a candidate: problems become what it says it takes, arrays and plain values, and its results come back.

What a law makes of a problem may be more than the function takes (another mask, one query, no leading axes). Where it can be
said in the function's own terms, it is; otherwise `Unsupported` says what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn.testing.candidates import Answer, Candidate, Run
from npattn.testing.dense import Band
from npattn.testing.libraries import Library, asarray, to_numpy
from npattn.testing.oracle import sum_to_shape
from npattn.testing.parts import narrowed, whole
from npattn.testing.precision import to_bfloat16
from npattn.testing.problems import AttentionProblem

# what arrives as a keyword of the same name
MASK_OPTIONS = ("causal", "causal_end", "window", "lengths", "mask")
OPTIONS = (*MASK_OPTIONS, "bias", "scale", "softcap", "sinks", "factors", "dlse")
# what problems may be like
SHAPES = ("grouped", "broadcast", "hiding bias", "dead rows")


class Unsupported(Exception):
    """A problem is more than a candidate takes; ``what`` is the option, the axis or the property."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the candidate does not take: {what}")
        self.what = what


class CandidateRaised(AssertionError):
    """A candidate raised an error of its own on a problem that it said it takes; ``law`` is the law that made it."""

    law: str = ""


class Takes(NamedTuple):
    """What a function takes."""

    options: Collection[str]
    ranks: Sequence[int]
    library: Library
    dtype: str
    layouts: bool  # whether arrays come as they lie in memory


class _Form(NamedTuple):
    """A problem as a function takes it: as it is, or written out with these leading axes, with or without a head axis."""

    problem: AttentionProblem
    takes: Takes
    lead: tuple[int, ...]
    heads: bool
    as_is: bool

    def rows(self, x: Array) -> Array:
        """(..., H, T, ·), or with K and S, in the form."""
        if self.as_is:
            return x
        return x.reshape(*self.lead, *x.shape[-3:]) if self.heads else x.reshape(x.shape[-2:])

    def pairs(self, x: Array) -> Array:
        """(..., H, T, S) in the form."""
        return self.rows(x) if self.heads or not self.as_is else x.reshape(x.shape[-2:])

    def convert(self, x: Array, dtype: str | None = None) -> Any:
        """A float array in the library and dtype that the function takes."""
        name = self.takes.dtype if dtype is None else dtype
        if self.takes.library.name != "numpy":
            return asarray(x, self.takes.library, dtype=name)
        if name == "bfloat16":
            return to_bfloat16(x)
        return x if self.takes.layouts and self.as_is else np.array(x, dtype=name, order="C")

    def needs(self, option: str, drop: str) -> None:
        """Raise `Unsupported` unless the function takes an option; ``drop`` is what the problem has of it."""
        if option not in self.takes.options:
            raise Unsupported(drop)


def plain_candidate(name: str, function: Callable[..., Any], vjp: Callable[..., Any] | None, takes: Takes) -> Candidate:
    """A function, and its backward if there is one, as a candidate.

    Parameters
    ----------
    name : str
        For messages.
    function : callable
        ``function(q, k, v, **options)`` gives out, or (out, lse).
    vjp : callable, optional
        ``vjp(dout, q, k, v, **options)`` gives (out, dq, dk, dv), or a mapping or NamedTuple with fields of `Answer`.
    takes : Takes
        What it may be given.

    Returns
    -------
    Candidate
        Its ``run`` raises `Unsupported` for a problem that the function does not take.
    """

    def run(problem: AttentionProblem, backward: bool) -> Run:
        form = _form(problem, takes)
        inputs, options = _arrays(form)
        options |= _plain_options(form)
        dout, dlse = inputs["dout"], inputs.get("dlse")
        q, k, v = (inputs[x] for x in ("q", "k", "v"))
        try:
            with takes.library.active(), np.errstate(all="ignore"):
                if backward and vjp is not None:
                    given = vjp(dout, q, k, v, **options, **({} if dlse is None else {"dlse": dlse}))
                    answer = _gradients(given)
                else:
                    given = function(q, k, v, **options)
                    answer = Answer(*given[:2]) if isinstance(given, (tuple, list)) else Answer(given)
        except Exception as error:
            text = f"{name} raised {type(error).__name__}: {error}\nproblem: {problem!r}"
            raise CandidateRaised(text) from error
        if not form.as_is:
            answer = narrowed(problem, _written_out(form.problem, answer))
        elif answer.dbias is not None and tuple(answer.dbias.shape) != problem.bias.shape:
            answer = answer._replace(dbias=sum_to_shape(to_numpy(answer.dbias), problem.bias.shape))
            inputs["bias"] = problem.bias
        return Run(inputs, answer)

    return Candidate(name, run)


def _form(problem: AttentionProblem, takes: Takes) -> _Form:
    """The form to bring a problem into."""
    lead, heads, kv_heads = problem.lead, problem.heads, problem.kv_heads
    if heads != kv_heads and "grouped" not in takes.options:
        raise Unsupported("grouped")
    own = len(lead) + 3 if problem.has_heads else 2
    shapes = [x.shape[:-2] for x in (problem.q, problem.k, problem.v)]
    alike = shapes[1] == shapes[2] and shapes[0][:-1] == shapes[1][:-1] and len(shapes[0]) == len(shapes[1])
    if own in takes.ranks and ("broadcast" in takes.options or alike):
        return _Form(problem, takes, lead, problem.has_heads, as_is=True)
    full, count = whole(problem), math.prod(lead)
    if own in takes.ranks:
        return _Form(full, takes, lead, problem.has_heads, as_is=False)
    for rank in takes.ranks:
        if rank > 3:
            return _Form(full, takes, (count, *(1,) * (rank - 4)), heads=True, as_is=False)
        if count == 1 and (rank == 3 or heads == kv_heads == 1):
            return _Form(full, takes, (), heads=rank == 3, as_is=False)
    raise Unsupported("ranks")


def _arrays(form: _Form) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every float array by name, and those of them that are options."""
    problem, takes, options = form.problem, form.takes, {}
    arrays = {name: form.convert(form.rows(getattr(problem, name))) for name in ("q", "k", "v", "dout")}
    if problem.bias is not None:
        form.needs("bias", "bias")
        bias = problem.dense_bias()
        assert bias is not None
        if np.isinf(bias).any():
            form.needs("hiding bias", "bias")
        if not ("broadcast" in takes.options and form.as_is):
            bias = form.pairs(np.broadcast_to(bias, problem.pairs))
        arrays["bias"] = options["bias"] = form.convert(np.asarray(bias, dtype=problem.dtype))
    if problem.sinks is not None:
        form.needs("sinks", "sinks")
        arrays["sinks"] = options["sinks"] = form.convert(problem.sinks)
    if problem.dropout is not None:
        form.needs("factors", "dropout")
        options["factors"] = form.convert(form.pairs(np.asarray(problem.factors())))
    if problem.dlse is not None:
        form.needs("dlse", "dlse")
        lifted = "float32" if takes.dtype in ("float16", "bfloat16") else takes.dtype
        arrays["dlse"] = form.convert(problem.dlse if form.as_is else form.rows(problem.dlse[..., None])[..., 0], lifted)
    return arrays, options


def _plain_options(form: _Form) -> dict[str, Any]:
    """The options that are not float arrays."""
    problem = form.problem
    options: dict[str, Any] = {}
    seen = problem.visible()
    if "dead rows" not in form.takes.options and not seen.any(axis=-1).all():
        mask = problem.dense_mask()
        raise Unsupported("bias" if mask is None or mask.any(axis=-1).all() else "mask")
    if problem.mask is not None:
        options |= plain_mask(problem, form.takes.options, form.lead)
        if "mask" in options:
            options["mask"] = asarray(form.pairs(options["mask"]), form.takes.library)
    for name in ("scale", "softcap"):
        if (value := getattr(problem, name)) is not None:
            form.needs(name, name)
            options[name] = value
    return options


def plain_mask(problem: AttentionProblem, options: Collection[str], lead: tuple[int, ...]) -> dict[str, Any]:
    """The mask of a problem in the terms of ``options``; an array as an array, (..., H, T, S), if that is taken."""
    mask = problem.dense_mask()
    assert mask is not None
    if isinstance(problem.mask, np.ndarray) and "mask" in options:
        return {"mask": mask}
    i, j = np.ogrid[: mask.shape[-2], : mask.shape[-1]]
    last = np.where(mask.any(axis=(-3, -2)), np.arange(1, mask.shape[-1] + 1), 0).max(axis=-1, initial=0)
    inside = j < last[..., None, None, None]
    bands: list[tuple[dict[str, Any], Any]] = [({}, True)]
    if "causal" in options:
        bands.append(({"causal": True}, j <= i))
    if "causal_end" in options:
        bands.append(({"causal_end": True}, j <= i + mask.shape[-1] - mask.shape[-2]))
    if "window" in options:
        bands.append(_window(problem, mask, i, j))
    for lengths in ({}, {"lengths": last.reshape(lead)}):
        for band, pairs in bands:
            found = {**band, **lengths}
            if found and (not lengths or "lengths" in options) and (mask == (pairs & inside if lengths else pairs)).all():
                return found
    if "mask" in options:
        return {"mask": mask}
    raise Unsupported("mask")


def _window(problem: AttentionProblem, mask: Array, i: Array, j: Array) -> tuple[dict[str, Any], Any]:
    """The sides of a window, or the narrowest that has every visible pair inside."""
    match problem.mask:
        case Band(name="window_mask", left=left, right=right, offset=offset) if not np.any(offset):
            pass
        case _:
            left, right = (int(max(0, np.where(mask, d, 0).max(initial=0))) for d in (i - j, j - i))
    pairs = ((left is None) | (j >= i - (left or 0))) & ((right is None) | (j <= i + (right or 0)))
    return {"window": (left, right)}, pairs


def _gradients(given: Any) -> Answer:
    if hasattr(given, "_asdict"):
        given = given._asdict()
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in Answer._fields]
        if unknown:
            raise TypeError(f"vjp gave {', '.join(unknown)}; its results are {', '.join(Answer._fields)}")
        return Answer(**given)
    if len(given) != 4:
        raise TypeError(f"vjp gave {len(given)} arrays, not (out, dq, dk, dv); more go into a dict by name")
    out, dq, dk, dv = given
    return Answer(out, None, dq, dk, dv)


def _written_out(problem: AttentionProblem, answer: Answer) -> Answer:
    """Results in NumPy and in the shapes of a problem that `whole` has made."""
    rows = problem.pairs[:-1]
    shapes: dict[str, tuple[int, ...]] = {
        "out": (*rows, problem.v.shape[-1]), "lse": rows, "dq": problem.q.shape, "dk": problem.k.shape, "dv": problem.v.shape,
        "dbias": problem.pairs, "dsinks": (problem.heads,),
    }  # fmt: skip
    return Answer(None)._replace(**{name: to_numpy(x).reshape(shapes[name]) for name, x in answer.given().items()})
