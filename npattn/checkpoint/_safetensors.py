"""The safetensors format: the length of a JSON header, the header, the numbers of all arrays."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from npattn._arrays.namespace import Array
from npattn.checkpoint._errors import CheckpointError, reading
from npattn.checkpoint._files import BLANK, DIGITS, check_seal, seal
from npattn.checkpoint._tree import Stored, array_entries, check_size, restore

_NAMES = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
_CODES = {name: code for code, name in _NAMES.items()}
_SEAL, _STRUCTURE = "npattn.sha256", "npattn"
_SEAL_AT = 8 + len(f'{{"__metadata__": {{"{_SEAL}": "')  # it comes first in the header


def write(file: BinaryIO, structure: Any, arrays: dict[str, Stored]) -> None:
    """The numbers begin at a multiple of eight bytes."""
    header: dict[str, Any] = {"__metadata__": {_SEAL: BLANK.decode(), _STRUCTURE: json.dumps(structure)}}
    end = 0
    # the widest first, so that all are aligned
    in_order = sorted(arrays.items(), key=lambda item: -item[1].values.itemsize)
    for name, stored in in_order:
        begin, end = end, end + stored.values.nbytes
        header[name] = {"dtype": _CODES[stored.dtype], "shape": list(stored.values.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, stored in in_order:
        file.write(stored.values.data if stored.values.size else b"")
    seal(file, _SEAL_AT)


def read(op: str, path: Path, file: BinaryIO) -> tuple[Any, dict[str, Stored]]:
    """The structure and the arrays of a file that `write` wrote."""
    header, start, size = _header(file)
    metadata = header.get("__metadata__", {})
    if list(metadata) != [_SEAL, _STRUCTURE] or len(metadata[_SEAL]) != DIGITS:
        raise CheckpointError(
            f"{op}: {path} was not written by npattn.checkpoint; read_safetensors reads the arrays of any such file"
        )
    check_seal(op, path, file, _SEAL_AT)
    structure = json.loads(metadata[_STRUCTURE])
    expected = {name: entry for part in structure.values() for name, entry in array_entries(part).items()}
    arrays = _arrays(file, header, start, size)
    found = {name: (stored.dtype, stored.values.shape) for name, stored in arrays.items()}
    if found != expected:
        raise ValueError("its arrays are not those that its structure speaks of")
    return structure, arrays


def read_safetensors(path: str | os.PathLike[str], /) -> dict[str, Array]:
    """The arrays of any safetensors file by name, such as the weights that other libraries publish.

    Parameters
    ----------
    path : path
        Where it is.

    Returns
    -------
    dict of NumPy arrays
        In the file's dtypes; bfloat16, which NumPy does not have, as float32.

    Raises
    ------
    CheckpointError
        If the file is damaged or not of this format.
    OSError
        If it cannot be read.

    Notes
    -----
    No library is needed for it. `npattn.interop` makes parameters and a config of what it returns.

    Examples
    --------
    >>> import numpy as np, tempfile, pathlib
    >>> from npattn.checkpoint import read_safetensors, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "weights.safetensors"
    ...     save(path, {"w": np.ones((2, 3))})
    ...     read_safetensors(path)["w"].shape
    (2, 3)
    """
    op, place = "read_safetensors", Path(path)
    with reading(op, place), place.open("rb") as file:
        header, start, size = _header(file)
        return {name: restore(stored, xp=np, device=None) for name, stored in _arrays(file, header, start, size).items()}


def _header(file: BinaryIO) -> tuple[dict[str, Any], int, int]:
    """The header, where the numbers begin, and how many bytes they have."""
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= size - 8:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(file.read(length), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("the header has no names")
    return header, 8 + length, size - 8 - length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name stands there twice")
    return dict(pairs)


def _arrays(file: BinaryIO, header: dict[str, Any], start: int, size: int) -> dict[str, Stored]:
    """Every array, once it is sure that together they are the file, without gaps and without overlaps."""
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    end = 0
    for begin, own_end, name in spans:
        if begin != end or type(own_end) is not int or own_end < begin:
            raise ValueError(f"{name} does not begin where the one before it ends")
        end = own_end
        code, shape = entries[name]["dtype"], tuple(entries[name]["shape"])
        if code not in _NAMES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"{name} has dtype {code} and shape {shape}")
        check_size(name, _NAMES[code], shape, own_end - begin)
    if end != size:
        raise ValueError(f"the arrays have {end} bytes, the file has {size}")
    found = {}
    for begin, own_end, name in spans:
        file.seek(start + begin)
        dtype = _NAMES[entries[name]["dtype"]]
        plain = np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")
        values = np.frombuffer(bytearray(file.read(own_end - begin)), dtype=plain).reshape(tuple(entries[name]["shape"]))
        found[name] = Stored(dtype, values)
    return {name: found[name] for name in entries}
