"""Figures: each function draws on the axes it is given, or makes a figure, and returns the axes.

Colours can be told apart by colour-blind readers, and nothing but the axes is changed.
"""

from polarquant_nb.plot.formats import codebook, page_layout
from polarquant_nb.plot.results import frontier, needle, speed
from polarquant_nb.plot.vectors import angles, layer_error

__all__ = [
    "angles",
    "codebook",
    "frontier",
    "layer_error",
    "needle",
    "page_layout",
    "speed",
]
