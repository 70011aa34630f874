"""An attention under test: a function from a problem to results and gradients, whatever library it is written in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from npattn._attention.attention import attention_backward, attention_forward
from npattn._attention.biases import LazyBias
from npattn._attention.tiling import Sizes, forced
from npattn.testing.dense import lazy_bias_gradient
from npattn.testing.libraries import Library, to_numpy
from npattn.testing.oracle import naive_backward, naive_forward
from npattn.testing.problems import AttentionProblem


class Answer(NamedTuple):
    """Results and gradients of an attention, or something of the same shapes; ``None`` for what there is not."""

    out: Any
    lse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None

    def given(self) -> dict[str, Any]:
        """What there is, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Run(NamedTuple):
    """What a candidate was given and what it gave back, in arrays of its own library."""

    inputs: dict[str, Any]
    results: Answer


class Candidate(NamedTuple):
    """An attention under test."""

    name: str
    run: Callable[[AttentionProblem, bool], Run]  # the problem, and whether to go backward as well
    tolerance: float = 1.0  # what every bound is multiplied by
    products: str | None = None  # the precision that factors of its matrix products are rounded to, if coarser than its results
    noise: float = 0.0  # the share of a result's largest number that a law puts down to rounding, but for the oracle's law
    watch: Callable[[str, float, float], None] | None = (
        None  # told of every comparison: the law, the error, its share of the bound
    )

    def answer(self, problem: AttentionProblem, *, backward: bool = True) -> Answer:
        """Its results in NumPy."""
        results = self.run(problem, backward).results
        return Answer(*(None if x is None else to_numpy(x) for x in results))

    def out(self, problem: AttentionProblem) -> Any:
        """Its forward result in NumPy."""
        return self.answer(problem, backward=False).out


def npattn_candidate(library: Library | None = None, *, dtype: str | None = None, sizes: Sizes | None = None) -> Candidate:
    """npattn's own attention, on a library, in a dtype, with forced tile sizes if given.

    Parameters
    ----------
    library : Library, optional
        NumPy with the problem's own arrays, as they lie in memory, by default.
    dtype : str, optional
        The problem's own by default.
    sizes : Sizes, optional
        Tile sizes and path, forced.

    Returns
    -------
    Candidate
    """

    def run(problem: AttentionProblem, backward: bool) -> Run:
        inputs = problem.inputs(library, dtype)
        with (
            contextlib.nullcontext() if sizes is None else forced(sizes),
            contextlib.nullcontext() if library is None else library.active(),
        ):
            out, saved = attention_forward(inputs.q, inputs.k, inputs.v, **inputs.options)
            grads = attention_backward(inputs.dout, saved, dlse=inputs.dlse) if backward else ()
            return Run(inputs.arrays(), Answer(out, saved.lse, *grads))

    name = "-".join(str(part) for part in ("npattn", library and library.name, dtype, sizes and tuple(sizes)) if part)
    return Candidate(name, run)


def naive(problem: AttentionProblem, dtype: Any = np.float64, *, backward: bool = True) -> Answer:
    """The oracle's answer to a problem, or that of the naive formula in another precision.

    Parameters
    ----------
    problem : AttentionProblem
        The problem.
    dtype : dtype, optional
        The precision of every step.
    backward : bool, optional
        Whether gradients are wanted.

    Returns
    -------
    Answer
        In NumPy.
    """
    options = problem.dense_options()
    done = naive_forward(problem.q, problem.k, problem.v, **options, dtype=dtype)
    if not backward:
        return Answer(done.out, done.lse)
    grads = naive_backward(problem.dout, problem.q, problem.k, problem.v, dlse=problem.dlse, **options, dtype=dtype)
    dbias = lazy_bias_gradient(problem.bias, grads.dbiased) if isinstance(problem.bias, LazyBias) else grads.dbias
    return Answer(done.out, done.lse, grads.dq, grads.dk, grads.dv, dbias, grads.dsinks)


naive_candidate = Candidate("naive", lambda problem, backward: Run(problem.inputs().arrays(), naive(problem, backward=backward)))
