"""One rank of a process group that compares matrices of DTensors with the whole matrix.

    python sharded_ranks.py RANK RANKS HEAD_RANKS STORE [MASK ...]

Run by test_sharded.py; prints what differs.
"""

import datetime
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import regard

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


QUESTIONS = {
    "logsumexp": lambda A: A.logsumexp(),
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


def main(rank: int, ranks: int, head_ranks: int, store: str, *masks: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit
    )
    row_ranks = ranks // head_ranks
    mesh = init_device_mesh("cpu", (head_ranks, row_ranks), mesh_dim_names=("heads", "rows"))
    places = [Shard(1) if head_ranks > 1 else Replicate(), Shard(2)]
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for order in ("contiguous", "zigzag"):
            chunk = TOKENS // (2 * row_ranks)
            at = [i for r in range(row_ranks) for i in (r, 2 * row_ranks - 1 - r)]
            stored = torch.cat([torch.arange(i * chunk, (i + 1) * chunk) for i in at])
            if order == "contiguous":
                stored = torch.arange(TOKENS)
            for name in masks or MASKS:
                compare(mesh, places, dtype, limit, order, stored, name, MASKS[name], head_ranks)
    dist.destroy_process_group()


def compare(mesh, places, dtype, limit, order, stored, mask_name, mask, head_ranks):
    torch.manual_seed(0)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, 3), (HEADS, 3))
    tensors = [torch.randn(BATCH, n, TOKENS, dim, dtype=dtype) for n, dim in shapes]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    spread = [
        distribute_tensor(tensor[:, :, stored], mesh, places).requires_grad_() for tensor in tensors
    ]
    one = regard.attend(plain[0], plain[1], mask=mask)
    many = regard.attend(spread[0], spread[1], mask=mask, rows=order)
    back = stored.argsort()
    rows_of = {"logsumexp", "entropy", "topk", "product"}
    questions = dict(QUESTIONS)
    if head_ranks > 1:
        del questions["own"]
    questions |= {"product": None, "transposed": None}
    for name, ask in questions.items():
        if name == "product":
            expected, got = one @ plain[2], many @ spread[2]
        elif name == "transposed":
            expected, got = one.T @ plain[3], many.T @ spread[3]
        else:
            expected, got = ask(one), ask(many)
        place = f"{dtype} {order} {mask_name} {name}"
        loss, spread_loss = 0.0, 0.0
        for index, (a, b) in enumerate(zip(flat(expected), flat(got), strict=True)):
            b = whole(b)
            if name in rows_of or (name == "several" and index > 0):
                b = b[:, :, back]
            if not a.dtype.is_floating_point:
                assert torch.equal(a, b), place
                continue
            error = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(0).max().item()
            assert error <= limit, (place, error)
            known = a.isfinite()
            wave = torch.linspace(-1, 1, a.numel(), dtype=dtype).view(a.shape)
            loss = loss + (a.where(known, 0) * wave).sum()
            spread_loss = spread_loss + (b.where(known, 0) * wave).sum()
        used = [0, 1] + ([2] if name == "product" else [3] if name == "transposed" else [])
        wanted = torch.autograd.grad(loss, [plain[i] for i in used])
        found = torch.autograd.grad(spread_loss, [spread[i] for i in used])
        for i, a, b in zip(used, wanted, found, strict=True):
            assert b.placements == tuple(places), (place, b.placements)
            error = (a - b.full_tensor()[:, :, back]).abs().max().item()
            assert error <= limit * max(1.0, a.abs().max().item()), (place, "gradient", i, error)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
