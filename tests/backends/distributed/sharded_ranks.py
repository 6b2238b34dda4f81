"""One rank of a process group that compares matrices of DTensors with the whole matrix.

    python sharded_ranks.py RANK RANKS HEAD_RANKS STORE WORK

Run by test_sharded.py; prints what differs. WORK is a name in ``main``.
"""

import datetime
import os
import sys
import time
from concurrent.futures import CancelledError

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard
from regard.backends.distributed import distributed_backend

BATCH, HEADS, KV_HEADS, TOKENS, DIM = 2, 4, 2, 48, 8
MASKS = {
    "none": None,
    "causal": regard.Causal(),
    "top-left": regard.Causal(align="top-left"),
    "window": regard.SlidingWindow(5, 3),
    "padding": regard.Padding(torch.tensor([48, 30])),
    "documents": regard.Documents(torch.arange(TOKENS) // 13),
    "prefix": regard.PrefixLM(9),
    "bool": torch.rand(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3))
    > 0.3,
    "both": regard.Causal() & ~regard.SlidingWindow(2, 2),
    "mod": lambda b, h, q, k: (b + q + k + h) % 3 > 0,
}


class Longest(regard.Reduction):
    """The largest of the sums over the queries, a reduction of one's own."""

    def start(self, shape, dtype, device):
        return (torch.zeros((*shape[:-2], shape[-1]), dtype=dtype, device=device),)

    def update(self, block):
        return (regard.Contribution(block.box.at_columns, block.weights.sum(-2)),)

    def finish(self, buffers, shape):
        return buffers[0].amax(-1)


class Sharpest(regard.Reduction):
    """The largest weight of each query, a reduction of one's own that says what its axes are."""

    by_heads = by_rows = True

    def start(self, shape, dtype, device):
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block):
        return (regard.Contribution(block.box.at_rows, block.weights.amax(-1)),)

    def finish(self, buffers, shape):
        return buffers[0]


QUESTIONS = {
    "logsumexp": lambda A: A.logsumexp(),
    "max-score": lambda A: A.scores.amax(-1),
    "max-score-of-heads": lambda A: A.scores.amax((-2, -1)),
    "max-score-of-all": lambda A: A.scores.max(),
    "entropy": lambda A: A.entropy(),
    "topk": lambda A: A.topk(4),
    "sum-1": lambda A: A.sum(-1),
    "sum-2": lambda A: A.sum(-2),
    "pool": lambda A: A.pool(5, 7),
    "segments": lambda A: A.segments([(0, 20), (20, 48)], [(3, 9)]),
    "diagonal": lambda A: A.diagonal(-1),
    "diagonal+3": lambda A: A.diagonal(3),
    "window": lambda A: A[..., 10:40, ::5],
    "several": lambda A: A.reduce(regard.Sum(-2), regard.Entropy(), regard.TopK(2)),
    "own": lambda A: A.reduce(Longest()),
    "own-by-rows": lambda A: A.reduce(Sharpest()),
    "product": None,
    "transposed": None,
}
FEW = ("logsumexp", "topk", "sum-2", "diagonal+3", "own-by-rows", "product")
BY_ROWS = {"logsumexp", "max-score", "entropy", "topk", "own-by-rows", "product"}


def wave(score, b, h, q, k):
    return score * (1 + 0.1 * h) + 0.3 * torch.sin(0.7 * q + 0.2 * k + b)


# The shapes of the tensors of each kind of scores, and the arguments of attend that they give. A
# bias called "rows" is a DTensor with the query's placements.
SCORES = {
    "plain": ((), dict),
    "softcap": ((), lambda: {"softcap": 1.5}),
    "alibi": (((HEADS,),), lambda x: {"bias": regard.ALiBi(x)}),
    "t5": (((8, HEADS),), lambda x: {"bias": regard.T5Bias(x, max_distance=9)}),
    "keys": (((BATCH, 1, 1, TOKENS),), lambda x: {"bias": x}),
    "bias": (((HEADS, TOKENS, TOKENS),), lambda x: {"bias": x}),
    "rows": (((BATCH, HEADS, TOKENS, TOKENS),), lambda x: {"bias": x}),
    "rows-of-all-heads": (((1, 1, TOKENS, TOKENS),), lambda x: {"bias": x}),
    "mod": ((), lambda: {"score_mod": wave}),
    "sink": (((HEADS,),), lambda x: {"sink_bias": x}),
    "all": (
        ((8, HEADS), (HEADS,)),
        lambda table, sink: {
            "bias": regard.T5Bias(table, max_distance=9),
            "sink_bias": sink,
            "score_mod": wave,
            "softcap": 3.0,
        },
    ),
}


def whole(answer):
    if isinstance(answer, DTensor):
        return answer.full_tensor()
    return (
        type(answer)(*map(whole, answer))
        if hasattr(answer, "_fields")
        else tuple(map(whole, answer))
    )


def flat(answer):
    return (
        [answer] if isinstance(answer, torch.Tensor) else [x for part in answer for x in flat(part)]
    )


class Matrices:
    """A matrix in one process, and the same one on several ranks.

    Args:
        mesh: with axes for the heads and for the rows.
        order: "contiguous" or "zigzag".
        mask: a key of MASKS.
        scores: a key of SCORES.
        q_len: the number of queries.
    """

    def __init__(self, mesh, dtype, order, mask="causal", scores="plain", q_len=TOKENS):
        self.place = f"{dtype} {order} {mask} {scores} {q_len}"
        self.limit = 1e-12 if dtype == torch.float64 else 1e-5
        self.mesh, head_ranks, row_ranks = mesh, mesh.size(0), mesh.size(1)
        self.places = [Shard(1) if head_ranks > 1 else Replicate(), Shard(2)]
        self.stored = {n: _stored(n, row_ranks, order) for n in (q_len, TOKENS)}
        torch.manual_seed(0)
        shapes = ((HEADS, q_len, DIM), (KV_HEADS, TOKENS, DIM), (KV_HEADS, TOKENS, 3))
        shapes = [(BATCH, *shape) for shape in (*shapes, (HEADS, q_len, 3))]
        more, arguments = SCORES[scores]
        self.plain = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
        self.spread = [self._spread(tensor) for tensor in self.plain]
        self.plain_more = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in more]
        self.spread_more = [
            self._spread(x) if scores.startswith("rows") else x.detach().clone().requires_grad_()
            for x in self.plain_more
        ]
        mask = MASKS[mask]
        self.one = regard.attend(*self.plain[:2], mask=mask, **arguments(*self.plain_more))
        self.many = regard.attend(
            *self.spread[:2], mask=mask, rows=order, **arguments(*self.spread_more)
        )

    def _spread(self, tensor):
        places = [
            place if place.is_replicate() or tensor.shape[place.dim] > 1 else Replicate()
            for place in self.places
        ]
        stored = tensor.detach()[:, :, self.stored[tensor.shape[2]]]
        return distribute_tensor(stored, self.mesh, places).requires_grad_()

    def _natural(self, tensor):
        return tensor[:, :, self.stored[tensor.shape[2]].argsort()]

    def compare(self, names=tuple(QUESTIONS)):
        for name in names:
            # Where axes are not declared, each rank needs all heads.
            if name != "own" or self.mesh.size(0) == 1:
                self._compare(name)

    def _compare(self, name):
        place = f"{self.place} {name}"
        if name == "product":
            expected, got = self.one @ self.plain[2], self.many @ self.spread[2]
        elif name == "transposed":
            expected, got = self.one.T @ self.plain[3], self.many.T @ self.spread[3]
        else:
            expected, got = QUESTIONS[name](self.one), QUESTIONS[name](self.many)
        loss, spread_loss = 0.0, 0.0
        for index, (a, b) in enumerate(zip(flat(expected), flat(got), strict=True)):
            b = whole(b)
            if name in BY_ROWS or (name == "several" and index > 0):
                b = self._natural(b)
            if not a.dtype.is_floating_point:
                assert torch.equal(a, b), place
                continue
            error = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(0).max().item()
            assert error <= self.limit, (place, error)
            known = a.isfinite()
            waves = torch.linspace(-1, 1, a.numel(), dtype=a.dtype).view(a.shape)
            loss = loss + (a.where(known, 0) * waves).sum()
            spread_loss = spread_loss + (b.where(known, 0) * waves).sum()
        used = [0, 1] + ([2] if name == "product" else [3] if name == "transposed" else [])
        leaves = [self.plain[i] for i in used] + self.plain_more
        spread_leaves = [self.spread[i] for i in used] + self.spread_more
        wanted = torch.autograd.grad(loss, leaves)
        found = torch.autograd.grad(spread_loss, spread_leaves)
        for i, (a, b, leaf) in enumerate(zip(wanted, found, spread_leaves, strict=True)):
            if isinstance(leaf, DTensor):
                assert b.placements == leaf.placements, (place, b.placements)
                b = self._natural(b.full_tensor())
            error = (a - b).abs().max().item()
            scale = max(1.0, a.abs().max().item())
            assert error <= self.limit * scale, (place, "gradient", i, error)


def _stored(length, row_ranks, order):
    """Return the positions of the tokens in the order in which the ranks have them."""
    if order == "contiguous":
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * row_ranks)
    return torch.cat([chunks[i] for r in range(row_ranks) for i in (r, 2 * row_ranks - 1 - r)])


def compare_work(mesh):
    """Compare the numbers of keys that the rows of each rank see, in zigzag order."""
    x = distribute_tensor(torch.zeros(1, 64, 1), mesh["rows"], [Shard(1)])
    entropy = regard.attend(x, x, mask=regard.Causal(), rows="zigzag").entropy()
    seen = entropy.to_local().exp().sum()  # each row gives its keys the same weight
    assert abs(seen / (64 * 65 / 2 / mesh["rows"].size()) - 1) < 0.02, seen


def compare_few(mesh):
    """Compare every question once, and every kind of scores."""
    compare_work(mesh)
    Matrices(mesh, torch.float64, "zigzag").compare()
    Matrices(mesh, torch.float32, "contiguous").compare(FEW)
    Matrices(mesh, torch.float64, "zigzag", "window", "all", q_len=24).compare(FEW)
    Matrices(mesh, torch.float64, "contiguous", scores="rows").compare(["several"])
    for scores in ("alibi", "bias", "rows-of-all-heads"):
        Matrices(mesh, torch.float64, "zigzag", scores=scores).compare(["topk", "sum-2"])


def compare_all(mesh):
    """Compare every question, mask and kind of scores."""
    compare_work(mesh)
    for dtype, order in (
        (torch.float64, "contiguous"),
        (torch.float64, "zigzag"),
        (torch.float32, "zigzag"),
    ):
        for mask in MASKS:
            Matrices(mesh, dtype, order, mask).compare()
        for scores in SCORES:
            for mask in ("none", "window"):
                Matrices(mesh, dtype, order, mask, scores).compare(FEW)
        for scores in ("t5", "mod"):
            Matrices(mesh, dtype, order, "causal", scores, q_len=24).compare(FEW)


def matrix(
    mesh, *, dim=4, dtype=torch.float32, grad=False, order="contiguous", number=0.0, hidden=(3, 2)
):
    x = DTensor.from_local(torch.zeros(2, 6, dim, dtype=dtype), mesh["rows"], [Shard(1)])
    allowed = torch.ones(12, 12, dtype=torch.bool)
    allowed[hidden] = False
    bias = torch.full((12, 12), number, dtype=dtype)
    return regard.attend(x.requires_grad_(grad), x, mask=allowed, rows=order, bias=bias)


def value(mesh, dim):
    return DTensor.from_local(torch.zeros(2, 6, dim), mesh["rows"], [Shard(1)])


# What rank 1 asks, and what the others ask.
DISAGREEMENTS = {
    "reduction": (lambda mesh: matrix(mesh).topk(3), lambda mesh: matrix(mesh).topk(2)),
    "value": (
        lambda mesh: matrix(mesh) @ value(mesh, 2),
        lambda mesh: matrix(mesh) @ value(mesh, 3),
    ),
} | {
    name: (
        lambda mesh, change=change: matrix(mesh, **change).sum(-2),
        lambda mesh: matrix(mesh).sum(-2),
    )
    for name, change in {
        "mask": {"hidden": (4, 2)},
        "shape": {"dim": 8},
        "dtype": {"dtype": torch.float64},
        "gradient": {"grad": True},
        "order": {"order": "zigzag"},
        "bias": {"number": 1.0},
    }.items()
}


def disagree(mesh, rank):
    """Ask another question on rank 1 than on rank 0; both learn which rank that is."""
    for ask in DISAGREEMENTS.values():
        with pytest.raises(
            regard.RegardError, match=f"rank {1 - rank} made another call than rank {rank}: "
        ):
            ask[rank != 1](mesh)
    assert matrix(mesh).sum(-2).full_tensor().isfinite().all()  # the group still works


def miss(mesh, rank, seconds=300):
    """Ask after rank 1 has died, or while it sleeps; the first rank names it."""
    x = value(mesh, 4)
    who = "rank 1 did" if rank == 0 else r"some of the ranks \[0, 1, 2\] did"
    with pytest.raises(
        regard.RegardError, match=f"^{who} not ask this question within {seconds} s"
    ):
        regard.attend(x, x).sum(-2)


class Fatal(Longest):
    """A reduction during which rank 1 dies."""

    def update(self, block):
        if dist.get_rank() == 1:
            os._exit(0)
        return super().update(block)


def cancel(mesh, rank):
    """Cancel a question on rank 1 alone, after its first head; it ends on both."""
    done = []
    said = "reduce.. was cancelled after 1 of 2" if rank == 1 else "another rank ended this call"
    with pytest.raises(CancelledError, match=said):
        matrix(mesh).reduce(
            regard.Sum(-2),
            progress=lambda count, _: done.append(count),
            cancelled=lambda: rank == 1 and bool(done),
        )
    assert done == [1]
    matrix(mesh).reduce(regard.Sum(-2), progress=lambda count, total: done.append((count, total)))
    assert done == [1, (1, 2), (2, 2)]


def work_few(mesh, rank):
    compare_few(mesh)
    cancel(mesh, rank)
    disagree(mesh, rank)
    if rank == 1:
        os._exit(0)
    miss(mesh, rank)


def work_late(mesh, rank):
    """Rank 1 does not ask in time."""
    distributed_backend.LIMIT = datetime.timedelta(seconds=3)
    if rank == 1:
        time.sleep(8)
    else:
        miss(mesh, rank, seconds=3)


def work_fatal(mesh, rank):
    """Rank 1 dies after all ranks have asked the same."""
    x = value(mesh, 4)
    with pytest.raises(regard.RegardError, match="Look for a rank that died"):
        regard.attend(x, x).reduce(Fatal())


def main(rank: int, ranks: int, head_ranks: int, store: str, work: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit
    )
    mesh = init_device_mesh(
        "cpu", (head_ranks, ranks // head_ranks), mesh_dim_names=("heads", "rows")
    )
    if work == "all":
        compare_all(mesh)
    else:
        {"few": work_few, "late": work_late, "fatal": work_fatal}[work](mesh, rank)
        os._exit(0)  # a group with a missing rank cannot be left
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
    sys.stdout.flush()
    # Every check has passed. In the interpreter's teardown a thread of gloo ended the process in
    # about one of thirty runs ("terminate called without an active exception").
    os._exit(0)
