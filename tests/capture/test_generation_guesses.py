"""Caches that went back: of assisted decoding, and of those who cut theirs back or copy it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    StaticCache,
)

import regard
from decoders import GREEDY, built, inputs
from models import VOCABULARY, ids, noise

LOOKUP = {"prompt_lookup_num_tokens": 3} | GREEDY
TEXT = ids()[:1, [0, 1, 2, 3, 0, 1, 2]]
APART = "did not go on from the end of the cache"

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("guessing", ["lookup", "assistant"])
def test_assisted_decoding_stays_in_pieces_of_what_ran_and_says_so(
    name: str, guessing: str
) -> None:
    given = {"inputs": TEXT} | LOOKUP
    if guessing == "assistant":
        given = {"inputs": TEXT, "assistant_model": assistant(name)} | GREEDY
    model, ran = built(name, "eager"), list[Tensor]()
    plain = model.generate(**copy.copy(given)).sequences
    first = next(m for n, m in model.named_modules() if n.endswith(("0.self_attn", "h.0.attn")))
    hook = first.register_forward_hook(lambda _module, _args, output: ran.append(output[1]))
    with pytest.warns(UserWarning, match=APART), regard.observe(model) as seen:
        output = model.generate(**copy.copy(given)).sequences
    hook.remove()
    assert torch.equal(plain, output)
    pieces = [seen[each].to_dense() for each in seen if ".0." in each]
    assert len(pieces) > 1
    assert sum(piece.shape[-2] for piece in pieces) == sum(call.shape[-2] for call in ran)
    for call in ran:
        assert any(_has_rows(piece, call) for piece in pieces)


def test_guesses_that_are_left_at_the_end_are_warned_of() -> None:
    text = torch.randint(5, 100, (1, 7), generator=torch.manual_seed(3))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=None)).eval()
    warned = pytest.warns(UserWarning, match="added several tokens to the cache; if they were")
    with warned, regard.observe(model) as seen:
        output = model.generate(text, max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=2)
    assert len(seen) == 2, "no call went back"
    assert seen[0].shape[-1] == output.shape[-1], "one row more than the model reads of its text"


def _has_rows(piece: Tensor, call: Tensor) -> bool:
    """Return True if some rows of a piece are the weights of a call."""
    rows, keys = call.shape[-2:]
    return any(
        keys <= piece.shape[-1]
        and torch.allclose(piece[..., row : row + rows, :keys], call, atol=1e-5)
        for row in range(piece.shape[-2] - rows + 1)
    )


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


def test_padding_that_attends_to_the_room_of_a_static_cache_is_refused() -> None:
    model = built("llama", "eager")
    real = torch.ones(2, 7, dtype=torch.long)
    real[1, :3] = 0
    text, cache = TEXT.expand(2, -1), StaticCache(config=model.config, max_cache_len=32)
    refused = pytest.raises(regard.RegardError, match="slots of a static cache that no token")
    with refused, torch.no_grad(), regard.observe(model):
        model(text, attention_mask=real, past_key_values=cache)
        more = torch.cat([real, real[:, -1:]], 1)
        model(text[:, :1], attention_mask=more, past_key_values=cache)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [1, 3])
def test_a_second_answer_from_a_copied_cache_knows_where_its_rows_stand(count: int) -> None:
    model, apart = built("llama"), pytest.warns(UserWarning, match=APART)
    with apart, torch.no_grad(), regard.observe(model) as seen:
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
    model, apart = built("llama"), pytest.warns(UserWarning, match=APART)
    with apart, torch.no_grad(), regard.observe(model) as seen:
        cache = model(TEXT).past_key_values
        cache.crop(-back)
        model(torch.tensor([tokens]), past_key_values=cache)
    start = TEXT.shape[1] - back
    positions = [layer.positions for layer in seen.layers if "#2" in layer.name]
    assert positions == [range(start, start + len(tokens))] * 2


def test_another_look_at_another_text_stands_at_its_own_start() -> None:
    model, memory = nn.MultiheadAttention(16, 4, batch_first=True).eval(), noise(2, 9, 16)
    with torch.no_grad(), regard.observe(model) as seen:
        for count in (9, 4):
            model(noise(2, count, 16), memory, memory)
    assert [layer.positions for layer in seen.layers] == [range(9), range(4)]
