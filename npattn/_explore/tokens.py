"""Names for queries and keys: strings from anywhere, made fit to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def token_pair(op: str, tokens: Any, T: int, S: int) -> tuple[list[str], list[str]]:
    """Names for the queries and the keys: one sequence for both, a pair, or their positions."""
    if isinstance(tokens, (str, bytes)) or not (tokens is None or isinstance(tokens, Sequence)):
        raise TypeError(
            f"{op}: tokens must be a sequence of strings, or a pair of such for queries and keys, got {type(tokens).__name__}"
        )
    of_q, of_k = tokens, tokens
    if tokens is not None and len(tokens) == 2 and not any(isinstance(part, str) for part in tokens):
        of_q, of_k = tokens
    return token_names(op, "queries", of_q, "T", T), token_names(op, "keys", of_k, "S", S)


def token_names(op: str, side: str, names: Any, letter: str, count: int) -> list[str]:
    """Names for one side: their positions by default."""
    if names is None:
        return [str(n) for n in range(count)]
    if isinstance(names, (str, bytes)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{op}: the tokens of the {side} must be strings")
    if len(names) != count:
        raise ValueError(f"{op}: there must be {letter} = {count} tokens for the {side}, got {len(names)}")
    return [visible(name) for name in names]


def visible(token: str) -> str:
    """A token with what cannot be seen, or turns text around, written out; blanks at its ends as ``␣``."""
    inner = token.strip(" ")
    start = len(token) - len(token.lstrip(" "))
    shown = "".join(c if c.isprintable() or c == "\u200d" else c.encode("unicode_escape").decode("ascii") for c in inner)
    return "␣" * start + shown + "␣" * (len(token) - start - len(inner))
