"""Panels: matrices as maps, with names beside them, one scale and one colour bar for each kind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = np.ndarray[Any, Any]

FONT = 8.0  # points
CELL, NUMBER, LINE = 0.2, 0.5, 0.15  # inches: a cell, one with a number in it, a line of text
MOST, LONGEST = (10.0, 5.0), 24  # inches of a panel that is alone, of one among others; letters of a name
HATCH = "0.5"
LOOKS = {"weights": ("Blues", "0"), "mask": ("Blues", "0"), "sizes": ("cividis", "log")}  # other kinds have two signs


class Panel(NamedTuple):
    """A matrix, what stands beside its rows and columns, and what its numbers are a kind of."""

    title: str
    array: Floats
    names: tuple[list[str], list[str]]
    kind: str
    hidden: Floats | None = None
    dead: Floats | None = None  # rows
    axes: tuple[str, str] = ("query", "key")


def draw(op: str, panels: list[Panel], across: int, bars: dict[str, str], ax: Any) -> Figure:
    """A figure of panels, ``across`` in a row, or the panels on the Axes that were given; ``bars`` labels the colour bars."""
    if not panels or not all(panel.array.size for panel in panels):
        raise ValueError(f"{op}: there is nothing to show: an array is empty")
    own = ax is None
    axes = _make_axes(op, panels, across) if own else _given_axes(op, panels, ax)
    figure: Figure = axes[0].get_figure(root=True)
    norms = {kind: _norm(kind, [p.array for p in panels if p.kind == kind]) for kind in {p.kind for p in panels}}
    images: dict[str, Any] = {}
    for n, (panel, place) in enumerate(zip(panels, axes, strict=True)):
        edges = n % across == 0, n + across >= len(panels)
        images[panel.kind] = _draw_panel(
            panel, place, norms[panel.kind], _size(panel, len(panels)) if own else _extent(place), edges
        )
    for kind, label in bars.items():
        if kind in images:
            beside = [place for panel, place in zip(panels, axes, strict=True) if panel.kind == kind]
            location = "right" if len(images) == 1 else "bottom" if kind.startswith("d") else "top"
            bar = figure.colorbar(images[kind], ax=beside, label=label, location=location, shrink=0.9, aspect=30, pad=0.02)
            bar.ax.tick_params(labelsize=FONT)
    if own:
        _draw_legend(figure, panels)
    return figure


# Where ------------------------------------------------------------------------------------------------------------------------


def _make_axes(op: str, panels: list[Panel], across: int) -> list[Any]:
    try:
        from matplotlib import pyplot as plt
    except ModuleNotFoundError:
        raise ImportError(f'{op} needs matplotlib: pip install "npattn[plot]"') from None
    down = math.ceil(len(panels) / across)
    sizes = [_size(panel, len(panels)) for panel in panels]
    names = [max((len(name) for p in panels for name in p.names[axis]), default=0) for axis in (0, 1)]
    margins = [0.9 + 0.08 * min(n, LONGEST) for n in names]
    width = sum(max(sizes[n][0] for n in range(column, len(panels), across)) + 0.3 for column in range(across)) + margins[0] + 0.9
    height = (
        sum(max(size[1] for size in sizes[row * across : (row + 1) * across]) + 0.5 for row in range(down)) + margins[1] + 0.9
    )
    figure = plt.figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for unused in grid[len(panels) :]:
        unused.remove()
    return list(grid[: len(panels)])


def _size(panel: Panel, panels: int) -> tuple[float, float]:
    """Width and height of a panel, in inches."""
    rows, columns = panel.array.shape
    cell = NUMBER if max(rows, columns) <= 8 else CELL
    most = MOST[panels > 1]
    return min(max(columns * cell, 1.4), most), min(max(rows * (cell if cell == CELL else 0.6 * cell), 0.9), most)


def _given_axes(op: str, panels: list[Panel], ax: Any) -> list[Any]:
    axes = np.ravel(np.asarray(ax, dtype=object)).tolist()
    if len(axes) != len(panels):
        raise ValueError(f"{op}: ax must be {len(panels)} Axes, one for each panel, got {len(axes)}")
    return list(axes)


def _extent(ax: Any) -> tuple[float, float]:
    """Width and height of Axes that were given, in inches."""
    box = ax.get_window_extent().transformed(ax.get_figure(root=True).dpi_scale_trans.inverted())
    return float(box.width), float(box.height)


# What -------------------------------------------------------------------------------------------------------------------------


def _norm(kind: str, arrays: list[Floats]) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    finite = np.concatenate([x[np.isfinite(x)] for x in arrays])
    most = float(np.abs(finite).max(initial=0.0)) or 1.0
    scale = LOOKS.get(kind, ("", "both"))[1]
    if scale == "log":
        return LogNorm(min(finite[finite > 0].min(initial=most), most / 1000), most)  # what is nearly the same looks so
    return Normalize(0.0 if scale == "0" else -most, most)


def _draw_panel(panel: Panel, ax: Any, norm: Any, size: tuple[float, float], edges: tuple[bool, bool]) -> Any:
    """The map, names at the ``edges`` (left, bottom) of the sheet, hatches, and numbers where a cell has room."""
    from matplotlib import colormaps

    array, (rows, columns) = panel.array, panel.array.shape
    missing = ~np.isfinite(array) | ((array <= 0) if panel.kind == "sizes" else False)
    colours = colormaps[LOOKS.get(panel.kind, ("PuOr_r", ""))[0]].with_extremes(bad="white")
    image = ax.imshow(np.ma.masked_where(missing, array), cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    ax.set_title(panel.title, fontsize=FONT + 2)
    for on_edge, axis, names, length, label in zip(edges, (ax.yaxis, ax.xaxis), panel.names, size[::-1], panel.axes, strict=True):
        _name(axis, names if on_edge else [], length)
        axis.set_label_text(label if on_edge else "", fontsize=FONT + 1)
    marks = _marks(panel)
    for mark, where in marks.items():
        _hatch(ax, where, mark)
    if panel.kind != "mask" and size[0] / columns >= NUMBER - 0.05 and size[1] / rows >= LINE:
        plain = ~np.logical_or.reduce([np.zeros((rows, columns), bool), *marks.values()])
        for i, j in np.argwhere(plain).tolist():
            ink = _ink(colours(norm(array[i, j])))
            ax.text(j, i, _number(array[i, j]), ha="center", va="center", fontsize=FONT - 1, color=ink)
    return image


def _name(axis: Any, names: list[str], room: float) -> None:
    """Names of rows or columns: of many, as many as have room."""
    step = math.ceil(len(names) * LINE / room) or 1
    short = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in names[::step]]
    widest = max(map(len, short), default=0) * LINE / 2
    turned = axis.axis_name == "x" and widest > step * room / max(len(names), 1)
    axis.set_ticks(range(0, len(names), step), short, fontsize=FONT, rotation=90 if turned else 0, parse_math=False)


def _number(x: float) -> str:
    """In few letters; 0 has no sign."""
    return next(text for digits in (3, 2, 1) if len(text := f"{x + 0.0:.{digits}g}") <= 6 or digits == 1)


def _ink(colour: tuple[float, float, float, float]) -> str:
    """Black or white, whichever can be read on a colour."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3])
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"


# Hatches ----------------------------------------------------------------------------------------------------------------------

MARKS = {  # what they look like, and mean
    "hidden": ("////", "hidden"),
    "dead": ("....", "a query that sees no key"),
    "zero": ("////", "exactly 0"),
    "absent": ("", "no such parameter"),
    "odd": ("xxxx", "not a finite number"),
}


def _marks(panel: Panel) -> dict[str, Floats]:
    """Where each mark is: no cell has two."""
    array, nowhere = panel.array, np.zeros(panel.array.shape, bool)
    dead = nowhere if panel.dead is None else np.broadcast_to(panel.dead[:, None], array.shape)
    hidden = (nowhere if panel.hidden is None else panel.hidden) & ~dead
    sizes = panel.kind == "sizes"
    marks = {
        "hidden": hidden,
        "dead": dead,
        "zero": (array == 0) if sizes else nowhere,
        "absent": (array < 0) if sizes else nowhere,
        "odd": ~np.isfinite(array) & ~hidden & ~dead,
    }
    return {mark: where for mark, where in marks.items() if where.any()}


def _hatch(ax: Any, where: Floats, mark: str) -> None:
    """A rectangle for every run of marked cells in a row."""
    from matplotlib.patches import Rectangle

    for i, row in enumerate(where):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(np.int8))).reshape(-1, 2)
        for start, stop in edges.tolist():
            ax.add_patch(Rectangle((start - 0.5, i - 0.5), stop - start, 1, label=mark, **_look(mark)))


def _look(mark: str) -> dict[str, Any]:
    face = "0.9" if mark == "absent" else "white"
    return {"hatch": MARKS[mark][0] or None, "facecolor": face, "edgecolor": HATCH, "linewidth": 0}


def _draw_legend(figure: Any, panels: list[Panel]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    used = dict.fromkeys(mark for panel in panels for mark in _marks(panel))
    handles = [Patch(label=MARKS[mark][1], **_look(mark)) for mark in used]
    if any(panel.kind == "mask" for panel in panels):
        handles.insert(0, Patch(label="may attend", color=colormaps[LOOKS["mask"][0]](1.0)))
    if handles:
        beside = sum(len(str(handle.get_label())) * LINE / 2 + 0.5 for handle in handles) < figure.get_figwidth()
        ncols = len(handles) if beside else 1
        figure.legend(handles=handles, loc="outside lower left", ncols=ncols, fontsize=FONT, frameon=False)
