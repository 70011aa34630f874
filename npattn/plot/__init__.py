"""Plots of attention, of its gradients, of masks, and of the gradients of a model's parameters; they need matplotlib.

Each function returns the figure and shows nothing: ``figure.savefig("attention.png")``, or ``matplotlib.pyplot.show()``. ``ax=``
takes the Axes to draw on, as many as there are panels. Arrays of any library will do.

Weights are blue, from 0; what has two signs is orange and purple around 0. Where cells have room, their numbers stand in them.
Queries that see no key and pairs that are hidden are hatched.
"""

from npattn.plot.attention import plot_attention, plot_mask
from npattn.plot.gradient_flow import plot_gradient_flow
from npattn.plot.steps import plot_steps

__all__ = ["plot_attention", "plot_gradient_flow", "plot_mask", "plot_steps"]
