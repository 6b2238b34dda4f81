"""Attention layers: `forward` runs a fused kernel, and `weights` gives its attention matrix."""

from regard.nn.attention import CrossAttention, SelfAttention
from regard.nn.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
from regard.nn.transformer import TransformerBlock

__all__ = [
    "CrossAttention",
    "LearnedPositions",
    "RotaryPositions",
    "SelfAttention",
    "SinusoidalPositions",
    "TransformerBlock",
]
