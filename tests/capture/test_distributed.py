"""Models that PyTorch distributes, on gloo processes, against the same model in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel, register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import regard
import tiny_models
from ranks import run_ranks
from recording_files import changed
from regard.recording.layers import Origin
from regard.recording.shard import Shard as Place

HYBRID = ShardingStrategy.HYBRID_SHARD
RANKS = Path(__file__).with_name("distributed_ranks.py")


def assert_joined(folder: Path, way: str, ranks: int) -> None:
    """The parts of all ranks are the recording of one process: names, numbers and weights."""
    assert len(list((folder / way).iterdir())) == ranks
    one, many = regard.load(folder / f"{way}.safetensors"), regard.load(folder / way)
    assert [layer.name for layer in many.layers] == [layer.name for layer in one.layers]
    assert many.model == one.model
    assert one.layers
    for place, (expected, got) in enumerate(zip(one.layers, many.layers, strict=True)):
        assert got.shape == expected.shape
        assert got.queries == expected.queries
        assert got.model_index(place) == expected.model_index(place)
        heads = range(expected.shape[-3])
        assert [got.head(head) for head in heads] == [expected.head(head) for head in heads]
        for reduction in (regard.Entropy(), regard.TopK(2)):
            both = zip(got.reduce(reduction), expected.reduce(reduction), strict=True)
            for mine, theirs in both:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        if expected.matrix is not None:
            dense = [layer.whole().to_dense() for layer in (got, expected)]
            torch.testing.assert_close(*dense, rtol=0, atol=1e-6)
        if expected.value is not None:
            values = [layer.whole_value() for layer in (got, expected)]
            torch.testing.assert_close(*values, rtol=0, atol=1e-6)


@pytest.mark.full  # Two processes that import PyTorch take ten seconds.
def test_merged_parts_are_the_recording_of_one_process(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ways = ("tensor-parallel", "ddp")
    run_ranks(RANKS, 2, tmp_path, *ways, limit=300)
    for way in ways:
        with subtests.test(way):
            assert_joined(tmp_path, way, 2)


@pytest.mark.full
def test_merged_parts_of_every_other_way(tmp_path: Path, subtests: pytest.Subtests) -> None:
    ways = ("some-heads", "heads-of-one-rank", "answers", "fsdp", "fully-shard", "llama")
    sizes = {**tiny_models.SIZES, "intermediate_size": 48}  # one that two ranks can split
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, num_key_value_heads=2, max_position_embeddings=64, **sizes
    )
    tiny_models.save(tmp_path / "llama", transformers.LlamaForCausalLM(config), tokenizer=False)
    run_ranks(RANKS, 2, tmp_path, *ways, limit=300)
    for way in (*ways[:-1], "llama-eager", "llama-sdpa"):
        with subtests.test(way):
            assert_joined(tmp_path, way, 2)


@pytest.mark.full
def test_merged_parts_of_a_mesh_with_two_axes(tmp_path: Path) -> None:
    run_ranks(RANKS, 4, tmp_path, "both", limit=300)
    assert_joined(tmp_path, "both", 4)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of two ranks, of which this process is the second; the first never comes."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Split(nn.Module):
    """Attention with a projection each, of as many heads as its weights have."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (each(x).unflatten(-1, (-1, 4)) for each in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in split)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def parallel(model: nn.Module, *, names: str = "query key value", local: bool = True) -> nn.Module:
    plan = {name: ColwiseParallel(use_local_output=local) for name in names.split()}
    model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    for weight in model.parameters():  # the first rank, which never comes, would give the numbers
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        nn.init.normal_(local.detach(), generator=torch.Generator().manual_seed(1))
    return model


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("group")
def test_observe_waits_for_no_other_rank() -> None:
    model = parallel(Split())
    with torch.no_grad(), regard.observe(model) as seen:
        model(X)
    [layer] = seen.layers
    assert layer.origin == Origin(0, (2, 3))
    assert seen.shard is not None
    assert (seen.shard.rank, seen.shard.heads) == (1, (1, 2))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("heads", "recorded"), [([2], (2,)), ([3, 0], (3,)), (slice(1, None), (2, 3)), ([0, 1], None)]
)
def test_heads_are_numbered_as_in_the_model_of_all_ranks(
    heads: Any, recorded: tuple[int, ...] | None
) -> None:
    model = parallel(Split())
    whole = parallel(Split())
    whole.load_state_dict(model.state_dict())
    with torch.no_grad(), regard.observe(model, heads=heads) as seen:
        model(X)
    with torch.no_grad(), regard.observe(whole) as everything:
        whole(X)
    assert seen.shard is not None
    if recorded is None:
        assert (list(seen), seen.shard.without) == ([], ("Split",))
        return
    [layer] = seen.layers
    assert layer.origin == Origin(0, recorded)
    expected = everything[0].to_dense()[:, [head - 2 for head in recorded]]
    assert torch.equal(seen[0].to_dense(), expected)


@pytest.mark.usefixtures("group")
def test_a_head_that_no_rank_has_is_refused() -> None:
    model = parallel(Split())
    refused = pytest.raises(regard.RegardError, match=r"heads has 4; the layer has 4 heads\.")
    with torch.no_grad(), refused, regard.observe(model, heads=[4]):
        model(X)


class Changed(Split):
    """Attention by hand whose weights are changed after the softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (each(x).unflatten(-1, (-1, 4)) for each in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in split)
        return (query @ key.mT).softmax(-1).flip(-1) @ value


class Packed(Split):
    """Attention with one projection, whose rows are those of the query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.all(x).unflatten(-1, (3, -1, 4)).unbind(-3)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


class Cut(Split):
    """Attention on a part of what its projections give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (each(x)[..., :4] for each in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in split)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


class Written(Split):
    """Attention by hand, on whatever the projections give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each(x) for each in (self.query, self.key, self.value))
        return (query @ key.mT).softmax(-1) @ value


class Ours(Split):
    """regard's own attention, of DTensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = DTensor.from_local(self.query(x), init_device_mesh("cpu", (2,)), [Shard(1)])
        return regard.attend(query, query) @ query


class Ring(Split):
    """Attention under context parallel, where each process has a part of the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x[:, :4].clone()
        with context_parallel(init_device_mesh("cpu", (2,)), buffers=[own], buffer_seq_dims=[1]):
            return super().forward(own)


# Without a rule, PyTorch tries 125 ways to shard this operation, which takes 15 seconds.
@register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
def by_heads(*arguments: object) -> list[tuple[list[Shard], list[Shard | None]]]:
    return [([Shard(1)] * 2, [Shard(1)] * 3 + [None] * (len(arguments) - 3))]


DTENSORS = "its query and key are split over processes as DTensors"
BY_HAND = "save the query and key of each process, and pass them to regard.attend as DTensors"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one-parameter": (lambda: parallel(Packed(), names="all"), "come from one parameter that is"),
    "no-parameter": (lambda: parallel(Cut()), "heads of this process are unknown: no parameter"),
    "weights": (lambda: parallel(Changed()), "weights do not follow from a query and a key, so"),
    "regard-dtensors": (Ours, DTENSORS),
    "fused-dtensors": (lambda: parallel(Split(), local=False), DTENSORS),
    "dtensors": (lambda: parallel(Written(), local=False), DTENSORS),
    "context-parallel": (Ring, f"For context parallel, {BY_HAND}"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("model", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_layer_whose_heads_cannot_be_told_is_refused(
    model: Callable[[], nn.Module], reason: str
) -> None:
    run = model()
    refused = pytest.raises(regard.RegardError, match=reason)
    with torch.no_grad(), refused, regard.observe(run):
        run(X)


def with_hooks() -> nn.Module:
    from torch.distributed.tensor.experimental._attention import _ContextParallel

    kind = _ContextParallel.AttentionType.FLEX
    plan = _ContextParallel(seq_dim=2, attention_type=kind)
    return parallelize_module(Split(), init_device_mesh("cpu", (2,)), plan)


def without_dtensors() -> nn.Module:
    model = Split()
    model._tp_size = 2
    return model


def fsdp(*axes: str, **options: Any) -> nn.Module:
    """FSDP1 on some axes of a mesh; the other axes may split parameters."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("other", "data"))[axes]
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(Split(), device_mesh=mesh, device_id=cpu, **options)


UNKNOWN: dict[str, tuple[Callable[[], object], str]] = {
    "data-parallel": (lambda: nn.DataParallel(Split()), "it has a DataParallel, which runs copies"),
    "hybrid": (
        lambda: fsdp("other", "data", sharding_strategy=HYBRID),
        "its FullyShardedDataParallel has a hybrid sharding strategy",
    ),
    "split-already": (
        lambda: fsdp("data"),
        "its FullyShardedDataParallel is around parameters that are split already",
    ),
    "wrapper": (lambda: nn.ModuleDict({"module": Split()}), "ModuleDict is a wrapper that regard"),
    "context-parallel": (with_hooks, "its Split runs under context parallel.\n    Save the"),
    "pipeline": (
        lambda: PipelineStage(Split(), 1, 2, torch.device("cpu")),
        "observe joins heads and batch entries, not stages and microbatches.\n    Observe the "
        f"model without a pipeline, or {BY_HAND}",
    ),
    "plain": (without_dtensors, "its Split is tensor parallel without DTensors"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("model", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_way_to_distribute_is_refused_at_once(
    model: Callable[[], object], reason: str
) -> None:
    refused = pytest.raises((regard.RegardError, TypeError), match=reason)
    with refused, regard.observe(model()):
        raise AssertionError("the block was entered")


@pytest.mark.usefixtures("group")
def test_context_parallel_has_the_zigzag_order_of_attend() -> None:
    tokens, mesh = torch.arange(12), init_device_mesh("cpu", (2,))
    with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0]):
        here = tokens.tolist()
    assert here == [3, 4, 5, 6, 7, 8]  # chunks 1 and 2 of 4 of rank 1, as rows="zigzag" means


@pytest.mark.usefixtures("group")
def test_names_are_those_without_wrappers() -> None:
    model = DistributedDataParallel(nn.Sequential(Split()))
    with torch.no_grad(), regard.observe(model, layers=["0"]) as seen:
        model(X)
    assert list(seen) == ["0"]
    assert seen.model == "Sequential"
    assert seen.shard is not None
    assert seen.shard.batch == (1, 2)


@pytest.mark.usefixtures("group")
def test_gradients_leave_no_false_refusal() -> None:
    model = parallel(Split())
    with regard.observe(model, strict=True) as seen:
        model(X)
    assert not seen.refused


@pytest.mark.usefixtures("group")
def test_a_part_is_saved_in_a_folder(tmp_path: Path) -> None:
    model = parallel(Split())
    with torch.no_grad(), regard.observe(model, path=tmp_path / "run") as seen:
        model(X)
    seen.save(tmp_path / "again")
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors")]
    assert sorted(map(str, files)) == ["again/rank1.safetensors", "run/rank1.safetensors"]
    with pytest.raises(regard.RegardError, match="each process of a distributed run has its own"):
        seen.save(tmp_path / "run.safetensors")


def part(rank: int, of: int = 2, **changes: Any) -> regard.Recording:
    """Two of the heads of a layer, or of several."""
    changes = {"run": "a", "layers": ["layer"], "heads": (2 * rank, 2 * rank + 1)} | changes
    generator = torch.Generator().manual_seed(changes.get("seed", 0))
    x = torch.randn(1, 2, changes.get("tokens", 5), 4, generator=generator)
    matrix = regard.attend(*[x.to(changes.get("dtype"))] * 2, **changes.get("options", {}))
    seen = regard.Recording({})
    for name in changes["layers"]:
        origin = Origin(0, changes["heads"])
        seen.add(name, matrix, origin=origin, answers=changes.get("answers", []))
    seen.shard = Place(changes["run"], rank, heads=(rank, of))
    return seen


MISFITS: dict[str, tuple[Callable[[], list[regard.Recording]], str]] = {
    "nothing": (list, "there are no recordings to merge"),
    "missing": (
        lambda: [part(0, 3), part(2, 3)],
        "1 of 3 parts of the run are missing, the first is heads 1 of 3",
    ),
    "twice": (lambda: [part(0), part(0)], "are the same part of the run, heads 0 of 2"),
    "another-run": (lambda: [part(0), part(1, run="b")], "rank 1 and rank 0 are of different runs"),
    "whole": (
        lambda: [part(0), regard.Recording({})],
        "recording 1 is the recording of a whole model",
    ),
    "shape": (
        lambda: [part(0), part(1, tokens=6)],
        r"has shape \(1, 2, 5, 5\) on rank 0 and \(1, 2, 6, 6\) on rank 1",
    ),
    "dtype": (
        lambda: [part(0), part(1, dtype=torch.float64)],
        "another dtype on rank 1 than on rank 0, float32 and float64",
    ),
    "scale": (
        lambda: [part(0), part(1, options={"scale": 2.0})],
        "layer 'layer' has another score_mod, scale or bias on rank 1 than on rank 0",
    ),
    "answer": (
        lambda: [part(rank, answers=[(regard.Pool(1, 1), torch.ones(()))]) for rank in (0, 1)],
        "layer 'layer' has an answer that is not one for each head and text; it cannot be joined",
    ),
    "heads": (
        lambda: [part(0), part(1, heads=(1, 2))],
        r"has heads \[1, 2\] on rank 1, and \[0, 1\] before it; they are not parts of one layer",
    ),
    "layer": (
        lambda: [part(0), part(1, layers=["layer", "more"])],
        "rank 0 has no layer 'more', which rank 1 has",
    ),
}


@pytest.mark.parametrize(("parts", "reason"), MISFITS.values(), ids=MISFITS)
def test_parts_that_do_not_fit_are_one_clear_error(
    parts: Callable[[], list[regard.Recording]], reason: str
) -> None:
    with pytest.raises(regard.RegardError, match=reason):
        regard.Recording.merge(parts())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    part(0, 2).save(tmp_path / "run")
    part(0, 2, run="b").save(tmp_path / "old")
    (tmp_path / "old" / "rank0.safetensors").rename(tmp_path / "run" / "rank1.safetensors")
    with pytest.raises(regard.RegardError, match=r"run/rank1.safetensors and .* different runs"):
        regard.load(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(regard.RegardError, match="is a folder without recordings"):
        regard.load(tmp_path / "empty")


def test_heads_are_joined_in_the_order_of_the_ranks() -> None:
    whole = regard.Recording.merge([part(1, seed=1), part(0, seed=0)])
    assert whole.shard is None
    parts = [part(rank, seed=rank)["layer"].to_dense() for rank in (0, 1)]
    torch.testing.assert_close(whole["layer"].to_dense(), torch.cat(parts, 1))


WRONG_PARTS: dict[str, tuple[dict[str, object], str]] = {
    "beyond": ({"heads": [2, 2]}, "part 2 of 2 of a distributed run"),
    "too-many": ({"batch": [0, 2**20]}, "part 0 of 1048576 of a distributed run"),
    "no-number": ({"rank": "first"}, "'first' where a count must stand"),
    "no-text": ({"run": 3}, "3 where a text must stand"),
    "missing": ({"rank": None}, "None where a count must stand"),
    "stage": ({"layers": [0, 2]}, "Shard with 'layers', which it cannot have"),
}


@pytest.mark.parametrize(("changes", "reason"), WRONG_PARTS.values(), ids=WRONG_PARTS)
def test_a_damaged_part_is_noticed(changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    part(1).save(tmp_path / "run")
    [file] = (tmp_path / "run").iterdir()
    changed(file, lambda about: about["shard"].update(changes))
    with pytest.raises(regard.RegardError, match=reason):
        regard.load(file)


KEEP_KEYS, KEEP_CELLS = torch.ones(2, 1, 1, 5).bool(), torch.ones(2, 1, 5, 5).bool().tril()


@pytest.mark.parametrize(
    "masks",
    [
        [regard.Causal(), regard.Causal() & regard.Padding([5, 3]), None],
        [regard.Keep(KEEP_KEYS), regard.Keep(KEEP_CELLS), regard.Keep(KEEP_KEYS)],
    ],
    ids=["with and without padding", "tensors of other axes"],
)
def test_texts_with_other_masks_are_joined(masks: list[regard.Mask | None]) -> None:
    x = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    parts = []
    for rank, mask in enumerate(masks):
        seen = regard.Recording({"layer": regard.attend(x, x, mask=mask)})
        seen.shard = Place("a", rank, batch=(rank, 3))
        parts.append(seen)
    whole = regard.Recording.merge(parts)["layer"]
    torch.testing.assert_close(
        whole.to_dense(), torch.cat([seen["layer"].to_dense() for seen in parts])
    )
