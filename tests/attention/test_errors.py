"""What is wrong with a call is said before any work: operation, argument, what it must be, what it is."""

from __future__ import annotations

import numpy as np
import pytest

from npattn import (
    Dropout,
    alibi_bias,
    attention,
    attention_backward,
    attention_forward,
    causal_mask,
    length_mask,
    relative_bias,
    segment_mask,
)
from npattn.testing.libraries import Unavailable, asarray, open_library


def x(*shape, dtype=np.float64):
    return np.zeros(shape, dtype=dtype)


Q, K, V = x(2, 3, 6), x(2, 5, 6), x(2, 5, 7)

SHAPES = {
    "rank of q": ((x(6), K, V), {}, r"attention: q must have shape \(\.\.\., T, D\), got \(6,\)"),
    "rank of k": ((Q, x(6), V), {}, r"attention: k must have shape \(\.\.\., S, D\), got \(6,\)"),
    "rank of v": ((Q, K, x()), {}, r"attention: v must have shape \(\.\.\., S, E\), got \(\)"),
    "D": ((Q, x(2, 5, 7), V), {}, r"attention: k must have shape \(\.\.\., S, D\) with D = 6 as q has, got \(2, 5, 7\)"),
    "S": ((Q, K, x(2, 4, 7)), {}, r"attention: v must have shape \(\.\.\., S, E\) with S = 5 as k has, got \(2, 4, 7\)"),
    "K of v": (
        (x(6, 3, 6), x(3, 5, 6), x(2, 5, 7)),
        {},
        r"v must have shape \(\.\.\., K, S, E\) with K = 3 as k has, got \(2, 5, 7\)",
    ),
    "H not a multiple": ((x(3, 3, 6), K, V), {}, r"H query heads must be a multiple of K .*got H = 3 and K = 2 .*\(B, 1, T, D\)"),
    "H < K": ((x(1, 3, 6), K, V), {}, r"got H = 1 and K = 2"),
    "H = 0": ((x(0, 3, 6), K, V), {}, r"got H = 0 and K = 2"),
    "K = 0": ((Q, x(0, 5, 6), x(0, 5, 7)), {}, r"got H = 2 and K = 0"),
    "leading axes": (
        (x(2, 2, 3, 6), x(3, 2, 5, 6), x(3, 2, 5, 7)),
        {},
        r"leading axes of q, k and v must broadcast, got shapes \(2, 2, 3, 6\), \(3",
    ),
    "mask": (
        (Q, K, V),
        {"mask": np.ones((3, 4), dtype=bool)},
        r"mask must broadcast to \(\.\.\., H, T, S\) = \(2, 3, 5\), got shape \(3, 4\)",
    ),
    "mask that adds axes": ((Q, K, V), {"mask": np.ones((4, 2, 3, 5), dtype=bool)}, r"mask must broadcast"),
    "bias": ((Q, K, V), {"bias": x(5, 3)}, r"bias must broadcast to \(\.\.\., H, T, S\) = \(2, 3, 5\), got shape \(5, 3\)"),
    "bias that adds axes": ((Q, K, V), {"bias": x(4, 2, 3, 5)}, r"bias must broadcast"),
    "sinks": ((Q, K, V), {"sinks": x(3)}, r"sinks must have shape \(H,\) with H = 2, got \(3,\)"),
    "sinks without axes": ((Q, K, V), {"sinks": x()}, r"sinks must have shape \(H,\)"),
    "slopes": (
        (Q, K, V),
        {"bias": alibi_bias(x(3))},
        r"attention: the parameter of alibi_bias must have shape .* with H = 2, got \(3,\)",
    ),
    "table": ((Q, K, V), {"bias": relative_bias(x(8, 3))}, r"relative_bias .* with H = 2"),
    "lengths": (
        (Q, K, V),
        {"mask": length_mask([1, 2])},
        r"attention: the key_lengths of length_mask must broadcast to the leading axes",
    ),
    "offset": (
        (Q, K, V),
        {"mask": causal_mask([1, 2])},
        r"attention: the offset of causal_mask must broadcast to the leading axes",
    ),
    "ids": (
        (Q, K, V),
        {"mask": segment_mask([0, 1], [0] * 5)},
        r"the query_ids of segment_mask must have shape .*T = 3, got \(2,\)",
    ),
    "scale": ((Q, K, V), {"scale": np.nan}, r"attention: scale must be a finite number, got nan"),
    "softcap of 0": ((Q, K, V), {"softcap": 0}, r"attention: softcap must be a positive finite number, got 0"),
    "softcap": ((Q, K, V), {"softcap": -1.0}, r"attention: softcap must be a positive finite number, got -1"),
    "rate of 1": ((Q, K, V), {"dropout": Dropout(1.0, 0)}, r"rate of dropout must be at least 0 and less than 1, got 1"),
    "rate below 0": ((Q, K, V), {"dropout": Dropout(-0.1, 0)}, r"rate of dropout must be at least 0"),
}

TYPES = {
    "mask of numbers": ((Q, K, V), {"mask": x(3, 5)}, r"attention: mask must be boolean, True where .*, got float64; .* bias="),
    "mask of integers": ((Q, K, V), {"mask": np.ones((3, 5), dtype=int)}, r"attention: mask must be boolean.*bias="),
    "mask as a list": (
        (Q, K, V),
        {"mask": [[True] * 5] * 3},
        r"attention: mask must be a mask such as causal_mask\(\) or a boolean array, got list",
    ),
    "mask as a function": ((Q, K, V), {"mask": causal_mask}, r"attention: mask must be an array"),
    "no mask": ((Q, K, V), {"mask": True}, r"got bool"),
    "bias of another dtype": (
        (Q, K, V),
        {"bias": x(5, dtype=np.float32)},
        r"attention: q is float64 but bias is float32; all float arrays",
    ),
    "bias as a number": ((Q, K, V), {"bias": 1.0}, r"attention: bias must be an array .*got builtins.float"),
    "slopes of another dtype": ((Q, K, V), {"bias": alibi_bias(x(2, dtype=np.float32))}, r"bias is float32"),
    "sinks of another dtype": ((Q, K, V), {"sinks": x(2, dtype=np.float16)}, r"sinks is float16"),
    "k of another dtype": ((Q, K.astype(np.float32), V), {}, r"q is float64 but k is float32"),
    "integers": ((Q.astype(int), K, V), {}, r"attention: q must have a floating dtype .*, got int64"),
    "complex": ((Q, K.astype(complex), V), {}, r"attention: k must have a floating dtype .*, got complex128"),
    "long double": ((Q, K, V.astype(np.longdouble)), {}, r"attention: v must have a floating dtype"),
    "objects": ((Q.astype(object), K, V), {}, r"attention: q must have a floating dtype .*, got object"),
    "a list": ((Q.tolist(), K, V), {}, r"attention: q must be an array .*, got builtins.list"),
    "None": ((Q, K, None), {}, r"attention: v must be an array, got None"),
    "a masked array": ((np.ma.array(Q), K, V), {}, r"attention: q is a numpy MaskedArray.*mask="),
    "scale as text": ((Q, K, V), {"scale": "1"}, r"attention: scale must be a number on the host, got str"),
    "scale as a flag": ((Q, K, V), {"scale": True}, r"attention: scale must be a number on the host, got bool"),
    "scale as an array": ((Q, K, V), {"scale": x(1)}, r"attention: scale must be a number on the host, got ndarray"),
    "softcap": ((Q, K, V), {"softcap": None, "scale": 1j}, r"attention: scale must be a number"),
    "dropout as a number": ((Q, K, V), {"dropout": 0.1}, r"attention: dropout must be a Dropout\(rate, seed\), got float"),
    "rate as text": ((Q, K, V), {"dropout": Dropout("0.1", 0)}, r"rate of dropout must be a number"),  # type: ignore[arg-type]
    "seed": ((Q, K, V), {"dropout": Dropout(0.1, 0.5)}, r"attention: the seed of dropout must be an integer, got float"),  # type: ignore[arg-type]
}

both = pytest.mark.parametrize("op", [attention, attention_forward])


@both
@pytest.mark.parametrize("case", SHAPES)
def test_shapes_and_ranges(op, case):
    arrays, options, message = SHAPES[case]
    with pytest.raises(ValueError, match=message):
        op(*arrays, **options)


@both
@pytest.mark.parametrize("case", TYPES)
def test_dtypes_and_types(op, case):
    arrays, options, message = TYPES[case]
    with pytest.raises(TypeError, match=message):
        op(*arrays, **options)


def test_cotangents():
    out, saved = attention_forward(Q, K, V)
    for dout, message in (
        (out[0], r"attention_backward: dout must have shape \(\.\.\., H, T, E\) = \(2, 3, 7\), got \(3, 7\)"),
        (out[:1], r"= \(2, 3, 7\), got \(1, 3, 7\)"),
        (out[None], r"= \(2, 3, 7\), got \(1, 2, 3, 7\)"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_backward(dout, saved)
    with pytest.raises(
        ValueError, match=r"attention_backward: dlse must have shape \(\.\.\., H, T\) = \(2, 3\), got \(2, 3, 7\)"
    ):
        attention_backward(out, saved, dlse=out)
    with pytest.raises(TypeError, match=r"attention_backward: dout must be float64, got float32"):
        attention_backward(out.astype(np.float32), saved)
    with pytest.raises(TypeError, match=r"attention_backward: dlse must be float64, got float32"):
        attention_backward(out, saved, dlse=saved.lse.astype(np.float32))


def test_the_cotangent_of_the_log_sum_exp_of_halves_is_float32():
    out, saved = attention_forward(*(a.astype(np.float16) for a in (Q, K, V)))
    assert saved.lse.dtype == np.float32
    attention_backward(out, saved, dlse=saved.lse)
    with pytest.raises(TypeError, match=r"dlse must be float32, got float16"):
        attention_backward(out, saved, dlse=saved.lse.astype(np.float16))


@pytest.mark.parametrize("name", ["strict", "torch", "jax"])
def test_two_libraries(name):
    try:
        library = open_library(name)
    except Unavailable as reason:
        pytest.skip(str(reason))
    q, k, v = (asarray(a, library) for a in (Q, K, V))
    mask, bias, sinks = (asarray(a, library) for a in (np.ones((3, 5), dtype=bool), x(3, 5), x(2)))
    out, saved = attention_forward(q, k, v)
    for call, culprit in (
        (lambda: attention(q, K, v), "k"),
        (lambda: attention(Q, K, v), "v"),
        (lambda: attention(q, k, v, mask=np.ones((3, 5), dtype=bool)), r"mask"),
        (lambda: attention(q, k, v, bias=x(3, 5)), "bias"),
        (lambda: attention(q, k, v, sinks=x(2)), "sinks"),
        (lambda: attention(Q, K, V, mask=mask), "mask"),
        (lambda: attention(Q, K, V, bias=bias), "bias"),
        (lambda: attention(Q, K, V, sinks=sinks), "sinks"),
        (lambda: attention(Q, K, V, bias=alibi_bias(sinks)), "bias"),
        (lambda: attention(Q[None], K[None], V[None], mask=length_mask(asarray(np.array([2]), library))), "mask"),
    ):
        with pytest.raises(TypeError, match=rf"attention: q is an array of .* but {culprit}.* is one of .*one library"):
            call()
    with pytest.raises(TypeError, match="attention_backward: .*dout.*one library"):
        attention_backward(np.ones((2, 3, 7)), saved)
    attention(q, k, v, mask=length_mask(3) & causal_mask(np.int64(1)))  # host numbers may stand beside any library
    attention_backward(out, saved)


def test_an_error_leaves_nothing_behind():
    with pytest.raises(ValueError, match="bias"):
        attention(Q, K, V, bias=x(5, 3))
    np.testing.assert_array_equal(attention(Q, K, V), x(2, 3, 7))
