"""Every code block of the README and of docs/ is executed or checked; a block of an unknown kind is an error.

The Python blocks of a page run in order and share their names. A text block that follows directly is what the block before
prints, with ``...`` for what differs from machine to machine. ``<!-- slow -->`` and ``<!-- needs: cupy -->`` are directives for
the block that follows.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npattn.testing import libraries
from tests.markdown import Block, blocks, is_set_up, set_up_command

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
PLAIN = {"text", "math"}  # nothing to execute
SITE = {"{code-cell}", "{include}", "{literalinclude}", "{toctree}"}  # the build of the site executes and includes them
QUOTES = {"py"}  # lines of the package, which tests/test_derivation.py compares with it


class Place(NamedTuple):
    """A block and its page."""

    page: Path
    block: Block

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.block.line}"


PLACES = [Place(page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]


def places(*languages: str) -> list[Any]:
    return [
        pytest.param(place, id=str(place), marks=[pytest.mark.slow] if place.block.slow else [])
        for place in PLACES
        if place.block.language in languages
    ]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_every_block_is_of_a_kind_that_is_checked(place):
    known = PLAIN | SITE | {"python", "bash", "powershell"} | (QUOTES if place.page.name == "derivation.md" else set())
    assert place.block.language in known
    assert place.block.output is None or place.block.language in ("python", "bash")


class Session:
    """The Python blocks of one page, executed as far as somebody has asked."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.done: set[Block] = set()

    def run(self, place: Place) -> None:
        block = place.block
        if block in self.done:
            return
        self.done.add(block)  # also if it fails: the blocks after it still run
        if block.text.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block.text, self.names, str(place), str(place), block.line)
            report = io.StringIO()
            failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write, clear_globs=False)
            assert not failed, report.getvalue()
            self.names.update(test.globs)
        else:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (block.line - 1) + block.text, place.page, "exec"), self.names)
            compare(block.output or "", printed.getvalue())


SESSIONS = {page: Session() for page in PAGES}


def compare(expected: str, printed: str) -> None:
    """What is printed is what the page shows, but for blanks at the ends of lines."""
    expected, printed = (re.sub(r"[^\S\n]+$", "", text.rstrip(), flags=re.MULTILINE) + "\n" for text in (expected, printed))
    assert doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS), f"expected\n{expected}\nprinted\n{printed}"


def missing(module: str | None) -> str:
    """Why a block cannot run here; empty if it can."""
    if module in libraries.NAMES:
        try:
            libraries.open_library(module)
        except libraries.Unavailable as reason:
            return str(reason)
    elif module is not None and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    return ""


@pytest.mark.parametrize("place", places("python"))
def test_python(place, tmp_path, monkeypatch):
    if reason := missing(place.block.needs):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    for page, block in PLACES:
        if page == place.page and block.language == "python" and block.line <= place.block.line and not missing(block.needs):
            SESSIONS[page].run(Place(page, block))


@pytest.mark.parametrize("place", [p for p in places("bash") if not is_set_up(p.values[0].block)])
def test_commands(place, tmp_path):
    """Commands of the package run; what installs is only looked at."""
    printed = ""
    for line in place.block.text.splitlines():
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "python":
            command = [sys.executable, *(str(ROOT / a) if a.startswith("examples/") else a for a in arguments)]
            printed += subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True).stdout
        elif program == "pip" and arguments[:1] == ["install"]:
            check_requirements(arguments[1:])
        else:
            assert not program, f"teach tests/test_docs.py what to do with {line!r}"
    if place.block.output is not None:
        compare(place.block.output, printed)


def check_requirements(arguments: list[str]) -> None:
    """Every extra that a command names is one of ours."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for argument in arguments:
        if match := re.fullmatch(r"(npattn|\.)\[(.+)\]", argument):
            assert set(match[2].split(",")) <= set(extras)


@pytest.mark.parametrize("place", [p for p in places("bash") if is_set_up(p.values[0].block)])
def test_set_up_commands_are_those_of_ci_and_have_a_windows_form(place):
    """.ci/run executes them as they stand here: it reads them from the README, by a word that they have."""
    command = place.block.text.strip()
    words = re.findall(r"readme_command (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert command in [set_up_command(README, word) for word in words]
    windows = command.replace("python3 ", "py ").replace(".venv/bin/", ".venv\\Scripts\\").replace(" && ", "; ")
    assert windows in [p.values[0].block.text.strip() for p in places("powershell")]


@pytest.mark.parametrize("place", places("powershell"))
def test_windows_commands_have_a_form_for_linux(place):
    command = place.block.text.strip().replace("py ", "python3 ").replace(".venv\\Scripts\\", ".venv/bin/").replace("; ", " && ")
    assert command in [p.values[0].block.text.strip() for p in places("bash")]


LINKS = [
    (page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda part: part.name if isinstance(part, Path) else part)
def test_links_lead_somewhere(page, link):
    assert link.startswith("https://") or (page.parent / link).exists()
