"""Test an attention of your own: three candidates under the laws of `npattn.testing`.

    pytest examples/test_your_own_attention.py        (pip install "npattn[test]"; PyTorch is optional)
    python examples/test_your_own_attention.py        the wrong ones, and the law that catches each

A candidate is a function of q, k, v and plain options, and its backward if it has one. Nothing of it belongs to npattn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from npattn.testing import LawBroken, Unavailable, attention_checks, check_attention

# A correct one: NumPy, a line a step ---------------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, scale: float | None = None, **steps: Any) -> Any:
    """softmax(scale·q kᵀ) v; ``steps`` are what the wrong ones do differently."""
    return forward(q, k, v, causal=causal, mask=mask, scale=scale, do={**STEPS, **steps})[0]


def forward(
    q: Any, k: Any, v: Any, *, do: dict[str, Callable[..., Any]], causal: bool = False, mask: Any = None, scale: Any = None
) -> tuple[Any, Any]:
    """out and the weights."""
    k, v = (do["repeat"](x, q.shape[-3] // x.shape[-3]) for x in (k, v))
    seen = do["diagonal"](q.shape[-2], k.shape[-2]) if causal else np.ones((q.shape[-2], k.shape[-2]), dtype=bool)
    seen = np.broadcast_to(seen if mask is None else seen & mask, (*q.shape[:-1], k.shape[-2]))
    scores = do["scores"](q, k, default_scale(q) if scale is None else scale)
    weights = do["softmax"](do["hide"](scores, seen))
    looked_at: Any = t(np.any(seen, axis=-2, keepdims=True))  # what no query sees may be NaN
    return do["mix"](weights, np.where(looked_at, v, 0)), weights


def vjp(
    dout: Any, q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, mask: Any = None, **steps: Any
) -> Any:
    """out, dq, dk, dv: the lines of forward in reverse."""
    do = {**STEPS, **steps}
    out, weights = forward(q, k, v, causal=causal, mask=mask, scale=scale, do=do)
    group = q.shape[-3] // k.shape[-3]
    full_k, full_v = (np.repeat(x, group, axis=-3) for x in (k, v))
    live, looked_at = weights.any(axis=-1)[..., None], weights.any(axis=-2)[..., None]
    q, dout = np.where(live, q, 0), np.where(live, dout, 0)
    full_k, full_v = np.where(looked_at, full_k, 0), np.where(looked_at, full_v, 0)
    dv = do["dv"](weights, dout)
    dscores = do["dsoftmax"](weights, dout @ t(full_v)) * (default_scale(q) if scale is None else scale)
    dq, dk = do["dq"](dscores, full_k), do["dk"](dscores, q)
    dk, dv = (x.reshape(*k.shape[:-2], group, *x.shape[-2:]) for x in (dk, dv))
    return out, dq, do["gather"](dk), do["gather"](dv)


def softmax(x: Any) -> Any:
    """Along the last axis; 0 where everything is -inf."""
    largest = x.max(axis=-1, keepdims=True)
    e = np.exp(x - np.where(np.isinf(largest), 0, largest))
    total = e.sum(axis=-1, keepdims=True)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def t(x: Any) -> Any:
    """The transpose of matrices."""
    return np.swapaxes(x, -1, -2)


def default_scale(q: Any) -> float:
    """1/√D."""
    return 1 / math.sqrt(q.shape[-1])


STEPS: dict[str, Callable[..., Any]] = {
    "repeat": lambda x, group: np.repeat(x, group, axis=-3),
    "diagonal": lambda T, S: np.tri(T, S, dtype=bool),
    "scores": lambda q, k, scale: scale * (q @ t(k)),
    "hide": lambda scores, seen: np.where(seen, scores, -np.inf),
    "softmax": softmax,
    "mix": lambda weights, v: weights @ v,
    "dv": lambda weights, dout: t(weights) @ dout,
    "dsoftmax": lambda weights, dw: weights * (dw - (weights * dw).sum(axis=-1, keepdims=True)),
    "dq": lambda dscores, k: dscores @ k,
    "dk": lambda dscores, q: t(dscores) @ q,
    "gather": lambda dx: dx.sum(axis=-3),
}

NUMPY: dict[str, Any] = {
    "options": ("causal", "mask", "scale", "grouped", "dead rows"),
    "skip": ("cuts_merge_to_the_whole", "a_number_added_to_a_row_changes_nothing", "score_gradients_of_a_row_sum_to_zero"),
}  # it gives no log-sum-exp and takes no bias
EXAMPLES = 10  # of every law: for a first look


@pytest.mark.parametrize("check", attention_checks(attention, vjp=vjp, examples=EXAMPLES, **NUMPY), ids=str)
def test_numpy(check: Any) -> None:
    """A law each."""
    check()


# PyTorch's, with its known differences -------------------------------------------------------------------------------------


def torch_attention(q: Any, k: Any, v: Any, *, causal: bool = False, mask: Any = None, **options: Any) -> Any:
    """PyTorch's fused attention; where causal, a negative scale makes it NaN (2.13, on a CPU), so the sign goes into q."""
    import torch

    scale = options.get("scale", default_scale(q))
    return torch.nn.functional.scaled_dot_product_attention(
        -q if scale < 0 else q, k, v, attn_mask=mask, is_causal=causal, scale=abs(scale), enable_gqa=q.shape[-3] != k.shape[-3]
    )


def torch_vjp(dout: Any, *inputs: Any, **options: Any) -> Any:
    """Its gradients, by autograd."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = torch_attention(*inputs, **options)
    out.backward(dout)
    return (out.detach(), *(x.grad for x in inputs))


def torch_checks() -> list[Any]:
    """What holds for it: NaN at masked keys is not kept out, and masked keys are hidden by a product, not by selection."""
    known = ("poison_stays_out", "poison_stays_where_it_is_seen")
    try:
        return attention_checks(
            torch_attention,
            vjp=torch_vjp,
            examples=EXAMPLES,
            library="torch",
            dtype="float32",
            options=NUMPY["options"],
            skip=(*NUMPY["skip"], *known),
        )
    except Unavailable as reason:
        return [pytest.param(None, marks=pytest.mark.skip(reason=str(reason)))]


@pytest.mark.parametrize("check", torch_checks(), ids=str)
def test_torch(check: Any) -> None:
    """A law each."""
    check()


# Wrong ones, a fault each ----------------------------------------------------------------------------------------------------


def draws_from_nowhere(rng: Any = np.random.default_rng(0)) -> Callable[..., Any]:  # noqa: B008
    """Dropout with random numbers of its own."""
    return lambda weights, v: (weights * (rng.random(weights.shape) < 0.9)) @ v


def overwrites(q: Any, k: Any, scale: float) -> Any:
    """The scale goes into the caller's q."""
    q *= scale
    return q @ t(k)


def without_products(q: Any, k: Any, scale: float) -> Any:
    """Scores that are no product of q and k."""
    return scale * (q.sum(-1)[..., None] * np.tanh(k.sum(-1))[..., None, :])


def with_positions(q: Any, k: Any, scale: float) -> Any:
    """A bias that nobody asked for."""
    return scale * (q @ t(k)) - 0.1 * np.arange(k.shape[-2])


def nan_softmax(x: Any) -> Any:
    """Without a thought for rows that are -inf throughout."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plus_softmax(weights: Any, dweights: Any) -> Any:
    """The second term added."""
    return weights * (dweights + (weights * dweights).sum(-1, keepdims=True))


# of every law the faults that it names: the step that is wrong, and what stands there
FAULTS: dict[str, dict[str, tuple[str, Callable[..., Any]]]] = {
    "scale_multiplies_the_scores": {
        "the scale comes twice": ("scores", lambda q, k, scale: scale * scale * (q @ t(k))),
        "the scale is the root of what it should be": ("scores", lambda q, k, scale: abs(scale) ** 0.5 * (q @ t(k))),
    },
    "moving_all_keys_changes_nothing": {"scores are no products": ("scores", without_products)},
    "weights_sum_to_one_or_nothing": {
        "softmax runs along the queries": ("softmax", lambda x: t(softmax(t(x)))),
        "softmax does not divide": ("softmax", np.exp),
        "the diagonal is one too far left": ("diagonal", lambda T, S: np.tri(T, S, -1, dtype=bool)),
    },
    "unseen_keys_leave_no_trace": {
        "masked scores are -5": ("hide", lambda scores, seen: np.where(seen, scores, -5.0)),
        "masked scores are 40 less": ("hide", lambda scores, seen: np.where(seen, scores, scores - 40.0)),
        "the diagonal is one too far right": ("diagonal", lambda T, S: np.tri(T, S, 1, dtype=bool)),
        "the diagonal ends at the last key": ("diagonal", lambda T, S: np.tri(T, S, S - T, dtype=bool)),
    },
    "dead_rows_are_zero": {"dead rows are NaN": ("softmax", nan_softmax)},
    "grouped_is_repeated": {
        "query head h reads key head h % K": ("repeat", lambda x, group: np.concatenate([x] * group, axis=-3)),
        "the group is averaged": ("gather", lambda dx: dx.mean(axis=-3)),
    },
    "heads_are_independent": {"heads are in reverse": ("mix", lambda weights, v: (weights @ v)[..., ::-1, :, :])},
    "batched_is_looped": {"entries share a mean": ("mix", lambda weights, v: weights @ v + 1e-3 * v.mean())},
    "values_enter_linearly": {"values go through tanh": ("mix", lambda weights, v: weights @ np.tanh(v))},
    "keys_have_no_order": {
        "keys have positions": ("scores", with_positions),
        "dk is that of the next key": ("dk", lambda dscores, q: np.roll(t(dscores) @ q, 1, axis=-2)),
    },
    "queries_are_independent": {"outputs add up": ("mix", lambda weights, v: np.cumsum(weights @ v, axis=-2))},
    "dtype_and_device_are_kept": {"the result is float32": ("mix", lambda weights, v: (weights @ v).astype("f4"))},
    "inputs_are_not_written": {"the scale is written into q": ("scores", overwrites)},
    "the_same_bits_again": {"dropout that cannot be replayed": ("mix", draws_from_nowhere())},
    "cotangents_enter_linearly": {"dout is taken for ones": ("dv", lambda weights, dout: t(weights) @ np.ones_like(dout))},
    "keys_moved_together_have_no_gradient": {
        "softmax's backward lacks its second term": ("dsoftmax", lambda weights, dweights: weights * dweights),
        "softmax's backward adds its second term": ("dsoftmax", plus_softmax),
    },
    "products_with_gradients_agree": {"dq has the wrong sign": ("dq", lambda dscores, k: -dscores @ k)},
}
WRONG = {fault: (step, wrong, law) for law, faults in FAULTS.items() for fault, (step, wrong) in faults.items()}


def broken_law(fault: str) -> str:
    """The law that catches a wrong one, within 200 problems."""
    step, wrong, _ = WRONG[fault]

    def candidate(*arrays: Any, **options: Any) -> Any:
        return attention(*arrays, **(options | {step: wrong}))

    def backward(*arrays: Any, **options: Any) -> Any:
        return vjp(*arrays, **(options | {step: wrong}))

    try:
        check_attention(candidate, vjp=backward, examples=200, name=fault, **NUMPY)
    except LawBroken as error:
        return error.law
    return "nothing"


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_ones_are_caught(fault: str) -> None:
    """Each by the law that says what is wrong."""
    assert broken_law(fault) == WRONG[fault][-1]


if __name__ == "__main__":
    for each in WRONG:
        print(f"{each:45}{broken_law(each)}", flush=True)
