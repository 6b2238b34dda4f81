"""One block of a transformer: self-attention and an MLP, each beside a residual."""

from torch import Tensor, nn

from regard.errors import check_count
from regard.masks import Mask
from regard.matrix.attention_matrix import AttentionMatrix
from regard.nn.attention import SelfAttention
from regard.nn.positions import RotaryPositions

__all__ = ["TransformerBlock"]


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), and then x + mlp(norm(x)): the pre-norm block of GPT-2 and after.

    The norms are ``nn.LayerNorm``; the MLP is linear, GELU, linear.

    Args:
        embed_dim: width of input and output.
        num_heads: how many heads attend side by side; must divide embed_dim.
        num_kv_heads: as in ``SelfAttention``.
        mlp_dim: width inside the MLP; 4 · embed_dim when left out.
        mask: as in ``SelfAttention``; ``regard.Causal()`` makes it a decoder's block.
        positions: as in ``SelfAttention``.

    Attributes:
        attention_norm, attention, mlp_norm, mlp: its parts, in the order of the data.

    Raises:
        TypeError: a size that is no whole number, a mask or positions of the wrong kind.
        ValueError: sizes that do not divide.

    Example:
        >>> import torch, regard
        >>> from regard.nn import TransformerBlock
        >>> block = TransformerBlock(16, num_heads=2, mask=regard.Causal())
        >>> x = torch.randn(3, 10, 16)
        >>> block(x).shape, block.weights(x).shape
        (torch.Size([3, 10, 16]), torch.Size([3, 2, 10, 10]))

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3; norms first: Xiong et al.
        2020, "On Layer Normalization in the Transformer Architecture".
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        num_kv_heads: int | None = None,
        mlp_dim: int | None = None,
        mask: Mask | Tensor | None = None,
        positions: RotaryPositions | None = None,
    ) -> None:
        super().__init__()
        attention = SelfAttention(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, mask=mask, positions=positions
        )
        mlp_dim = check_count("mlp_dim", 4 * embed_dim if mlp_dim is None else mlp_dim)
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(embed_dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, embed_dim)
        )

    def forward(self, x: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """x after attention and MLP, of the same shape.

        Args:
            x: (tokens, embed_dim) or (batch, tokens, embed_dim), of the parameters' dtype.
            mask: for this call, as the block's own; where there are both, both must allow.

        Raises:
            TypeError: x is no floating tensor, or the mask of the wrong kind.
            ValueError: x has another width, or the mask does not fit.
        """
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, x: Tensor, *, mask: Mask | Tensor | None = None) -> AttentionMatrix:
        """The attention matrix of what forward does with the same arguments.

        Args:
            x: as in forward.
            mask: as in forward.

        Returns:
            (num_heads, tokens, tokens) or (batch, num_heads, tokens, tokens); not formed.

        Raises:
            TypeError: as in forward.
            ValueError: as in forward.
        """
        return self.attention.weights(self.attention_norm(x), mask=mask)
