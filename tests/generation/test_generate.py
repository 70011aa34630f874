"""What is generated: the likeliest tokens, tokens by chance, beams; one prompt or many, of any lengths."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from npattn import length_mask, tree_map
from npattn.layers import log_softmax, softmax
from npattn.models import (
    BlockConfig,
    EncoderDecoderConfig,
    EncoderDecoderParams,
    beam_search,
    encoder_decoder,
    generate,
    language_model,
)
from npattn.models.generate import _Draw
from tests.generation.test_decoding import MODELS, VOCABULARY, model, tokens
from tests.models.cases import randomised

every_model = pytest.mark.parametrize("name", MODELS)


def likeliest(params: Any, prompt: Any, count: int, config: Any) -> list[int]:
    """Without a cache: the whole once more for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(language_model(params, ids, config=config)[-1].argmax()))
    return ids[len(prompt) :]


@every_model
def test_the_likeliest_tokens(name):
    params, config = model(name)
    prompts = [[3], [1, 4, 1, 5, 9], [2, 6, 5]]
    expected = [likeliest(params, prompt, 6, config) for prompt in prompts]
    np.testing.assert_array_equal(generate(params, prompts, count=6, config=config), expected)
    for prompt, one in zip(prompts, expected, strict=True):
        np.testing.assert_array_equal(generate(params, prompt, count=6, config=config), one)


def test_every_library_generates_the_same(library, to_xp):
    params, config = model("llama", blocks=2)
    theirs = tree_map(to_xp, params)
    options: dict[str, Any] = {"count": 5, "temperature": 0.9, "top_p": 0.95, "seed": 3, "config": config}
    expected = generate(params, tokens(2, 4), **options)
    np.testing.assert_array_equal(generate(theirs, to_xp(tokens(2, 4)), **options), expected)
    np.testing.assert_array_equal(generate(theirs, [to_xp(row) for row in tokens(2, 4)], **options), expected)


def test_a_stop_token_ends_a_sequence():
    params, config = model("gpt2")
    prompts = [[3], [1, 4, 1, 5, 9], [2, 6, 5]]
    free = generate(params, prompts, count=8, config=config)
    stop = int(free[1, 3])
    ended = generate(params, prompts, count=8, stop=stop, config=config)
    for row, other in zip(free, ended, strict=True):
        first = int((row == stop).argmax()) if stop in row else 8
        np.testing.assert_array_equal(other[:first], row[:first])
        assert (other[first:] == stop).all()


# Chance ----------------------------------------------------------------------------------------------------------------------


def test_a_seed_says_what_is_drawn():
    params, config = model("gpt2")
    drawn = [generate(params, [3, 1], count=9, temperature=1.5, seed=seed, config=config).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_draws_have_the_probabilities_that_the_model_says():
    params, config = model("gpt2")
    prompts = np.full((4000, 1), 3)
    drawn = np.bincount(generate(params, prompts, count=1, temperature=0.7, seed=0, config=config)[:, 0], minlength=VOCABULARY)
    expected = softmax(language_model(params, [3], config=config)[0] / 0.7)
    spread = np.sqrt(expected * (1 - expected) / len(prompts))
    assert np.all(np.abs(drawn / len(prompts) - expected) < 4.5 * spread + 1e-9)


LOGITS = np.log(np.asarray([[0.1, 0.4, 0.05, 0.3, 0.15], [0.2, 0.2, 0.2, 0.2, 0.2]]))


def weights(**options: Any) -> Any:
    found = _Draw.checked("test", **{"temperature": 1.0, "top_k": None, "top_p": None, "seed": 0, **options}).weights(LOGITS)
    return found / found.sum(-1, keepdims=True)


def test_which_tokens_are_drawn():
    np.testing.assert_allclose(weights()[0], [0.1, 0.4, 0.05, 0.3, 0.15])
    np.testing.assert_allclose(weights(top_k=2)[0], [0, 4 / 7, 0, 3 / 7, 0])
    np.testing.assert_allclose(weights(top_k=9)[0], [0.1, 0.4, 0.05, 0.3, 0.15])
    np.testing.assert_allclose(weights(top_k=2)[1], [0.2] * 5)  # as likely as the last of them
    np.testing.assert_allclose(weights(top_p=0.39)[0], [0, 1, 0, 0, 0])
    np.testing.assert_allclose(weights(top_p=0.41)[0], [0, 4 / 7, 0, 3 / 7, 0])
    np.testing.assert_allclose(weights(top_p=0.71)[0], [0, 8 / 17, 0, 6 / 17, 3 / 17])
    np.testing.assert_allclose(weights(top_p=1.0)[0], [0.1, 0.4, 0.05, 0.3, 0.15])
    np.testing.assert_allclose(weights(top_k=3, top_p=0.5)[0], [0, 4 / 7, 0, 3 / 7, 0])
    squares = np.asarray([0.1, 0.4, 0.05, 0.3, 0.15]) ** 2
    np.testing.assert_allclose(weights(temperature=0.5)[0], squares / squares.sum())


def test_no_token_without_weight_is_drawn():
    draw = _Draw.checked("test", 1.0, 2, None, 0)
    logits = np.log(np.tile([[1e-30, 0.5, 1e-30, 0.5, 1e-30]], (5000, 1)))
    assert set(draw(logits)) == {1, 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be more than 0"),
        ({"top_p": 1.5}, "top_p must be more than 0"),
        ({"count": -1}, "count must be at least 0"),
        ({"count": 20}, "there are 16 learned positions"),
    ],
)
def test_numbers_out_of_range(options, words):
    params, config = model("gpt2")
    with pytest.raises(ValueError, match=words):
        generate(params, [1, 2], **{"count": 3, **options}, config=config)


@pytest.mark.parametrize("prompts", [[], [[1], []], np.zeros((2, 0), int)])
def test_empty_prompts(prompts):
    params, config = model("gpt2")
    with pytest.raises(ValueError, match="a prompt has one token at least"):
        generate(params, prompts, count=3, config=config)


def test_nothing_to_generate():
    params, config = model("gpt2")
    assert generate(params, [[1, 2], [3, 4]], count=0, config=config).shape == (2, 0)
    with pytest.raises(ValueError, match=r"prompts must have shape \(T,\) or \(B, T\)"):
        generate(params, np.zeros((1, 1, 1), int), count=1, config=config)
    with pytest.raises(TypeError, match="integer"):
        generate(params, [1.5], count=1, config=config)


# Beams -----------------------------------------------------------------------------------------------------------------------

SMALL, START, STOP = 5, 0, 1
CONFIG = EncoderDecoderConfig(BlockConfig("post"), BlockConfig("post"))


def translator(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = {"vocabulary": SMALL, "context": 9, "blocks": 1, "width": 8, "heads": 2}
    return randomised(EncoderDecoderParams.init(rng, **sizes, config=CONFIG), rng)


def score(params: Any, source: Any, target: Any, **masks: Any) -> float:
    """The log-probability of a target, up to its first stop token."""
    logits = encoder_decoder(params, source, [START, *target[:-1]], **masks, config=CONFIG)
    chances = log_softmax(logits)
    return float(sum(chances[n, token] for n, token in enumerate(target)))


def all_targets(count: int) -> list[tuple[int, ...]]:
    """Those that end with the stop token, and those that are cut off."""
    others = [n for n in range(SMALL) if n != STOP]
    ended = [(*t, STOP) for n in range(count) for t in itertools.product(others, repeat=n)]
    return [*ended, *itertools.product(others, repeat=count)]


@pytest.mark.parametrize("penalty", [0.0, 0.8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_enough_beams_find_the_best_of_all(seed, penalty):
    params, source, count = translator(seed), [3, 2, 4], 3
    scored = sorted(((score(params, source, t) / len(t) ** penalty, t) for t in all_targets(count)), reverse=True)
    found = beam_search(
        params, source, start=START, stop=STOP, count=count, beams=len(scored), length_penalty=penalty, config=CONFIG
    )
    assert found.ids.shape == (len(scored), count)
    for (best, target), ids, got in zip(scored, found.ids, found.scores, strict=True):
        assert abs(best - got) < 1e-12
        assert tuple(ids[: len(target)]) == target
        assert (ids[len(target) :] == STOP).all()


def test_one_beam_takes_the_likeliest():
    params, source = translator(), [3, 2, 4]
    ids = [START]
    while len(ids) < 7 and ids[-1] != STOP:
        ids.append(int(encoder_decoder(params, source, ids, config=CONFIG)[-1].argmax()))
    found = beam_search(params, source, start=START, stop=STOP, count=6, beams=1, config=CONFIG)
    assert found.ids[0, : len(ids) - 1].tolist() == ids[1:]


def test_sources_of_different_lengths_do_not_disturb_each_other():
    params = translator()
    sources, lengths = np.asarray([[3, 2, 4, 2], [2, 4, 0, 0]]), [4, 2]
    options: dict[str, Any] = {"start": START, "stop": STOP, "count": 5, "beams": 3, "config": CONFIG}
    both = beam_search(params, sources, source_lengths=lengths, **options)
    for n, length in enumerate(lengths):
        alone = beam_search(params, sources[n, :length], **options)
        np.testing.assert_array_equal(both.ids[n], alone.ids)
        np.testing.assert_allclose(both.scores[n], alone.scores, rtol=0, atol=1e-12)
    masks = {"source_mask": length_mask(2), "memory_mask": length_mask(2)}
    best = [int(t) for t in both.ids[1, 0]]
    best = best[: best.index(STOP) + 1] if STOP in best else best
    assert abs(score(params, sources[1], best, **masks) - both.scores[1, 0]) < 1e-12


def test_beams_on_every_library(library, to_xp):
    params = translator()
    options: dict[str, Any] = {"start": START, "stop": STOP, "count": 4, "beams": 3, "config": CONFIG}
    expected = beam_search(params, [[3, 2, 4], [2, 2, 3]], **options)
    found = beam_search(tree_map(to_xp, params), to_xp(np.asarray([[3, 2, 4], [2, 2, 3]])), **options)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": 9}, "start must be at least 0 and less than V = 5, got 9"),
        ({"stop": -1}, "stop must be at least 0 and less than V = 5, got -1"),
        ({"beams": 0}, "beams must be at least 1"),
        ({"count": 0}, "count must be at least 1"),
        ({"source_lengths": [1, 2]}, r"source_lengths must have shape \(1,\)"),
    ],
)
def test_searches_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        beam_search(translator(), [3, 2], **{"start": START, "stop": STOP, "count": 3, **options}, config=CONFIG)
