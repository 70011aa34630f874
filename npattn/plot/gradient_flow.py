"""The sizes of a model's gradients, by parameter and layer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from npattn._arrays.host import to_numpy
from npattn._arrays.trees import tree_items
from npattn.plot._panels import Panel, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_gradient_flow(grads: Any, *, ax: Any = None) -> Figure:
    """How large the gradient of every parameter is in every layer: where it vanishes, explodes, or never arrives.

    Parameters
    ----------
    grads : tree of arrays
        The gradient of parameters: nested NamedTuples, lists and dicts, as a model's backward gives them. The first number in a
        parameter's name is its layer.
    ax : Axes, optional
        Where to draw.

    Returns
    -------
    matplotlib.figure.Figure
        A row a parameter, a column a layer, the root mean square of the gradient on a logarithmic scale. Hatched where it is
        exactly 0; crossed where it is not finite.

    Raises
    ------
    ValueError
        If there are no arrays in the tree, or more than one Axes is given.
    """
    table: dict[str, dict[str, float]] = {}
    for path, leaf in tree_items(grads):
        parts = path.split(".")
        layer = next((n for n, part in enumerate(parts) if part.isdecimal()), None)
        name = ".".join(part for n, part in enumerate(parts) if n != layer) or "all"
        array = to_numpy(leaf).astype(np.float64)
        with np.errstate(all="ignore"):
            table.setdefault(name, {})["" if layer is None else parts[layer]] = (
                math.sqrt(np.mean(array**2)) if array.size else 0.0
            )
    if not table:
        raise ValueError("plot_gradient_flow: there are no arrays in the tree")
    layers = sorted({layer for row in table.values() for layer in row}, key=lambda layer: (layer == "", int(layer or 0)))
    sizes = np.array([[row.get(layer, -1.0) for layer in layers] for row in table.values()])  # less than any: no such parameter
    numbered = layers != [""]
    names = list(table), [layer or "-" for layer in layers] if numbered else []
    panel = Panel("", sizes, names, "sizes", axes=("parameter", "layer" if numbered else ""))
    return draw("plot_gradient_flow", [panel], 1, {"sizes": "root mean square of the gradient"}, ax)
