"""Laws of who sees whom: what is hidden leaves no trace, dead rows are zero, cuts of the keys merge to the whole."""

from __future__ import annotations

import itertools

import numpy as np

from npattn._arrays.namespace import Array
from npattn._attention.mask_kinds import causal_mask
from npattn.testing.candidates import Answer, Candidate
from npattn.testing.law import agree, law, tolerances
from npattn.testing.parts import part, whole
from npattn.testing.problems import AttentionProblem


@law
def unseen_keys_leave_no_trace(candidate: Candidate, problem: AttentionProblem) -> None:
    """Other finite numbers at the keys that query i may not see change no bit of out_i and dq_i: the future does not leak.

    Catches a diagonal that is off by one, a mask that is added as a large number instead of selecting, a derivative that is
    multiplied by 0 instead of selected, and a choice of path that is made from contents.
    """
    full = whole(problem).replace(mask=problem.mask)
    rng, seen, plain = problem.rng("unseen"), full.visible(), candidate.answer(full)
    rows = list(np.ndindex(*full.pairs[:-1]))
    group = full.heads // max(full.kv_heads, 1)
    for row in [rows[int(n)] for n in rng.choice(len(rows), min(len(rows), 2), replace=False)] if rows else []:
        *batch, head, _ = row
        hidden = np.flatnonzero(~seen[row])
        k, v = full.k.copy(), full.v.copy()
        for x in (k, v):  # from order 1 to numbers whose sums overflow
            size = 0.9 * float(np.finfo(x.dtype).max) ** rng.uniform()
            x[(*batch, head // group)][hidden] = (size * rng.uniform(-1.0, 1.0, (len(hidden), x.shape[-1]))).astype(x.dtype)
        got = candidate.answer(full.replace(k=k, v=v))
        mine, wanted = (
            {name: getattr(x, name)[row] for name in ("out", "dq") if getattr(x, name) is not None} for x in (got, plain)
        )
        agree(unseen_keys_leave_no_trace, candidate, problem, mine, wanted)


@law
def poison_stays_out(candidate: Candidate, problem: AttentionProblem) -> None:
    """NaN and infinities at keys that no query sees, and at queries (and their cotangents) that see no key, change nothing.

    Catches masking by multiplication, 0·NaN, and gradients of masked pairs that are computed and thrown away.
    """
    full = whole(problem).replace(mask=problem.mask)
    seen, rng = full.visible(), problem.rng("poison")
    group = full.heads // max(full.kv_heads, 1)
    if not group:
        return
    of_heads = seen.any(axis=-2)  # (..., H, S)
    dead_keys = ~of_heads.reshape(*full.lead, full.kv_heads, group, full.pairs[-1]).any(axis=-2)
    dead_rows = ~seen.any(axis=-1)

    def poisoned(x: Array, where: Array) -> Array:
        poison = rng.choice([np.nan, np.inf, -np.inf], size=x.shape).astype(x.dtype)
        return np.where(where, poison, x)

    changed = full.replace(
        q=poisoned(full.q, dead_rows[..., None]),
        k=poisoned(full.k, dead_keys[..., None]),
        v=poisoned(full.v, dead_keys[..., None]),
        dout=poisoned(full.dout, dead_rows[..., None]),
        # with a sink, a row that sees no key still has a log-sum-exp
        dlse=full.dlse if full.dlse is None or full.sinks is not None else poisoned(full.dlse, dead_rows),
    )
    agree(poison_stays_out, candidate, problem, candidate.answer(changed)._asdict(), candidate.answer(full)._asdict())


@law
def poison_stays_where_it_is_seen(candidate: Candidate, problem: AttentionProblem) -> None:
    """NaN at a key changes no bit of the out, lse and dq of a head and batch entry in which no query sees that key.

    Catches grouped heads and batch entries that share a tile or a key although they may see different ones.
    """
    lead, (heads, _, keys), kv_heads = problem.lead, problem.pairs[-3:], problem.kv_heads
    if not (heads and keys):
        return
    rng, mask = problem.rng("seen poison"), problem.dense_mask()
    of_heads = rng.random((heads, 1, keys)) < 0.6  # every head sees other keys
    problem = problem.replace(mask=of_heads if mask is None else mask & of_heads)
    seen = problem.visible()
    where = rng.random(problem.k.shape[:-1]) < 0.3  # not written out: one key may be that of many heads and entries
    poisoned = np.where(where[..., None], np.nan, problem.k).astype(problem.k.dtype)
    of_entries = np.repeat(np.broadcast_to(where, (*lead, kv_heads, keys)), heads // kv_heads, axis=-2)
    untouched = ~(seen & of_entries[..., None, :]).any(axis=(-2, -1))
    plain, got = candidate.answer(problem), candidate.answer(problem.replace(k=poisoned))

    def rows(answer: Answer) -> dict[str, Array]:
        found = {"out": answer.out.reshape(*seen.shape[:-1], answer.out.shape[-1])[untouched]}
        if answer.lse is not None:
            found["lse"] = answer.lse.reshape(seen.shape[:-1])[untouched]
        if answer.dq is not None and answer.dq.shape[:-1] == seen.shape[:-1]:  # a broadcast query hears of every entry
            found["dq"] = answer.dq[untouched]
        return found

    agree(poison_stays_where_it_is_seen, candidate, problem, rows(got), rows(plain))


@law
def dead_rows_are_zero(candidate: Candidate, problem: AttentionProblem) -> None:
    """A query that sees no key has out = 0, lse = -inf or its sink, dq = 0; a key that no query sees has dk = dv = 0. Exactly.

    Catches the mean of v, NaN, and rows that keep what was in memory.
    """
    full = whole(problem).replace(mask=problem.mask)
    got, seen = candidate.answer(full), full.visible()
    dead = ~seen.any(axis=-1)
    expected = {"out": np.where(dead[..., None], 0, got.out)}
    if got.lse is not None:
        bottom = np.full((full.heads, 1), -np.inf) if full.sinks is None else np.asarray(full.sinks, dtype=np.float64)[:, None]
        expected["lse"] = np.where(dead, bottom, got.lse)
    if got.dq is not None and full.kv_heads:
        group = full.heads // full.kv_heads
        unseen = ~seen.any(axis=-2).reshape(*full.lead, full.kv_heads, group, full.pairs[-1]).any(axis=-2)
        expected["dq"] = np.where(dead[..., None], 0, got.dq)
        expected["dk"], expected["dv"] = (np.where(unseen[..., None], 0, x) for x in (got.dk, got.dv))
    agree(dead_rows_are_zero, candidate, problem, got._asdict(), expected)


@law
def cuts_merge_to_the_whole(candidate: Candidate, problem: AttentionProblem) -> None:
    """Keys cut anywhere into parts j: lse = log Σ_j exp lse_j, out = Σ_j exp(lse_j - lse)·out_j; a sink is the part (0, sink).

    Catches an output that is not normalised, a log-sum-exp that does not belong to it, and merging without weights.
    """
    full = whole(problem)
    together = candidate.answer(full, backward=False)
    if together.lse is None:
        return
    keys, rng = full.pairs[-1], problem.rng("cuts")
    edges = [0, *sorted(int(n) for n in rng.integers(0, keys + 1, rng.integers(1, 3))), keys]
    parts = [
        candidate.answer(part(full.replace(sinks=None), keys=slice(a, b)), backward=False) for a, b in itertools.pairwise(edges)
    ]
    lses = [p.lse.astype(np.float64) for p in parts]
    outs = [p.out.astype(np.float64) for p in parts]
    if full.sinks is not None:
        lses.append(np.broadcast_to(np.asarray(full.sinks, dtype=np.float64)[:, None], lses[0].shape))
        outs.append(np.zeros_like(outs[0]))
    with np.errstate(all="ignore"):
        lse = np.logaddexp.reduce(lses, axis=0)
        weights = [np.where(x == -np.inf, 0, np.exp(x - lse))[..., None] for x in lses]
    expected = {"out": sum(w * out for w, out in zip(weights, outs, strict=True)), "lse": lse}
    agree(cuts_merge_to_the_whole, candidate, problem, together._asdict(), expected, tolerances(full, of=candidate))


@law
def decoding_is_the_whole(candidate: Candidate, problem: AttentionProblem) -> None:
    """Causal attention one query at a time, each against the keys so far, gives the rows of causal attention at once.

    Catches a diagonal whose offset is wrong with a cache: top-left and bottom-right alignment mixed up.
    """
    full = whole(problem)
    queries, keys = full.pairs[-2:]
    past = keys - queries
    if past < 0:
        return
    unmasked = full.replace(mask=None)
    together = candidate.out(unmasked.replace(mask=causal_mask(past)))
    bound = tolerances(unmasked.replace(mask=causal_mask(past)), of=candidate).out
    i = int(problem.rng("step").integers(queries)) if queries else 0
    if queries:
        step = part(unmasked, queries=slice(i, i + 1), keys=slice(0, past + i + 1)).replace(mask=causal_mask(past + i))
        expected, own = {"out": together[..., i : i + 1, :]}, Answer(bound[..., i : i + 1, :])
        agree(decoding_is_the_whole, candidate, problem, {"out": candidate.out(step)}, expected, own)
