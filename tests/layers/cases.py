"""Ways to call every layer, with what rounding errors are measured against: what tests/layers/test_laws.py goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from npattn._arrays.namespace import array_namespace
from npattn.layers import (
    Dropout,
    Rotary,
    cross_entropy_backward,
    cross_entropy_forward,
    dropout_backward,
    dropout_forward,
    embedding_backward,
    embedding_forward,
    gate_backward,
    gate_forward,
    gelu_backward,
    gelu_forward,
    gelu_tanh_backward,
    gelu_tanh_forward,
    layer_norm_backward,
    layer_norm_forward,
    linear_backward,
    linear_forward,
    log_softmax_backward,
    log_softmax_forward,
    logsumexp_backward,
    logsumexp_forward,
    merge_heads_backward,
    merge_heads_forward,
    project_heads_backward,
    project_heads_forward,
    relu_backward,
    relu_forward,
    rms_norm_backward,
    rms_norm_forward,
    rotate_backward,
    rotate_forward,
    silu_backward,
    silu_forward,
    softmax_backward,
    softmax_forward,
    tied_logits_backward,
    tied_logits_forward,
)

Arrays = dict[str, Any]


class Case(NamedTuple):
    """One way to call one op. ``scale`` is its backward on absolute values: what rounding errors are measured against."""

    name: str
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    draw: Callable[[np.random.Generator], Arrays]
    scale: Callable[[Arrays, np.ndarray], Arrays]

    def __repr__(self) -> str:
        return self.name


def _softmax_case(name: str, forward: Any, backward: Any, scale: Any, shape: Any, axis: int, mask: Any = None) -> Case:
    def draw(rng: np.random.Generator) -> Arrays:
        args: Arrays = {"x": 2 * rng.standard_normal(shape)}
        if mask is not None:
            args["mask"] = _mask_with_dead_rows(rng, mask, axis)
        return args

    def call(x: Any, mask: Any = None) -> tuple[Any, Any]:
        out, saved = forward(x, axis=axis, mask=mask)
        # differences of -inf are no numbers, and a constant -inf has derivative 0
        return (array_namespace("call", x=x).where(out == -np.inf, 0.0, out), saved) if mask is not None else (out, saved)

    return Case(name, call, backward, draw, lambda args, dout: {"dx": scale(args["x"], axis, args.get("mask", True), dout)})


def _mask_with_dead_rows(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> np.ndarray:
    mask = rng.random(shape) < 0.6
    if mask.size > shape[axis]:
        mask[(0,) * (mask.ndim + axis) + (slice(None),) + (0,) * (-1 - axis)] = False
    return mask


def _weights(x: np.ndarray, axis: int, mask: Any) -> np.ndarray:
    p = np.where(mask, np.exp(x), 0.0)
    total = p.sum(axis, keepdims=True)
    return p / np.where(total == 0, 1, total)


def _softmax_scale(x: np.ndarray, axis: int, mask: Any, dout: np.ndarray) -> np.ndarray:
    w = _weights(x, axis, mask)
    return np.asarray(w * (np.abs(dout) + (w * np.abs(dout)).sum(axis, keepdims=True)))


def _log_softmax_scale(x: np.ndarray, axis: int, mask: Any, dout: np.ndarray) -> np.ndarray:
    dout = np.where(mask, np.abs(dout), 0.0)
    return np.asarray(dout + _weights(x, axis, mask) * dout.sum(axis, keepdims=True))


def _logsumexp_scale(x: np.ndarray, axis: int, mask: Any, dout: np.ndarray) -> np.ndarray:
    return np.asarray(_weights(x, axis, mask) * np.abs(np.expand_dims(dout, axis)))


def _softmax_cases() -> Iterator[Case]:
    for op, forward, backward, scale in (
        ("softmax", softmax_forward, softmax_backward, _softmax_scale),
        ("log_softmax", log_softmax_forward, log_softmax_backward, _log_softmax_scale),
        ("logsumexp", logsumexp_forward, logsumexp_backward, _logsumexp_scale),
    ):
        yield _softmax_case(f"{op}-row", forward, backward, scale, (5,), -1)
        yield _softmax_case(f"{op}-last", forward, backward, scale, (2, 3, 5), -1)
        yield _softmax_case(f"{op}-middle", forward, backward, scale, (2, 3, 5), -2)
        yield _softmax_case(f"{op}-masked", forward, backward, scale, (7, 3, 5), -1, (7, 3, 5))
        yield _softmax_case(f"{op}-masked-middle", forward, backward, scale, (7, 3, 5), -2, (3, 1))
        yield _softmax_case(f"{op}-masked-first", forward, backward, scale, (7, 3), -2, (7, 3))


def _affine(forward: Any, backward: Any, formula: str, name: str, **shapes: tuple[int, ...]) -> Case:
    """A bilinear op in x and w: its absolute backward is the einsum of absolute values."""
    x, w, out = formula.replace("->", ",").split(",")

    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        dout = np.abs(dout)
        scales = {
            "dx": np.einsum(f"{out},{w}->{x}", dout, np.abs(args["w"])),
            "dw": np.einsum(f"{out},{x}->{w}", dout, np.abs(args["x"])),
        }
        if "b" in args:
            scales["db"] = np.einsum(f"{out}->{w.replace(x[-1], '')}" if "h" not in x else f"{out}->{out[-1]}", dout)
        return scales

    return Case(name, forward, backward, lambda rng: {n: rng.standard_normal(s) for n, s in shapes.items()}, scale)


def _affine_cases() -> Iterator[Case]:
    linear = (linear_forward, linear_backward)
    yield _affine(*linear, "c,cd->d", "linear-row", x=(5,), w=(5, 7), b=(7,))
    yield _affine(*linear, "abc,cd->abd", "linear", x=(2, 3, 5), w=(5, 7), b=(7,))
    yield _affine(*linear, "ac,cd->ad", "linear-without-b", x=(3, 5), w=(5, 7))
    project = (project_heads_forward, project_heads_backward)
    yield _affine(*project, "tc,cgd->gtd", "project_heads", x=(5, 7), w=(7, 3, 2), b=(3, 2))
    yield _affine(*project, "abtc,cgd->abgtd", "project_heads-batch", x=(2, 3, 5, 7), w=(7, 3, 2), b=(3, 2))
    yield _affine(*project, "atc,cgd->agtd", "project_heads-without-b", x=(2, 5, 7), w=(7, 3, 2))
    merge = (merge_heads_forward, merge_heads_backward)
    yield _affine(*merge, "hte,hec->tc", "merge_heads", x=(3, 5, 2), w=(3, 2, 7), b=(7,))
    yield _affine(*merge, "abhte,hec->abtc", "merge_heads-batch", x=(2, 5, 3, 7, 2), w=(3, 2, 11), b=(11,))
    yield _affine(*merge, "ahte,hec->atc", "merge_heads-without-b", x=(2, 3, 5, 7), w=(3, 7, 11))


def _embedding_cases() -> Iterator[Case]:
    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        dtable = np.zeros_like(args["table"])
        np.add.at(dtable, args["ids"], np.abs(dout))
        return {"dtable": dtable}

    for name, count, width, shape in (("", 7, 3, (5, 2)), ("-one", 3, 2, ()), ("-many", 5, 2, (3, 41)), ("-few", 23, 2, (3,))):

        def draw(rng: np.random.Generator, count: int = count, width: int = width, shape: tuple[int, ...] = shape) -> Arrays:
            return {"table": rng.standard_normal((count, width)), "ids": np.asarray(rng.integers(0, count, shape))}

        yield Case(f"embedding{name}", embedding_forward, embedding_backward, draw, scale)


def _cross_entropy_cases() -> Iterator[Case]:
    for shape, smoothing, ignore, weighted in (
        ((3, 5, 7), 0.0, None, False),
        ((3, 5, 7), 0.0, 2, False),
        ((3, 5, 7), 0.1, None, True),
        ((3, 5, 7), 0.1, 2, True),
        ((5,), 0.0, None, False),
        ((5,), 0.1, 2, True),
    ):

        def draw(rng: np.random.Generator, shape: Any = shape, ignore: Any = ignore, weighted: bool = weighted) -> Arrays:
            args: Arrays = {"logits": rng.standard_normal(shape), "targets": np.asarray(rng.integers(0, shape[-1], shape[:-1]))}
            if len(shape) > 1:
                args["targets"][0, :2] = 2
            if weighted:
                args["weights"] = np.asarray(rng.random(shape[:-1]))
            return args

        def call(logits: Any, targets: Any, weights: Any = None, smoothing: Any = smoothing, ignore: Any = ignore) -> Any:
            return cross_entropy_forward(logits, targets, label_smoothing=smoothing, ignore_index=ignore, weights=weights)

        def scale(args: Arrays, dout: np.ndarray, smoothing: Any = smoothing, ignore: Any = ignore) -> Arrays:
            logits, targets = args["logits"], args["targets"]
            w = np.where(targets == ignore, 0.0, args.get("weights", np.ones(targets.shape)))
            q = (1 - smoothing) * (np.arange(logits.shape[-1]) == targets[..., None]) + smoothing / logits.shape[-1]
            p = _weights(logits, -1, True)
            total = w.sum() or 1.0
            losses = np.abs((q * np.log(p)).sum(-1)) + (q * np.abs(logits)).sum(-1) + 1
            scales = {"dlogits": np.abs(dout) * (w / total)[..., None] * (p + q)}
            if "weights" in args:
                scales["dweights"] = np.abs(dout) * (losses + (w * losses).sum() / total) / total
            return scales

        yield Case(
            f"cross_entropy-{len(shape)}d{'-smooth' * bool(smoothing)}{'-ignore' * bool(ignore)}{'-weights' * weighted}",
            call,
            cross_entropy_backward,
            draw,
            scale,
        )


def _dropout_cases() -> Iterator[Case]:
    rule = Dropout(0.3, seed=7)
    yield Case(
        "dropout",
        lambda x: dropout_forward(x, rule),
        dropout_backward,
        lambda rng: {"x": rng.standard_normal((2, 3, 5))},
        lambda args, dout: {"dx": np.abs(dout) / 0.7},
    )


def _norm_cases() -> Iterator[Case]:
    for name, shape, axes, given in (
        ("layer_norm", (2, 3, 5), -1, ("weight", "bias")),
        ("layer_norm-row", (5,), -1, ("weight", "bias")),
        ("layer_norm-last-two", (2, 3, 5), (-2, -1), ("weight", "bias")),
        ("layer_norm-first-and-last", (2, 7, 3), (2, 0), ("weight", "bias")),
        ("layer_norm-without-bias", (3, 5), -1, ("weight",)),
        ("layer_norm-without-weight", (3, 5), -1, ("bias",)),
        ("layer_norm-bare", (3, 5), -1, ()),
        ("rms_norm", (2, 3, 5), -1, ("weight",)),
        ("rms_norm-middle", (2, 5, 3), 1, ("weight",)),
        ("rms_norm-last-two", (2, 3, 5), (-2, -1), ("weight",)),
        ("rms_norm-bare", (3, 5), -1, ()),
    ):
        kind = name.partition("-")[0]
        order = tuple(sorted(axis % len(shape) for axis in (axes if isinstance(axes, tuple) else (axes,))))
        features = tuple(shape[axis] for axis in order)

        def draw(rng: np.random.Generator, shape: Any = shape, features: Any = features, given: Any = given) -> Arrays:
            return {"x": 2 * rng.standard_normal(shape), **{n: rng.standard_normal(features) for n in given}}

        def call(x: Any, *rest: Any, given: Any = given, axes: Any = axes, kind: str = kind) -> Any:
            weight, bias = (dict(zip(given, rest, strict=True)).get(n) for n in ("weight", "bias"))
            if kind == "rms_norm":
                return rms_norm_forward(x, weight, axes=axes)
            return layer_norm_forward(x, weight, bias, axes=axes)

        def scale(args: Arrays, dout: np.ndarray, order: Any = order, features: Any = features, kind: str = kind) -> Arrays:
            x, dout = args["x"], np.abs(dout)
            across = tuple(axis for axis in range(x.ndim) if axis not in order)
            centred = x - x.mean(order, keepdims=True) if kind == "layer_norm" else x
            std = np.sqrt((centred**2).mean(order, keepdims=True) + 1e-6)
            normal = (np.abs(x) + np.abs(x).mean(order, keepdims=True)) / std
            laid = [n if axis in order else 1 for axis, n in enumerate(x.shape)]
            dnormal = dout * np.abs(args.get("weight", np.ones(features))).reshape(laid)
            means = dnormal.mean(order, keepdims=True) + normal * (dnormal * normal).mean(order, keepdims=True)
            scales = {"dx": (dnormal + means) / std, "dweight": (dout * normal).sum(across), "dbias": dout.sum(across)}
            return {f"d{name}": scales[f"d{name}"] for name in args}

        yield Case(name, call, rms_norm_backward if kind == "rms_norm" else layer_norm_backward, draw, scale)


def _activation_cases() -> Iterator[Case]:
    def draw(rng: np.random.Generator) -> Arrays:
        return {"x": 2 * rng.standard_normal((2, 3, 5))}

    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        return {"dx": np.abs(dout) * (1 + np.abs(args["x"]))}

    yield Case("relu", relu_forward, relu_backward, draw, scale)
    yield Case("silu", silu_forward, silu_backward, draw, scale)
    yield Case("gelu", gelu_forward, gelu_backward, draw, scale)
    yield Case("gelu_tanh", gelu_tanh_forward, gelu_tanh_backward, draw, scale)


def _gate_cases() -> Iterator[Case]:
    def draw(rng: np.random.Generator) -> Arrays:
        return {"x": rng.standard_normal((2, 3, 5)), "gates": 2 * rng.standard_normal((2, 3, 5))}

    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        x, gates, dout = np.abs(args["x"]), np.abs(args["gates"]), np.abs(dout)
        return {"dx": dout * (1 + gates), "dgates": dout * x * (1 + gates)}

    for activation in ("silu", "gelu", "gelu_tanh", "relu"):

        def call(x: Any, gates: Any, activation: str = activation) -> Any:
            return gate_forward(x, gates, activation=activation)

        yield Case(f"gate-{activation}", call, gate_backward, draw, scale)


def _rotate_cases() -> Iterator[Case]:
    for name, shape, rotary in (
        ("halves", (5, 6), Rotary()),
        ("interleaved", (3, 5, 6), Rotary(pairs="interleaved", positions=3)),
        ("part", (2, 3, 5, 7), Rotary(base=100.0, scale=0.5, size=4)),
        ("positions", (2, 3, 5, 6), Rotary(positions=[[0, 1, 2, 3, 4], [7, 8, 0, 1, 0]])),
        ("part-interleaved", (2, 3, 5, 7), Rotary(pairs="interleaved", size=6, positions=np.arange(5)[::-1])),
    ):

        def draw(rng: np.random.Generator, shape: Any = shape) -> Arrays:
            return {"x": rng.standard_normal(shape)}

        def call(x: Any, rotary: Rotary = rotary) -> Any:
            return rotate_forward(x, rotary)

        def scale(args: Arrays, dout: np.ndarray, rotary: Rotary = rotary) -> Arrays:
            dout = np.abs(dout)
            size = rotary.size or dout.shape[-1]
            paired = np.arange(size) ^ 1 if rotary.pairs == "interleaved" else (np.arange(size) + size // 2) % size
            return {"dx": dout + dout[..., [*paired, *range(size, dout.shape[-1])]]}

        yield Case(f"rotate-{name}", call, rotate_backward, draw, scale)


def _tied_logits_cases() -> Iterator[Case]:
    def scale(args: Arrays, dout: np.ndarray) -> Arrays:
        x, table, dout = np.abs(args["x"]), np.abs(args["table"]), np.abs(dout)
        return {"dx": dout @ table, "dtable": dout.reshape(-1, table.shape[0]).T @ x.reshape(-1, table.shape[1])}

    for name, shape in (("", (2, 3, 5)), ("-row", (5,))):

        def draw(rng: np.random.Generator, shape: Any = shape) -> Arrays:
            return {"x": rng.standard_normal(shape), "table": rng.standard_normal((7, 5))}

        yield Case(f"tied_logits{name}", tied_logits_forward, tied_logits_backward, draw, scale)


CASES = [
    *_softmax_cases(),
    *_affine_cases(),
    *_embedding_cases(),
    *_tied_logits_cases(),
    *_cross_entropy_cases(),
    *_dropout_cases(),
    *_norm_cases(),
    *_activation_cases(),
    *_gate_cases(),
    *_rotate_cases(),
]
RICHEST = (
    "softmax-masked", "log_softmax-masked", "logsumexp-masked", "linear", "project_heads-batch", "merge_heads-batch", "embedding",
    "tied_logits", "cross_entropy-3d-smooth-ignore-weights", "dropout", "layer_norm", "rms_norm", "relu", "silu", "gelu",
    "gelu_tanh", "gate-gelu", "rotate-part",
)  # fmt: skip
SAVES_NO_ARRAY = ("dropout", "rotate-part")
