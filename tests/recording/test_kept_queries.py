"""A recording of some queries knows which they are: tokens, parts and kinds of heads are theirs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from models import LLAMA, MODELS, ids
from recording_files import changed
from regard.analysis.head_classes import Trial, classify
from regard.recording.layers import Queries

LENGTH = 29  # of one text: some queries have all the neighbours that make a head local
TEXT = [regard.Token("[CLS]", special=True), *map(regard.Token, "abcdefghijklmnopqrstuvwxyz .")]
SLICES = [slice(-4, None), slice(2, 9), slice(None, 25), slice(20, 21), slice(3, -3)]
CASES = [pytest.param(MODELS[name], id=name) for name in ("bert", "llama, grouped heads")]


def seen_by(case: Any, **options: Any) -> regard.Recording:
    model = case.model()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model(input_ids=ids(LENGTH)[:1])
    return seen.with_tokens(TEXT)


def written(**options: Any) -> regard.Recording:
    """What a model attends to that reads 7 tokens and writes 3, of which the last is not read."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, eos_token_id=None)).eval()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model.generate(ids()[:1], max_new_tokens=3, do_sample=False)
    return seen


@pytest.mark.parametrize("stored", [False, True], ids=["in memory", "in a file"])
@pytest.mark.parametrize("queries", SLICES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_recording_knows_which_queries_its_rows_are(
    case: Any, queries: slice, stored: bool, tmp_path: Path
) -> None:
    seen = seen_by(case, queries=queries)
    if stored:
        seen.save(tmp_path / "run.safetensors")
        seen = regard.load(tmp_path / "run.safetensors")
    expected = range(LENGTH)[queries]
    assert {layer.positions for layer in seen.layers} == {expected}
    assert seen.query_tokens == tuple(TEXT[queries])
    assert seen.key_tokens == tuple(TEXT)
    assert all(layer.reads_itself for layer in seen.layers)


def test_a_file_written_as_the_model_runs_knows_it_too(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    written(queries=slice(-4, None), path=path)
    assert {layer.positions for layer in regard.load(path).layers} == {range(5, 9)}


@pytest.mark.parametrize(
    ("queries", "what"),
    [
        pytest.param({"start": 6, "ran": 9}, "queries 6 to 10 of 9", id="beyond the text"),
        pytest.param({"start": -1, "ran": 9}, "-1 where a count must stand", id="before the text"),
        pytest.param({"start": 5, "ran": "9"}, "'9' where a count must stand", id="no number"),
        pytest.param({"start": 5}, "'ran' is missing", id="one number"),
    ],
)
def test_positions_that_cannot_be_are_damage(queries: Any, what: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    written(queries=slice(-4, None), layers=[0], path=path)
    changed(path, lambda about: about["layers"][0].update(queries=queries))
    message = f"{path} is damaged: layer 'model.layers.0.self_attn': {what}.\n"
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}"):
        regard.load(path)


def test_where_all_queries_are_kept_none_are_named() -> None:
    seen = seen_by(MODELS["bert"])
    assert {layer.queries for layer in seen.layers} == {None}
    assert {layer.positions for layer in seen.layers} == {range(LENGTH)}


def test_the_text_of_an_encoder_is_not_that_of_its_decoder() -> None:
    case = MODELS["t5, relative positions"]
    model = case.model()
    with torch.no_grad(), regard.observe(model, queries=slice(-3, None)) as seen:
        model(**case.inputs)
    cross = seen.part([name for name in seen if "EncDecAttention" in name])
    (read, wrote) = (case.inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids"))
    assert {layer.positions for layer in cross.layers} == {range(wrote - 3, wrote)}
    assert not any(layer.reads_itself for layer in cross.layers)
    cross = cross.with_tokens(map(str, range(wrote)), ["read"] * read)
    assert [token.text for token in cross.query_tokens] == list(map(str, range(wrote)))[-3:]


@pytest.mark.parametrize("queries", [slice(-4, None), slice(2, 5), slice(5, None)], ids=str)
@pytest.mark.parametrize("keep", ["qk", [regard.Entropy(), regard.TopK(2)]], ids=["qk", "answers"])
def test_of_prompt_and_answer_the_queries_are_known(keep: Any, queries: slice) -> None:
    seen = written(keep=keep, queries=queries)
    assert {layer.positions for layer in seen.layers} == {range(9)[queries]}
    assert {layer.queries for layer in seen.layers} == {Queries(range(9)[queries].start, 9)}


def test_the_last_query_is_that_of_all_calls() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for stop in (3, 6):
                q = x[..., stop - 3 : stop, :]
                (
                    x[..., :0, :]
                    + nn.functional.scaled_dot_product_attention(
                        q,
                        x[..., :stop, :],
                        x[..., :stop, :],
                        torch.ones(3, stop).tril(stop - 3) > 0,
                    )[..., :0, :]
                )
            return x

    options = {"keep": [regard.Entropy()], "queries": slice(-1, None)}
    model = Reads()
    with regard.observe(model, **options) as seen:
        model(torch.randn(1, 2, 6, 4))
    [layer] = seen.layers
    assert layer.positions == range(5, 6)


# Parts of a text


PARTS = {"first": (0, 9), "second": (9, 20), "third": (20, 29)}


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_parts_ask_with_those_of_their_queries_that_were_kept(case: Any, sinks: bool) -> None:
    shares = regard.segment_shares(seen_by(case, queries=slice(15, 24)), PARTS, sinks=sinks)
    asked = {"second": (15, 20), "third": (20, 24)}
    expected = regard.segment_shares(seen_by(case), PARTS, queries=asked, sinks=sinks)
    assert shares.queries == ("second", "third")
    # 1e-6: weights of at most 1 in float32, of blocks that begin elsewhere
    torch.testing.assert_close(shares.weights, expected.weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("parts", "queries", "message"),
    [
        pytest.param(
            {"first": (0, 9)},
            None,
            "queries is None; it must be given where queries and keys are different texts, or the "
            "parts have no recorded query: 25 to 28, with kv_len = 29.\n    Give the parts of the "
            "queries, {name: (start, stop)}, counted from the first query that was kept.",
            id="none of its queries",
        ),
        pytest.param(
            {"first": (0, 9)},
            {"end": (25, 29)},
            "queries has (25, 29); each span must be non-empty and inside the text.\n"
            "    Give (start, stop) pairs with 0 <= start < stop <= q_len = 4.",
            id="counted from the beginning of the text",
        ),
    ],
)
def test_parts_without_a_query_are_an_error(
    parts: dict[str, Any], queries: dict[str, Any] | None, message: str
) -> None:
    seen = seen_by(MODELS["bert"], queries=slice(-4, None))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(seen, parts, queries=queries)


# Kinds of heads


def mean(values: Tensor, rows: list[int]) -> Tensor:
    return values[..., rows].mean(-1)


@pytest.mark.parametrize("queries", [slice(-4, None), slice(2, 25), slice(None, 25)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_heads_are_told_by_the_queries_that_were_kept(case: Any, queries: slice) -> None:
    heads = classify(*told(seen_by(case, queries=queries)))
    rows = [row for row in range(LENGTH)[queries] if row]
    for layer, matrix in enumerate(seen_by(case).values()):
        weights = matrix.to_dense()[0].double()  # (num_heads, q_len, kv_len)
        before, after = weights.diagonal(-1, -2, -1), weights.diagonal(1, -2, -1)
        around = [weights[:, row, max(0, row - 4) : row + 5] for row in range(LENGTH)]
        near = torch.stack([each.sum(-1) for each in around], -1)
        expected = {
            "previous token": mean(before, [row - 1 for row in rows if row > 1]),
            "next token": mean(after, [row for row in rows if row < LENGTH - 1]),
            "self": mean(weights.diagonal(0, -2, -1), rows),
            "first-token sink": mean(weights[..., 0], rows),
            "local": mean(near, [row for row in rows if row >= 20]),
        }
        for head in range(4):
            found = heads[4 * layer + head].scores
            scores = {kind: float(of_heads[head]) for kind, of_heads in expected.items()}
            assert {kind: found[kind] for kind in scores} == pytest.approx(scores, abs=1e-6)


def told(seen: regard.Recording) -> tuple[Any, Any, Any]:
    return seen.layers, seen.query_tokens, seen.key_tokens


def test_too_few_queries_have_no_local_score() -> None:
    assert "local" not in regard.heads(seen_by(MODELS["bert"], queries=slice(2, 9))).names


def test_of_some_heads_a_trial_tells_what_it_found_of_these() -> None:
    seen = seen_by(MODELS["bert"], heads=[3, 1])
    trial = Trial({layer.name: {"induction": (0.1, 0.2, 0.3, 0.4)} for layer in seen.layers})
    assert regard.heads(seen, trial)["induction"][:2] == (0.4, 0.2)
    assert regard.heads(seen, trial)["head"][:2] == (3, 1)


def test_a_trial_without_the_heads_that_were_kept_is_an_error() -> None:
    seen = seen_by(MODELS["bert"], heads=[3, 1])
    trial = Trial({layer.name: {"induction": (0.1, 0.2)} for layer in seen.layers})
    with pytest.raises(ValueError, match=r"^trial has 2 heads in layer '.*'; the recording has 2"):
        regard.heads(seen, trial)


def test_keys_that_are_another_text_make_no_neighbours() -> None:
    seen = seen_by(MODELS["bert"], queries=slice(-4, None))
    other = seen.with_tokens(["x"] * LENGTH, TEXT)
    assert "self" in regard.heads(seen).names
    assert "self" not in regard.heads(other).names
