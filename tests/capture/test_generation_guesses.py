"""Guesses of assisted decoding: rows are those that stay, whatever is kept of them.

The oracle is transformers' eager attention, over the text that was written.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LogitsProcessor, LogitsProcessorList

import regard
from decoders import DECODERS, GREEDY, built, inputs, layer_of
from models import VOCABULARY, ids, noise

LOOKUP = {"prompt_lookup_num_tokens": 3} | GREEDY
TEXT = ids()[:1, [0, 1, 2, 3, 0, 1, 2]]

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def assistant(name: str) -> Any:
    """A model that often guesses what another writes, three tokens at a time."""
    model = built(name)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    own = model.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule = 3, "constant"
    return model


def read_tokens(model: Any, given: dict[str, Any]) -> int:
    """How many tokens a model reads, those that are taken back included."""
    ran = list[int]()
    hook = model.get_decoder().register_forward_hook(
        lambda _module, _args, output: ran.append(output[0].shape[1])
    )
    model.generate(**given)
    hook.remove()
    return sum(ran)


def assert_is_what_stays(name: str, given: dict[str, Any], *, guessed: bool = True) -> None:
    """Each matrix is that of the text that was written, without its last token."""
    model = built(name)
    plain = model.generate(**copy.copy(given)).sequences
    with regard.observe(model) as seen:
        output = model.generate(**copy.copy(given)).sequences
    assert torch.equal(plain, output)
    if guessed:
        assert read_tokens(model, given) > output.shape[1] - 1, "nothing was taken back"
    eager = built(name, "eager")(output[:, :-1], output_attentions=True).attentions
    for matrix, weights in zip(seen.values(), eager, strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_that_were_taken_back_are_left_out(name: str) -> None:
    assert_is_what_stays(name, {"inputs": TEXT} | LOOKUP)


def test_what_an_assistant_guesses_wrong_is_left_out() -> None:
    given = {"inputs": TEXT, "assistant_model": assistant("llama")} | GREEDY
    assert_is_what_stays("llama", given | {"max_new_tokens": 12})


@pytest.mark.parametrize("last", range(1, 7))
def test_what_the_last_step_guessed_too_much_is_left_out(last: int) -> None:
    answer = built("llama").generate(TEXT, **GREEDY).sequences[0, 7:]
    end = {"eos_token_id": int(answer[last - 1])}
    assert_is_what_stays("llama", {"inputs": TEXT} | LOOKUP | end, guessed=False)


def test_a_model_that_guesses_with_its_own_first_layers_reads_its_text_once() -> None:
    assert_is_what_stays(
        "gemma 3, windows", {"inputs": TEXT, "assistant_early_exit": 1} | GREEDY, guessed=False
    )


def test_of_two_texts_guesses_are_left_out_of_the_attention_to_either() -> None:
    given = {"inputs": ids()[:1], "assistant_model": assistant("t5")} | GREEDY
    given |= {"max_new_tokens": 20}
    model, eager = built("t5"), built("t5", "eager")
    with regard.observe(model) as seen:
        output = model.generate(**copy.copy(given)).sequences
    assert read_tokens(model, given) > output.shape[1] - 1
    expected = eager(ids()[:1], decoder_input_ids=output[:, :-1], output_attentions=True)
    for name, matrix in seen.items():
        kind = "decoder" if "SelfAttention" in name else "cross"
        kind = "encoder" if name.startswith("encoder") else kind
        weights = expected[f"{kind}_attentions"][layer_of(name)]
        torch.testing.assert_close(matrix.to_dense(), weights, atol=1e-5, rtol=0)


def kept_and_whole(**wanted: Any) -> tuple[regard.Recording, regard.Recording]:
    given, model = {"inputs": TEXT} | LOOKUP, built("llama")
    with regard.observe(model, **wanted) as seen:
        model.generate(**given)
    with regard.observe(model) as whole:
        model.generate(**given)
    return seen, whole


ASKED = [regard.Entropy(), regard.TopK(3), regard.TopK(1), regard.Sum(-1), regard.Sum(-2)]


@pytest.mark.parametrize("reduction", ASKED, ids=repr)
def test_answers_are_those_of_the_tokens_that_stay(reduction: regard.Reduction) -> None:
    seen, whole = kept_and_whole(keep=[reduction])
    assert list(seen.shapes) == list(whole.shapes)
    for name, matrix in whole.items():
        found = seen.kept[name][reduction]
        torch.testing.assert_close(found, matrix.reduce(reduction), atol=1e-5, rtol=0)


def test_answers_that_do_not_join_stand_token_by_token() -> None:
    seen, _ = kept_and_whole(keep=[regard.Entropy(), regard.Pool(2, 2)])
    name = "model.layers.0.self_attn"
    steps = [f"{name}[0:7]", *(f"{name}[{row}:{row + 1}]" for row in range(7, 12))]
    assert [each for each in seen.shapes if "layers.0" in each] == [name, *steps]


@pytest.mark.parametrize("queries", [slice(-3, None), slice(8, None), slice(2, -2)], ids=str)
def test_chosen_queries_are_counted_without_guesses(queries: slice) -> None:
    seen, whole = kept_and_whole(queries=queries)
    for name, matrix in whole.items():
        expected = matrix.to_dense()[..., queries, :]
        torch.testing.assert_close(seen[name].to_dense(), expected, atol=1e-6, rtol=0)


def test_values_are_those_of_the_tokens_that_stay() -> None:
    seen, whole = kept_and_whole(keep="qkv")
    assert [seen.value(name).shape[-2] for name in seen] == [12, 12]
    assert [matrix.shape[-1] for matrix in whole.values()] == [12, 12]


def test_layers_that_are_not_kept_do_not_count_guesses_either() -> None:
    given = {"inputs": ids()[:1], "assistant_model": assistant("t5")} | GREEDY
    name, model = "decoder.block.0.layer.1.EncDecAttention", built("t5")
    with regard.observe(model) as whole:
        model.generate(**copy.copy(given))
    with regard.observe(model, layers=[name]) as seen:
        model.generate(**copy.copy(given))
    assert list(seen) == [name]
    assert torch.equal(seen[name].to_dense(), whole[name].to_dense())


def test_rows_that_saw_the_keys_of_guesses_keep_them() -> None:
    # With a used cache, this generate reads all of the text again, under a mask that is too short.
    model, asked = built("gemma 3, windows"), [regard.Entropy(), regard.Sum(-2)]
    found = list[regard.Recording]()
    for keep in (asked, "qk"):
        with regard.observe(model, keep=keep) as seen:
            first = model.generate(TEXT, **LOOKUP)
            again = torch.cat([first.sequences, TEXT[:, :5]], 1)
            model.generate(again, past_key_values=first.past_key_values, **LOOKUP)
        found.append(seen)
    answers, whole = found
    assert list(answers.shapes) == list(whole.shapes)
    for name, matrix in whole.items():
        for reduction in asked:
            kept = answers.kept[name][reduction]
            torch.testing.assert_close(kept, matrix.reduce(reduction), atol=1e-5, rtol=0)


class Interrupted(LogitsProcessor):
    """Raises when a text has a length."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 9:
            raise KeyboardInterrupt
        return scores


def test_guesses_of_which_nobody_knows_whether_they_stay_are_left_out() -> None:
    model, stop = built("llama"), LogitsProcessorList([Interrupted()])
    with regard.observe(model) as seen:
        with pytest.raises(KeyboardInterrupt):
            model.generate(TEXT, **LOOKUP, logits_processor=stop)
        output = model.generate(TEXT, **LOOKUP).sequences
    whole = built("llama", "eager")(output[:, :-1], output_attentions=True).attentions
    for matrix, weights in zip(list(seen.values())[:2], whole, strict=True):
        ran = matrix.shape[-1]
        assert matrix.shape[-2:] == (ran, ran)
        assert ran < 12
        torch.testing.assert_close(matrix.to_dense(), weights[..., :ran, :ran], atol=1e-5, rtol=0)
    assert [matrix.shape[-2] for matrix in seen.values()][2:] == [12, 12]


# What is no guess


@pytest.mark.parametrize("padded", [0, 3], ids=["not padded", "padded on the left"])
def test_a_bias_that_hides_the_room_of_a_static_cache_is_read(padded: int) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 1, "num_heads": 4}
    config = GPTNeoConfig(**sizes, attention_types=[[["global"], 1]], max_position_embeddings=64)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(config).eval()
    given = inputs("llama", padded) | GREEDY
    dense = list[Tensor]()
    for cache in ("dynamic", "static"):
        with regard.observe(model) as seen:
            model.generate(**given, cache_implementation=cache)
        assert len(seen) == 1
        dense.append(seen[0].to_dense()[:, :, padded:])
    torch.testing.assert_close(*dense, atol=1e-6, rtol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_second_answer_from_a_copied_cache_knows_where_its_rows_stand(count: int) -> None:
    model = built("llama")
    with torch.no_grad(), regard.observe(model) as seen:
        cache = model(TEXT).past_key_values
        other = copy.deepcopy(cache)
        for token, past in ((3, cache), (4, cache), *((9 + n, other) for n in range(count))):
            model(torch.tensor([[token]]), past_key_values=past)
    second = seen.part([name for name in seen if "#2" in name])
    assert second.layers[0].positions == range(7, 7 + count)
    named = second.with_tokens([f"t{place}" for place in range(7 + count)])
    assert [token.text for token in named.query_tokens or ()] == [
        f"t{place}" for place in range(7, 7 + count)
    ]


@pytest.mark.parametrize(
    ("back", "tokens"),
    [
        pytest.param(2, [3, 4], id="other tokens"),
        pytest.param(1, [3, 4, 5], id="more tokens"),
        pytest.param(2, TEXT[0, -2:].tolist(), id="the same tokens"),
    ],
)
def test_an_answer_from_a_prompt_that_was_cut_back_knows_where_its_rows_stand(
    back: int, tokens: list[int]
) -> None:
    model = built("llama")
    with torch.no_grad(), regard.observe(model) as seen:
        cache = model(TEXT).past_key_values
        cache.crop(-back)
        model(torch.tensor([tokens]), past_key_values=cache)
    start = TEXT.shape[1] - back
    found = [layer.positions for layer in seen.layers if "#2" in layer.name]
    assert found == [range(start, start + len(tokens))] * 2


def test_another_look_at_another_text_stands_at_its_own_start() -> None:
    model, memory = nn.MultiheadAttention(16, 4, batch_first=True).eval(), noise(2, 9, 16)
    with torch.no_grad(), regard.observe(model) as seen:
        for count in (9, 4):
            model(noise(2, count, 16), memory, memory)
    assert [layer.positions for layer in seen.layers] == [range(9), range(4)]
