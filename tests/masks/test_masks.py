"""Masks: what they allow, what they say of rows, how they combine and print."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import MASKS
from regard.masks import And, Or, as_mask
from regard.masks.mask import PositionLimits
from regard.scores.box import Box

CPU = torch.device("cpu")
SHAPES = [(5, 5), (1, 7), (7, 1), (3, 8), (8, 3), (2, 1, 4, 6), (3, 2, 6, 4)]
KINDS = [name for name in MASKS if name != "none"]
kinds = pytest.mark.parametrize("kind", KINDS)


def bound(kind: str, shape: tuple[int, ...]) -> tuple[regard.Mask, Tensor]:
    """The mask fitted to a matrix of this shape, and what it allows by the oracle."""
    size = torch.Size(shape)
    mask, allowed = MASKS[kind]
    right = allowed(size)
    assert right is not None
    return as_mask(mask(size)).bind(size, CPU), right.expand(size)


def whole(shape: tuple[int, ...]) -> Box:
    return Box(tuple(slice(0, n) for n in shape[:-2]), slice(0, shape[-2]), slice(0, shape[-1]))


@kinds
def test_a_mask_allows_what_the_oracle_allows(kind: str, subtests: pytest.Subtests) -> None:
    for shape in SHAPES:
        with subtests.test(str(shape)):
            mask, right = bound(kind, shape)
            block = mask.block(whole(shape), torch.Size(shape), CPU)
            assert torch.equal(block.expand(shape), right)


@kinds
def test_what_a_mask_says_of_some_rows_is_true(kind: str, subtests: pytest.Subtests) -> None:
    for shape in SHAPES:
        mask, right = bound(kind, shape)
        with subtests.test(str(shape)):
            for first, last in itertools.combinations(range(shape[-2] + 1), 2):
                rows = slice(first, last)
                some, every = mask.key_bounds(whole(shape).leading, rows, torch.Size(shape))
                assert 0 <= some.start <= some.stop <= shape[-1], rows
                assert 0 <= every.start <= every.stop <= shape[-1], rows
                assert bool(right[..., rows, every].all()), rows
                outside = right[..., rows, :].clone()
                outside[..., some] = False
                assert not bool(outside.any()), rows


@pytest.mark.sampled(7)
@kinds
def test_the_mask_of_some_rows_is_those_rows_of_the_mask(
    kind: str, subtests: pytest.Subtests
) -> None:
    for shape in SHAPES:
        mask, right = bound(kind, shape)
        with subtests.test(str(shape)):
            for first, last in itertools.combinations(range(shape[-2] + 1), 2):
                size = torch.Size((*shape[:-2], last - first, shape[-1]))
                part = mask.rows(range(first, last), shape[-2]).bind(size, CPU)
                block = part.block(whole(size), size, CPU)
                assert torch.equal(block.expand(size), right[..., first:last, :]), (first, last)


def by_limits(limits: PositionLimits, shape: tuple[int, ...]) -> Tensor:
    """The keys that limits by position allow, read as the kernels read them."""
    q_idx, kv_idx = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    allowed = torch.ones(shape, dtype=torch.bool)
    if limits.low is not None:
        allowed = allowed & (kv_idx - q_idx >= limits.low)
    if limits.high is not None:
        allowed = allowed & (kv_idx - q_idx <= limits.high)
    if limits.lengths is not None:
        allowed = allowed & (kv_idx < limits.lengths)
    if limits.documents is not None:
        position = q_idx[:, 0] + limits.start + shape[-1] - limits.q_len
        ids = limits.documents.ids
        of_query = ids[..., position.clamp(min=0)].mT.masked_fill(position[:, None] < 0, -1)
        allowed = allowed & (of_query == ids)
    return allowed


@kinds
def test_limits_by_position_are_the_whole_mask(kind: str, subtests: pytest.Subtests) -> None:
    for shape in SHAPES:
        mask, right = bound(kind, shape)
        size = torch.Size((*shape[:-2], shape[-2] - shape[-2] // 3, shape[-1]))
        part = mask.rows(range(shape[-2] // 3, shape[-2]), shape[-2]).bind(size, CPU)
        for each, of in ((mask, right), (part, right[..., shape[-2] // 3 :, :])):
            limits = each.limits(of.shape)
            assert (limits is None) == (kind not in WITH_LIMITS)
            if limits is not None:
                with subtests.test(str(of.shape)):
                    assert torch.equal(by_limits(limits, of.shape), of)


WITH_LIMITS = {
    *("causal", "causal-top-left", "window-left", "window-both", "window-right", "padding"),
    *("causal-and-padding", "documents", "scattered-documents", "rows"),
}


@pytest.mark.parametrize(
    ("mask", "rows", "columns"),
    [
        pytest.param(regard.Causal(), slice(2, 4), slice(0, 4), id="causal"),
        pytest.param(regard.SlidingWindow(1, 0), slice(4, 6), slice(3, 6), id="window"),
        pytest.param(regard.SlidingWindow(1, 2), slice(4, 6), slice(3, 8), id="window-both"),
        pytest.param(regard.Padding(3), slice(0, 9), slice(0, 3), id="padding"),
        pytest.param(
            regard.Causal() & regard.SlidingWindow(2, 2), slice(4, 6), slice(2, 6), id="both"
        ),
        pytest.param(
            regard.Padding(2) & regard.SlidingWindow(0, 0), slice(4, 6), slice(4, 4), id="disjoint"
        ),
        pytest.param(regard.PrefixLM(4), slice(0, 2), slice(0, 4), id="prefix"),
        pytest.param(regard.PrefixLM(4), slice(4, 6), slice(0, 6), id="after-the-prefix"),
        pytest.param(
            regard.Documents([0, 0, 1, 1, 1, 2, 2, 2, 2]), slice(2, 4), slice(2, 5), id="document"
        ),
        pytest.param(
            regard.Documents([0, 0, 1, 1, 1, 2, 2, 2, 2]), slice(4, 6), slice(2, 9), id="documents"
        ),
        pytest.param(
            regard.Documents([3, 1, 1, 3, 1, 1, 2, 2, 2]), slice(4, 5), slice(1, 6), id="in-pieces"
        ),
        pytest.param(
            regard.SlidingWindow(1, 0) | regard.Padding(2), slice(4, 6), slice(0, 6), id="either"
        ),
        pytest.param(
            regard.Padding(0) | regard.SlidingWindow(1, 0),
            slice(4, 6),
            slice(3, 6),
            id="nothing-or",
        ),
        pytest.param(~regard.Causal(), slice(2, 4), slice(3, 9), id="not-causal"),
        pytest.param(~regard.Padding(9), slice(2, 4), slice(9, 9), id="not-everything"),
        pytest.param(~regard.SlidingWindow(1, 1), slice(4, 5), slice(0, 9), id="not-a-window"),
    ],
)
def test_a_mask_names_the_narrowest_columns(mask: regard.Mask, rows: slice, columns: slice) -> None:
    shape = torch.Size((9, 9))
    assert mask.bind(shape, CPU).key_bounds((), rows, shape).any == columns


@pytest.mark.parametrize(
    ("mask", "rows", "columns"),
    [
        pytest.param(regard.Causal(), slice(4, 6), slice(0, 5), id="causal"),
        pytest.param(regard.SlidingWindow(5, 5), slice(2, 4), slice(0, 8), id="window"),
        pytest.param(regard.Padding(6), slice(0, 9), slice(0, 6), id="padding"),
        pytest.param(regard.PrefixLM(4), slice(0, 2), slice(0, 4), id="prefix"),
        pytest.param(regard.PrefixLM(4), slice(5, 7), slice(0, 6), id="after-the-prefix"),
        pytest.param(
            regard.Documents([0, 0, 1, 1, 1, 2, 2, 2, 2]), slice(2, 4), slice(2, 5), id="document"
        ),
        pytest.param(
            regard.Documents([3, 1, 1, 3, 1, 1, 2, 2, 2]), slice(4, 6), slice(4, 6), id="a-piece"
        ),
        pytest.param(
            regard.Causal() | regard.Padding(7), slice(4, 6), slice(0, 7), id="either-touching"
        ),
        pytest.param(
            regard.SlidingWindow(0, 1) | regard.Padding(1), slice(4, 5), slice(4, 6), id="either"
        ),
        pytest.param(~regard.Causal(), slice(2, 4), slice(4, 9), id="not-causal"),
        pytest.param(~regard.SlidingWindow(1, 1), slice(5, 6), slice(0, 4), id="not-a-window"),
        pytest.param(~regard.Padding(0), slice(5, 6), slice(0, 9), id="not-nothing"),
    ],
)
def test_a_mask_names_the_widest_free_columns(
    mask: regard.Mask, rows: slice, columns: slice
) -> None:
    shape = torch.Size((9, 9))
    assert mask.bind(shape, CPU).key_bounds((), rows, shape).all == columns


def test_a_causal_matrix_aligns_the_last_query_with_the_last_key() -> None:
    matrix = regard.attend(torch.zeros(2, 1), torch.zeros(3, 1), mask=regard.Causal())
    assert torch.equal(matrix.to_dense() > 0, torch.tensor([[True, True, False], [True] * 3]))


@pytest.mark.parametrize(
    ("mask", "allowed"),
    [
        pytest.param(regard.Padding([3, 1]), [[1, 1, 1], [1, 0, 0]], id="padding"),
        pytest.param(regard.Documents([[0, 0, 0], [0, 1, 1]]), [[1, 1, 1], [1, 0, 0]], id="ids"),
    ],
)
def test_numbers_for_a_matrix_without_a_batch_are_for_its_heads(
    mask: regard.Mask, allowed: list[list[int]]
) -> None:
    heads = torch.tensor(allowed, dtype=torch.bool)
    assert torch.equal(mask.to_dense(2, 3, 3)[:, 0], heads)


def test_numbers_of_a_mask_are_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        mask = regard.Padding(2) & regard.Documents([0, 0, 1])
    assert torch.equal(mask.to_dense(3, 3).sum(-1), torch.tensor([2, 2, 0]))


def test_a_top_left_causal_matrix_is_what_is_causal_means_in_pytorch() -> None:
    query, key, value = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.eye(3)[None, None]
    matrix = regard.attend(query, key, mask=regard.Causal(align="top-left"))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(matrix.to_dense(), expected)  # two float32 kernels: default


def test_a_window_of_mistral_has_as_many_keys_as_its_name_says() -> None:
    x = torch.zeros(9, 1)
    matrix = regard.attend(x, x, mask=regard.SlidingWindow(4 - 1, 0))
    assert int((matrix[8] > 0).sum()) == 4


def test_keep_of_a_tensor_and_drop_of_its_opposite_are_one_mask() -> None:
    x, allowed = torch.randn(5, 2), torch.rand(5, 5) < 0.5
    keep = regard.attend(x, x, mask=regard.Keep(allowed))
    drop = regard.attend(x, x, mask=regard.Drop(~allowed))
    assert torch.equal(keep.to_dense(), drop.to_dense())


def test_drop_means_what_the_mask_of_multihead_attention_means() -> None:
    dropped = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    layer = torch.nn.MultiheadAttention(4, 1, bias=False)
    x = torch.randn(3, 4)
    _, weights = layer(x, x, x, attn_mask=dropped)
    query, key, _ = (x @ layer.in_proj_weight.mT).chunk(3, -1)
    matrix = regard.attend(query, key, mask=regard.Drop(dropped))
    torch.testing.assert_close(matrix.to_dense(), weights)  # two float32 kernels: default


def test_a_bool_tensor_is_a_keep_mask() -> None:
    mask = torch.tensor([True, False])
    kept = as_mask(mask)
    assert isinstance(kept, regard.Keep)
    assert kept.mask is mask


@kinds
def test_both_masks_must_allow(kind: str, subtests: pytest.Subtests) -> None:
    shape = (2, 2, 6, 6)
    one, allowed_by_one = bound(kind, shape)
    for other in ("causal", "window-both", "padding", "bool-keys"):
        with subtests.test(other):
            two, allowed_by_two = bound(other, shape)
            matrix = regard.AttentionMatrix.from_scores(torch.zeros(shape), mask=one & two)
            right = oracle.softmax(torch.zeros(shape), allowed_by_one & allowed_by_two)
            torch.testing.assert_close(matrix.to_dense(), right.weights)  # one division: default


@pytest.mark.parametrize(
    "combine",
    [
        pytest.param(lambda t: regard.Causal() & t, id="mask-and-tensor"),
        pytest.param(lambda t: t & regard.Causal(), id="tensor-and-mask"),
        pytest.param(lambda t: regard.Causal() | t, id="mask-or-tensor"),
        pytest.param(lambda t: t | regard.Causal(), id="tensor-or-mask"),
    ],
)
def test_a_mask_combines_with_a_bool_tensor(combine: Callable[[Tensor], regard.Mask]) -> None:
    assert isinstance(combine(torch.ones(3, 3, dtype=torch.bool)), And | Or)


def test_a_mask_that_is_turned_round_twice_is_itself() -> None:
    mask = regard.Causal()
    assert ~~mask is mask


def test_a_prefix_and_a_causal_text_are_causal_or_padding() -> None:
    prefix = regard.PrefixLM([3, 1]).to_dense(2, 1, 4, 5)
    assert torch.equal(prefix, (regard.Causal() | regard.Padding([3, 1])).to_dense(2, 1, 4, 5))


def test_the_last_query_belongs_to_the_document_of_the_last_key() -> None:
    allowed = regard.Documents([5, 5, 8, 8]).to_dense(3, 4)
    assert allowed.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_a_query_before_the_first_key_belongs_to_no_document() -> None:
    assert regard.Documents([5, 8]).to_dense(3, 2).int().tolist() == [[0, 0], [1, 0], [0, 1]]


def test_documents_do_not_change_when_their_tensor_does() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    matrix = regard.attend(torch.zeros(4, 1), torch.zeros(4, 1), mask=regard.Documents(ids))
    ids.zero_()
    assert (matrix[0] > 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_documents_are_whole_numbers_of_any_size(kind: torch.dtype) -> None:
    ids = torch.tensor([1, 0, 1], dtype=kind)
    assert regard.Documents(ids).to_dense(3, 3)[0].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([3, 1], id="list"),
        pytest.param((3, 1), id="tuple"),
        pytest.param(torch.tensor([3, 1]), id="tensor"),
        pytest.param(torch.tensor([3, 1], dtype=torch.int32), id="int32"),
    ],
)
def test_padding_takes_lengths_in_any_usual_form(lengths: Tensor) -> None:
    x = torch.zeros(2, 1, 3, 1)
    matrix = regard.attend(x, x, mask=regard.Padding(lengths))
    assert (matrix[:, 0, 0] > 0).sum(-1).tolist() == [3, 1]


def test_one_length_stands_for_every_sequence() -> None:
    x = torch.zeros(2, 1, 3, 1)
    matrix = regard.attend(x, x, mask=regard.Padding(2))
    assert (matrix[:, 0, 0] > 0).sum(-1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (regard.Causal(), "Causal()"),
        (regard.Causal(align="top-left"), "Causal(align='top-left')"),
        (regard.SlidingWindow(3, 1), "SlidingWindow(3, 1)"),
        (regard.Padding(4), "Padding(4)"),
        (regard.Padding([4, 2]), "Padding([4, 2])"),
        (regard.Padding([1] * 9), "Padding(9 lengths)"),
        (regard.Keep(torch.ones(2, 3, dtype=torch.bool)), "Keep((2, 3))"),
        (regard.Drop(torch.ones(3, dtype=torch.bool)), "Keep((3,))"),
        (regard.Causal() & regard.Padding(4), "Causal() & Padding(4)"),
        (regard.PrefixLM([4, 2]), "Causal() | Padding([4, 2])"),
        (regard.Documents([0, 0, 1]), "Documents([0, 0, 1])"),
        (regard.Documents([[0, 0], [0, 1]]), "Documents([[0, 0], [0, 1]])"),
        (regard.Documents(range(17)), "Documents(ids of shape (17,))"),
        (regard.Causal() | regard.Padding(4), "Causal() | Padding(4)"),
        (
            (regard.Causal() | regard.Padding(4)) & regard.SlidingWindow(1, 1),
            "(Causal() | Padding(4)) & SlidingWindow(1, 1)",
        ),
        (
            regard.Causal() & regard.Padding(4) | regard.SlidingWindow(1, 1),
            "Causal() & Padding(4) | SlidingWindow(1, 1)",
        ),
        (~regard.Causal() & regard.Padding(4), "~Causal() & Padding(4)"),
        (~(regard.Causal() & regard.Padding(4)), "~(Causal() & Padding(4))"),
        (~(regard.Causal() | regard.Padding(4)), "~(Causal() | Padding(4))"),
        (regard.MaskMod(torch.maximum), "MaskMod(maximum)"),
    ],
    ids=str,
)
def test_a_mask_prints_as_it_is_written(mask: regard.Mask, text: str) -> None:
    assert repr(mask) == text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "pairs" not in kind])
def test_the_mask_of_one_matrix_fits_another_of_its_shape(kind: str) -> None:
    first = regard.attend(
        *torch.randn(2, 2, 3, 5, 4), mask=MASKS[kind][0](torch.Size((2, 3, 5, 5)))
    )
    second = regard.attend(*torch.zeros(2, 2, 3, 5, 4), mask=first.mask)
    assert torch.equal(second.to_dense() > 0, first.to_dense() > 0)
