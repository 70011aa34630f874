"""The laws on an attention of your own: `check_attention` for all of them at once, `attention_checks` for one test each."""

from __future__ import annotations

import functools
import unittest
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from npattn.testing.candidates import Candidate, Run
from npattn.testing.law import LAWS, Law, LawBroken
from npattn.testing.laws import OF_GRADIENTS
from npattn.testing.libraries import Library, open_library
from npattn.testing.plain import MASK_OPTIONS, OPTIONS, SHAPES, CandidateRaised, Takes, Unsupported, plain_candidate
from npattn.testing.precision import PRECISIONS, coarsest, float_info
from npattn.testing.problems import AttentionProblem
from npattn.testing.scales import AUTODIFF

# From laws that few faults break to laws that any fault breaks: the first that is broken says the most.
ORDER = (
    "dtype_and_device_are_kept",
    "inputs_are_not_written",
    "nothing_is_shared",
    "the_same_bits_again",
    "memory_layout_does_not_matter",
    "scale_multiplies_the_scores",
    "values_enter_linearly",
    "cotangents_enter_linearly",
    "batched_is_looped",
    "grouped_is_repeated",
    "heads_are_independent",
    "queries_are_independent",
    "keys_have_no_order",
    "unseen_keys_leave_no_trace",
    "dead_rows_are_zero",
    "weights_sum_to_one_or_nothing",
    "outputs_lie_between_the_values",
    "moving_all_keys_changes_nothing",
    "a_number_added_to_a_row_changes_nothing",
    "repeated_keys_share_their_weight",
    "poison_stays_out",
    "poison_stays_where_it_is_seen",
    "broadcasting_is_repeating",
    "decoding_is_the_whole",
    "cuts_merge_to_the_whole",
    "score_gradients_of_a_row_sum_to_zero",
    "keys_moved_together_have_no_gradient",
    "products_with_gradients_agree",
    "gradients_are_derivatives",
    "is_what_the_loops_say",
    "is_as_precise_as_the_naive_formula",
)
CATCH_ALL = ORDER[-3:]
FIRST_ROUND = 20  # problems of every law, before any law has all of its own: a wrong candidate is soon found out
_DROPPED = (
    "mask",
    "bias",
    "scale",
    "softcap",
    "sinks",
    "dropout",
    "dlse",
)  # where a law makes more of them than a candidate takes
_WITHOUT_NUMBERS = ("dtype_and_device_are_kept", "nothing_is_shared")
_AXES = "BHKTSDE"


class Check(NamedTuple):
    """One law on random problems; call it to have it checked."""

    name: str  # of the law
    run: Callable[[], int]  # the number of problems that it could be checked on

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Check it; the test is skipped if the candidate takes nothing that the law could be checked on."""
        if not self.run():
            raise unittest.SkipTest(f"{self.name} has nothing to look at in what the candidate takes")


def check_attention(candidate: Callable[..., Any], /, **how: Any) -> dict[str, int]:
    """Raise unless an attention keeps every law and has the oracle's values and gradients.

    Parameters
    ----------
    candidate : callable
        ``candidate(q, k, v, **options)`` gives out, or (out, lse).
    **how
        As in `attention_checks`.

    Returns
    -------
    dict of str to int
        Every law, with the number of problems that it was checked on: 0 where the candidate takes nothing to check it on.

    Raises
    ------
    LawBroken
        Which law, expected and got, and a small problem as code. ``error.law`` is its name.
    CandidateRaised
        If the candidate raises an error on a problem that it is said to take.
    ValueError
        If an option or a law has no such name.

    Examples
    --------
    >>> import numpy as np
    >>> def attention(q, k, v):
    ...     scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    ...     weights = np.exp(scores)
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ v
    >>> held = check_attention(attention, examples=5)
    >>> held["keys_have_no_order"]
    5
    """
    examples = how.pop("examples", 50)
    if examples > FIRST_ROUND:
        for check in attention_checks(candidate, **how, examples=FIRST_ROUND):
            check.run()
    return {check.name: check.run() for check in attention_checks(candidate, **how, examples=examples)}


def attention_checks(
    candidate: Callable[..., Any],
    /,
    *,
    vjp: Callable[..., Any] | None = None,
    options: Collection[str] = (),
    ranks: Sequence[int] = (4,),
    library: str | Library = "numpy",
    dtype: str = "float64",
    products: str | None = None,
    tolerance: float = 1.0,
    layouts: Sequence[str] = (),
    extreme: Sequence[str] = (),
    max_side: int = 6,
    skip: Collection[str] = (),
    only: Collection[str] | None = None,
    examples: int = 50,
    seed: int = 0,
    name: str | None = None,
    **pins: Any,
) -> list[Check]:
    """What `check_attention` checks, one law each: for ``pytest.mark.parametrize("check", attention_checks(...), ids=str)``.

    Parameters
    ----------
    candidate : callable
        ``candidate(q, k, v, **options)`` gives out, or (out, lse).
    vjp : callable, optional
        ``vjp(dout, q, k, v, **options)`` gives (out, dq, dk, dv), or a dict or NamedTuple that may have lse, dbias, dsinks too.
    options : collection of str, optional
        What it takes. As keywords: ``causal=True`` (key j is visible to query i when j <= i), ``causal_end=True`` (the last query
        sees the last key), ``window=(left, right)``, ``lengths`` (...,), ``mask`` (..., H, T, S), ``bias`` (..., H, T, S),
        ``scale``, ``softcap``, ``sinks`` (H,), ``factors`` (..., H, T, S; dropout's), ``dlse`` (to vjp alone). As properties of
        problems: ``"grouped"``, fewer key/value heads; ``"broadcast"``, leading axes that differ, and a bias of any shape that
        broadcasts; ``"hiding bias"``, -inf in it; ``"dead rows"``, queries that see no key.
    ranks : sequence of int, optional
        Of q: 4 for (B, H, T, D), 3 for (H, T, D), 2 for (T, D). Problems of other ranks are brought to one of them.
    library : str or Library, optional
        Whose arrays it takes, by a name that `open_library` knows.
    dtype : str, optional
        ``float64``, ``float32``, ``float16`` or ``bfloat16``; NumPy has no bfloat16 and gets its numbers in float32.
    products : str, optional
        The precision that factors of its matrix products are rounded to, where it is coarser than that of the results (or than
        float32 for halves): ``tf32``, ``bfloat16``, ``float16``.
    tolerance : float, optional
        What every bound is multiplied by.
    layouts : sequence of str, optional
        How NumPy arrays may lie in memory, of ``LAYOUTS``; contiguous and writable by default.
    extreme : sequence of str, optional
        Extreme numbers that may be drawn, of ``EXTREMES``.
    max_side : int, optional
        The largest length drawn for an axis that is not pinned.
    skip, only : collection of str, optional
        Laws not to check: a known difference. Or the only ones to check.
    examples : int, optional
        Problems a law.
    seed : int, optional
        Of the problems: the same are drawn every time.
    name : str, optional
        For messages; the function's by default.
    **pins
        B, H, K, T, S, D, E as `attention_problems` takes them. Laws that would need another length are not checked.

    Returns
    -------
    list of Check
        The laws that name a fault first, then those that catch everything.

    Raises
    ------
    ValueError
        If an option, an axis or a law has no such name.
    Unavailable
        If there is no such library.
    """
    for what, given, known in (
        ("options", options, (*OPTIONS, *SHAPES)),
        ("skip", skip, tuple(LAWS)),
        ("only", only or (), tuple(LAWS)),
        ("axes", pins, tuple(_AXES)),
        ("dtype", [dtype], PRECISIONS),
        ("products", [products] if products else [], PRECISIONS),
    ):
        if unknown := [str(x) for x in given if x not in known]:
            raise ValueError(f"check_attention: {what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    opened = open_library(library) if isinstance(library, str) else library
    takes = Takes(frozenset(options), tuple(ranks), opened, dtype, bool(layouts))
    subject = plain_candidate(name or str(getattr(candidate, "__name__", "candidate")), candidate, vjp, takes)
    noise = tolerance * AUTODIFF * float_info(coarsest(dtype, products)).eps
    subject = subject._replace(tolerance=tolerance, products=products, noise=noise)
    needless = {
        *skip,
        *(() if vjp is not None else OF_GRADIENTS),
        *(() if "broadcast" in options or "mask" in options else ("broadcasting_is_repeating",)),
        "is_as_precise_as_the_naive_formula" if dtype == "float64" else "gradients_are_derivatives",
    }
    names = [x for x in ORDER if x not in needless and x in (only or LAWS)]
    drawn = functools.partial(_problems, takes, layouts=layouts, extreme=extreme, max_side=max_side, pins=pins)
    return [Check(x, functools.partial(check_law, LAWS[x], subject, drawn, examples, seed, pins)) for x in names]


def check_law(
    law: Law,
    candidate: Candidate,
    problems: Callable[[], Any],
    examples: int,
    seed: int,
    pins: dict[str, Any] | None = None,
    tick: Callable[[], None] | None = None,
) -> int:
    """A law on random problems.

    Parameters
    ----------
    law : Law
        Of ``LAWS``.
    candidate : Candidate
        Whose ``run`` may raise `Unsupported`.
    problems : callable
        Makes the strategy: Hypothesis is imported there.
    examples : int
        How many problems.
    seed : int
        Every law has draws of its own from it.
    pins : dict, optional
        What `attention_problems` was given for axes.
    tick : callable, optional
        Called after every problem.

    Returns
    -------
    int
        The number of problems that the law could be checked on.

    Raises
    ------
    LawBroken
        On the smallest problem that Hypothesis found.
    CandidateRaised
        If the candidate raised an error.
    """
    import hypothesis

    held = 0
    failures: list[LawBroken | CandidateRaised] = []

    @hypothesis.seed(zlib.crc32(f"{seed} {law.__name__}".encode()))
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(problems())
    def holds(problem: AttentionProblem) -> None:
        nonlocal held
        try:
            held += _holds(law, _limited(candidate, problem, pins or {}), problem)
        except CandidateRaised as error:
            error.law = law.__name__
            error.args = (f"{error}\nin the law {law.__name__}, of the problem: {problem!r}",)
            failures.append(error)
            raise
        except LawBroken as error:
            failures.append(error)
            raise
        if tick is not None:
            tick()

    try:
        holds()
    except (LawBroken, CandidateRaised) as error:
        error.__notes__ = []  # the problem is in the message
        raise error.with_traceback(None) from error.__cause__
    except hypothesis.errors.Flaky:
        first = failures[0]
        first.args = (f"{first}\nIt did so on the first call with this problem, and not on every one.",)
        raise first.with_traceback(None) from None
    return held


def _holds(law: Law, candidate: Candidate, problem: AttentionProblem) -> bool:
    """Whether the law could be checked, if need be on the problem without an option of which it makes too much."""
    compared = law.__name__ in _WITHOUT_NUMBERS

    def watch(name: str, off: float, share: float) -> None:
        nonlocal compared
        compared = True
        if candidate.watch is not None:
            candidate.watch(name, off, share)

    watched = candidate._replace(watch=watch)
    while True:
        try:
            law(watched, problem)
        except Unsupported as missing:
            if missing.what not in _DROPPED or getattr(problem, missing.what) is None:
                return False
            code = f"{problem!r}.replace({missing.what}=None)"
            problem = problem.replace(**{missing.what: None})._replace(code=code)
        else:
            return compared


def _limited(candidate: Candidate, drawn: AttentionProblem, pins: dict[str, Any]) -> Candidate:
    """The candidate for problems whose pinned axes have a length that they may have."""
    if not pins:
        return candidate
    own = _lengths(drawn)

    def run(problem: AttentionProblem, backward: bool) -> Run:
        lengths = _lengths(problem)
        for axis, pin in pins.items():
            if lengths[axis] != own[axis] and not _may_be(pin, lengths, axis):
                raise Unsupported(axis)
        return candidate.run(problem, backward)

    return candidate._replace(run=run)


def _lengths(problem: AttentionProblem) -> dict[str, Any]:
    *lead, heads, queries, keys = problem.pairs
    return {
        "B": lead or [1], "H": heads, "K": problem.kv_heads, "T": queries, "S": keys,
        "D": problem.q.shape[-1], "E": problem.v.shape[-1],
    }  # fmt: skip


def _may_be(pin: Any, lengths: dict[str, Any], axis: str) -> bool:
    length = lengths[axis]
    if isinstance(length, list):
        return all(_may_be(pin, {axis: n}, axis) for n in length)
    if isinstance(pin, str):
        return bool(length == lengths[pin])
    if isinstance(pin, int):
        return bool(length == pin)
    if isinstance(pin, Sequence):
        return length in pin
    factor = getattr(pin, "factor", None)  # of multiples_of; of another strategy nothing is known
    return factor is not None and length > 0 and length % factor == 0


def _problems(takes: Takes, *, layouts: Sequence[str], extreme: Sequence[str], max_side: int, pins: dict[str, Any]) -> Any:
    """The strategy of problems that a candidate takes."""
    from npattn.testing.plain_strategies import plain_masks
    from npattn.testing.strategies import attention_problems

    options = takes.options
    kinds = [option for option in MASK_OPTIONS if option in options]
    return attention_problems(
        dtypes=[takes.dtype],
        masks=plain_masks(kinds) if kinds else [],
        bias=["dense"] if "bias" in options else [],
        hidden="hiding bias" in options,
        grouped="grouped" in options,
        scale="scale" in options,
        softcap="softcap" in options,
        sinks="sinks" in options,
        dropout="factors" in options,
        dlse="dlse" in options,
        broadcast="broadcast" in options,
        layouts=layouts,
        extreme=extreme,
        ranks=takes.ranks,
        max_side=max_side,
        **pins,
    )
