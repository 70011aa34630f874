"""The word model of examples/attention_by_hand.py, section 12: three matrices learn which noun "it" stands for.

One head and nothing else: no positions, no feed-forward layer. The words' vectors stay as they are drawn.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from npattn import AttentionSaved, attention_backward, attention_forward, tree_map
from npattn.layers import (
    CrossEntropySaved,
    LinearSaved,
    cross_entropy_backward,
    cross_entropy_forward,
    embedding,
    linear_backward,
    linear_forward,
)

SENTENCE = ["The", "cat", "sat", "because", "it", "was", "tired"]
IT = SENTENCE.index("it")
NOUNS, VERBS, MOODS = ["cat", "dog", "bird", "fox"], ["sat", "ran", "slept"], ["tired", "cold", "hungry"]
WORDS = ["The", "because", "it", "was", *NOUNS, *VERBS, *MOODS]
RATE, STEPS = 3.0, 40
NO_QUESTION = -1


class Faces(NamedTuple):
    """The three matrices: all that learns here. Their gradients have the same form."""

    w_q: Any
    w_k: Any
    w_v: Any


class AnswerSaved(NamedTuple):
    """What backward needs, from every part of forward."""

    q: LinearSaved
    k: LinearSaved
    v: LinearSaved
    attention: AttentionSaved
    logits: LinearSaved
    loss: CrossEntropySaved


def answer_forward(
    faces: Faces, table: Any, ids: Any, answers: Any, *, asking: slice = slice(IT, IT + 1), **options: Any
) -> tuple[Any, AnswerSaved]:
    """Which noun does "it" stand for? The loss of the answers to the sentences (B, T).

    Only "it" asks, and there is one answer a sentence, (B,); or the words ``asking`` do, and the answers are (B, as many). The
    options are attention's.
    """
    x = embedding(table, ids)[:, None]  # (B, 1, T, C): one head
    q, q_saved = linear_forward(x[:, :, asking], faces.w_q)
    k, k_saved = linear_forward(x, faces.w_k)
    v, v_saved = linear_forward(x, faces.w_v)
    out, attention_saved = attention_forward(q, k, v, **options)  # (B, 1, asking words, C)
    logits, logits_saved = linear_forward(out, table.T)  # which word's vector is the output most like?
    loss, loss_saved = cross_entropy_forward(logits, answers.reshape(len(ids), 1, -1), ignore_index=NO_QUESTION)
    return loss, AnswerSaved(q_saved, k_saved, v_saved, attention_saved, logits_saved, loss_saved)


def answer_backward(saved: AnswerSaved) -> Faces:
    """The same lines in reverse."""
    g = attention_backward(dout_of(saved), saved.attention)
    return Faces(linear_backward(g.dq, saved.q).dw, linear_backward(g.dk, saved.k).dw, linear_backward(g.dv, saved.v).dw)


def dout_of(saved: AnswerSaved) -> Any:
    """The gradient of the loss that arrives at attention's output."""
    dlogits = cross_entropy_backward(1.0, saved.loss).dlogits
    return linear_backward(dlogits, saved.logits).dx


def sentences() -> tuple[Any, Any, Any]:
    """Ids (B, T) and answers (B,) of all sentences of this kind but ours, and the ids of ours."""
    texts = [["The", noun, verb, "because", "it", "was", mood] for noun in NOUNS for verb in VERBS for mood in MOODS]
    texts.remove(SENTENCE)  # it is only looked at, never learned from
    ids = np.array([[WORDS.index(word) for word in text] for text in texts])
    return ids, ids[:, 1], np.array([[WORDS.index(word) for word in SENTENCE]])


def random_start(seed: int) -> tuple[Any, Faces]:
    """A vector (C,) for each word, all at right angles, which stay as they are; and matrices that know nothing."""
    rng = np.random.default_rng(seed)
    C, D = 16, 4
    table = np.linalg.qr(rng.standard_normal((C, C)))[0][: len(WORDS)]
    w_q, w_k, w_v = (rng.standard_normal((C, width)) / sqrt(C) for width in (D, D, C))
    return table, Faces(w_q, w_k, w_v)


def learn(faces: Faces, table: Any, *, frozen: bool = False, steps: int = STEPS) -> list[Faces]:
    """The matrices after each number of steps, each W - rate * dW.

    (npattn.optim.Adam fits the rate to every number.)
    """
    ids, answers, _ = sentences()
    history = [faces]
    for _ in range(steps):
        _, saved = answer_forward(faces, table, ids, answers)
        grads = answer_backward(saved)
        if frozen:
            grads = grads._replace(w_k=np.zeros_like(grads.w_k))
        faces = tree_map(lambda w, dw: w - RATE * dw, faces, grads)
        history.append(faces)
    return history
