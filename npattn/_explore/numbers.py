"""Numbers as `explain` prints them, four digits and an exponent, packed for a page.

A number that is printed to four digits holds 15 bits, so the matrices of a page are most of its size. Here they take 16: every
digit and exponent is stored as it will be read, arrays that repeat others are stored once, and nothing is left to be computed.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

Floats = np.ndarray[Any, Any]

_SPECIAL = {"+0.000e+00": 0, "-0.000e+00": 1, "+inf": 2, "-inf": 3, "+nan": 4, "-nan": 4}
_FIRST, _LEAST = 5, -400  # the first code of an ordinary number, and an exponent below that of any


class Packer:
    """Collects arrays of numbers and flags; each is known by its place in ``blocks``."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], int] = {}
        self._codes: list[Floats] = []
        self._digits: list[Floats] = []
        self._flags: list[Floats] = []
        self._counts = {"numbers": 0, "flags": 0}

    def numbers(self, array: Floats) -> int:
        """A float array (n, rows, columns)."""
        array = np.ascontiguousarray(array, dtype=np.float64)

        def store() -> None:
            codes, digits = printed(array)
            self._codes.append(codes)
            self._digits.append(digits)

        return self._add("numbers", array, store)

    def flags(self, array: Floats) -> int:
        """An array (n, rows, columns) of integers below 256."""
        array = np.ascontiguousarray(array, dtype=np.uint8)
        return self._add("flags", array, lambda: self._flags.append(array.ravel()))

    def hidden(self, array: Floats, shown: int) -> int:
        """An array that is the one in block ``shown``, but for places where it is -inf."""
        block = {"kind": "hidden", "shape": list(array.shape), "shown": shown, "where": self.flags(array == -np.inf)}
        if block not in self.blocks:
            self.blocks.append(block)
        return self.blocks.index(block)

    def _add(self, kind: str, array: Floats, store: Any) -> int:
        key = (kind, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = len(self.blocks)
            self.blocks.append({"kind": kind, "shape": list(array.shape), "at": self._counts[kind]})
            self._counts[kind] += array.size
            store()
        return self._known[key]

    def text(self) -> str:
        """Everything, as text for a page: deflated, in base 64. Bytes of one kind stand together, which deflates best."""
        codes, digits, flags = (
            np.concatenate([np.zeros(0, dtype), *parts])
            for dtype, parts in ((np.uint16, self._codes), (np.uint16, self._digits), (np.uint8, self._flags))
        )
        planes = (codes & 255, codes >> 8, digits >> 8, digits & 255, flags)
        raw = b"".join(plane.astype(np.uint8).tobytes() for plane in planes)
        return base64.b64encode(zlib.compress(raw, 9)).decode("ascii")

    @property
    def count(self) -> int:
        """How many numbers there are: the length of each of the first four planes."""
        return self._counts["numbers"]


def printed(array: Floats) -> tuple[Floats, Floats]:
    """Sign and exponent of every number as one code, and its four digits less 1000.

    Python's formatting rounds them: it is the one that `explain` uses, and the only one that gets every tie right.
    """
    codes, digits = np.zeros(array.size, np.uint16), np.zeros(array.size, np.uint16)
    for n, x in enumerate(array.ravel().tolist()):
        text = f"{x:+.3e}"
        special = _SPECIAL.get(text)
        if special is None:
            codes[n] = _FIRST + 2 * (int(text[7:]) - _LEAST) + (text[0] == "-")
            digits[n] = int(text[1] + text[3:6]) - 1000
        else:
            codes[n] = special
    return codes, digits
