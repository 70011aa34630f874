"""What the commands need of a terminal: progress with a falling loss, a bar, heatmaps, and ASCII if need be."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from typing import TextIO

BLOCKS = ("▁▂▃▄▅▆▇█", "_.-:=+*#")
SHADES = (" ░▒▓█", " .:*#")


class Terminal:
    """A stream to print on."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.unicode = _can_show(stream, BLOCKS[0] + SHADES[0])
        self.width = shutil.get_terminal_size((100, 24)).columns

    def say(self, text: str = "") -> None:
        """A line, with what the stream's encoding cannot show replaced."""
        encoding = self.stream.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), file=self.stream, flush=True)

    def sparkline(self, values: Sequence[float], width: int) -> str:
        """Values as a row of small bars, the largest the tallest."""
        marks = BLOCKS[0] if self.unicode else BLOCKS[1]
        picked = [values[len(values) * n // width] for n in range(width)] if len(values) > width else list(values)
        low, high = min(picked), max(picked)
        scale = (len(marks) - 1) / (high - low) if high > low else 0
        return "".join(marks[round((value - low) * scale)] for value in picked)

    def heatmap(self, weights: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str]) -> list[str]:
        """Weights between 0 and 1 as shades, two characters a cell, with labels of one character."""
        shades = SHADES[0] if self.unicode else SHADES[1]
        lines = [f"    {' '.join(columns)}"]
        for label, row in zip(rows, weights, strict=True):
            # the root makes small weights visible: of 16 keys, an even share is 1/16
            cells = (shades[min(int(max(w, 0.0) ** 0.5 * len(shades)), len(shades) - 1)] for w in row)
            lines.append(f"  {label} {''.join(2 * c for c in cells)}".rstrip())
        return lines


class Progress:
    """A line that shows how far a loop is: rewritten in place on a terminal, a few plain lines elsewhere."""

    def __init__(self, terminal: Terminal, total: int, *, done: int = 0, tokens: int = 0, lines: int = 10) -> None:
        self.terminal = terminal
        self.total = total
        self.before = done  # steps of an earlier run
        self.tokens = tokens  # of a step
        self.every = max((total - done) // lines, 1)
        self.started = self.shown = time.monotonic()
        self.losses: list[float] = []

    def update(self, loss: float) -> None:
        """One more step is done."""
        self.losses.append(loss)
        done, now = len(self.losses), time.monotonic()
        last = self.before + done == self.total
        if self.terminal.live:
            if now - self.shown > 0.1 or last:
                self.shown = now
                self.terminal.stream.write(f"\r{self._line(done, now)[: self.terminal.width - 1]}")
                self.terminal.stream.flush()
        elif done % self.every == 0 or last:
            self.terminal.say(self._line(done, now))

    def close(self) -> None:
        """Leave the line, at the end or on an interrupt."""
        if self.terminal.live and self.losses:
            self.terminal.say()

    def _line(self, done: int, now: float) -> str:
        each = (now - self.started) / done
        recent = self.losses[-20:]
        pace = f"{self.tokens / max(each, 1e-9):>9,.0f} tokens/s  " if self.tokens else ""
        curve = self.terminal.sparkline(self.losses, 24) if self.terminal.live else ""
        step = self.before + done
        left = each * (self.total - step)
        return f"  step {step:>4}/{self.total}  loss {sum(recent) / len(recent):.3f}  {pace}{left:>3.0f} s left  {curve}".rstrip()


class Bar:
    """A line on a terminal that shows how far a list of things is, and which one it is at; nothing elsewhere."""

    def __init__(self, terminal: Terminal, total: int) -> None:
        self.terminal = terminal
        self.total = total
        self.started = time.monotonic()
        self.shown = False

    def show(self, done: float, text: str) -> None:
        """``done`` of them are, a fraction of one counted."""
        if self.terminal.live:
            full = int(24 * done / self.total)
            left = f"{(time.monotonic() - self.started) * (self.total / done - 1):.0f} s left" if done else ""
            line = f"[{'#' * full}{'.' * (24 - full)}] {int(done)}/{self.total} {left:>10}  {text}"
            self._write(f"\r{line[: self.terminal.width - 1]}\x1b[K")
            self.shown = True

    def clear(self) -> None:
        """Leave no trace of it, for what is printed next."""
        if self.shown:
            self._write("\r\x1b[K")
            self.shown = False

    def _write(self, text: str) -> None:
        self.terminal.stream.write(text)
        self.terminal.stream.flush()


def _can_show(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
