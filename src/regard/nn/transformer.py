"""A transformer block: self-attention and an MLP, each with a residual connection."""

from torch import Tensor, nn

from regard.errors import check_count
from regard.masks import Mask
from regard.matrix.attention_matrix import AttentionMatrix
from regard.nn.attention import SelfAttention
from regard.nn.positions import RotaryPositions


class TransformerBlock(nn.Module):
    """The pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    The norms are ``nn.LayerNorm``; the MLP is linear, GELU, linear.

    Args:
        embed_dim: width of input and output.
        num_heads: number of query heads; a divisor of embed_dim.
        num_kv_heads: as in ``SelfAttention``.
        mlp_dim: width inside the MLP; 4 · embed_dim by default.
        mask: as in ``SelfAttention``; ``regard.Causal()`` for a decoder block.
        positions: as in ``SelfAttention``.

    Attributes:
        attention_norm, attention, mlp_norm, mlp: the parts, in the order in which they run.

    Raises:
        TypeError: a size is not a whole number, or a mask or positions have the wrong type.
        ValueError: a size is below 1, embed_dim is not a multiple of num_heads, or num_heads is not
            a multiple of num_kv_heads.

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
        """Return x after attention and MLP, of the same shape.

        Args:
            x: (tokens, embed_dim) or (batch, tokens, embed_dim), in the dtype of the parameters.
            mask: a mask for this call; a key is visible if this mask and the block's allow it.

        Raises:
            TypeError: x is not a floating tensor, or the mask has the wrong type.
            ValueError: x has another width, or the mask does not fit.
        """
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, x: Tensor, *, mask: Mask | Tensor | None = None) -> AttentionMatrix:
        """Return the lazy attention matrix of ``forward`` with the same arguments.

        Args:
            x: as in forward.
            mask: as in forward.

        Returns:
            (num_heads, tokens, tokens) or (batch, num_heads, tokens, tokens).

        Raises:
            TypeError: as in forward.
            ValueError: as in forward.
        """
        return self.attention.weights(self.attention_norm(x), mask=mask)
