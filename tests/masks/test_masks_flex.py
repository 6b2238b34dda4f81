"""Masks from FlexAttention and for it: mask_mod, BlockMask, to_block_mask."""

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

import oracle
import regard
from cases import MASKS, in_turn
from regard.backends import sweep as blocks
from regard.masks import as_mask

KINDS = sorted(MASKS.keys() - {"none"})
SHAPE = torch.Size((2, 3, 13, 11))
DOCUMENT = torch.arange(64) // 5


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def same_document(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def by_batch_and_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx + 2 * h + b) % 3 != kv_idx % 3


def matrix_of(mask: object, *shape: int) -> regard.AttentionMatrix:
    return regard.AttentionMatrix.from_scores(torch.zeros(shape), mask=mask)


def allowed_by(mask: object, *shape: int) -> Tensor:
    """By the matrix, block by block."""
    return matrix_of(mask, *shape).to_dense() > 0


@pytest.mark.parametrize("function", [causal, same_document, by_batch_and_head])
@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (2, 3, 7, 5), (2, 2, 3, 5, 5)], ids=str)
def test_a_mask_mod_means_what_it_means_in_flex_attention(
    function: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    assert torch.equal(allowed_by(function, *shape), oracle.pointwise(function, shape))


def test_a_mask_mod_runs_on_many_threads_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 64)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        sums = matrix_of(same_document, 2, 3, 37, 41).sum(-2)
    finally:
        torch.set_num_threads(threads)
    right = oracle.softmax(
        torch.zeros(2, 3, 37, 41), oracle.pointwise(same_document, (2, 3, 37, 41))
    )
    oracle.assert_close(sums, right.weights.sum(-2), 1e-5)  # sums of tens of float32 weights


@pytest.mark.parametrize(
    "index",
    [
        pytest.param((1,), id="batch"),
        pytest.param((1, 2), id="batch-and-head"),
        pytest.param((slice(None), slice(1, 3)), id="some-heads"),
        pytest.param((slice(None), 2), id="one-head"),
        pytest.param((slice(1, 2), slice(0, 3, 2)), id="steps"),
    ],
)
def test_a_part_of_a_matrix_keeps_the_b_and_h_of_the_whole(index: tuple[int | slice, ...]) -> None:
    part = matrix_of(by_batch_and_head, *SHAPE)[(*index, ...)]
    assert torch.equal(part.to_dense() > 0, oracle.pointwise(by_batch_and_head, SHAPE)[index])


def test_the_mask_of_a_part_keeps_its_b_and_h_in_another_matrix() -> None:
    part = matrix_of(by_batch_and_head, *SHAPE)[1, 2]
    again = allowed_by(part.mask, *SHAPE[-2:])
    assert torch.equal(again, oracle.pointwise(by_batch_and_head, SHAPE)[1, 2])


def test_a_mask_mod_that_does_not_ask_for_heads_is_asked_once_for_all() -> None:
    mask = regard.MaskMod(causal).bind(SHAPE, torch.device("cpu"))
    everywhere = regard.scores.box.Box(
        tuple(slice(0, n) for n in SHAPE[:2]), slice(0, SHAPE[2]), slice(0, SHAPE[3])
    )
    assert mask.block(everywhere, SHAPE, torch.device("cpu")).shape == (1, 1, 13, 11)


@pytest.mark.parametrize(
    "combine",
    [
        pytest.param(lambda: regard.Causal() & same_document, id="mask-and-function"),
        pytest.param(lambda: same_document & regard.Causal(), id="function-and-mask"),
        pytest.param(
            lambda: regard.MaskMod(same_document) & regard.MaskMod(causal), id="two-functions"
        ),
    ],
)
def test_a_mask_mod_combines_with_masks(combine: Callable[[], regard.Mask]) -> None:
    right = oracle.pointwise(same_document, (9, 9)) & oracle.causal(9, 9)
    assert torch.equal(allowed_by(combine(), 9, 9), right)


def within(width: int, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx).abs() <= width


def test_a_callable_of_any_kind_is_a_mask_mod() -> None:
    right = oracle.window(7, 7, 2, 2)
    assert torch.equal(allowed_by(functools.partial(within, 2), 7, 7), right)


# BlockMask


def block_mask(
    function: Callable[..., Tensor], *shape: int, batch: int | None = None, heads: int | None = None
) -> BlockMask:
    return create_block_mask(function, batch, heads, *shape, device="cpu", BLOCK_SIZE=4)


@pytest.mark.parametrize("function", [causal, same_document])
@pytest.mark.parametrize("shape", [(5, 7), (3, 9, 9), (2, 3, 13, 11)], ids=str)
def test_a_block_mask_for_all_heads_means_its_mask_mod(
    function: Callable[..., Tensor], shape: tuple[int, ...]
) -> None:
    mask = block_mask(function, *shape[-2:])
    assert torch.equal(allowed_by(mask, *shape), oracle.pointwise(function, shape))


def test_a_block_mask_of_each_head_means_its_mask_mod() -> None:
    mask = block_mask(by_batch_and_head, 13, 11, batch=2, heads=3)
    assert torch.equal(allowed_by(mask, *SHAPE), oracle.pointwise(by_batch_and_head, SHAPE))


@pytest.mark.parametrize(
    ("function", "some", "every"),
    [
        pytest.param(causal, slice(0, 12), slice(0, 8), id="causal"),
        pytest.param(functools.partial(within, 3), slice(4, 16), slice(8, 12), id="window"),
    ],
)
def test_the_blocks_of_a_block_mask_say_which_columns_some_rows_see(
    function: Callable[..., Tensor], some: slice, every: slice
) -> None:
    size = torch.Size((1, 1, 16, 16))
    mask = as_mask(block_mask(function, 16, 16)).bind(size, torch.device("cpu"))
    leading = (slice(0, 1), slice(0, 1))
    assert mask.key_bounds(leading, slice(8, 12), size) == (some, every)


def listed_blocks(kv_indices: list[list[int]], counts: list[int]) -> BlockMask:
    return BlockMask.from_kv_blocks(
        torch.tensor(counts, dtype=torch.int32)[None, None],
        torch.tensor(kv_indices, dtype=torch.int32)[None, None],
        BLOCK_SIZE=2,
    )


def test_a_block_that_a_block_mask_does_not_list_is_not_attended_to() -> None:
    mask = listed_blocks([[1, 0], [0, 1]], [1, 2])
    assert allowed_by(mask, 4, 4).int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1] * 4, [1] * 4]


def test_rows_of_no_blocks_attend_to_nothing() -> None:
    assert not bool(allowed_by(listed_blocks([[0, 1], [0, 1]], [0, 0]), 4, 4).any())


# For FlexAttention


@in_turn(kind=KINDS, size=[3, 4, 128])
def test_a_block_mask_of_a_mask_is_what_flex_attention_makes_of_the_dense_one(
    kind: str, size: int
) -> None:
    mask, allowed = MASKS[kind]
    right = allowed(SHAPE)
    assert right is not None
    dense = right.expand(SHAPE)
    expected = create_block_mask(
        lambda b, h, q_idx, kv_idx: dense[b, h, q_idx, kv_idx],
        *SHAPE, device="cpu", BLOCK_SIZE=size,
    )  # fmt: skip
    made = as_mask(mask(SHAPE)).to_block_mask(*SHAPE, block_size=size)
    assert made.shape[-2:] == expected.shape[-2:]
    assert torch.equal(listed(made), listed(expected).expand(2, 3, -1, -1))


def listed(mask: BlockMask) -> Tensor:
    """1 for each block that is partial, 2 for each that is full, (2, 3, rows, columns)."""
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    grid = torch.zeros(*mask.kv_indices.shape, dtype=torch.int64)
    for kind, counts, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for *row, count in [(*at, int(counts[tuple(at)])) for at in where(counts)]:
            grid[(*row, indices[tuple(row)][:count].long())] += kind
    return grid.expand(2, 3, -1, -1)


def where(counts: Tensor) -> list[list[int]]:
    return torch.ones_like(counts).nonzero().tolist()


@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_a_mask_and_its_block_mask_are_one_mask(data: st.DataObject, kind: str) -> None:
    leading = data.draw(st.lists(st.integers(1, 3), max_size=2))
    shape = torch.Size((*leading, data.draw(st.integers(1, 11)), data.draw(st.integers(1, 11))))
    mask = ~as_mask(MASKS[kind][0](shape)) if data.draw(st.booleans()) else MASKS[kind][0](shape)
    matrix = matrix_of(mask, *shape)
    assert matrix.mask is not None
    again = matrix.mask.to_block_mask(block_size=data.draw(st.integers(1, 5)))
    assert torch.equal(allowed_by(again, *shape), matrix.mask.to_dense())


def test_the_block_mask_of_a_part_is_that_of_its_heads() -> None:
    part = matrix_of(by_batch_and_head, *SHAPE)[1, 1:]
    assert part.mask is not None
    again = part.mask.to_block_mask(block_size=4)
    right = oracle.pointwise(by_batch_and_head, SHAPE)[1, 1:]
    assert torch.equal(allowed_by(again, 2, 13, 11), right)


@pytest.mark.parametrize("blocked", [False, True], ids=["mask_mod", "BlockMask"])
def test_the_block_mask_of_one_head_keeps_b_of_every_batch_entry(blocked: bool) -> None:
    free = torch.tensor([True, False, True])

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) | free[b]

    mask = create_block_mask(mask_mod, 3, 2, 4, 4, device="cpu") if blocked else mask_mod
    part = matrix_of(mask, 3, 2, 4, 4)[:, 0].mask
    assert part is not None
    again = create_mask(part.to_block_mask().mask_mod, 1, 3, 4, 4, device="cpu")
    assert torch.equal(again[0], part.to_dense())


def test_a_block_mask_has_one_matrix_where_all_are_the_same() -> None:
    assert regard.Padding([3, 5]).to_block_mask(2, 8, 5, 5).shape == (2, 1, 5, 5)


# FlexAttention runs uncompiled here and says so; only its answer is wanted.
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(regard.Causal(), id="causal"),
        pytest.param(regard.SlidingWindow(2, 1), id="window"),
        pytest.param(regard.PrefixLM([5, 2]), id="prefix"),
        pytest.param(
            regard.Causal() & regard.Documents([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]), id="documents"
        ),
        pytest.param(~regard.Padding([3, 9]) | regard.SlidingWindow(0, 0), id="not-and-or"),
        pytest.param(regard.Keep(torch.ones(13, 11).tril().bool()), id="keep"),
        pytest.param(regard.MaskMod(by_batch_and_head), id="mask-mod"),
    ],
)
def test_flex_attention_with_the_block_mask_is_the_product_with_the_matrix(
    mask: regard.Mask,
) -> None:
    query, key, value = (torch.randn(2, 3, n, 8) for n in (13, 11, 11))
    matrix = regard.attend(query, key, mask=mask)
    assert matrix.mask is not None
    output = flex_attention(query, key, value, block_mask=matrix.mask.to_block_mask())
    seeing = oracle.attend(query, key, allowed=matrix.mask.to_dense()).weights.sum(-1) > 0
    assert isinstance(output, Tensor)
    torch.testing.assert_close(  # two float32 ways to one product: default
        torch.where(seeing[..., None], output, 0.0), matrix @ value
    )


@pytest.mark.full
def test_a_block_mask_of_a_long_mask_is_made_in_little_memory() -> None:
    """2^17 tokens: the dense mask would be 16 GiB."""
    mask = regard.SlidingWindow(100, 0).to_block_mask(2**17, 2**17, block_size=1024)
    assert int(mask.kv_num_blocks.sum()) == 2 * 128 - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_mask_for_one_head_serves_every_head_as_in_flex_attention(kind: str) -> None:
    size = torch.Size((1, 1, 7, 9))
    mask = as_mask(MASKS[kind][0](size))
    again = allowed_by(mask.to_block_mask(*size, block_size=4), 2, 3, 7, 9)
    assert torch.equal(again, mask.to_dense(*size).expand(2, 3, 7, 9))


def test_blocks_may_be_larger_than_the_matrix() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        one, 0 * one[None], BLOCK_SIZE=2**30, mask_mod=causal, seq_lengths=(5, 5)
    )
    assert torch.equal(allowed_by(mask, 5, 5), oracle.causal(5, 5))
