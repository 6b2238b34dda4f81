"""The graph of an answer holds tensors through autograd alone, which may free or move them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import regard
from live_memory import LiveMemory
from regard.backends import sdpa_tiling as forms
from regard.backends.recomputed import recomputed
from regard.matrix.weighted_sums import WeightedSum
from regard.reductions.divergences import JensenShannon, KullbackLeibler
from regard.reductions.products import Output, TransposedOutput, WeightTile
from regard.reductions.reduction import Contribution, Reduction, RowStatistic

LENGTH = 64


@dataclass(frozen=True, eq=False)
class Weighted(RowStatistic):
    """A user's own reduction, whose tensors lie in an attribute, a tuple, a list and a dict."""

    one: Tensor
    several: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        first, (second, table) = self.several
        return self.one, first, second, table["third"]

    def update(self, block: regard.Block) -> tuple[Contribution, ...]:
        parts = [block.part(tensor, block.box.at_rows) for tensor in self.tensors]
        numbers = (block.weights.square().sum(-1) * part[..., 0] for part in parts)
        return (Contribution(block.box.at_rows, sum(numbers, block.row_sum)),)


def weighted(x: Tensor) -> Weighted:
    return Weighted(x, (x.sin(), [x.cos(), {"third": x.exp()}]))


@dataclass(eq=False)
class Cached(RowStatistic):
    """A user's own reduction that keeps a tensor which it has made of another one."""

    tensor: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.tensor,)

    @cached_property
    def doubled(self) -> Tensor:
        return 2 * self.tensor.detach()

    def update(self, block: regard.Block) -> tuple[Contribution, ...]:
        rows = block.box.at_rows
        number = block.part(self.tensor, rows).square().sum(-1) + self.doubled[rows].sum(-1)
        return (Contribution(rows, block.logsumexp * number),)


Reductions = Callable[[Tensor], list[Reduction]]
Matrix = Callable[[Tensor, Tensor, Tensor], regard.AttentionMatrix]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def beside(x: Tensor) -> tuple[Any, Any]:
    """Scores and mask of a second matrix."""
    B = regard.attend(x, x, mask=regard.Causal() & regard.Keep(x[0, 0, :, 0] > -1))
    return B.source, B.mask


REDUCTIONS: dict[str, Reductions] = {
    "entropy": lambda _: [regard.Entropy()],
    "logsumexp": lambda _: [regard.LogSumExp()],
    "topk": lambda _: [regard.TopK(3)],
    "pool": lambda _: [regard.Pool(5, 7)],
    "segments": lambda _: [regard.Segments([(0, 9), (5, LENGTH)])],
    "diagonal": lambda _: [regard.Diagonal(-1)],
    "window": lambda _: [WeightTile(range(3, 50, 2), range(4, 40))],
    "output": lambda x: [Output(x)],
    "transposed-output": lambda x: [TransposedOutput(x)],
    "kl": lambda x: [KullbackLeibler(*beside(x))],
    "cross-entropy": lambda x: [KullbackLeibler(*beside(x)), regard.Entropy()],
    "js": lambda x: [JensenShannon(*beside(x))],
    "several": lambda x: [regard.Entropy(), regard.Sum(-2), regard.TopK(2), Output(x)],
    "weighted-sum": lambda x: [WeightedSum((x @ x.mT).tanh())],
    "user's": lambda x: [Weighted(x, (x.sin(), [x.cos(), {"third": x.exp()}]))],
    "user's-cached": lambda x: [Cached(x)],
}
ONLY_SWEEP = ("weighted-sum", "user's", "user's-cached")
MATRICES: dict[str, Matrix] = {
    "plain": lambda q, k, _: regard.attend(q, k),
    "grouped": lambda q, k, _: regard.attend(q, k[:, :1].contiguous()),
    "bias": lambda q, k, x: regard.attend(q, k, bias=x @ x.mT),
    "alibi": lambda q, k, x: regard.attend(q, k, bias=regard.ALiBi(x[0, :, 0, 0].square())),
    "t5": lambda q, k, x: regard.attend(q, k, bias=regard.T5Bias(x[0, :, :32, 0].mT)),
    "sink": lambda q, k, x: regard.attend(q, k, sink_bias=x[0, :, 0, 0]),
    "softcap": lambda q, k, _: regard.attend(q, k, softcap=2.0),
    "score-mod": lambda q, k, _: regard.attend(
        q, k, score_mod=lambda score, _, h, q_idx, kv_idx: score + h * (q_idx - kv_idx) / 64
    ),
    "scores": lambda q, k, _: regard.AttentionMatrix.from_scores(q @ k.mT),
    "weights": lambda q, k, _: regard.AttentionMatrix.from_weights((q @ k.mT).softmax(-1)),
    "keep": lambda q, k, x: regard.attend(q, k, mask=(x[..., :1] @ x[..., :1].mT) > -1),
    "documents": lambda q, k, _: regard.attend(
        q, k, mask=regard.Documents(torch.arange(LENGTH) // 20) & regard.Causal()
    ),
    "part": lambda q, k, _: regard.attend(q, k, mask=regard.Padding([LENGTH, 9]))[1],
}
MASKS: dict[str, Callable[[], Any]] = {
    "causal": regard.Causal,
    "padding": lambda: regard.Padding([50, 9]),
    "prefix": lambda: regard.PrefixLM(20),
    "documents": lambda: regard.Documents(torch.arange(LENGTH) // 20),
    "keep": lambda: regard.Keep(torch.arange((LENGTH - 5) * LENGTH).view(-1, LENGTH) % 3 > 0),
    "mask-mod": lambda: lambda b, _, q_idx, kv_idx: (q_idx + kv_idx + b) % 3 > 0,
}
# Numbers so small that the matrices of this test need several fused calls.
TINY = {"SMALL": 0, "MIN_TILE": 1, "MAX_TILE": 16, "WIDEST_FOLD": 0}


def total(answers: Any) -> Tensor:
    """One number that depends on all finite numbers of some answers."""
    leaves = cast("list[Tensor]", tree_leaves(answers))
    floating = [x.masked_fill(x.isinf(), 0) for x in leaves if x.is_floating_point()]
    return sum((x.sin().sum() for x in floating), torch.zeros(()))


def of_reductions(reductions: Reductions, backend: str) -> Loss:
    def loss(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        A = regard.attend(q, k, mask=regard.Causal())
        return total(A.reduce(*reductions(x), backend=backend))

    return loss


def of_matrix(matrix: Matrix, backend: str) -> Loss:
    def loss(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        asked = regard.Entropy(), regard.TopK(2), regard.Pool(3, 4)
        return total(matrix(q, k, x).reduce(*asked, backend=backend))

    return loss


def of_product(mask: Callable[[], Any], *, biased: bool = False) -> Loss:
    def loss(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        bias = torch.linspace(-1, 1, LENGTH).to(q.dtype) if biased else None
        A = regard.attend(q[..., 5:, :].contiguous(), k, mask=mask(), bias=bias)
        return total(A.reduce(Output(x), backend="sdpa"))

    return loss


def scores(q: Tensor, k: Tensor, x: Tensor) -> Tensor:
    A = regard.attend(q, k, mask=regard.Keep(x[0, 0, :, 0] > -1))
    return total(A.scores[..., 3:60, 1:9])


BACKENDS = ("sweep", "cpu")
LOSSES: dict[str, Loss] = {
    **{
        f"{name}-{backend}": of_reductions(reductions, backend)
        for name, reductions in REDUCTIONS.items()
        for backend in BACKENDS[: 1 if name in ONLY_SWEEP else 2]
    },
    **{
        f"{name}-matrix-{backend}": of_matrix(matrix, backend)
        for name, matrix in MATRICES.items()
        for backend in BACKENDS
    },
    **{f"{name}-product": of_product(mask) for name, mask in MASKS.items()},
    "biased-product": of_product(regard.Causal, biased=True),
    "scores": scores,
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@pytest.fixture(autouse=True)
def several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TINY.items():
        monkeypatch.setattr(forms, name, value)


def made() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (2, 2, LENGTH, 8)
    return [torch.randn(size, generator=generator).requires_grad_() for _ in range(3)]


def between(loss: Loss) -> Loss:
    """The loss of tensors that no caller holds."""
    return lambda *leaves: loss(*(1.5 * leaf for leaf in leaves))


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros(()) if each is None else each for each in found]


def test_memory_that_is_held_is_noticed() -> None:
    with LiveMemory() as memory:
        part = torch.zeros(LENGTH)[:3]
    assert memory.operations(LENGTH)
    del part
    assert not memory.operations(LENGTH)


@pytest.mark.sampled(21)
@every_loss
def test_a_checkpoint_frees_everything_between(loss: Loss) -> None:
    leaves = made()
    expected = gradients(between(loss)(*leaves), leaves)
    with LiveMemory() as memory:
        answer = checkpoint(between(loss), *leaves, use_reentrant=False)
    assert not memory.operations(LENGTH)
    assert all(map(torch.equal, gradients(answer, leaves), expected))


@pytest.mark.sampled(21)
@every_loss
def test_hooks_move_everything_between(loss: Loss) -> None:
    leaves = made()
    expected = gradients(between(loss)(*leaves), leaves)

    def pack(tensor: Tensor) -> Any:
        return tensor.detach().numpy().copy(order="K")

    with saved_tensors_hooks(pack, torch.from_numpy), LiveMemory() as memory:
        answer = between(loss)(*leaves)
    assert not memory.operations(LENGTH)
    torch.testing.assert_close(gradients(answer, leaves), expected)


# Numbers that were changed while they were away.

CHANGED: dict[str, Loss] = {
    "entropy": lambda q, k, _: regard.attend(q, k).reduce(regard.Entropy(), backend="sweep"),
    "logsumexp": lambda q, k, _: regard.attend(q, k).reduce(regard.LogSumExp(), backend="sweep"),
    "transposed": lambda q, k, x: regard.attend(q, k).reduce(TransposedOutput(x), backend="sweep"),
    "kl": lambda q, k, x: regard.attend(q, k).reduce(
        KullbackLeibler(regard.attend(x, k).source, None), backend="sweep"
    ),
    "user's": lambda q, k, x: regard.attend(q, k).reduce(Cached(x)),
    "product": lambda q, k, x: regard.attend(q, k, mask=regard.PrefixLM(9)) @ x,
}


@pytest.mark.parametrize("answer", CHANGED.values(), ids=CHANGED)
def test_backward_computes_from_what_the_hooks_return(answer: Loss) -> None:
    leaves = made()
    with saved_tensors_hooks(lambda x: x, lambda x: 2 * x if x.is_floating_point() else x):
        changed = answer(*leaves)
    doubled = [(2 * leaf).detach().requires_grad_() for leaf in leaves]
    arriving = torch.linspace(-1, 1, changed.numel()).view(changed.shape)
    found = torch.autograd.grad(changed, leaves, arriving, allow_unused=True)
    expected = torch.autograd.grad(answer(*doubled), doubled, arriving, allow_unused=True)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("divergence", [False, True], ids=["entropy", "kl"])
def test_compiled_backward_reads_what_the_hooks_return(divergence: bool) -> None:
    leaves = made()
    asked = KullbackLeibler(regard.attend(leaves[2], leaves[1]).source, None)
    reduction = asked if divergence else regard.Entropy()

    def moved(x: Tensor) -> Tensor:
        return 2 * x if x.shape == leaves[0].shape else x

    answers = [regard.attend(*leaves[:2]).reduce(reduction, backend="cpu")]
    with saved_tensors_hooks(lambda x: x, moved):
        answers += [regard.attend(*leaves[:2]).reduce(reduction, backend="cpu")]
    first, second = (torch.autograd.grad(each.sum(), leaves[0])[0] for each in answers)
    assert not torch.allclose(first, second)


# A reduction whose tensors lie where nobody can replace them.


class OfModule(RowStatistic):
    """A reduction that reads the weight of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (cast(Tensor, self.module.weight),)

    def update(self, block: regard.Block) -> tuple[Contribution, ...]:
        weight = block.part(*self.tensors, block.box.at_rows[-1:])
        return (Contribution(block.box.at_rows, block.logsumexp * weight.square().sum(-1)),)


@dataclass(frozen=True, eq=False)
class Beside(RowStatistic):
    """A reduction that reads the scores of another matrix."""

    matrix: regard.AttentionMatrix

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.matrix.source.tensors

    def update(self, block: regard.Block) -> tuple[Contribution, ...]:
        beside = block.aligned_block(self.matrix.source, None, block.box.columns)
        return (Contribution(block.box.at_rows, (block.weights * beside.weights).sum(-1)),)


@pytest.mark.parametrize("same", [False, True], ids=["other-matrix", "same-matrix"])
def test_a_matrix_inside_a_reduction_gets_its_gradient(same: bool) -> None:
    query, key, x = leaves = made()
    A = regard.attend(query, key)
    B = A if same else regard.attend(query, x)
    found = gradients(A.reduce(Beside(B)).sin().sum(), leaves)
    expected = gradients((A.to_dense() * B.to_dense()).sum(-1).sin().sum(), leaves)
    torch.testing.assert_close(found, expected)


def test_a_tensor_inside_a_module_gets_its_gradient() -> None:
    leaves = made()
    module = torch.nn.Linear(3, LENGTH)
    answer = regard.attend(*leaves[:2]).reduce(OfModule(module))
    (found,) = torch.autograd.grad(answer.sum(), module.weight)
    lse = regard.attend(*leaves[:2]).logsumexp().detach().sum((0, 1))
    torch.testing.assert_close(found, 2 * module.weight.detach() * lse[:, None])


def test_a_reduction_is_not_changed_by_the_backward_pass() -> None:
    leaves = made()
    reduction = REDUCTIONS["user's"](leaves[2])[0]
    before = dict(vars(reduction))
    regard.attend(*leaves[:2]).reduce(reduction).sum().backward()
    assert vars(reduction) == before


@pytest.mark.parametrize("changed", ["query", "key", "value", "mask of the second"])
def test_a_tensor_of_a_second_matrix_that_changed_is_noticed(changed: str) -> None:
    leaves = made()
    tensors = {"query": 1 * leaves[0], "key": 1 * leaves[1], "value": 1 * leaves[2]}
    tensors["mask of the second"] = torch.ones(LENGTH, dtype=torch.bool)
    A = regard.attend(leaves[0], leaves[1])
    B = regard.attend(tensors["query"], tensors["key"], mask=tensors["mask of the second"])
    answer = regard.kl(A, B).sum() + A.reduce(Output(tensors["value"]), backend="sweep").sum()
    with torch.no_grad():
        tensors[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        answer.backward()


# The function behind all of these.


def squares(x: Tensor, y: Tensor, packed: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the sum of the squares of x, x again, and y; and the number of numbers of x."""
    saved: list[Tensor] = []

    def run() -> list[Tensor]:
        saved.append(torch.full((2,), 2.0))
        return [(2 * x.square() + y.square()).sum(), torch.tensor(x.numel())]

    def pull_back(plan: Any, saved: Any, gradients: Any) -> list[Tensor | None]:
        (x, (y,)), (gradient, none) = plan, gradients
        assert none is None
        assert not torch.is_grad_enabled()
        packed.extend((x, y))
        two = saved[0][0]
        of_y = gradient * two * y if y.requires_grad else None
        return [gradient * two * x, of_y, gradient * two * x]

    return recomputed(run, pull_back, (x, [y]), [x, y, x], saved)


@pytest.mark.parametrize("both", [False, True], ids=["one-leaf", "two-leaves"])
def test_pull_back_gets_leaves_and_what_run_has_saved(both: bool) -> None:
    x = torch.arange(3.0).requires_grad_()
    y = torch.arange(3.0, 6.0).requires_grad_(both)
    plan: list[Tensor] = []
    total, count = squares(x, y, plan)
    assert count == 3
    assert not count.requires_grad
    total.backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())
    torch.testing.assert_close(y.grad, 2 * y.detach() if both else None)
    assert [tensor.requires_grad for tensor in plan] == [True, both]
    assert all(tensor.is_leaf for tensor in plan)
