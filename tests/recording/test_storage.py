"""A recording is one file: whatever was in it comes back, exactly, and it appears whole."""

import json
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from safetensors import safe_open
from torch import Tensor

import regard
from cases import CASES, Case, parametrised
from drawn_masks import masks
from regard.recording.file_reader import read
from regard.recording.layers import Answers, Layer

SAVED = [case for case in CASES if case.score_mod is None]


def write(path: Path, **matrices: regard.AttentionMatrix) -> None:
    regard.Recording(matrices).save(path)


def saved(path: Path, *, of: regard.Recording) -> regard.Recording:
    of.save(path)
    return read(path)


def again(matrix: regard.AttentionMatrix, folder: Path) -> regard.AttentionMatrix:
    """The matrix, saved and read."""
    write(folder / "run.safetensors", layer=matrix)
    return read(folder / "run.safetensors").layers[0].whole()


def small(seed: int = 0, q_len: int = 3, kv_len: int = 3) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, q_len, 4, generator=generator)
    return regard.attend(query, torch.randn(2, kv_len, 4, generator=generator))


def size_of(*matrices: regard.AttentionMatrix, folder: Path) -> int:
    names = {f"layer.{place}": matrix for place, matrix in enumerate(matrices)}
    write(folder / "size.safetensors", **names)
    return (folder / "size.safetensors").stat().st_size


# What comes back


@parametrised(SAVED)
def test_every_kind_of_matrix_comes_back_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    matrix = case.matrix(*case.inputs.of_scores)
    loaded = again(matrix, tmp_path)
    assert torch.equal(loaded.to_dense(), matrix.to_dense())


@parametrised([case for case in SAVED if case.mask not in ("mask-mod", "block-mask")])
def test_it_says_of_itself_what_it_said(case: Case, tmp_path: Path) -> None:
    matrix = case.matrix(*case.inputs.of_scores)
    assert repr(again(matrix, tmp_path)) == repr(matrix)


@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param(regard.AttentionMatrix.from_scores(torch.randn(3, 5, 5)), id="scores"),
        pytest.param(
            regard.AttentionMatrix.from_scores(torch.randn(5, 5), mask=regard.Causal()),
            id="scores and a mask",
        ),
        pytest.param(
            regard.AttentionMatrix.from_weights(torch.rand(3, 5, 5).softmax(-1)), id="weights"
        ),
    ],
)
def test_given_scores_and_weights_come_back(matrix: regard.AttentionMatrix, tmp_path: Path) -> None:
    loaded = again(matrix, tmp_path)
    assert repr(loaded) == repr(matrix)
    assert torch.equal(loaded.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("index", [0, (1, 2), slice(1, 2), (slice(None), 2)], ids=str)
def test_a_part_of_a_matrix_comes_back(index: Any, tmp_path: Path) -> None:
    whole = regard.attend(
        torch.randn(2, 4, 5, 3),
        torch.randn(2, 2, 7, 3),
        mask=regard.Padding([7, 3]) & regard.Documents([0, 0, 0, 1, 1, 1, 1]),
        bias=regard.T5Bias(torch.randn(8, 4)),
        sink_bias=torch.randn(4),
    )
    loaded = again(whole[index], tmp_path)
    assert repr(loaded) == repr(whole[index])
    assert torch.equal(loaded.to_dense(), whole[index].to_dense())


@given(masks())
def test_any_mask_comes_back(
    tmp_path_factory: pytest.TempPathFactory, given_mask: tuple[Tensor, torch.Size]
) -> None:
    mask, shape = given_mask
    query, key = torch.randn(*shape[:-1], 3), torch.randn(*shape[:-2], shape[-1], 3)
    joined = ~regard.Keep(mask) | (regard.SlidingWindow(2, 1) & regard.PrefixLM(1))
    matrix = regard.attend(query, key, mask=joined)
    loaded = again(matrix, tmp_path_factory.getbasetemp())
    assert loaded.mask is not None
    assert torch.equal(loaded.mask.to_dense(), joined.to_dense(*shape))


def first_five(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (kv_idx < 5)


def everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0


def test_a_mask_mod_is_written_as_the_mask_that_it_is(tmp_path: Path) -> None:
    query = torch.randn(2, 3, 7, 4)
    matrix = regard.attend(query, query, mask=first_five)
    loaded = again(matrix, tmp_path)
    assert loaded.mask is not None
    assert loaded.mask.text == "Causal() & Padding([5])"


def test_a_mask_mod_that_allows_everything_allows_it_still(tmp_path: Path) -> None:
    query = torch.randn(7, 4)
    matrix = regard.attend(query, query, mask=~regard.MaskMod(everything))
    assert torch.equal(again(matrix, tmp_path).to_dense(), torch.zeros(7, 7))


def recording(model: str = "Tiny", **tokens: Any) -> regard.Recording:
    return regard.Recording({"a": small(), "b.attn": small(1)}, model=model, **tokens)


def test_the_layers_come_back_by_name_and_in_their_order(tmp_path: Path) -> None:
    names = ["z", "a", "a#2", "layers.3/x", "日本", ""]
    matrices = {name: small(place) for place, name in enumerate(names)}
    stored = saved(tmp_path / "run.safetensors", of=regard.Recording(matrices))
    assert [layer.name for layer in stored.layers] == names
    for layer in stored.layers:
        assert torch.equal(layer.whole().to_dense(), matrices[layer.name].to_dense())


def test_tokens_come_back_with_what_they_are(tmp_path: Path) -> None:
    tokens = [regard.Token("<s>", special=True), regard.Token(' "\n\x00'), regard.Token("\ud800é")]
    keys = [regard.Token(text) for text in "abc"]
    seen = recording(query_tokens=tokens, key_tokens=keys)
    stored = saved(tmp_path / "run.safetensors", of=seen)
    assert stored.query_tokens == tuple(tokens)
    assert stored.key_tokens == tuple(keys)


REDUCTIONS = [
    regard.Entropy(),
    regard.LogSumExp(),
    regard.MaxScore(),
    regard.TopK(1),
    regard.TopK(2),
    regard.Sum(-1),
    regard.Sum(-2),
    regard.Pool(2, 100),
    regard.Diagonal(-1),
    regard.Diagonal(50),
    regard.Segments([(0, 1), (1, 3)]),
    regard.Segments(((0, 1), (1, 3))),
    regard.Segments({"first": (0, 1)}, {"ké": (0, 2), "rest": (2, 3)}),
]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=repr)
@pytest.mark.parametrize("with_matrix", [True, False], ids=["beside the matrix", "alone"])
def test_answers_that_were_kept_come_back(
    reduction: regard.Reduction, with_matrix: bool, tmp_path: Path
) -> None:
    matrix = small()
    answer = matrix.reduce(reduction)
    seen = regard.Recording({})
    kept = matrix if with_matrix else None
    seen.add("a", kept, answers=[(reduction, answer)], shape=matrix.shape)
    (layer,) = saved(tmp_path / "run.safetensors", of=seen).layers
    loaded = layer.answers[reduction]
    assert layer.shape == matrix.shape
    assert type(loaded) is type(answer)
    both = zip(loaded, answer, strict=True) if isinstance(answer, tuple) else [(loaded, answer)]
    assert all(torch.equal(first, second) for first, second in both)


def test_what_is_loaded_may_meet_gradients(tmp_path: Path) -> None:
    loaded = again(small(), tmp_path)
    value = torch.randn(2, 3, 4, requires_grad=True)
    (loaded @ value).sum().backward()
    assert value.grad is not None


# The file


def test_the_file_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    saved(tmp_path / "run.safetensors", of=recording())
    with safe_open(tmp_path / "run.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"a/query", "a/key", "b.attn/query", "b.attn/key"}
        assert torch.equal(file.get_tensor("a/query"), small().source.tensors[0])


def test_its_metadata_are_json_that_says_the_versions(tmp_path: Path) -> None:
    saved(tmp_path / "run.safetensors", of=recording())
    with safe_open(tmp_path / "run.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["regard"])
    assert (about["format"], about["torch"], about["model"]) == (5, torch.__version__, "Tiny")
    assert [layer["name"] for layer in about["layers"]] == ["a", "b.attn"]


def test_tensors_that_layers_share_are_written_once(tmp_path: Path) -> None:
    query, mask = torch.randn(2, 64, 64), torch.rand(64, 64) < 0.5
    matrices = [regard.attend(query, query.clone(), mask=mask.clone()) for _ in range(9)]
    one, nine = (size_of(*matrices[:n], folder=tmp_path) for n in (1, 9))
    assert nine - one < query.nbytes  # the headers differ in length


def test_tensors_that_are_only_alike_are_written_apart(tmp_path: Path) -> None:
    numbers = [torch.zeros(4, 2), torch.zeros(2, 4), torch.zeros(4, 2).half(), torch.ones(4, 2)]
    matrices = {str(place): regard.attend(each, each) for place, each in enumerate(numbers)}
    write(tmp_path / "run.safetensors", **matrices)
    for layer, each in zip(read(tmp_path / "run.safetensors").layers, numbers, strict=True):
        query = layer.whole().source.tensors[0]
        assert query.dtype == each.dtype
        assert torch.equal(query, each)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells it there")
def test_memory_does_not_grow_with_what_was_written(tmp_path: Path) -> None:
    query, held = torch.randn(2**16, 8), list[int]()

    def matrix(place: int) -> regard.AttentionMatrix:
        held.append(resident())
        return regard.attend(query + place, query[:8])

    seen = regard.Recording({})
    for place in range(40):
        shape = torch.Size([2**16, 8])
        seen.put(Layer(str(place), shape, partial(matrix, place), Answers()))
    seen.save(tmp_path / "run.safetensors")
    assert max(held[4:]) - held[4] < 2**24
    assert (tmp_path / "run.safetensors").stat().st_size > 40 * query.nbytes


def test_numbers_are_aligned_whatever_stands_before_them(tmp_path: Path) -> None:
    query = torch.randn(3, 5)
    odd = regard.attend(query, query, mask=torch.tensor([True, False, True]))
    write(tmp_path / "run.safetensors", a=odd, b=small(), c=small(2))
    for layer in read(tmp_path / "run.safetensors").layers:
        assert all(tensor.data_ptr() % 8 == 0 for tensor in layer.whole().source.tensors)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells it there")
def test_numbers_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    query = torch.randn(1, 2**22, 8)
    write(path, a=regard.attend(query, query[:, :8]))
    before = resident()
    stored = read(path)
    assert resident() - before < 2**24
    assert stored.layers[0].shape == (1, 2**22, 8)


def resident() -> int:
    """The bytes of memory that this process holds now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_what_is_loaded_outlives_the_file(tmp_path: Path) -> None:
    stored = saved(tmp_path / "run.safetensors", of=recording())
    (tmp_path / "run.safetensors").unlink()
    assert torch.equal(stored.layers[0].whole().to_dense(), small().to_dense())


def test_a_loaded_recording_is_saved_over_its_own_file(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    stored = saved(path, of=recording())
    stored.part([0]).save(path)
    assert torch.equal(read(path).layers[0].whole().to_dense(), small().to_dense())


def test_changing_what_is_loaded_changes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    stored = saved(path, of=recording())
    before = path.read_bytes()
    stored.layers[0].whole().source.tensors[0].zero_()
    assert path.read_bytes() == before
