"""Matrices of DTensors, on gloo processes, against the whole matrix in one process."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard
from ranks import run_ranks

RANKS = Path(__file__).with_name("sharded_ranks.py")


def test_all_questions_and_gradients_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(RANKS, 2, 1, tmp_path / "store", "causal", limit=900)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "head_ranks"), [(2, 1), (4, 1), (4, 2)])
def test_all_masks_questions_and_gradients(ranks: int, head_ranks: int, tmp_path: Path) -> None:
    run_ranks(RANKS, ranks, head_ranks, tmp_path / "store", limit=900)


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
        "both must lie alike",
    ),
    "bias": (
        lambda of: regard.attend(of(X), of(X), bias=torch.zeros(6, 6)),
        TypeError,
        "bias is given with DTensors; their scores take scale, softcap and mask alone",
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


DIFFERENT = """
import sys, datetime, torch, regard
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from regard.backends.distributed import distributed_backend
rank, store, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed_backend.LIMIT = datetime.timedelta(seconds=3)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
width = 8 if kind == "shape" and rank else 4
x = DTensor.from_local(torch.zeros(2, 6, width), mesh, [Shard(1)], run_check=False)
allowed = torch.ones(12, 12, dtype=torch.bool)
allowed[3 + (kind == "mask" and rank), 2] = False
try:
    if kind != "late" or rank == 0:
        A = regard.attend(x, x, mask=regard.Keep(allowed))
        A.topk(3 if kind == "arguments" and rank else 2)
    else:
        import time; time.sleep(8)
except regard.RegardError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("arguments", "rank 1 asks another question than rank 0: "),
        pytest.param("mask", "rank 1 asks another question than rank 0: ", marks=pytest.mark.full),
        pytest.param("shape", "rank 1 asks another question than rank 0: ", marks=pytest.mark.full),
        pytest.param(
            "late",
            "not all of the ranks [0, 1] asked this question within 3 s",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_with_other_arguments_or_none_is_an_error(
    kind: str, message: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", DIFFERENT]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), kind], stdout=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert message in said[0]
