"""explain: which way is taken and why, word for word, and what it costs."""

from dataclasses import FrozenInstanceError

import pytest
import torch

import regard

X = torch.zeros(8, 4096, 64)
SMALL = torch.zeros(3, 2)
FULL = 4 * 8 * 4096 * 4096 * 64
WORDS: dict[str, tuple[regard.AttentionMatrix, tuple[regard.Reduction, ...], str]] = {
    "product": (
        regard.attend(X, X),
        (),
        "sdpa: one fused call.\n    34.4 GFLOP (1.00 of one forward), 8 MiB held, 272 MiB read.",
    ),
    "causal-product": (
        regard.attend(X, X, mask=regard.Causal()),
        (),
        "sdpa: one fused causal call.\n"
        "    18.3 GFLOP (0.53 of one forward), 8 MiB held, 152 MiB read.",
    ),
    "window-product": (
        regard.attend(X, X, mask=regard.SlidingWindow(255, 0)),
        (),
        "sdpa: one fused call for 120 blocks of 32 rows x 288 keys along the band.\n"
        "    2.4 GFLOP (0.07 of one forward), 16.3 MiB held, 152 MiB read.",
    ),
    "refused-reduction": (
        regard.attend(SMALL, SMALL),
        (regard.Entropy(), regard.TopK(2)),
        "sweep: one sweep over 1 block of at most 3 rows; no fused kernel gives Entropy, TopK.\n"
        "    36 FLOP (0.50 of one forward), 192 bytes held, 48 bytes read.",
    ),
    "refused-scores": (
        regard.AttentionMatrix.from_scores(SMALL),
        (),
        "sweep: one sweep over 1 block of at most 3 rows; "
        "fused kernels start from query and key, not from scores.\n"
        "    12 FLOP, 84 bytes held, 44 bytes read.",
    ),
}


@pytest.mark.parametrize(("matrix", "reductions", "words"), WORDS.values(), ids=WORDS)
def test_the_way_the_reasons_and_the_costs_are_said_in_words(
    matrix: regard.AttentionMatrix, reductions: tuple[regard.Reduction, ...], words: str
) -> None:
    assert str(regard.explain(matrix, *reductions)) == words


@pytest.mark.parametrize(
    ("mask", "share"),
    [
        pytest.param(None, 0.5, id="none"),
        pytest.param(regard.Causal(), 0.25, id="causal"),
        pytest.param(regard.SlidingWindow(255, 0), 0.03, id="window"),
        pytest.param(regard.Padding(1024), 0.125, id="padding"),
    ],
)
def test_a_sweep_costs_what_the_mask_leaves_of_it(mask: regard.Mask | None, share: float) -> None:
    found = regard.explain(regard.attend(X, X, mask=mask), regard.LogSumExp())
    assert found.backend == "sweep"
    assert found.forward_flops == FULL
    assert share <= found.flops / FULL <= share + 0.04


def test_each_operand_of_a_product_is_counted() -> None:
    matrix = regard.attend(X, X)
    both = regard.explain(matrix, regard.Output(X), regard.LogSumExp())
    assert both.flops == FULL


def test_grouped_heads_read_their_keys_once() -> None:
    alone = regard.explain(regard.attend(X, X))
    grouped = regard.explain(regard.attend(X, X[:1]))
    assert grouped.flops == alone.flops
    assert grouped.read < alone.read / 4


def test_large_answers_and_masks_are_held() -> None:
    matrix = regard.attend(X, X, mask=regard.Keep(torch.ones(4096, 4096, dtype=torch.bool)))
    tile = 256 * 4096 * 5
    assert regard.explain(matrix).held == X.nbytes + tile
    top = regard.explain(regard.attend(X, X), regard.TopK(64))
    assert top.held > 8 * 4096 * 64 * 12


def test_an_explanation_is_a_value() -> None:
    found = regard.explain(regard.attend(SMALL, SMALL))
    assert found == regard.explain(regard.attend(SMALL, SMALL))
    with pytest.raises(FrozenInstanceError):
        found.backend = "dense"  # type: ignore[misc]


def test_explaining_a_long_matrix_computes_nothing_of_its_size() -> None:
    x = torch.zeros(1, 64).expand(1_000_000, 64)
    found = regard.explain(regard.attend(x, x), regard.Entropy())
    assert found.flops == 2 * 10**12 * 64


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
