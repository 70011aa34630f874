"""Golden files: problems with float64 answers for test suites in any language, and the check of the answers that those write.

A folder of cases holds ``index.json``, and of every case NAME.npz and NAME.bin: the same arrays, in the second one after another
as raw little-endian numbers, at the offsets that the index has. Beside every answer stands how far from it another may be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn import __version__
from npattn._arrays.namespace import Array
from npattn._attention.mask_kinds import causal_mask, causal_mask_end, length_mask, window_mask
from npattn.layers.dropout import Dropout
from npattn.testing.candidates import Answer, naive
from npattn.testing.parts import default_scale, whole
from npattn.testing.plain import plain_mask
from npattn.testing.precision import to_bfloat16
from npattn.testing.problems import AttentionProblem, attention_problem
from npattn.testing.value_laws import oracle_bounds

KINDS = ("none", "causal", "causal_end", "window", "lengths", "mask")
OPTIONS = ("bias", "scale", "softcap", "sinks", "dlse", "factors")
RESULTS = Answer._fields


class Lengths(NamedTuple):
    """What every axis may be: one of these lengths."""

    B: Sequence[int] = (1, 2)
    H: Sequence[int] = (1, 2, 4)
    K: Sequence[int] | None = None  # any that divides H
    T: Sequence[int] = (1, 5, 16, 33)
    S: Sequence[int] | None = None  # as T
    D: Sequence[int] = (8, 16)
    E: Sequence[int] | None = None  # as D


def random_problem(
    rng: np.random.Generator, lengths: Lengths, *, dtype: str, masks: Sequence[str], options: Sequence[str]
) -> AttentionProblem:
    """A problem of these lengths: (B, H, T, D), (B, K, S, D), (B, K, S, E).

    Parameters
    ----------
    rng : numpy.random.Generator
        Where everything is drawn from.
    lengths : Lengths
        Of every axis.
    dtype : str
        As `attention_problem` takes it.
    masks : sequence of str
        Of ``KINDS``; one is drawn.
    options : sequence of str
        Of ``OPTIONS``; each is there in half of the problems.

    Returns
    -------
    AttentionProblem

    Raises
    ------
    ValueError
        If no K divides an H.
    """

    def pick(values: Sequence[Any]) -> Any:
        return values[int(rng.integers(len(values)))]

    B, H, T, D = (int(pick(values)) for values in (lengths.B, lengths.H, lengths.T, lengths.D))
    divisors = [n for n in (lengths.K or range(1, H + 1)) if H % n == 0]
    if not divisors:
        raise ValueError(f"no K among {', '.join(map(str, lengths.K or ()))} divides H = {H}")
    K, S, E = int(pick(divisors)), int(pick(lengths.S or lengths.T)), int(pick(lengths.E or [D]))
    given: dict[str, Any] = {}
    for option in options:
        if rng.integers(2):
            drawn: dict[str, dict[str, Any]] = {
                "bias": {"bias": (B, H, T, S)},
                "scale": {"scale": float(pick([1.0, 0.5, 0.1]))},
                "softcap": {"softcap": float(pick([5.0, 30.0]))},
                "sinks": {"sinks": True},
                "dlse": {"dlse": True},
                "factors": {"dropout": Dropout(float(pick([0.1, 0.5])), int(rng.integers(1000)))},
            }
            given |= drawn[option]
    mask: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "causal": causal_mask,
        "causal_end": causal_mask_end,
        "window": lambda: window_mask(int(rng.integers(T)), int(rng.integers(2))),
        "lengths": lambda: length_mask(rng.integers(0, S + 1, B).tolist()),
        "mask": lambda: None,
    }
    kind = pick(masks)
    problem = attention_problem(
        (B, H, T, D), (B, K, S, D), (B, K, S, E), seed=int(rng.integers(1 << 30)), dtype=dtype, mask=mask[kind](), **given
    )
    if kind == "mask":  # too many numbers for the code of a problem
        seen = problem.rng("mask").random(problem.pairs) < 0.8
        name = f"np.random.default_rng([{problem.seed}, *b'mask']).random({problem.pairs}) < 0.8"
        problem = problem.replace(mask=seen)._replace(code=f"{problem!r}.replace(mask={name})")
    return problem


def case_arrays(problem: AttentionProblem) -> dict[str, Array]:
    """Inputs, float64 answers under the names of `Answer`, and their bounds under NAME_bound.

    Parameters
    ----------
    problem : AttentionProblem
        Any.

    Returns
    -------
    dict of str to array
        A mask is 0 and 1 in uint8; dropout stands as its factors.
    """
    full = whole(problem)
    inputs: dict[str, Any] = {name: getattr(full, name) for name in ("q", "k", "v", "dout", "dlse", "bias", "sinks")}
    if full.mask is not None:
        inputs["mask"] = full.mask.astype(np.uint8)
    if full.dropout is not None:
        inputs["factors"] = np.asarray(full.factors(), dtype=full.dtype)
    exact = naive(full)
    bounds = oracle_bounds(full, exact).given()
    answers = exact.given()
    return {
        **{name: x for name, x in inputs.items() if x is not None},
        **answers,
        **{f"{name}_bound": np.broadcast_to(bounds[name], x.shape) for name, x in answers.items()},
    }


def write_cases(
    folder: Path, problems: Sequence[AttentionProblem], *, note: str = "", tick: Callable[[], None] = lambda: None
) -> None:
    """Write problems with their answers.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    problems : sequence of AttentionProblem
        In order; their names are numbers.
    note : str, optional
        Kept in the index.
    tick : callable, optional
        Called after every case.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"npattn": __version__, "note": note, "byte_order": "little", "cases": []}
    for n, problem in enumerate(problems):
        name, arrays = f"{n:04}", case_arrays(problem)
        little: dict[str, Any] = {key: np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("<")) for key, x in arrays.items()}
        np.savez(folder / f"{name}.npz", **little)
        (folder / f"{name}.bin").write_bytes(b"".join(x.tobytes() for x in little.values()))
        index["cases"].append(_entry(name, problem, little))
        tick()
    (folder / "index.json").write_text(
        json.dumps(index, indent=1) + "\n", encoding="utf-8"
    )  # last: a folder without is not whole


def _entry(name: str, problem: AttentionProblem, arrays: Mapping[str, Array]) -> dict[str, Any]:
    offset, placed = 0, {}
    for key, x in arrays.items():
        placed[key] = {"dtype": x.dtype.name, "shape": list(x.shape), "offset": offset, "bytes": x.nbytes}
        offset += x.nbytes
    B, H, T, S = problem.pairs
    plain = {} if problem.mask is None else plain_mask(problem, ("causal", "causal_end", "window", "mask"), problem.lead)
    plain.pop("mask", None)
    return {
        "name": name,
        "lengths": {"B": B, "H": H, "K": problem.kv_heads, "T": T, "S": S, "D": problem.q.shape[-1], "E": problem.v.shape[-1]},
        "precision": problem.precision,
        "options": {**plain, "scale": default_scale(problem), "softcap": problem.softcap},
        "problem": repr(problem),
        "files": [f"{name}.npz", f"{name}.bin"],
        "arrays": placed,
    }


class Verdict(NamedTuple):
    """One answer of one case, held against ours; ``message`` is empty if it is right."""

    case: str
    result: str
    error: float
    share: float  # of the bound
    message: str


def verify(cases: Path, answers: Path, *, tolerance: float = 1.0) -> Iterator[Verdict]:
    """Hold a folder of answers against a folder of cases.

    Parameters
    ----------
    cases : Path
        Of `write_cases`.
    answers : Path
        With NAME.npz, or NAME.RESULT.bin of raw little-endian numbers of 2, 4 or 8 bytes; RESULT is a field of `Answer`. In the
        folder of the cases themselves only the latter are answers.
    tolerance : float, optional
        What every bound is multiplied by.

    Yields
    ------
    Verdict
        For every answer that is there.

    Raises
    ------
    ValueError
        If a folder holds no cases, or no answers.
    """
    try:
        index = json.loads((cases / "index.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{cases} holds no cases: index.json cannot be read ({error})") from None
    found = 0
    for entry in index["cases"]:
        with np.load(cases / f"{entry['name']}.npz") as ours:
            for result, given in _answers(answers, entry, same=answers.resolve() == cases.resolve()):
                found += 1
                yield _verdict(entry, result, given, ours[result], tolerance * ours[f"{result}_bound"])
    if not found:
        raise ValueError(f"{answers} holds no answers: NAME.npz, or NAME.RESULT.bin such as {index['cases'][0]['name']}.out.bin")


def _answers(folder: Path, entry: Mapping[str, Any], *, same: bool) -> Iterator[tuple[str, Array | str]]:
    """The answers of a case, as arrays, or why one cannot be read."""
    expected = [name for name in RESULTS if name in entry["arrays"]]
    packed = folder / f"{entry['name']}.npz"
    if packed.exists() and not same:
        with np.load(packed) as given:
            yield from ((name, given[name]) for name in expected if name in given)
    for name in expected:
        raw = folder / f"{entry['name']}.{name}.bin"
        if raw.exists():
            yield name, _raw(raw.read_bytes(), entry, entry["arrays"][name]["shape"])


def _raw(data: bytes, entry: Mapping[str, Any], shape: Sequence[int]) -> Array | str:
    count = math.prod(shape)
    size = len(data) // count if count else 0
    if count and (len(data) % count or size not in (2, 4, 8)):
        return f"{len(data)} bytes are not {count} numbers of 2, 4 or 8 bytes"
    if size == 2 and entry["precision"] == "bfloat16":
        bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)
        return to_bfloat16(bits.view(np.float32)).reshape(shape)
    return np.frombuffer(data, dtype=f"<f{size or 4}").reshape(shape)


def _verdict(entry: Mapping[str, Any], result: str, given: Array | str, wanted: Array, bound: Array) -> Verdict:
    if not isinstance(given, str) and given.shape != wanted.shape:
        given = f"its shape is {given.shape}, expected is {wanted.shape}"
    if isinstance(given, str):
        return Verdict(entry["name"], result, math.inf, math.inf, f"{entry['name']} {result}: {given}")
    given = given.astype(np.float64)
    with np.errstate(all="ignore"):
        off = np.where(given == wanted, 0.0, np.abs(given - wanted))
        off = np.where(np.isfinite(off), off, np.inf)
        share = np.where(off == 0, 0.0, off / bound)
    if not share.size or float(share.max()) <= 1:
        return Verdict(entry["name"], result, float(off.max(initial=0)), float(share.max(initial=0)), "")
    at = np.unravel_index(int(share.argmax()), share.shape)
    place = ", ".join(str(int(n)) for n in at)
    message = (
        f"{entry['name']} {result}[{place}]: expected {wanted[at]:.9g}, got {given[at]:.9g}; they may differ by {bound[at]:.3g}; "
        f"{int((share > 1).sum())} of {share.size} elements are wrong\nproblem: {entry['problem']}"
    )
    return Verdict(entry["name"], result, float(off.max()), float(share.max()), message)
