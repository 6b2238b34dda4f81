"""Recordings of made-up models that saw pictures, for the tests of the page."""

from typing import Any

import numpy as np
import torch
from PIL import Image

import regard

ROWS, COLUMNS = 4, 6
PATCHES = ROWS * COLUMNS
TEXT = ["What", " is", " the", " dog", " doing", "?"]


def photo(width: int = 96, height: int = 64) -> Image.Image:
    """A picture whose colours differ everywhere: red grows to the right, green downwards."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / width, 255 * y / height, 128 + 0 * x], -1)
    return Image.fromarray(pixels.astype(np.uint8))


def matrices(
    tokens: int, *, keys: int | None = None, **options: Any
) -> dict[str, regard.AttentionMatrix]:
    generator = torch.Generator().manual_seed(5)
    return {
        f"layer.{at}": regard.attend(
            2 * torch.randn(1, 3, tokens, 8, generator=generator),
            torch.randn(1, 3, keys or tokens, 8, generator=generator),
            **options,
        )
        for at in range(2)
    }


def vision() -> regard.Recording:
    """A class token and a grid of patches."""
    seen = regard.Recording(matrices(1 + PATCHES), model="a vision model")
    grid = regard.grid(tokens=range(1, 1 + PATCHES), rows=ROWS, columns=COLUMNS)
    return seen.with_pictures([photo()], grid)


def language() -> regard.Recording:
    """A picture between a special token and a question, read causally."""
    tokens = [
        regard.Token("<s>", special=True),
        *[regard.Token("<image>", special=True)] * PATCHES,
        *map(regard.Token, TEXT),
    ]
    layers = matrices(len(tokens), mask=regard.Causal())
    seen = regard.Recording(layers, model="a model", query_tokens=tokens)
    grid = regard.grid(tokens=range(1, 1 + PATCHES), rows=ROWS, columns=COLUMNS)
    return seen.with_pictures([photo()], grid)


def several() -> regard.Recording:
    """A picture as a thumbnail and two tiles, and another picture with padding around it."""
    grids = [
        regard.grid(tokens=range(6), rows=2, columns=3),
        regard.grid(tokens=range(6, 12), rows=2, columns=3, box=(0, 0, 48, 64)),
        regard.grid(tokens=range(12, 18), rows=2, columns=3, box=(48, 0, 96, 64)),
        regard.grid(tokens=range(18, 22), rows=2, columns=2, picture=1, box=(0, -12, 64, 52)),
    ]
    tokens = [*[regard.Token("<image>", special=True)] * 22, *map(regard.Token, TEXT)]
    seen = regard.Recording(matrices(len(tokens)), model="tiles", query_tokens=tokens)
    return seen.with_pictures([photo(), photo(64, 40)], grids)


def windows() -> regard.Recording:
    """Two layers whose four windows of a picture, each of 2 x 2 patches, are entries of a batch."""
    torch.manual_seed(3)
    layers = {f"stage.{at}": regard.attend(*torch.randn(2, 4, 2, 4, 8)) for at in range(2)}
    boxes = [(48 * (at % 2), 32 * (at // 2)) for at in range(4)]
    grids = [
        regard.grid(range(4), 2, 2, entry=entry, box=(x, y, x + 48, y + 32))
        for entry, (x, y) in enumerate(boxes)
    ]
    return regard.Recording(layers, model="windows").with_pictures([photo()], grids)


def crossing() -> regard.Recording:
    """A text whose queries look at a class token and the patches of a picture."""
    layers = matrices(len(TEXT), keys=1 + PATCHES)
    keys = [regard.Token(str(at)) for at in range(1 + PATCHES)]
    seen = regard.Recording(layers, model="captions", query_tokens=TEXT, key_tokens=keys)
    grid = regard.grid(tokens=range(1, 1 + PATCHES), rows=ROWS, columns=COLUMNS)
    return seen.with_pictures([photo()], grid)
