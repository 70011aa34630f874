"""Laws of what a call leaves alone: dtype, device, inputs, memory, and the bits of a second call."""

from __future__ import annotations

from typing import Any

import numpy as np

from npattn._arrays.namespace import array_device, dtype_name
from npattn.testing.candidates import Candidate
from npattn.testing.law import agree, broken, law, tolerances
from npattn.testing.libraries import to_numpy
from npattn.testing.problems import AttentionProblem


@law
def dtype_and_device_are_kept(candidate: Candidate, problem: AttentionProblem) -> None:
    """out and every gradient have the inputs' dtype and device, and each gradient its input's shape.

    Catches NumPy scalars that turn float32 into float64, and results on the default device.
    """
    inputs, results = candidate.run(problem, True)
    q = inputs["q"]
    for name, x in results.given().items():
        if name == "lse":
            continue
        if dtype_name(x.dtype) != dtype_name(q.dtype):
            raise broken(
                dtype_and_device_are_kept, candidate, problem, f"{name} is {dtype_name(x.dtype)}, q is {dtype_name(q.dtype)}"
            )
        if array_device(x) != array_device(q):
            raise broken(
                dtype_and_device_are_kept, candidate, problem, f"{name} is on {array_device(x)}, q is on {array_device(q)}"
            )
        if name != "out" and tuple(x.shape) != tuple(inputs[name[1:]].shape):
            raise broken(
                dtype_and_device_are_kept, candidate, problem, f"{name} has shape {x.shape}, its input {inputs[name[1:]].shape}"
            )


@law
def inputs_are_not_written(candidate: Candidate, problem: AttentionProblem) -> None:
    """No input and no cotangent has changed after forward and backward.

    Catches ``+=`` on a caller's array, and scratch memory that is a view of an input.
    """
    inputs = candidate.run(problem, True).inputs
    before = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": problem.dout}
    agree(inputs_are_not_written, candidate, problem, {name: to_numpy(inputs[name]) for name in before}, before)


@law
def nothing_is_shared(candidate: Candidate, problem: AttentionProblem) -> None:
    """No result shares memory with an input or with another result.

    Catches results that are views: a caller who writes into one changes the other.
    """
    inputs, results = candidate.run(problem, True)
    given = list(results.given().items())
    for n, (name, x) in enumerate(given):
        for other, y in [*inputs.items(), *given[:n]]:
            if shares_memory(x, y):
                raise broken(nothing_is_shared, candidate, problem, f"{name} shares memory with {other}")


def shares_memory(x: Any, y: Any) -> bool:
    """Whether two arrays of a library with mutable arrays may lie in the same memory."""
    if 0 in x.shape or 0 in y.shape:
        return False
    library = type(x).__module__.partition(".")[0]
    if library == "torch":
        return bool(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr())
    if library == "array_api_strict":
        x, y = x._array, y._array
    elif library == "cupy":
        import cupy  # cupy only

        return bool(cupy.may_share_memory(x, y))  # cupy only
    return isinstance(x, np.ndarray) and np.may_share_memory(x, y)


@law
def the_same_bits_again(candidate: Candidate, problem: AttentionProblem) -> None:
    """A second call with the same inputs gives the same bits.

    Catches uninitialised memory, hidden random numbers, and sums whose order depends on threads.
    """
    first = candidate.answer(problem)
    agree(the_same_bits_again, candidate, problem, candidate.answer(problem)._asdict(), first._asdict())


@law
def memory_layout_does_not_matter(candidate: Candidate, problem: AttentionProblem) -> None:
    """Strided, reversed, transposed, broadcast, unaligned, byte-swapped inputs give what contiguous copies give.

    Catches reshapes of views, and strides that are ignored.
    """

    def copy(x: Any) -> Any:
        return None if x is None else np.array(x, dtype=x.dtype.newbyteorder("="), order="C")

    plain = problem.replace(**{name: copy(getattr(problem, name)) for name in ("q", "k", "v", "dout", "dlse", "sinks")})
    expected = candidate.answer(plain)._asdict()
    agree(
        memory_layout_does_not_matter,
        candidate,
        problem,
        candidate.answer(problem)._asdict(),
        expected,
        tolerances(problem, of=candidate),
    )
