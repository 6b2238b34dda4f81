"""Notebook 004: averages over what came before, as a matrix, as masked scores, as attention.

It shows how ``@`` broadcasts, averages a bag of words with a lower-triangular matrix, gets the same
matrix from a softmax of masked flat scores, and then lets the scores differ: causal attention.

Nothing in it is wrong. Its ``B @ C`` and ``C @ B`` are of random numbers without a seed, so their
shapes are reproduced and their numbers are not.
"""

import pytest
import torch

import regard

DIGITS_4 = {"rtol": 0.0, "atol": 5e-5}  # the notebook prints 4 decimals

INF = torch.inf

AVERAGES = torch.tensor(
    [
        [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.3333, 0.3333, 0.3333, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.2000, 0.2000, 0.2000, 0.2000, 0.2000, 0.0000, 0.0000, 0.0000],
        [0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.1667, 0.0000, 0.0000],
        [0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.0000],
        [0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250, 0.1250],
    ]
)
RANDOM_SCORES = torch.tensor(
    [
        [-0.1661, -INF, -INF, -INF, -INF, -INF, -INF, -INF],
        [0.7549, -0.6352, -INF, -INF, -INF, -INF, -INF, -INF],
        [-0.5888, 0.5921, -0.5735, -INF, -INF, -INF, -INF, -INF],
        [-1.4654, -0.8489, 1.1032, -1.4104, -INF, -INF, -INF, -INF],
        [1.3734, 0.6371, 2.6707, -0.2718, 0.9070, -INF, -INF, -INF],
        [-2.8097, -0.5699, 1.3901, -1.0474, -0.7544, -0.5896, -INF, -INF],
        [-0.7703, -0.4959, 0.7730, 0.2219, 0.2030, 1.0977, 1.0572, -INF],
        [-0.9147, -0.9655, -0.5338, 0.6499, -0.9065, 0.8309, 0.4588, -1.3579],
    ]
)
RANDOM_WEIGHTS = torch.tensor(
    [
        [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.8006, 0.1994, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.1897, 0.6178, 0.1926, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.0590, 0.1092, 0.7695, 0.0623, 0.0000, 0.0000, 0.0000, 0.0000],
        [0.1678, 0.0804, 0.6141, 0.0324, 0.1053, 0.0000, 0.0000, 0.0000],
        [0.0100, 0.0940, 0.6673, 0.0583, 0.0782, 0.0922, 0.0000, 0.0000],
        [0.0399, 0.0526, 0.1870, 0.1077, 0.1057, 0.2587, 0.2484, 0.0000],
        [0.0512, 0.0487, 0.0750, 0.2449, 0.0516, 0.2935, 0.2023, 0.0329],
    ]
)


@pytest.fixture
def flat() -> regard.AttentionMatrix:
    """Causal attention of 8 tokens whose scores are all 0: every token counts the same."""
    return regard.attend(torch.zeros(8, 1), torch.zeros(8, 1), mask=regard.Causal())


@pytest.fixture
def bags() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, 2)  # (batch, words, dim)


# Broadcasting


def test_leading_axes_of_a_value_broadcast() -> None:
    B, C = torch.randn(3, 1, 2, 2), torch.randn(5, 2, 3)
    A = regard.AttentionMatrix.from_scores(B.expand(3, 5, 2, 2))
    D = A @ C
    assert D.shape == (3, 5, 2, 3)
    torch.testing.assert_close(D[1, 2], A[1, 2] @ C[2])


def test_in_the_reverse_order_they_broadcast_too() -> None:
    C, B = torch.randn(6, 4, 2), torch.randn(3, 1, 2, 2)
    A = regard.AttentionMatrix.from_scores(C.expand(3, 6, 4, 2))
    assert (A @ B).shape == (3, 6, 4, 2)


# Averages over what came before


def test_a_row_has_as_many_keys_as_words_up_to_it(flat: regard.AttentionMatrix) -> None:
    """The notebook sums the rows of a triangle of ones; it is what the softmax divides by."""
    counts = flat.logsumexp().exp()
    torch.testing.assert_close(counts, torch.arange(1.0, 9.0))


def test_flat_causal_attention_is_the_averaging_matrix(flat: regard.AttentionMatrix) -> None:
    torch.testing.assert_close(flat.to_dense(), AVERAGES, **DIGITS_4)


def test_its_scores_are_zeros_and_minus_infinity(flat: regard.AttentionMatrix) -> None:
    printed = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).tril() == 0, -INF)
    assert torch.equal(flat.scores.to_dense(), printed)


def test_a_mask_of_ones_and_zeros_becomes_true_and_false() -> None:
    """The notebook's triangle of 1.0 and 0.0 is a mask once it is bool; True = may attend."""
    triangle = torch.ones(8, 8).tril()
    A = regard.AttentionMatrix.from_scores(torch.zeros(8, 8), mask=triangle.bool())
    torch.testing.assert_close(A.to_dense(), AVERAGES, **DIGITS_4)


def test_a_float_mask_is_refused_instead_of_being_added() -> None:
    with pytest.raises(TypeError, match="mask is a float32 tensor; a mask is a bool tensor"):
        regard.AttentionMatrix.from_scores(torch.zeros(8, 8), mask=torch.ones(8, 8).tril())


def test_a_batch_of_bags_of_words_is_averaged(bags: torch.Tensor) -> None:
    A = regard.attend(torch.zeros(4, 8, 1), torch.zeros(4, 8, 1), mask=regard.Causal())
    counts = torch.arange(1.0, 9.0)[:, None]
    assert (A @ bags).shape == (4, 8, 2)
    torch.testing.assert_close(A @ bags, bags.cumsum(-2) / counts)


# Scores that differ


def test_the_softmax_of_the_printed_scores() -> None:
    A = regard.AttentionMatrix.from_scores(RANDOM_SCORES)
    # The scores are printed to 5e-5 as well, which moves a weight by at most half of that.
    torch.testing.assert_close(A.to_dense(), RANDOM_WEIGHTS, rtol=0, atol=7.5e-5)


def test_a_causal_mask_hides_what_the_notebook_filled_by_hand() -> None:
    scores = RANDOM_SCORES.masked_fill(RANDOM_SCORES == -INF, 5.0)
    A = regard.AttentionMatrix.from_scores(scores, mask=regard.Causal())
    torch.testing.assert_close(A.to_dense(), RANDOM_WEIGHTS, rtol=0, atol=7.5e-5)  # as above


def test_every_row_of_weights_sums_to_1() -> None:
    A = regard.AttentionMatrix.from_scores(RANDOM_SCORES)
    torch.testing.assert_close(A.sum(-1), torch.ones(8))
