"""What is wrong with a file, in one error."""

from __future__ import annotations

import contextlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path


class CheckpointError(ValueError):
    """Raised for a file that is no checkpoint, is damaged, or does not fit; the message names the file and says what is wrong."""


# What readers of zip files, headers and JSON raise for bytes that make no sense.
_NONSENSE = (
    zipfile.BadZipFile,
    zlib.error,
    json.JSONDecodeError,
    UnicodeDecodeError,
    EOFError,
    AttributeError,
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
)


@contextlib.contextmanager
def reading(op: str, path: Path) -> Iterator[None]:
    """Whatever a broken file makes its readers raise becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except _NONSENSE as error:
        raise CheckpointError(f"{op}: {path} is damaged or not such a file: {type(error).__name__}: {error}") from error
