"""Attention by hand: thirteen short lessons, each with numbers small enough to follow, forward and backward.

    python examples/attention_by_hand.py                the whole lesson
    python examples/attention_by_hand.py --section 4    one section
    python examples/attention_by_hand.py --list         what there is

It needs nothing beyond `pip install npattn`. Every number is computed while you watch; every section returns what it prints.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from math import exp, log, sqrt
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from npattn import (
    MultiHeadParams,
    attention,
    attention_backward,
    attention_forward,
    attention_steps,
    attention_steps_backward,
    attention_weights,
    causal_mask,
    merge_attention,
    multi_head_attention,
    multi_head_attention_backward,
    multi_head_attention_forward,
)
from npattn._commands.word_model import (  # section 12: to be read there, as `python -m npattn explore` uses it too
    NOUNS,
    SENTENCE,
    STEPS,
    WORDS,
    Faces,
    answer_backward,
    answer_forward,
    dout_of,
    learn,
    random_start,
    sentences,
)
from npattn.layers import linear, linear_backward, linear_forward, softmax, softmax_backward, softmax_forward

Numbers = dict[str, Any]


def pipeline() -> Numbers:
    """From X to the output, with every shape

    Queries, keys and values are three products with the same X. Every query meets every key; softmax turns
    each row of scores into weights; the weights mix the values. The letters: T tokens (n in the papers), C
    numbers a token (d_model), D for queries and keys (d_k), E for values (d_v); k' is k transposed.
    """
    rng = np.random.default_rng(1)
    T, C, D, E = 4, 8, 8, 8
    x, dout = rng.standard_normal((T, C)), rng.standard_normal((T, E))
    w_q, w_k, w_v = (rng.standard_normal((C, width)) / sqrt(C) for width in (D, D, E))

    q, k, v = x @ w_q, x @ w_k, x @ w_v
    scores = q @ k.T / sqrt(D)
    weights = softmax(scores)
    by_hand = weights @ v

    out, saved = attention_forward(q, k, v)
    steps = attention_steps(saved)
    shapes({"X": x, "q = X W_Q": q, "k = X W_K": k, "v = X W_V": v})
    shapes({"scores = q k' / sqrt(D)": steps.scores, "weights = softmax(scores)": steps.weights, "out = weights v": out})
    show("weights, a row for each query", steps.weights)
    sums = steps.weights.sum(axis=-1)
    show("the sums of its rows", sums)
    forward = same("attention(q, k, v) and the three lines by hand", attention(q, k, v), by_hand)

    # backward: the same lines in reverse, for a gradient dout that arrives at the output
    dv = weights.T @ dout
    dweights = dout @ v.T
    dscores = weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))
    dq, dk = dscores @ k / sqrt(D), dscores.T @ q / sqrt(D)

    g = attention_backward(dout, saved)
    backward = same("attention_backward and its four lines by hand", [g.dq, g.dk, g.dv], [dq, dk, dv])
    dw_q, dw_k, dw_v = x.T @ g.dq, x.T @ g.dk, x.T @ g.dv
    dx = g.dq @ w_q.T + g.dk @ w_k.T + g.dv @ w_v.T
    shapes({"dW_Q = X' dq": dw_q, "dW_K = X' dk": dw_k, "dW_V = X' dv": dw_v, "dX, one term from each use": dx})
    return {
        "x": x, "w": (w_q, w_k, w_v), "dout": dout, "steps": steps, "out": out, "sums": sums,
        "forward": forward, "backward": backward, "dw": (dw_q, dw_k, dw_v), "dx": dx,
    }  # fmt: skip


def one_position() -> Numbers:
    """One position as plain sums

    What the matrices do for all tokens at once is, for token i, a handful of sums over the tokens j. Its
    backward is a handful of sums as well. Stacking the positions gives the matrices back.
    """
    rng = np.random.default_rng(2)
    T, D, i = 4, 3, 2
    q, k, v, dout = rng.standard_normal((4, T, D))
    out, saved = attention_forward(q, k, v)

    a, out_i = position_forward(q[i], k, v)
    show(f"a_j, the weights of position i = {i} (counting from 0)", a)
    show("output_i = sum over j of a_j v_j", out_i)
    row = same(f"output_{i} and row {i} of the matrix form", out_i, out[i])
    stacked = same("all positions, stacked, and the matrix form", [position_forward(q_i, k, v)[1] for q_i in q], out)

    # if only output_i has a gradient
    dq_i, dk, dv = position_backward(dout[i], q[i], k, v)
    show("dq_i = sum over j of dscore_j k_j / sqrt(D)", dq_i)
    show("dv_j = a_j dout_i, a row for each j", dv)
    g = attention_backward(np.where(np.arange(T)[:, None] == i, dout, 0.0), saved)
    alone = same("dq_i, dk and dv of one position and the matrix form", [dq_i, *dk, *dv], [g.dq[i], *g.dk, *g.dv])

    # keys and values serve all positions: their gradients add up
    every = [position_backward(dout[t], q[t], k, v) for t in range(T)]
    g = attention_backward(dout, saved)
    summed = same(
        "dk and dv, summed over the positions, and the matrix form",
        [sum(dk for _, dk, _ in every), sum(dv for *_, dv in every)],
        [g.dk, g.dv],
    )
    return {
        "q": q, "k": k, "v": v, "dout": dout, "i": i, "weights": a, "out": out_i, "dq": dq_i, "dk": dk, "dv": dv,
        "row": row, "stacked": stacked, "alone": alone, "summed": summed,
    }  # fmt: skip


def position_forward(q_i: Any, k: Any, v: Any) -> tuple[list[float], Any]:
    """The weights and the output of one query."""
    T, D = k.shape
    scores = [sum(q_i[d] * k[j, d] for d in range(D)) / sqrt(D) for j in range(T)]
    total = sum(exp(score) for score in scores)
    a = [exp(score) / total for score in scores]
    return a, sum(a[j] * v[j] for j in range(T))


def position_backward(dout_i: Any, q_i: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """What the gradient of one output sends to its query, and to every key and value."""
    T, D = k.shape
    a, _ = position_forward(q_i, k, v)
    da = [sum(dout_i * v[j]) for j in range(T)]
    delta = sum(a[j] * da[j] for j in range(T))  # their average, by weight
    dscores = [a[j] * (da[j] - delta) for j in range(T)]
    dq_i = sum(dscores[j] * k[j] for j in range(T)) / sqrt(D)
    dk = [dscores[j] * q_i / sqrt(D) for j in range(T)]
    dv = [a[j] * dout_i for j in range(T)]
    return dq_i, np.stack(dk), np.stack(dv)


def three_faces() -> Numbers:
    """One vector, three matrices, three faces

    A word has one vector x. The question it asks, the label it wears and the content it hands over are x
    after three different matrices. So the matrices decide who plays which part, and they can learn it.
    """
    x = np.array([[0.9, 0.2]])  # (1, C): likes sweet things, does not mind spicy ones
    w_q = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 0.0]])  # (C, D)
    w_k = np.array([[1.0, 0.0, -1.0], [0.0, 1.0, 1.0]])
    w_v = np.array([[10.0, 0.0, 0.0], [0.0, 10.0, 10.0]])

    (q, of_q), (k, of_k), (v, of_v) = (linear_forward(x, w) for w in (w_q, w_k, w_v))
    show("x", x)
    show("q = x W_Q: what it asks", q)
    show("k = x W_K: how it is found", k)
    show("v = x W_V: what it hands over", v)
    plain = linear(x, np.eye(2))
    show("x times the identity: with W = I all three would be x itself", plain)

    # backward: a gradient arrives at each face
    dq, dk, dv = np.array([[1.0, 0.0, 0.0]]), np.array([[0.0, 1.0, 0.0]]), np.array([[0.0, 0.0, 1.0]])
    to_q, to_k, to_v = linear_backward(dq, of_q), linear_backward(dk, of_k), linear_backward(dv, of_v)
    dx = to_q.dx + to_k.dx + to_v.dx
    show("dW_Q = x' dq: a gradient of (1, 0, 0) corrects the first column only, in proportion to x", to_q.dw)
    show("dx = dq W_Q' + dk W_K' + dv W_V': one word answers for all of its faces", dx)
    return {
        "x": x, "w": (w_q, w_k, w_v), "faces": (q, k, v), "plain": plain, "cotangents": (dq, dk, dv),
        "dw": (to_q.dw, to_k.dw, to_v.dw), "dx": dx,
    }  # fmt: skip


def on_paper() -> Numbers:
    """One query, two keys: small enough for paper

    With one number a token the whole of attention fits on a line, and so does its gradient.
    """
    q, k, v = np.array([[2.0]]), np.array([[2.0], [1.0]]), np.array([[10.0], [4.0]])
    out, saved = attention_forward(q, k, v)
    g = attention_steps_backward(np.array([[1.0]]), saved)  # how the output itself changes: dout = 1
    print()
    for name, j in (("scores", 0), ("scores", 1), ("weights", 0), ("weights", 1), ("out", 0)):
        spell(g.explain(name, 0, j))
    a, b = g.steps.weights[0].round(3)
    say(
        f"With the weights rounded to three digits, as one would on paper: {a:g} * {v[0, 0]:g} + {b:g} * {v[1, 0]:g} = "
        f"{a * v[0, 0] + b * v[1, 0]:.3f}."
    )
    say(
        "Steps that nothing asks for here repeat the one before: without a mask biased is scores, without dropout dropped is "
        "weights, without a softcap dscores is dbiased. Now back, from dout = 1:"
    )
    print()
    for name, i, j in (("ddropped", 0, 0), ("ddropped", 0, 1), ("dbiased", 0, 0), ("dbiased", 0, 1)):
        spell(g.explain(name, i, j))
    for name, i in (("dq", 0), ("dk", 0), ("dk", 1), ("dv", 0), ("dv", 1)):
        spell(g.explain(name, i, 0))

    nudge = 0.01
    nudged = attention(q + nudge, k, v)
    say(
        f"Try it: q = {q[0, 0] + nudge:g} gives {nudged[0, 0]:.5f}. The gradient foretold "
        f"{out[0, 0]:.5f} + {nudge:g} * {g.dq[0, 0]:.4f} = {out[0, 0] + nudge * g.dq[0, 0]:.5f}."
    )

    # weights say nothing of what stands behind them
    silent, saved = attention_forward(q, k, np.array([[0.0], [4.0]]))
    weights = attention_weights(saved)
    say(
        f"With v = [0], [4] the weights are still {weights[0, 0]:.3f} and {weights[0, 1]:.3f}, yet all of the output, "
        f"{silent[0, 0]:.3f}, comes from the second token: weights alone do not explain what a model does."
    )
    return {"weights": g.steps.weights[0], "out": out[0, 0], "g": g, "nudged": nudged[0, 0], "silent": silent[0, 0]}


def why_sqrt() -> Numbers:
    """Why the scores are divided by sqrt(D)

    A dot product of D random numbers with D others spreads like sqrt(D). Large scores make softmax pick one
    token, and its derivatives vanish: nothing is left to learn from. Dividing keeps both alive.
    """
    rng = np.random.default_rng(5)
    print(f"\n  {'':>6}{'not divided':>30}{'divided by sqrt(D)':>36}")
    print(f"  {'D':>6}" + f"{'spread':>12}{'top weight':>12}{'slope':>9}" * 2)
    spreads, tops, slopes = {}, {}, {}
    for D in (4, 64, 512):
        q, k = rng.standard_normal((2, 10_000, D))
        dots = (q * k).sum(axis=-1)
        for way, scores in (("plain", dots), ("divided", dots / sqrt(D))):
            weights = softmax(scores.reshape(-1, 10))  # as if every query had ten keys
            spreads[way, D] = scores.std()
            tops[way, D] = weights.max(axis=-1).mean()
            slopes[way, D] = np.mean([jacobian_size(row) for row in weights])
        columns = (f"{spreads[w, D]:>12.2f}{tops[w, D]:>12.3f}{slopes[w, D]:>9.3f}" for w in ("plain", "divided"))
        print(f"  {D:>6}" + "".join(columns))
    say("slope: the size of the matrix of all derivatives, ten weights by their ten scores, on average.")

    scores = np.array([2.0, 1.0, 0.5])
    jacobians = [softmax_jacobian(scores), softmax_jacobian(8 * scores)]
    show("softmax of (2, 1, 0.5): spread out", softmax(scores), digits=4)
    show("its derivatives, weight i by score j", jacobians[0], digits=4)
    show("softmax of eight times that: nearly all on one token", softmax(8 * scores), digits=4)
    show("its derivatives: nearly nothing", jacobians[1], digits=4)
    sizes = [float(np.linalg.norm(j)) for j in jacobians]
    say(f"The size of all derivatives falls from {sizes[0]:.3f} to {sizes[1]:.5f}, to one part in {sizes[0] / sizes[1]:.0f}.")
    return {
        "spreads": spreads, "tops": tops, "slopes": slopes, "scores": scores,
        "weights": (softmax(scores), softmax(8 * scores)), "jacobians": jacobians, "sizes": sizes,
    }  # fmt: skip


def softmax_jacobian(scores: Any) -> Any:
    """Every derivative of softmax: its backward, asked once for each weight."""
    each = np.eye(len(scores))
    _, saved = softmax_forward(np.tile(scores, (len(scores), 1)))
    return softmax_backward(each, saved).dx


def jacobian_size(weights: Any) -> float:
    """The same in closed form: a_i ([i = j] - a_j)."""
    return float(np.linalg.norm(np.diag(weights) - np.outer(weights, weights)))


def causal() -> Numbers:
    """A causal mask: no token sees the future

    Scores above the diagonal become minus infinity before softmax, so their weights are exactly 0. Backward
    keeps the promise: what a token may not see gets no gradient from it.
    """
    words = ["The", "cat", "sat", "on"]
    wanted = np.array([[1.00, 0, 0, 0], [0.30, 0.70, 0, 0], [0.10, 0.60, 0.30, 0], [0.05, 0.20, 0.45, 0.30]])
    past = np.tril(np.ones((4, 4), dtype=bool))
    scores = np.where(past, np.log(np.where(past, wanted, 1.0)), 2.0)  # the future looks tempting: its scores are the highest
    rng = np.random.default_rng(6)
    v, dout = rng.standard_normal((2, 4, 3))
    q, k = scores, np.eye(4)  # with these keys q k' is the table of scores itself

    _, unmasked = attention_forward(q, k, v, scale=1.0)
    show("weights without a mask: everyone stares at the future", attention_weights(unmasked), words, words, digits=2)
    mask = causal_mask()
    say("print(causal_mask().draw(4, 4)): who may look (down) at whom (across)")
    spell(mask.draw(4, 4))
    say(mask.explain(1, 2, T=4, S=4))
    out, saved = attention_forward(q, k, v, mask=mask, scale=1.0)
    weights = attention_weights(saved)
    show("weights with it", weights, words, words, digits=2)

    # a loss that looks at "sat" alone: nothing flows to "on", which comes later
    at_sat = np.where(np.arange(4)[:, None] == words.index("sat"), dout, 0.0)
    g = attention_steps_backward(at_sat, saved)
    show('dk, if only the output of "sat" counts', g.dk, words)
    show("dv, likewise", g.dv, words)
    everywhere = attention_steps_backward(dout, saved)
    future = np.abs(everywhere.dscores[~past]).max()
    say(f"With a gradient at every output, the largest dscores above the diagonal is {future:g}.")
    changed = attention(q, k, np.where(np.arange(4)[:, None] == 3, 1e6, v), mask=mask, scale=1.0)
    moved = np.abs(changed - out).max(axis=-1)
    say(
        f'With a million for the value of "on", the outputs of the others change by {", ".join(f"{m:g}" for m in moved[:3])} '
        f"and its own by {moved[3]:g}."
    )
    return {
        "q": q, "k": k, "v": v, "wanted": wanted, "weights": weights, "at_sat": at_sat, "g": g, "future": future, "moved": moved,
        "unmasked": attention_weights(unmasked),
    }  # fmt: skip


def cross() -> Numbers:
    """Cross-attention: the questions come from elsewhere

    Queries from one sequence, keys and values from another. The formula does not notice; the scores are
    no longer square. Backward has two ends: the asking side learns through q, the asked side through k and v.
    """
    asking, asked = ["elle", "lit", "encore"], ["she", "is", "still", "reading", "."]
    rng = np.random.default_rng(7)
    C, D = 8, 8
    decoder, encoder = rng.standard_normal((3, C)), rng.standard_normal((5, C))
    dout = rng.standard_normal((3, D))
    w_q, w_k, w_v = rng.standard_normal((3, C, D)) / sqrt(C)

    q, k, v = decoder @ w_q, encoder @ w_k, encoder @ w_v
    out, saved = attention_forward(q, k, v)
    shapes({"decoder": decoder, "encoder": encoder, "q = decoder W_Q": q, "k = encoder W_K": k, "v = encoder W_V": v, "out": out})
    weights = attention_weights(saved)
    show("weights (the projections are random: nothing is learned yet)", weights, asking, asked)

    g = attention_backward(dout, saved)
    d_decoder = g.dq @ w_q.T
    d_encoder = g.dk @ w_k.T + g.dv @ w_v.T
    shapes({"d decoder = dq W_Q'": d_decoder, "d encoder = dk W_K' + dv W_V'": d_encoder})
    show("how much each token is asked to change (the length of its gradient): decoder", lengths(d_decoder), columns=asking)
    show("and encoder", lengths(d_encoder), columns=asked)
    return {
        "decoder": decoder, "encoder": encoder, "w": (w_q, w_k, w_v), "dout": dout, "out": out, "weights": weights,
        "d_decoder": d_decoder, "d_encoder": d_encoder,
    }  # fmt: skip


def heads() -> Numbers:
    """Several heads are one more axis

    H heads are H attentions with D = C / H, each with projections of its own, laid side by side and mixed by
    W_O. In arrays that is one more axis, so all heads are one call, at about the price of one large head.
    """
    rng = np.random.default_rng(8)
    T, C, H = 4, 8, 2
    x, dout = rng.standard_normal((2, T, C))
    params = MultiHeadParams.init(rng, width=C, heads=H, bias=False)
    w_q, w_k, w_v, w_o = params.w_q, params.w_k, params.w_v, params.w_o  # (C, H, D) three times and (H, E, C)
    shapes({"w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o})

    out, saved = multi_head_attention_forward(params, x, x)
    shapes({"q, with its axis of heads": saved.attention.q, "weights": attention_weights(saved.attention), "out": out})
    alone = [attention_forward(x @ w_q[:, h], x @ w_k[:, h], x @ w_v[:, h]) for h in range(H)]
    beside = np.concatenate([head for head, _ in alone], axis=-1)  # (T, H*E)
    forward = same("multi_head_attention and Concat(head_1, ..., head_H) W_O", out, beside @ w_o.reshape(C, C))

    # backward: W_O hands every head its share of dout, and the heads go their own ways
    grads = multi_head_attention_backward(dout, saved)
    own = [attention_backward(dout @ w_o[h].T, head_saved) for h, (_, head_saved) in enumerate(alone)]
    dw_q = np.stack([x.T @ g.dq for g in own], axis=1)
    backward = same("dW_Q of all heads and of each head by itself", grads.dparams.w_q, dw_q)

    decoder, encoder = x[:3], rng.standard_normal((5, C))
    shapes({"the same params for cross-attention": multi_head_attention(params, decoder, encoder)})

    T, C, H = 64, 512, 8
    wide = rng.standard_normal((T, C)).astype(np.float32)
    one, many = (MultiHeadParams.init(rng, width=C, heads=n, bias=False, dtype=np.float32) for n in (1, H))
    products = [multiplications(p, T) for p in (one, many)]
    with threadpool_limits(1):  # work, not scheduling
        seconds = [[run_time(p, wide) for p in (one, many)] for _ in range(25)]
    ratio = statistics.median(b for _, b in seconds) / statistics.median(a for a, _ in seconds)
    say(
        f"The price, for T = {T}, C = {C} in float32. Multiplications in forward: {products[0]:,} for one head, {products[1]:,} "
        f"for {H}. Forward and backward, measured on one core (medians of {len(seconds)} runs):"
    )
    print(f"    {H} heads take {ratio:.2f} times as long as one")
    say(f"Only softmax has more to do: {H} tables of {T} x {T} weights instead of one.")
    return {
        "x": x, "params": params, "dout": dout, "out": out, "grads": grads, "forward": forward, "backward": backward,
        "products": products, "ratio": ratio,
    }  # fmt: skip


def multiplications(params: MultiHeadParams, T: int) -> int:
    """What self-attention over T tokens multiplies: the four projections, then scores and mixing for each head."""
    projections = sum(w.size for w in (params.w_q, params.w_k, params.w_v, params.w_o)) * T
    _, H, D = params.w_q.shape
    E = params.w_v.shape[-1]
    return int(projections + H * T * T * (D + E))


def run_time(params: MultiHeadParams, x: Any) -> float:
    """Seconds for one forward and backward."""
    start = time.perf_counter()
    out, saved = multi_head_attention_forward(params, x, x)
    multi_head_attention_backward(out, saved)
    return time.perf_counter() - start


def order() -> Numbers:
    """Attention alone knows no order

    Shuffle the tokens and the outputs are shuffled in the same way, with not a number changed. Order has to
    be written into the tokens: add a vector for each position, and the two sentences part.
    """
    words = ["dog", "bites", "man"]
    swap = [2, 1, 0]  # man bites dog
    rng = np.random.default_rng(9)
    x, positions, dout = rng.standard_normal((3, 3, 4))

    (out, saved), (swapped, swapped_saved) = (attention_forward(y, y, y) for y in (x, x[swap]))
    show("dog bites man", out, words)
    show("man bites dog: the same rows in another order", swapped, [words[i] for i in swap])
    permuted = same("out[swap] and the output of x[swap]", out[swap], swapped)
    g, h = attention_backward(dout, saved), attention_backward(dout[swap], swapped_saved)
    dx, swapped_dx = g.dq + g.dk + g.dv, h.dq + h.dk + h.dv
    back = same("dx[swap] and the gradient of x[swap]", dx[swap], swapped_dx)

    first, second = x + positions, x[swap] + positions  # position 0 gets the first vector, whoever stands there
    with_positions = attention(first, first, first), attention(second, second, second)
    show("with positions: the output for each word of dog bites man", with_positions[0], words)
    show("and of man bites dog, in the order of the first", with_positions[1][swap], words)
    apart = float(np.abs(with_positions[0][swap] - with_positions[1]).max())
    say(f"Now they differ by up to {apart:.2f}.")
    return {"x": x, "dout": dout, "dx": dx, "permuted": permuted, "back": back, "apart": apart}


def cells() -> Numbers:
    """The cells of a product do not wait for each other

    Each cell of A B needs one row of A and one column of B and no other cell. So the cells may be computed
    in any order, in blocks, or all at once, which is what a GPU is for. Attention is products, and one softmax.
    """
    rng = np.random.default_rng(10)
    a, b, dc = (rng.integers(-9, 10, shape).astype(float) for shape in ((6, 5), (5, 4), (6, 4)))
    whole, saved = linear_forward(a, b)

    shuffled = np.zeros((6, 4))
    for i, j in rng.permutation(list(np.ndindex(6, 4))):  # any order will do
        shuffled[i, j] = sum(a[i, n] * b[n, j] for n in range(5))
    blocks = np.block([[a[:3] @ b[:, :2], a[:3] @ b[:, 2:]], [a[3:] @ b[:, :2], a[3:] @ b[:, 2:]]])
    show("A B", whole, digits=0)
    in_any_order = same("cell by cell, in random order, and A B", shuffled, whole)
    in_blocks = same("four blocks and A B", blocks, whole)

    # backward: dA = dC B' and dB = A' dC are products too, so the same holds
    g = linear_backward(dc, saved)
    da, db = np.zeros((6, 5)), np.zeros((5, 4))
    for i, j in rng.permutation(list(np.ndindex(6, 5))):
        da[i, j] = sum(dc[i, n] * b[j, n] for n in range(4))
    for i, j in rng.permutation(list(np.ndindex(5, 4))):
        db[i, j] = sum(a[n, i] * dc[n, j] for n in range(6))
    in_backward = same("dA and dB cell by cell and linear_backward", np.concatenate([da, db.T]), np.concatenate([g.dx, g.dw.T]))

    q, k, v = rng.standard_normal((3, 6, 4))
    rows = np.zeros((6, 4))
    for i in rng.permutation(6):
        rows[i] = attention(q[i : i + 1], k, v)[0]
    queries = same("queries one at a time, in random order, and attention(q, k, v)", rows, attention(q, k, v))
    # keys do meet, in the sum below softmax: so parts keep the logarithm of that sum, and are joined by it
    parts = [attention_forward(q, k[cut], v[cut]) for cut in (slice(0, 2), slice(2, 6))]
    joined, _ = merge_attention([(out, part.lse) for out, part in parts])
    keys = same("two keys and the other four, merged by merge_attention, and attention(q, k, v)", joined, attention(q, k, v))
    return {
        "a": a, "b": b, "dc": dc, "whole": whole, "da": da, "db": db, "in_any_order": in_any_order, "in_blocks": in_blocks,
        "in_backward": in_backward, "queries": queries, "keys": keys,
    }  # fmt: skip


def key_length() -> Numbers:
    """A key's length counts, not only its direction

    One often hears that the dot product compares directions. That is so for vectors of one length. Here a
    longer key in the same direction scores higher, and a long one can beat a better aimed one.
    """
    q = np.array([[1.0, 0.0]])
    k = np.array([[1.0, 0.0], [3.0, 0.0], [4.0, 4.0], [0.0, 5.0], [-1.0, 0.0], [-3.0, 0.0]])
    size = lengths(k)
    cosine = (k @ q[0]) / (size * lengths(q))
    _, saved = attention_forward(q, k, np.eye(len(k)))  # these values make the output the weights themselves
    _, same_length = attention_forward(q, k / size[:, None], np.eye(len(k)))
    weights, directions = attention_weights(saved)[0], attention_weights(same_length)[0]
    table = np.stack([cosine, size, attention_steps(saved).scores[0], weights, directions], axis=-1)
    names = ["cosine", "length", "score", "weight", "of length 1"]
    show(
        f"the query is {q[0].tolist()}; last, the weight if every key is cut to length 1",
        table,
        [str(row.tolist()) for row in k],
        names,
    )

    # backward: the part of dk along k is what the key's length is worth
    j = 2
    g = attention_backward(np.eye(len(k))[j : j + 1], saved)  # of the weight of key j
    slope = float(g.dk[j] @ k[j] / size[j])
    longer = np.where(np.arange(len(k))[:, None] == j, k * (1 + 0.01 / size[j]), k)
    gain = float(attention(q, longer, np.eye(len(k)))[0, j] - weights[j])
    say(
        f"Lengthen the key {k[j].tolist()} by 0.01: its weight grows by {gain:.6f}. The gradient foretold "
        f"0.01 * {slope:.4f} = {0.01 * slope:.6f}. So learning may use the length as well."
    )
    return {
        "q": q, "k": k, "cosine": cosine, "length": size, "weights": weights, "directions": directions, "slope": slope, "j": j,
        "gain": gain,
    }  # fmt: skip


WATCHED = (0, 5, 10, 15, 20, 25, 30, 40)  # steps that are printed


def labels_by_hand(table: Any, faces: Faces) -> Faces:
    """W_K made by a person: every word's key is its number of letters and its number of vowels, both around 0."""
    labels = np.array([[len(word), sum(letter in "aeiou" for letter in word)] for word in WORDS], dtype=float)
    labels = (labels - labels.mean(axis=0)) / labels.std(axis=0)
    return faces._replace(w_q=faces.w_q[:, :2], w_k=table.T @ labels)  # the rows of the table are at right angles


def weights_of_it(faces: Faces, table: Any) -> Any:
    """Whom "it" looks at in our sentence."""
    _, _, ours = sentences()
    _, saved = answer_forward(faces, table, ours, ours[:, 1])
    return attention_weights(saved.attention)[0, 0, 0]


def learning() -> Numbers:
    """How W_Q, W_K and W_V learn whom "it" means

    Thirty-five sentences like "The dog ran because it was cold" ask one question: which noun is "it"? The
    gradient of the loss says for every number of the three matrices how to change it, and a step changes it a
    little: W - rate * dW. "The cat sat because it was tired" is never learned from; there we only look.
    """
    table, start = random_start(0)
    ids, answers, _ = sentences()

    loss, saved = answer_forward(start, table, ids, answers)
    grads = answer_backward(saved)
    say(
        "The gradients at the start, each x' times the gradient of its face (section 3), and what a small step along each "
        "alone does to the loss, which -rate |dW|^2 foretells:"
    )
    print(f"\n    {'':<18}{'|dW|':>9}{'change':>14}{'foretold':>14}")
    rate, foretold, found = 0.1, [], []
    for name, w, dw in zip(Faces._fields, start, grads, strict=True):
        stepped = start._replace(**{name: w - rate * dw})
        found.append(float(answer_forward(stepped, table, ids, answers)[0] - loss))
        foretold.append(-rate * float((dw * dw).sum()))
        print(f"    d{name} {dw.shape!s:<13}{np.linalg.norm(dw):>9.4f}{found[-1]:>14.2e}{foretold[-1]:>14.2e}")
    say("At first nearly all of it comes through the values. Where to look becomes worth learning once they help.")

    history = learn(start, table)
    losses = [float(answer_forward(faces, table, ids, answers)[0]) for faces in history]
    looks = np.stack([weights_of_it(history[step], table) for step in WATCHED])
    show(
        'whom "it" looks at, and the loss',
        np.column_stack([looks, [losses[step] for step in WATCHED]]),
        [f"step {step}" for step in WATCHED],
        [*SENTENCE, "loss"],
        digits=2,
    )

    turning = 15
    _, saved = answer_forward(history[turning], table, ids, answers)
    inside = attention_steps_backward(dout_of(saved), saved.attention)
    push = -inside.dscores.sum(axis=(0, 1, 2))
    show(
        f"what pushes the scores at step {turning}: -dscores, over all sentences",
        push,
        [""],
        ["The", "(noun)", "(verb)", "because", "it", "was", "(mood)"],
    )
    say(
        "dscores_j = a_j (dweights_j - delta): a word whose value helps the answer more than the mix does is scored up. "
        "The push reaches W_Q through the keys, and W_K through the queries."
    )

    ways = {"learned": history, "as drawn": learn(start, table, frozen=True)}
    ways["by hand"] = learn(labels_by_hand(table, start), table, frozen=True)
    final = {way: weights_of_it(h[-1], table) for way, h in ways.items()}
    ends = {way: float(answer_forward(h[-1], table, ids, answers)[0]) for way, h in ways.items()}
    show(
        f"after {STEPS} steps: W_K learned; left as it was drawn; made by hand, of each word's letters and vowels",
        np.column_stack([[*final.values()], [*ends.values()]]),
        list(ways),
        [*SENTENCE, "loss"],
        digits=2,
    )
    say(
        'By hand, "The", "cat", "sat" and "was" have one label, and no query can tell them apart. As drawn, labels differ, but '
        "nobody made them for this question. A W_K that learns gives nouns a label to be found by. (W_Q and W_V learned each "
        f"time; guessing among {len(NOUNS)} nouns has the loss ln {len(NOUNS)} = {log(len(NOUNS)):.2f}.)"
    )

    starts = [random_start(seed) for seed in range(1, 6)]
    others = {
        "learned": [float(weights_of_it(learn(f, t)[-1], t)[1]) for t, f in starts],
        "as drawn": [float(weights_of_it(learn(f, t, frozen=True)[-1], t)[1]) for t, f in starts],
    }
    say(f'From {len(starts)} other random starts: the weight of "it" on "cat"')
    for way, on_cat in others.items():
        print(f"    {way:<9}" + "".join(f"{w:>8.2f}" for w in on_cat))
    return {
        "table": table, "start": start, "grads": grads, "foretold": foretold, "found": found, "losses": losses, "looks": looks,
        "push": push, "final": final, "ends": ends, "others": others,
    }  # fmt: skip


def where_from() -> Numbers:
    """Where queries, keys and values come from

    The formula stays the same in all of them. What changes is where q, k and v come from, who may see whom,
    and how many heads work side by side.
    """
    rng = np.random.default_rng(13)
    x, decoder, encoder = (rng.standard_normal((T, 8)) for T in (4, 3, 5))
    one, two = (MultiHeadParams.init(rng, width=8, heads=H, bias=False) for H in (1, 2))
    past = causal_mask()
    kinds = [
        ("self-attention", "the sequence", "the sequence", "(p, x, x)", (one, x, x, None)),
        ("causal self-attention", "the sequence", "it, up to the token", "(p, x, x, mask=causal_mask())", (one, x, x, past)),
        ("cross-attention", "the decoder", "the encoder", "(p, decoder, encoder)", (one, decoder, encoder, None)),
        ("multi-head", "any of these", "any of these", "(p, x, x), with 2 heads in p", (two, x, x, None)),
    ]
    print(f"\n  {'':<22}{'q from':<14}{'k, v from':<21}{'weights':<11}{'pairs':>5}")
    found = {}
    for name, q_from, kv_from, call, (params, x_q, x_kv, mask) in kinds:
        _, saved = multi_head_attention_forward(params, x_q, x_kv, mask=mask)
        weights = found[name] = attention_weights(saved.attention)
        print(f"\n  {name:<22}{q_from:<14}{kv_from:<21}{weights.shape!s:<11}{int((weights > 0).sum()):>5}")
        print(f"      multi_head_attention{call}")
    say(
        "weights: (heads, queries, keys); pairs: how many of them are not 0. The first relates the words of one text, the "
        "second writes it from left to right, the third reads another text meanwhile, the last does any of it several times "
        "over."
    )
    say(
        "Backward goes the same ways: in self-attention x was used twice, and its gradient is dx_q + dx_kv; in cross-attention "
        "each side gets its own."
    )
    return {"weights": found}


# Layout ------------------------------------------------------------------------------------------------------------------------

WIDTH = 79


def say(text: str, *, indent: int = 2) -> None:
    """A paragraph."""
    print("\n" + textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent))


def spell(text: str) -> None:
    """Lines as they are, four columns to the right; what is too long goes on below."""
    for line in text.splitlines():
        print(textwrap.fill(line, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 24))


def show(name: str, x: Any, rows: Sequence[str] = (), columns: Sequence[str] = (), *, digits: int = 3) -> None:
    """A matrix below its name, with words beside its rows and above its columns."""
    say(name)
    beside = max((len(row) for row in rows), default=0)
    width = max([8, *(len(column) + 1 for column in columns)])
    if columns:
        print(" " * (4 + beside) + "".join(f"{column:>{width}}" for column in columns))
    for i, numbers in enumerate(np.atleast_2d(x)):
        label = rows[i] if rows else ""
        print(f"    {label:<{beside}}" + "".join(f"{float(number):z{width}.{digits}f}" for number in numbers))


def shapes(arrays: dict[str, Any]) -> None:
    """Names and shapes."""
    print()
    for name, array in arrays.items():
        print(f"    {name:<38}{array.shape}")


def same(claim: str, a: Any, b: Any) -> float:
    """Two ways to one result: how far apart are they?"""
    difference = float(np.abs(np.asarray(a) - np.asarray(b)).max())
    say(f"{claim}: " + ("the same, to rounding" if difference < 1e-12 else f"not the same, {difference:.1e} apart"))
    return difference


def lengths(x: Any) -> Any:
    """The length of every row."""
    return np.linalg.norm(x, axis=-1)


SECTIONS: tuple[Callable[[], Numbers], ...] = (
    pipeline,
    one_position,
    three_faces,
    on_paper,
    why_sqrt,
    causal,
    cross,
    heads,
    order,
    cells,
    key_length,
    learning,
    where_from,
)


def title(section: Callable[[], Numbers]) -> str:
    """The first line of a section's docstring."""
    return inspect.getdoc(section).partition("\n")[0]  # type: ignore[union-attr]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the lesson, or a part of it."""
    parser = argparse.ArgumentParser(description="Attention by hand: forward and backward in small numbers.")
    parser.add_argument("--section", type=int, choices=range(1, len(SECTIONS) + 1), metavar="N", help="print section N only")
    parser.add_argument("--list", action="store_true", help="list the sections")
    asked = parser.parse_args(argv)
    for number, section in enumerate(SECTIONS, start=1):
        if asked.list:
            print(f"{number:>3}  {title(section)}")
        elif asked.section in (None, number):
            _, _, idea = inspect.getdoc(section).partition("\n\n")  # type: ignore[union-attr]
            print(f"{'=' * WIDTH}\n{number}. {title(section)}\n{'=' * WIDTH}")
            say(" ".join(idea.split()), indent=0)
            section()
            print("\n")


if __name__ == "__main__":
    main()
