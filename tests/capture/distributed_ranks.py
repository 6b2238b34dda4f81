"""One rank of a process group that records models which PyTorch distributes.

    python distributed_ranks.py RANK RANKS FOLDER WAY ...

Run by test_distributed.py. Of each way, ``FOLDER/WAY`` has the parts of all ranks, and
``FOLDER/WAY.safetensors`` what one process records of the same model.
"""

import datetime
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import regard

BATCH, TOKENS, WIDTH, HEAD_DIM, LAYERS = 6, 7, 32, 4, 4
CPU = torch.device("cpu")


class Attention(nn.Module):
    def __init__(self, *, fused: bool, kv_width: int) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, kv_width), nn.Linear(WIDTH, kv_width)

    def forward(self, x, allowed):
        split = (f(x).unflatten(-1, (-1, HEAD_DIM)) for f in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in split)
        group = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        if self.fused:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        else:
            scores = query @ key.mT * HEAD_DIM**-0.5
            output = scores.masked_fill(~allowed, -1e9).softmax(-1) @ value
        return self.out(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(fused=fused, kv_width=WIDTH // 2)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x, allowed):
        x = x + self.attention(self.norm(x), allowed)
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = {str(place): Block(fused=place % 2 == 0) for place in range(LAYERS)}
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x, allowed):
        for block in self.blocks.values():
            x = block(x, allowed)
        return x


def tensor_parallel(model, mesh):
    plan = {
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
    return model


def fsdp(model, _mesh):
    for name, block in model.blocks.items():
        model.blocks[name] = FullyShardedDataParallel(block, device_id=CPU)
    return FullyShardedDataParallel(model, device_id=CPU)


def fully_sharded(model, mesh):
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def both(model, _mesh):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    return fully_sharded(tensor_parallel(model, mesh["heads"]), mesh["data"])


# Each way: the model on all ranks, and whether a rank has its own rows of the batch.
WAYS = {
    "tensor-parallel": (tensor_parallel, False, {}),
    "some-heads": (tensor_parallel, False, {"heads": [1, 5, 6], "layers": [1, 3]}),
    "heads-of-one-rank": (tensor_parallel, False, {"heads": [6]}),
    "answers": (tensor_parallel, False, {"keep": [regard.Entropy(), regard.TopK(2)]}),
    "ddp": (lambda model, _: DistributedDataParallel(model), True, {"keep": "qkv"}),
    "fsdp": (fsdp, True, {}),
    "fully-shard": (fully_sharded, True, {"queries": slice(-3, None)}),
    "both": (both, True, {}),
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and a mask with padding in some of the rows."""
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([7, 7, 7, 5, 7, 4])
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return x, allowed & (torch.arange(TOKENS) < lengths[:, None, None, None])


def record(way: str, rank: int, ranks: int, folder: Path) -> None:
    distribute, own_rows, options = WAYS[way]
    x, allowed = batch()
    torch.manual_seed(0)
    whole = Model()
    with torch.no_grad(), regard.observe(whole, **options) as seen:
        whole(x, allowed)
    if rank == 0:
        seen.save(folder / f"{way}.safetensors")
    model = distribute(whole, init_device_mesh("cpu", (ranks,)))
    if own_rows:
        parts = ranks if way != "both" else 2
        part = rank if way != "both" else rank // 2
        x, allowed = (each.chunk(parts)[part] for each in (x, allowed))
    # With gradients, activations pass through DTensors on their way.
    for at_exit in (False, True):
        path = folder / way if at_exit and not options else None
        with (
            torch.set_grad_enabled(not at_exit),
            regard.observe(model, path=path, **options) as seen,
        ):
            model(x, allowed)
        if at_exit and options:
            seen.save(folder / way)


def record_llama(rank: int, folder: Path) -> None:
    import transformers

    for name in ("eager", "sdpa"):
        ids = torch.arange(2, 22).view(2, 10)
        load = {"attn_implementation": name, "dtype": torch.float32}
        plan = transformers.distributed.DistributedConfig(tp_size=2, tp_plan="auto")
        of = transformers.LlamaForCausalLM
        if rank == 0:
            with (
                torch.no_grad(),
                regard.observe(model := of.from_pretrained(folder / "llama", **load)) as seen,
            ):
                model(ids)
            seen.save(folder / f"llama-{name}.safetensors")
        model = of.from_pretrained(folder / "llama", distributed_config=plan, **load)
        with torch.no_grad(), regard.observe(model, path=folder / f"llama-{name}"):
            model(ids)


def main(rank: int, ranks: int, folder: Path, *ways: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    for way in ways:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "error", category=UserWarning, message="(?s).*recording|.*cannot"
            )
            if way == "llama":
                record_llama(rank, folder)
            else:
                record(way, rank, ranks, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
