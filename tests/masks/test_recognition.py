"""A dense mask of a model is found to be the mask that it is: exactly, by name, and cheaply."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from drawn_masks import masks
from regard.masks.recognise import recognised, split

LEAST = torch.finfo(torch.float32).min


def shape_of(*axes: int) -> torch.Size:
    return torch.Size(axes)


def dense(mask: regard.Mask | None, shape: torch.Size) -> Tensor:
    return torch.ones(shape, dtype=torch.bool) if mask is None else mask.to_dense(*shape)


def name(mask: regard.Mask | None) -> str:
    return "None" if mask is None else mask.text


def keys(*lengths: int, kv_len: int) -> Tensor:
    """Right padding, (batch, 1, 1, kv_len)."""
    return (torch.arange(kv_len) < torch.tensor(lengths)[:, None])[:, None, None, :]


IDS = [[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]]
SAME = oracle.documents(IDS, torch.Size((2, 1, 7, 7)))
LEFT = keys(7, 4, kv_len=7).flip(-1)

# A dense mask of a model, the shape of its matrix, and what it is.
FAMILIES = {
    "all": (torch.ones(5, 7), (2, 3, 5, 7), "None"),
    "causal": (oracle.causal(7, 7), (2, 3, 7, 7), "Causal()"),
    "causal, no batch": (oracle.causal(7, 7), (7, 7), "Causal()"),
    "causal, a cache": (oracle.causal(4, 7), (2, 3, 4, 7), "Causal()"),
    "causal, more queries": (oracle.causal(7, 4), (2, 3, 7, 4), "Causal()"),
    "top-left": (oracle.causal_top_left(4, 7), (2, 3, 4, 7), "Causal(align='top-left')"),
    "window": (oracle.window(7, 7, 2, 0), (2, 3, 7, 7), "SlidingWindow(2, 0)"),
    "window, both sides": (oracle.window(7, 7, 2, 1), (2, 3, 7, 7), "SlidingWindow(2, 1)"),
    "window, a cache": (oracle.window(3, 7, 2, 0), (2, 3, 3, 7), "SlidingWindow(2, 0)"),
    "one query, a window": (oracle.window(1, 7, 2, 0), (2, 3, 1, 7), "SlidingWindow(2, 0)"),
    "window, nothing seen": (
        oracle.window(7, 3, 1, 0) & keys(3, 3, kv_len=3),
        (2, 3, 7, 3),
        "SlidingWindow(1, 0)",
    ),
    "own key": (torch.eye(7), (2, 3, 7, 7), "SlidingWindow(0, 0)"),
    "padding": (keys(5, 3, kv_len=7), (2, 3, 4, 7), "Padding([5, 3])"),
    "padding, written out": (
        keys(5, 3, kv_len=7).expand(2, 3, 4, 7).contiguous(),
        (2, 3, 4, 7),
        "Padding([5, 3])",
    ),
    "padding, 256 rows": (
        keys(5, kv_len=7).expand(1, 1, 256, 7).contiguous(),
        (2, 3, 256, 7),
        "Padding([5])",
    ),
    "padding, alike": (keys(5, 5, kv_len=7), (2, 3, 4, 7), "Padding([5])"),
    "padding, of heads": (
        keys(5, 4, 3, kv_len=7)[:, 0][None],
        (2, 3, 4, 7),
        "Padding([5, 4, 3])",
    ),
    "nobody": (torch.zeros(4, 7), (2, 3, 4, 7), "Padding([0])"),
    "left padding": (LEFT, (2, 3, 5, 7), "Keep((2, 1, 1, 7))"),
    "causal and padding": (
        oracle.causal(7, 7) & keys(7, 4, kv_len=7),
        (2, 3, 7, 7),
        "Causal() & Padding([7, 4])",
    ),
    "causal and left padding": (
        oracle.causal(7, 7) & LEFT,
        (2, 3, 7, 7),
        "Causal() & Keep((2, 1, 1, 7))",
    ),
    "window and padding": (
        oracle.window(7, 7, 2, 0) & keys(7, 4, kv_len=7),
        (2, 3, 7, 7),
        "SlidingWindow(2, 0) & Padding([7, 4])",
    ),
    "window and holes": (
        oracle.window(7, 7, 2, 0) & torch.tensor([1, 1, 0, 1, 0, 0, 1]).bool(),
        (2, 3, 7, 7),
        "SlidingWindow(2, 0) & Keep((1, 1, 1, 7))",
    ),
    "rows": (LEFT.mT, (2, 3, 7, 5), "Keep((2, 1, 7, 1))"),
    "rows, written out": (LEFT.mT.expand(2, 3, 7, 5).clone(), (2, 3, 7, 5), "Keep((2, 1, 7, 1))"),
    "rows and keys": (
        LEFT & LEFT.mT,
        (2, 3, 7, 7),
        "Keep((2, 1, 1, 7)) & Keep((2, 1, 7, 1))",
    ),
    "causal, rows and keys": (
        oracle.causal(7, 7) & keys(7, 4, kv_len=7) & keys(7, 4, kv_len=7).mT,
        (2, 3, 7, 7),
        "Causal() & Keep((2, 1, 7, 1))",
    ),
    "prefix": (
        oracle.causal(7, 7) | keys(3, 5, kv_len=7),
        (2, 3, 7, 7),
        "Causal() | Padding([3, 5])",
    ),
    "prefix and padding": (
        (oracle.causal(7, 7) | keys(3, 3, kv_len=7)) & keys(7, 6, kv_len=7),
        (2, 3, 7, 7),
        "(Causal() | Padding([3])) & Padding([7, 6])",
    ),
    "documents": (SAME, (2, 3, 7, 7), "Documents([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])"),
    "documents, alike": (SAME[0], (2, 3, 7, 7), "Documents([0, 0, 0, 1, 1, 2, 2])"),
    "documents and causal": (
        SAME[0] & oracle.causal(7, 7),
        (2, 3, 7, 7),
        "Documents([0, 0, 0, 1, 1, 2, 2]) & Causal()",
    ),
    "documents and causal, a cache": (
        (SAME[0] & oracle.causal(7, 7))[:, 2:],
        (2, 3, 5, 7),
        "Documents([0, 0, 0, 1, 1, 2, 2]) & Causal()",
    ),
    "documents and a window": (
        SAME[1] & oracle.window(7, 7, 2, 0),
        (2, 3, 7, 7),
        "Documents([0, 1, 1, 1, 1, 1, 2]) & SlidingWindow(2, 0)",
    ),
    "documents, what comes after": (
        SAME[0] & oracle.window(7, 7, 0, 6),
        (2, 3, 7, 7),
        "Documents([0, 0, 0, 1, 1, 2, 2]) & SlidingWindow(0, 2)",
    ),
    "of no kind": (
        oracle.causal(7, 7) & (torch.arange(7) != torch.arange(7)[:, None] - 2),
        (2, 3, 7, 7),
        "Keep((1, 1, 7, 7))",
    ),
    "of no kind, repeated": (
        (torch.arange(35).reshape(1, 1, 5, 7) % 3 != 0).expand(2, 3, 5, 7).contiguous(),
        (2, 3, 5, 7),
        "Keep((1, 1, 5, 7))",
    ),
    "of no kind, of heads": (
        (torch.arange(105).reshape(1, 3, 5, 7) % 4 != 0).expand(2, 3, 5, 7).contiguous(),
        (2, 3, 5, 7),
        "Keep((1, 3, 5, 7))",
    ),
}


@pytest.mark.parametrize(("mask", "axes", "known"), FAMILIES.values(), ids=FAMILIES)
def test_a_dense_mask_is_named_for_what_it_is(
    mask: Tensor, axes: tuple[int, ...], known: str
) -> None:
    assert name(recognised(mask.bool(), shape_of(*axes))) == known


@pytest.mark.parametrize(("mask", "axes", "known"), FAMILIES.values(), ids=FAMILIES)
def test_what_is_found_equals_the_dense_mask(
    mask: Tensor, axes: tuple[int, ...], known: str
) -> None:
    shape = shape_of(*axes)
    assert torch.equal(dense(recognised(mask.bool(), shape), shape), mask.bool().expand(shape))


@pytest.mark.parametrize(("mask", "axes", "known"), FAMILIES.values(), ids=FAMILIES)
def test_a_mask_with_one_entry_changed_is_still_equal(
    mask: Tensor, axes: tuple[int, ...], known: str
) -> None:
    shape = shape_of(*axes)
    changed = mask.bool().expand(shape).clone(memory_format=torch.contiguous_format)
    changed.view(-1)[changed.numel() // 2] ^= True
    assert torch.equal(dense(recognised(changed, shape), shape), changed)


@st.composite
def joined(draw: st.DrawFn) -> tuple[Tensor, torch.Size]:
    """Masks as models have them, several at once, each drawn or not; sometimes one entry is off."""
    shape = torch.Size(draw(st.tuples(*(st.integers(1, n) for n in (3, 2, 12, 20)))))
    batch, _, q_len, kv_len = shape
    bands = (
        torch.ones(q_len, kv_len, dtype=torch.bool),
        oracle.causal(q_len, kv_len),
        oracle.causal_top_left(q_len, kv_len),
        oracle.window(q_len, kv_len, draw(st.integers(0, 9)), draw(st.integers(0, 9))),
    )
    mask = draw(st.sampled_from(bands)).expand(shape).clone()
    lengths = draw(st.lists(st.integers(0, kv_len), min_size=batch, max_size=batch))
    padding = keys(*lengths, kv_len=kv_len)
    if draw(st.booleans()):
        mask &= padding if draw(st.booleans()) else padding.flip(-1)
    if draw(st.booleans()):
        mask |= padding
    if draw(st.booleans()) and q_len <= kv_len:
        ids = draw(st.lists(st.integers(0, 1), min_size=kv_len, max_size=kv_len))
        mask &= oracle.documents(torch.tensor(ids).cumsum(0).tolist(), shape)
    if draw(st.booleans()):
        rows = draw(st.lists(st.booleans(), min_size=q_len, max_size=q_len))
        mask &= torch.tensor(rows)[:, None]
    if draw(st.integers(0, 3)) == 0:
        mask.view(-1)[draw(st.integers(0, mask.numel() - 1))] ^= True
    return mask, shape


@settings(max_examples=100)
@given(joined())
def test_masks_of_models_are_found_exactly(given_mask: tuple[Tensor, torch.Size]) -> None:
    mask, shape = given_mask
    assert torch.equal(dense(recognised(mask, shape), shape), mask)


@given(masks())
def test_any_mask_is_found_exactly(given_mask: tuple[Tensor, torch.Size]) -> None:
    mask, shape = given_mask
    assert torch.equal(dense(recognised(mask, shape), shape), mask.expand(shape))


@given(masks() | joined(), st.sampled_from((-torch.inf, LEAST, -40000.0)))
def test_any_additive_mask_is_split_into_what_does_the_same(
    given_mask: tuple[Tensor, torch.Size], low: float
) -> None:
    mask, shape = given_mask
    numbers = torch.zeros(mask.shape).masked_fill(~mask, low)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    expected = torch.softmax((scores + numbers).double(), -1).nan_to_num(0)
    kept, bias = split(numbers, shape)
    found = scores if bias is None else scores + bias
    weights = regard.AttentionMatrix.from_scores(found, mask=kept).to_dense()
    assert torch.allclose(weights.double(), expected, atol=1e-6)


def test_long_masks_are_read_in_blocks() -> None:
    shape = shape_of(1, 2, 2500, 2501)
    mask = oracle.window(2500, 2501, 700, 0) & keys(2400, kv_len=2501)
    assert name(recognised(mask, shape)) == "SlidingWindow(700, 0) & Padding([2400])"


def test_long_rows_and_columns_are_counted_whole() -> None:
    mask = oracle.causal(2500, 2500) & keys(2400, kv_len=2500)
    assert name(recognised(mask, shape_of(1, 2, 2500, 2500))) == "Causal() & Padding([2400])"


def test_a_slice_of_a_longer_mask_is_read_where_it_lies() -> None:
    longer = regard.Causal().to_dense(1, 1, 40, 40)
    assert name(recognised(longer[..., 3:33, 3:33], shape_of(1, 2, 30, 30))) == "Causal()"


# The memory


def test_what_was_found_is_remembered_for_the_next_layer() -> None:
    mask, shape = regard.Causal().to_dense(1, 1, 8, 8), shape_of(1, 2, 8, 8)
    assert recognised(mask, shape) is recognised(mask, shape)


def test_another_view_of_the_same_numbers_is_remembered_too() -> None:
    mask, shape = regard.Causal().to_dense(1, 1, 8, 8), shape_of(1, 2, 8, 8)
    assert recognised(mask[:, :, :, :8], shape) is recognised(mask.detach(), shape)


def test_a_mask_that_was_changed_is_read_again() -> None:
    mask, shape = regard.Causal().to_dense(1, 1, 8, 8), shape_of(1, 2, 8, 8)
    recognised(mask, shape)
    mask[..., 5:] = False
    assert name(recognised(mask, shape)) == "Causal() & Padding([5])"


def test_a_mask_that_was_changed_in_inference_mode_is_read_again() -> None:
    shape = shape_of(1, 2, 8, 8)
    with torch.inference_mode():
        mask = regard.Causal().to_dense(1, 1, 8, 8)
        recognised(mask, shape)
        mask[..., 5:] = False
        assert name(recognised(mask, shape)) == "Causal() & Padding([5])"


def as_bool(allowed: Tensor) -> Tensor:
    return allowed


def as_float(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


def as_half(allowed: Tensor) -> Tensor:
    return as_float(allowed).bfloat16()


def by_numpy(mask: Tensor, changed: Tensor) -> None:
    if mask.dtype == torch.bfloat16:
        mask, changed = mask.view(torch.int16), changed.view(torch.int16)
    mask.numpy()[...] = changed.numpy()


def by_data(mask: Tensor, changed: Tensor) -> None:
    mask.data.copy_(changed)


@pytest.mark.parametrize("q_len", [5, 301], ids=["short", "long"])
@pytest.mark.parametrize("kv_len", [303, 304])
@pytest.mark.parametrize("kind", [as_bool, as_float, as_half])
@pytest.mark.parametrize("change", [by_numpy, by_data])
@pytest.mark.parametrize("aligned", [True, False], ids=["whole", "slice"])
def test_a_mask_that_changes_without_pytorchs_notice_is_read_again(
    change: Callable[[Tensor, Tensor], None],
    kind: Callable[[Tensor], Tensor],
    q_len: int,
    kv_len: int,
    *,
    aligned: bool,
) -> None:
    shape, allowed = shape_of(1, 2, q_len, kv_len), oracle.causal(q_len, kv_len)
    whole = kind(torch.cat([torch.zeros(q_len, 3, dtype=torch.bool), allowed], 1))
    mask = whole[:, 3:].clone() if aligned else whole[:, 3:]

    def found() -> Tensor:
        seen = recognised(mask, shape) if kind is as_bool else split(mask, shape)[0]
        return dense(seen, shape)[0, 0]

    assert torch.equal(found(), allowed)
    version = mask._version
    allowed[:, 7:] = False
    change(mask, kind(allowed))
    assert torch.equal(found(), allowed)
    allowed[-1, 6], allowed[-1, 8] = False, True  # two elements are exchanged
    change(mask, kind(allowed))
    assert torch.equal(found(), allowed)
    assert mask._version == version


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(oracle.causal(8, 8), id="known"),
        pytest.param(torch.arange(64).reshape(8, 8) % 3 != 0, id="of no kind"),
    ],
)
def test_the_memory_keeps_no_tensor_alive(mask: Tensor) -> None:
    mask = mask.clone()
    recognised(mask, shape_of(1, 2, 8, 8))
    gone = weakref.ref(mask.untyped_storage())
    del mask
    gc.collect()
    assert gone() is None


def test_a_mask_that_broadcasts_to_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^mask has shape \(3, 4\); it must broadcast to"):
        recognised(torch.ones(3, 4, dtype=torch.bool), shape_of(2, 5, 4))


# Numbers


def additive(mask: Tensor, low: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, low)


SQUARE = shape_of(2, 3, 7, 7)


@pytest.mark.parametrize("low", [-torch.inf, LEAST, -65504.0, -1e9], ids=str)
def test_numbers_of_0_and_very_little_are_a_mask(low: float) -> None:
    mask, bias = split(additive(oracle.causal(7, 7), low), SQUARE)
    assert (name(mask), bias) == ("Causal()", None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_least_number_of_each_dtype_is_very_little(dtype: torch.dtype) -> None:
    numbers = additive(oracle.causal(7, 7), -torch.inf).to(dtype).clamp(min=torch.finfo(dtype).min)
    mask, bias = split(numbers, SQUARE)
    assert (name(mask), bias) == ("Causal()", None)


def test_zeros_are_neither_mask_nor_bias() -> None:
    assert split(torch.zeros(7, 7), SQUARE) == (None, None)


@pytest.mark.parametrize("low", [-100.0, -10000.0, 1.0], ids=str)
def test_numbers_that_only_lower_a_score_stay_numbers(low: float) -> None:
    numbers = additive(oracle.causal(7, 7), low)
    mask, bias = split(numbers, SQUARE)
    assert mask is None
    assert bias is not None
    assert torch.equal(bias, numbers.expand(1, 1, 7, 7))


def test_a_row_that_is_very_negative_everywhere_is_uniform_as_in_the_model() -> None:
    numbers = additive(oracle.causal(7, 7) & LEFT, LEAST)
    mask, bias = split(numbers, SQUARE)
    query = torch.randn(2, 3, 7, 4)
    weights = regard.attend(query, query, mask=mask, bias=bias).to_dense()
    expected = torch.softmax(query @ query.mT / 2 + numbers, -1)
    assert name(mask) == "Causal() & Keep((2, 1, 1, 7)) | Keep((2, 1, 7, 1))"
    assert bias is not None
    assert bias.shape == (2, 1, 7, 1)
    assert torch.allclose(weights[1, :, 0], torch.tensor(1 / 7))
    assert torch.allclose(weights, expected, atol=1e-6)


def test_a_row_of_minus_infinity_attends_to_nothing() -> None:
    mask, bias = split(additive(oracle.causal(7, 7) & LEFT, -torch.inf), SQUARE)
    assert (name(mask), bias) == ("Causal() & Keep((2, 1, 1, 7))", None)


def test_a_row_of_two_very_negative_numbers_stays_as_it_is() -> None:
    numbers = torch.full((7, 7), -torch.inf)
    numbers[:, 2:4] = LEAST
    mask, bias = split(numbers, SQUARE)
    assert mask is None
    assert bias is not None
    assert torch.equal(bias, numbers.expand(1, 1, 7, 7))


@pytest.mark.parametrize("low", [-torch.inf, LEAST], ids=str)
def test_numbers_and_a_known_mask_are_both(low: float) -> None:
    numbers = torch.randn(1, 3, 7, 7).masked_fill(~oracle.causal(7, 7), low)
    mask, bias = split(numbers, SQUARE)
    assert name(mask) == "Causal()"
    assert bias is not None
    assert torch.equal(bias, numbers)


def test_numbers_and_a_mask_of_no_kind_stay_numbers() -> None:
    numbers = torch.randn(7, 7).masked_fill(torch.arange(49).reshape(7, 7) % 3 == 0, -torch.inf)
    mask, bias = split(numbers, SQUARE)
    assert mask is None
    assert bias is not None
    assert torch.equal(bias, numbers[None, None])


def test_a_mask_of_no_kind_is_kept_without_the_axes_along_which_it_repeats() -> None:
    mask = (torch.arange(49).reshape(7, 7) % 3 != 0).expand(2, 3, 7, 7).contiguous()
    kept, bias = split(additive(mask, -torch.inf), SQUARE)
    assert (name(kept), bias) == ("Keep((1, 1, 7, 7))", None)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=str)
def test_numbers_that_are_none_are_left_to_the_bias(wrong: float) -> None:
    numbers = additive(torch.arange(49).reshape(7, 7) % 3 != 0, -torch.inf)
    numbers[3, 3] = wrong
    mask, bias = split(numbers, SQUARE)
    assert mask is None
    assert bias is not None
    assert torch.equal(bias.isnan(), numbers.isnan()[None, None])


def test_numbers_of_a_bool_tensor_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"^bias is bool; it must be a floating tensor"):
        split(torch.ones(7, 7, dtype=torch.bool), SQUARE)
