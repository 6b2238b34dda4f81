import torch

BETWEEN = "tokens"


def example():
    """1 head, 6 tokens"""
    return [torch.randn(1, 1, 6, 4) for _ in "qkv"]


class Wrong(torch.nn.Module):
    def forward(self, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.5,  # also in eval mode
        )


class Right(torch.nn.Module):
    def forward(self, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=0.5 if self.training else 0.0,
        )
