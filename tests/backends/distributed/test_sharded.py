"""Matrices of DTensors, on gloo processes, against the whole matrix in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import regard
from live_memory import LiveMemory
from ranks import run_ranks
from regard.backends.sweep import PlainBlocks, SweepTask, fill_buffers

RANKS = Path(__file__).with_name("sharded_ranks.py")


@pytest.mark.full  # Two processes that import PyTorch take ten seconds.
def test_answers_gradients_and_disagreements_of_two_ranks(tmp_path: Path) -> None:
    run_ranks(RANKS, 2, 1, tmp_path / "store", "few", limit=300)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "head_ranks"), [(2, 1), (4, 1), (4, 2)])
def test_all_masks_scores_questions_and_gradients(
    ranks: int, head_ranks: int, tmp_path: Path
) -> None:
    run_ranks(RANKS, ranks, head_ranks, tmp_path / "store", "all", limit=900)


@pytest.mark.full
@pytest.mark.parametrize("work", ["late", "fatal"])
def test_a_rank_that_is_late_or_dies_is_an_error(work: str, tmp_path: Path) -> None:
    run_ranks(RANKS, 3, 1, tmp_path / "store", work, limit=120)


Distribute = Callable[..., DTensor]


@pytest.fixture
def spread() -> Iterator[Distribute]:
    """A function that makes DTensors, in a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda x, place=None: distribute_tensor(x, mesh, [place or Shard(x.ndim - 2)])
    finally:
        dist.destroy_process_group()


X = torch.zeros(2, 6, 4)
BIAS = torch.zeros(2, 6, 6)


def huge(of: Distribute) -> DTensor:
    """A DTensor of more numbers than any device can hold, which needs memory for one of them."""
    numbers, place = torch.zeros(1, 1, 1).expand(2, 2**40, 64), of(X)
    return DTensor.from_local(numbers, place.device_mesh, place.placements, run_check=False)


WRONG: dict[str, tuple[Callable[[Distribute], object], type[Exception], str]] = {
    "one-plain": (
        lambda of: regard.attend(of(X), X),
        TypeError,
        "key is an ordinary tensor, the other a DTensor; both must be DTensors",
    ),
    "replicated": (
        lambda of: regard.attend(of(X, Replicate()), of(X, Replicate())),
        ValueError,
        r"query has placements \(Replicate\(\),\); one mesh axis must be Shard\(1\), its rows",
    ),
    "apart": (
        lambda of: regard.attend(of(X), of(X, Replicate())),
        ValueError,
        "both must have the same mesh and placements",
    ),
    "batch": (
        lambda of: regard.attend(of(X[None].expand(3, -1, -1, -1)), of(X[None])),
        ValueError,
        r"key has shape \(1, 2, 6, 4\) and query \(3, 2, 6, 4\); batch axes of DTensors must be",
    ),
    "bias-axes": (
        lambda of: regard.attend(of(X), of(X), bias=of(BIAS[0])),
        ValueError,
        r"bias has shape \(6, 6\); a DTensor must have all axes of the matrix, \(2, 6, 6\)",
    ),
    "bias-columns": (
        lambda of: regard.attend(of(X), of(X), bias=of(BIAS, Shard(2))),
        ValueError,
        "each mesh axis must hold the bias as it holds the query, or be Replicate()",
    ),
    "slopes": (
        lambda of: regard.attend(of(X), of(X), bias=regard.ALiBi(of(torch.ones(2), Replicate()))),
        TypeError,
        "bias is a DTensor, which lies on several processes; it must be an ordinary tensor",
    ),
    "sink": (
        lambda of: regard.attend(of(X), of(X), sink_bias=of(torch.ones(2), Replicate())),
        TypeError,
        "sink_bias is a DTensor, which lies on several processes; it must be an ordinary tensor",
    ),
    "bias-of-plain": (
        lambda of: regard.attend(X, X, bias=of(BIAS)),
        TypeError,
        "bias is a DTensor, which lies on several processes; it must be an ordinary tensor",
    ),
    "order": (
        lambda of: regard.attend(of(X), of(X), rows="ring"),
        ValueError,
        "rows is 'ring'; it must be 'contiguous' or 'zigzag'",
    ),
    "order-of-plain": (
        lambda _: regard.attend(X, X, rows="zigzag"),
        ValueError,
        "rows is 'zigzag', which says where the rows of DTensors lie",
    ),
    "uneven": (
        lambda of: regard.attend(of(X[:, :5]), of(X[:, :5]), rows="zigzag"),
        ValueError,
        "query has q_len 5; with rows='zigzag' on 1 ranks it must be a multiple of 2",
    ),
    "value": (
        lambda of: regard.attend(of(X), of(X)) @ X,
        ValueError,
        "the matrix is of DTensors, and the operand of Output does not lie like the query",
    ),
    "backend": (
        lambda of: regard.attend(of(X), of(X)).reduce(regard.Entropy(), backend="sweep"),
        ValueError,
        "backend is 'sweep'; a matrix of DTensors has the backend 'distributed' alone",
    ),
    "memory": (
        lambda of: regard.attend(huge(of), huge(of)).max(),
        MemoryError,
        r"gathering one key head would make \(1, 1099511627776, 64\) float32 = 262144.0 GiB; the",
    ),
    "head": (
        lambda of: regard.attend(of(X), of(X))[0],
        ValueError,
        "the index takes a part of the batch or of the heads",
    ),
    "scores": (
        lambda of: regard.attend(of(X), of(X)).scores.to_dense(),
        ValueError,
        "the scores of a matrix of DTensors lie on several ranks",
    ),
}


@pytest.mark.parametrize(("wrong", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_asked_is_refused_in_one_sentence(
    wrong: Callable[[Distribute], object], kind: type[Exception], message: str, spread: Distribute
) -> None:
    with pytest.raises(kind, match=message):
        wrong(spread)


def test_explain_says_what_travels(spread: Distribute) -> None:
    A = regard.attend(spread(X), spread(X), mask=regard.Causal())
    assert str(regard.explain(A, regard.Entropy())) == (
        "distributed: rows on 1 ranks; each gathers 192 bytes of keys, 96 bytes at a time; "
        "96 bytes of memory."
    )
    assert "and reduces 96 bytes of sums" in regard.explain(A, regard.Sum(-2)).how


def test_rows_of_a_rank_stand_where_they_stand_in_the_whole_matrix() -> None:
    query, key = torch.randn(2, 12, 4), torch.randn(2, 12, 4)
    asked = (regard.Segments([(0, 4), (4, 12)]), regard.Diagonal(-1), regard.Pool(3, 3))
    sums: list[Any] = []
    for rows in (range(5), range(5, 12)):
        source = regard.attend(query[:, rows.start : rows.stop], key).source
        task = SweepTask(source, None, asked, PlainBlocks(), (rows, 12))
        sums.append(fill_buffers(task))
    whole = regard.attend(query, key)
    for reduction, *of_parts in zip(asked, *sums, strict=True):
        total = tuple(torch.stack(same).sum(0) for same in zip(*of_parts, strict=True))
        torch.testing.assert_close(
            reduction.finish(total, whole.shape), whole.reduce(reduction), check_dtype=False
        )


def test_a_checkpoint_gathers_keys_again(spread: Distribute) -> None:
    leaves = [spread(torch.randn(2, 6, 4)).requires_grad_() for _ in range(3)]

    def answer(*given: DTensor) -> torch.Tensor:
        query, key, value = (2 * x for x in given)
        A = regard.attend(query, key, mask=torch.ones(6, dtype=torch.bool), rows="zigzag")
        asked = regard.Entropy(), regard.TopK(2), regard.Output(value), regard.Sum(-2)
        entropy, top, output, received = A.reduce(*asked)
        parts = (entropy, top.values, output, received.square())
        return sum((part.to_local().sin().sum() for part in parts), torch.zeros(()))

    def gradients(total: torch.Tensor) -> list[torch.Tensor]:
        return [x.to_local() for x in torch.autograd.grad(total, leaves)]

    expected = gradients(answer(*leaves))
    with LiveMemory() as memory:
        total = checkpoint(answer, *leaves, use_reentrant=False)
    assert not memory.operations(2 * 6 * 4)
    assert all(map(torch.equal, gradients(total), expected))
