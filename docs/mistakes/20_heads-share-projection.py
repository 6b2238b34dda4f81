import torch

BETWEEN = "columns"


def example():
    """the projection of one token: 2 heads of 4 columns"""
    return [torch.randn(1, 3, 8)]


class Wrong(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(4, 4, bias=False)  # head_dim to head_dim

    def forward(self, x):  # (batch, tokens, embed_dim), two heads
        return self.query(x.unflatten(-1, (2, 4))).flatten(-2)


class Right(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):  # (batch, tokens, embed_dim), two heads
        return self.query(x)
