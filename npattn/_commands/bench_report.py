"""What ``python -m npattn bench`` shows and writes: the table, the machine it ran on, JSON and a plot."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import math
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from npattn import __version__
from npattn._commands.bench_cases import BOTH, FORWARD, Case
from npattn._commands.bench_train import TrainCase

RIVALS = ("naive", "torch", "jax")
LIMIT = "limit"  # the bare matrix products
SUPPORT = ("array-api-compat", "threadpoolctl")  # versions for the record alone
BUSY = 0.8  # a load average that other processes must have made


class Row(NamedTuple):
    """A pass of a case, measured."""

    case: Case | TrainCase
    name: str
    samples: dict[str, list[float]]  # seconds a call, of npattn, its rivals and the limit
    memory: int  # bytes
    differences: dict[str, float]  # of a rival's results from npattn's, as a share of the largest element

    def seconds(self, who: str = "npattn") -> float | None:
        """The median time."""
        return statistics.median(self.samples[who]) if who in self.samples else None

    def ratio(self, who: str) -> float | None:
        """The median of npattn's time as a multiple of another's, round by round."""
        if who not in self.samples:
            return None
        return statistics.median(own / other for own, other in zip(self.samples["npattn"], self.samples[who], strict=True))

    @property
    def gflops(self) -> float:
        """Thousand millions of operations a second, those of the matrix products alone counted."""
        return self.case.operations(self.name) / statistics.median(self.samples["npattn"]) / 1e9

    @property
    def share(self) -> float:
        """The median of the limit's time as a share of npattn's."""
        pairs = zip(self.samples[LIMIT], self.samples["npattn"], strict=True)
        return statistics.median(limit / own for limit, own in pairs)


# The table -------------------------------------------------------------------------------------------------------------------

HEAD = f"{'case':<23}{'pass':<17}{'npattn ms':>10}{'GFLOP/s':>9}{'of limit':>9}{'/naive':>8}{'/torch':>8}{'/jax':>7}{'MiB':>8}"
LEGEND = (
    "npattn ms: the median time. GFLOP/s: of the matrix products, on the pairs that the mask leaves.",
    "of limit: the time of the bare matrix products, as a share of npattn's.",
    "/naive, /torch, /jax: npattn's time divided by theirs; below 1 npattn is faster. Medians over rounds.",
    "MiB: the most memory held at a time beyond inputs and results.",
)


def table_line(row: Row) -> str:
    """The row as the table has it."""
    naive, torch, jax = (figure(row.ratio(who)) for who in RIVALS)
    seconds = row.seconds()
    assert seconds is not None
    return (
        f"{row.case.name:<23}{row.name:<17}{figure(1e3 * seconds):>10}{figure(row.gflops):>9}{row.share:>9.0%}"
        f"{naive:>8}{torch:>8}{jax:>7}{figure(row.memory / (1 << 20)):>8}"
    )


def figure(value: float | None) -> str:
    """Three digits that matter, without an exponent; a dash for what was not measured."""
    if value is None:
        return "-"
    if value < 0.001:
        return "0" if value == 0 else "<0.001"
    return f"{value:.{min(max(2 - math.floor(math.log10(value)), 0), 3)}f}"


def agreement_line(rows: Sequence[Row]) -> str:
    """What the checks before the measurements found."""
    found: dict[str, float] = {}
    for row in rows:
        if row.differences:
            found[row.case.dtype] = max(found.get(row.case.dtype, 0.0), *row.differences.values())
    if not found:
        return "There was nothing to compare results with."
    worst = ", ".join(f"{difference:.1e} ({dtype})" for dtype, difference in sorted(found.items()))
    return f"Before timing, all results agreed; largest difference / largest element: {worst}."


# The machine -----------------------------------------------------------------------------------------------------------------


def machine(threads: int, cpus: int, blas: str, device: str | None, libraries: Sequence[str]) -> dict[str, Any]:
    """What a figure depends on beside this package."""
    versions = {"python": platform.python_version(), "npattn": __version__}
    for name in ("numpy", *SUPPORT, *libraries):
        versions[name] = str(getattr(sys.modules.get(name), "__version__", "") or _version(name))
    return {
        "cpu": _cpu_name(),
        "cpus": cpus,
        "threads": threads,
        "blas": blas,
        "gpu": device,
        "platform": platform.platform(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
    }


def machine_lines(found: dict[str, Any]) -> list[str]:
    """The same to read."""
    parts = [found["cpu"], f"{found['cpus']} CPUs", f"{found['threads']} threads", found["blas"], found["gpu"]]
    versions = [f"{name} {version}" for name, version in found["versions"].items() if name not in SUPPORT]
    lines = [", ".join(filter(None, parts)), ", ".join(versions)]
    if (found["load"] or 0) > BUSY:
        lines.append(f"The machine is busy (load {found['load']:.1f}): these figures say little, least of all about small cases.")
    return lines


def blas_name(pools: Sequence[dict[str, Any]]) -> str:
    """NumPy's BLAS, from what threadpoolctl found."""
    parts = [[p[key] for key in ("internal_api", "version", "architecture") if p.get(key)] for p in pools]
    return ", ".join(dict.fromkeys(" ".join(part) for part in parts)) or "unknown"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# Files -----------------------------------------------------------------------------------------------------------------------


def row_record(row: Row) -> dict[str, Any]:
    """The row as the JSON file has it: sizes, medians, and every sample."""
    return {
        "case": row.case.name,
        "pass": row.name,
        **row.case._asdict(),
        "operations": row.case.operations(row.name),
        "seconds": {who: row.seconds(who) for who in row.samples},
        "ratios": {who: row.ratio(who) for who in RIVALS if who in row.samples},
        "gflops": row.gflops,
        "share_of_limit": row.share,
        "memory_bytes": row.memory,
        "differences": row.differences,
        "samples": row.samples,
    }


def check_writable(path: Path) -> None:
    """``OSError`` unless a file can be put there: better before the measurements than after."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from None


def write_whole(path: Path, content: bytes) -> None:
    """The file, or what was there before: nothing between, whatever happens."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        temporary.chmod(0o644)  # mkstemp's is for the owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_plot(path: Path) -> None:
    """``ValueError`` unless matplotlib is there and can write such a file."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install "npattn[plot]"') from None
    kinds = figures.Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot: {path} must end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")


def plot(rows: Sequence[Row], path: Path, title: str) -> bytes:
    """Time against T, a panel a pass, of the kind and dtype that was measured at the most lengths."""
    families: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        families.setdefault((row.case.kind, row.case.dtype), []).append(row)
    (kind, dtype), family = max(families.items(), key=lambda item: len({row.case.T for row in item[1]}))
    drawing = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 4.5), layout="constrained")
    panels = [name for name in (FORWARD, BOTH) if any(row.name == name for row in family)]
    for axes, name in zip(drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        chosen = sorted((row for row in family if row.name == name), key=lambda row: row.case.T)
        for who in ("npattn", *RIVALS, LIMIT):
            points = [(row.case.T, 1e3 * seconds) for row in chosen if (seconds := row.seconds(who)) is not None]
            if points:
                label = "bare matrix products" if who == LIMIT else who
                axes.loglog(*zip(*points, strict=True), label=label, marker="o", linestyle=":" if who == LIMIT else "-")
        lengths = sorted({row.case.T for row in chosen})
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.set_xticks([], minor=True)
        axes.set(xlabel="T", ylabel="ms", title=f"{name}, {kind}, {dtype}")
        axes.grid(alpha=0.3)
        axes.legend()
    drawing.suptitle(title, fontsize="small")
    written = io.BytesIO()
    drawing.savefig(written, format=path.suffix[1:].lower(), dpi=150)
    return written.getvalue()
