"""Notebook 002: scaled dot-product self-attention as a module, embeddings of 2, seed 42.

It projects a batch of one sequence of three tokens to query, key and value, and prints the query,
the scores before and after the division by √2, the weights, and the output.

Its module wants ``row_dim`` and ``col_dim`` by hand, and with its own defaults turns the wrong axes
of a batch round; here the axes are always the last two, with a batch and without.
"""

import pytest
import torch

import regard
from regard.nn import SelfAttention

DIGITS_4 = {"rtol": 0.0, "atol": 5e-5}  # the notebook prints 4 decimals

ENCODINGS = torch.tensor([[[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]])  # (batch, tokens, dim)

QUERY = torch.tensor([[[0.7621, -0.0428], [1.1063, 0.7890], [1.1164, -2.1336]]])
SIMS = torch.tensor(
    [[-0.0990, 0.0648, -0.6523], [-0.4022, 0.4078, -3.0024], [0.4842, -0.6683, 4.0461]]
)
SCALED_SIMS = torch.tensor(
    [[-0.0700, 0.0458, -0.4612], [-0.2844, 0.2883, -2.1230], [0.3424, -0.4725, 2.8610]]
)
WEIGHTS = torch.tensor(
    [[0.3573, 0.4011, 0.2416], [0.3410, 0.6047, 0.0542], [0.0722, 0.0320, 0.8959]]
)
OUTPUT = torch.tensor([[[1.0100, 1.0641], [0.2040, 0.7057], [3.4989, 2.2427]]])


@pytest.fixture
def attention() -> SelfAttention:
    torch.manual_seed(42)
    return SelfAttention(2, bias=False, output_projection=False)


def test_the_output(attention: SelfAttention) -> None:
    torch.testing.assert_close(attention(ENCODINGS), OUTPUT, **DIGITS_4)


def test_the_query(attention: SelfAttention) -> None:
    torch.testing.assert_close(attention.query(ENCODINGS), QUERY, **DIGITS_4)


def test_the_scores_without_a_scale(attention: SelfAttention) -> None:
    query, key = attention.query(ENCODINGS), attention.key(ENCODINGS)
    A = regard.attend(query[:, None], key[:, None], scale=1.0)  # (batch, num_heads, tokens, dim)
    torch.testing.assert_close(A.scores[0, 0], SIMS, **DIGITS_4)


def test_the_scaled_scores(attention: SelfAttention) -> None:
    torch.testing.assert_close(attention.weights(ENCODINGS).scores[0, 0], SCALED_SIMS, **DIGITS_4)


def test_the_weights(attention: SelfAttention) -> None:
    torch.testing.assert_close(attention.weights(ENCODINGS).to_dense()[0, 0], WEIGHTS, **DIGITS_4)


def test_one_sequence_without_a_batch_gives_the_same(attention: SelfAttention) -> None:
    """No row_dim and col_dim to pass: the same call, the same numbers."""
    torch.testing.assert_close(attention(ENCODINGS[0]), OUTPUT[0], **DIGITS_4)
    torch.testing.assert_close(attention.weights(ENCODINGS[0]).to_dense()[0], WEIGHTS, **DIGITS_4)


def test_the_notebooks_tensors_are_shaped_batch_tokens_dim(attention: SelfAttention) -> None:
    assert ENCODINGS.shape == (1, 3, 2)
    assert attention.weights(ENCODINGS).shape == (1, 1, 3, 3)  # one head
