"""Writes foreign_layouts.npz: small models of other libraries, what they give, and gradients of sum(out * cotangent).

It was run once, with the versions that are in the file. Everything is computed in float64, with weights that are nowhere 0 or 1.

``python tests/data/foreign_layouts.py`` needs torch, transformers, jax, flax, equinox, keras.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

os.environ["KERAS_BACKEND"] = "jax"

equinox: Any = importlib.import_module("equinox")
flax: Any = importlib.import_module("flax.linen")
jax: Any = importlib.import_module("jax")
keras: Any = importlib.import_module("keras")
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
modeling_llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")

jax.config.update("jax_enable_x64", True)
keras.config.set_floatx("float64")
RNG = np.random.default_rng(0)
FOUND: dict[str, Any] = {}
SETTINGS: dict[str, Any] = {}


def keep(case: str, kind: str, arrays: dict[str, Any]) -> None:
    for name, x in arrays.items():
        FOUND[f"{case}/{kind}/{name}"] = np.asarray(x.detach().numpy() if isinstance(x, torch.Tensor) else x)


def hugging_face(case: str, kind: Any, config: Any, take: Any, **inputs: Any) -> None:
    """A model, its inputs, and what it gives."""
    config._attn_implementation = "eager"
    model = kind(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(RNG.standard_normal(parameter.shape) * 0.3 + (0.5 if parameter.ndim == 1 else 0)))
    out = take(model(**{name: torch.tensor(x) for name, x in inputs.items()}))
    cotangent = RNG.standard_normal(out.shape)
    (out * torch.tensor(cotangent)).sum().backward()
    keep(case, "state", model.state_dict())
    keep(case, "gradient", {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    keep(case, "input", inputs)
    keep(case, "result", {"out": out, "cotangent": cotangent})
    SETTINGS[case] = json.loads(config.to_json_string(use_diff=False))


def in_float64() -> None:
    """Hugging Face's Llama computes norms and angles in float32, whatever the weights are."""

    def norm(self: Any, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def angles(self: Any, x: Any, position_ids: Any) -> Any:
        theta, size = self.config.rope_parameters["rope_theta"], self.config.head_dim
        frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        whole = torch.cat([position_ids[..., None] * frequencies] * 2, dim=-1)
        return whole.cos(), whole.sin()

    modeling_llama.LlamaRMSNorm.forward = norm
    modeling_llama.LlamaRotaryEmbedding.forward = angles
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim=dim)


ids = RNG.integers(0, 13, (2, 5))
gpt2 = transformers.GPT2Config(vocab_size=13, n_positions=7, n_embd=8, n_layer=2, n_head=2)
hugging_face("gpt2", transformers.GPT2LMHeadModel, gpt2, lambda out: out.logits, input_ids=ids)
sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
bert = transformers.BertConfig(vocab_size=13, max_position_embeddings=7, pad_token_id=None, **sizes)
padding = np.asarray([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
types = np.asarray([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
hugging_face(
    "bert",
    transformers.BertModel,
    bert,
    lambda out: out.last_hidden_state,
    input_ids=ids,
    attention_mask=padding,
    token_type_ids=types,
)
in_float64()
llama = transformers.LlamaConfig(vocab_size=13, num_key_value_heads=1, head_dim=6, rope_theta=100.0, **sizes)
hugging_face("llama", transformers.LlamaForCausalLM, llama, lambda out: out.logits, input_ids=ids)

x = RNG.standard_normal((2, 5, 6))
y = RNG.standard_normal((2, 4, 6))
module = flax.MultiHeadDotProductAttention(num_heads=3, qkv_features=12, dtype=np.float64, param_dtype=np.float64)
variables = module.init(jax.random.key(0), x, y)
variables = jax.tree.map(lambda p: p + 0.3 * RNG.standard_normal(p.shape), variables)
flat = {f"{a}.{b}": v for a, part in variables["params"].items() for b, v in part.items()}
keep("flax", "state", flat)
keep("flax", "input", {"x_q": x, "x_kv": y})
keep("flax", "result", {"out": module.apply(variables, x, y)})

layer = keras.layers.MultiHeadAttention(num_heads=3, key_dim=4, dtype="float64")
arrays = jax.numpy.asarray(x), jax.numpy.asarray(y)
layer(*arrays)
layer.set_weights([w + 0.3 * RNG.standard_normal(w.shape) for w in layer.get_weights()])
out, _ = layer(*arrays, return_attention_scores=True)  # without them, JAX's kernel computes in float32
keep("keras", "state", {str(n): w for n, w in enumerate(layer.get_weights())})
keep("keras", "input", {"x_q": x, "x_kv": y})
keep("keras", "result", {"out": out})

attention = equinox.nn.MultiheadAttention(3, 6, output_size=5, qk_size=4, vo_size=2, use_key_bias=True, key=jax.random.key(1))
names = [f"{name}_proj" for name in ("query", "key", "value", "output")]
keep("equinox", "state", {f"{n}.{p}": getattr(getattr(attention, n), p) for n in names for p in ("weight", "bias")})
del FOUND["equinox/state/query_proj.bias"], FOUND["equinox/state/value_proj.bias"], FOUND["equinox/state/output_proj.bias"]
keep("equinox", "input", {"x_q": x[0], "x_kv": y[0]})
keep("equinox", "result", {"out": attention(x[0], y[0], y[0])})

VERSIONS = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "jax", "flax", "equinox", "keras")}
settings = np.asarray(json.dumps({"versions": VERSIONS, **SETTINGS}))
np.savez_compressed(Path(__file__).with_suffix(".npz"), settings=settings, **FOUND)
