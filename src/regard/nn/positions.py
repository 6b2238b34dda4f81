"""Where a token stands: positions added to the embeddings, or turned into query and key.

Sines and cosines are computed when they are needed, in float64 and for any length: no table to
outgrow, nothing in the state_dict, nothing that half precision could round.
"""

import torch
from torch import Tensor, nn

from regard.errors import check_count, check_whole
from regard.nn.layer_checks import check_input
from regard.scores.score_source import accumulation_dtype

__all__ = ["LearnedPositions", "RotaryPositions", "SinusoidalPositions"]


class SinusoidalPositions(nn.Module):
    """x plus sines and cosines of the position, at wavelengths from 2π to base · 2π.

    Number 2i of position p is sin(p / base^(2i/embed_dim)), number 2i + 1 the cosine of the same.
    There is nothing to learn and no longest length.

    Args:
        embed_dim: width of the embeddings; where it is odd, the last cosine is left out.
        base: how slowly the slowest sine turns.

    Raises:
        TypeError: embed_dim is no whole number.
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
        """x with its positions, of the same shape and dtype.

        Args:
            x: (..., tokens, embed_dim).
            offset: the position of the first token.

        Raises:
            TypeError: x is no floating tensor, or offset no whole number.
            ValueError: x has another width.
        """
        check_input("x", x, "embed_dim", self.embed_dim)
        angles = _angles(x.shape[-2], offset, self.embed_dim, self.base, x.device)
        waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)  # sin, cos, sin, ...
        return x + waves[:, : self.embed_dim].to(x.dtype)

    def extra_repr(self) -> str:
        """Its arguments."""
        return f"{self.embed_dim}, base={self.base:g}"


class LearnedPositions(nn.Module):
    """x plus one learned vector for each position.

    Args:
        embed_dim: width of the embeddings.
        max_len: how many positions there are.

    Attributes:
        weight: the vectors, (max_len, embed_dim); normal with deviation 0.02 at the start.

    Raises:
        TypeError: a size that is no whole number.
        ValueError: a size below 1.

    Example:
        >>> import torch
        >>> from regard.nn import LearnedPositions
        >>> positions = LearnedPositions(embed_dim=4, max_len=512)
        >>> positions(torch.zeros(2, 7, 4)).shape
        torch.Size([2, 7, 4])

    Source:
        Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1; the
        deviation is GPT-2's.
    """

    def __init__(self, embed_dim: int, max_len: int) -> None:
        super().__init__()
        self.embed_dim = check_count("embed_dim", embed_dim)
        self.max_len = check_count("max_len", max_len)
        self.weight = nn.Parameter(torch.randn(max_len, embed_dim) * 0.02)

    def forward(self, x: Tensor, *, offset: int = 0) -> Tensor:
        """x with its positions, of the same shape and dtype.

        Args:
            x: (..., tokens, embed_dim).
            offset: the position of the first token.

        Raises:
            TypeError: x is no floating tensor, or offset no whole number.
            ValueError: x has another width, or reaches beyond the last position.
        """
        check_input("x", x, "embed_dim", self.embed_dim)
        stop = check_whole("offset", offset) + x.shape[-2]
        if offset < 0 or stop > self.max_len:
            raise ValueError(
                f"x has tokens at positions {offset} to {stop - 1}; this layer has positions 0 to "
                f"{self.max_len - 1}.\n"
                "    Make it with a larger max_len, or use Sinusoidal or Rotary: they have no end."
            )
        return x + self.weight[offset:stop].to(x.dtype)

    def extra_repr(self) -> str:
        """Its arguments."""
        return f"{self.embed_dim}, max_len={self.max_len}"


class RotaryPositions(nn.Module):
    """Turns query and key by angles that grow with the position: scores see distances only.

    The numbers (2i, 2i + 1) of a head are a point in the plane, turned by p / base^(2i/head_dim)
    at position p. A query at m and a key at n then meet at an angle of m - n. Neighbouring numbers
    form a pair, as in the paper; Hugging Face's Llama pairs i with i + head_dim/2, which is the
    same up to the order of the numbers in a head.

    Args:
        head_dim: width of a head; even.
        base: how slowly the slowest pair turns.

    Raises:
        TypeError: head_dim is no whole number.
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
        """Query or key, turned; of the same shape and dtype.

        Args:
            x: (..., tokens, head_dim).
            offset: the position of the first token.

        Raises:
            TypeError: x is no floating tensor, or offset no whole number.
            ValueError: x has another width.
        """
        check_input("x", x, "head_dim", self.head_dim)
        dtype = accumulation_dtype(x.dtype)
        angles = _angles(x.shape[-2], offset, self.head_dim, self.base, x.device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # (tokens, head_dim / 2)
        first, second = x[..., 0::2].to(dtype), x[..., 1::2].to(dtype)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
        return turned.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        """Its arguments."""
        return f"{self.head_dim}, base={self.base:g}"


def _angles(tokens: int, offset: int, dim: int, base: float, device: torch.device) -> Tensor:
    """position / base^(2i/dim), (tokens, dim / 2 rounded up)."""
    check_whole("offset", offset)
    # At position 100,000 a float32 angle is off by 0.004 radians. Apple's GPUs have nothing wider.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    position = torch.arange(offset, offset + tokens, dtype=dtype, device=device)
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=device) / dim
    return position[:, None] * base**-exponent
