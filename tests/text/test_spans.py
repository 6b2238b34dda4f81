"""Parts of a text: where its words, sentences and what a pattern finds are among its tokens."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.text.spans import by_pattern, by_sentence, by_word

Token = regard.Token
CLS, SEP = Token("[CLS]", special=True), Token("[SEP]", special=True)
Spans = dict[str, tuple[int, int]]


WORDS = {
    "a word of several tokens": (
        ["un", "believ", "able", " story"],
        {"unbelievable": (0, 3), "story": (3, 4)},
    ),
    "punctuation and special tokens are no words": (
        [CLS, "Yes", ",", " no", ".", SEP],
        {"Yes": (1, 2), "no": (3, 4)},
    ),
    "hyphens and apostrophes": (
        ["It", "'", "s", " sun", "-", "lit", " it\u2019s -", "'so'"],
        {"It's": (0, 3), "sun-lit": (3, 6), "it\u2019s": (6, 7), "so": (7, 8)},
    ),
    "repeated words have numbers": (
        ["to", " be", " to", " be", " to"],
        {"to": (0, 1), "be": (1, 2), "to#2": (2, 3), "be#2": (3, 4), "to#3": (4, 5)},
    ),
    "a special token ends a word": (["a", SEP, "b"], {"a": (0, 1), "b": (2, 3)}),
    "two words in a token": (["of the", " sea"], {"of": (0, 1), "sea": (1, 2)}),
    "a token without text": (["caf", "é", "", " noir"], {"café": (0, 3), "noir": (3, 4)}),
    "another script": (["привет", " мир"], {"привет": (0, 1), "мир": (1, 2)}),
}


@pytest.mark.parametrize(("tokens", "words"), WORDS.values(), ids=WORDS)
def test_words_have_the_tokens_that_they_are_made_of(tokens: Any, words: Spans) -> None:
    assert by_word(tokens) == words


SENTENCES = {
    "marks": (
        [CLS, "Dr", ".", " No", " ran", "!", " Why", "?", " Yes", SEP],
        {"Dr.": (1, 3), "No ran!": (3, 6), "Why?": (6, 8), "Yes": (8, 9)},
    ),
    "a point in a number": (["It", " is", " 3", ".", "5", "."], {"It is 3.5.": (0, 6)}),
    "a mark inside quotes": (
        ['"', "Go", "!", '"', " He", " went", "."],
        {'"Go!"': (0, 4), "He went.": (4, 7)},
    ),
    "an empty line": (
        ["A", " title", "\n", "\n", "Some", " text"],
        {"A title": (0, 4), "Some text": (4, 6)},
    ),
    "no space after marks of Chinese": (
        ["你好", "\u3002", "你", "好吗", "\uff1f"],
        {"你好\u3002": (0, 2), "你好吗\uff1f": (2, 5)},
    ),
    "empty lines at the start": (["\n", "\n", "It", " rains", "."], {"It rains.": (0, 5)}),
}


@pytest.mark.parametrize(("tokens", "sentences"), SENTENCES.values(), ids=SENTENCES)
def test_sentences_go_up_to_their_marks(tokens: Any, sentences: Spans) -> None:
    assert by_sentence(tokens) == sentences


TEXTS = st.lists(
    st.sampled_from(["a", " b", ".", " ", "\n", "\n\n", "!", "", "c d", "? ", "é", "\u3002"]),
    min_size=1,
    max_size=12,
)


@given(TEXTS)
def test_every_token_is_in_one_sentence_and_no_token_in_two_words(tokens: list[str]) -> None:
    if "".join(tokens).strip():
        covered = [index for span in by_sentence(tokens).values() for index in range(*span)]
        assert covered == sorted(set(covered))
        outside = set(range(len(tokens))) - set(covered)
        assert not "".join(tokens[index] for index in outside).strip()
    if re.search(r"\w", "".join(tokens)):
        indices = [index for span in by_word(tokens).values() for index in range(*span)]
        assert indices == sorted(set(indices))


PATTERNS = {
    "matches are named by their text": (
        ["was", " warm", " and", " was", " wet", " was", " warm"],
        r"was \w+",
        {"was warm": (0, 2), "was wet": (3, 5), "was warm#2": (5, 7)},
    ),
    "named patterns": (
        ["Doc", " one", ".", " Doc", " two", ".", " Q", "?"],
        {"doc": re.compile(r"doc \w+\.", re.IGNORECASE), "question": r"Q\?"},
        {"doc": (0, 3), "doc#2": (3, 6), "question": (6, 8)},
    ),
    "a group": (["Q", ":", " who", "?"], {"question": r"Q: (\w+)"}, {"question": (2, 3)}),
    "special tokens inside": (["a", SEP, " b", SEP], "a b", {"a b": (0, 3)}),
    "the start of a token": (["fore", "st", " fire"], "for", {"for": (0, 1)}),
    "a part of two tokens": (["fore", "st", " fire"], "rest", {"rest": (0, 2)}),
    "a shared token belongs to the first match": (
        ["ab", "c", "d"],
        "[ac]|[bd]+",
        {"a": (0, 1), "c": (1, 2), "d": (2, 3)},
    ),
    "a shared token of two patterns": (
        ["a", "b c", "d"],
        {"y": "c ?d", "x": "ab"},
        {"y": (2, 3), "x": (0, 2)},
    ),
    "patterns that overlap": (
        ["a", "b", "c"],
        {"whole": "abc", "part": "b"},
        {"whole": (0, 3), "part": (1, 2)},
    ),
    "white space before a token": (["a", " b", " c"], "a | c", {"a": (0, 1), "c": (2, 3)}),
    "empty matches": (["aab", " c"], "x*|c", {"c": (1, 2)}),
}


@pytest.mark.parametrize(("tokens", "pattern", "parts"), PATTERNS.values(), ids=PATTERNS)
def test_a_pattern_finds_the_tokens_of_its_matches(tokens: Any, pattern: Any, parts: Spans) -> None:
    assert by_pattern(tokens, pattern) == parts


@given(TEXTS)
def test_a_pattern_for_a_whole_token_finds_that_token(texts: list[str]) -> None:
    some = [*texts, "needle", *texts]
    assert by_pattern(some, "needle") == {"needle": (len(texts), len(texts) + 1)} or texts[0] == ""


NO_MATCH = (
    "the text has no token that it matches.\n"
    '    Patterns see "".join(token.text for token in tokens), without special tokens.'
)
NONE = "there must be at least one.\n    Special tokens are no part of the text."


NOTHING_FOUND = {
    "no tokens known": (
        lambda: by_word(None),
        ValueError,
        "tokens is None; parts of a text are found by its tokens.\n"
        "    Give the recording its tokens with seen.with_tokens(tokens).",
    ),
    "text instead of tokens": (
        lambda: by_sentence("a text"),
        TypeError,
        "tokens is a text; it must be tokens.\n    Pass a list of its pieces.",
    ),
    "word": (lambda: by_word([CLS, ".", "!"]), ValueError, f"tokens has no word; {NONE}"),
    "sentence": (lambda: by_sentence([CLS, SEP]), ValueError, f"tokens has no sentence; {NONE}"),
    "pattern": (lambda: by_pattern(["a", " b"], "c+"), ValueError, f"pattern has 'c+'; {NO_MATCH}"),
    "named pattern": (
        lambda: by_pattern([CLS, "a"], {"a": "a", "start": r"\[CLS\]"}),
        ValueError,
        f"pattern has '\\\\[CLS\\\\]' for 'start'; {NO_MATCH}",
    ),
    "patterns": (lambda: by_pattern(["a"], {}), ValueError, f"tokens has no match; {NONE}"),
    "regular expression": (
        lambda: by_pattern(["a"], {"a": "("}),
        ValueError,
        "pattern has '('; it is no regular expression (missing ), unterminated subpattern at "
        "position 0).\n    Use re.escape(text) to find a text as it stands.",
    ),
}


@pytest.mark.parametrize(("ask", "kind", "message"), NOTHING_FOUND.values(), ids=NOTHING_FOUND)
def test_what_finds_nothing_is_an_error(ask: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        ask()
