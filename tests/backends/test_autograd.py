"""Gradients in every mode of autograd, and what there is no gradient for."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import oracle
import regard


def made(*, length: int = 7) -> list[Tensor]:
    """Query, key and value."""
    generator = torch.Generator().manual_seed(length)
    tensors = [torch.randn(2, length, 3, generator=generator).double() for _ in range(3)]
    return [tensor.requires_grad_() for tensor in tensors]


def several(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One number that depends on all leaves, by the sweep and by the fused product."""
    A = regard.attend(query, key, mask=regard.Causal())
    entropy, received, top = A.reduce(regard.Entropy(), regard.Sum(-2), regard.TopK(2))
    pieces = (entropy, received.square(), top.values, A @ value, A[..., 1:3, :2], A.T @ value)
    return sum((piece.sin().sum() for piece in pieces), torch.zeros(()))


def test_one_tensor_in_every_place_gets_the_sum_of_its_gradients() -> None:
    x, *_ = made()
    (together,) = torch.autograd.grad(several(x, x, x), x)
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = torch.autograd.grad(several(*apart), apart)
    torch.testing.assert_close(together, torch.stack(expected).sum(0))


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    leaves = made()
    total = several(*leaves)
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(total, leaves)))


def test_an_input_that_the_answer_does_not_depend_on_has_no_gradient() -> None:
    query, key, value = made()
    entropy = regard.attend(query, key).entropy().sum()
    gradients = torch.autograd.grad(entropy, (query, value), allow_unused=True)
    assert gradients[0] is not None
    assert gradients[1] is None


def test_answers_that_nobody_differentiates_change_no_gradient() -> None:
    query, key, value = made()
    A = regard.attend(query, key)
    _, entropy, _ = A.reduce(regard.Output(value), regard.Entropy(), regard.TopK(2))
    gradients = torch.autograd.grad(entropy.sum(), (query, key, value))
    expected = torch.autograd.grad(A.entropy().sum(), (query, key))
    assert all(map(torch.equal, gradients[:2], expected))
    assert not gradients[2].any()


@pytest.mark.parametrize(
    "arriving",
    [
        pytest.param(lambda g: g.expand(2, 7), id="expanded"),
        pytest.param(lambda g: g.expand(7, 2).contiguous().mT, id="transposed"),
        pytest.param(lambda g: g.expand(2, 7).repeat_interleave(2, -1)[:, ::2], id="strided"),
    ],
)
def test_a_gradient_may_arrive_in_any_layout(arriving: Callable[[Tensor], Tensor]) -> None:
    query, key, _ = made()
    entropy = regard.attend(query, key).entropy()
    given = arriving(torch.tensor(2.0).double())
    (found,) = torch.autograd.grad(entropy, query, given, retain_graph=True)
    (expected,) = torch.autograd.grad(entropy, query, given.contiguous())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changed", ["query", "key", "value", "mask"])
def test_what_was_changed_in_place_since_is_an_error(changed: str) -> None:
    leaves = made()
    tensors = {name: x.clone() for name, x in zip(("query", "key", "value"), leaves, strict=True)}
    tensors["mask"] = torch.ones(7, dtype=torch.bool)
    A = regard.attend(tensors["query"], tensors["key"], mask=regard.Keep(tensors["mask"]))
    entropy, output = A.reduce(regard.Entropy(), regard.Output(tensors["value"]))
    with torch.no_grad():
        tensors[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (entropy.sum() + output.sum()).backward()


def test_lengths_that_change_later_change_no_gradient() -> None:
    query, key, _ = made()
    lengths = torch.tensor([7, 5])
    entropy, expected = (
        regard.attend(query, key, mask=regard.Padding(given)).entropy()
        for given in (lengths, lengths.clone())
    )
    lengths.zero_()
    (found,) = torch.autograd.grad(entropy.sum(), query)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), query)[0])


def test_a_second_derivative_is_an_error() -> None:
    query, key, _ = made()
    (gradient,) = torch.autograd.grad(
        regard.attend(query, key).entropy().sum(), query, create_graph=True
    )
    with pytest.raises(RuntimeError) as caught:
        gradient.square().sum().backward()
    assert str(caught.value) == (
        "an answer of regard was differentiated twice; it has first derivatives only.\n"
        "    Ask with backend='dense', or leave out create_graph=True."
    )


def test_the_dense_backend_has_second_derivatives() -> None:
    query, key, _ = made(length=3)

    def entropy(query: Tensor, key: Tensor) -> Tensor:
        return regard.attend(query, key).reduce(regard.Entropy(), backend="dense")

    assert torch.autograd.gradgradcheck(entropy, (query, key))


ONLY_BACKWARD = (
    "an answer of regard is under torch.func or forward-mode AD; it has a backward pass only.\n"
    "    Use torch.autograd.grad; instead of vmap give query and key a batch axis."
)


def entropies(query: Tensor) -> Tensor:
    return regard.attend(query, query).entropy()


def products(query: Tensor) -> Tensor:
    return regard.attend(query, query) @ query


def window_products(query: Tensor) -> Tensor:
    return regard.attend(query, query, mask=regard.SlidingWindow(2, 0)) @ query


def dense_entropies(query: Tensor) -> Tensor:
    return regard.attend(query, query).reduce(regard.Entropy(), backend="dense")


Answer = Callable[[Tensor], Tensor]


def forward_mode(answer: Answer) -> Answer:
    def transformed(query: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            return answer(torch.autograd.forward_ad.make_dual(query, query))

    return transformed


def slope(answer: Answer) -> Answer:
    return torch.func.grad(lambda query: answer(query).sum())


TRANSFORMS: dict[str, Callable[[Answer], Answer]] = {
    "grad": slope,
    "vmap": torch.func.vmap,
    "vmap of grad": lambda answer: torch.func.vmap(slope(answer)),
    "grad of vmap": lambda answer: slope(torch.func.vmap(answer)),
    "jacrev": torch.func.jacrev,
    "forward mode": forward_mode,
}
# The kernel and the plain operations of the dense backend have these of their own.
PASSED = {
    products: ("grad", "jacrev"),
    window_products: ("grad", "jacrev"),
    dense_entropies: ("grad", "jacrev", "forward mode"),
}


@pytest.mark.parametrize("answer", [entropies, products, window_products, dense_entropies])
@pytest.mark.parametrize("transform", TRANSFORMS)
# PyTorch scripts the derivatives of its own operations, and warns itself of it.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
# It maps over its kernel one entry after another, and warns of that.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_transform_that_cannot_pass_is_an_error(transform: str, answer: Answer) -> None:
    transformed = TRANSFORMS[transform](answer)
    query = torch.randn(2, 5, 3)
    if transform in PASSED.get(answer, ()):
        assert transformed(query).isfinite().all()
        return
    with pytest.raises(RuntimeError) as caught:
        transformed(query)
    assert str(caught.value) == ONLY_BACKWARD


def test_a_gradient_by_torch_func_passes_the_fused_product() -> None:
    query, key, value = (x.detach() for x in made())

    def total(query: Tensor) -> Tensor:
        return (regard.attend(query, key) @ value).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(query), expected)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["not-reentrant", "reentrant"])
def test_a_checkpoint_gives_the_same_gradients(use_reentrant: bool) -> None:
    leaves = made()
    expected = torch.autograd.grad(several(*leaves), leaves)
    total = checkpoint(several, *leaves, use_reentrant=use_reentrant)
    total.backward()
    assert all(torch.equal(x.grad, other) for x, other in zip(leaves, expected, strict=True))


def test_a_checkpoint_within_a_graph_gives_the_same_gradients() -> None:
    leaves = made()

    def layers(*given: Tensor) -> Tensor:
        doubled = [2 * x for x in given]
        return several(*doubled)

    expected = torch.autograd.grad(layers(*leaves), leaves)
    found = torch.autograd.grad(checkpoint(layers, *leaves, use_reentrant=False), leaves)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_without_gradients_the_answers_are_the_same(mode: Callable) -> None:
    leaves = made()
    expected = several(*leaves)
    with mode():
        found = several(*leaves)
    assert not found.requires_grad
    assert torch.equal(found, expected.detach())


def test_tensors_made_in_inference_mode_give_the_same_answers_outside() -> None:
    with torch.inference_mode():
        inner = [x.detach() for x in made()]
        within = several(*inner)
    assert torch.equal(several(*inner), within)


# Rows that are no numbers.


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_row_of_nan_gives_nan_to_the_sink_and_to_its_own_query_alone(bad: float) -> None:
    query, key, _ = made()
    query = query.detach().clone()
    query[0, 2] = bad
    leaves = [query.requires_grad_(), torch.zeros(2).double().requires_grad_()]
    A = regard.attend(leaves[0], key, sink_bias=leaves[1])
    of_query, of_sink = torch.autograd.grad(A.logsumexp().sum(), leaves)
    expected = torch.zeros(2, 7, dtype=torch.bool)
    expected[0, 2] = True
    assert torch.equal(of_query.isnan().any(-1), expected)
    assert of_sink.isnan().tolist() == [True, False]


def test_a_sink_far_above_the_scores_has_finite_gradients() -> None:
    query, key, value = made()
    sink = torch.tensor([1e4, -1e4]).double().requires_grad_()
    A = regard.attend(query, key, sink_bias=sink, mask=torch.arange(7)[:, None] > 2)
    output, entropy, lse = A.reduce(regard.Output(value), regard.Entropy(), regard.LogSumExp())
    total = output.sum() + entropy.sum() + oracle.finite(lse).sum()
    gradients = torch.autograd.grad(total, (query, key, value, sink))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    # All weight on the sink of the first head, in the four rows that have keys; none of the second.
    torch.testing.assert_close(gradients[3], torch.tensor([4.0, 0.0]).double())


def test_an_infinite_gradient_of_a_row_without_keys_reaches_no_input() -> None:
    query, key, _ = made()
    sink = torch.zeros(2).double().requires_grad_()
    lse = regard.attend(query, key, sink_bias=sink, mask=torch.arange(7)[:, None] > 2).logsumexp()
    arriving = torch.where(lse.isfinite(), 1.0, -torch.inf)
    gradients = torch.autograd.grad(lse, (query, key, sink), arriving)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("value_dim", [8, 3], ids=["same-width", "other-width"])
@pytest.mark.parametrize("mask", [None, regard.Causal()], ids=["bias", "bias-and-causal"])
@pytest.mark.parametrize("masked", [LEAST, -1e9, -1e5, 3e5], ids=str)
def test_a_row_of_equal_large_scores_has_the_gradient_of_the_definition(
    masked: float, mask: regard.Mask | None, value_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 16, n, generator=generator) for n in (8, 8, value_dim)]
    bias = torch.zeros(16, 16)
    bias[3] = masked
    query, key, value = leaves = [tensor.requires_grad_() for tensor in tensors]
    output = regard.attend(query, key, bias=bias, mask=mask) @ value
    outputs = output, definition(query, key, value, bias, mask)
    found, exact = (torch.autograd.grad(each.square().sum(), leaves) for each in outputs)
    for ours, right in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def definition(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: regard.Mask | None
) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
    if mask is not None:
        scores = scores.masked_fill(~mask.to_dense(16, 16), -torch.inf)
    return scores.softmax(-1) @ value
