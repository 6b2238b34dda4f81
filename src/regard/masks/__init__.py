"""Masks: which keys a query may attend to. True always means *may attend*."""

from regard.masks.bands import Causal, SlidingWindow
from regard.masks.documents import Documents
from regard.masks.flex_masks import BlockSparse, MaskMod
from regard.masks.key_bounds import Columns
from regard.masks.lengths import Padding, PrefixLM
from regard.masks.mask import (
    Both,
    Either,
    Mask,
    Not,
    as_mask,
)
from regard.masks.row_slice import Rows
from regard.masks.tensor_masks import Drop, Keep

__all__ = [
    "BlockSparse",
    "Both",
    "Causal",
    "Columns",
    "Documents",
    "Drop",
    "Either",
    "Keep",
    "Mask",
    "MaskMod",
    "Not",
    "Padding",
    "PrefixLM",
    "Rows",
    "SlidingWindow",
    "as_mask",
]
