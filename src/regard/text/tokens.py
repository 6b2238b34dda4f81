"""Tokens with their text, and their conversion from the token ids of a model."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, SupportsIndex, cast

from torch import Tensor

from regard.errors import is_whole, kind_text

_REMEDY = "Pass regard.tokens_of(tokenizer, ids), or a list of pieces of text."
_NO_CHARACTER = "\ufffd"  # the replacement for an incomplete character


class Token(NamedTuple):
    """A token with its text.

    Attributes:
        text: the text of the token, with the white space before it; all tokens joined are the text.
        special: True if the tokenizer added it, such as ``[CLS]``; it is not part of the text.

    Example:
        >>> import regard
        >>> "".join(token.text for token in (regard.Token("Life"), regard.Token(" is")))
        'Life is'
    """

    text: str
    special: bool = False


def as_tokens(name: str, entries: Iterable[Token | str] | None) -> tuple[Token, ...] | None:
    """Convert strings to tokens, and return all tokens; None stays None.

    Args:
        name: the name of the argument, for errors.
        entries: tokens, strings, or both; a string is the text of one token.

    Raises:
        TypeError: the argument is a single string, or contains an object of another type.
    """
    if entries is None:
        return None
    if isinstance(entries, str):
        raise TypeError(f"{name} is a text; it must be tokens.\n    Pass a list of its pieces.")
    if not isinstance(entries, Iterable):
        raise TypeError(f"{name} is {kind_text(entries)}; it must be tokens.\n    {_REMEDY}")
    tokens: list[Token] = []
    for index, token in enumerate(entries):
        if not isinstance(token, Token | str):
            raise TypeError(
                f"{name} has {kind_text(token)} at place {index}; each must be a Token or a string."
                f"\n    {_REMEDY}"
            )
        tokens.append(token if isinstance(token, Token) else Token(token))
    return tuple(tokens)


def tokens_of(tokenizer: Any, ids: Sequence[int] | Tensor) -> list[Token]:
    """Return the tokens with their texts for the token ids of a model.

    If several ids share a character, such as the bytes of an emoji, the first token contains it and
    the others are empty. If the tokenizer is lossless, the tokens joined are the original text.
    Special ids of the tokenizer, such as ``[CLS]`` or ``<|im_start|>``, become special tokens.

    Args:
        tokenizer: a tokenizer of Hugging Face transformers, fast or slow.
        ids: the token ids of one text, such as prompt and answer, (tokens,).

    Raises:
        TypeError: ids is not a list or tensor of whole numbers.

    Example:
        >>> import regard
        >>> from regard.models.pretrained import Pretrained
        >>> tokenizer = Pretrained.load().tokenizer
        >>> ids = tokenizer("Unbelievably short!")["input_ids"]
        >>> [token.text for token in regard.tokens_of(tokenizer, ids)]
        ['[CLS]', 'un', 'bel', 'ie', 'va', 'bly', ' short', '!', '[SEP]']
    """
    numbers = _whole_numbers(ids)
    special, tokens = _special_ids(tokenizer), list[Token]()
    while len(tokens) < len(numbers):
        first = len(tokens)
        if numbers[first] in special:
            tokens.append(Token(tokenizer.convert_ids_to_tokens(numbers[first]), special=True))
        text = takewhile(lambda number: number not in special, numbers[len(tokens) :])
        tokens += map(Token, _pieces(tokenizer, list(text)))
    return tokens


def _pieces(tokenizer: Any, ids: list[int]) -> Iterator[str]:
    """Yield the text that each id adds; its leading space may depend on the ids before it."""
    before = start = 0
    for stop in range(1, len(ids) + 1):
        old, new = (
            tokenizer.decode(ids[before:end], clean_up_tokenization_spaces=False)
            for end in (start, stop)
        )
        # A slow tokenizer does not report bytes of an incomplete character.
        open_ended = new.endswith(_NO_CHARACTER) or (new == old and not tokenizer.is_fast)
        if open_ended and stop < len(ids):
            continue
        same = takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
        yield new[sum(1 for _ in same) :]
        yield from [""] * (stop - start - 1)
        before, start = start, stop


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens; the id of an unknown word is ordinary text."""
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return special - {tokenizer.unk_token_id}.difference(ends)


def _whole_numbers(ids: object) -> list[int]:
    numbers = cast(object, ids.tolist()) if isinstance(ids, Tensor) else ids
    entries = list(cast(Iterable[object], numbers)) if isinstance(numbers, Iterable) else [None]
    if not all(map(is_whole, entries)):
        raise TypeError(
            f"ids is {kind_text(ids)}; it must be the ids of one text, which are whole numbers.\n"
            '    Pass for example tokenizer(text)["input_ids"], and of several texts one, ids[0].'
        )
    return [int(cast(SupportsIndex, entry)) for entry in entries]
