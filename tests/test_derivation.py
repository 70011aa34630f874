"""docs/derivation.md quotes the package, and the package refers to its sections: both must stay true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "derivation.md"

QUOTES = re.findall(r"^```py\n# (\S+): (\S+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("file", "name", "quote"), QUOTES, ids=lambda part: part if "\n" not in part else "")
def test_quoted_lines_stand_in_the_function(file: str, name: str, quote: str) -> None:
    source = function_lines(ROOT / file, name)
    lines = iter(source)
    missing = [line for line in stripped(quote) if line not in lines]  # ``in`` goes on where the line before was found
    assert not missing, f"{file}: {name} does not have these lines in this order: {missing}"


def test_every_block_of_package_code_names_its_function() -> None:
    assert len(QUOTES) == len(re.findall("^```py$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert len(QUOTES) > 20


def test_sections_that_the_package_refers_to_exist() -> None:
    headings = set(re.findall(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    referred = set(references())
    assert len(referred) >= 9
    assert not {name for name in referred if name not in headings}


def references() -> Iterator[str]:
    for file in (ROOT / "npattn").rglob("*.py"):
        yield from re.findall(r'docs/derivation\.md, "([^"]+)"', file.read_text(encoding="utf-8"))


def function_lines(file: Path, name: str) -> list[str]:
    text = file.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        node = next(n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part)
    assert isinstance(node, ast.FunctionDef)
    return stripped("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))


def stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
