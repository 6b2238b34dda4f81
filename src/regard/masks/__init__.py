"""Masks that define which keys a query may attend to.

True means *may attend* in every mask; ``Drop`` takes the opposite.
"""

from regard.masks.bands import Causal, SlidingWindow
from regard.masks.documents import Documents
from regard.masks.flex import BlockSparse, MaskMod
from regard.masks.lengths import Padding, PrefixLM
from regard.masks.mask import And, KeyBounds, Mask, Not, Or, as_mask
from regard.masks.row_slice import RowSlice
from regard.masks.tensors import Drop, Keep

__all__ = [
    "And",
    "BlockSparse",
    "Causal",
    "Documents",
    "Drop",
    "Keep",
    "KeyBounds",
    "Mask",
    "MaskMod",
    "Not",
    "Or",
    "Padding",
    "PrefixLM",
    "RowSlice",
    "SlidingWindow",
    "as_mask",
]
