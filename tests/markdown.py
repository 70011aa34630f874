"""The code blocks of a Markdown page: what tests/test_docs.py executes, and where .ci/run finds the commands of the README.

``python tests/markdown.py README.md pytest`` prints the one set-up command that has the word ``pytest``. It uses the standard
library only: it runs before there is an environment.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1[^\S\n]*$", flags=re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"<!-- (needs: (?P<needs>\w+)|(?P<slow>slow)) -->\s*\Z")


class Block(NamedTuple):
    """A fenced block; ``output`` is the text block that follows it with nothing between."""

    language: str
    text: str
    line: int  # of the first line of its text
    output: str | None
    needs: str | None  # <!-- needs: cupy -->: a module without which it cannot run
    slow: bool  # <!-- slow -->


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order, without the outputs that belong to another."""
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(page):
        _, language, text = match.groups()
        between = page[end : match.start()]
        if language == "text" and found and not between.strip() and found[-1].output is None and found[-1].language != "text":
            found[-1] = found[-1]._replace(output=text)
        else:
            directive = _DIRECTIVE.search(between)
            needs, slow = (directive["needs"], bool(directive["slow"])) if directive else (None, False)
            found.append(Block(language, text, page[: match.start(3)].count("\n") + 1, None, needs, slow))
        end = match.end()
    return found


def is_set_up(block: Block) -> bool:
    """Whether a block is a command for a fresh machine."""
    return block.language in ("bash", "powershell") and " -m venv " in block.text


def set_up_command(page: str, word: str, language: str = "bash") -> str:
    """The one set-up command that has this word."""
    found = [b.text.strip() for b in blocks(page) if b.language == language and is_set_up(b) and word in b.text]
    if len(found) != 1:
        raise LookupError(f"{len(found)} {language} set-up commands have the word {word}, not one")
    return found[0]


if __name__ == "__main__":
    print(set_up_command(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2]))
