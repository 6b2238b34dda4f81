"""Tensors that lie on several processes, where an ordinary tensor belongs."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import regard

X = torch.zeros(3, 2)


@pytest.fixture
def sharded() -> Iterator[Callable[[torch.Tensor], DTensor]]:
    """A function that makes DTensors, in a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda tensor: distribute_tensor(tensor, mesh, [Replicate()])
    finally:
        dist.destroy_process_group()


WRONG: dict[str, tuple[str, Callable[[Callable[[torch.Tensor], DTensor]], object]]] = {
    "bias": ("bias", lambda of: regard.attend(X, X, bias=of(torch.zeros(3, 3)))),
    "mask": ("mask", lambda of: regard.attend(X, X, mask=of(torch.ones(3, 3).bool()))),
    "value": ("value", lambda of: regard.attend(X, X) @ of(X)),
    "scores": ("scores", lambda of: regard.AttentionMatrix.from_scores(of(X))),
}


@pytest.mark.parametrize(("name", "wrong"), WRONG.values(), ids=WRONG.keys())
def test_a_dtensor_is_refused_before_any_work(
    name: str, wrong: Callable[[object], object], sharded: Callable[[torch.Tensor], DTensor]
) -> None:
    with pytest.raises(TypeError) as error:
        wrong(sharded)
    assert str(error.value) == (
        f"{name} is a DTensor, which lies on several processes; it must be an ordinary tensor.\n"
        f"    Use {name}.full_tensor() for the whole of it, or {name}.to_local() for the part of "
        "this process."
    )
