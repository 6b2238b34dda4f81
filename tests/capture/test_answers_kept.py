"""Kept answers are found by what was asked, and are those that the whole would give."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import regard
import regard.nn
from models import LLAMA, ids
from regard.analysis.head_survey import Survey

PARTS = {"first": (0, 3), "second": (3, 7)}
TURNED = {"second": (3, 7), "first": (0, 3)}


def matrix(kv_len: int = 7, seed: int = 0) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(1, 2, n, 5, generator=generator) for n in (7, kv_len))
    return regard.attend(query, key)


def kept(*reductions: regard.Reduction) -> regard.Recording:
    """Of one layer only the answers."""
    seen = regard.Recording({})
    answers = [(reduction, matrix().reduce(reduction)) for reduction in reductions]
    seen.add("layer", None, answers=answers, shape=matrix().shape)
    return seen


# Which spans were asked


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(lambda: regard.Segments([(0, 3), (3, 7)]), id="another list"),
        pytest.param(lambda: regard.Segments([[0, 3], [3, 7]]), id="lists of lists"),
        pytest.param(lambda: regard.Segments(((0, 3), (3, 7))), id="tuples"),
        pytest.param(lambda: regard.Segments([(0, 3), (3, 7)], [(0, 3), (3, 7)]), id="keys too"),
    ],
)
def test_the_same_spans_are_the_same_question(same: Any) -> None:
    asked = regard.Segments([(0, 3), (3, 7)])
    assert same() == asked
    assert hash(same()) == hash(asked)
    assert same() in kept(asked).kept["layer"]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(regard.Segments(TURNED), id="another order"),
        pytest.param(regard.Segments(TURNED, PARTS), id="another order of the queries"),
        pytest.param(regard.Segments(PARTS, TURNED), id="another order of the keys"),
        pytest.param(regard.Segments({"a": (0, 3), "b": (3, 7)}), id="other names"),
        pytest.param(regard.Segments([(0, 3), (3, 7)]), id="no names"),
        pytest.param(regard.Segments({"first": (0, 3), "second": (3, 6)}), id="other spans"),
    ],
)
def test_other_spans_are_another_question(other: regard.Segments) -> None:
    assert other != regard.Segments(PARTS)
    assert other not in kept(regard.Segments(PARTS)).kept["layer"]


def test_parts_in_two_orders_are_answered_each_in_its_own() -> None:
    seen = regard.Recording({"layer": matrix()})
    for recording in (seen, kept(regard.Segments(PARTS), regard.Segments(TURNED))):
        one, other = recording.reduce(regard.Segments(PARTS), regard.Segments(TURNED))["layer"]
        torch.testing.assert_close(one, other.flip(-1, -2))


def test_spans_of_lists_are_found_in_a_file(tmp_path: Path) -> None:
    seen, asked = kept(regard.Segments({"a": [0, 3]})), {"a": [0, 3]}  # type: ignore[dict-item]
    seen.save(tmp_path / "run.safetensors")
    loaded = regard.segment_shares(regard.load(tmp_path / "run.safetensors"), asked)  # type: ignore[arg-type]
    assert torch.equal(loaded.weights, regard.segment_shares(seen, asked).weights)  # type: ignore[arg-type]


# Questions of one's own


@dataclass(frozen=True)
class Towards(regard.Reduction):
    """How much each query attends to keys of some weight."""

    weight: Tensor

    def start(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        return (torch.zeros(shape[:-1], dtype=dtype, device=device),)

    def update(self, block: Any) -> Any:
        return (
            regard.Contribution(block.box.at_rows, block.weights @ self.weight[block.box.columns]),
        )

    def finish(self, buffers: Any, shape: torch.Size) -> Any:
        return buffers[0]


def test_questions_that_cannot_be_compared_are_not_the_same() -> None:
    one, other = Towards(torch.arange(7.0)), Towards(torch.ones(7))
    recordings = regard.Recording({"layer": matrix()}), kept(one, other)
    for recording in recordings:
        answers = recording.reduce(one, other)["layer"]
        for answer, asked in zip(answers, (one, other), strict=True):
            torch.testing.assert_close(answer, matrix().to_dense() @ asked.weight)
    assert Towards(torch.ones(7)) not in kept(other).kept["layer"]


# More keys than there are


def short_and_long() -> regard.Recording:
    return regard.Recording({"short": matrix(kv_len=3), "long": matrix(kv_len=7)})


@pytest.mark.parametrize("asked", [[regard.TopK(5)], [regard.TopK(2), regard.TopK(5)]], ids=str)
def test_the_largest_of_fewer_keys_than_were_asked_for_are_padded(
    asked: list[regard.Reduction],
) -> None:
    seen = short_and_long()
    answers = seen.reduce(*asked)
    for name, matrix in seen.items():
        top = answers[name][-1] if len(asked) > 1 else answers[name]
        fitting, padding = matrix.topk(min(5, matrix.shape[-1])), max(0, 5 - matrix.shape[-1])
        expected = torch.nn.functional.pad(fitting.values, (0, padding))
        assert torch.equal(top.values, expected)
        expected = torch.nn.functional.pad(fitting.indices, (0, padding), value=-1)
        assert torch.equal(top.indices, expected)


@pytest.mark.parametrize("keep", ["qk", [regard.TopK(9), regard.Entropy()]], ids=str)
@pytest.mark.parametrize("as_it_ran", [False, True], ids=["saved", "written as it ran"])
def test_a_file_holds_the_largest_of_fewer_keys(keep: Any, as_it_ran: bool, tmp_path: Path) -> None:
    path, model, x = (
        tmp_path / "run.safetensors",
        regard.nn.SelfAttention(8, 2),
        torch.ones(1, 5, 8),
    )
    with (
        torch.no_grad(),
        regard.observe(model, keep=keep, path=path if as_it_ran else None) as seen,
    ):
        model(x)
    if not as_it_ran:
        seen.save(path)
    with torch.no_grad(), regard.observe(model) as whole:
        model(x)
    [found], [expected] = regard.load(path).topk(9).values(), whole.topk(9).values()
    assert found.values.shape == (1, 2, 5, 9)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.indices, expected.indices)


def test_a_file_that_claims_more_largest_than_it_holds_is_damaged(tmp_path: Path) -> None:
    path, seen = tmp_path / "run.safetensors", regard.Recording({})
    seen.add("layer", None, answers=[(regard.TopK(9), matrix().topk(7))], shape=matrix().shape)
    seen.save(path)
    message = (
        f"{path} is damaged: layer 'layer': an answer of shape (1, 2, 7, 7) and float32; "
        "(1, 2, 7, 9) and float32 is asked.\n    Take a copy of it, or record and save again."
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.load(path)


# What heads are asked


@pytest.mark.parametrize("as_it_ran", [False, True], ids=["saved", "written as it ran"])
def test_heads_that_were_surveyed_are_told_of_a_file(as_it_ran: bool, tmp_path: Path) -> None:
    path, model = tmp_path / "run.safetensors", regard.nn.SelfAttention(8, 2)
    keep, to = Survey((False,) * 29).reductions, path if as_it_ran else None
    with torch.no_grad(), regard.observe(model, keep=keep, path=to) as seen:
        model(torch.randn(1, 29, 8, generator=torch.Generator().manual_seed(0)))
    if not as_it_ran:
        seen.save(path)
    assert "local" in regard.heads(seen).names
    assert regard.heads(regard.load(path)) == regard.heads(seen)


# Some of the queries of a generation


def generated(cache: str = "dynamic", **options: Any) -> regard.Recording:
    """What a model attends to that reads 4 tokens and writes 6, of which the last is not read."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, eos_token_id=None)).eval()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model.generate(ids()[:1, :4], max_new_tokens=6, do_sample=False, cache_implementation=cache)
    return seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["in memory", "saved", "written as it ran", "a static cache"])
@pytest.mark.parametrize("queries", [slice(0, 4), slice(2, 6), slice(5, None)], ids=str)
def test_what_every_key_received_has_every_key(queries: slice, way: str, tmp_path: Path) -> None:
    path, cache = tmp_path / "run.safetensors", "static" if way == "a static cache" else "dynamic"
    options = {"path": path} if way == "written as it ran" else {}
    seen = generated(cache, keep=[regard.Sum(-2)], queries=queries, **options)
    if way == "saved":
        seen.save(path)
    seen = regard.load(path) if path.exists() else seen
    whole = generated(cache, queries=queries)
    assert seen.shapes == whole.shapes
    for name, expected in whole.received().items():
        # 1e-5: weights of at most 1 in float32, added up in another order
        torch.testing.assert_close(seen.received()[name], expected, atol=1e-5, rtol=0)


def test_sums_of_padding_in_a_static_cache_are_those_of_the_matrix() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA, eos_token_id=None, attn_implementation="eager")
    model, real = LlamaForCausalLM(config).eval(), torch.ones(2, 4, dtype=torch.long)
    real[1, :2] = 0  # the rows of padding attend to every slot, empty ones included
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    recordings: list[regard.Recording] = []
    for keep in ("qk", [regard.Sum(-2)]):
        with torch.no_grad(), regard.observe(model, keep=keep) as seen:
            model.generate(ids()[:2, :4], attention_mask=real, **options)
        recordings.append(seen)
    whole, sums = recordings
    for name, expected in whole.received().items():
        torch.testing.assert_close(sums.received()[name], expected, atol=1e-5, rtol=0)


def test_an_answer_to_one_call_that_does_not_merge_is_kept() -> None:
    pool, layer = regard.Pool(2, 2), "model.layers.1.self_attn"
    seen = generated(keep=[pool], queries=slice(4), layers=[1])
    whole = generated(layers=[1])[layer].to_dense()
    expected = torch.nn.functional.avg_pool2d(whole[..., :4, :4], 2)
    torch.testing.assert_close(seen.pool(2, 2)[layer], expected)


def test_only_answers_that_do_not_merge_leave_nothing() -> None:
    with pytest.raises(regard.RegardError, match="of several calls cannot be merged"):
        generated(keep=[regard.Pool(2, 2)])
