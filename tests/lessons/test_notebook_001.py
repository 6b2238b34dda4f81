"""Notebook 001: attention over encoder states, keys from word vectors, an example in integers.

It weighs three encoder states by the softmax of given scores, computes keys from word vectors and
per-column weights, and works through keys, queries, values and one query's scores and weights of
an example in small integers, with no scale.

Two of its products are wrong, and both stay silent because every matrix is 3 x 3:

- the weights multiply the columns of the encoder states (each of its features) where they belong
  to the rows (each state), and the sum runs over the features. Attention is weights @ states.
- its last cell multiplies ``queries @ keys`` without a transpose. Scores are queries @ keysᵀ.

The notebook's own printed numbers are reproduced too, and shown to be these other products.
"""

import pytest
import torch

import regard
from regard.nn import SelfAttention

DIGITS_4 = {"rtol": 0.0, "atol": 5e-5}  # the notebook prints 4 decimals
DIGITS_5 = {"rtol": 5e-5, "atol": 0.0}  # and here 5 significant digits

STATES = torch.tensor([[0.21, 0.51, 1.25], [4.13, -41.3, 0.31], [3.2, 0.02, 9.44]])
GIVEN_SCORES = torch.tensor([[13.0, 9.0, 9.0]])

WORDS = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
W_KEY = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
W_QUERY = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
W_VALUE = torch.tensor([[0.0, 2.0, 0.0], [0.0, 3.0, 0.0], [1.0, 0.0, 3.0], [1.0, 1.0, 0.0]])

KEYS = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 0.0], [2.0, 3.0, 1.0]])
QUERIES = torch.tensor([[1.0, 0.0, 2.0], [2.0, 2.0, 2.0], [2.0, 1.0, 3.0]])
VALUES = torch.tensor([[1.0, 2.0, 3.0], [2.0, 8.0, 0.0], [2.0, 6.0, 3.0]])


@pytest.fixture
def attention() -> SelfAttention:
    """The notebook's weight matrices in a layer; ``nn.Linear`` keeps them transposed."""
    layer = SelfAttention(4, head_dim=3, bias=False, output_projection=False)
    layer.load_state_dict(
        {"query.weight": W_QUERY.mT, "key.weight": W_KEY.mT, "value.weight": W_VALUE.mT}
    )
    return layer


# Encoder states


def test_the_softmax_of_the_given_scores() -> None:
    A = regard.AttentionMatrix.from_scores(GIVEN_SCORES)
    torch.testing.assert_close(A[0], torch.tensor([0.9647, 0.0177, 0.0177]), **DIGITS_4)


def test_the_context_vector_is_the_weighted_sum_of_the_states() -> None:
    """Right where the notebook is not: one weight for each state (row), summed over the states.

    Nearly all of it is state 0; the 0.0177 of state 1 still carries its -41.3.
    """
    A = regard.AttentionMatrix.from_scores(GIVEN_SCORES)
    by_hand = A[0, 0] * STATES[0] + A[0, 1] * STATES[1] + A[0, 2] * STATES[2]
    torch.testing.assert_close((A @ STATES)[0], by_hand)
    # Worked out in plain Python: 0.964663 · 0.21 + 0.017668 · (4.13 + 3.2), and so on.
    torch.testing.assert_close(by_hand, torch.tensor([0.3321, -0.2374, 1.3781]), **DIGITS_4)


def test_the_notebooks_products_weigh_columns() -> None:
    """Its table, to the digit: number j of every state is multiplied with the weight of state j."""
    A = regard.AttentionMatrix.from_scores(GIVEN_SCORES)
    printed = torch.tensor(
        [
            [2.0258e-01, 9.0109e-03, 2.2086e-02],
            [3.9841e00, -7.2971e-01, 5.4772e-03],
            [3.0869e00, 3.5337e-04, 1.6679e-01],
        ]
    )
    torch.testing.assert_close(A[0] * STATES, printed, **DIGITS_5)
    assert not torch.allclose(A[0][:, None] * STATES, printed, atol=0.1)


def test_the_notebooks_sums_are_not_the_context_vector() -> None:
    """[0.2337, 3.2598, 3.2541] is what attention over the transposed states would give."""
    A = regard.AttentionMatrix.from_scores(GIVEN_SCORES)
    printed = torch.tensor([0.2337, 3.2598, 3.2541])
    torch.testing.assert_close((A @ STATES.mT)[0], printed, **DIGITS_4)
    assert not torch.allclose((A @ STATES)[0], printed, atol=0.05)


# The example in integers


def test_keys_from_word_vectors_and_columns_of_weights() -> None:
    columns = [torch.tensor(w) for w in ([0.0, 1, 0, 1], [0.0, 1, 1, 1], [1.0, 0, 0, 0])]
    assert torch.equal(torch.stack(columns, dim=1), W_KEY)
    assert torch.equal(WORDS @ torch.stack(columns, dim=1), KEYS)


@pytest.mark.parametrize(
    ("projection", "printed"),
    [
        pytest.param("key", KEYS, id="keys"),
        pytest.param("query", QUERIES, id="queries"),
        pytest.param("value", VALUES, id="values"),
    ],
)
def test_the_projections_of_the_words(
    attention: SelfAttention, projection: str, printed: torch.Tensor
) -> None:
    assert torch.equal(getattr(attention, projection)(WORDS), printed)


def test_the_scores_of_the_first_query_without_a_scale() -> None:
    A = regard.attend(QUERIES, KEYS, scale=1.0)
    assert A.scores[0].tolist() == [2, 4, 4]


def test_the_weights_of_the_first_query_without_a_scale() -> None:
    A = regard.attend(QUERIES, KEYS, scale=1.0)
    torch.testing.assert_close(A[0], torch.tensor([0.0634, 0.4683, 0.4683]), **DIGITS_4)


def test_the_output_of_the_first_query() -> None:
    """The step the notebook leaves out: 0.0634 · [1, 2, 3] + 0.4683 · ([2, 8, 0] + [2, 6, 3])."""
    output = regard.attend(QUERIES, KEYS, scale=1.0) @ VALUES
    by_hand = 0.0634 * VALUES[0] + 0.4683 * (VALUES[1] + VALUES[2])
    # The weights by hand have 4 decimals, and 5e-5 of them meet values of up to 14 in all.
    torch.testing.assert_close(output[0], by_hand, rtol=0, atol=8e-4)


def test_the_layer_does_the_same_with_a_scale(attention: SelfAttention) -> None:
    A = attention.weights(WORDS)[0]
    torch.testing.assert_close(A.scores[0], torch.tensor([2.0, 4.0, 4.0]) / 3**0.5)
    torch.testing.assert_close(attention(WORDS), A @ VALUES)


def test_a_query_times_the_transposed_keys_multiplies_features_of_different_places() -> None:
    """The notebook looks at ``queries[0] * keys.t()``; a score sums over ``queries[0] * keys``."""
    printed = torch.tensor([[0.0, 0.0, 4.0], [1.0, 0.0, 6.0], [1.0, 0.0, 2.0]])
    assert torch.equal(QUERIES[0] * KEYS.mT, printed)
    scores = regard.attend(QUERIES, KEYS, scale=1.0).scores
    assert torch.equal((QUERIES[0] * KEYS).sum(-1), scores[0])
    assert not torch.equal(printed.sum(-1), scores[0])


def test_one_number_of_a_query_times_a_key() -> None:
    assert (QUERIES[0, 1] * KEYS[0]).tolist() == [0, 0, 0]


def test_without_a_transpose_the_notebook_prints_other_numbers_than_the_scores() -> None:
    """Its last cell. Nothing fails: with as many words as numbers in a key, both are 3 x 3."""
    printed = torch.tensor([[4.0, 7.0, 3.0], [12.0, 16.0, 4.0], [10.0, 15.0, 5.0]])
    scores = torch.tensor([[2.0, 4.0, 4.0], [4.0, 16.0, 12.0], [4.0, 12.0, 10.0]])
    assert torch.equal(QUERIES @ KEYS, printed)
    assert torch.equal(regard.attend(QUERIES, KEYS.mT, scale=1.0).scores.to_dense(), printed)
    assert torch.equal(regard.attend(QUERIES, KEYS, scale=1.0).scores.to_dense(), scores)


def test_integers_are_refused_with_the_remedy_that_the_notebook_needs() -> None:
    """The notebook has integers too, and adds ``.float()`` before its softmax."""
    with pytest.raises(TypeError) as error:
        regard.attend(QUERIES.long(), KEYS.long())
    assert str(error.value) == (
        "query is int64; attention needs a floating dtype.\n    Use query.float()."
    )
