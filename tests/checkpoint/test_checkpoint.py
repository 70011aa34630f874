"""Saving and loading: everything comes back, bit by bit and type by type, and what does not fit is one clear error."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest

from npattn import Dropout, MultiHeadParams, Rotary, checkpoint, tree_map
from npattn._arrays.trees import tree_items
from npattn.checkpoint import CheckpointError
from npattn.models import (
    BlockConfig,
    EmbeddingConfig,
    EncoderDecoderConfig,
    EncoderDecoderParams,
    LanguageModelConfig,
    LanguageModelParams,
)
from npattn.optim import SGD, Adam, WarmupCosine
from npattn.testing.libraries import asarray, to_numpy

SUFFIXES = [".npz", ".safetensors"]
every_format = pytest.mark.parametrize("suffix", SUFFIXES)
LLAMA = LanguageModelConfig(
    BlockConfig(norm="rms", eps=1 / 3, activation="silu", rotary=Rotary(base=5e5, pairs="interleaved"), window=(3, None)),
    EmbeddingConfig(positions="none"),
)


def language_model(**options: Any) -> LanguageModelParams:
    sizes: dict[str, Any] = {"vocabulary": 11, "blocks": 2, "width": 6, "heads": 2, "context": 5}
    return LanguageModelParams.init(np.random.default_rng(0), **sizes, **options)


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    ours, theirs = dict(tree_items(a)), dict(tree_items(b))
    assert list(ours) == list(theirs)
    for name, x in ours.items():
        y = theirs[name]
        if hasattr(x, "shape"):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            np.testing.assert_array_equal(to_numpy(x), to_numpy(y), err_msg=name)
        else:
            assert (x, type(x)) == (y, type(y)), name


@every_format
def test_everything_comes_back(suffix, tmp_path):
    params = language_model(gated=True, sinks=True, kv_heads=1, config=LLAMA)
    state = Adam().update(params, params, Adam().init(params))[1]
    notes = {"seed": 7, "losses": [3.0, 1 / 3], "alphabet": "aé\n", "rule": WarmupCosine(0.1, 20), "none": None, "yes": True}
    checkpoint.save(tmp_path / f"a{suffix}", params, config=LLAMA, state=state, notes=notes)
    loaded = checkpoint.load(tmp_path / f"a{suffix}")
    for ours, theirs in zip((params, LLAMA, state, notes), loaded, strict=True):
        same(ours, theirs)
    assert isinstance(loaded.config.block.rotary, Rotary)


@every_format
@pytest.mark.parametrize(
    "params",
    [
        MultiHeadParams.init(np.random.default_rng(0), width=6, heads=3, dtype=np.float32),
        EncoderDecoderParams.init(np.random.default_rng(0), vocabulary=7, blocks=1, width=4, heads=2, context=3, tied=False),
        {"b": (np.zeros(0), [None, np.asarray(3)]), "a": np.ones((2, 3), np.float16), "c": np.asarray([True, False])},
        np.arange(6).reshape(2, 3),
    ],
    ids=["heads", "encoder-decoder", "containers", "an array"],
)
def test_trees_come_back(params, suffix, tmp_path):
    state = None if isinstance(params, (dict, np.ndarray)) else SGD(momentum=0.5).init(params)
    checkpoint.save(tmp_path / f"a{suffix}", params, state=state, config=EncoderDecoderConfig())
    loaded = checkpoint.load(str(tmp_path / f"a{suffix}"))
    same(params, loaded.params)
    same(state, loaded.state)


def test_any_layout_and_byte_order_comes_back(tmp_path):
    x = np.random.default_rng(0).standard_normal((4, 6))
    params = {
        "fortran": np.asfortranarray(x),
        "strided": x[::-1, ::2],
        "big": x.astype(">f8"),
        "one": np.broadcast_to(x[:1], (3, 6)),
    }
    checkpoint.save(tmp_path / "a.npz", params)
    for name, y in checkpoint.load(tmp_path / "a.npz").params.items():
        np.testing.assert_array_equal(y, params[name])
        assert y.dtype == np.float64
        assert y.flags.writeable


@every_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_library_and_dtype(library, dtype, suffix, tmp_path):
    if not library.has(dtype):
        pytest.skip(f"{library.name} has no {dtype}")
    x = np.random.default_rng(0).standard_normal((3, 2))
    params = {"w": asarray(x, library, dtype=dtype)}
    checkpoint.save(tmp_path / f"a{suffix}", params)
    back = checkpoint.load(tmp_path / f"a{suffix}", like=params, xp=library.xp, device=library.device).params["w"]
    assert (type(back), back.dtype) == (type(params["w"]), params["w"].dtype)
    np.testing.assert_array_equal(to_numpy(back), to_numpy(params["w"]))
    host = checkpoint.load(tmp_path / f"a{suffix}").params["w"]
    np.testing.assert_array_equal(host, to_numpy(params["w"]))
    assert host.dtype == ("float32" if dtype == "bfloat16" else dtype)


def test_names(tmp_path):
    params = language_model()
    checkpoint.save(tmp_path / "a.npz", params, state=Adam().init(params))
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert {"embedding.tokens", "blocks.0.attention.w_q", "state.mean.blocks.1.feed_forward.b_in"} < set(file.files)
        np.testing.assert_array_equal(file["blocks.1.attention.w_k"], params.blocks[1].attention.w_k)
        assert json.loads(file["npattn.json"])["state"]["fields"]["step"] == 0


def test_the_safetensors_library_agrees(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    params = {
        "a": np.arange(3, dtype=np.int8),
        "b": np.ones((2, 3)),
        "c": np.zeros(0, np.float32),
        "d": np.asarray(2.5, np.float16),
    }
    checkpoint.save(tmp_path / "a.safetensors", params)
    same(dict(safetensors.load_file(tmp_path / "a.safetensors")), params)
    safetensors.save_file(params, tmp_path / "b.safetensors")
    same(checkpoint.read_safetensors(tmp_path / "b.safetensors"), params)
    with pytest.raises(CheckpointError, match="not written by npattn"):
        checkpoint.load(tmp_path / "b.safetensors")


@every_format
def test_the_same_contents_are_the_same_bytes(suffix, tmp_path):
    for name in ("a", "b"):
        checkpoint.save(tmp_path / f"{name}{suffix}", language_model(), config=LLAMA)
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


# What does not fit -----------------------------------------------------------------------------------------------------------


class Own(NamedTuple):
    """Somebody's parameters."""

    w: Any
    b: Any = None
    settings: Any = None


@every_format
def test_types_that_npattn_does_not_know(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    params = Own(np.ones((2, 3)), settings=BlockConfig())
    checkpoint.save(path, params)
    same(checkpoint.load(path, like=params._replace(w=np.zeros((2, 3)))).params, params)
    with pytest.raises(CheckpointError, match="holds a Own, a type that npattn does not know: say like="):
        checkpoint.load(path)


@every_format
def test_one_error_for_all_that_does_not_fit(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    checkpoint.save(path, {"a": np.ones(2), "b": np.ones(3), "c": np.ones(4), "d": np.ones(5)})
    like = {"a": np.ones(2), "b": np.ones((3, 1)), "c": np.ones(4, np.float32), "e": np.ones(5)}
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, like=like)
    assert str(error.value) == (
        f"checkpoint.load: {path}: it does not fit: b must be float64 of shape (3, 1), got float64 of shape (3,); "
        "c must be float32 of shape (4,), got float64 of shape (4,); d is left over; e is missing"
    )


def test_what_a_file_cannot_hold(tmp_path):
    path = tmp_path / "a.npz"
    for params, words in [
        ({"f": print}, "f is a builtin_function_or_method"),
        ({"z": np.ones(2, np.complex64)}, "z has dtype complex64"),
        ({"o": np.asarray([None])}, "o has dtype object"),
        ({1: np.ones(2)}, "params is a dict"),
    ]:
        with pytest.raises(TypeError, match=f"checkpoint.save: {words}, which a file cannot hold"):
            checkpoint.save(path, params)
    with pytest.raises(ValueError, match=r"two arrays would have the name state\.w"):
        checkpoint.save(path, {"state": {"w": np.ones(2)}}, state={"w": np.ones(2)})
    with pytest.raises(ValueError, match=r"must end in \.npz or \.safetensors, got a\.pt"):
        checkpoint.save(tmp_path / "a.pt", {})
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_what_python_calls_it(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path / "a.npz")


def test_a_field_of_the_future(tmp_path, monkeypatch):
    class LaterConfig(NamedTuple):
        norm_order: str = "pre"
        colour: str = "red"

    LaterConfig.__name__ = "BlockConfig"
    checkpoint.save(tmp_path / "a.npz", {}, config=LaterConfig())
    with pytest.raises(CheckpointError, match="its BlockConfig has colour, which this version of npattn does not know"):
        checkpoint.load(tmp_path / "a.npz")


def test_a_field_of_the_past_has_its_default(tmp_path):
    class EarlierConfig(NamedTuple):
        norm_order: str = "post"

    EarlierConfig.__name__ = "BlockConfig"
    checkpoint.save(tmp_path / "a.npz", {}, config=EarlierConfig())
    assert checkpoint.load(tmp_path / "a.npz").config == BlockConfig("post")


def test_dropout_and_settings_beside(tmp_path):
    checkpoint.save(tmp_path / "a.npz", {"w": np.ones(1)}, notes={"dropout": Dropout(0.1, 3), "scale": np.float32(0.5)})
    notes = checkpoint.load(tmp_path / "a.npz").notes
    assert notes == {"dropout": Dropout(0.1, 3), "scale": 0.5}


def test_a_step_after_loading_is_the_step_before(tmp_path):
    """Training goes on to the same bits."""
    rule, params = Adam(lr=0.1), language_model(dtype=np.float32)
    grads = tree_map(lambda x: np.asarray(np.random.default_rng(1).standard_normal(x.shape), x.dtype), params)
    params, state = rule.update(params, grads, rule.init(params))
    checkpoint.save(tmp_path / "a.npz", params, state=state)
    loaded = checkpoint.load(tmp_path / "a.npz")
    for ours, theirs in zip(rule.update(params, grads, state), rule.update(loaded.params, grads, loaded.state), strict=True):
        same(ours, theirs)
