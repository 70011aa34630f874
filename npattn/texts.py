"""A text as numbers, character by character: what small language models learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from npattn._arrays.checks import host_int
from npattn._arrays.namespace import Array

__all__ = ["Text", "read_text"]


class Text(NamedTuple):
    """A text as numbers of an alphabet: the first nine tenths to train on, the rest to measure on."""

    name: str
    alphabet: str
    train: Array  # (N,), integers
    held_out: Array

    def __repr__(self) -> str:
        return f"Text({self.name!r}, {len(self.train) + len(self.held_out)} characters, {len(self.alphabet)} distinct)"

    def encode(self, characters: str) -> Array:
        """The numbers of characters.

        Parameters
        ----------
        characters : str
            Of the alphabet.

        Returns
        -------
        integer array (N,)

        Raises
        ------
        ValueError
            If a character is not in the alphabet.
        """
        if foreign := set(characters) - set(self.alphabet):
            raise ValueError(f"Text.encode: {min(foreign)!r} is not in the alphabet of {self.name}")
        return np.searchsorted(_codes(self.alphabet), _codes(characters))

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of numbers.

        Parameters
        ----------
        ids : iterable of int
            Numbers of the alphabet.

        Returns
        -------
        str
        """
        return "".join(self.alphabet[n] for n in ids)

    def batches(self, *, size: int, context: int, seed: int = 0) -> Callable[[int], tuple[Array, Array]]:
        """What `npattn.training.train` takes batches from: random pieces to train on, and the same one character later.

        Parameters
        ----------
        size : int
            Pieces in a batch.
        context : int
            Characters in a piece.
        seed : int, optional
            Of the choice; the batch of a step depends on seed and step alone.

        Returns
        -------
        callable
            ``batches(step)``: ids and targets, (size, context) each.

        Raises
        ------
        ValueError
            If the text is not longer than the context.
        """
        host_int("Text.batches", "size", size, least=1)
        _check_context("Text.batches", context, self.train)

        def batch(step: int) -> tuple[Array, Array]:
            starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - context, size)
            pieces = self.train[starts[:, None] + np.arange(context + 1)]
            return pieces[:, :-1], pieces[:, 1:]

        return batch

    def pieces(self, context: int) -> tuple[Array, Array]:
        """What was held out, one piece after another, and the same one character later.

        Parameters
        ----------
        context : int
            Characters in a piece.

        Returns
        -------
        ids, targets : integer array (N, context)

        Raises
        ------
        ValueError
            If not so much was held out.
        """
        _check_context("Text.pieces", context, self.held_out)
        count = (len(self.held_out) - 1) // context
        end = count * context
        return self.held_out[:end].reshape(count, context), self.held_out[1 : end + 1].reshape(count, context)


def read_text(path: Path | None = None, *, least: int = 2) -> Text:
    """A text file, or the text that is in the package.

    Parameters
    ----------
    path : Path, optional
        Of a UTF-8 file; the first chapters of Alice's Adventures in Wonderland by default.
    least : int, optional
        The characters that there must be.

    Returns
    -------
    Text
        Its alphabet is what occurs, in order.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is not UTF-8 text, or too short. Both errors are one line.

    Examples
    --------
    >>> read_text()
    Text("Alice's Adventures in Wonderland, chapters I-VI (Lewis Carroll, 1865)", 71748 characters, 66 distinct)
    """
    if path is None:
        name = "Alice's Adventures in Wonderland, chapters I-VI (Lewis Carroll, 1865)"
        characters = resources.files("npattn._commands").joinpath("text.txt").read_text("ascii")
    else:
        name, characters = str(path), _read(path)
        if len(characters) < least:
            raise ValueError(f"{path} is too short: {len(characters)} characters, at least {least} are needed")
    alphabet = "".join(sorted(set(characters)))
    ids: Array = np.searchsorted(_codes(alphabet), _codes(characters))
    split = len(ids) * 9 // 10
    return Text(name, alphabet, ids[:split], ids[split:])


def _read(path: Path) -> str:
    try:
        characters = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise OSError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    if "\0" in characters:
        raise ValueError(f"{path} is not text: it holds zero bytes")
    return characters


def _codes(characters: str) -> Array:
    return np.frombuffer(characters.encode("utf-32-le"), dtype="<u4")


def _check_context(op: str, context: int, ids: Array) -> None:
    if len(ids) <= host_int(op, "context", context, least=1):
        raise ValueError(f"{op}: there are {len(ids)} characters, which must be more than context = {context}")
