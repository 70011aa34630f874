"""Laws of the values: what softmax, scale, heads and linearity demand of every output."""

from __future__ import annotations

import numpy as np

from npattn._arrays.namespace import Array
from npattn.testing.candidates import Answer, Candidate, Run, naive
from npattn.testing.law import agree, given_by, law, tolerances
from npattn.testing.parts import default_scale, narrowed, part, whole
from npattn.testing.precision import float_info
from npattn.testing.problems import AttentionProblem
from npattn.testing.scales import Scales, attention_scales, autodiff_bound, precision_bound

PRODUCTS = 4  # roundings of a coarse factor between an input and a result


@law
def is_what_the_loops_say(candidate: Candidate, problem: AttentionProblem) -> None:
    """out = softmax(c·tanh(s·q kᵀ / c) + bias, masked)∘dropout · v, and every gradient by the chain rule, as plain loops have it.

    Catches everything, but names nothing: a wrong value is within no tolerance of the naive float64 oracle.
    """
    candidate = candidate._replace(noise=0.0)
    got, exact, scales = candidate.answer(problem), naive(problem), attention_scales(problem)
    allowed = _autodiff_bounds(candidate, problem, exact, scales)
    agree(is_what_the_loops_say, candidate, problem, got._asdict(), given_by(got, exact.given()), allowed)


@law
def is_as_precise_as_the_naive_formula(candidate: Candidate, problem: AttentionProblem) -> None:
    """In float32, |error| <= 2·max |error of the naive float32 formula| + 2 eps·scale; halves are rounded once more.

    Catches sums in a lower precision than the inputs', log-sum-exp in the place of maximum and sum, and products that are rounded
    on the way. Results of fewer than 16 elements are left to the law of the loops: the naive formula may be exact by luck.
    """
    if problem.dtype.itemsize == 8:
        return
    candidate = candidate._replace(noise=0.0)
    got, exact, scales, rounded = candidate.answer(problem), naive(problem), attention_scales(problem), naive(problem, np.float32)
    many = {name: wanted for name, wanted in exact.given().items() if np.size(wanted) >= 16}
    bounds = {name: precision_bound(scales, name, wanted, getattr(rounded, name)) for name, wanted in many.items()}
    expected, allowed = given_by(got, many), _rounded(candidate, problem, exact, bounds, scales)
    agree(is_as_precise_as_the_naive_formula, candidate, problem, got._asdict(), expected, allowed)


def oracle_bounds(problem: AttentionProblem, exact: Answer) -> Answer:
    """How far from the oracle's answer an attention may be that computes in the problem's precision (halves in float32).

    Parameters
    ----------
    problem : AttentionProblem
        Any.
    exact : Answer
        Of `naive`.

    Returns
    -------
    Answer
        The bound of every element.
    """
    return _autodiff_bounds(Candidate("", lambda *_: Run({}, exact)), problem, exact, attention_scales(problem))


def _autodiff_bounds(candidate: Candidate, problem: AttentionProblem, exact: Answer, scales: Scales) -> Answer:
    precision = "float32" if problem.is_half else problem.precision
    bounds = {name: autodiff_bound(scales, name, precision) for name in exact.given()}
    return _rounded(candidate, problem, exact, bounds, scales)


def _rounded(candidate: Candidate, problem: AttentionProblem, exact: Answer, bounds: dict[str, Array], scales: Scales) -> Answer:
    """Bounds on what was computed in float32, once it is rounded to a half (lse is not); and what coarser products add."""
    info = float_info(problem.precision)
    eps = info.eps / 2 if problem.is_half else 0.0
    coarse = 0.0 if candidate.products is None else PRODUCTS * float_info(candidate.products).eps
    allowed = {}
    for name, bound in bounds.items():
        finite = np.where(np.isfinite(getattr(exact, name)), np.abs(getattr(exact, name)), 0)
        once = eps * (bound + finite) + info.smallest_subnormal if eps and name != "lse" else 0.0
        allowed[name] = candidate.tolerance * (
            bound + once + coarse * (1 + scales.largest) * np.asarray(getattr(scales.of, name))
        )
    return Answer(None)._replace(**allowed)


@law
def weights_sum_to_one_or_nothing(candidate: Candidate, problem: AttentionProblem) -> None:
    """Σ_j weights_ij = 1 for a query that sees a key, 0 for one that sees none: with v = 1 the output is 1 or 0.

    Catches a softmax over the wrong axis, a missing division, masked keys in the denominator, dead rows that are NaN or a mean.
    """
    problem = problem.replace(v=np.ones_like(problem.v), dropout=None, sinks=None)
    live = problem.visible().any(axis=-1)
    expected = np.broadcast_to(live[..., None], (*live.shape, problem.v.shape[-1])).astype(np.float64)
    out = candidate.out(problem)
    agree(
        weights_sum_to_one_or_nothing,
        candidate,
        problem,
        {"out": out},
        {"out": expected.reshape(out.shape)},
        tolerances(problem, of=candidate),
    )


@law
def outputs_lie_between_the_values(candidate: Candidate, problem: AttentionProblem) -> None:
    """min_j v_j <= out_i <= max_j v_j over the keys j that query i sees (with a sink, over 0 as well): weights are not negative.

    Catches masked values that leak, and weights below 0 or above 1.
    """
    full = whole(problem.replace(dropout=None))
    out, slack = candidate.out(full), tolerances(full, of=candidate).out
    group = full.heads // max(full.kv_heads, 1)
    values = np.repeat(full.v, group, axis=-3)[..., None, :, :]
    seen = full.visible()[..., None]
    outside = np.zeros((), dtype=values.dtype) if full.sinks is not None else np.nan
    with np.errstate(all="ignore"):
        low = np.fmin(np.where(seen, values, np.inf).min(axis=-2, initial=np.inf), outside)
        high = np.fmax(np.where(seen, values, -np.inf).max(axis=-2, initial=-np.inf), outside)
        dead = ~full.visible().any(axis=-1)[..., None]
        low, high = np.where(dead, 0, low), np.where(dead, 0, high)
        nearest = np.clip(out, low, high)
    agree(outputs_lie_between_the_values, candidate, problem, {"out": out}, {"out": nearest}, Answer(slack))


@law
def keys_have_no_order(candidate: Candidate, problem: AttentionProblem) -> None:
    """attention(q, k[π], v[π]) = attention(q, k, v) for every permutation π of keys, with mask and bias permuted alike.

    Catches position that enters unasked, an index that is off by one, tiles that are dropped or counted twice.
    """
    full = whole(problem.replace(dropout=None))
    order = problem.rng("keys").permutation(full.pairs[-1])
    straight, moved = candidate.answer(full), candidate.answer(part(full, keys=order))
    expected = {
        "out": straight.out,
        "lse": straight.lse,
        "dq": straight.dq,
        "dk": in_order(straight.dk, order),
        "dv": in_order(straight.dv, order),
    }
    bounds = tolerances(full, of=candidate)
    bounds = bounds._replace(dk=bounds.dk[..., order, :], dv=bounds.dv[..., order, :])
    agree(keys_have_no_order, candidate, problem, moved._asdict(), given_by(straight, expected), bounds)


@law
def queries_are_independent(candidate: Candidate, problem: AttentionProblem) -> None:
    """attention(q[π], k, v) = attention(q, k, v)[π] for every permutation π of queries, and dk, dv stay.

    Catches rows that depend on each other, and row statistics that are put to the wrong row.
    """
    full = whole(problem.replace(dropout=None))
    order = problem.rng("queries").permutation(full.pairs[-2])
    straight, moved = candidate.answer(full), candidate.answer(part(full, queries=order))
    expected = {
        "out": in_order(straight.out, order),
        "lse": None if straight.lse is None else straight.lse[..., order],
        "dq": in_order(straight.dq, order),
        "dk": straight.dk,
        "dv": straight.dv,
    }
    bounds = tolerances(full, of=candidate)
    bounds = bounds._replace(out=bounds.out[..., order, :], dq=bounds.dq[..., order, :])
    agree(queries_are_independent, candidate, problem, moved._asdict(), given_by(straight, expected), bounds)


@law
def batched_is_looped(candidate: Candidate, problem: AttentionProblem) -> None:
    """The answer to one batch entry, computed alone, is that part of the answer to all: batch entries know nothing of each other.

    Catches leading axes that are mixed up, and lengths, offsets or dropout that belong to another entry.
    """
    full = whole(problem)
    entries = list(np.ndindex(*full.lead))
    if not entries:
        return
    together = candidate.answer(full)
    batch = entries[int(problem.rng("batch").integers(len(entries)))]
    alone, single = candidate.answer(part(full, batch=batch)), part(full, batch=batch)
    expected = {name: value[batch] for name, value in together.given().items() if name != "dsinks"}
    agree(batched_is_looped, candidate, problem, alone._asdict(), expected, tolerances(single, of=candidate))


@law
def heads_are_independent(candidate: Candidate, problem: AttentionProblem) -> None:
    """The answer for one head, computed alone with key/value head h // (H/K), is that head's part of the answer for all.

    Catches a wrong assignment of grouped heads, heads that are mixed, and a mask, bias, sink or dropout of another head.
    """
    full = whole(problem)
    if not full.heads:
        return
    head = int(problem.rng("head").integers(full.heads))
    together, single = candidate.answer(full), part(full, head=head)
    alone, own = candidate.answer(single), slice(head, head + 1)
    expected = {"out": together.out[..., own, :, :], "lse": None if together.lse is None else together.lse[..., own, :]}
    if together.dq is not None:
        expected["dq"] = together.dq[..., own, :, :]
    if together.dbias is not None:
        expected["dbias"] = together.dbias[..., own, :, :]
    if together.dsinks is not None:
        expected["dsinks"] = together.dsinks[own]
    agree(heads_are_independent, candidate, problem, alone._asdict(), given_by(alone, expected), tolerances(single, of=candidate))


@law
def grouped_is_repeated(candidate: Candidate, problem: AttentionProblem) -> None:
    """K key/value heads are the same as each repeated H/K times; dk and dv are then summed over each group.

    Catches ``h % K`` in the place of ``h // (H/K)``, and a group sum that is missing.
    """
    full = whole(problem)
    if not full.kv_heads:
        return
    group = full.heads // full.kv_heads
    grouped = candidate.answer(full)
    repeated = candidate.answer(full.replace(k=np.repeat(full.k, group, axis=-3), v=np.repeat(full.v, group, axis=-3)))
    expected = repeated._asdict()
    for name in ("dk", "dv"):
        if (dx := expected[name]) is not None:
            expected[name] = dx.reshape(*dx.shape[:-3], full.kv_heads, group, *dx.shape[-2:]).sum(axis=-3)
    agree(grouped_is_repeated, candidate, problem, grouped._asdict(), expected, tolerances(full, of=candidate))


@law
def broadcasting_is_repeating(candidate: Candidate, problem: AttentionProblem) -> None:
    """Broadcast axes are the same as copies, and masks and biases the same as their arrays; gradients are summed over the copies.

    Catches broadcasting that is not undone, and lazy masks and biases whose tiles differ from what they stand for.
    """
    got, full = candidate.answer(problem), candidate.answer(whole(problem))
    agree(
        broadcasting_is_repeating,
        candidate,
        problem,
        got._asdict(),
        narrowed(problem, full)._asdict(),
        tolerances(problem, of=candidate),
    )


@law
def a_number_added_to_a_row_changes_nothing(candidate: Candidate, problem: AttentionProblem) -> None:
    """softmax(x + c_i) = softmax(x): a bias that is constant along a row changes neither out nor gradients; lse grows by c_i.

    Catches a softmax that forgets its denominator or its maximum, and a log-sum-exp that does not include the bias.
    """
    full = whole(problem.replace(sinks=None))
    by = problem.rng("row").standard_normal((*full.pairs[:-1], 1)).astype(full.dtype)
    bias = np.zeros(full.pairs, dtype=full.dtype) if full.bias is None else full.bias
    before, moved = full.replace(bias=bias), full.replace(bias=bias + by)
    plain, got = candidate.answer(before), candidate.answer(moved)
    expected = plain._replace(lse=None if plain.lse is None else plain.lse + by[..., 0])
    agree(
        a_number_added_to_a_row_changes_nothing,
        candidate,
        problem,
        got._asdict(),
        expected._asdict(),
        tolerances(before, moved, of=candidate),
    )


@law
def moving_all_keys_changes_nothing(candidate: Candidate, problem: AttentionProblem) -> None:
    """attention(q, k + c, v) = attention(q, k, v) for a vector c: all scores of a row move by s·q·c. Not with a softcap.

    Catches scores that are not a product of q and k, and what the law of rows does, through the keys.
    """
    full = whole(problem.replace(sinks=None, softcap=None))
    by = problem.rng("keys").standard_normal((*full.k.shape[:-2], 1, full.k.shape[-1])).astype(full.dtype)
    moved = full.replace(k=full.k + by)
    agree(
        moving_all_keys_changes_nothing, candidate, problem, {"out": candidate.out(moved)}, {"out": candidate.out(full)},
        tolerances(full, moved, of=candidate),
    )  # fmt: skip


@law
def scale_multiplies_the_scores(candidate: Candidate, problem: AttentionProblem) -> None:
    """attention(q, k, scale=s) = attention(s·q, k, scale=1), and s = 1/√D where it is not given.

    Catches a scale that is missing, applied twice, or 1/D.
    """
    scale = default_scale(problem)
    scaled = problem.replace(q=(problem.q * scale).astype(problem.dtype), scale=1.0)
    expected = {"out": candidate.out(problem)}
    agree(
        scale_multiplies_the_scores,
        candidate,
        problem,
        {"out": candidate.out(scaled)},
        expected,
        tolerances(problem, scaled, of=candidate),
    )


@law
def values_enter_linearly(candidate: Candidate, problem: AttentionProblem) -> None:
    """attention(q, k, a·v + b·w) = a·attention(q, k, v) + b·attention(q, k, w).

    Catches values that enter the weights, and dropout that is not the same in two calls.
    """
    rng, dtype = problem.rng("values"), problem.dtype
    other = problem.replace(v=rng.standard_normal(problem.v.shape).astype(dtype))
    a, b = 0.5, -2.0
    mixed = problem.replace(v=(a * problem.v + b * other.v).astype(dtype))
    expected = a * np.asarray(candidate.out(problem)) + b * np.asarray(candidate.out(other))
    bounds = tolerances(problem, other, other, mixed, of=candidate)
    agree(values_enter_linearly, candidate, problem, {"out": candidate.out(mixed)}, {"out": expected}, bounds)


@law
def repeated_keys_share_their_weight(candidate: Candidate, problem: AttentionProblem) -> None:
    """Every key twice: out stays, lse grows by log 2, and the two copies have half the gradient each.

    Catches a denominator that does not see all keys.
    """
    full = whole(problem.replace(dropout=None, sinks=None, dlse=None))
    twice = part(full, keys=np.tile(np.arange(full.pairs[-1]), 2))
    once, got = candidate.answer(full), candidate.answer(twice)
    expected = {
        "out": once.out,
        "lse": None if once.lse is None else once.lse + np.asarray(np.log(2), dtype=once.lse.dtype),
        "dq": once.dq,
    }
    agree(
        repeated_keys_share_their_weight,
        candidate,
        problem,
        got._asdict(),
        given_by(once, expected),
        tolerances(full, of=candidate),
    )


def in_order(x: Array | None, order: Array) -> Array | None:
    """Rows (..., T, .) in another order."""
    return None if x is None else x[..., order, :]
