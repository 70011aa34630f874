"""Files that are broken, by accident or on purpose: one clear error each, in little memory, and never a broken file of ours."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npattn import checkpoint
from npattn.checkpoint import CheckpointError, _files, _npz, _safetensors
from npattn.models import BlockConfig, EncoderBlockParams
from npattn.optim import Adam

SUFFIXES = [".npz", ".safetensors"]
every_format = pytest.mark.parametrize("suffix", SUFFIXES)
PARAMS = EncoderBlockParams.init(np.random.default_rng(0), width=8, heads=2)


def saved(path: Path) -> bytes:
    checkpoint.save(path, PARAMS, config=BlockConfig(), state=Adam().init(PARAMS), notes={"losses": [1.0, 0.5]})
    return path.read_bytes()


def refused(path: Path, contents: bytes) -> None:
    """One CheckpointError that names the file; no more memory than a few times the file."""
    path.write_bytes(contents)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="checkpoint.load: ") as error:
            checkpoint.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert peak < 4 * len(contents) + 4_000_000


def accidents(whole: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    """Cut, flipped, zeroed, doubled, with something in front or behind."""
    while True:
        at, end = sorted(int(n) for n in rng.integers(0, len(whole), 2))
        kind = rng.integers(0, 7)
        flipped = bytearray(whole)
        for n in rng.integers(0, len(whole), rng.integers(1, 4)):
            flipped[n] ^= 1 << int(rng.integers(0, 8))
        yield [
            whole[:at],
            whole[:at] + whole[end + 1 :],
            bytes(flipped),
            whole[:at] + bytes(end + 1 - at) + whole[end + 1 :],
            whole + whole[at:],
            rng.bytes(int(rng.integers(1, 50))) + whole,
            whole + rng.bytes(int(rng.integers(1, 50))),
        ][kind]


@every_format
def test_200_accidents(suffix, tmp_path):
    whole = saved(tmp_path / f"good{suffix}")
    rng = np.random.default_rng(0)
    broken = accidents(whole, rng)
    done = 0
    while done < 200:
        contents = next(broken)
        if contents != whole:
            refused(tmp_path / f"bad{suffix}", contents)
            done += 1


@every_format
def test_every_single_byte_counts(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    checkpoint.save(path, {"w": np.arange(3.0)}, notes={"seed": 1})
    whole = path.read_bytes()
    for n in range(len(whole)):
        flipped = bytearray(whole)
        flipped[n] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError):
            checkpoint.load(path)


# On purpose: the digest is right, the contents are not -----------------------------------------------------------------------


def sealed_npz(entries: dict[str, bytes], **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.comment = _npz._COMMENT + _files.BLANK
        for name, contents in entries.items():
            archive.writestr(zipfile.ZipInfo(name), contents, options.get("compression"))
    _files.seal(file, file.seek(0, 2) - _files.DIGITS)
    return file.getvalue()


def entries_of(whole: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npy(values: Any, **changes: Any) -> bytes:
    """A ``.npy`` file, with another header in front of the numbers if one is given."""
    file = io.BytesIO()
    array = np.asarray(values)
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape, **changes}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + array.tobytes()


NAME = "attention.w_q.npy"


def test_entries_that_are_not_what_the_structure_says(tmp_path):
    good = entries_of(saved(tmp_path / "good.npz"))
    values = np.asarray(PARAMS.attention.w_q)
    pickled = io.BytesIO()
    np.lib.format.write_array(pickled, np.asarray([print, None]), allow_pickle=True)
    structure = json.loads(good["npattn.json"])
    huge = json.loads(good["npattn.json"])
    huge["params"]["fields"]["attention"]["fields"]["w_q"]["shape"] = [2**40, 2**10]
    unpicklable = {
        "wrong dtype": {NAME: npy(values.astype(np.float32))},
        "wrong dtype of the same size": {NAME: npy(values.view(np.int64))},
        "wrong shape": {NAME: npy(values.reshape(4, 4, 4))},
        "huge": {NAME: npy(values, shape=(2**40, 2**10))},
        "huge in both": {NAME: npy(values, shape=(2**40, 2**10)), "npattn.json": json.dumps(huge).encode()},
        "negative": {NAME: npy(values, shape=(-8, 2, 4))},
        "pickled": {NAME: pickled.getvalue()},
        "a pickle": {NAME: pickle.dumps(values)},
        "the other order": {NAME: npy(values, fortran_order=True)},
        "big endian": {NAME: npy(values.astype(">f8"))},
        "short": {NAME: npy(values)[:-8]},
        "long": {NAME: npy(values) + bytes(8)},
        "empty": {NAME: b""},
        "renamed": {"attention.w_z.npy": good[NAME]},
        "no structure": {"npattn.json": b""},
        "a list": {"npattn.json": b"[]"},
        "a part less": {"npattn.json": json.dumps({**structure, "more": None}).encode()},
        "nested": {"npattn.json": b"[" * 100_000},
        "an unknown type": {"npattn.json": json.dumps({**structure, "notes": {"type": "os.system", "fields": {}}}).encode()},
        "no tree": {"npattn.json": json.dumps({**structure, "notes": {"what": 1}}).encode()},
        "an unknown field": {"npattn.json": json.dumps({**structure, "config": {"type": "Rotary", "fields": {"x": 1}}}).encode()},
        "a missing field": {"npattn.json": json.dumps({**structure, "config": {"type": "SGDState", "fields": {}}}).encode()},
    }
    for name, change in unpicklable.items():
        entries = {**good, **change}
        if name == "renamed":
            del entries[NAME]
        refused(tmp_path / f"{name}.npz", sealed_npz(entries))
    refused(tmp_path / "more.npz", sealed_npz({**good, "more.npy": npy(values)}))
    refused(tmp_path / "less.npz", sealed_npz({name: entry for name, entry in good.items() if name != NAME}))
    refused(tmp_path / "a bomb.npz", sealed_npz({**good, NAME: bytes(10**8)}, compression=zipfile.ZIP_DEFLATED))
    path = tmp_path / "good.npz"
    path.write_bytes(sealed_npz(good))  # what is sealed here and left as it is can be read
    assert checkpoint.load(path).state.step == 0


def sealed_safetensors(header: dict[str, Any] | bytes, numbers: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = io.BytesIO((len(text) if length is None else length).to_bytes(8, "little") + text + numbers)
    if file.getvalue()[_safetensors._SEAL_AT :].startswith(_files.BLANK):
        _files.seal(file, _safetensors._SEAL_AT)
    return file.getvalue()


def test_headers_that_are_not_what_the_file_holds(tmp_path):
    whole = saved(tmp_path / "good.safetensors")
    length = int.from_bytes(whole[:8], "little")
    numbers = whole[8 + length :]

    def header(**changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(whole[8 : 8 + length])
        found["__metadata__"]["npattn.sha256"] = _files.BLANK.decode()
        found["attention.w_q"].update(changes)
        return found

    begin, end = header()["attention.w_q"]["data_offsets"]
    for n, changes in enumerate(
        [
            {"dtype": "F32"},
            {"dtype": "I64"},
            {"dtype": "F8_E4M3"},
            {"shape": [2**40, 2**10]},
            {"shape": [4, 4, 4]},
            {"shape": [-8, -2, 4]},
            {"shape": [8.0, 2, 4]},
            {"shape": None},
            {"data_offsets": [begin, end + 8]},
            {"data_offsets": [begin - 8, end]},
            {"data_offsets": [2**60, 2**60 + 8]},
            {"data_offsets": [end, begin]},
            {"data_offsets": [begin, None]},
            {"data_offsets": []},
        ]
    ):
        refused(tmp_path / f"{n}.safetensors", sealed_safetensors(header(**changes), numbers))
    renamed = {("attention.w_z" if name == "attention.w_q" else name): entry for name, entry in header().items()}
    for n, contents in enumerate(
        [
            sealed_safetensors(renamed, numbers),
            sealed_safetensors(header(), numbers + bytes(8)),
            sealed_safetensors(header(), numbers[:-8]),
            sealed_safetensors(header(), numbers, 2**62),
            sealed_safetensors(b"[" * 100_000, b""),
            sealed_safetensors(b"{}", b""),
            sealed_safetensors(b"[]", b""),
            sealed_safetensors(b'{"a": 1, "a": 1}', b""),
            b"",
            pickle.dumps(PARAMS.attention.w_q),
        ]
    ):
        refused(tmp_path / f"more{n}.safetensors", contents)
    path = tmp_path / "again.safetensors"
    path.write_bytes(sealed_safetensors(header(), numbers))
    assert checkpoint.load(path).state.step == 0


def test_foreign_files(tmp_path):
    np.savez(tmp_path / "plain.npz", w=np.ones(3))
    np.savez(tmp_path / "objects.npz", w=np.asarray([print]))
    for name in ("plain", "objects"):
        with pytest.raises(CheckpointError, match=r"was not written by npattn\.checkpoint, or is cut off"):
            checkpoint.load(tmp_path / f"{name}.npz")


# Whole or not there ----------------------------------------------------------------------------------------------------------

WRITER = """
import sys
import numpy as np
from npattn import checkpoint

for n in range(1, 10**6):
    checkpoint.save(sys.argv[1], {"w": np.full((300, 1000), float(n)), "n": n})
    print(n, flush=True)
"""


@every_format
def test_a_writer_that_is_killed_leaves_a_whole_file(suffix, tmp_path):
    path = tmp_path / f"a{suffix}"
    rng = np.random.default_rng(0)
    for count in range(50):
        if count >= 3 and list(tmp_path.glob(".*.part")):
            break  # enough, and one was killed in the middle of it: otherwise this shows nothing
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()  # it has begun
            time.sleep(rng.uniform(0, 0.05))
            writer.kill()
        params = checkpoint.load(path).params
        assert np.all(params["w"] == params["n"])
    else:
        pytest.fail("no writer was killed in the middle of it")


@every_format
@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_writer_that_fails_leaves_what_was_there(step, suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a{suffix}"
    before = saved(path)

    def fail(*_: Any) -> None:
        raise OSError("the disk is full")

    if step == "write":
        monkeypatch.setattr({".npz": _npz, ".safetensors": _safetensors}[suffix], "seal", fail)
    elif step == "fsync":
        monkeypatch.setattr(_files.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        checkpoint.save(path, {"w": np.ones(3)})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "real.npz").write_bytes(b"")
    (tmp_path / "link.npz").symlink_to(tmp_path / "real.npz")
    checkpoint.save(tmp_path / "link.npz", {"w": np.ones(3)})
    assert (tmp_path / "link.npz").is_symlink()
    assert checkpoint.load(tmp_path / "real.npz").params["w"].shape == (3,)
