"""Masks: which keys a query may attend to. True always means *may attend*."""

from regard.masks.bands import Causal, SlidingWindow
from regard.masks.lengths import Padding
from regard.masks.mask import Both, Columns, Drop, Keep, Mask, as_mask

__all__ = [
    "Both",
    "Causal",
    "Columns",
    "Drop",
    "Keep",
    "Mask",
    "Padding",
    "SlidingWindow",
    "as_mask",
]
