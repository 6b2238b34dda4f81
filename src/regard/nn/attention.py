"""Self-attention and cross-attention as layers: projections around ``regard.attend``."""

from typing import cast

from torch import Tensor, nn

from regard.errors import check_count
from regard.masks import Mask, as_mask
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.nn.layer_checks import check_heads, check_input, check_memory_input
from regard.nn.positions import RotaryPositions

__all__ = ["CrossAttention", "SelfAttention"]


class _Attention(nn.Module):
    """Projections to query, key and value heads, and back: what both layers are made of."""

    def __init__(
        self,
        embed_dim: int,
        memory_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        head_dim: int | None,
        value_dim: int | None,
        bias: bool,
        output_projection: bool,
        mask: Mask | Tensor | None,
    ) -> None:
        super().__init__()
        num_kv_heads, head_dim, value_dim = check_heads(
            embed_dim, num_heads, num_kv_heads, head_dim, value_dim
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.mask = None if mask is None else as_mask(mask)
        # The order decides which random numbers each gets; code written by hand has this one.
        self.query = nn.Linear(embed_dim, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(memory_dim, num_kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(memory_dim, num_kv_heads * value_dim, bias=bias)
        self.output_projection = (
            nn.Linear(num_heads * value_dim, embed_dim, bias=bias) if output_projection else None
        )

    def _matrix(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None,
        positions: RotaryPositions | None,
    ) -> AttentionMatrix:
        """The matrix of queries from x and keys from memory, (..., num_heads, q_len, kv_len)."""
        if x.ndim == 2:
            # A batch of one: in the masks, too, the first axis is the batch, never the heads.
            batch_of_one = self._matrix(x[None], memory[None], mask, positions)
            return cast(AttentionMatrix, batch_of_one[0])
        query = _split_heads(self.query(x), self.num_heads)
        key = _split_heads(self.key(memory), self.num_kv_heads)
        if positions is not None:
            query, key = positions(query), positions(key)
        if self.mask is not None:
            own = self.mask.map(lambda tensor: tensor.to(x.device))
            mask = own if mask is None else own & mask
        return attend(query, key, mask=mask)

    def _output(self, weights: AttentionMatrix, memory: Tensor) -> Tensor:
        """weights @ value, the heads joined, (..., q_len, embed_dim or num_heads · value_dim)."""
        value = _split_heads(self.value(memory), self.num_kv_heads)
        output = (weights @ value).transpose(-3, -2).flatten(-2)
        return output if self.output_projection is None else self.output_projection(output)

    def extra_repr(self) -> str:
        """The arguments that the projections below do not show."""
        facts = [f"num_heads={self.num_heads}", f"head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            facts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.value_dim != self.head_dim:
            facts.append(f"value_dim={self.value_dim}")
        if self.mask is not None:
            facts.append(f"mask={self.mask!r}")
        return ", ".join(facts)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(..., tokens, heads · dim) as (..., heads, tokens, dim)."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


class SelfAttention(_Attention):
    """Every token of a sequence attends to every token of it that the mask allows.

    ``forward`` is a fused kernel and never forms the matrix; ``weights`` gives the matrix of what
    forward did, to be asked anything, without forming it either.

    One class has the usual forms by its arguments:

    - ``SelfAttention(512, 8)``: 8 heads, each 512/8 wide;
    - ``SelfAttention(512, 8, num_kv_heads=2)``: grouped-query heads (multi-query with 1);
    - ``SelfAttention(512, 8, head_dim=512)``: *wide* heads, each as wide as the embedding;
    - ``SelfAttention(512, bias=False, output_projection=False)``: one head, and nothing but
      softmax(QKᵀ/√d)V.

    Args:
        embed_dim: width of the input.
        num_heads: how many heads attend side by side.
        num_kv_heads: how many key and value heads they share; num_heads when left out, which it
            must divide.
        head_dim: width of a query and of a key; embed_dim / num_heads when left out. The scores
            are scaled by 1/sqrt(head_dim).
        value_dim: width of a value, of each head; head_dim when left out.
        bias: whether the projections, that of the output included, add a bias.
        output_projection: whether a last linear layer joins the heads to embed_dim; without it
            the output is the heads side by side, num_heads · value_dim wide.
        mask: what holds in every call: one of ``regard.masks``, or a bool tensor (True = may
            attend) that broadcasts to (batch, num_heads, tokens, tokens).
        positions: a ``RotaryPositions(head_dim)`` that turns query and key. (``Sinusoidal`` and
            ``Learned`` go before the layer: they are added to x.)

    Attributes:
        query, key, value: the projections, ``nn.Linear``, made in this order.
        output_projection: the last projection, or None.

    Raises:
        TypeError: a size that is no whole number, a mask or positions of the wrong kind.
        ValueError: sizes that do not divide, or rotary positions of another width.

    Example:
        >>> import torch, regard
        >>> from regard.nn import SelfAttention
        >>> attention = SelfAttention(16, num_heads=2, mask=regard.Causal())
        >>> x = torch.randn(3, 10, 16)
        >>> attention(x).shape
        torch.Size([3, 10, 16])
        >>> A = attention.weights(x)
        >>> A
        AttentionMatrix(batch=3, num_heads=2, q_len=10, kv_len=10, ... scale=0.3536, mask=Causal())
        >>> A.entropy().shape
        torch.Size([3, 2, 10])

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2; grouped-query heads: Ainslie
        et al. 2023, "GQA".
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        output_projection: bool = True,
        mask: Mask | Tensor | None = None,
        positions: RotaryPositions | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            bias=bias,
            output_projection=output_projection,
            mask=mask,
        )
        self.positions = _check_positions(positions, self.head_dim)

    def forward(self, x: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """What each token takes from the tokens it attends to.

        Args:
            x: (tokens, embed_dim) or (batch, tokens, embed_dim), of the parameters' dtype.
            mask: for this call, as the layer's own; where there are both, both must allow.

        Returns:
            (..., tokens, embed_dim), or (..., tokens, num_heads · value_dim) without output
            projection; a token with nothing to attend to takes zeros (before the projection).

        Raises:
            TypeError: x is no floating tensor, or the mask of the wrong kind.
            ValueError: x has another width, or the mask does not fit.
        """
        return self._output(self.weights(x, mask=mask), x)

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
        x = check_input("x", x, "embed_dim", self.embed_dim)
        return self._matrix(x, x, mask, self.positions)


class CrossAttention(_Attention):
    """Every token of one sequence attends to the tokens of another, the memory.

    Args:
        embed_dim: width of x, which asks.
        num_heads: how many heads attend side by side.
        memory_dim: width of the memory, which is asked; embed_dim when left out.
        num_kv_heads: as in ``SelfAttention``.
        head_dim: as in ``SelfAttention``.
        value_dim: as in ``SelfAttention``.
        bias: as in ``SelfAttention``.
        output_projection: as in ``SelfAttention``.
        mask: as in ``SelfAttention``; a tensor broadcasts to (batch, num_heads, tokens, memory
            tokens), and ``regard.Padding`` counts the tokens of the memory.

    Attributes:
        query, key, value: the projections, ``nn.Linear``, made in this order.
        output_projection: the last projection, or None.

    Raises:
        TypeError: a size that is no whole number, or a mask of the wrong kind.
        ValueError: sizes that do not divide.

    Example:
        >>> import torch
        >>> from regard.nn import CrossAttention
        >>> attention = CrossAttention(16, num_heads=2, memory_dim=24)
        >>> x, memory = torch.randn(3, 5, 16), torch.randn(3, 11, 24)
        >>> attention(x, memory).shape, attention.weights(x, memory).shape
        (torch.Size([3, 5, 16]), torch.Size([3, 2, 5, 11]))

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        memory_dim: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        output_projection: bool = True,
        mask: Mask | Tensor | None = None,
    ) -> None:
        memory_dim = check_count("memory_dim", embed_dim if memory_dim is None else memory_dim)
        super().__init__(
            embed_dim,
            memory_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            bias=bias,
            output_projection=output_projection,
            mask=mask,
        )
        self.memory_dim = memory_dim

    def forward(self, x: Tensor, memory: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """What each token of x takes from the memory.

        Args:
            x: (tokens, embed_dim) or (batch, tokens, embed_dim), of the parameters' dtype.
            memory: (memory tokens, memory_dim) or (batch, memory tokens, memory_dim).
            mask: for this call, as the layer's own; where there are both, both must allow.

        Returns:
            (..., tokens, embed_dim), or (..., tokens, num_heads · value_dim) without output
            projection.

        Raises:
            TypeError: an input that is no floating tensor, or a mask of the wrong kind.
            ValueError: an input of another width, batches that differ, or a mask that does not fit.
        """
        return self._output(self.weights(x, memory, mask=mask), memory)

    def weights(
        self, x: Tensor, memory: Tensor, *, mask: Mask | Tensor | None = None
    ) -> AttentionMatrix:
        """The attention matrix of what forward does with the same arguments.

        Args:
            x: as in forward.
            memory: as in forward.
            mask: as in forward.

        Returns:
            (num_heads, tokens, memory tokens) or (batch, num_heads, tokens, memory tokens); not
            formed.

        Raises:
            TypeError: as in forward.
            ValueError: as in forward.
        """
        x = check_input("x", x, "embed_dim", self.embed_dim)
        memory = check_memory_input(x, memory, self.memory_dim)
        return self._matrix(x, memory, mask, None)


def _check_positions(positions: object, head_dim: int) -> RotaryPositions | None:
    if positions is None:
        return None
    if not isinstance(positions, RotaryPositions):
        came = f"class {positions.__name__}" if isinstance(positions, type) else None
        raise TypeError(
            f"positions is a {came or type(positions).__name__}; it must be a RotaryPositions.\n"
            f"    Use RotaryPositions({head_dim}). Other positions are added to x before the layer."
        )
    if positions.head_dim != head_dim:
        raise ValueError(
            f"positions has head_dim {positions.head_dim} and the layer has {head_dim}; "
            f"they must be equal.\n    Use RotaryPositions({head_dim})."
        )
    return positions
