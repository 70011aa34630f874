"""PyTorch's transformer layers: numbers that it printed, gradients that it computed, and itself where it is installed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn import causal_mask
from npattn._arrays.trees import tree_items
from npattn.models import (
    BlockConfig,
    decoder,
    decoder_backward,
    decoder_block_backward,
    decoder_block_forward,
    decoder_forward,
    encoder,
    encoder_backward,
    encoder_block_backward,
    encoder_block_forward,
    encoder_forward,
)
from npattn.testing.vectors import torch_gradients, torch_layers
from tests.models import torch_layout

DATA = Path(__file__).parents[1] / "data"
LAYERS = {vector.name: vector for vector in torch_layers(DATA)}
GRADIENTS = {
    vector.name: vector for op in ("TransformerEncoderLayer", "TransformerDecoderLayer") for vector in torch_gradients(DATA, op)
}


def test_they_are_all_there():
    assert len(LAYERS) == 18
    assert len(GRADIENTS) == 6


# What PyTorch's own tests print: every parameter is cos(arange), batches come second ------------------------------------------


def cosines(names: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.cos(np.arange(np.prod(shape))).reshape(shape) for name, shape in names.items()}


def layer_shapes(attentions: list[str], prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"linear1.weight": (16, 4), "linear1.bias": (16,), "linear2.weight": (4, 16)}
    shapes |= {"linear2.bias": (4,)}
    for name in attentions:
        shapes |= {f"{name}.in_proj_weight": (12, 4), f"{name}.in_proj_bias": (12,)}
        shapes |= {f"{name}.out_proj.weight": (4, 4), f"{name}.out_proj.bias": (4,)}
    for n in range(len(attentions) + 1):
        shapes |= {f"norm{n + 1}.weight": (4,), f"norm{n + 1}.bias": (4,)}
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def stack_arrays(count: int, attentions: list[str], last_norm: Any, prefix: str = "") -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for n in range(count):
        arrays |= cosines(layer_shapes(attentions, f"{prefix}layers.{n}."))
    if last_norm == "default(1,0)":
        arrays |= {f"{prefix}norm.weight": np.ones(4), f"{prefix}norm.bias": np.zeros(4)}
    elif last_norm:
        arrays |= cosines({f"{prefix}norm.weight": (4,), f"{prefix}norm.bias": (4,)})
    return arrays


def batch_first(values: Any) -> np.ndarray:
    return np.swapaxes(np.asarray(values, dtype=np.float64), 0, 1)


def may_attend(ignored: Any) -> Any:
    """PyTorch's modules say True for what is ignored; one row for each batch entry."""
    return None if ignored is None else ~np.asarray(ignored, dtype=bool)[:, None, None, :]


ENCODER, DECODER = ["self_attn"], ["self_attn", "multihead_attn"]


def our_layers(settings: dict[str, Any], inputs: dict[str, Any]) -> np.ndarray:
    config = BlockConfig("post", activation=settings["activation"])
    kind, last_norm = settings["kind"], settings["final_norm"]
    if kind == "encoder":
        params = torch_layout.encoder(stack_arrays(settings["layers"], ENCODER, last_norm), 2)
        mask = may_attend(inputs["src_key_padding_mask"])
        return np.asarray(encoder(params, batch_first(inputs["src"]), mask=mask, config=config))
    target = batch_first(inputs["tgt"])
    mask = may_attend(inputs["tgt_key_padding_mask"])
    if kind == "decoder":
        both = torch_layout.decoder(stack_arrays(settings["layers"], DECODER, last_norm), 2)
        memory, memory_mask = batch_first(inputs["memory"]), may_attend(inputs["memory_key_padding_mask"])
        return np.asarray(decoder(both, target, memory, mask=mask, memory_mask=memory_mask, config=config))
    reader = torch_layout.encoder(stack_arrays(settings["enc_layers"], ENCODER, last_norm), 2)
    writer = torch_layout.decoder(stack_arrays(settings["dec_layers"], DECODER, last_norm), 2)
    memory = encoder(reader, batch_first(inputs["src"]), mask=causal_mask() if settings["src_causal"] else None, config=config)
    return np.asarray(decoder(writer, target, memory, mask=mask, config=config))


@pytest.mark.parametrize("name", LAYERS)
def test_what_pytorch_prints(name):
    vector = LAYERS[name]
    out = np.swapaxes(our_layers(vector.settings, vector.inputs), 0, 1)
    assert np.isfinite(out).all()
    if vector.expected:  # where PyTorch itself gave NaN, there is nothing to compare with
        np.testing.assert_allclose(out, vector.expected["out"], rtol=1e-7, atol=1e-5)
    else:
        assert name == "enc_relu_1_all_masked"


# What its autograd computes ---------------------------------------------------------------------------------------------------


def masks(inputs: dict[str, np.ndarray], padding: str, square: str) -> Any:
    found = [~inputs[square]] if square in inputs else []
    found += [may_attend(inputs[padding])] if padding in inputs else []
    return None if not found else found[0] if len(found) == 1 else found[0] & found[1]


@pytest.mark.parametrize("name", GRADIENTS)
def test_pytorch_gradients(name):
    vector = GRADIENTS[name]
    settings, inputs, heads = vector.settings, vector.inputs, vector.settings["heads"]
    config = BlockConfig("pre" if settings["norm_first"] else "post", activation=settings["activation"], eps=settings["eps"])
    if vector.op == "TransformerEncoderLayer":
        layout: Any = torch_layout.encoder_block
        mask = masks(inputs, "src_key_padding_mask", "src_mask")
        out, saved = encoder_block_forward(layout(vector.parameters, heads), inputs["x"], mask=mask, config=config)
        grads: Any = encoder_block_backward(vector.cotangent, saved)
    else:
        layout = torch_layout.decoder_block
        both = {
            "mask": masks(inputs, "tgt_key_padding_mask", "tgt_mask"),
            "memory_mask": masks(inputs, "memory_key_padding_mask", "memory_mask"),
        }
        params = layout(vector.parameters, heads)
        out, saved = decoder_block_forward(params, inputs["x"], inputs["memory"], **both, config=config)
        grads = decoder_block_backward(vector.cotangent, saved)
        np.testing.assert_allclose(grads.dmemory, vector.expected["dmemory"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(out, vector.expected["out"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(grads.dx, vector.expected["dx"], rtol=0, atol=1e-12)
    assert_trees_close(grads.dparams, layout(vector.parameter_gradients, heads))


def assert_trees_close(got: Any, expected: Any, atol: float = 1e-12) -> None:
    expected = dict(tree_items(expected))
    got = dict(tree_items(got))
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-12, atol=atol, err_msg=name)


# PyTorch itself ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def randomised(torch: Any, module: Any) -> dict[str, np.ndarray]:
    """No zero biases, no norms that change nothing; in float64."""
    generator = torch.Generator().manual_seed(0)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return {name: x.detach().numpy() for name, x in module.named_parameters()}


def gradients(module: Any) -> dict[str, np.ndarray]:
    return {name: x.grad.numpy() for name, x in module.named_parameters()}


@pytest.mark.parametrize(("norm_first", "activation"), list(itertools.product([True, False], ["relu", "gelu"])))
def test_encoder_and_decoder_are_pytorch_s(torch, norm_first, activation):
    rng = np.random.default_rng(0)
    width, heads = 12, 3
    x, memory, dout, dboth = (rng.standard_normal((2, n, width)) for n in (5, 7, 5, 7))
    options = {"dropout": 0.0, "activation": activation, "norm_first": norm_first, "batch_first": True}
    layer = torch.nn.TransformerDecoderLayer(width, heads, 20, **options)
    reader = torch.nn.TransformerEncoderLayer(width, heads, 20, **options)
    decoders = torch.nn.TransformerDecoder(layer, 2, norm=torch.nn.LayerNorm(width) if norm_first else None)
    encoders = torch.nn.TransformerEncoder(reader, 2, norm=torch.nn.LayerNorm(width), enable_nested_tensor=False)
    padded = np.arange(7) >= np.asarray([[7], [4]])
    config = BlockConfig("pre" if norm_first else "post", activation=activation)

    read = torch_layout.encoder(randomised(torch, encoders), heads)
    source = torch.tensor(memory, requires_grad=True)
    theirs = encoders(source, src_key_padding_mask=torch.tensor(padded))
    theirs.backward(torch.tensor(dboth))
    out, saved = encoder_forward(read, memory, mask=may_attend(padded), config=config)
    grads = encoder_backward(dboth, saved)
    np.testing.assert_allclose(out, theirs.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(grads.dx, source.grad.numpy(), rtol=1e-12, atol=1e-12)
    assert_trees_close(grads.dparams, torch_layout.encoder(gradients(encoders), heads))

    written = torch_layout.decoder(randomised(torch, decoders), heads)
    target, kept = torch.tensor(x, requires_grad=True), torch.tensor(memory, requires_grad=True)
    future = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    theirs = decoders(target, kept, tgt_mask=future, memory_key_padding_mask=torch.tensor(padded))
    theirs.backward(torch.tensor(dout))
    out, saved_too = decoder_forward(written, x, memory, mask=causal_mask(), memory_mask=may_attend(padded), config=config)
    both = decoder_backward(dout, saved_too)
    np.testing.assert_allclose(out, theirs.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(both.dx, target.grad.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(both.dmemory, kept.grad.numpy(), rtol=1e-12, atol=1e-12)
    assert_trees_close(both.dparams, torch_layout.decoder(gradients(decoders), heads))


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_whole_is_pytorch_s_transformer(torch, norm_first):
    rng = np.random.default_rng(1)
    width, heads = 8, 2
    source, target, dout = (rng.standard_normal((2, n, width)) for n in (7, 5, 5))
    options = {"dropout": 0.0, "norm_first": norm_first, "batch_first": True}
    layer = torch.nn.TransformerEncoderLayer(width, heads, 12, **options)  # its own stack warns of a fast path that it has not
    encoders = torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(width), enable_nested_tensor=False)
    whole = torch.nn.Transformer(width, heads, 2, 3, 12, custom_encoder=encoders, **options)
    arrays = randomised(torch, whole)
    config = BlockConfig("pre" if norm_first else "post", activation="relu")
    read, write = torch_layout.encoder(arrays, heads, "encoder."), torch_layout.decoder(arrays, heads, "decoder.")
    x, y = torch.tensor(source, requires_grad=True), torch.tensor(target, requires_grad=True)
    theirs = whole(x, y, tgt_mask=torch.triu(torch.ones(5, 5, dtype=torch.bool), 1))
    theirs.backward(torch.tensor(dout))

    memory, saved_read = encoder_forward(read, source, config=config)
    out, saved_write = decoder_forward(write, target, memory, mask=causal_mask(), config=config)
    written = decoder_backward(dout, saved_write)
    reading = encoder_backward(written.dmemory, saved_read)
    np.testing.assert_allclose(out, theirs.detach().numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(reading.dx, x.grad.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(written.dx, y.grad.numpy(), rtol=1e-12, atol=1e-12)
    theirs_by_name = gradients(whole)
    assert_trees_close(reading.dparams, torch_layout.encoder(theirs_by_name, heads, "encoder."))
    assert_trees_close(written.dparams, torch_layout.decoder(theirs_by_name, heads, "decoder."))
