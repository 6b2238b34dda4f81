"""The places of tokens in pictures: grids of patches, and the pictures."""

from regard.images.patch_grid import Grid
from regard.images.picture import Picture, decode, keep

__all__ = ["Grid", "Picture", "decode", "keep"]
