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


def tokens(*texts: str) -> list[Token]:
    return [Token(text) for text in texts]


def text_of(some: list[Token], span: tuple[int, int]) -> str:
    return "".join(token.text for token in some[slice(*span)] if not token.special).strip()


# Words


def test_a_word_has_the_tokens_that_it_is_made_of() -> None:
    assert by_word(tokens("un", "believ", "able", " story")) == {
        "unbelievable": (0, 3),
        "story": (3, 4),
    }


def test_punctuation_and_special_tokens_are_no_words() -> None:
    assert by_word([CLS, *tokens("Yes", ",", " no", "."), SEP]) == {"Yes": (1, 2), "no": (3, 4)}


def test_hyphens_and_apostrophes_inside_a_word_belong_to_it() -> None:
    assert list(by_word(tokens("It", "'", "s", " sun", "-", "lit", " it\u2019s -", "'so'"))) == [
        "It's",
        "sun-lit",
        "it\u2019s",
        "so",
    ]


def test_a_word_that_comes_again_has_a_number() -> None:
    assert by_word(tokens("to", " be", " to", " be", " to")) == {
        "to": (0, 1),
        "be": (1, 2),
        "to#2": (2, 3),
        "be#2": (3, 4),
        "to#3": (4, 5),
    }


def test_a_special_token_ends_a_word() -> None:
    assert by_word([Token("a"), SEP, Token("b")]) == {"a": (0, 1), "b": (2, 3)}


def test_a_token_that_holds_two_words_is_the_first_one() -> None:
    assert by_word(tokens("of the", " sea")) == {"of": (0, 1), "sea": (1, 2)}


def test_a_token_without_text_goes_with_the_one_before() -> None:
    assert by_word(tokens("caf", "é", "", " noir")) == {"café": (0, 3), "noir": (3, 4)}


def test_the_words_of_another_script_are_words() -> None:
    assert by_word(tokens("привет", " мир")) == {"привет": (0, 1), "мир": (1, 2)}


# Sentences


def test_a_sentence_goes_up_to_its_mark() -> None:
    some = [CLS, *tokens("Dr", ".", " No", " ran", "!", " Why", "?", " Yes"), SEP]
    assert by_sentence(some) == {
        "Dr.": (1, 3),
        "No ran!": (3, 6),
        "Why?": (6, 8),
        "Yes": (8, 9),
    }


def test_a_point_inside_a_number_ends_nothing() -> None:
    assert list(by_sentence(tokens("It", " is", " 3", ".", "5", "."))) == ["It is 3.5."]


def test_a_mark_inside_quotes_ends_the_sentence_after_them() -> None:
    assert list(by_sentence(tokens('"', "Go", "!", '"', " He", " went", "."))) == [
        '"Go!"',
        "He went.",
    ]


def test_an_empty_line_ends_a_sentence() -> None:
    assert list(by_sentence(tokens("A", " title", "\n", "\n", "Some", " text"))) == [
        "A title",
        "Some text",
    ]


def test_marks_of_chinese_need_no_space_after_them() -> None:
    some = tokens("你好", "\u3002", "你", "好吗", "\uff1f")
    assert by_sentence(some) == {"你好\u3002": (0, 2), "你好吗\uff1f": (2, 5)}


TEXTS = st.lists(
    st.sampled_from(["a", " b", ".", " ", "\n", "\n\n", "!", "", "c d", "? ", "é", "\u3002"]),
    min_size=1,
    max_size=12,
)


@given(TEXTS)
def test_every_token_is_in_one_sentence_and_no_token_in_two_words(texts: list[str]) -> None:
    some = tokens(*texts)
    if "".join(texts).strip():
        spans = list(by_sentence(some).values())
        covered = [place for span in spans for place in range(*span)]
        assert covered == sorted(set(covered))
        outside = set(range(len(some))) - set(covered)
        assert not "".join(some[place].text for place in outside).strip()
    if re.search(r"\w", "".join(texts)):
        places = [place for span in by_word(some).values() for place in range(*span)]
        assert places == sorted(set(places))


# Patterns


def test_a_pattern_finds_every_match_by_its_text() -> None:
    some = tokens("was", " warm", " and", " was", " wet", " was", " warm")
    assert by_pattern(some, r"was \w+") == {
        "was warm": (0, 2),
        "was wet": (3, 5),
        "was warm#2": (5, 7),
    }


def test_named_patterns_name_what_they_find() -> None:
    some = tokens("Doc", " one", ".", " Doc", " two", ".", " Q", "?")
    assert by_pattern(
        some, {"doc": re.compile(r"doc \w+\.", re.IGNORECASE), "question": r"Q\?"}
    ) == {
        "doc": (0, 3),
        "doc#2": (3, 6),
        "question": (6, 8),
    }


def test_a_group_is_the_part() -> None:
    assert by_pattern(tokens("Q", ":", " who", "?"), {"question": r"Q: (\w+)"}) == {
        "question": (2, 3)
    }


def test_a_match_goes_over_the_special_tokens_inside_it() -> None:
    some = [Token("a"), SEP, Token(" b"), SEP]
    assert by_pattern(some, "a b") == {"a b": (0, 3)}


def test_a_match_has_every_token_that_it_shares_a_character_with() -> None:
    some = tokens("fore", "st", " fire")
    assert by_pattern(some, "for") == {"for": (0, 1)}
    assert by_pattern(some, "rest") == {"rest": (0, 2)}


def test_a_token_that_two_matches_share_is_the_first_one_s() -> None:
    assert by_pattern(tokens("ab", "c", "d"), "[ac]|[bd]+") == {
        "a": (0, 1),
        "c": (1, 2),
        "d": (2, 3),
    }


def test_white_space_before_a_token_is_no_part_of_it() -> None:
    assert by_pattern(tokens("a", " b", " c"), "a | c") == {"a": (0, 1), "c": (2, 3)}


def test_matches_without_a_token_are_passed_over() -> None:
    assert by_pattern(tokens("aab", " c"), "x*|c") == {"c": (1, 2)}


@given(TEXTS)
def test_a_pattern_for_a_whole_token_finds_that_token(texts: list[str]) -> None:
    some = [*tokens(*texts), Token("needle"), *tokens(*texts)]
    assert by_pattern(some, "needle") == {"needle": (len(texts), len(texts) + 1)} or texts[0] == ""


# What finds nothing


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
            lambda: by_sentence("a text"),  # type: ignore[arg-type]
            TypeError,
            "tokens has a str; each must be a regard.Token.\n"
            "    Use [regard.Token(text) for text in texts]; joined they give the text.",
            id="text instead of tokens",
        ),
        pytest.param(
            lambda: by_word([CLS, *tokens(".", "!")]),
            ValueError,
            "tokens has no word; there must be at least one.\n"
            "    Special tokens are no part of the text.",
            id="no word",
        ),
        pytest.param(
            lambda: by_sentence([CLS, SEP]),
            ValueError,
            "tokens has no sentence; there must be at least one.\n"
            "    Special tokens are no part of the text.",
            id="no sentence",
        ),
        pytest.param(
            lambda: by_pattern(tokens("a", " b"), "c+"),
            ValueError,
            "pattern has 'c+'; the text has no token that it matches.\n"
            '    Patterns see "".join(token.text for token in tokens), without special tokens.',
            id="a pattern that matches nothing",
        ),
        pytest.param(
            lambda: by_pattern([CLS, *tokens("a")], {"a": "a", "start": r"\[CLS\]"}),
            ValueError,
            "pattern has '\\\\[CLS\\\\]' for 'start'; the text has no token that it matches.\n"
            '    Patterns see "".join(token.text for token in tokens), without special tokens.',
            id="a named pattern that matches nothing",
        ),
        pytest.param(
            lambda: by_pattern(tokens("a"), {"a": "("}),
            ValueError,
            "pattern has '('; it is no regular expression (missing ), unterminated subpattern at "
            "position 0).\n    Use re.escape(text) to find a text as it stands.",
            id="no regular expression",
        ),
        pytest.param(
            lambda: by_pattern(tokens("a"), 3),  # type: ignore[arg-type]
            TypeError,
            "pattern is an int; it must be a regular expression, or a mapping from names to them.\n"
            '    Give r"Question: .*", or {"question": r"Question: .*"}.',
            id="no pattern",
        ),
        pytest.param(
            lambda: by_pattern(tokens("a"), re.compile(b"a")),  # type: ignore[arg-type]
            TypeError,
            "pattern is a Pattern; it must be a regular expression, or a mapping from names to "
            'them.\n    Give r"Question: .*", or {"question": r"Question: .*"}.',
            id="a pattern of bytes",
        ),
        pytest.param(
            lambda: by_pattern(tokens("a"), {1: "a"}),  # type: ignore[dict-item]
            TypeError,
            "pattern has the name 1, an int; each must be a string.\n"
            '    Give {"question": r"Question: .*"}.',
            id="a name that is no string",
        ),
        pytest.param(
            lambda: by_pattern(tokens("a"), {}),
            ValueError,
            "pattern is empty; it must have at least one regular expression.\n"
            '    Give {"question": r"Question: .*"}.',
            id="no patterns",
        ),
    ],
)
def test_what_finds_nothing_is_an_error(ask: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        ask()


def test_of_two_patterns_the_one_that_comes_first_in_the_text_has_the_token_between() -> None:
    tokens = [Token(text) for text in ("a", "b c", "d")]
    found = {"y": (2, 3), "x": (0, 2)}
    assert regard.spans.by_pattern(tokens, {"y": "c ?d", "x": "ab"}) == found


def test_patterns_that_overlap_have_each_their_own_tokens() -> None:
    tokens = [Token(text) for text in ("a", "b", "c")]
    found = {"whole": (0, 3), "part": (1, 2)}
    assert regard.spans.by_pattern(tokens, {"whole": "abc", "part": "b"}) == found


def test_empty_lines_before_the_first_sentence_are_of_it() -> None:
    tokens = [Token(text) for text in ("\n", "\n", "It", " rains", ".")]
    assert regard.spans.by_sentence(tokens) == {"It rains.": (0, 5)}
