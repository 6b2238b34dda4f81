"""Models that PyTorch distributes, on gloo processes, against the same model in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path

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
from regard.capture.slicing import some_queries
from regard.recording.layers import Origin, Queries
from regard.recording.shard import Shard as Place

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
        assert got.place(place) == expected.place(place)
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


def test_merged_parts_are_the_recording_of_one_process(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ways = ("tensor-parallel", "ddp", "pipeline")
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


def test_merged_parts_of_queries_are_the_recording_of_one_process(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ways = ("context-balanced", "context-plain", "context-all-keys", "context-answers")
    run_ranks(RANKS, 2, tmp_path, *ways, limit=300)
    for way in ways:
        with subtests.test(way):
            assert_joined(tmp_path, way, 2)


@pytest.mark.full
def test_merged_parts_of_queries_on_four_ranks(tmp_path: Path, subtests: pytest.Subtests) -> None:
    ways = ("context-balanced", "context-plain", "context-sharded", "context-data", "context-heads")
    run_ranks(RANKS, 4, tmp_path, *ways, limit=300)
    for way in ways:
        with subtests.test(way):
            assert_joined(tmp_path, way, 4)


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
    assert (seen.shard.rank, seen.shard.world_size, seen.shard.heads) == (1, 2, (1, 2))


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


# Without a rule, PyTorch tries 125 ways to shard this operation, which takes 15 seconds.
@register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
def by_heads(*arguments: object) -> list[tuple[list[Shard], list[Shard | None]]]:
    return [([Shard(1)] * 2, [Shard(1)] * 3 + [None] * (len(arguments) - 3))]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one-parameter": (lambda: parallel(Packed(), names="all"), "come from one parameter that is"),
    "no-parameter": (
        lambda: parallel(Cut()),
        "the heads of this process are unknown: no parameter",
    ),
    "regard-dtensors": (Ours, "its query and key are split over processes as DTensors"),
    "fused-dtensors": (
        lambda: parallel(Split(), local=False),
        "its query and key are split over processes as DTensors",
    ),
    "dtensors": (
        lambda: parallel(Written(), local=False),
        "its query and key are split over processes as DTensors",
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("model", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_layer_whose_heads_cannot_be_told_is_refused(
    model: Callable[[], nn.Module], reason: str
) -> None:
    run = model()
    with pytest.raises(regard.RegardError, match=reason), regard.observe(run):
        run(X)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def with_hooks() -> nn.Module:
    from torch.distributed.tensor.experimental._attention import _ContextParallel

    kind = _ContextParallel.AttentionType.FLEX
    plan = _ContextParallel(seq_dim=2, attention_type=kind)
    return parallelize_module(Split(), init_device_mesh("cpu", (2,)), plan)


def without_dtensors() -> nn.Module:
    model = Split()
    model._tp_size = 2
    return model


def hybrid() -> nn.Module:
    """FSDP1 that copies its parts to other groups of processes."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))
    return FullyShardedDataParallel(
        Split(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )


def around_split_parameters() -> nn.Module:
    """FSDP1 on one axis of a mesh, whose other axis splits parameters."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("heads", "data"))
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(Split(), device_mesh=mesh["data"], device_id=cpu)


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "data-parallel": (lambda: nn.DataParallel(Split()), "it has a DataParallel, which runs copies"),
    "hybrid": (hybrid, "its FullyShardedDataParallel has a hybrid sharding strategy"),
    "split-already": (
        around_split_parameters,
        "its FullyShardedDataParallel is around parameters that are split already",
    ),
    "wrapper": (lambda: Wrapper(Split()), "Wrapper is a wrapper that regard does not know"),
    "context-parallel": (with_hooks, "its Split runs under context parallel"),
    "plain": (without_dtensors, "its Split is tensor parallel without DTensors"),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("model", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_way_to_distribute_is_refused_at_once(
    model: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model()):
        raise AssertionError("the block was entered")


class Repeated(Split):
    """Attention that stays on this process, beside the function of context parallelism."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
        try:
            return super().forward(x)
        finally:
            torch.nn.functional.scaled_dot_product_attention = kept


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("model", "has_mesh", "reason"),
    [
        (Split, False, "For context parallel, pass its mesh: observe\\(model, mesh=mesh\\)"),
        (Repeated, True, "its queries are not split over the processes of mesh"),
    ],
    ids=["no-mesh", "beside"],
)
def test_attention_that_the_mesh_does_not_explain_is_refused(
    model: type[nn.Module], has_mesh: bool, reason: str
) -> None:
    run, x, mesh = model(), X[:, :4].clone(), init_device_mesh("cpu", (2,))
    with (
        torch.no_grad(),
        pytest.raises(regard.RegardError, match=reason),
        regard.observe(run, mesh=mesh if has_mesh else None),
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
    ):
        run(x)


WRONG_MESHES: dict[str, tuple[Callable[[], dict[str, object]], str]] = {
    "kind": (lambda: {"mesh": "cp"}, "mesh is a str; it must be the DeviceMesh of context_paral"),
    "axes": (
        lambda: {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))},
        r"mesh has shape \(1, 2\); it must have one axis of several processes",
    ),
    "alone": (
        lambda: {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]},
        r"mesh has shape \(1,\); it must have one axis of several processes",
    ),
    "queries": (
        lambda: {"mesh": init_device_mesh("cpu", (2,)), "queries": slice(2)},
        "queries is given with mesh; each process records its part",
    ),
    "answers": (
        lambda: {"mesh": init_device_mesh("cpu", (2,)), "keep": [regard.Pool(2, 2)]},
        "keep has Pool, with mesh; the answers of the processes cannot be merged",
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("options", "reason"), WRONG_MESHES.values(), ids=WRONG_MESHES)
def test_a_mesh_that_does_not_fit_is_refused_at_once(
    options: Callable[[], dict[str, object]], reason: str
) -> None:
    given = options()
    with (
        pytest.raises((TypeError, ValueError), match=reason),
        regard.observe(Split(), **given),
    ):
        raise AssertionError("the block was entered")


@pytest.mark.usefixtures("group")
def test_processes_that_share_texts_and_heads_are_refused() -> None:
    model, mesh = parallel(Split()), init_device_mesh("cpu", (2,))
    reason = "processes of mesh also share the batch or the heads with each other"
    with pytest.raises(regard.RegardError, match=reason), regard.observe(model, mesh=mesh):
        raise AssertionError("the block was entered")


@pytest.mark.usefixtures("group")
def test_a_stage_of_a_pipeline_takes_no_mesh() -> None:
    stage = PipelineStage(Split(), 1, 2, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    reason = "mesh is given for the stage of a pipeline"
    with pytest.raises(ValueError, match=reason), regard.observe(stage, mesh=mesh):
        raise AssertionError("the block was entered")


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


def part(
    rank: int, of: int = 2, *, seed: int = 0, tokens: int = 5, run: str = "a"
) -> regard.Recording:
    """Two of the heads of a layer."""
    x = torch.randn(1, 2, tokens, 4, generator=torch.Generator().manual_seed(seed))
    seen = regard.Recording({})
    heads = (2 * rank, 2 * rank + 1)
    seen.add("layer", regard.attend(x, x), origin=Origin(0, heads))
    seen.shard = Place(run, rank, of, heads=(rank, of))
    return seen


def rows(rank: int, **changes: object) -> regard.Recording:
    """Two of four rows of a causal layer, as context parallelism records them."""
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    mask = changes.get("mask", regard.Causal())
    key = x if changes.get("key") is None else x + 1
    bias = changes.get("bias")
    matrix = regard.attend(x, key, mask=mask, bias=bias)
    start = changes.get("start", 2 * rank)
    seen = regard.Recording({})
    part = some_queries(matrix, range(start, start + 2))
    kept = changes.get("answers", [])
    seen.add("layer", part, queries=Queries(start, 4), answers=kept)
    seen.shard = Place("a", rank, 2, queries=(rank, 2))
    return seen


def other(**changes: object) -> regard.Recording:
    seen = part(1)
    for name, value in changes.items():
        if name == "dtype":
            x = torch.zeros(1, 2, 5, 4, dtype=torch.float64)
            seen = regard.Recording({})
            seen.add("layer", regard.attend(x, x), origin=Origin(0, (2, 3)))
            seen.shard = part(1).shard
        elif name == "shard":
            seen.shard = value
        elif name == "more":
            seen.add("more", seen["layer"])
    return seen


MISFITS: dict[str, tuple[Callable[[], list[regard.Recording]], str]] = {
    "nothing": (list, "there are no recordings to merge"),
    "missing": (
        lambda: [part(0, 3), part(2, 3)],
        "1 of 3 parts of the run are missing, the first is heads 1 of 3",
    ),
    "twice": (lambda: [part(0), part(0)], "are the same part of the run, heads 0 of 2"),
    "another-run": (
        lambda: [part(0), part(1, run="b")],
        "rank 1 and rank 0 are of different runs",
    ),
    "whole": (
        lambda: [part(0), other(shard=None)],
        "recording 1 is the recording of a whole model",
    ),
    "shape": (
        lambda: [part(0), part(1, tokens=6)],
        r"has shape \(1, 2, 5, 5\) on rank 0 and \(1, 2, 6, 6\) on rank 1",
    ),
    "dtype": (
        lambda: [part(0), other(dtype=True)],
        "another dtype on rank 1 than on rank 0, float32 and float64",
    ),
    "layer": (
        lambda: [part(0), other(more=True)],
        "rank 0 has no layer 'more', which rank 1 has",
    ),
    "missing-queries": (
        lambda: [rows(1)],
        "1 of 2 parts of the run are missing, the first is queries 0 of 2",
    ),
    "same-queries": (
        lambda: [rows(0), rows(1, start=0)],
        "has queries 0 to 1 on rank 1, after 2 queries of other parts",
    ),
    "mask": (
        lambda: [rows(0, mask=regard.SlidingWindow(1, 0)), rows(1)],
        r"RowSlice\(SlidingWindow\(1, 0\), 0, 4\) on rank 0, which is no part of Causal",
    ),
    "key": (lambda: [rows(0), rows(1, key=True)], "has another key on rank 1 than on rank 0"),
    "bias": (
        lambda: [rows(rank, bias=torch.ones(4, 4)) for rank in (0, 1)],
        "given scores, a bias or a mask with a tensor, and its queries are on several processes",
    ),
    "answer": (
        lambda: [rows(rank, answers=[(regard.Pool(1, 1), torch.ones(2, 1, 1))]) for rank in (0, 1)],
        "has an answer that is not one for each query; it cannot be joined",
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


def test_queries_are_joined_in_any_order() -> None:
    whole = regard.Recording.merge([rows(1), rows(0)])
    x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    expected = regard.attend(x, x, mask=regard.Causal())
    torch.testing.assert_close(whole["layer"].to_dense(), expected.to_dense())
    assert whole["layer"].mask.text == "Causal()"
    assert whole.layers[0].queries is None


def stage(name: str, at: int) -> regard.Recording:
    seen = regard.Recording({name: regard.attend(X, X)})
    seen.shard = Place("a", at, 2, layers=(at, 2))
    return seen


def test_layers_are_joined_in_the_order_of_the_stages() -> None:
    assert list(regard.Recording.merge([stage("b", 1), stage("a", 0)])) == ["a", "b"]
    with pytest.raises(regard.RegardError, match="stages 0 and 1 both have a layer 'a'"):
        regard.Recording.merge([stage("a", 1), stage("a", 0)])


@pytest.mark.usefixtures("group")
def test_a_stage_does_not_know_the_layers_before_it() -> None:
    model = PipelineStage(Split(), 1, 2, torch.device("cpu"))
    refused = pytest.raises(ValueError, match="layers is given for the stage of a pipeline")
    with refused, regard.observe(model, layers=[0]):
        raise AssertionError("the block was entered")


WRONG_PLACES: dict[str, tuple[dict[str, object], str]] = {
    "beyond": ({"heads": [2, 2]}, "part 2 of 2 of its heads"),
    "too-many": ({"batch": [0, 2**20]}, "part 0 of 1048576 of its batch"),
    "no-number": ({"rank": "first"}, "a place of 'first'"),
    "no-text": ({"run": 3}, "a place in a distributed run that is no text"),
    "missing": ({"microbatches": None}, "a place of None"),
}


@pytest.mark.parametrize(("changes", "reason"), WRONG_PLACES.values(), ids=WRONG_PLACES)
def test_a_damaged_place_is_noticed(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    seen = part(1)
    assert seen.shard is not None
    seen.shard = seen.shard._replace(**changes)
    seen.save(tmp_path / "run")
    [file] = (tmp_path / "run").iterdir()
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
        seen.shard = Place("a", rank, 3, batch=(rank, 3))
        parts.append(seen)
    whole = regard.Recording.merge(parts)["layer"]
    torch.testing.assert_close(
        whole.to_dense(), torch.cat([seen["layer"].to_dense() for seen in parts])
    )
