"""A small mask as rows of characters."""

from typing import TYPE_CHECKING, cast

import torch

from regard.scores.box import Box

if TYPE_CHECKING:
    from regard.masks.mask import Mask

__all__ = ["drawing"]

MOST_ROWS, MOST_COLUMNS = 32, 64


def drawing(mask: "Mask", shape: torch.Size, device: torch.device) -> list[str]:
    """The lines of a drawing of a bound mask: a title and its rows; none for a large mask.

    Of several matrices the first is drawn.
    """
    q_len, kv_len = shape[-2:]
    if q_len > MOST_ROWS or kv_len > MOST_COLUMNS or device.type == "meta":
        return []
    box = Box(tuple(slice(0, 1) for _ in shape[:-2]), slice(0, q_len), slice(0, kv_len))
    allowed = mask.block(box, shape, device)
    axes = (1,) * (len(shape) - 2)
    rows = cast(list[list[bool]], allowed.expand(*axes, q_len, kv_len).flatten(0, -2).tolist())
    first = f" of [{', '.join('0' for _ in axes)}]" if shape[:-2].numel() > 1 else ""
    return [
        f"{q_len} x {kv_len}{first}: queries down, keys across, ■ may attend",
        *(" ".join("■" if may else "□" for may in row) for row in rows),
    ]
