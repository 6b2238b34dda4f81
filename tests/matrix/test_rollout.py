"""rollout: the product of layers by its definition, whichever way it is asked."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
import regard
from cases import MASKS, in_turn
from largest_tensor import largest
from regard.backends import sweep as blocks

TIGHT = 1e-6  # a few roundings of float32 numbers below 1, through three layers
TOKENS = 7


def layer(
    seed: int,
    mask: str = "none",
    *,
    heads: tuple[int, ...] = (2, 4),
    kv_heads: int = 2,
    tokens: int = TOKENS,
    dtype: torch.dtype = torch.float32,
) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    few = (*heads[:-1], kv_heads) if heads else ()
    query = torch.randn(*heads, tokens, 3, generator=generator).to(dtype)
    key = torch.randn(*few, tokens, 3, generator=generator).to(dtype)
    shape = torch.Size((*heads, tokens, tokens))
    return regard.attend(query, key, mask=MASKS[mask][0](shape))


def dense_rollout(layers: list[Tensor], residual: float) -> Tensor:
    """The definition, from the dense matrices (..., heads, tokens, tokens), in float64."""
    identity = torch.eye(layers[0].shape[-1], dtype=torch.float64)
    product = identity
    for weights in layers:
        mean = weights.double().mean(-3) if weights.ndim > 2 else weights.double()
        product = (residual * identity + (1 - residual) * mean) @ product
    return product


def exact(layers: list[regard.AttentionMatrix], residual: float = 0.5) -> Tensor:
    return dense_rollout([each.to(torch.float64).to_dense() for each in layers], residual)


LAYERS = [layer(0, "causal"), layer(1, heads=(2, 6), kv_heads=3), layer(2, "keep-pairs")]
R = regard.rollout(LAYERS)
EXACT = exact(LAYERS)

X = torch.randn(TOKENS, 3, generator=torch.Generator().manual_seed(9))

# What is asked of a rollout, and of its dense tensor in the same words.
QUESTIONS: dict[str, Callable] = {
    "dense": lambda r: r if isinstance(r, Tensor) else r.to_dense(),
    "row": lambda r: r[1, 3],
    "rows": lambda r: r[:, 2:5],
    "column": lambda r: r[..., 2],
    "columns": lambda r: r[..., 1::2],
    "tall-window": lambda r: r[0, 1:, 2:4],
    "wide-window": lambda r: r[0, 1:3, 2:],
    "number": lambda r: r[1, -1, 0],
    "no-rows": lambda r: r[:, 3:3],
    "product": lambda r: r @ X.to(r.dtype),
    "vector": lambda r: r @ X[:, 0].to(r.dtype),
    "batched": lambda r: r @ torch.stack([X, 2 * X]).to(r.dtype),
    "more-batches": lambda r: r @ torch.stack([X, 2 * X, 3 * X]).to(r.dtype)[:, None],
    "transposed-product": lambda r: r.mT @ X.to(r.dtype),
    "transposed-vector": lambda r: r.mT @ X[:, 0].to(r.dtype),
    "from-the-left": lambda r: X.mT.to(r.dtype) @ r,
    "vector-from-the-left": lambda r: X[:, 0].to(r.dtype) @ r,
    "torch-matmul": lambda r: torch.matmul(r, X.to(r.dtype)),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
def test_an_answer_equals_that_of_the_dense_rollout(ask: Callable) -> None:
    oracle.assert_close(ask(R), ask(EXACT), 10 * TIGHT)


@in_turn(ask=QUESTIONS, rows={"one-row": 1, "uneven-rows": 3})
def test_an_answer_from_small_blocks_equals_that_of_the_dense_rollout(
    ask: Callable, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant, value in (("BLOCK_SIZE", 1), ("MIN_ROWS", rows), ("MAX_ROWS", rows)):
        monkeypatch.setattr(blocks, constant, value)
    oracle.assert_close(ask(R), ask(EXACT), 10 * TIGHT)


def test_three_tokens_by_hand() -> None:
    first = regard.AttentionMatrix.from_weights(
        torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    )
    second = regard.AttentionMatrix.from_weights(
        torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    )
    # Half of token 2 is what token 1 was, of which three quarters are its own.
    by_hand = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0], [0.125, 0.375, 0.5]])
    found = regard.rollout([first, second]).to_dense()
    torch.testing.assert_close(found, by_hand, atol=1e-7, rtol=0)


def test_layers_without_heads_are_taken_as_they_are() -> None:
    layers = [layer(0, "causal", heads=()), layer(1, heads=(4,))]
    oracle.assert_close(regard.rollout(layers).to_dense(), exact(layers), TIGHT)


def test_a_recording_counts_with_its_layers() -> None:
    named = dict(zip("abc", LAYERS, strict=True))
    assert torch.equal(regard.rollout(named).to_dense(), R.to_dense())


def test_any_iterable_of_layers_will_do() -> None:
    assert torch.equal(regard.rollout(each for each in LAYERS)[0, 1], R[0, 1])


def test_a_leading_index_gives_the_rollout_of_that_part() -> None:
    part = R[1]
    assert isinstance(part, regard.Rollout)
    oracle.assert_close(part.to_dense(), EXACT[1], TIGHT)


def test_a_range_that_holds_every_row_gives_a_tensor() -> None:
    assert isinstance(R[:, 0:TOKENS, :], Tensor)


def test_bfloat16_is_rounded_once_and_not_in_every_layer() -> None:
    layers = [layer(seed, dtype=torch.bfloat16) for seed in range(8)]
    found = regard.rollout(layers).to_dense()
    assert found.dtype == torch.bfloat16
    oracle.assert_close(found, exact(layers), torch.finfo(torch.bfloat16).eps * 0.5 + 8 * TIGHT)


@in_turn(
    ask=["product", "transposed-product", "row", "column"], mask=["none", "causal", "keep-pairs"]
)
def test_gradients_reach_every_layer_and_the_operand(ask: str, mask: str) -> None:
    made = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 2), (1, 3, 2), (3, 2)]  # two heads, one key head; the operand
    leaves = [torch.randn(s, generator=made, dtype=torch.float64) for s in shapes]

    def answer(query: Tensor, key: Tensor, x: Tensor) -> Tensor:
        shape = torch.Size((2, 3, 3))
        lower = regard.attend(query, key, mask=MASKS[mask][0](shape))
        rolled = regard.rollout([lower, regard.attend(2 * query, query)], residual=0.3)
        asked = {
            "product": lambda: rolled @ x,
            "transposed-product": lambda: rolled.T @ x,
            "row": lambda: rolled[1] * x[0, 0],
            "column": lambda: rolled[:, 1] * x[0, 0],
        }
        return asked[ask]()

    assert torch.autograd.gradcheck(answer, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.full
def test_a_rollout_of_long_texts_never_makes_a_matrix() -> None:
    tokens = 4096
    query = torch.randn(2, tokens, 4, requires_grad=True)
    rolled = regard.rollout([regard.attend(query, query, mask=regard.Causal())] * 2)

    def work() -> None:
        (rolled[17].sum() + rolled[:, 3].sum() + (rolled @ torch.ones(tokens)).sum()).backward()

    assert largest(work) < tokens * tokens // 6


# What it is.


def test_a_rollout_prints_what_it_is() -> None:
    assert (
        repr(R) == "Rollout(layers=3, residual=0.5, batch=2, tokens=7, dtype=float32, device=cpu)"
    )


def test_a_transposed_rollout_prints_what_it_is() -> None:
    assert repr(R.T) == f"TransposedMatrix(of {R!r})"


def test_a_rollout_has_the_attributes_of_its_dense_tensor() -> None:
    found = (R.shape, R.ndim, R.T.shape, R.dtype, R.device)
    assert found == (EXACT.shape, EXACT.ndim, EXACT.mT.shape, torch.float32, EXACT.device)


def test_the_transpose_of_the_transpose_is_the_rollout() -> None:
    assert R.mT.T is R


# Laws.


@st.composite
def drawn_layers(draw: st.DrawFn) -> list[regard.AttentionMatrix]:
    """One to three layers of one shape, with any number of heads and any mask that leaves keys."""
    count, tokens, batch = (draw(st.integers(1, n)) for n in (3, 9, 2))
    masks = st.sampled_from(["none", "causal", "window-both", "causal-top-left"])
    seed = draw(st.integers(0, 2**31))
    return [
        layer(
            seed + place,
            draw(masks),
            heads=(batch, draw(st.sampled_from([2, 4, 6]))),
            tokens=tokens,
            dtype=torch.float64,
        )
        for place in range(count)
    ]


@given(layers=drawn_layers(), residual=st.floats(0, 1))
def test_each_row_sums_to_1(layers: list[regard.AttentionMatrix], residual: float) -> None:
    sums = regard.rollout(layers, residual=residual) @ torch.ones(layers[0].shape[-1]).double()
    oracle.assert_close(sums, torch.ones_like(sums), 1e-12)


@given(layers=drawn_layers())
def test_nothing_but_the_residual_is_the_identity(layers: list[regard.AttentionMatrix]) -> None:
    found = regard.rollout(layers, residual=1).to_dense()
    identity = torch.eye(found.shape[-1]).double().expand_as(found)
    assert torch.equal(found, identity)


@given(layers=drawn_layers())
def test_no_residual_is_the_product_of_the_layers(layers: list[regard.AttentionMatrix]) -> None:
    product = torch.eye(layers[0].shape[-1]).double()
    for each in layers:
        product = each.to_dense().mean(-3) @ product
    oracle.assert_close(regard.rollout(layers, residual=0).to_dense(), product, 1e-12)


@given(layers=drawn_layers(), residual=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_a_rollout_and_its_transpose_are_adjoint(
    layers: list[regard.AttentionMatrix], residual: float, seed: int
) -> None:
    rolled, generator = regard.rollout(layers, residual=residual), torch.Generator()
    shape = (2, rolled.shape[0], rolled.shape[-1], 2)
    x, y = torch.randn(shape, generator=generator.manual_seed(seed), dtype=torch.float64)
    difference = ((rolled @ x) * y).sum() - (x * (rolled.T @ y)).sum()
    assert float(difference.abs()) <= 1e-12 * float(x.abs().sum() * y.abs().max())


# Errors.

REMEDY = "    Pass a list of them, the lowest layer first, or what regard.observe saw."
SHARE = "    It is the share of a token that passes by the attention; 0.5 is usual."
SQUARE = layer(0)

ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no-layers": (
        lambda: regard.rollout([]),
        ValueError,
        f"layers is empty; it must have at least one matrix.\n{REMEDY}",
    ),
    "a-matrix": (
        lambda: regard.rollout(SQUARE),
        TypeError,
        f"layers is an AttentionMatrix; it must be several attention matrices.\n{REMEDY}",
    ),
    "a-number": (
        lambda: regard.rollout(3),
        TypeError,
        f"layers is an int; it must be several attention matrices.\n{REMEDY}",
    ),
    "a-tensor-among-them": (
        lambda: regard.rollout([SQUARE, X]),
        TypeError,
        f"layers has a Tensor at 1; each must be an AttentionMatrix.\n{REMEDY}",
    ),
    "not-square": (
        lambda: regard.rollout([regard.attend(X, X[:5])]),
        ValueError,
        "layers has shape (7, 5) at 0; q_len and kv_len must be equal.\n"
        "    Only self-attention over whole sequences can be rolled out.",
    ),
    "shapes": (
        lambda: regard.rollout([SQUARE, layer(1, tokens=5)]),
        ValueError,
        "layers has shape (2, 4, 5, 5) at 1 and (2, 4, 7, 7) at 0; batch and tokens must be equal."
        "\n    Only the number of heads may differ.",
    ),
    "dtypes": (
        lambda: regard.rollout([SQUARE, SQUARE.to(torch.float64)]),
        TypeError,
        "layers has float64 at 1 and float32 at 0; all must have one dtype.\n"
        "    Use layer.to(torch.float32).",
    ),
    "devices": (
        lambda: regard.rollout([SQUARE, SQUARE.to("meta")]),
        ValueError,
        "layers is on meta at 1 and on cpu at 0; all must be on one device.\n"
        "    Use layer.to('cpu').",
    ),
    "residual-is-text": (
        lambda: regard.rollout([SQUARE], residual="half"),
        TypeError,
        f"residual is a str; it must be a number from 0 to 1.\n{SHARE}",
    ),
    "residual-beyond-1": (
        lambda: regard.rollout([SQUARE], residual=1.5),
        ValueError,
        f"residual is 1.5; it must be a number from 0 to 1.\n{SHARE}",
    ),
    "residual-is-nan": (
        lambda: regard.rollout([SQUARE], residual=float("nan")),
        ValueError,
        f"residual is nan; it must be a number from 0 to 1.\n{SHARE}",
    ),
    "operand-tokens": (
        lambda: R @ torch.zeros(5, 3),
        ValueError,
        "value has shape (5, 3); it must be (..., 7, dim), with leading axes that broadcast with "
        "(2,), or (7,).\n    The matrix has shape (2, 7, 7).",
    ),
    "operand-batch": (
        lambda: R.T @ torch.zeros(3, 7, 3),
        ValueError,
        "operand has shape (3, 7, 3); it must be (..., 7, dim), with leading axes that broadcast "
        "with (2,), or (7,).\n    The matrix has shape (2, 7, 7).",
    ),
    "operand-dtype": (
        lambda: R @ X.double(),
        TypeError,
        "value is float64 and the matrix is float32; both must have one dtype.\n"
        "    Use value.to(torch.float32).",
    ),
    "another-function": (
        lambda: torch.softmax(R, -1),
        TypeError,
        "torch.softmax does not take a Rollout; it holds no numbers.\n"
        "    Rows of attention sum to 1 already; use A[0, 3, :10] for some of them.",
    ),
    "too-large": (
        lambda: R.to_dense(limit=100),
        MemoryError,
        "to_dense() would make (2, 7, 7) float32 = 392 bytes; the limit is 100 bytes.\n"
        "    Ask for a part, A[..., rows, cols], or for products, A @ x, "
        "or pass limit=None to to_dense().",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_call_says_what_came_and_what_to_do(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text
