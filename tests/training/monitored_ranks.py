"""One rank of a process group that trains a model which PyTorch distributes, with a monitor.

    python monitored_ranks.py RANK RANKS FOLDER

Run by test_distributed_monitor.py, which compares ``FOLDER/WAY.RANK`` with one process.
"""

import datetime
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import regard

BATCH, TOKENS, WIDTH, HEAD_DIM, STEPS = 6, 7, 32, 4, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        split = (f(x).unflatten(-1, (-1, HEAD_DIM)) for f in (self.query, self.key, self.value))
        output = F.scaled_dot_product_attention(*(e.transpose(1, 2) for e in split), is_causal=True)
        return x + self.out(output.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tensor_parallel(model: Model, mesh: object) -> Model:
    plan = {f"layers.*.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    return parallelize_module(model, mesh, {**plan, "layers.*.out": RowwiseParallel()})


def train(
    folder: Path, way: str, distributed: Callable[[Model], nn.Module], part: slice
) -> list[dict]:
    """Return the summaries of each step; the batch of this process is a part of the whole."""
    torch.manual_seed(0)
    model = distributed(Model())
    batches = torch.randn(STEPS, BATCH, TOKENS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found: list[dict] = []
    alerts: list[object] = []
    alarm = regard.alarms.max_score(0)
    arguments = {"every": 1, "alarm": alarm, "then": alerts.extend, "save": folder / f"{way}.saved"}
    with regard.Monitor(model, folder / way, **arguments) as monitor:
        for step, batch in enumerate(batches):
            with monitor(step):
                loss = model(batch[part])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(monitor.latest)
    assert len(alerts) == STEPS * 2 * WIDTH // HEAD_DIM, alerts
    return found


def plain(found: list[dict]) -> list[dict]:
    return [{key: tuple(summary) for key, summary in each.items()} for each in found]


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=ranks,
        store=dist.FileStore(str(folder / "store"), ranks),
        timeout=datetime.timedelta(seconds=100),
    )
    mesh = init_device_mesh("cpu", (ranks,))
    half = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    ways = {
        "ddp": (DistributedDataParallel, half),
        "fsdp": (lambda model: fully_shard(model, mesh=mesh), half),
        "tensor": (lambda model: tensor_parallel(model, mesh), slice(None)),
    }
    for way, (distributed, part) in ways.items():
        found = train(folder, way, distributed, part)
        torch.save(plain(found), folder / f"{way}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
