"""A training step of a language model, for ``python -m npattn bench``: npattn, PyTorch's modules, the matrix products alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import Array
from npattn._arrays.trees import tree_map
from npattn._commands.bench_backends import Backend, Call
from npattn._commands.bench_cases import BOTH, Case
from npattn._commands.bench_products import prepare_products
from npattn.layers import FeedForwardParams
from npattn.models import (
    LanguageModelConfig,
    LanguageModelParams,
    NormParams,
    language_model_loss_backward,
    language_model_loss_forward,
)
from npattn.optim import AdamW

STEP = "step"
CONFIG = LanguageModelConfig()
RULE = AdamW(lr=1e-3, weight_decay=0.1)


class TrainInputs(NamedTuple):
    """NumPy arrays that every library copies its own from."""

    params: LanguageModelParams
    ids: Array  # (B, T)
    targets: Array  # (B, T)


class TrainCase(NamedTuple):
    """Forward, backward and AdamW of a language model as GPT-2 is made, on B texts of T tokens."""

    B: int = 8
    T: int = 256
    C: int = 256
    H: int = 8
    blocks: int = 4
    V: int = 96
    dtype: str = "float32"

    @property
    def kind(self) -> str:
        """What the name begins with."""
        return "train"

    @property
    def name(self) -> str:
        """Kind, size and dtype."""
        return f"{self.kind}-{self.B}x{self.T}-{self.dtype}"

    @property
    def passes(self) -> tuple[str, ...]:
        """What is measured."""
        return (STEP,)

    @property
    def attention(self) -> Case:
        """The attention of a block."""
        return Case("causal", self.T, self.T, self.dtype, B=self.B, H=self.H, K=self.H, D=self.C // self.H)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """The sizes of all linear maps: queries, keys, values, merged heads, both of the feed-forward network; the logits."""
        c = self.C
        return self.blocks * [*(4 * [(c, c)]), (c, 4 * c), (4 * c, c)] + [(c, self.V)]

    def operations(self, _name: str) -> int:
        """Floating-point operations of the step's matrix products."""
        linears = 3 * 2 * self.B * self.T * sum(a * b for a, b in self.linears)
        return linears + self.blocks * self.attention.operations(BOTH)

    def inputs(self) -> TrainInputs:
        """The case's arrays, the same in every run."""
        rng = np.random.default_rng(0)
        sizes: dict[str, Any] = {"vocabulary": self.V, "context": self.T, "blocks": self.blocks, "width": self.C, "heads": self.H}
        params = LanguageModelParams.init(rng, **sizes, config=CONFIG, dtype=np.float32)
        ids, targets = rng.integers(0, self.V, (2, self.B, self.T))
        return TrainInputs(params, ids, targets)


TRAININGS = (TrainCase(),)


def npattn_step(case: TrainCase, inputs: TrainInputs, backend: Backend) -> Call:
    """A step of this package. Every call takes the next one; it gives the loss and gradients of the first and the last layers."""
    params = tree_map(lambda x: backend.array(x, case.dtype), inputs.params)
    ids, targets = (backend.xp.asarray(x) for x in (inputs.ids, inputs.targets))
    reached = [(params, RULE.init(params))]

    def step() -> tuple[Array, ...]:
        params, state = reached[0]
        loss, saved = language_model_loss_forward(params, ids, targets, config=CONFIG)
        grads = language_model_loss_backward(1.0, saved).dparams
        reached[0] = RULE.update(params, grads, state)
        return loss, grads.embedding.tokens, grads.blocks[0].attention.w_o, grads.blocks[-1].feed_forward.w_in

    return step


def torch_step(case: TrainCase, inputs: TrainInputs, torch: Any, device: str) -> Call:
    """The same of PyTorch's own modules, eagerly: its fused attention, its AdamW."""
    model = _torch_model(case, inputs.params, torch).to(device, getattr(torch, case.dtype))
    ids, targets = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (inputs.ids, inputs.targets))
    matrices = [x for x in model.parameters() if x.ndim > 1]
    others = [x for x in model.parameters() if x.ndim == 1]
    groups = [{"params": matrices, "weight_decay": RULE.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RULE.lr, (RULE.beta1, RULE.beta2), RULE.eps)
    first, last = model.stack.layers[0], model.stack.layers[-1]

    def step() -> tuple[Array, ...]:
        optimizer.zero_grad()
        loss = model(ids, targets)
        loss.backward()
        w_o = first.self_attn.out_proj.weight.grad.T.reshape(case.H, case.C // case.H, case.C)
        found = loss.detach(), model.tokens.weight.grad, w_o, last.linear1.weight.grad.T
        optimizer.step()
        return found

    return step


def _torch_model(case: TrainCase, params: LanguageModelParams, torch: Any) -> Any:
    nn, functional = torch.nn, torch.nn.functional

    class Model(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(case.V, case.C), nn.Embedding(case.T, case.C)
            options = {"dropout": 0.0, "activation": "gelu", "norm_first": True, "batch_first": True}
            block = nn.TransformerEncoderLayer(case.C, case.H, 4 * case.C, **options)
            self.stack = nn.TransformerEncoder(block, case.blocks, norm=nn.LayerNorm(case.C), enable_nested_tensor=False)
            self.register_buffer("future", nn.Transformer.generate_square_subsequent_mask(case.T))

        def forward(self, ids: Any, targets: Any) -> Any:
            x = self.tokens(ids) + self.positions.weight
            x = self.stack(x, mask=self.future, is_causal=True)
            return functional.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), targets.flatten())

    model = Model()
    arrays = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in _torch_arrays(params).items()}
    model.load_state_dict(arrays, strict=False)
    return model


def _torch_arrays(params: LanguageModelParams) -> dict[str, Array]:
    """The parameters by PyTorch's names, in its layouts."""
    arrays: dict[str, Array] = {"tokens.weight": params.embedding.tokens, "positions.weight": params.embedding.positions}
    assert params.norm is not None
    norms: dict[str, NormParams] = {"stack.norm": params.norm}
    for n, block in enumerate(params.blocks):
        prefix = f"stack.layers.{n}"
        attention: Any = block.attention
        width = attention.w_q.shape[0]
        projections = [w.reshape(width, width).T for w in attention[:3]]
        arrays[f"{prefix}.self_attn.in_proj_weight"] = np.concatenate(projections)
        arrays[f"{prefix}.self_attn.in_proj_bias"] = np.concatenate([b.reshape(-1) for b in attention[4:7]])
        arrays[f"{prefix}.self_attn.out_proj.weight"] = attention.w_o.reshape(width, width).T
        arrays[f"{prefix}.self_attn.out_proj.bias"] = attention.b_o
        feed = block.feed_forward
        assert isinstance(feed, FeedForwardParams)
        arrays[f"{prefix}.linear1.weight"], arrays[f"{prefix}.linear1.bias"] = feed.w_in.T, feed.b_in
        arrays[f"{prefix}.linear2.weight"], arrays[f"{prefix}.linear2.bias"] = feed.w_out.T, feed.b_out
        norms |= {f"{prefix}.norm1": block.attention_norm, f"{prefix}.norm2": block.feed_forward_norm}
    for name, norm in norms.items():
        arrays[f"{name}.weight"], arrays[f"{name}.bias"] = norm.weight, norm.bias
    return arrays


def prepare_step_products(case: TrainCase, backend: Backend) -> Call:
    """The step's matrix products alone, into memory that is there."""
    xp, rows = backend.xp, case.B * case.T
    attend = prepare_products(case.attention, case.attention.inputs(), BOTH, backend)
    tokens = {size: backend.array(np.ones((rows, size), np.float32), case.dtype) for pair in case.linears for size in pair}
    weights = {pair: backend.array(np.ones(pair, np.float32), case.dtype) for pair in case.linears}

    def products() -> tuple[Array, ...]:
        for pair in case.linears:
            x, w, out = tokens[pair[0]], weights[pair], tokens[pair[1]]
            xp.matmul(x, w)
            xp.matmul(out, w.T)
            xp.matmul(x.T, out)
        for _ in range(case.blocks):
            attend()
        return ()

    return products
