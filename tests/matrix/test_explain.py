"""regard.explain: the backend, the reasons and the memory, word for word."""

from dataclasses import FrozenInstanceError

import pytest
import torch

import regard
from regard.matrix.weighted_sums import WeightedSum

X = torch.zeros(8, 4096, 64)
SMALL = torch.zeros(3, 2)
WORDS: dict[str, tuple[regard.AttentionMatrix, tuple[regard.Reduction, ...], str]] = {
    "product": (regard.attend(X, X), (), "sdpa: one fused call; 8 MiB of memory."),
    "causal-product": (
        regard.attend(X, X, mask=regard.Causal()),
        (),
        "sdpa: one fused causal call; 8 MiB of memory.",
    ),
    "window-product": (
        regard.attend(X, X, mask=regard.SlidingWindow(255, 0)),
        (),
        "sdpa: one fused call for 120 blocks of 32 rows x 288 keys along the band; "
        "16.3 MiB of memory.",
    ),
    "refused-reduction": (
        regard.attend(SMALL, SMALL),
        (regard.Entropy(), regard.TopK(2)),
        "sweep: one sweep over 1 block of at most 3 rows; 228 bytes of memory.\n"
        "    Not sdpa: no fused kernel gives Entropy, TopK.",
    ),
    "refused-scores": (
        regard.AttentionMatrix.from_scores(SMALL),
        (),
        "sweep: one sweep over 1 block of at most 3 rows; 108 bytes of memory.\n"
        "    Not sdpa: fused kernels start from query and key, not from scores.",
    ),
}


@pytest.mark.parametrize(("matrix", "reductions", "words"), WORDS.values(), ids=WORDS)
def test_the_backend_the_reasons_and_the_memory_are_stated(
    matrix: regard.AttentionMatrix, reductions: tuple[regard.Reduction, ...], words: str
) -> None:
    assert str(regard.explain(matrix, *reductions)) == words


def test_weighted_sums_of_given_scores_are_explained() -> None:
    found = regard.explain(regard.AttentionMatrix.from_scores(SMALL), WeightedSum(SMALL))
    assert (found.backend, found.refusals) == (
        "sweep",
        {"sdpa": "no fused kernel gives WeightedSum"},
    )


def test_the_memory_holds_large_answers_and_masks() -> None:
    matrix = regard.attend(X, X, mask=regard.Keep(torch.ones(4096, 4096, dtype=torch.bool)))
    tile = 256 * 4096 * 5
    assert regard.explain(matrix).memory == X.nbytes + tile
    top = regard.explain(regard.attend(X, X), regard.TopK(64))
    assert top.memory > 8 * 4096 * 64 * 12


@pytest.mark.parametrize("reduction", [regard.Entropy(), regard.TopK(64), regard.Sum(-2)], ids=repr)
def test_the_memory_of_a_sweep_does_not_grow_with_the_matrix(reduction: regard.Reduction) -> None:
    found = [
        regard.explain(regard.attend(x, x), reduction).memory
        for x in (torch.zeros(length, 1) for length in (10_000, 100_000))
    ]
    assert found[0] < 10_000 * 10_000
    assert found[1] < 10 * found[0]


def test_an_explanation_is_a_value() -> None:
    found = regard.explain(regard.attend(SMALL, SMALL))
    assert found == regard.explain(regard.attend(SMALL, SMALL))
    with pytest.raises(FrozenInstanceError):
        found.backend = "dense"  # type: ignore[misc]


def test_explaining_a_long_matrix_computes_nothing_of_its_size() -> None:
    x = torch.zeros(1, 64).expand(1_000_000, 64)
    assert regard.explain(regard.attend(x, x), regard.Entropy()).backend == "cpu"


ERRORS = {
    "no-matrix": (
        lambda: regard.explain(SMALL),  # type: ignore[arg-type]
        TypeError,
        "matrix is a Tensor; explain() needs an AttentionMatrix.\n"
        "    Make one with regard.attend(query, key).",
    ),
    "no-reduction": (
        lambda: regard.explain(regard.attend(SMALL, SMALL), regard.Entropy),  # type: ignore[arg-type]
        TypeError,
        "explain() got Entropy; each argument must be an instance of a reduction.\n"
        "    Pass for example regard.Entropy(), regard.TopK(8).",
    ),
    "misfit": (
        lambda: regard.explain(regard.attend(SMALL, SMALL), regard.TopK(9)),
        ValueError,
        "k is 9; it must be at most kv_len = 3.\n    Use topk(min(k, 3)).",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_question_says_what_is_wrong(call, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text
