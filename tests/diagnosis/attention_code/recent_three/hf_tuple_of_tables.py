# regard.check(DecoderAttention, DecoderConfig(), args=(torch.randn(2, 6, 32),), kwargs={"position_embeddings": cos_sin(6, 8)}, means={"attention_mask": "added to the scores"}, causal=True)
# regard.spec(causal=True, heads=4, kv_heads=2, padding={"attention_mask": "added to the scores"})
"""Decoder attention in the style of the Transformers library (2024): position_embeddings as a tuple."""
import torch
from torch import nn


class DecoderConfig:
    hidden_size = 32
    num_attention_heads = 4
    num_key_value_heads = 2
    attention_dropout = 0.0
    head_dim = 8


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0):
    key = torch.repeat_interleave(key, module.num_key_value_groups, dim=1)
    value = torch.repeat_interleave(value, module.num_key_value_groups, dim=1)
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    q_len, k_len = attn_weights.shape[-2:]
    causal = torch.ones(q_len, k_len, dtype=torch.bool, device=query.device).tril(k_len - q_len)
    attn_weights = attn_weights.masked_fill(~causal, torch.finfo(attn_weights.dtype).min)
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    return torch.matmul(attn_weights, value).transpose(1, 2).contiguous(), attn_weights


class DecoderAttention(nn.Module):
    def __init__(self, config, layer_idx=0):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_value=None):
        """Causal. attention_mask: additive padding mask (batch, 1, 1, keys), 0 for keep, -inf for padding."""
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        if past_key_value is not None:
            key_states = torch.cat([past_key_value[0], key_states], dim=2)
            value_states = torch.cat([past_key_value[1], value_states], dim=2)
        dropout = self.attention_dropout if self.training else 0.0
        attn_output, attn_weights = eager_attention_forward(
            self, query_states, key_states, value_states, attention_mask, self.scaling, dropout
        )
        attn_output = self.o_proj(attn_output.reshape(*input_shape, -1))
        return attn_output, (key_states, value_states)


def cos_sin(tokens, dim):
    angles = torch.arange(tokens)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.cat([angles, angles], -1)[None]
    return angles.cos(), angles.sin()
