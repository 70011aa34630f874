"""A language model trained by npattn and by PyTorch, from the same weights on the same batches: the same losses, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from npattn._arrays.trees import tree_items
from npattn.models import (
    BlockConfig,
    LanguageModelConfig,
    LanguageModelParams,
    TokenEmbeddingParams,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.optim import AdamW, WarmupCosine
from npattn.texts import Text, read_text
from npattn.training import train
from tests.models import torch_layout

BLOCKS, WIDTH, HEADS, CONTEXT, BATCH = 2, 32, 4, 32, 4
CONFIG = LanguageModelConfig(BlockConfig())
RULE, MAX_NORM = AdamW(lr=3e-3, weight_decay=0.1), 1.0


def pytorch_s_model(torch: Any, text: Text) -> Any:
    """Modules of ``torch.nn`` alone; the logits are made with the tokens' table."""
    nn = torch.nn
    torch.manual_seed(0)

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(len(text.alphabet), WIDTH)
            self.positions = nn.Embedding(CONTEXT, WIDTH)
            options = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
            block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options)
            self.stack = nn.TransformerEncoder(block, BLOCKS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            for table in (self.tokens, self.positions):
                nn.init.normal_(table.weight, std=0.1)

        def forward(self, ids: Any, targets: Any) -> Any:
            x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
            future = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
            logits = self.stack(x, mask=future) @ self.tokens.weight.T
            return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Model().double()


def our_params(model: Any) -> LanguageModelParams:
    arrays = {name: x.detach().numpy().copy() for name, x in model.named_parameters()}
    stack = torch_layout.encoder(arrays, HEADS, "stack.")
    embedding = TokenEmbeddingParams(arrays["tokens.weight"], arrays["positions.weight"])
    return LanguageModelParams(embedding, stack.blocks, stack.norm)


def pytorch_s_losses(torch: Any, model: Any, batches: Any, schedule: WarmupCosine, steps: int) -> list[float]:
    decays = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim == 1]
    groups = [{"params": decays, "weight_decay": RULE.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RULE.lr, (RULE.beta1, RULE.beta2), RULE.eps)
    losses = []
    for step in range(steps):
        loss = model(*(torch.tensor(ids) for ids in batches(step)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("steps", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_losses_are_pytorch_s_at_every_step(steps):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    text = read_text()
    batches = text.batches(size=BATCH, context=CONTEXT)
    schedule = WarmupCosine(RULE.lr, 200, warmup=20)
    model = pytorch_s_model(torch, text)
    params = our_params(model)
    theirs = pytorch_s_losses(torch, model, batches, schedule, steps)

    def loss_and_gradient(params: LanguageModelParams, batch: Any, _step: int) -> tuple[Any, LanguageModelParams]:
        loss, saved = language_model_loss_forward(params, *batch, config=CONFIG)
        return loss, language_model_loss_backward(1.0, saved).dparams

    trained = train(loss_and_gradient, params, batches, RULE, steps=steps, schedule=schedule, max_norm=MAX_NORM)
    np.testing.assert_allclose(trained.losses, theirs, rtol=0, atol=1e-6)
    if steps == 200:
        assert np.mean(theirs[-20:]) < theirs[0] - 1.2  # they have learned something
    ours, last = dict(tree_items(trained.params)), dict(tree_items(our_params(model)))
    for name, x in last.items():
        np.testing.assert_allclose(ours[name], x, rtol=0, atol=1e-6, err_msg=name)
