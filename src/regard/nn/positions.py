"""Positional encodings: added to the embeddings, or applied to query and key.

Sines and cosines are computed on the fly in float64. So there is no maximum length, nothing in the
state_dict, and no rounding to half precision.
"""

import torch
from torch import Tensor, nn

from regard.errors import check_count, check_whole, check_width
from regard.scores.score_source import accumulation_dtype


class SinusoidalPositions(nn.Module):
    """Sinusoidal positions: adds sines and cosines to x, with wavelengths from 2π up to base · 2π.

    Component 2i of position p is sin(p / base^(2i/embed_dim)), and component 2i + 1 is the cosine
    of the same angle. There are no parameters and no maximum length.

    Args:
        embed_dim: width of the embeddings. If it is odd, the last cosine is left out.
        base: an upper bound of the wavelengths, divided by 2π.

    Raises:
        TypeError: embed_dim is not a whole number.
        ValueError: embed_dim is below 1.

    Example:
        >>> import torch
        >>> from regard.nn import SinusoidalPositions
        >>> SinusoidalPositions(4)(torch.zeros(3, 4))
        tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
                [ 0.8415,  0.5403,  0.0100,  0.9999],
                [ 0.9093, -0.4161,  0.0200,  0.9998]])

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.5.
    """

    def __init__(self, embed_dim: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.base = base

    def forward(self, x: Tensor, *, offset: int = 0) -> Tensor:
        """Return x with positions added, of the same shape and dtype.

        Args:
            x: (..., tokens, embed_dim).
            offset: the position of the first token.

        Raises:
            TypeError: x is not a floating tensor, or offset is not a whole number.
            ValueError: x has another width.
        """
        check_width("x", x, "embed_dim", self.embed_dim)
        angles = _angles(x.shape[-2], offset, self.embed_dim, self.base, x.device)
        waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)  # sin, cos, sin, ...
        return x + waves[:, : self.embed_dim].to(x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments of the layer."""
        return f"{self.embed_dim}, base={self.base:g}"


class LearnedPositions(nn.Module):
    """Learned positions: adds one learned vector per position to x.

    Args:
        embed_dim: width of the embeddings.
        max_len: number of positions.

    Attributes:
        weight: the vectors, (max_len, embed_dim), initialised from a normal distribution with
            standard deviation 0.02.

    Raises:
        TypeError: a size is not a whole number.
        ValueError: a size is below 1.

    Example:
        >>> import torch
        >>> from regard.nn import LearnedPositions
        >>> positions = LearnedPositions(embed_dim=4, max_len=512)
        >>> positions(torch.zeros(2, 7, 4)).shape
        torch.Size([2, 7, 4])

    Source:
        Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1; the
        standard deviation is GPT-2's.
    """

    def __init__(self, embed_dim: int, max_len: int) -> None:
        super().__init__()
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.max_len = check_count("max_len", max_len)
        self.weight = nn.Parameter(torch.randn(max_len, embed_dim) * 0.02)

    def forward(self, x: Tensor, *, offset: int = 0) -> Tensor:
        """Return x with positions added, of the same shape and dtype.

        Args:
            x: (..., tokens, embed_dim).
            offset: the position of the first token.

        Raises:
            TypeError: x is not a floating tensor, or offset is not a whole number.
            ValueError: x has another width, or tokens beyond the last position.
        """
        check_width("x", x, "embed_dim", self.embed_dim)
        stop = check_whole("offset", offset) + x.shape[-2]
        if offset < 0 or stop > self.max_len:
            raise ValueError(
                f"x has tokens at positions {offset} to {stop - 1}; this layer has positions 0 to "
                f"{self.max_len - 1}.\n"
                "    Use a larger max_len, or SinusoidalPositions or RotaryPositions."
            )
        return x + self.weight[offset:stop].to(x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments of the layer."""
        return f"{self.embed_dim}, max_len={self.max_len}"


class RotaryPositions(nn.Module):
    """Rotary positions: rotates query and key so that scores depend on relative positions.

    Components (2i, 2i + 1) of a head form a point in the plane, which is rotated by the angle
    p / base^(2i/head_dim) at position p. The angle between a query at m and a key at n then grows
    with m - n. Pairs are neighbouring components, as in the paper. Hugging Face's Llama pairs i
    with i + head_dim/2 instead, which is the same up to the order of the components.

    Args:
        head_dim: width of a head; even.
        base: an upper bound of the wavelengths, divided by 2π.

    Raises:
        TypeError: head_dim is not a whole number.
        ValueError: head_dim is odd or below 1.

    Example:
        >>> import torch
        >>> from regard.nn import RotaryPositions, SelfAttention
        >>> RotaryPositions(2)(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        tensor([[1.0000, 0.0000],
                [0.5403, 0.8415]])
        >>> attention = SelfAttention(64, num_heads=4, positions=RotaryPositions(16))

    Source:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        equations 15 and 34.
    """

    def __init__(self, head_dim: int, *, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim = check_count("head_dim", head_dim)
        if head_dim % 2:
            raise ValueError(
                f"head_dim is {head_dim}; rotary positions turn pairs of numbers, so it must be "
                f"even.\n    Use head_dim={head_dim + 1}."
            )
        self.base = base

    def forward(self, x: Tensor, *, offset: int = 0) -> Tensor:
        """Return query or key, rotated, of the same shape and dtype.

        Args:
            x: (..., tokens, head_dim).
            offset: the position of the first token.

        Raises:
            TypeError: x is not a floating tensor, or offset is not a whole number.
            ValueError: x has another width.
        """
        check_width("x", x, "head_dim", self.head_dim)
        dtype = accumulation_dtype(x.dtype)
        angles = _angles(x.shape[-2], offset, self.head_dim, self.base, x.device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # (tokens, head_dim / 2)
        first, second = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
        return turned.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the arguments of the layer."""
        return f"{self.head_dim}, base={self.base:g}"


def _angles(tokens: int, offset: int, dim: int, base: float, device: torch.device) -> Tensor:
    """Return position / base^(2i/dim), (tokens, dim / 2 rounded up)."""
    check_whole("offset", offset)
    # At position 100,000 a float32 angle is off by 0.004 radians. Apple's GPUs lack float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    position = torch.arange(offset, offset + tokens, dtype=dtype, device=device)
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    return position[:, None] * base**-exponent
