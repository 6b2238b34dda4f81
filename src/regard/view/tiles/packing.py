"""Numbers as text that a page can hold: their bytes, deflated, in base64."""

import base64
import ctypes
import zlib

import torch
from torch import Tensor


def packed(tensor: Tensor, strategy: int, width: int = 4) -> str:
    """Little-endian bytes, first bytes together, then second ones, ...; deflate; base64.

    Apart, the bytes that hold sign and exponent compress well; `unpack` in payload.ts undoes it.

    Args:
        tensor: numbers of any dtype and shape.
        strategy: of the deflation, one of zlib's.
        width: how many bytes of each number are kept, its last ones.
    """
    # Flat first: an axis of length 1 may have any stride, and then its bytes cannot be viewed.
    flat = tensor.cpu().flatten().view(torch.uint8).reshape(-1, tensor.element_size())
    deflate = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    return base64_text(deflate.compress(memory(flat[:, -width:].T)) + deflate.flush())


def memory(tensor: Tensor) -> bytes:
    """Return the tensor's bytes without NumPy, which PyTorch does not install."""
    whole = tensor.contiguous().cpu()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def base64_text(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode("ascii")
