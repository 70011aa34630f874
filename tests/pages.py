"""A page of ``npattn.explore`` read in Python: the same gaps filled from the same numbers as its script does it in a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

from npattn import Explorer


class Page:
    """The data of a page, and the text that its script makes of it."""

    def __init__(self, explorer: Explorer) -> None:
        self.html = explorer.html
        self.data: dict[str, Any] = json.loads(self.part("data"))
        self.bytes = zlib.decompress(base64.b64decode(self.part("numbers")))

    def part(self, name: str) -> str:
        """What stands in a script element."""
        (text,) = re.findall(rf'<script type="[\w/]+" id="{name}">(.*?)</script>', self.html, re.DOTALL)
        return str(text)

    def run(self, *choices: int) -> Any:
        """The layers of the run for which the choices have these values."""
        wanted = list(choices)
        (n,) = [n for n in range(len(self.data["runs"])) if [c["of_run"][n] for c in self.data["choices"]] == wanted]
        return self.data["runs"][n]

    def number(self, layer: dict[str, Any], name: str, g: int, i: int, j: int) -> Any:
        """A number as text, or a flag, for the leading index and query head ``g``."""
        table = layer["tables"][name]
        block = self.data["blocks"][table["block"]]
        _, rows, columns = block["shape"]
        return self.read(block, (table["own"][g] * rows + i) * columns + (0 if columns == 1 else j))

    def read(self, block: dict[str, Any], at: int) -> Any:
        """The number or flag at a place of a block."""
        count, blocks = self.data["count"], self.data["blocks"]
        if block["kind"] == "flags":
            return self.bytes[4 * count + block["at"] + at]
        if block["kind"] == "hidden":
            return "-inf" if self.read(blocks[block["where"]], at) else self.read(blocks[block["shown"]], at)
        low, high, first, rest = (self.bytes[n * count + block["at"] + at] for n in range(4))
        return written(low + 256 * high, str(1000 + 256 * first + rest))

    def explain(self, layer: dict[str, Any], name: str, g: int, i: int, j: int) -> str:
        """The text of a cell."""
        label, value = f"{name}[{i}, {j}]", self.number(layer, name, g, i, j)
        for recipe in layer["recipes"][name]:
            if recipe["when"] is None or self.number(layer, recipe["when"], g, i, j):
                break
        letters, numbers = (self.fill(recipe[part], layer, name, recipe, g, i, j) for part in ("letters", "numbers"))
        return f"{label} = {letters}\n{' ' * len(label)} = {numbers} = {value}"

    def fill(self, text: str, layer: dict[str, Any], name: str, recipe: Any, g: int, i: int, j: int) -> str:
        """A recipe's text without its gaps."""

        def gap(match: re.Match[str]) -> str:
            if match[1] in "ij":
                return str({"i": i, "j": j}[match[1]])
            if match[1] == "sum":
                return self.terms(layer, name, recipe["sum"], g, i, j)
            if match[1] == "reason":
                return self.fill(layer["reasons"][self.number(layer, "masked", g, i, j) - 1], layer, name, recipe, g, i, j)
            return str(layer["numbers"].get(match[1]) or self.number(layer, match[1], g, i, j))

        return re.sub(r"\{(\w+)\}", gap, text)

    def terms(self, layer: dict[str, Any], name: str, total: dict[str, Any], g: int, i: int, j: int) -> str:
        """A sum, its first terms written out."""
        used = total["sharers"][layer["tables"][name]["own"][g]] if total["sharers"] else [g]
        shown = []
        for n in range(total["shown"]):
            at = {"i": i, "j": j, "n": n % total["length"]}
            left, right = (
                self.number(layer, array, used[n // total["length"]], at[row], at[column])
                for array, row, column in (total["left"], total["right"])
            )
            signed = right == "nan" or (right[0] == "-" and right != "-0")
            shown.append(f"{left}*({right})" if signed else f"{left}*{right}")
        shown += [total["rest"]] * bool(total["rest"])
        return f"({' + '.join(shown)})" if shown else "(nothing)"


def written(code: int, digits: str) -> str:
    """A number from its sign and exponent in one code, and its digits."""
    if code < 5:
        return ("0", "-0", "inf", "-inf", "nan")[code]
    sign, exponent = "-" * ((code - 5) % 2), ((code - 5) >> 1) - 400

    def point(whole: str, rest: str) -> str:
        return f"{sign}{whole}.{rest.rstrip('0')}".rstrip(".")

    if exponent < -4 or exponent > 3:
        return f"{point(digits[0], digits[1:])}e{'-' if exponent < 0 else '+'}{abs(exponent):02}"
    if exponent < 0:
        return point("0", "0" * (-1 - exponent) + digits)
    return point(digits[: exponent + 1], digits[exponent + 1 :])
