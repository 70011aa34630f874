"""Faults injected into npattn, one at a time, and whether a few seconds of laws catch them.

    python tests/mutants.py          all of them, and killed / total
    python tests/mutants.py 17       one of them

A mutant is a line of a module with something else in its place. The module is loaded with that text, in a process of its own; no
file is written.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A fault: in this module, this text, which stands there once, becomes that one."""

    what: str
    module: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        """The module's file."""
        return ROOT / "npattn" / f"{self.module.replace('.', '/')}.py"

    def source(self) -> str:
        """The module with the fault in it."""
        text = self.path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise LookupError(f"{self.what}: the text stands {text.count(self.old)} times in {self.path}: {self.old!r}")
        return text.replace(self.old, self.new)


FORMULA, PASSES, GATHERING = "_attention.formula", "_attention.passes", "_attention.gathering"
TILING, TILES, STORES = "_attention.tiling", "_attention.tiles", "_attention.stores"
SHADES, BLOCKS = "_attention.shades", "_arrays.block_products"
PROBLEM, PLACE, BIASES = "_attention.problem", "_attention.place", "_attention.biases"
KINDS, MASKS, HEADS, MULTI = "_attention.mask_kinds", "_attention.masks", "layers.heads", "_attention.multi_head"

MUTANTS = [
    # the formula, forward
    Mutant(
        "numerators of the wrong sign", FORMULA, "ops.exp(ops.subtract(biased, shift))", "ops.exp(ops.subtract(shift, biased))"
    ),
    Mutant("the bias is subtracted", FORMULA, "else ops.add(capped, terms.bias)", "else ops.subtract(capped, terms.bias)"),
    Mutant(
        "the cap is not scaled back",
        FORMULA,
        "return ops.multiply(ops.tanh(ops.multiply(scores, 1 / softcap)), softcap)",
        "return ops.tanh(ops.multiply(scores, 1 / softcap))",
    ),
    Mutant(
        "hidden scores are -30",
        FORMULA,
        'x = ops.hide(x, terms.hidden, -float("inf"))',
        "x = ops.hide(x, terms.hidden, -30.0)",
    ),
    Mutant(
        "the log-sum-exp subtracts the logarithm",
        FORMULA,
        "xp.where(seen, row_max + xp.log(xp.where(seen, row_sum, 1.0))",
        "xp.where(seen, row_max - xp.log(xp.where(seen, row_sum, 1.0))",
    ),
    Mutant(
        "the log-sum-exp forgets the maximum",
        FORMULA,
        "xp.where(seen, row_max + xp.log(xp.where(seen, row_sum, 1.0))",
        "xp.where(seen, xp.log(xp.where(seen, row_sum, 1.0))",
    ),
    Mutant(
        "dead rows are not set to 0",
        FORMULA,
        "xp.where(part.row_sum != 0, part.out * reciprocal(part.row_sum, xp), 0.0)",
        "part.out * reciprocal(part.row_sum, xp)",
    ),
    Mutant(
        "the sink is left out of the sum",
        FORMULA,
        "Part(xp.zeros_like(sinks), sinks, _sink_sum(sinks, xp))",
        "Part(xp.zeros_like(sinks), sinks, 0 * _sink_sum(sinks, xp))",
    ),
    # tiles that are joined
    Mutant(
        "tiles merge without weights",
        FORMULA,
        "factor = rescale(before.row_max, before.row_sum, row_max, xp)",
        "factor = 1.0",
    ),
    Mutant(
        "tiles that every row sees merge without weights",
        FORMULA,
        "factor = xp.exp(before.row_max - row_max)",
        "factor = 1.0",
    ),
    Mutant("row sums merge without weights", FORMULA, "factor * before.row_sum + row_sum,", "before.row_sum + row_sum,"),
    Mutant("parts merge without weights", FORMULA, "Part(by_a * a.out + by_b * b.out,", "Part(a.out + b.out,"),
    Mutant(
        "rescaled the wrong way round",
        FORMULA,
        "xp.where(seen, row_max - new_max, 0.0)",
        "xp.where(seen, new_max - row_max, 0.0)",
    ),
    Mutant(
        "the largest score is that of the last tile",
        FORMULA,
        "row_max = xp.maximum(before.row_max, row_max)",
        "row_max = row_max + 0",
    ),
    Mutant(
        "kept numerators with another tile's maximum",
        FORMULA,
        "return rows._replace(dout=rows.dout * factor, offset=rows.offset * factor)",
        "return rows._replace(dout=rows.dout, offset=rows.offset * factor)",
    ),
    # the formula, backward
    Mutant(
        "delta has the wrong sign", FORMULA, "return xp.vecdot(dout, out)[..., None]", "return -xp.vecdot(dout, out)[..., None]"
    ),
    Mutant("delta is missing", FORMULA, "return xp.vecdot(dout, out)[..., None]", "return 0.0 * xp.vecdot(dout, out)[..., None]"),
    Mutant("dlse has the wrong sign", FORMULA, "else delta - dlse", "else delta + dlse"),
    Mutant("dlse is forgotten", FORMULA, "return delta if dlse is None else delta - dlse", "return delta"),
    Mutant(
        "dout is not divided by the row sum",
        FORMULA,
        "return Rows(dout / row_sum, offset / row_sum, row_max)",
        "return Rows(dout, offset / row_sum, row_max)",
    ),
    Mutant(
        "softmax's backward adds its second term",
        FORMULA,
        "ops.multiply(ops.subtract(dweights, offset), weights)",
        "ops.multiply(ops.add(dweights, offset), weights)",
    ),
    Mutant(
        "softmax's backward is not multiplied by the weights",
        FORMULA,
        "ops.multiply(ops.subtract(dweights, offset), weights)",
        "ops.subtract(dweights, offset)",
    ),
    Mutant(
        "gradients of hidden pairs are multiplied, not selected",
        FORMULA,
        "return ops.hide(ops.multiply(ops.subtract(dweights, offset), weights), hidden, 0.0)",
        "return ops.multiply(ops.subtract(dweights, offset), weights)",
    ),
    Mutant(
        "the slope of the cap is 1 - tanh",
        FORMULA,
        "ops.add(ops.multiply(ops.multiply(tanh, tanh), -1.0), 1.0)",
        "ops.add(ops.multiply(tanh, -1.0), 1.0)",
    ),
    Mutant(
        "the cap has no slope", FORMULA, "    if slope is None:\n        return dcapped", "    if True:\n        return dcapped"
    ),
    Mutant(
        "dropout is forgotten backward",
        FORMULA,
        "return ddropped if factors is None else ops.multiply(ddropped, factors)",
        "return ddropped",
    ),
    Mutant(
        "dv without dropout",
        FORMULA,
        'ops.matmul(ops.transpose(dropped), rows.dout, "dv")',
        'ops.matmul(ops.transpose(p), rows.dout, "dv")',
    ),
    Mutant(
        "backward makes its numerators without the bias",
        FORMULA,
        "    if terms.bias is not None:\n        x = ops.add(x, terms.bias)\n    return ops.hide(exponentials",
        "    return ops.hide(exponentials",
    ),
    Mutant(
        "the sink's gradient has the wrong sign", FORMULA, "reciprocal(row_sum, xp) * -offset", "reciprocal(row_sum, xp) * offset"
    ),
    # merging results
    Mutant("merged parts do not know the whole", FORMULA, "xp.vecdot(dout, part.out - out)", "xp.vecdot(dout, part.out)"),
    Mutant("merging forgets dlse", FORMULA, "weight * (pull if dlse is None else pull + dlse)", "weight * pull"),
    # passes and tiling
    Mutant("the scale comes once too often", PROBLEM, "1 / math.sqrt(head_size)", "1 / head_size"),
    Mutant(
        "dq without the scale",
        PASSES,
        'self.ops.multiply(grads.dq, self.problem.options.scale, "total_dq")',
        'self.ops.multiply(grads.dq, 1.0, "total_dq")',
    ),
    Mutant(
        "the last tile's dq alone",
        PASSES,
        "self.total = self.ops.add(self.total, self.ops.multiply(grads.dq, self.problem.options.scale))",
        "self.total = self.ops.multiply(grads.dq, self.problem.options.scale)",
    ),
    Mutant(
        "the last tile loses a key",
        TILING,
        "edges = [length * n // pieces for n in range(pieces + 1)] if pieces else []",
        "edges = [length * n // pieces - (n == pieces > 1) for n in range(pieces + 1)] if pieces else []",
    ),
    Mutant(
        "runs that all see are left out",
        TILING,
        "if run.state == NONE:",
        "if run.state == ALL:",
    ),
    Mutant("mixed runs count as seen", TILING, "for r in runs if r.state != ALL]", "for r in runs if r.state == NONE]"),
    Mutant(
        "a row that sees nothing in one tile is dead",
        SHADES,
        "rows = seen if rows is None else rows | seen",
        "rows = seen if rows is None else rows & seen",
    ),
    Mutant(
        "what nobody sees is not kept out",
        SHADES,
        "    return None if xp is np and keys.all() else keys",
        "    return None",
    ),
    Mutant(
        "the mask of one head is remembered for all",
        SHADES,
        "heads = (unit.heads,) if mask.varies_by_head() else ()",
        "heads = ()",
    ),
    Mutant(
        "the mask of one batch entry is remembered for all",
        SHADES,
        "outer = unit.lead if mask.outer_shape() else ()",
        "outer = ()",
    ),
    Mutant("blocks lose the last rows", BLOCKS, "if even < rows:", "if even > rows:"),
    Mutant("blocks lose the last columns", BLOCKS, "if whole < columns:", "if whole > columns:"),
    Mutant("the blocks of other keys", BLOCKS, "if known == key and", "if"),
    Mutant("blocks of what has changed", BLOCKS, "steady = any(", "steady = True or any("),
    Mutant(
        "dropout of the wrong head",
        TILES,
        "index(place.heads, 3) * group + index(place.group, 2)",
        "index(place.heads, 3) + index(place.group, 2)",
    ),
    Mutant(
        "a bias of another head",
        PLACE,
        "array = xp.reshape(array, (*lead, *split, *array.shape[-2:]))",
        "array = xp.flip(xp.reshape(array, (*lead, *split, *array.shape[-2:])), axis=-3)",
    ),
    Mutant(
        "a broadcast input has the mean of its gradients",
        "_arrays.broadcast",
        "xp.reshape(xp.sum(x, axis=summed, dtype=x.dtype) if summed else x, tuple(shape))",
        "xp.reshape(xp.mean(x, axis=summed) if summed else x, tuple(shape))",
    ),
    Mutant(
        "a group whose sum is dropped",
        GATHERING,
        "sums.add(copy, part, share)",
        "sums.add(copy, part, share * (unit.group.start == 0))",
    ),
    Mutant("what one of several jobs had is lost", STORES, "for other in others:", "for other in others[1:]:"),
    # masks and biases
    Mutant(
        "queries before the first key are said to see one",
        KINDS,
        "(self.right is None or first + self.right >= 0) and",
        "(self.right is None or first + self.right >= -9) and",
    ),
    Mutant(
        "entries of length 0 are said to show keys",
        KINDS,
        "needed = ((self.keys, 1), (self.queries, T))",
        "needed = ((self.keys, 0), (self.queries, T))",
    ),
    Mutant(
        "the diagonal is one too far right",
        KINDS,
        "keys <= self._edge(place, self.right, xp, device)",
        "keys <= self._edge(place, self.right + 1, xp, device)",
    ),
    Mutant(
        "the diagonal hides itself",
        KINDS,
        "keys <= self._edge(place, self.right, xp, device)",
        "keys < self._edge(place, self.right, xp, device)",
    ),
    Mutant(
        "a window's left side is short by one",
        KINDS,
        "keys >= self._edge(place, -self.left, xp, device)",
        "keys > self._edge(place, -self.left, xp, device)",
    ),
    Mutant(
        "a span is off by one",
        KINDS,
        "(last + self.right + 1, first + self.right + 1)",
        "(last + self.right, first + self.right)",
    ),
    Mutant(
        "the end of the keys is that of the queries",
        KINDS,
        "np.asarray(place.whole[-1] - place.whole[-2])",
        "np.asarray(place.whole[-2] - place.whole[-1])",
    ),
    Mutant(
        "& is |",
        MASKS,
        "return self.left.visible(place, xp, device) & self.right.visible(place, xp, device)",
        "return self.left.visible(place, xp, device) | self.right.visible(place, xp, device)",
    ),
    Mutant(
        "~ is forgotten", MASKS, "return ~self.inner.visible(place, xp, device)", "return self.inner.visible(place, xp, device)"
    ),
    Mutant(
        "runs of a & are those of a |",
        "_attention.place",
        "Run(start, stop, min(left[a].state, right[b].state))",
        "Run(start, stop, max(left[a].state, right[b].state))",
    ),
    Mutant(
        "alibi has the wrong sign",
        BIASES,
        "-np.abs(distances)[:, None].astype(np.float64)",
        "np.abs(distances)[:, None].astype(np.float64)",
    ),
    Mutant(
        "far keys have no bucket of their own",
        BIASES,
        "np.where(far < exact, far, logarithmic)",
        "np.where(far <= exact, far, 0)",
    ),
    # dropout
    Mutant(
        "dropout without 1 / (1 - rate)",
        "layers.dropout",
        "xp.astype(kept, dtype) * (1 / (1 - self.rate))",
        "xp.astype(kept, dtype)",
    ),
    # multi-head attention
    Mutant(
        "dx of the queries is doubled",
        MULTI,
        "q = project_heads_backward(dq, saved.q)",
        "q = project_heads_backward(dq, saved.q._replace(w=2 * saved.q.w))",
    ),
    Mutant("dx of the values is dropped", MULTI, "k.dx + v.dx, attended.dbias", "k.dx, attended.dbias"),
    Mutant(
        "w_k has the gradient of w_v",
        MULTI,
        "MultiHeadParams(q.dw, k.dw, v.dw,",
        "MultiHeadParams(q.dw, v.dw[..., : k.dw.shape[-1]] + 0 * k.dw, v.dw,",
    ),
    Mutant(
        "keys without their bias",
        MULTI,
        "k, saved_k = project_heads_forward(x_kv, params.w_k, params.b_k)",
        "k, saved_k = project_heads_forward(x_kv, params.w_k, None)",
    ),
    Mutant(
        "heads not swapped back",
        HEADS,
        "xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))",
        "xp.reshape(x, (*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]))",
    ),
    Mutant(
        "a projection's bias has the mean",
        "layers.linear",
        "xp.sum(drows, axis=0, dtype=drows.dtype) if has_b",
        "xp.mean(drows, axis=0) if has_b",
    ),
]


# One mutant ------------------------------------------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from other text."""

    text = ""

    def get_code(self, fullname: str) -> Any:
        return compile(self.text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.name, self.text = f"npattn.{mutant.module}", mutant.source()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
            spec.loader.text = self.text
        return spec


def killer(mutant: Mutant | None) -> str:
    """The first check that fails with the fault in place; empty if none does. ``None`` is npattn as it is."""
    if mutant is not None:
        sys.meta_path.insert(0, _Finder(mutant))
    sys.path.insert(0, str(ROOT))
    for name, check in selection():
        try:
            check()
        except Exception as error:  # whatever a fault leads to
            return f"{name} ({type(error).__name__})"
    return ""


def selection() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The laws that faults are judged by: on chosen problems and on random ones, in one tile and in many."""
    from npattn import causal_mask, length_mask
    from npattn._arrays.block_products import Limits
    from npattn._attention.tiling import Sizes
    from npattn.testing import LAWS, attention_problems, check_multi_head, npattn_candidate
    from npattn.testing.check import check_law
    from npattn.testing.multi_head import multi_head_problem
    from npattn.testing.problems import attention_problem
    from tests.attention.every_option import EVERY_OPTION

    chosen, tiles, kept, blocks, plain = (
        npattn_candidate(sizes=sizes)
        for sizes in (
            None,
            Sizes(rows=2, keys=3, pairs=12, plain=False, keep=False),
            Sizes(rows=3, keys=2, pairs=12, plain=False, keep=True),
            Sizes(rows=64, keys=5, pairs=1 << 14, plain=False, keep=False, blocks=Limits(1, 100, 2, 4, 32)),
            Sizes(rows=2, keys=3, pairs=12, plain=True, keep=True),
        )
    )
    for candidate in (chosen, tiles, kept, blocks, plain):
        for name in ("weights_sum_to_one_or_nothing", "products_with_gradients_agree", "is_what_the_loops_say"):
            for problem in EVERY_OPTION.values():
                yield name, functools.partial(LAWS[name], candidate, problem)
        for mask in (causal_mask(-2), length_mask([3, 0])):  # rows that see nothing, and nothing but the mask to say so
            yield (
                "is_what_the_loops_say",
                functools.partial(
                    LAWS["is_what_the_loops_say"],
                    candidate,
                    attention_problem((2, 1, 4, 3), (2, 1, 3, 3), (2, 1, 3, 3), mask=mask),
                ),
            )
    for name in ("is_what_the_loops_say", "poison_stays_out", "unseen_keys_leave_no_trace", "cuts_merge_to_the_whole"):
        for candidate in (chosen, tiles, kept, blocks):
            yield name, functools.partial(check_law, LAWS[name], candidate, attention_problems, 25, 0)
    for layer in (
        multi_head_problem((2, 3, 4), (2, 5, 6), heads=2),
        multi_head_problem((3, 4), (5, 6), heads=4, kv_heads=2, head_size=3, value_size=5, out_width=7, sinks=True),
    ):
        yield "check_multi_head", functools.partial(check_multi_head, layer)
    yield "merged parts", _merged
    yield "dead rows beside a NaN", _dead_rows


def _merged() -> None:
    """Merging against differences, with a part that has seen nothing."""
    import numpy as np

    from npattn import merge_attention_backward, merge_attention_forward
    from npattn.testing import check_backward

    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 2, 4, 3)), rng.standard_normal((3, 2, 4))

    def forward(outs: Any, lses: Any) -> Any:
        return merge_attention_forward(list(zip(outs, lses, strict=True)))

    def backward(g: Any, saved: Any) -> Any:
        parts = merge_attention_backward(g[0], saved, dlse=g[1]).dparts
        return np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts])

    check_backward(forward, backward, [outs, lses])


def _dead_rows() -> None:
    """A row that sees nothing is set to 0: 0 times what another row sees, a NaN, would not be."""
    import numpy as np

    from npattn import attention

    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 3))
    v[0, 1] = np.nan
    mask = np.array([[True] * 4, [False] * 4, [False] * 4, [True] * 4])
    np.testing.assert_array_equal(attention(q, k, v, mask=mask)[:, 1:3], 0)


# All of them -----------------------------------------------------------------------------------------------------------------

NO_START = "it does not start"  # its line is no longer there, or is no Python: nothing was tried


def run(number: int) -> str:
    """`killer` in a process of its own; a fault that never ends is killed too."""
    command = [sys.executable, "-W", "ignore", __file__, str(number)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    except subprocess.TimeoutExpired:
        return "it never ends"
    if done.returncode:
        return f"{NO_START}: {done.stderr.strip().splitlines()[-1]}"
    return done.stdout.strip()


def run_all(numbers: Sequence[int]) -> dict[int, str]:
    """What kills each of these mutants; empty for those that survive."""
    with ThreadPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        return dict(zip(numbers, pool.map(run, numbers), strict=True))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        which = int(sys.argv[1])
        print(killer(None if which < 0 else MUTANTS[which]))
    else:
        found = run_all(range(len(MUTANTS)))
        for n, by in found.items():
            print(f"{n:3}  {MUTANTS[n].what:55}{by or 'SURVIVES'}")
        killed = [by for by in found.values() if by and not by.startswith(NO_START)]
        print(f"killed {len(killed)} / {len(MUTANTS)}")
