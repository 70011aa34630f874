"""Memory that outlives a call: used again, never by two at once, never part of a result."""

import contextlib
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from npattn import (
    AttentionTangents,
    attention,
    attention_backward,
    attention_backward_jvp,
    attention_forward,
    attention_jvp,
    attention_weights,
    causal_mask,
    set_num_threads,
)
from npattn._attention import memory
from npattn._attention.memory import drop_spare_memory, lent_memory
from npattn._attention.tiling import KEEP_MIB, Sizes, forced
from tests.attention.paths import no_problem_too_small
from tests.attention.peaks import peak

TINY = Sizes(rows=3, keys=4, pairs=24, plain=False, keep=True)


@pytest.fixture(autouse=True)
def no_spare_memory():
    drop_spare_memory()
    yield
    drop_spare_memory()


def inputs(dtype=np.float64, seed=0, T=9):
    return np.random.default_rng(seed).standard_normal((4, 2, 2, T, 5)).astype(dtype)


def every_pass(q, k, v, dout):
    """What each function that tiles returns."""
    tangents = AttentionTangents(k, v, q)
    out, saved = attention_forward(q, k, v, mask=causal_mask())
    results = (
        (out, saved.lse),
        attention_backward(dout, saved),
        attention_jvp(q, k, v, tangents, mask=causal_mask()),
        attention_backward_jvp(dout, saved, tangents),
    )
    return [x for result in results for x in result if x is not None]


@pytest.mark.parametrize("threads", [1, 2])
def test_results_outlive_the_calls_that_come_after(threads):
    set_num_threads(threads)
    try:
        with forced(TINY), no_problem_too_small():
            first = every_pass(*inputs())
            copies = [x.copy() for x in first]
            for seed, dtype in enumerate((np.float64, np.float32, np.float64), start=1):
                every_pass(*inputs(dtype, seed))
            assert len(memory._spare) == threads
    finally:
        set_num_threads(None)
    for result, copy in zip(first, copies, strict=True):
        np.testing.assert_array_equal(result, copy)
        assert not any(np.shares_memory(result, m) for _, of_a_thread in memory._spare for m in of_a_thread.values())


@pytest.mark.parametrize("dtypes", [(np.float32, np.float64), (np.float64, np.float32)])
def test_what_is_left_in_memory_does_not_matter(dtypes):
    with forced(TINY):
        for dtype in dtypes:
            drop_spare_memory()
            fresh = every_pass(*inputs(dtype))
            for _, of_a_thread in memory._spare:
                for m in of_a_thread.values():
                    m[:] = 0xFF  # NaN in every float dtype
            for a, b in zip(fresh, every_pass(*inputs(dtype)), strict=True):
                np.testing.assert_array_equal(a, b)


def test_the_second_call_takes_no_memory_for_tiles():
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 2, 512, 16))
    set_num_threads(1)
    try:
        first, second = (
            peak(lambda: attention_backward(dout, attention_forward(q, k, v, mask=causal_mask())[1]), fresh=fresh)[0]
            for fresh in (True, False)
        )
    finally:
        set_num_threads(None)
    assert first - second > 512 * 256 * 8  # a tile's matrix, at least


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide otherwise what they keep")
def test_the_next_results_are_not_new_pages():
    """In a process of its own: what is kept depends on all that was freed before."""
    script = """
import resource
import numpy as np
from npattn import attention_backward, attention_forward
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for T in (256, 1024):  # small results first: glibc keeps twice the largest array that it has seen freed
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 8, T, 64), dtype=np.float32)
    def call():
        attention_backward(dout, attention_forward(q, k, v)[1])
    for _ in range(3):
        call()
    before = faults()
    for _ in range(5):
        call()
print((faults() - before) / 5)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "COV"))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert float(done.stdout) < 200  # the results alone are 2000 pages


def test_memory_that_is_lent_is_lent_to_nobody_else():
    with lent_memory(2) as outer, lent_memory(2) as inner:
        of_both = [*outer, *inner]
        assert len({id(m) for m in of_both}) == 4
    with lent_memory(5) as again:
        assert len({id(m) for m in again}) == 5
        assert {id(m) for m in of_both} <= {id(m) for m in again}


def test_a_failed_call_gives_its_memory_back():
    with contextlib.suppress(KeyboardInterrupt), lent_memory(1) as (lent,):
        lent["scores"] = memory.new_memory(10, np.uint8, np)
        raise KeyboardInterrupt
    assert [size for size, _ in memory._spare] == [10]


def test_no_more_waits_than_it_may(monkeypatch):
    monkeypatch.setattr(memory, "SPARE_BYTES", 25)
    with lent_memory(3) as lent:
        for of_a_thread in lent:
            of_a_thread["scores"] = memory.new_memory(10, np.uint8, np)
    assert [size for size, _ in memory._spare] == [10, 10]


def test_a_room_is_used_again_once_nobody_has_a_part_of_it():
    room = memory.new_room(100, np.float64, np)
    address, part = room.ctypes.data, room[10:20].view(np.ndarray)[2:].reshape(2, 4)
    del room
    other = memory.new_room(100, np.float64, np)
    assert other.ctypes.data != address  # a part is still there
    part[...] = 3
    other[...] = 5
    np.testing.assert_array_equal(part, 3)
    del part
    assert memory.new_room(200, np.float32, np).ctypes.data == address  # as many bytes
    assert memory.new_room(100, np.float64, np).ctypes.data == address
    assert memory.new_room(99, np.float64, np).ctypes.data != address


def test_what_is_saved_outlives_the_calls_that_come_after():
    q, k, v, dout = inputs(T=9)
    with forced(TINY), no_problem_too_small():
        _, saved = attention_forward(q, k, v, mask=causal_mask())
        expected = [x.copy() for x in attention_backward(dout, saved)[:3]]
        for _ in range(3):  # saved states that come and go
            attention_forward(k, v, q, mask=causal_mask())
        weights = attention_weights(saved)
        for got, wanted in zip(attention_backward(dout, saved)[:3], expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        copy = weights.copy()
        del saved
        attention_forward(k, v, q, mask=causal_mask())
        np.testing.assert_array_equal(weights, copy)
        assert memory._spare_rooms


def test_the_largest_room_that_is_kept_waits():
    """With what sets its rows apart, 64 numbers a row and run of keys: T = S = 2048 in float64 is just at the limit."""
    rows, keys = 8 * 2048, 2048
    assert rows * keys * 8 == KEEP_MIB << 20
    size = rows * (keys + 3 * 64)
    memory.new_room(size, np.float64, np)
    assert list(memory._spare_rooms) == [size * 8]


def test_old_rooms_make_way(monkeypatch):
    monkeypatch.setattr(memory, "SPARE_BYTES", 25)
    for size in (10, 10, 20, 30):
        memory.new_room(size, np.uint8, np)
    assert {n: len(rooms) for n, rooms in memory._spare_rooms.items()} == {}
    for size in (30, 10, 20):
        memory.new_room(size, np.uint8, np)
    assert {n: len(rooms) for n, rooms in memory._spare_rooms.items()} == {20: 1}
    held = [memory.new_room(10, np.uint8, np) for _ in range(2)]
    held.clear()
    assert {n: len(rooms) for n, rooms in memory._spare_rooms.items()} == {10: 2}


def test_memory_grows_with_what_is_asked_of_it():
    for T in (2, 300, 5):
        q, k, v, dout = inputs(T=T)
        with forced(TINY._replace(rows=1 << 9, keys=1 << 9, pairs=1 << 18)):
            tiled = [attention(q, k, v), *attention_backward(dout, attention_forward(q, k, v)[1])[:3]]
        with forced(Sizes(1 << 62, 1 << 62, 1 << 62, plain=True, keep=True)):
            plain = [attention(q, k, v), *attention_backward(dout, attention_forward(q, k, v)[1])[:3]]
        for a, b in zip(tiled, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
