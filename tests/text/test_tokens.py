"""The tokens of ids: text as people write it, whatever the tokenizer's own pieces look like."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

import regard
from regard.models.pretrained import Pretrained

TEXT = "The café 👩‍👧 rebuilt?\n  Who: 日本"


def fast(tokenizer: tokenizers.Tokenizer) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", additional_special_tokens=["<|user|>"]
    )


def byte_level() -> Any:
    """Ġ for a space, and a token for each byte but for a few words."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "re", "bu", "il", "ilt", "built"]
    merges = [("r", "e"), ("b", "u"), ("i", "l"), ("il", "t"), ("bu", "ilt")]
    tokenizer = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer)


def metaspace() -> Any:
    """▁ for a space, and bytes for what is in no piece."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Thecafrbuilt?Wo:"]
    ids = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(ids, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return fast(tokenizer)


@pytest.mark.parametrize(
    "make", [byte_level, metaspace, transformers.ByT5Tokenizer], ids=["Ġ", "▁", "slow"]
)
def test_the_tokens_of_ids_give_the_text_again(make: Callable[[], Any]) -> None:
    tokenizer = make()
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    tokens = regard.tokens_of(tokenizer, ids)
    assert len(tokens) == len(ids)
    assert "".join(token.text for token in tokens) == TEXT
    assert not any(token.special for token in tokens)


def test_ids_that_share_a_character_leave_it_to_the_first() -> None:
    tokenizer = byte_level()
    tokens = regard.tokens_of(tokenizer, tokenizer(" 日built")["input_ids"])
    assert [token.text for token in tokens] == [" ", "日", "", "", "built"]


def test_special_ids_are_marked_wherever_they_stand() -> None:
    tokenizer = byte_level()
    ids = tokenizer("<s><|user|>re<s> built<s>")["input_ids"]
    assert regard.tokens_of(tokenizer, ids) == [
        regard.Token("<s>", special=True),
        regard.Token("<|user|>", special=True),
        regard.Token("re"),
        regard.Token("<s>", special=True),
        regard.Token(" "),
        regard.Token("built"),
        regard.Token("<s>", special=True),
    ]


def test_a_piece_inside_a_word_shows_no_mark_and_an_unknown_word_is_text() -> None:
    tokenizer = Pretrained.load().tokenizer
    ids = tokenizer("Unbelievably 👩", return_tensors="pt")["input_ids"][0]
    tokens = regard.tokens_of(tokenizer, ids)
    assert [token.text for token in tokens[1:-1]] == ["un", "bel", "ie", "va", "bly", " [UNK]"]
    assert [token.special for token in tokens] == [True, *[False] * 6, True]


def test_the_end_of_an_answer_may_cut_a_character() -> None:
    tokenizer = byte_level()
    tokens = regard.tokens_of(tokenizer, tokenizer("re日")["input_ids"][:-1])
    assert [token.text for token in tokens] == ["re", "\ufffd", ""]


def test_no_ids_have_no_tokens() -> None:
    assert regard.tokens_of(byte_level(), []) == []


@pytest.mark.parametrize(
    ("ids", "kind"), [("text", "str"), (3, "int"), ([[3, 4]], "list"), ([True], "list")], ids=str
)
def test_what_is_no_list_of_ids_is_refused(ids: Any, kind: str) -> None:
    message = (
        f"ids is a{'n' * (kind == 'int')} {kind}; it must be the ids of one text, which are whole "
        'numbers.\n    Pass for example tokenizer(text)["input_ids"], and of several texts one, '
        "ids[0]."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        regard.tokens_of(byte_level(), ids)


def test_layers_of_two_lengths_take_their_tokens_part_by_part() -> None:
    long, short = torch.zeros(3, 2), torch.zeros(2, 2)
    seen = regard.Recording(
        {"encoder": regard.attend(long, long), "decoder.cross": regard.attend(short, long)}
    )
    with pytest.raises(ValueError, match="query_tokens") as refusal:
        seen.with_tokens(["a", "b", "c"])
    assert str(refusal.value) == (
        "query_tokens has 3 tokens; layer 'encoder' has q_len = 3 and kv_len = 3, layer "
        "'decoder.cross' has q_len = 2 and kv_len = 3, and all layers must have one length.\n"
        "    Give each its own text: seen.part(names).with_tokens(...)."
    )
    cross = seen.part(["decoder.cross"]).with_tokens(["x", "y"], ["a", "b", "c"])
    assert cross.query_tokens == (regard.Token("x"), regard.Token("y"))
