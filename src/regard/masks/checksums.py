"""Checksums of rows: whole numbers that tell whether the bits of two rows are equal."""

from functools import lru_cache
from secrets import randbits
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

_CACHED_BYTES = 2**18  # a block of rows that stays in the processor's cache
_SEED = randbits(63)


def row_checksums(numbers: Tensor) -> Tensor:
    """Return a checksum of each row of a tensor (..., rows, n), as int64 (..., rows).

    It is the sum of the upper and the lower half of each 8 bytes, each times a random number,
    modulo 2**64. Two halves differ by less than 2**32. So a changed row keeps its checksum with a
    probability of at most 2**-32, whatever the change. The factors differ from process to process.

    Example:
        >>> import torch
        >>> from regard.masks.checksums import row_checksums
        >>> first, second, third = row_checksums(torch.tensor([[1.0], [1.0], [-1.0]]))
        >>> bool(first == second), bool(first == third)
        (True, False)
    """
    rows = numbers.detach().flatten(0, -2)
    width = rows.shape[-1] * rows.element_size()
    upper, lower = _random_factors(-(-width // 8), numbers.device)
    parts: list[Tensor] = []
    for block in cast(tuple[Tensor, ...], rows.split(max(1, _CACHED_BYTES // max(1, width)))):
        some = block.contiguous().view(torch.uint8)
        if width % 8 or some.storage_offset() % 8:
            some = pad(some, (0, -width % 8))
        words = some.view(torch.int64)
        parts.append((words >> 32).mul_(upper).addcmul_(words, lower).sum(-1))
    return torch.cat(parts).reshape(numbers.shape[:-1])


@lru_cache(maxsize=8)
def _random_factors(size: int, device: torch.device) -> Tensor:
    """Return random int64 numbers, (2, size), that no seed of the model's user changes."""
    generator = torch.Generator().manual_seed(_SEED)
    factors = torch.empty(2, size, dtype=torch.int64, device="cpu")
    return factors.random_(-(2**63), None, generator=generator).to(device)
