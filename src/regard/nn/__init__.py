"""Layers whose attention one can look at; `forward` is a fused kernel all the same."""

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
