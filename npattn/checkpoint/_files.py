"""Files that are whole or not there, and a digest that every changed byte changes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from npattn.checkpoint._errors import CheckpointError

DIGITS = 64  # of a SHA-256 in hexadecimal
BLANK = b"0" * DIGITS
_CHUNK = 1 << 20
_numbers = itertools.count()


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """``write(file)`` under another name in the same folder, then a rename: whoever looks finds the old file or the new one."""
    target = Path(os.path.realpath(path))  # a link stays a link
    part = target.with_name(f".{target.name}.{os.getpid()}-{next(_numbers)}.part")
    try:
        with part.open("x+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename last, where folders can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def seal(file: BinaryIO, position: int) -> None:
    """Put the digest of all other bytes in the place of the 64 zeros at ``position``."""
    digest = _digest(file, position)
    file.seek(position)
    file.write(digest)


def check_seal(op: str, path: Path, file: BinaryIO, position: int) -> None:
    """Raise unless the 64 bytes at ``position`` are the digest of all others."""
    file.seek(position)
    found = file.read(DIGITS)
    if found != _digest(file, position):
        raise CheckpointError(f"{op}: {path} is damaged: its contents have changed since it was written")


def _digest(file: BinaryIO, position: int) -> bytes:
    digest = hashlib.sha256()
    file.seek(0)
    _add(digest, file, position)
    digest.update(BLANK)
    file.seek(position + DIGITS)
    _add(digest, file, -1)
    return digest.hexdigest().encode()


def _add(digest: hashlib._Hash, file: BinaryIO, size: int) -> None:
    """The next ``size`` bytes; all that there are if it is negative."""
    while size:
        chunk = file.read(_CHUNK if size < 0 else min(size, _CHUNK))
        if not chunk:
            return
        digest.update(chunk)
        size -= len(chunk) if size > 0 else 0
