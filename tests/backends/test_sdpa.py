"""weights @ value by fused calls: every form against the oracle, and the memory each takes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import oracle
import regard
from cases import CASES, MASKED, SHAPES, Case, full_but, in_turn, parametrised
from compliance import assert_answer, assert_gradients
from largest_tensor import largest
from regard.backends import sdpa_tiling as forms
from regard.backends.choose import BACKENDS
from regard.masks import Causal, Documents, Keep, Mask, Padding, PrefixLM, SlidingWindow

# Numbers so small that the matrices of a test need tiles and folds.
TINY = {"SMALL": 0, "MIN_TILE": 1, "MAX_TILE": 3, "MIN_FOLD": 2, "MAX_FOLD": 4, "VECTOR": 2}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TINY.items():
        monkeypatch.setattr(forms, name, value)


def takes(case: Case) -> bool:
    matrix = case.matrix(*case.inputs.of_scores)
    asked = [regard.Output(case.inputs.value)]
    return BACKENDS["sdpa"].refusal(matrix.source, matrix.mask, asked) is None


TAKEN = [case for case in CASES if takes(case)]


@parametrised(TAKEN)
def test_the_output_in_small_tiles_equals_the_oracle(case: Case, tiny: None) -> None:
    inputs = case.inputs
    output = case.matrix(*inputs.of_scores).reduce(regard.Output(inputs.value), backend="sdpa")
    assert_answer(output, case, "output", "sdpa")


@parametrised([case for case in (*SHAPES, *MASKED) if takes(case)])
def test_the_gradient_of_the_output_in_small_tiles_equals_that_of_the_oracle(
    case: Case, tiny: None
) -> None:
    assert_gradients(case, ["output"], "sdpa")


def test_of_plain_scores_the_fused_backend_leaves_only_value_heads_that_differ() -> None:
    left = [case for case in CASES if not takes(case)]
    plain = [case for case in left if case.matrix(*case.inputs.of_scores).source.plain]
    assert {case.name for case in plain} == {"value-grouped", "key-grouped"}


# Bands of every width and place, folded.


BANDS = [
    pytest.param(q_len, kv_len, left, right, id=f"{q_len}x{kv_len}-{left}-{right}")
    for q_len, kv_len, left, right in [
        (23, 23, 3, 0),
        (23, 23, 0, 3),
        (23, 23, 2, 2),
        (23, 23, 0, 0),
        (23, 23, 22, 0),
        (23, 23, 40, 40),
        (24, 24, 4, 0),
        (5, 23, 3, 0),
        (5, 23, 3, 1),
        (23, 5, 3, 0),
        (23, 5, 1, 1),
        (13, 17, 7, 2),
        (17, 13, 2, 7),
        (1, 23, 3, 0),
        (23, 1, 3, 0),
        (1, 1, 1, 1),
    ]
]
bands = pytest.mark.parametrize(("q_len", "kv_len", "left", "right"), BANDS)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-2]), dtype=dtype)


@bands
def test_a_window_equals_the_oracle_wherever_it_lies(
    q_len: int, kv_len: int, left: int, right: int, tiny: None
) -> None:
    query, key, value = normal(2, 4, q_len, 3), normal(2, 2, kv_len, 3), normal(2, 2, kv_len, 5)
    found = regard.attend(query, key, mask=SlidingWindow(left, right)) @ value
    allowed = oracle.window(q_len, kv_len, left, right)
    right_one = oracle.product(oracle.attend(query, key, allowed=allowed), value)
    torch.testing.assert_close(found, right_one)


@bands
def test_the_gradient_of_a_window_equals_that_of_the_oracle_wherever_it_lies(
    q_len: int, kv_len: int, left: int, right: int, tiny: None
) -> None:
    inputs = [normal(2, q_len, 3), normal(1, kv_len, 3), normal(1, kv_len, 5)]
    allowed = oracle.window(q_len, kv_len, left, right)

    def of_regard(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attend(query, key, mask=SlidingWindow(left, right)) @ value

    def of_oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return oracle.product(oracle.attend(query, key, allowed=allowed), value)

    expected = oracle.gradients(of_oracle, inputs)
    for found, exact in zip(oracle.gradients(of_regard, inputs), expected, strict=True):
        torch.testing.assert_close(found, exact)


# Each form at the size at which it is chosen.


LENGTH = 600
KEEP = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.3
IDS = (torch.arange(LENGTH) // 200).expand(2, LENGTH)
TILES = "each on some rows and the keys that they see"
FORMS: dict[str, tuple[Mask | None, str]] = {
    "no-mask": (None, "one fused call."),
    "causal": (Causal(), "one fused causal call."),
    "keys": (Keep(KEEP[0].clone()), "one fused call with a mask."),
    "padding": (Padding([500, 400]), "2 fused calls, each on the keys of its sequences."),
    "padding-of-one-length": (Padding([500, 500]), "one fused call."),
    "padding-to-nothing": (Padding([0, 400]), TILES),
    "causal-and-padding": (
        Causal() & Padding([500, 400]),
        "2 fused calls, each on the keys of its sequences.",
    ),
    "window": (
        SlidingWindow(255, 0),
        "one fused call for 10 blocks of 32 rows x 288 keys along the band.",
    ),
    "window-and-causal": (
        SlidingWindow(100, 100) & Causal(),
        "one fused call for 15 blocks of 32 rows x 144 keys along the band.",
    ),
    "wide-window": (SlidingWindow(550, 0), TILES),
    "pairs": (Keep(KEEP), TILES),
    "prefix": (PrefixLM(100), TILES),
    "documents": (Documents(IDS), TILES),
    "documents-and-causal": (Causal() & Documents(IDS), TILES),
    "either": (SlidingWindow(5, 5) | PrefixLM(3), TILES),
    "all-but-the-past": (~Causal(), TILES),
}
every_form = pytest.mark.parametrize(("mask", "how"), FORMS.values(), ids=FORMS)
MASKS = {name: mask for name, (mask, _) in FORMS.items()}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value, with grouped heads."""
    sizes = [(2, 2, LENGTH, 3), (2, 1, LENGTH, 3), (2, 1, LENGTH, 5)]
    return [normal(*size, dtype=torch.float32).to(dtype) for size in sizes]


def by_fused_calls(mask: Mask | None) -> Callable[..., Tensor]:
    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        matrix = regard.attend(query, key, mask=mask)
        return matrix.reduce(regard.Output(value), backend="sdpa")

    return output


def by_the_definition(mask: Mask | None) -> Callable[..., Tensor]:
    allowed = None if mask is None else mask.to_dense(2, 2, LENGTH, LENGTH)

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return oracle.product(oracle.attend(query, key, allowed=allowed), value)

    return output


@every_form
def test_the_form_is_the_one_that_fits_the_mask(mask: Mask | None, how: str) -> None:
    query, key, _ = inputs()
    found = regard.explain(regard.attend(query, key, mask=mask))
    assert found.backend == "sdpa"
    assert how in found.how + "."


@pytest.mark.sampled(6)
@in_turn(mask=MASKS, dtype=DTYPES)
def test_every_form_equals_the_definition(mask: Mask | None, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    exact = by_the_definition(mask)(*(tensor.double() for tensor in given))
    plain = by_the_definition(mask)(*given)
    budget = oracle.allowed_error(exact, plain, dtype=dtype, scores=30.0)
    found = by_fused_calls(mask)(*given)
    assert found.dtype == dtype
    oracle.assert_close(found, exact, budget)


@pytest.mark.parametrize(
    "mask", full_but(MASKS, "causal", "causal-and-padding", "window-and-causal", "documents")
)
def test_the_gradient_of_every_form_equals_that_of_the_definition(mask: Mask | None) -> None:
    given = [tensor.double() for tensor in inputs()]
    found = oracle.gradients(by_fused_calls(mask), given)
    expected = oracle.gradients(by_the_definition(mask), given)
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right)


WITHOUT_PAIRS = {name: mask for name, mask in MASKS.items() if name != "pairs"}


@pytest.mark.parametrize("mask", WITHOUT_PAIRS.values(), ids=WITHOUT_PAIRS)
def test_no_form_makes_or_keeps_anything_of_the_size_of_the_matrix(
    mask: Mask | None,
) -> None:
    given = [tensor.requires_grad_() for tensor in inputs()]
    kept: list[int] = []

    def work() -> None:
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.untyped_storage().nbytes()) or tensor, lambda t: t
        )
        with keep:
            output = by_fused_calls(mask)(*given)
        output.sum().backward()

    # The largest tile is nearly half of a matrix that is so small.
    assert largest(work) < 0.6 * LENGTH * LENGTH
    assert max(kept) <= 4 * 320 * 320


@every_form
def test_the_same_numbers_come_out_every_time(mask: Mask | None, how: str) -> None:
    output = by_fused_calls(mask)
    assert torch.equal(output(*inputs()), output(*inputs()))


@pytest.mark.parametrize("needed", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("mask", [PrefixLM(9), SlidingWindow(9, 0)], ids=["tiles", "fold"])
def test_a_gradient_flows_to_one_input_alone(mask: Mask, needed: int) -> None:
    given = inputs()
    given[needed].requires_grad_()
    by_fused_calls(mask)(*given).sum().backward()
    assert [tensor.grad is not None for tensor in given] == [i == needed for i in range(3)]


def test_one_tensor_as_query_key_and_value_gets_the_sum_of_three_gradients(tiny: None) -> None:
    x = normal(7, 3).requires_grad_()
    (regard.attend(x, x, mask=PrefixLM(2)) @ x).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    allowed = PrefixLM(2).to_dense(7, 7)
    oracle.product(oracle.attend(y, y, allowed=allowed), y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_an_input_changed_before_the_backward_pass_is_noticed(tiny: None) -> None:
    x = normal(7, 3).requires_grad_()
    query = x * 1
    output = regard.attend(query, x, mask=PrefixLM(2)) @ x
    query.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("mask", [PrefixLM(9), SlidingWindow(9, 0)], ids=["tiles", "fold"])
def test_a_batch_too_large_for_one_mask_is_cut(
    mask: Mask, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "TILE_SIZE", 1)
    query, key, value = normal(3, 2, 23, 3), normal(3, 2, 23, 3), normal(3, 2, 23, 2)
    dense = oracle.attend(query, key, allowed=mask.to_dense(23, 23))
    found = regard.attend(query, key, mask=mask) @ value
    torch.testing.assert_close(found, oracle.product(dense, value))


def test_a_bias_and_a_mask_go_together_in_tiles(tiny: None) -> None:
    query, key, value, bias = normal(7, 3), normal(9, 3), normal(9, 2), normal(7, 9)
    matrix = regard.attend(query, key, mask=Causal(), bias=bias)
    found = matrix.reduce(regard.Output(value), backend="sdpa")
    dense = oracle.attend(query, key, allowed=oracle.causal(7, 9), bias=bias)
    torch.testing.assert_close(found, oracle.product(dense, value))


@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_a_scale_of_0_or_below_works_under_causal(scale: float) -> None:
    query, key, value = normal(7, 3), normal(7, 3), normal(7, 2)
    matrix = regard.attend(query, key, mask=Causal(), scale=scale)
    found = matrix.reduce(regard.Output(value), backend="sdpa")
    dense = oracle.attend(query, key, allowed=oracle.causal(7, 7), scale=scale)
    torch.testing.assert_close(found, oracle.product(dense, value))


@pytest.mark.parametrize("layout", [(2, 1, 13, 3), (1, 1, 13, 3), (13, 3), (13,)], ids=str)
def test_a_value_that_broadcasts_is_not_repeated(layout: tuple[int, ...], tiny: None) -> None:
    query, key = normal(2, 4, 13, 3), normal(2, 2, 13, 3)
    value = torch.randn(layout, dtype=torch.float64)
    matrix = regard.attend(query, key, mask=SlidingWindow(2, 0))
    found = matrix.reduce(regard.Output(value), backend="sdpa")
    dense = oracle.attend(query, key, allowed=oracle.window(13, 13, 2, 0))
    torch.testing.assert_close(found, oracle.product(dense, value))


SOME = torch.ones(3, 2)
PLAIN = regard.attend(SOME, SOME)
REFUSED: dict[str, tuple[regard.AttentionMatrix, tuple[regard.Reduction, ...], str]] = {
    "other-questions": (
        PLAIN,
        (regard.Entropy(), regard.Output(SOME), regard.TopK(1)),
        "no fused kernel gives Entropy, TopK",
    ),
    "two-outputs": (
        PLAIN,
        (regard.Output(SOME), regard.Output(SOME)),
        "a fused kernel gives one Output at a time",
    ),
    "scores": (
        regard.AttentionMatrix.from_scores(SOME),
        (regard.Output(SOME[:2]),),
        "fused kernels start from query and key, not from scores",
    ),
    "softcap": (
        regard.attend(SOME, SOME, softcap=2.0),
        (regard.Output(SOME),),
        "no fused kernel has softcap, score_mod, sink_bias or a bias by position",
    ),
    "gradient-of-a-bias": (
        regard.attend(SOME, SOME, bias=torch.zeros(3, requires_grad=True)),
        (regard.Output(SOME),),
        "fused kernels form the matrix for the gradient of a bias",
    ),
    "wide-bias": (
        regard.attend(SOME, SOME, bias=torch.zeros(3, dtype=torch.float64)),
        (regard.Output(SOME),),
        "fused kernels round a bias to the dtype of the query",
    ),
    "value-dtype": (
        PLAIN,
        (regard.Output(SOME.double()),),
        "fused kernels need one dtype for query, key and value",
    ),
    "value-heads": (
        regard.attend(SOME.expand(2, 3, 2), SOME.expand(1, 3, 2)),
        (regard.Output(SOME.expand(2, 3, 2)),),
        "fused kernels need a value with the heads of the key",
    ),
    "nan": (
        regard.attend(SOME * torch.nan, SOME),
        (regard.Output(SOME),),
        "query, key or bias holds NaN or infinity",
    ),
}


@pytest.mark.parametrize(("matrix", "reductions", "why"), REFUSED.values(), ids=REFUSED)
def test_what_no_fused_call_can_answer_is_refused_with_the_reason(
    matrix: regard.AttentionMatrix, reductions: tuple[regard.Reduction, ...], why: str
) -> None:
    with pytest.raises(ValueError, match="backend") as caught:
        matrix.reduce(*reductions, backend="sdpa")
    assert str(caught.value) == (
        f"backend is 'sdpa'; {why}.\n    Leave it out to have the fastest chosen."
    )


def made(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(1, length, 4, generator=generator).requires_grad_()


@pytest.mark.parametrize("what", ["mask", "bias"])
def test_a_mask_or_bias_changed_in_place_before_backward_is_noticed(what: str, tiny: None) -> None:
    query, mask, bias = made(9), torch.ones(9, 9).tril().bool(), torch.zeros(9)
    if what == "mask":
        output = regard.attend(query, query, mask=mask) @ query
        mask.fill_(True)
    else:
        output = regard.attend(query, query, mask=mask, bias=bias) @ query
        bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(9, 9).tril().bool(), id="many-calls"),
        pytest.param(regard.Causal(), id="one-causal-call"),
        pytest.param(None, id="one-call"),
    ],
)
def test_a_second_derivative_is_an_error(mask: Mask | Tensor | None, tiny: None) -> None:
    query = made(9)
    output = regard.attend(query, query, mask=mask) @ query
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="was differentiated twice; it has first derivatives"):
        gradient.square().sum().backward()


def test_the_first_derivatives_of_torch_func_and_of_batched_gradients_remain(tiny: None) -> None:
    query = made(9)

    def total(query: Tensor) -> Tensor:
        return (regard.attend(query, query, mask=Causal()) @ query).square().sum((0, 1))

    outputs = total(query)
    rows = torch.stack([torch.autograd.grad(x, query, retain_graph=True)[0] for x in outputs])
    (batched,) = torch.autograd.grad(outputs, query, torch.eye(4), is_grads_batched=True)
    torch.testing.assert_close(batched, rows)

    def loss(query: Tensor) -> Tensor:
        return total(query).sum()

    torch.testing.assert_close(torch.func.grad(loss)(query), rows.sum(0))
