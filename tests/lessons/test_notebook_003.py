"""Notebook 003: one sentence, its vocabulary and embeddings, and values wider than keys, seed 123.

It embeds "Life is short, eat dessert first" in 3 numbers a word, draws weight matrices with
d_q = d_k = 2 and d_v = 4, computes the unnormalised weights, the weights and the context vector of
one word, and puts the whole into a module.

Its module takes one sentence only: ``keys.T`` turns all the axes of a batch round.
"""

from dataclasses import dataclass

import pytest
import torch

import regard
from regard.nn import SelfAttention

DIGITS_4 = {"rtol": 0.0, "atol": 5e-5}  # the notebook prints 4 decimals

SENTENCE = "Life is short, eat dessert first"


@dataclass(frozen=True)
class Notebook:
    """What the notebook draws with its seed, in its order."""

    embedded: torch.Tensor  # (6, 3)
    w_query: torch.Tensor  # (3, 2)
    w_key: torch.Tensor  # (3, 2)
    w_value: torch.Tensor  # (3, 4)


@pytest.fixture(scope="module")
def notebook() -> Notebook:
    torch.manual_seed(123)
    words = SENTENCE.replace(",", "").split()
    index = {word: i for i, word in enumerate(sorted(words))}
    embed = torch.nn.Embedding(50_000, 3)
    embedded = embed(torch.tensor([index[word] for word in words])).detach()
    return Notebook(embedded, torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 4))


@pytest.fixture
def attention(notebook: Notebook) -> SelfAttention:
    """The notebook's weight matrices in a layer; ``nn.Linear`` keeps them transposed."""
    layer = SelfAttention(3, head_dim=2, value_dim=4, bias=False, output_projection=False)
    layer.load_state_dict(
        {
            "query.weight": notebook.w_query.mT,
            "key.weight": notebook.w_key.mT,
            "value.weight": notebook.w_value.mT,
        }
    )
    return layer


def test_the_embeddings_of_the_sentence(notebook: Notebook) -> None:
    printed = torch.tensor(
        [
            [0.3374, -0.1778, -0.3035],
            [0.1794, 1.8951, 0.4954],
            [0.2692, -0.0770, -1.0205],
            [-0.2196, -0.3792, 0.7671],
            [-0.5880, 0.3486, 0.6603],
            [-1.1925, 0.6984, -1.4097],
        ]
    )
    assert notebook.embedded.shape == (6, 3)
    torch.testing.assert_close(notebook.embedded, printed, **DIGITS_4)


def test_the_unnormalised_weights_of_the_second_word(notebook: Notebook) -> None:
    query, key = notebook.embedded @ notebook.w_query, notebook.embedded @ notebook.w_key
    A = regard.attend(query, key, scale=1.0)
    printed = torch.tensor([-0.6150, 2.4277, -0.9584, 0.2260, 1.2082, 0.5242])
    torch.testing.assert_close(A.scores[1], printed, **DIGITS_4)


def test_the_layer_scales_them_by_the_width_of_the_keys(
    notebook: Notebook, attention: SelfAttention
) -> None:
    """By √d_k = √2, though the embeddings are 3 wide and the values 4."""
    printed = torch.tensor([-0.6150, 2.4277, -0.9584, 0.2260, 1.2082, 0.5242])
    A = attention.weights(notebook.embedded)[0]
    torch.testing.assert_close(A.scores[1], printed / 2**0.5, **DIGITS_4)
    torch.testing.assert_close(A[1], (printed / 2**0.5).softmax(-1), **DIGITS_4)


def test_the_shapes_of_one_words_weights_values_and_context(
    notebook: Notebook, attention: SelfAttention
) -> None:
    A = attention.weights(notebook.embedded)[0]
    value = attention.value(notebook.embedded)
    assert A[1:2].shape == (1, 6)
    assert value.shape == (6, 4)
    assert (A[1:2] @ value).shape == (1, 4)


def test_the_context_vector_of_one_word_is_its_row_of_the_output(
    notebook: Notebook, attention: SelfAttention
) -> None:
    A = attention.weights(notebook.embedded)[0]
    context = A[1] @ attention.value(notebook.embedded)
    torch.testing.assert_close(attention(notebook.embedded)[1], context)


def test_the_module_gives_one_vector_of_4_for_each_word(notebook: Notebook) -> None:
    layer = SelfAttention(3, head_dim=2, value_dim=4, bias=False, output_projection=False)
    assert layer(notebook.embedded).shape == (6, 4)


@pytest.mark.parametrize("sentence", [0, 1], ids=["the sentence", "the sentence backwards"])
def test_a_batch_of_sentences_gives_what_each_alone_gives(
    notebook: Notebook, attention: SelfAttention, sentence: int
) -> None:
    """Where the notebook's module fails: ``.T`` makes (2, 6, 2) of the keys of this batch of 2."""
    batch = torch.stack([notebook.embedded, notebook.embedded.flip(0)])
    assert attention(batch).shape == (2, 6, 4)
    torch.testing.assert_close(attention(batch)[sentence], attention(batch[sentence]))
