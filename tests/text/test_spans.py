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


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        pytest.param(
            ["un", "believ", "able", " story"],
            {"unbelievable": (0, 3), "story": (3, 4)},
            id="a word of several tokens",
        ),
        pytest.param(
            [CLS, "Yes", ",", " no", ".", SEP],
            {"Yes": (1, 2), "no": (3, 4)},
            id="punctuation and special tokens are no words",
        ),
        pytest.param(
            ["It", "'", "s", " sun", "-", "lit", " it\u2019s -", "'so'"],
            {"It's": (0, 3), "sun-lit": (3, 6), "it\u2019s": (6, 7), "so": (7, 8)},
            id="hyphens and apostrophes",
        ),
        pytest.param(
            ["to", " be", " to", " be", " to"],
            {"to": (0, 1), "be": (1, 2), "to#2": (2, 3), "be#2": (3, 4), "to#3": (4, 5)},
            id="repeated words have numbers",
        ),
        pytest.param(["a", SEP, "b"], {"a": (0, 1), "b": (2, 3)}, id="a special token ends a word"),
        pytest.param(["of the", " sea"], {"of": (0, 1), "sea": (1, 2)}, id="two words in a token"),
        pytest.param(
            ["caf", "é", "", " noir"], {"café": (0, 3), "noir": (3, 4)}, id="a token without text"
        ),
        pytest.param(["привет", " мир"], {"привет": (0, 1), "мир": (1, 2)}, id="another script"),
    ],
)
def test_words_have_the_tokens_that_they_are_made_of(tokens: Any, words: Spans) -> None:
    assert by_word(tokens) == words


@pytest.mark.parametrize(
    ("tokens", "sentences"),
    [
        pytest.param(
            [CLS, "Dr", ".", " No", " ran", "!", " Why", "?", " Yes", SEP],
            {"Dr.": (1, 3), "No ran!": (3, 6), "Why?": (6, 8), "Yes": (8, 9)},
            id="marks",
        ),
        pytest.param(
            ["It", " is", " 3", ".", "5", "."], {"It is 3.5.": (0, 6)}, id="a point in a number"
        ),
        pytest.param(
            ['"', "Go", "!", '"', " He", " went", "."],
            {'"Go!"': (0, 4), "He went.": (4, 7)},
            id="a mark inside quotes",
        ),
        pytest.param(
            ["A", " title", "\n", "\n", "Some", " text"],
            {"A title": (0, 4), "Some text": (4, 6)},
            id="an empty line",
        ),
        pytest.param(
            ["你好", "\u3002", "你", "好吗", "\uff1f"],
            {"你好\u3002": (0, 2), "你好吗\uff1f": (2, 5)},
            id="no space after marks of Chinese",
        ),
        pytest.param(
            ["\n", "\n", "It", " rains", "."], {"It rains.": (0, 5)}, id="empty lines at the start"
        ),
    ],
)
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


@pytest.mark.parametrize(
    ("tokens", "pattern", "parts"),
    [
        pytest.param(
            ["was", " warm", " and", " was", " wet", " was", " warm"],
            r"was \w+",
            {"was warm": (0, 2), "was wet": (3, 5), "was warm#2": (5, 7)},
            id="matches are named by their text",
        ),
        pytest.param(
            ["Doc", " one", ".", " Doc", " two", ".", " Q", "?"],
            {"doc": re.compile(r"doc \w+\.", re.IGNORECASE), "question": r"Q\?"},
            {"doc": (0, 3), "doc#2": (3, 6), "question": (6, 8)},
            id="named patterns",
        ),
        pytest.param(
            ["Q", ":", " who", "?"], {"question": r"Q: (\w+)"}, {"question": (2, 3)}, id="a group"
        ),
        pytest.param(["a", SEP, " b", SEP], "a b", {"a b": (0, 3)}, id="special tokens inside"),
        pytest.param(["fore", "st", " fire"], "for", {"for": (0, 1)}, id="the start of a token"),
        pytest.param(["fore", "st", " fire"], "rest", {"rest": (0, 2)}, id="a part of two tokens"),
        pytest.param(
            ["ab", "c", "d"],
            "[ac]|[bd]+",
            {"a": (0, 1), "c": (1, 2), "d": (2, 3)},
            id="a shared token belongs to the first match",
        ),
        pytest.param(
            ["a", "b c", "d"],
            {"y": "c ?d", "x": "ab"},
            {"y": (2, 3), "x": (0, 2)},
            id="a shared token of two patterns",
        ),
        pytest.param(
            ["a", "b", "c"],
            {"whole": "abc", "part": "b"},
            {"whole": (0, 3), "part": (1, 2)},
            id="patterns that overlap",
        ),
        pytest.param(
            ["a", " b", " c"], "a | c", {"a": (0, 1), "c": (2, 3)}, id="white space before a token"
        ),
        pytest.param(["aab", " c"], "x*|c", {"c": (1, 2)}, id="empty matches"),
    ],
)
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


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        pytest.param(
            lambda: by_word(None),
            ValueError,
            "tokens is None; parts of a text are found by its tokens.\n"
            "    Give the recording its tokens with seen.with_tokens(tokens).",
            id="no tokens known",
        ),
        pytest.param(
            lambda: by_sentence("a text"),
            TypeError,
            "tokens is a text; it must be tokens.\n    Pass a list of its pieces.",
            id="text instead of tokens",
        ),
        pytest.param(
            lambda: by_word([CLS, ".", "!"]), ValueError, f"tokens has no word; {NONE}", id="word"
        ),
        pytest.param(
            lambda: by_sentence([CLS, SEP]),
            ValueError,
            f"tokens has no sentence; {NONE}",
            id="sentence",
        ),
        pytest.param(
            lambda: by_pattern(["a", " b"], "c+"),
            ValueError,
            f"pattern has 'c+'; {NO_MATCH}",
            id="pattern",
        ),
        pytest.param(
            lambda: by_pattern([CLS, "a"], {"a": "a", "start": r"\[CLS\]"}),
            ValueError,
            f"pattern has '\\\\[CLS\\\\]' for 'start'; {NO_MATCH}",
            id="named pattern",
        ),
        pytest.param(
            lambda: by_pattern(["a"], {}), ValueError, f"tokens has no match; {NONE}", id="patterns"
        ),
        pytest.param(
            lambda: by_pattern(["a"], {"a": "("}),
            ValueError,
            "pattern has '('; it is no regular expression (missing ), unterminated subpattern at "
            "position 0).\n    Use re.escape(text) to find a text as it stands.",
            id="regular expression",
        ),
    ],
)
def test_what_finds_nothing_is_an_error(ask: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        ask()
