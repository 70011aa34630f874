"""PyTorch's own modules, where it is installed: their settings are read, values and gradients agree in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from npattn import causal_mask, interop, multi_head_attention_backward, multi_head_attention_forward
from npattn._arrays.trees import tree_items
from npattn.models import (
    decoder_backward,
    decoder_block_backward,
    decoder_block_forward,
    decoder_forward,
    encoder_backward,
    encoder_block_backward,
    encoder_block_forward,
    encoder_forward,
)

torch = pytest.importorskip("torch", reason="torch is not installed")
WIDTH, HEADS, HIDDEN = 12, 3, 20
RNG = np.random.default_rng(0)
X, MEMORY, DOUT, DMEMORY = (RNG.standard_normal((2, n, WIDTH)) for n in (5, 7, 5, 7))
PADDED = np.arange(7) >= np.asarray([[7], [4]])


def ready(module: Any) -> Any:
    """In float64, with weights that are nowhere 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def gradients(module: Any) -> dict[str, Any]:
    return {name: x.grad for name, x in module.named_parameters()}


def leaf(x: np.ndarray) -> Any:
    return torch.tensor(x, requires_grad=True)


def close(got: Any, expected: Any) -> None:
    expected = expected.detach().numpy() if hasattr(expected, "detach") else expected
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def trees_close(got: Any, expected: Any) -> None:
    ours, theirs = dict(tree_items(got)), dict(tree_items(expected))
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(ours[name], x, rtol=1e-12, atol=1e-12, err_msg=name)


def comes_back(module: Any, exported: Any, make: Any) -> None:
    """A new module of the settings, filled with the state, is the old one bit by bit."""
    again = make(**exported.settings).double()
    again.load_state_dict({name: torch.from_numpy(x) for name, x in exported.state.items()})
    for (name, x), (_, y) in zip(module.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 8, "vdim": 8}, {"add_zero_attn": True}], ids=str)
def test_attention(options):
    module = ready(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options))
    params, _ = interop.from_torch_attention(module)
    memory = MEMORY[..., : options.get("kdim", WIDTH)]
    x, kv = leaf(X), leaf(memory)
    theirs, _ = module(x, kv, kv, key_padding_mask=torch.tensor(PADDED))
    theirs.backward(torch.tensor(DOUT))
    out, saved = multi_head_attention_forward(params, X, memory, mask=interop.mask_from_torch(key_padding_mask=PADDED))
    grads = multi_head_attention_backward(DOUT, saved)
    close(out, theirs)
    close(grads.dx_q, x.grad)
    close(grads.dx_kv, kv.grad)
    trees_close(grads.dparams._replace(sinks=None), interop.from_torch_attention(gradients(module), heads=HEADS).params)
    comes_back(module, interop.to_torch_attention(params), torch.nn.MultiheadAttention)


def test_keys_that_are_added_have_no_place():
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    with pytest.raises(ValueError, match="left over: bias_k, bias_v"):
        interop.from_torch_attention(module)


every_setting = pytest.mark.parametrize(
    ("norm_first", "activation", "bias"), list(itertools.product([True, False], ["relu", "gelu"], [True, False]))
)


def options(norm_first: bool, activation: str, bias: bool) -> dict[str, Any]:
    return {
        "d_model": WIDTH,
        "nhead": HEADS,
        "dim_feedforward": HIDDEN,
        "norm_first": norm_first,
        "activation": activation,
        "bias": bias,
        "layer_norm_eps": 1e-6,
        "batch_first": True,
        "dropout": 0.0,
    }


@every_setting
def test_layers(norm_first, activation, bias):
    made = options(norm_first, activation, bias)
    layer, both = ready(torch.nn.TransformerEncoderLayer(**made)), ready(torch.nn.TransformerDecoderLayer(**made))
    params, config = interop.from_torch_encoder_layer(layer)
    assert (config.norm_order, config.activation, config.eps) == ("pre" if norm_first else "post", activation, 1e-6)
    x = leaf(MEMORY)
    theirs = layer(x, src_key_padding_mask=torch.tensor(PADDED))
    theirs.backward(torch.tensor(DMEMORY))
    mask = interop.mask_from_torch(key_padding_mask=PADDED)
    out, saved = encoder_block_forward(params, MEMORY, mask=mask, config=config)
    grads: Any = encoder_block_backward(DMEMORY, saved)
    close(out, theirs)
    close(grads.dx, x.grad)
    trees_close(grads.dparams, interop.from_torch_encoder_layer(gradients(layer), heads=HEADS).params)
    comes_back(layer, interop.to_torch_encoder_layer(params, config), torch.nn.TransformerEncoderLayer)

    params, config = interop.from_torch_decoder_layer(both)
    x, memory = leaf(X), leaf(MEMORY)
    future = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    theirs = both(x, memory, tgt_mask=future, memory_key_padding_mask=torch.tensor(PADDED))
    theirs.backward(torch.tensor(DOUT))
    masks = {"mask": interop.mask_from_torch(attn_mask=future), "memory_mask": mask}
    out, decoded = decoder_block_forward(params, X, MEMORY, **masks, config=config)
    grads = decoder_block_backward(DOUT, decoded)
    close(out, theirs)
    close(grads.dx, x.grad)
    close(grads.dmemory, memory.grad)
    trees_close(grads.dparams, interop.from_torch_decoder_layer(gradients(both), heads=HEADS).params)
    comes_back(both, interop.to_torch_decoder_layer(params, config), torch.nn.TransformerDecoderLayer)


@pytest.mark.parametrize("norm_first", [True, False])
def test_stacks(norm_first):
    made = options(norm_first, "gelu", True)
    lasts = [torch.nn.LayerNorm(WIDTH, eps=1e-6) if norm_first else None for _ in range(2)]
    layer, both = torch.nn.TransformerEncoderLayer(**made), torch.nn.TransformerDecoderLayer(**made)
    stack = ready(torch.nn.TransformerEncoder(layer, 2, norm=lasts[0], enable_nested_tensor=False))
    decoders = ready(torch.nn.TransformerDecoder(both, 2, norm=lasts[1]))
    params, config = interop.from_torch_encoder(stack)
    x = leaf(X)
    theirs = stack(x)
    theirs.backward(torch.tensor(DOUT))
    out, saved = encoder_forward(params, X, config=config)
    grads: Any = encoder_backward(DOUT, saved)
    close(out, theirs)
    close(grads.dx, x.grad)
    trees_close(grads.dparams, interop.from_torch_encoder(gradients(stack), heads=HEADS).params)

    params, config = interop.from_torch_decoder(decoders)
    memory = leaf(MEMORY)
    theirs = decoders(torch.tensor(X), memory)
    theirs.backward(torch.tensor(DOUT))
    out, decoded = decoder_forward(params, X, MEMORY, config=config)
    grads = decoder_backward(DOUT, decoded)
    close(out, theirs)
    close(grads.dmemory, memory.grad)
    trees_close(grads.dparams, interop.from_torch_decoder(gradients(decoders), heads=HEADS).params)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer(norm_first):
    made = options(norm_first, "relu", True)
    module = ready(torch.nn.Transformer(num_encoder_layers=2, num_decoder_layers=1, **made))
    params, config = interop.from_torch_transformer(module)
    future = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    theirs = module(torch.tensor(MEMORY), torch.tensor(X), tgt_mask=future)
    theirs.backward(torch.tensor(DOUT))
    memory, read = encoder_forward(params.encoder, MEMORY, config=config.encoder)
    out, saved = decoder_forward(params.decoder, X, memory, mask=causal_mask(), config=config.decoder)
    close(out, theirs)
    written = decoder_backward(DOUT, saved)
    encoded = encoder_backward(written.dmemory, read)
    expected = interop.from_torch_transformer(gradients(module), heads=HEADS).params
    trees_close(interop.TorchTransformerParams(encoded.dparams, written.dparams), expected)
    comes_back(module, interop.to_torch_transformer(params, config), torch.nn.Transformer)


def test_settings_of_modules():
    made = {**options(False, "relu", True), "activation": torch.nn.GELU(approximate="tanh")}
    layer = torch.nn.TransformerEncoderLayer(**made)
    assert interop.from_torch_encoder_layer(layer).config.activation == "gelu_tanh"
    with pytest.raises(ValueError, match="norm_first is False in the module, but True was given"):
        interop.from_torch_encoder_layer(layer, norm_first=True)
    with pytest.raises(ValueError, match="npattn has no activation 'tanh'"):
        interop.from_torch_encoder_layer(torch.nn.TransformerEncoderLayer(**{**made, "activation": torch.tanh}))
    stack = torch.nn.TransformerEncoder(layer, 1, norm=torch.nn.LayerNorm(WIDTH, eps=1e-3), enable_nested_tensor=False)
    with pytest.raises(ValueError, match="the last norm has eps = 0.001"):
        interop.from_torch_encoder(stack)
    assert interop.from_torch_encoder_layer(layer.to(torch.bfloat16)).params.attention.w_q.dtype == np.float32
