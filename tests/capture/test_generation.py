"""Prompt and answer are one matrix per layer: each row is what that step did, whatever the cache.

The oracle is transformers' own eager attention, step by step.
"""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache

import regard
from cases import in_turn
from decoders import (
    DECODERS,
    GREEDY,
    TWO_TEXTS,
    built,
    inputs,
    layer_of,
)
from largest_tensor import LargestTensor, largest
from models import VOCABULARY, ids, noise

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def observed(
    model: nn.Module, given: dict[str, Any], layers: list[str] | None = None
) -> tuple[regard.Recording, Tensor]:
    """What was seen, and the tokens, which are those of a run that nobody observes."""
    plain = model.generate(**copy.deepcopy(given)).sequences
    with regard.observe(model, layers=layers) as seen:
        output = model.generate(**given).sequences
    assert torch.equal(plain, output)
    return seen, output


def placed(weights: Tensor, end: int, kv_len: int) -> Tensor:
    """The weights of a step at their columns, where its last query sits at key ``end - 1``."""
    base = max(end - weights.shape[-1], 0)
    columns = weights[..., : kv_len - base]
    return torch.nn.functional.pad(columns, (base, kv_len - base - columns.shape[-1]))


def joined(steps: list[Tensor], *, cross: bool = False) -> Tensor:
    """The weights of all steps as one matrix.

    Args:
        steps: of one layer.
        cross: whether all steps have the same keys.
    """
    ends = torch.tensor([step.shape[-2] for step in steps]).cumsum(0).tolist()
    rows = zip(steps, ends, strict=True)
    return torch.cat([step if cross else placed(step, end, ends[-1]) for step, end in rows], -2)


def assert_same(matrix: regard.AttentionMatrix, weights: Tensor, padded: int = 0) -> None:
    """To 1e-5; the queries of padding on the left, in the second half of the batch, left out."""
    real = torch.ones(*weights.shape[:1], 1, weights.shape[-2], 1, dtype=torch.bool)
    real[len(real) // 2 :, :, :padded] = False
    dense = matrix.to_dense().where(real, 0.0)
    torch.testing.assert_close(dense, weights.where(real, 0.0), atol=1e-5, rtol=0)


# Decoders

OPTIONS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 3},
}


@pytest.mark.sampled(3)
@in_turn(name=[*DECODERS], options=OPTIONS, padded={"not padded": 0, "padded on the left": 3})
def test_prompt_and_answer_are_one_matrix_with_the_weights_of_each_step(
    name: str, padded: int, options: dict[str, Any]
) -> None:
    given = inputs(name, padded) | GREEDY
    seen, _ = observed(built(name), given | options)
    eager = built(name, "eager").generate(**given, output_attentions=True).attentions
    assert len(seen) == 2
    for layer, matrix in enumerate(seen.values()):
        assert_same(matrix, joined([step[layer] for step in eager]), padded)


@pytest.mark.parametrize(
    ("name", "padded", "mask"),
    [
        ("llama", 0, "Causal()"),
        ("llama", 3, "Causal() & Keep((2, 1, 1, 12))"),
        ("mistral, a window of 3", 0, "SlidingWindow(2, 0)"),
        ("mistral, a window of 3", 3, "SlidingWindow(2, 0) & Keep((2, 1, 1, 12))"),
    ],
)
def test_the_mask_of_all_steps_says_what_it_is(name: str, padded: int, mask: str) -> None:
    seen, _ = observed(built(name), inputs(name, padded) | GREEDY)
    assert [matrix.mask.text for matrix in seen.values()] == [mask, mask]


def test_layers_share_the_masks_and_biases_of_their_steps() -> None:
    seen, _ = observed(built("t5"), inputs("t5") | GREEDY)
    biases = {matrix.source.bias.data_ptr() for name, matrix in seen.items() if "Self" in name}
    assert len(biases) == 2, "one of the encoder's layers, one of the decoder's"


# Beams, and two texts

APART = "did not go on from the end of the cache, as in beam search"


@pytest.mark.sampled(2)
@in_turn(
    name=[*DECODERS, "t5"],
    layers={"all layers": None, "some layers": "some"},
    keep={"qk": "qk", "answers": [regard.Entropy()]},
)
def test_beams_stand_apart_and_are_warned_of(name: str, layers: str | None, keep: Any) -> None:
    given = inputs(name, 3) | GREEDY | {"num_beams": 3, "max_new_tokens": 15}
    model = built(name)
    plain = model.generate(**copy.deepcopy(given)).sequences
    chosen = None if layers is None else [1]
    if name == "t5":
        chosen = ["decoder.block.0.layer.1.EncDecAttention"] if layers else None
    with (
        pytest.warns(UserWarning, match=APART),
        regard.observe(model, layers=chosen, keep=keep) as seen,
    ):
        output = model.generate(**given).sequences
    assert torch.equal(plain, output)
    assert any("#2" in layer for layer in seen.shapes)


# Whisper's own generate gives the weights of the best beams alone.
@pytest.mark.parametrize("padded", [0, 3], ids=["not padded", "padded"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_of_two_texts_rows_grow_and_the_keys_of_the_first_stay(name: str, padded: int) -> None:
    given = inputs(name, padded) | GREEDY
    eager = built(name, "eager").generate(**given, output_attentions=True)
    seen, _ = observed(built(name), given)
    for layer_name, matrix in seen.items():
        layer = layer_of(layer_name)
        if "encoder." in layer_name:
            weights = eager.encoder_attentions[layer]
            assert_same(matrix, weights.repeat_interleave(matrix.shape[0] // len(weights), 0))
        elif "EncDec" in layer_name or "encoder_attn" in layer_name:
            steps = [step[layer] for step in eager.cross_attentions]
            assert_same(matrix, joined(steps, cross=True))
        else:
            assert_same(matrix, joined([step[layer] for step in eager.decoder_attentions]))


# What is not one attention


def test_two_texts_are_two_attentions() -> None:
    model = built("llama")
    with torch.no_grad(), regard.observe(model) as seen:
        model(ids())
        model(ids(5))
        model(ids())
    name = "model.layers.0.self_attn"
    assert [each for each in seen if "layers.0" in each] == [name, f"{name}#2", f"{name}#3"]
    assert [seen[each].shape[-2:] for each in seen if "layers.0" in each] == [
        (7, 7),
        (5, 5),
        (7, 7),
    ]


@pytest.mark.parametrize("name", TWO_TEXTS)
def test_a_second_answer_to_one_text_is_another_attention(name: str) -> None:
    model, given = built(name), inputs(name) | GREEDY
    with regard.observe(model) as seen:
        model.generate(**given)
        model.generate(**given)
    assert [each for each in seen if "#" in each] == [
        f"{each}#2" for each in seen if "#" not in each
    ]
    for each in [each for each in seen if "#" not in each]:
        assert torch.equal(seen[each].to_dense(), seen[f"{each}#2"].to_dense())


def test_a_text_that_begins_like_an_earlier_one_is_another_attention() -> None:
    model = built("llama")
    apart = pytest.warns(UserWarning, match="did not go on from the end of")
    with apart, torch.no_grad(), regard.observe(model) as seen:
        prompt = model(ids()[:, :4]).past_key_values
        for last in (ids()[:, 4:], ids()[:, 5:]):
            model(last, past_key_values=copy.deepcopy(prompt))
    shapes = [tuple(matrix.shape[-2:]) for name, matrix in seen.items() if "layers.0" in name]
    assert shapes == [(7, 7), (2, 6)]


class SharedKey(nn.Module):
    """Multi-query attention, a head at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
        key = self.key = self.k(x) if cache is None else torch.cat([cache, self.k(x)], -2)
        heads = [(q @ key.mT / 2).softmax(-1) @ key for q in self.q(x).chunk(4, -1)]
        return torch.cat(heads, -1)


def test_heads_that_share_a_key_are_attentions_of_their_own() -> None:
    torch.manual_seed(0)
    model, x = SharedKey(), noise(2, 9, 16)
    with torch.no_grad(), regard.observe(model) as seen:
        model(x)
    assert list(seen) == ["SharedKey", "SharedKey#2", "SharedKey#3", "SharedKey#4"]
    for matrix, q in zip(seen.values(), model.q(x).chunk(4, -1), strict=True):
        expected = (q @ model.k(x).mT / 2).softmax(-1)
        torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-6, rtol=0)


def test_heads_that_share_a_cache_stand_apart_and_are_warned_of() -> None:
    torch.manual_seed(0)
    model, x, steps = SharedKey(), noise(2, 8, 16), ((0, 6), (6, 7), (7, 8))

    def observe() -> regard.Recording:
        with torch.no_grad(), regard.observe(model) as seen:
            for start, stop in steps:
                model(x[:, start:stop], model.key if start else None)
        return seen

    with pytest.warns(UserWarning, match=APART):
        seen = observe()
    key, heads = model.k(x), model.q(x).chunk(4, -1)
    calls = [(q, start, stop) for start, stop in steps for q in heads]
    for matrix, (q, start, stop) in zip(seen.values(), calls, strict=True):
        expected = (q[:, start:stop] @ key[:, :stop].mT / 2).softmax(-1)
        torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-6, rtol=0)


class Ring(nn.Module):
    """A cache of four keys, whose slots are used again."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.cache, self.count = torch.zeros(1, 4, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.cache[:, self.count % 4] = self.k(x)[:, 0]
        self.count += 1
        scores = self.q(x) @ self.cache.mT
        return scores[..., : self.count].softmax(-1) @ self.cache[:, : self.count]


def test_a_ring_whose_slots_are_used_again_is_in_pieces_and_warned_of() -> None:
    model = Ring()

    def steps() -> regard.Recording:
        with torch.no_grad(), regard.observe(model) as seen:
            for x in noise(1, 6, 16).split(1, 1):
                model(x)
        return seen

    with pytest.warns(UserWarning, match=APART):
        seen = steps()
    assert [tuple(matrix.shape[-2:]) for matrix in seen.values()] == [(4, 4), (1, 4), (1, 4)]


class Latents(nn.Module):
    """Learned queries that attend to more and more tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(noise(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        spans = [x[:, :stop] for stop in (4, 8, 12)]
        return torch.cat([(self.latents @ keys.mT).softmax(-1) @ keys for keys in spans], 1)


def test_the_same_queries_of_more_keys_are_attentions_of_their_own() -> None:
    model = Latents()
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(1, 12, 16))
    assert [tuple(matrix.shape[-2:]) for matrix in seen.values()] == [(4, 4), (4, 8), (4, 12)]


class RowByRow(nn.Module):
    """Each token attends to the tokens before it, as products of a matrix and a vector."""

    def forward(self, x: Tensor) -> Tensor:
        past = [x[: row + 1] for row in range(len(x))]
        return torch.stack([torch.softmax(each @ each[-1], 0) @ each for each in past])


def test_a_loop_over_rows_is_one_attention() -> None:
    model, x = RowByRow(), noise(6, 16)
    with torch.no_grad(), regard.observe(model) as seen:
        model(x)
    assert len(seen) == 1
    expected = (x @ x.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(seen[0].to_dense(), expected, atol=1e-6, rtol=0)


def test_two_calls_on_one_memory_are_two_attentions() -> None:
    model, memory = nn.MultiheadAttention(16, 4, batch_first=True).eval(), noise(2, 9, 16)
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(2, 4, 16), memory, memory)
        model(noise(2, 6, 16), memory, memory)
    assert [tuple(matrix.shape) for matrix in seen.values()] == [(2, 4, 4, 9), (2, 4, 6, 9)]


class OfPositions(nn.Module):
    """Its keys are positions, which are the same for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.value = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        key = self.positions(torch.arange(text.shape[1]))[None]
        return (x @ key.mT).softmax(-1) @ self.value(text)


@pytest.mark.parametrize("rows", [1, 2], ids=["a query", "queries"])
@pytest.mark.parametrize("keep", ["qk", "qkv", [regard.Entropy()]], ids=["qk", "qkv", "answers"])
def test_texts_whose_keys_are_positions_are_attentions_of_their_own(keep: Any, rows: int) -> None:
    model = OfPositions()
    with torch.no_grad(), regard.observe(model, keep=keep) as seen:
        for length in (4, 5, 6, 6):
            model(torch.randn(1, rows, 8), torch.randn(1, length, 8))
    assert [shape[-2:] for shape in seen.shapes.values()] == [(rows, n) for n in (4, 5, 6, 6)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_of_other_signs_are_those_of_another_attention(dtype: torch.dtype) -> None:
    class Step(nn.Module):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, key)

    model, key, more = Step(), noise(1, 2, 4, 8).to(dtype), noise(1, 2, 1, 8).to(dtype)
    flipped = key.clone()
    flipped[..., 1::2] *= -1  # an even number of signs in each column
    with regard.observe(model) as seen:
        model(key, key)
        model(more, torch.cat([flipped, more], -2))
        model(more, torch.cat([-key, more], -2))
    assert [matrix.shape[-2] for matrix in seen.values()] == [4, 1, 1]


def test_memories_of_equal_keys_are_attentions_of_their_own() -> None:
    class Cross(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return (x @ (0 * memory).mT).softmax(-1) @ memory

    model = Cross()
    with torch.no_grad(), regard.observe(model) as seen:
        model(torch.randn(1, 3, 8), torch.randn(1, 3, 8))
        model(torch.randn(1, 2, 8), torch.randn(1, 5, 8))
    assert [layer.shape[-2:] for layer in seen.layers] == [(3, 3), (2, 5)]
    assert seen.layers[1].positions == range(2)


def test_of_two_texts_the_steps_are_one_where_only_the_attention_to_the_other_is_kept() -> None:
    model, given = built("t5"), inputs("t5") | GREEDY
    name = "decoder.block.0.layer.1.EncDecAttention"
    whole, _ = observed(model, given)
    with regard.observe(model, layers=[name]) as seen:
        model.generate(**given)
    assert list(seen) == [name]
    assert torch.equal(seen[name].to_dense(), whole[name].to_dense())


@pytest.mark.parametrize("keep", ["qk", [regard.Sum(-1)]], ids=["qk", "answers"])
def test_two_answers_that_one_cache_weighs_are_both_kept(keep: Any) -> None:
    model, text = built("llama"), ids()[:1]
    apart = pytest.warns(UserWarning, match="did not go on from the end of")
    with apart, torch.no_grad(), regard.observe(model, keep=keep) as seen:
        cache = model(text, use_cache=True).past_key_values
        cache.crop(-3)
        model(text[:, 4:] + 1, past_key_values=cache)
    shapes = [tuple(shape) for name, shape in seen.shapes.items() if "layers.0" in name]
    assert shapes == [(1, 4, 7, 7), (1, 4, 3, 7)]


def test_steps_without_a_cache_are_attentions_of_their_own() -> None:
    model = built("llama")
    with regard.observe(model) as seen:
        model.generate(inputs=ids(), use_cache=False, **GREEDY | {"max_new_tokens": 3})
    assert [tuple(matrix.shape[-2:]) for matrix in seen.values()] == [
        *((7, 7), (7, 7), (8, 8), (8, 8), (9, 9), (9, 9))
    ]


class Shrinking(DynamicCache):
    """Changes its keys at each step, as quantised caches do: they never return to what they were.

    It does not round them: rounding would amplify the last bit in which two kernels differ.
    """

    def update(
        self, key: Tensor, value: Tensor, layer: int, *rest: Any, **more: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key, value, layer, *rest, **more)
        self.layers[layer].keys = keys * 0.9
        return keys, values


def test_what_a_cache_changes_is_kept_as_it_was_at_each_step() -> None:
    model, given = built("llama"), {"inputs": ids()} | GREEDY | {"max_new_tokens": 3}
    eager = built("llama", "eager")
    weights = eager.generate(
        **given, past_key_values=Shrinking(), output_attentions=True
    ).attentions
    with regard.observe(model) as seen:
        model.generate(**given, past_key_values=Shrinking())
    for matrix, expected in zip(seen.values(), (w for step in weights for w in step), strict=True):
        assert_same(matrix, expected)


def test_a_batch_that_shrinks_between_steps_loses_nothing() -> None:
    model, cache = built("llama"), DynamicCache()
    with torch.no_grad(), regard.observe(model) as seen:
        model(ids(), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1]))
        model(ids(1)[1:], past_key_values=cache)
    assert [tuple(matrix.shape) for matrix in seen.values()][::2] == [(2, 4, 7, 7), (1, 4, 1, 8)]


# What is kept of generation


@pytest.mark.full
def test_chosen_queries_are_those_of_prompt_and_answer_together() -> None:
    model, given = built("mistral, a window of 3"), inputs("llama", 3) | GREEDY
    whole, _ = observed(model, given)
    for queries in (slice(-4, None), slice(7, None), slice(2, 9), slice(None, -3), slice(-9, -2)):
        with regard.observe(model, queries=queries) as seen:
            model.generate(**given)
        for matrix, every in zip(seen.values(), whole.values(), strict=True):
            expected = every.to_dense()[..., queries, :]
            torch.testing.assert_close(matrix.to_dense(), expected, atol=1e-6, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parts", [(6, 4), (3, 3), (4, 4, 2), (2, 3, 1), (5, 1, 4, 1)], ids=str)
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_chosen_queries_are_those_of_all_parts_of_a_text(kind: str, parts: tuple[int, ...]) -> None:
    model, text = built("llama", kind), torch.arange(1, sum(parts) + 1)[None]

    def read(**options: Any) -> Tensor:
        with torch.no_grad(), regard.observe(model, **options) as seen:
            past = None
            for part in text.split(parts, 1):
                past = model(part, past_key_values=past).past_key_values
        return seen[0].to_dense()

    whole = read()
    for queries in (slice(-1, None), slice(-3, None), slice(-5, -1), slice(-6, None), slice(1, -1)):
        torch.testing.assert_close(read(queries=queries), whole[..., queries, :], atol=1e-6, rtol=0)


def test_answers_of_rows_are_joined_and_sums_over_rows_are_added() -> None:
    model, given = built("mistral, a window of 3"), inputs("llama", 3) | GREEDY
    whole, _ = observed(model, given)
    asked = [regard.TopK(3), regard.Entropy(), regard.TopK(1), regard.Sum(-1), regard.Sum(-2)]
    with regard.observe(model, keep=asked) as seen:
        model.generate(**given)
    for name, matrix in whole.items():
        for reduction in asked:
            torch.testing.assert_close(
                seen.kept[name][reduction], matrix.reduce(reduction), atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("path", [None, "run.safetensors"], ids=["memory", "file"])
def test_answers_that_do_not_merge_are_left_out_and_warned_of(
    path: str | None, tmp_path: Path
) -> None:
    model, file = built("llama"), None if path is None else tmp_path / path
    sentence = (
        "'model.layers.0.self_attn', 'model.layers.1.self_attn' lack answers: "
        f"{regard.Pool(2, 2)!r} of several calls cannot be merged to one of all.\n"
        '    Observe with keep="qk", and ask the recording.'
    )
    with (
        pytest.warns(UserWarning, match=re.escape(sentence)),
        regard.observe(model, keep=[regard.Entropy(), regard.Pool(2, 2)], path=file) as seen,
    ):
        model.generate(inputs=ids(), **GREEDY | {"max_new_tokens": 3})
    assert [list(answers) for answers in seen.kept.values()] == [[regard.Entropy()]] * 2
    assert seen.kept["model.layers.0.self_attn"][regard.Entropy()].shape == (2, 4, 9)
    with pytest.raises(regard.RegardError, match="has no answer to Pool"):
        seen.reduce(regard.Pool(2, 2))


def test_a_long_prompt_forms_no_mask() -> None:
    model, tokens = built("llama"), torch.arange(2048)[None] % VOCABULARY

    def run() -> None:
        cache = model(tokens, use_cache=True).past_key_values
        model(tokens[:, :1], past_key_values=cache)

    with torch.no_grad():
        plain = largest(run)
        with LargestTensor() as mode, regard.observe(model, layers=[0]) as seen:
            run()
    assert seen[0].mask.text == "Causal()"
    assert mode.elements <= plain


class Shifted(nn.Module):
    """Attention over all tokens so far, with relu between the scores and their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.used: list[Tensor] = []

    def forward(self, x: Tensor, first: int) -> Tensor:
        # Token by token: a longer product rounds earlier tokens in another way on some processors.
        k, v = (torch.cat([each(t) for t in x.split(1, 1)], 1) for each in (self.k, self.v))
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q(x[:, first:]), k, v)
        )
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + first)
        weights = (q @ k.mT).relu().masked_fill(later, -torch.inf).softmax(-1)
        self.used.append(weights.clone())
        return (weights @ v).transpose(1, 2).flatten(2)

    def generate(self) -> Tensor:
        """Return the weights of all calls, 0 for the keys that a call did not have."""
        x, self.used = noise(1, 8, 8), []
        for first, stop in ((0, 5), (5, 6), (6, 7), (7, 8)):
            self(x[:, :stop], first)
        return torch.cat([F.pad(each, (0, 8 - each.shape[-1])) for each in self.used], 2)


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ({}, (...,)),
        ({"heads": [1]}, (slice(None), [1])),
        ({"queries": slice(-3, None)}, (..., slice(-3, None), slice(None))),
        ({"keep": "qkv"}, (...,)),
        ({"path": True}, (...,)),
    ],
    ids=["all", "heads", "queries", "values", "path"],
)
def test_weights_that_are_kept_are_merged_over_the_calls(
    chosen: dict[str, Any], part: Any, tmp_path: Path
) -> None:
    model = Shifted()
    options = chosen | ({"path": tmp_path / "run.safetensors"} if "path" in chosen else {})
    with torch.no_grad(), regard.observe(model, **options) as seen:
        expected = model.generate()
    assert list(seen) == ["Shifted"]
    torch.testing.assert_close(seen[0].to_dense(), expected[part], atol=1e-6, rtol=0)


def test_answers_of_kept_weights_are_merged_over_the_calls() -> None:
    model, asked = Shifted(), [regard.TopK(2), regard.Entropy(), regard.Sum(-2)]
    with torch.no_grad(), regard.observe(model, keep=asked) as seen:
        expected = regard.AttentionMatrix.from_weights(model.generate())
    for reduction in asked[1:]:
        answer = seen.kept["Shifted"][reduction]
        torch.testing.assert_close(answer, expected.reduce(reduction), atol=1e-5, rtol=0)
    top = seen.kept["Shifted"][asked[0]]
    torch.testing.assert_close(top.values, expected.topk(2).values, atol=1e-6, rtol=0)


def test_weights_beyond_the_limit_are_refused_with_their_size() -> None:
    model = nn.Sequential(regard.nn.SelfAttention(8), Wrapped(Shifted()))
    limit, warned = 100 / 2**30, pytest.warns(regard.RefusedWarning, match="they take 200 bytes")
    with torch.no_grad(), warned, regard.observe(model, max_weights=limit) as seen:
        model(noise(1, 5, 8))
    assert list(seen) == ["0"]
    assert "max_weights is" in seen.refused[0].reason
    assert seen.refused[0].module == "1.inner"


class Wrapped(nn.Module):
    def __init__(self, inner: Shifted) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.cat((x, x), 1)[:, :5], 0)
