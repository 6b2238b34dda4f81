"""The terminal view: true, aligned, readable without colour, and nothing in a text is obeyed."""

import io
import json
import re

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import regard
from pages import evaluated
from regard.analysis.head_kinds import Head
from regard.recording.layers import Origin
from regard.text.escaping import visible
from regard.text.token_labels import labels
from regard.view.terminal.head_grid import overview
from regard.view.terminal.share_grid import share_lines
from regard.view.terminal.summary import Summary, summarise
from regard.view.terminal.terminal_view import summary_lines

WORDS = ["Life", "is", "short", ",", "eat", "dessert", "first"]
WIDE = ["日本語", "e\u0301mile", "👩\u200d👧", "[bold]x[/bold]", "\x1b[31m", "\u202eabc", "\x07"]


def recording(words: list[str], heads: int = 3, layers: int = 2) -> regard.Recording:
    torch.manual_seed(0)
    tokens = [
        regard.Token("[CLS]", special=True),
        *(regard.Token(f" {word}") for word in words),
        regard.Token("[SEP]", special=True),
    ]
    n = len(tokens)
    matrices = {
        f"layer {place}": regard.attend(
            2 * torch.randn(1, heads, n, 4), 2 * torch.randn(1, heads, n, 4)
        )
        for place in range(layers)
    }
    return regard.Recording(matrices, model="tiny [bold]model", query_tokens=tokens)


def printed(
    summary: Summary, width: int = 80, *, color: bool = False, no_color: bool = False
) -> list[str]:
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=color,
        color_system="truecolor" if color else None,
        no_color=no_color,
    )
    for line in summary_lines(summary, width):
        console.print(line)
    return console.file.getvalue().splitlines()


# Visible characters


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("plain é 日本", "plain é 日本", id="plain"),
        pytest.param("\x1b[31m\x07", "␛[31m␇", id="escape and bell"),
        pytest.param("a\nb\tc\x7f", "a↵b⇥c␡", id="white space and delete"),
        pytest.param("\u202eab\u2066", "‹U+202E›ab‹U+2066›", id="direction"),
        pytest.param("\u200b\ufeff\x9b", "‹U+200B›‹U+FEFF›‹U+009B›", id="no width, C1"),
        pytest.param("\U000e0041\u2028\ud800", "‹U+E0041›‹U+2028›‹U+D800›", id="tags, surrogates"),
        pytest.param("می\u200cشود 👩\u200d👧", "می\u200cشود 👩\u200d👧", id="joiners are spelling"),
        pytest.param("❤\ufe0f", "❤\ufe0f", id="variants are spelling"),
        pytest.param("\u034f\ufe0f", "‹U+034F›‹U+FE0F›", id="spelling alone"),
        pytest.param("\u3164\u115f\u00ad", "‹U+3164›‹U+115F›‹U+00AD›", id="fillers"),
    ],
)
def test_what_cannot_be_seen_has_a_symbol(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_the_page_names_what_cannot_be_seen_as_the_terminal_does() -> None:
    characters = [
        *map(chr, range(32)),
        *"\x7f\x9f\xad\u061c\u200b\u202e\u2069\ufeff\u3164\U000e0001",
    ]
    shown = evaluated(
        'import { visible } from "./text/tokens";',
        f"{json.dumps(characters)}.map((c) => visible(c))",
    )
    assert shown == [*map(visible, characters)]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        pytest.param(["to", " be", " to"], ["to₀", "be", "to₂"], id="again"),
        pytest.param([" ", "\n\n", ""], ["␣", "↵↵", "⋯"], id="nothing to see"),
        pytest.param(["\u0301a", " \x1ca\n"], ["◌\u0301a", "␜a"], id="accent alone, separator"),
    ],
)
def test_labels_are_short_and_different(texts: list[str], shown: list[str]) -> None:
    assert labels([regard.Token(text) for text in texts]) == shown


# The whole view


@pytest.mark.parametrize("words", [WORDS, WIDE, WORDS * 12], ids=["short", "wide", "long"])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_every_line_fits(width: int, words: list[str]) -> None:
    lines = printed(summarise(recording(words, heads=12)), width)
    assert max(cell_len(line) for line in lines) <= min(width, 120)
    assert not any("\n\n\n" in "\n".join(lines) or line != line.rstrip() for line in lines)


def test_nothing_in_a_text_reaches_the_terminal_as_a_command() -> None:
    text = "\n".join(printed(summarise(recording(WIDE))))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    for shown in ("[bold]x[/bold]", "tiny [bold]model", "␛[31m", "‹U+202E›abc", "␇"):
        assert shown in text


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        pytest.param({}, False, id="piped"),
        pytest.param({"color": True}, True, id="terminal"),
    ],
)
def test_there_is_colour_only_in_a_terminal(options: dict[str, bool], codes: bool) -> None:
    assert any("\x1b[" in line for line in printed(summarise(recording(WORDS)), **options)) == codes


def test_no_color_leaves_no_colour_and_the_same_words() -> None:
    summary = summarise(recording(WORDS))
    plain = printed(summary, color=True, no_color=True)
    # Bold and dim are no colours.
    assert not any(re.search(r"\x1b\[[\d;]*(3[0-8]|9[0-7])", line) for line in plain)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in plain] == printed(summary)


def test_numbers_stand_below_each_other_beside_wide_characters() -> None:
    lines = printed(summarise(recording(WIDE)), 120)
    start = next(place for place, line in enumerate(lines) if "looks most at" in line) + 1
    table = lines[start : lines.index("", start)]
    columns = [[cell_len(line[: hit.end()]) for hit in re.finditer(" %", line)] for line in table]
    assert len(table) == len(WIDE) + 2
    assert all(places == columns[0] for places in columns)


# What it says


def test_the_header_names_the_model_and_its_size() -> None:
    lines = printed(summarise(recording(WORDS)))
    assert lines[0] == "tiny [bold]model   9 tokens · 2 layers × 3 heads"
    assert lines[2] == "[CLS] Life is short , eat dessert first [SEP]"


def test_a_row_shows_the_shares_of_its_token() -> None:
    summary = summarise(recording(WORDS), top=2)
    row = summary.rows[6]
    line = next(line for line in printed(summary) if line.startswith("dessert "))
    shares = re.findall(r"(\d+) %", line)
    expected = [row.on_sinks, *(share.share for share in row.top_text)]
    assert shares == [f"{100 * share:.0f}" for share in expected]
    names = [WORDS[share.token - 1] for share in row.top_text]
    assert re.findall(r"[a-zA-Z,]+", line) == ["dessert", *names]


def test_a_text_without_sinks_says_nothing_of_them() -> None:
    x = torch.zeros(4, 1)
    tokens = [regard.Token(f" {word}") for word in "abcd"]
    seen = regard.Recording({"layer": regard.attend(x, x)}, query_tokens=tokens)
    text = "\n".join(printed(summarise(seen)))
    assert "sink" not in text
    assert "renormalised" not in text
    assert re.search(r"^a +a 25 % ━+ +b 25 % ━+ +c 25 % ━+$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        pytest.param((None, None), "mean of the 6 heads of all layers", id="all"),
        pytest.param((1, None), "mean of the 3 heads of layer 1", id="layer"),
        pytest.param((1, 2), "head 2 of layer 1", id="head"),
    ],
)
def test_it_says_which_heads_are_averaged(
    selection: tuple[int | None, int | None], says: str
) -> None:
    summary = summarise(recording(WORDS), *selection)
    assert f"Where each token looks   {says}" in printed(summary)


def test_of_a_long_text_it_says_what_is_left_out() -> None:
    summary = summarise(recording([f"w{place}" for place in range(60)]))
    lines = printed(summary)
    sentence = "16 of the 62 tokens: those that look most at one other token. --json gives all."
    assert sentence in lines
    start = next(place for place, line in enumerate(lines) if "looks most at" in line) + 1
    shown = [line.split()[0] for line in lines[start : lines.index("", start)]]
    best = sorted(summary.rows[1:-1], key=lambda row: -row.strongest)[:16]
    assert sorted(shown) == sorted(f"w{row.token - 1}" for row in best)


def test_a_long_text_is_shown_from_its_beginning() -> None:
    lines = printed(summarise(recording(["word"] * 300)))
    assert re.fullmatch(r"… and \d+ more lines", lines[9])


def test_the_overview_has_a_cell_for_each_head_with_its_kind() -> None:
    n = 5
    one_hot = [torch.eye(n).roll(shift, -1) for shift in (-1, 1, 0)]
    even = torch.full((n, n), 1 / n)
    matrix = regard.AttentionMatrix.from_weights(torch.stack([*one_hot, even])[None])
    tokens = [regard.Token(f" {word}") for word in "abcde"]
    lines = printed(summarise(regard.Recording({"layer": matrix}, query_tokens=tokens)))
    assert "layer 0  P█  N█  O█  U▁" in lines
    assert "p previous token 1   n next token 1   o self 1   u uniform 1" in lines
    assert "L0H0  previous token  puts 100 % of its attention on the token before" in lines
    assert "L0H3  uniform         has 100 % of the entropy of even attention" in lines


def part_of_a_model(**heads: tuple[int, ...]) -> regard.Recording:
    """A recording of layers with the given heads, ``l23=(3, 7)``; they attend to one token each."""
    n = 5
    tokens = [regard.Token(f" {word}") for word in "abcde"]
    seen = regard.Recording({}, query_tokens=tokens)
    for name, numbers in heads.items():
        shifts = [torch.eye(n).roll(shift, -1) for shift in (-1, 0, 1)][: len(numbers)]
        matrix = regard.AttentionMatrix.from_weights(torch.stack(shifts)[None])
        seen.add(name, matrix, origin=Origin(int(name[1:]), numbers))
    return seen


def test_the_overview_of_a_part_of_a_model_has_the_numbers_of_its_layers_and_heads() -> None:
    lines = printed(summarise(part_of_a_model(l5=(7,), l23=(3, 7))))
    start = lines.index("          3   7")
    assert lines[start : start + 4] == [
        "          3   7",
        "layer 5       P█",
        "layer 23  P█  O█",
        "",
    ]
    assert "L23H7  self            puts 100 % of its attention on the token itself" in lines


def test_a_module_that_ran_twice_has_two_rows() -> None:
    heads = [Head(2, number, "self", 0.9, {"uniform": 0.0}) for number in (0, 1, 0, 1)]
    lines = [line.plain.rstrip() for line in overview(heads, 80)]
    assert lines.count("layer 2  O█  O█") == 2


def test_heads_apart_keep_their_numbers_in_narrow_cells() -> None:
    numbers = [Head(0, number, "self", 0.9, {"uniform": 0.0}) for number in (3, 7, 12, 13, 14, 15)]
    lines = [line.plain.rstrip() for line in overview(numbers, 22)]
    row = lines.index("layer 0  O█O█O█O█O█O█")
    assert lines[row - 1] == "         3 7 12    15"


def test_a_layer_and_a_head_of_a_part_are_chosen_by_their_numbers_in_the_model() -> None:
    seen = part_of_a_model(l5=(7,), l23=(3, 7))
    summary = summarise(seen, layer=23, head=7)
    assert [row.top[0].token for row in summary.rows] == [0, 1, 2, 3, 4]
    assert "Where each token looks   head 7 of layer 23" in printed(summary)
    with pytest.raises(ValueError, match=r"^layer is 0; this recording has layers 5, 23\.$"):
        summarise(seen, layer=0)
    with pytest.raises(
        ValueError, match=r"^head is 0; layer 23 of this recording has heads 3, 7\.$"
    ):
        summarise(seen, layer=23, head=0)


@pytest.mark.parametrize("heads", [12, 40, 100])
def test_many_heads_are_all_there_in_a_narrow_terminal(heads: int) -> None:
    lines = printed(summarise(recording(WORDS, heads=heads, layers=1)), 60)
    cells = "".join(line.removeprefix("layer 0") for line in lines if line.startswith("layer 0"))
    assert len(re.findall(r"[pnofslu·]", cells, re.IGNORECASE)) == heads


def test_when_no_head_stands_out_it_says_so() -> None:
    weights = torch.full((1, 6, 6), 0.01)
    weights[..., 2], weights[..., 4] = 0.48, 0.48
    tokens = [regard.Token(f" {word}") for word in "abcdef"]
    matrix = regard.AttentionMatrix.from_weights(weights)
    lines = printed(summarise(regard.Recording({"layer": matrix}, query_tokens=tokens)))
    assert lines[-1] == "No head stands out: all are mixed."


# The shares of parts


def drawn(*names: str, queries: dict[str, tuple[int, int]] | None = None) -> regard.Shares:
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, len(names), 4)
    parts = {name: (place, place + 1) for place, name in enumerate(names)}
    seen = regard.Recording({"attn": regard.attend(query, key)})
    return regard.segment_shares(seen, parts, queries=queries)


LONG = [f"The harbour was quiet on the morning of day {day}." for day in range(1, 13)]


def test_every_share_is_shown_where_lines_may_be_long() -> None:
    shares = drawn(*LONG)
    _, _, _, *rows = share_lines(shares, 200)
    shown = [[float(share) for share in row.split()[-len(LONG) :]] for row in rows]
    torch.testing.assert_close(torch.tensor(shown), shares.total(), atol=5e-5, rtol=0)


def test_long_parts_of_one_beginning_have_numbers_and_lines_fit() -> None:
    lines = list(share_lines(drawn(*LONG), 60))
    assert max(map(len, lines)) <= 60
    assert [line.split()[0] for line in lines[2:14]] == [str(number) for number in range(1, 13)]
    assert lines[14:] == ["", "the strongest 1 of 12 parts; --json gives all"]


def test_short_names_stand_above_the_table_and_wide_ones_take_two_cells() -> None:
    lines = list(share_lines(drawn("漢字", "Anna", "👩\u200d👧"), 60))
    assert lines[2].split() == ["漢字", "Anna", "👩\u200d👧"]
    assert len({cell_len(line) for line in lines[2:]}) == 1


def test_numbers_of_parts_that_do_not_ask_are_told_under_the_table() -> None:
    lines = list(share_lines(drawn(*LONG[:2], queries={"question": (1, 2)}), 30))
    assert lines[2].split() == ["1", "2"]
    assert lines[3].startswith("question")
    assert lines[4:] == ["", "1 The harbour was quiet on th…", "2 The harbour was quiet on th…"]


def test_what_is_in_a_name_is_not_obeyed() -> None:
    assert "\x1b" not in "".join(share_lines(drawn("\x1b[31m", "b" * 50)))
