"""Self-attention and cross-attention as layers: projections around ``regard.attend``."""

from typing import cast

from torch import Tensor, nn

from regard.errors import check_count, check_width, kind_text, shape_text
from regard.masks import Mask, as_mask
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.nn.positions import RotaryPositions


class _Attention(nn.Module):
    """The projections that both layers have: to query, key and value heads, and back."""

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
        num_kv_heads, head_dim, value_dim = _checked_heads(
            embed_dim, num_heads, num_kv_heads, head_dim, value_dim
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.mask = None if mask is None else as_mask(mask)
        # Handwritten layers usually create the projections in this order, so that a random seed
        # gives both the same initial weights.
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
        """Return the matrix of queries from x and keys from memory."""
        if x.ndim == 2:
            # With a batch of one, the first axis of a mask is the batch here, too.
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
        """Return weights @ value with the heads joined, after the output projection if any."""
        value = _split_heads(self.value(memory), self.num_kv_heads)
        output = (weights @ value).transpose(-3, -2).flatten(-2)
        return output if self.output_projection is None else self.output_projection(output)

    def extra_repr(self) -> str:
        """Return the arguments that the printed projections do not show."""
        facts = [f"num_heads={self.num_heads}", f"head_dim={self.head_dim}"]
        if self.num_kv_heads != self.num_heads:
            facts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.value_dim != self.head_dim:
            facts.append(f"value_dim={self.value_dim}")
        if self.mask is not None:
            facts.append(f"mask={self.mask!r}")
        return ", ".join(facts)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """Split (..., tokens, heads · dim) into (..., heads, tokens, dim)."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


class SelfAttention(_Attention):
    """Self-attention: every token attends to the tokens of its sequence that the mask allows.

    ``forward`` runs a fused kernel, and ``weights`` returns the lazy attention matrix of the same
    call. Neither forms the matrix.

    The arguments give the usual variants:

    - ``SelfAttention(512, 8)``: 8 heads of width 512/8;
    - ``SelfAttention(512, 8, num_kv_heads=2)``: grouped-query heads (multi-query with 1);
    - ``SelfAttention(512, 8, head_dim=512)``: *wide* heads, each as wide as the embedding;
    - ``SelfAttention(512, bias=False, output_projection=False)``: one head, softmax(QKᵀ/√d)V alone.

    Args:
        embed_dim: width of the input.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads, a divisor of num_heads; num_heads by default.
        head_dim: width of a query and a key of one head; embed_dim / num_heads by default. The
            scores are scaled by 1/sqrt(head_dim).
        value_dim: width of a value of one head; head_dim by default.
        bias: True if the projections, the output projection included, add a bias.
        output_projection: True if a last linear layer maps the heads to embed_dim. Otherwise the
            output is the concatenated heads, num_heads · value_dim wide.
        mask: the mask of every call: one of ``regard.masks``, or a bool tensor (True = may attend)
            that broadcasts to (batch, num_heads, tokens, tokens).
        positions: a ``RotaryPositions(head_dim)`` that rotates query and key.
            Apply ``SinusoidalPositions`` or ``LearnedPositions`` to x before the layer instead.

    Attributes:
        query, key, value: the projections, ``nn.Linear``, initialised in this order.
        output_projection: the last projection, or None.

    Raises:
        TypeError: a size is not a whole number, or a mask or positions have the wrong type.
        ValueError: a size is below 1, or one that must be a multiple of another is not, or rotary
            positions have another head_dim.

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
        """Return the attention output of every token.

        Args:
            x: (tokens, embed_dim) or (batch, tokens, embed_dim), in the dtype of the parameters.
            mask: a mask for this call; a key is visible if this mask and the layer's allow it.

        Returns:
            (..., tokens, embed_dim), or (..., tokens, num_heads · value_dim) without an output
            projection. A token without keys gets zeros (before the projection).

        Raises:
            TypeError: x is not a floating tensor, or the mask has the wrong type.
            ValueError: x has another width, or the mask does not fit.
        """
        return self._output(self.weights(x, mask=mask), x)

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
        x = check_width("x", x, "embed_dim", self.embed_dim)
        return self._matrix(x, x, mask, self.positions)


class CrossAttention(_Attention):
    """Cross-attention: every token of x attends to the tokens of another sequence, the memory.

    Args:
        embed_dim: width of x, the source of the queries.
        num_heads: number of query heads.
        memory_dim: width of the memory, the source of keys and values; embed_dim by default.
        num_kv_heads: as in ``SelfAttention``.
        head_dim: as in ``SelfAttention``.
        value_dim: as in ``SelfAttention``.
        bias: as in ``SelfAttention``.
        output_projection: as in ``SelfAttention``.
        mask: as in ``SelfAttention``; a tensor broadcasts to (batch, num_heads, tokens, memory
            tokens), and ``regard.Padding`` counts the tokens of the memory.

    Attributes:
        query, key, value: the projections, ``nn.Linear``, initialised in this order.
        output_projection: the last projection, or None.

    Raises:
        TypeError: a size is not a whole number, or the mask has the wrong type.
        ValueError: a size is below 1, or one that must be a multiple of another is not.

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
        """Return the attention output of every token of x.

        Args:
            x: (tokens, embed_dim) or (batch, tokens, embed_dim), in the dtype of the parameters.
            memory: (memory tokens, memory_dim) or (batch, memory tokens, memory_dim).
            mask: a mask for this call; a key is visible if this mask and the layer's allow it.

        Returns:
            (..., tokens, embed_dim), or (..., tokens, num_heads · value_dim) without an output
            projection.

        Raises:
            TypeError: an input is not a floating tensor, or the mask has the wrong type.
            ValueError: an input has another width, the batches differ, or the mask does not fit.
        """
        return self._output(self.weights(x, memory, mask=mask), memory)

    def weights(
        self, x: Tensor, memory: Tensor, *, mask: Mask | Tensor | None = None
    ) -> AttentionMatrix:
        """Return the lazy attention matrix of ``forward`` with the same arguments.

        Args:
            x: as in forward.
            memory: as in forward.
            mask: as in forward.

        Returns:
            (num_heads, tokens, memory tokens) or (batch, num_heads, tokens, memory tokens).

        Raises:
            TypeError: as in forward.
            ValueError: as in forward.
        """
        x = check_width("x", x, "embed_dim", self.embed_dim)
        memory = _checked_memory(x, memory, self.memory_dim)
        return self._matrix(x, memory, mask, None)


def _check_positions(positions: object, head_dim: int) -> RotaryPositions | None:
    if positions is None:
        return None
    if not isinstance(positions, RotaryPositions):
        is_class = isinstance(positions, type)
        came = f"the class {positions.__name__}" if is_class else kind_text(positions)
        raise TypeError(
            f"positions is {came}; it must be a RotaryPositions.\n"
            f"    Use RotaryPositions({head_dim}). Apply other positions to x before the layer."
        )
    if positions.head_dim != head_dim:
        raise ValueError(
            f"positions has head_dim {positions.head_dim} and the layer has {head_dim}; "
            f"they must be equal.\n    Use RotaryPositions({head_dim})."
        )
    return positions


def _checked_heads(
    embed_dim: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
) -> tuple[int, int, int]:
    """Return num_kv_heads, head_dim and value_dim, with defaults for None."""
    check_count("embed_dim", embed_dim)
    check_count("num_heads", num_heads)
    num_kv_heads = check_count("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads is {num_kv_heads} and num_heads is {num_heads}; num_heads must be a "
            "multiple of num_kv_heads (grouped-query attention).\n"
            f"    Use num_kv_heads={_divisor_below(num_heads, num_kv_heads)}."
        )
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"num_heads is {num_heads} and embed_dim is {embed_dim}; embed_dim must be a multiple "
            "of num_heads when head_dim is left out.\n"
            f"    Use num_heads={_divisor_below(embed_dim, num_heads)}, or pass head_dim, which "
            "may have any value."
        )
    head_dim = check_count("head_dim", embed_dim // num_heads if head_dim is None else head_dim)
    value_dim = check_count("value_dim", head_dim if value_dim is None else value_dim)
    return num_kv_heads, head_dim, value_dim


def _divisor_below(number: int, limit: int) -> int:
    """Return the largest divisor of number that is at most limit."""
    return next(n for n in range(min(number, limit), 0, -1) if number % n == 0)


def _checked_memory(x: Tensor, memory: object, memory_dim: int) -> Tensor:
    """Return the memory, (..., tokens, memory_dim), if it has the batch axes of x."""
    memory = check_width("memory", memory, "memory_dim", memory_dim)
    if memory.shape[:-2] == x.shape[:-2]:
        return memory
    wanted = (*x.shape[:-2], *memory.shape[-2:])
    raise ValueError(
        f"memory has shape {shape_text(memory.shape)} and x has {shape_text(x.shape)}; "
        "their batch axes must be equal.\n"
        f"    For one memory for the whole batch use memory.expand{shape_text(wanted)}."
    )
