"""Golden files: what is written is what the oracle says, in both forms; answers of others are judged element by element."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import npattn
import npattn.testing
from npattn.__main__ import main
from npattn.testing import AttentionProblem, naive
from npattn.testing.golden import KINDS, OPTIONS, RESULTS, Lengths, random_problem
from npattn.testing.precision import to_bfloat16

NAMES = {**vars(npattn), **vars(npattn.testing), "np": np}
SMALL = ["--B", "1", "2", "--H", "4", "--T", "1", "5", "--D", "4"]


@pytest.fixture
def write(tmp_path, capsys):
    """A folder of cases and its index."""

    def run(*arguments):
        folder = tmp_path / "cases"
        assert main(["cases", "-o", str(folder), *SMALL, *arguments]) == 0
        assert capsys.readouterr().out.startswith("Wrote ")
        return folder, json.loads((folder / "index.json").read_text(encoding="utf-8"))

    return run


def answer(folder, entry, dtype=np.float64):
    """npattn's own answers to a case that was read from its raw file."""
    data = (folder / f"{entry['name']}.bin").read_bytes()
    arrays = {
        name: np.frombuffer(
            data, dtype="<" + np.dtype(a["dtype"]).str[1:], count=a["bytes"] // np.dtype(a["dtype"]).itemsize, offset=a["offset"]
        ).reshape(a["shape"])
        for name, a in entry["arrays"].items()
    }
    mask = arrays["mask"] > 0 if "mask" in arrays else None
    options = {name: entry["options"][name] for name in ("scale", "softcap")}
    options |= {name: arrays[name].astype(dtype) for name in ("bias", "sinks") if name in arrays}
    q, k, v, dout = (arrays[name].astype(dtype) for name in ("q", "k", "v", "dout"))
    out, saved = npattn.attention_forward(q, k, v, mask=mask, **options)
    dlse = arrays["dlse"].astype(saved.lse.dtype) if "dlse" in arrays else None
    grads = npattn.attention_backward(dout, saved, dlse=dlse)
    return {name: x for name, x in {"out": out, "lse": saved.lse, **grads._asdict()}.items() if x is not None}


def test_every_case_is_whole(write):
    folder, index = write("--count", "12", "--options", *OPTIONS, "--dtype", "float64")
    assert len(index["cases"]) == 12
    assert sorted(p.name for p in folder.iterdir()) == sorted(["index.json", *(f for c in index["cases"] for f in c["files"])])
    for entry in index["cases"]:
        problem = eval(entry["problem"], NAMES)
        assert isinstance(problem, AttentionProblem)
        exact = naive(problem)
        with np.load(folder / f"{entry['name']}.npz") as packed:
            data = (folder / f"{entry['name']}.bin").read_bytes()
            assert set(packed) == set(entry["arrays"])
            for name, a in entry["arrays"].items():
                assert packed[name].dtype == a["dtype"]
                assert list(packed[name].shape) == a["shape"]
                assert data[a["offset"] : a["offset"] + a["bytes"]] == packed[name].tobytes()
            assert len(data) == sum(a["bytes"] for a in entry["arrays"].values())
            for name, x in exact.given().items():
                np.testing.assert_array_equal(packed[name], x)
                assert packed[f"{name}_bound"].shape == x.shape
            np.testing.assert_array_equal(packed["q"], problem.q)
            assert ("mask" in packed) == (problem.mask is not None)
            if problem.mask is not None:
                np.testing.assert_array_equal(packed["mask"], problem.dense_mask())
            if problem.dropout is not None:
                np.testing.assert_array_equal(packed["factors"], problem.factors())
        lengths = entry["lengths"]
        assert lengths["H"] == 4
        assert lengths["D"] == lengths["E"] == 4
        assert lengths["T"] in (1, 5)


def test_the_same_seed_writes_the_same_bytes(write, tmp_path, capsys):
    folder, _ = write("--count", "3")
    first = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".npz"}  # a zip has a date
    write("--count", "3")
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".npz"} == first
    write("--count", "3", "--seed", "1")
    assert (folder / "0000.bin").read_bytes() != first["0000.bin"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_right_answers_are_right(dtype, write, tmp_path, capsys):
    """npattn as the other program: once packed, once raw and in the folder of the cases."""
    folder, index = write("--count", "8", "--options", *(o for o in OPTIONS if o != "factors"), "--dtype", dtype)
    packed = tmp_path / "packed"
    packed.mkdir()
    for entry in index["cases"]:
        results = answer(folder, entry, dtype)
        np.savez(packed / f"{entry['name']}.npz", **results)
        for name, x in results.items():
            (folder / f"{entry['name']}.{name}.bin").write_bytes(x.astype(x.dtype.newbyteorder("<")).tobytes())
    for arguments in (["-o", str(folder), "--verify", str(packed)], ["--verify", str(folder)]):
        assert main(["cases", *arguments]) == 0
        out = capsys.readouterr().out
        assert out.endswith("answers are right.\n")
        assert {line.split()[0] for line in out.splitlines()[1:-2]} == {
            name for c in index["cases"] for name in RESULTS if name in c["arrays"]
        }
        assert "FAILED" not in out


def test_wrong_answers_are_named(write, tmp_path, capsys):
    folder, index = write("--count", "9", "--masks", "none", "--dtype", "float32")
    for n, entry in enumerate(index["cases"]):
        results = answer(folder, entry)
        if n:
            results["dk"][0, 0, 0, 1] += 0.5
        for name, x in results.items():
            (folder / f"{entry['name']}.{name}.bin").write_bytes(x.astype("<f8").tobytes())
    assert main(["cases", "--verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "0001 dk[0, 0, 0, 1]: expected " in out
    assert "problem: attention_problem(q=(" in out
    assert "\n... and 3 more\n" in out
    assert out.endswith("8 of 45 answers are wrong.\n")
    verdicts = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:6]}
    assert verdicts == {"out": "ok", "lse": "ok", "dq": "ok", "dk": "FAILED", "dv": "ok"}
    assert main(["cases", "--verify", str(folder), "--tolerance", "1e9"]) == 0


def test_halves_are_read_by_their_bits(write, capsys):
    folder, index = write("--count", "1", "--dtype", "bfloat16", "--masks", "none")
    assert index["cases"][0]["precision"] == "bfloat16"
    with np.load(folder / "0000.npz") as packed:
        np.testing.assert_array_equal(packed["q"], to_bfloat16(packed["q"]))
        out = to_bfloat16(packed["out"])
    (folder / "0000.out.bin").write_bytes((out.view(np.uint32) >> 16).astype("<u2").tobytes())
    assert main(["cases", "--verify", str(folder)]) == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"12345", "0000 out: 5 bytes are not"),
        (b"", "0000 out: 0 bytes are not"),
        ("shape", "0000 out: its shape is (3,), expected is"),
    ],
)
def test_answers_that_cannot_be_read(data, message, write, tmp_path, capsys):
    folder, _ = write("--count", "1")
    where = folder
    if data == "shape":
        where = tmp_path
        np.savez(where / "0000.npz", out=np.zeros(3))
    else:
        (folder / "0000.out.bin").write_bytes(data)
    assert main(["cases", "-o", str(folder), "--verify", str(where)]) == 1
    assert message in capsys.readouterr().out


def test_nan_and_infinity(write, capsys):
    folder, _ = write("--count", "1", "--masks", "lengths", "--seed", "3")
    with np.load(folder / "0000.npz") as packed:
        lse = packed["lse"].copy()
    (folder / "0000.lse.bin").write_bytes(lse.tobytes())  # with -inf where nothing is seen
    assert main(["cases", "--verify", str(folder)]) == 0
    lse[..., -1] = np.nan
    (folder / "0000.lse.bin").write_bytes(lse.tobytes())
    assert main(["cases", "--verify", str(folder)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "where to? -o DIR writes cases, --verify DIR checks answers"),
        (["-o", "x", "--count", "0"], "--count and all lengths must be at least 1"),
        (["-o", "x", "--T", "0"], "--count and all lengths must be at least 1"),
        (["-o", "x", "--H", "4", "--K", "3"], "no K among 3 divides H = 4"),
        (["--verify", "nowhere"], "nowhere holds no cases: index.json cannot be read"),
        (["-o", "file"], "file: File exists"),
    ],
)
def test_what_cannot_be_used(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["cases", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"npattn cases: {message}")
    assert err.count("\n") == 1


def test_a_folder_without_answers(write, tmp_path, capsys):
    folder, _ = write("--count", "1")
    assert main(["cases", "--verify", str(folder)]) == 2
    assert "holds no answers: NAME.npz, or NAME.RESULT.bin such as 0000.out.bin" in capsys.readouterr().err


def test_every_kind_is_drawn():
    rng = np.random.default_rng(0)
    drawn = [random_problem(rng, Lengths(), dtype="float32", masks=KINDS, options=OPTIONS) for _ in range(60)]
    text = " ".join(map(repr, drawn))
    assert all(
        name in text for name in ("causal_mask()", "causal_mask_end()", "window_mask(", "length_mask(", ".replace(mask=np")
    )
    assert all(name in text for name in ("bias=", "scale=", "softcap=", "sinks=True", "dlse=True", "dropout="))
    assert any(problem.mask is None for problem in drawn)
    assert {problem.heads // problem.kv_heads for problem in drawn} == {1, 2, 4}


def test_as_a_process(tmp_path):
    """Without Hypothesis."""
    code = "import sys; sys.modules['hypothesis'] = None; from npattn.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-W", "error", "-c", code, "cases", "-o", "cases", "--count", "2", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Wrote 2 cases to cases, ")
