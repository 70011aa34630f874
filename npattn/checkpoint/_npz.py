"""Zip archives of ``.npy`` files, as `numpy.savez` writes them, with a JSON beside them and a digest at the very end."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from npattn.checkpoint._errors import CheckpointError
from npattn.checkpoint._files import BLANK, DIGITS, check_seal, seal
from npattn.checkpoint._tree import Stored, array_entries, check_size

STRUCTURE = "npattn.json"
_COMMENT = b"npattn checkpoint, sha256 "
_FORMAT_OF = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def write(file: BinaryIO, structure: Any, arrays: dict[str, Stored]) -> None:
    """The same bytes for the same contents: entries have no dates."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = _COMMENT + BLANK
        archive.writestr(zipfile.ZipInfo(STRUCTURE), json.dumps(structure))
        for name, stored in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, stored.values, allow_pickle=False)
    seal(file, file.seek(0, 2) - DIGITS)


def read(op: str, path: Path, file: BinaryIO) -> tuple[Any, dict[str, Stored]]:
    """The structure and the arrays."""
    size = file.seek(0, 2)
    file.seek(max(size - DIGITS - len(_COMMENT), 0))
    if file.read(len(_COMMENT)) != _COMMENT:
        raise CheckpointError(f"{op}: {path} was not written by npattn.checkpoint, or is cut off")
    check_seal(op, path, file, size - DIGITS)
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) != len(archive.infolist()):
            raise ValueError("a name stands there twice")
        structure = json.loads(_bytes(archive, entries.pop(STRUCTURE), size))
        expected = {name: entry for part in structure.values() for name, entry in array_entries(part).items()}
        _check_names({f"{name}.npy" for name in expected}, set(entries))
        arrays = {
            name: Stored(dtype, _array(archive, entries[f"{name}.npy"], dtype, shape, size))
            for name, (dtype, shape) in expected.items()
        }
    return structure, arrays


def _check_names(expected: set[str], found: set[str]) -> None:
    if expected != found:
        missing, more = sorted(expected - found), sorted(found - expected)
        raise ValueError(
            "; ".join(f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("left over", more)) if names)
        )


def _check_entry(entry: zipfile.ZipInfo, size: int) -> None:
    """Nothing is compressed, so that no entry is larger than the file."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
        raise ValueError(f"{entry.filename} is compressed or encrypted")
    if entry.file_size != entry.compress_size or entry.file_size > size:
        raise ValueError(f"{entry.filename} has an impossible size")


def _bytes(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, size: int) -> bytes:
    _check_entry(entry, size)
    return archive.read(entry)


def _array(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, dtype: str, shape: tuple[int, ...], size: int
) -> np.ndarray[Any, Any]:
    """The numbers, once header, structure and size agree on how many there are."""
    _check_entry(entry, size)
    with archive.open(entry) as file:
        found_shape, fortran, found_dtype = _FORMAT_OF[np.lib.format.read_magic(file)](file)
        plain = np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")
        if (found_shape, fortran, found_dtype) != (shape, False, plain):
            raise ValueError(f"{entry.filename} is {found_dtype} of shape {found_shape}, not {dtype} of shape {shape}")
        check_size(entry.filename, dtype, shape, entry.file_size - file.tell())
        values = np.frombuffer(bytearray(file.read()), dtype=plain)
        return values.reshape(shape)
