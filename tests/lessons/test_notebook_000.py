"""Notebook 000: matrix products of a batch, self-attention with wide heads, cosine similarity.

It multiplies batches of matrices, turns the last two axes round, takes raw weights x xᵀ, begins a
``SelfAttention(k, heads)`` whose heads are each as wide as the embedding and are joined by one
linear layer, and ends at the cosine similarity of three words' positional embeddings.

What is unfinished in it is finished here: its ``forward`` uses ``h``, which is never defined, and
returns nothing; cosine similarity is only a picture, next to a table of embeddings.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.nn import SelfAttention

# Printed in the notebook; the only random numbers of it that it shows.
POSITIONAL_EMBEDDING = torch.tensor(
    [
        [-0.1090, 0.2475, 0.5045, 0.3140, 1.7686, 0.6140, -0.3880],
        [1.4043, 0.9589, 0.4098, -0.7808, -1.8506, -2.3296, -0.0986],
        [2.5057, 1.1200, 0.1491, 0.9988, 0.5886, -0.3630, 0.0945],
    ]
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(10, 4, 5)  # (b, t, k)


def test_a_batch_of_matrices_times_a_batch_of_values_has_shape_10_3_5() -> None:
    A = regard.AttentionMatrix.from_scores(torch.randn(10, 3, 4))
    assert (A @ torch.randn(10, 4, 5)).shape == (10, 3, 5)


def test_transposing_swaps_the_last_two_axes_only(x: torch.Tensor) -> None:
    assert regard.AttentionMatrix.from_scores(x).T.shape == (10, 5, 4)


def test_raw_weights_are_the_scores_of_x_with_itself(x: torch.Tensor) -> None:
    raw_weights = regard.attend(x, x, scale=1.0).scores.to_dense()
    # One product of float32 numbers in another order of summation.
    torch.testing.assert_close(raw_weights, torch.bmm(x, x.transpose(1, 2)), rtol=1e-6, atol=1e-6)


def test_five_wide_heads_of_an_embedding_of_2_are_projected_by_one_layer() -> None:
    attention = SelfAttention(2, 5, head_dim=2, value_dim=2, bias=False)
    assert repr(attention.query) == "Linear(in_features=2, out_features=10, bias=False)"


def test_wide_heads_are_joined_into_a_single_vector_again(x: torch.Tensor) -> None:
    attention = SelfAttention(5, 3, head_dim=5, value_dim=5, bias=False)
    assert attention(x).shape == x.shape
    assert attention.weights(x).shape == (10, 3, 4, 4)


def test_wide_heads_give_what_the_notebook_was_about_to_write(x: torch.Tensor) -> None:
    """The notebook's layer, finished: split, softmax(QKᵀ/√k)V, join, unify (with its bias)."""
    heads, k = 3, 5
    attention = SelfAttention(k, heads, head_dim=k, bias=False, output_projection=False)
    unify_heads = nn.Linear(heads * k, k)

    queries = attention.query(x).view(10, 4, heads, k)
    keys = attention.key(x).view(10, 4, heads, k)
    values = attention.value(x).view(10, 4, heads, k)
    weights = torch.einsum("bqhk,bnhk->bhqn", queries, keys).div(k**0.5).softmax(-1)
    joined = torch.einsum("bhqn,bnhk->bqhk", weights, values).reshape(10, 4, heads * k)

    # float32, a handful of terms in each sum.
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(attention.weights(x).to_dense(), weights, **close)
    torch.testing.assert_close(unify_heads(attention(x)), unify_heads(joined), **close)


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(i, j, id=f"words {i} and {j}") for i in range(3) for j in range(3)],
)
def test_cosine_similarity_is_the_score_of_normalised_embeddings(first: int, second: int) -> None:
    """The notebook shows the formula as a picture; here it is a number for every pair of words."""
    normalised = F.normalize(POSITIONAL_EMBEDDING, dim=-1)
    similarity = regard.attend(normalised, normalised, scale=1.0).scores
    expected = F.cosine_similarity(POSITIONAL_EMBEDDING[first], POSITIONAL_EMBEDDING[second], dim=0)
    torch.testing.assert_close(similarity[first, second], expected, rtol=0, atol=1e-6)  # float32


def test_the_three_words_have_these_cosine_similarities() -> None:
    """Worked out in plain Python from the printed table: words 0 and 1 point apart."""
    normalised = F.normalize(POSITIONAL_EMBEDDING, dim=-1)
    similarity = regard.attend(normalised, normalised, scale=1.0).scores.to_dense()
    expected = torch.tensor(
        [[1.0000, -0.6459, 0.1933], [-0.6459, 1.0000, 0.3402], [0.1933, 0.3402, 1.0000]]
    )
    torch.testing.assert_close(similarity, expected, rtol=0, atol=5e-5)  # written to 4 digits
