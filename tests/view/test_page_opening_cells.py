"""The head and the cell on which a fresh page opens."""

import pytest
import torch

import pictured
import regard
from regard.analysis.head_kinds import Head
from regard.view.tiles.layer_survey import layer_kinds
from regard.view.tiles.manifest import Opening
from regard.view.tiles.page_opening import blind_opening, openings

TEXT = ["[CLS]", "The", " baker", " sold", " bread", " to", " the", " sailor", ".", "[SEP]"]


def kinds_of(seen: regard.Recording) -> list[list[Head | None]]:
    return [layer_kinds(seen, layer, lambda _: None) for layer in range(len(seen))]


def tokens(words: list[str]) -> list[regard.Token]:
    return [regard.Token(word, special=word.startswith("[")) for word in words]


def head(kind: str, score: float = 1.0, number: int = 0) -> regard.analysis.head_kinds.Head:
    scores = {kind: score, "uniform": 0.9}
    return regard.analysis.head_kinds.Head(0, number, kind, score, scores)


def weights_on(keys: list[int], share: float = 0.9) -> torch.Tensor:
    """Each query gives a share to one key, and the rest evenly."""
    count = len(keys)
    weights = torch.full((count, count), (1 - share) / (count - 1))
    weights[torch.arange(count), torch.tensor(keys)] = share
    return weights


def seen(weights: torch.Tensor, words: list[str], **more: list[str]) -> regard.Recording:
    matrix = regard.AttentionMatrix.from_weights(weights if weights.ndim > 2 else weights[None])
    sides = {name: tokens(texts) for name, texts in more.items()}
    return regard.Recording({"layer": matrix}, query_tokens=tokens(words), **sides)


def cell_of(recording: regard.Recording, kind: str) -> tuple[int, int | None]:
    """The cell of the one head that stands out, if it is of a kind."""
    ((opening,),) = (openings(recording, [[head(kind)]])[1],)
    return opening.query, opening.key


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        pytest.param("previous token", [0, *range(9)], id="previous"),
        pytest.param("next token", [*range(1, 10), 9], id="next"),
        pytest.param("first-token sink", [0] * 10, id="sink"),
        pytest.param("separator sink", [9] * 10, id="separator"),
    ],
)
def test_a_head_that_stands_out_opens_at_a_content_word_that_shows_it(
    kind: str, keys: list[int]
) -> None:
    query, key = cell_of(seen(weights_on(keys), TEXT), kind)
    assert len(TEXT[query].strip()) >= 4
    assert key == keys[query]
    if not kind.endswith("sink"):
        assert key is not None
        assert len(TEXT[key].strip()) >= 4


def test_an_induction_head_opens_where_a_word_comes_again_at_the_word_after_it() -> None:
    words = [" sold", " bread", " and", " sold"]
    assert cell_of(seen(weights_on([0, 1, 2, 1]), words), "induction") == (3, 1)


def test_the_clearest_word_is_opened_and_none_that_shows_no_pattern() -> None:
    words = [" bread", " rises", " bread", " rises"]
    weights = torch.tensor(
        [[1.0, 0, 0, 0], [0.95, 0.05, 0, 0], [0.3, 0, 0.7, 0], [0, 0.46, 0, 0.54]]
    )
    assert cell_of(seen(weights, words), "duplicate token") == (3, 1)
    weights[2], weights[3] = torch.tensor([0.05, 0, 0.95, 0]), torch.tensor([0, 0.05, 0, 0.95])
    assert cell_of(seen(weights, words), "duplicate token") == (3, None)


def test_of_two_texts_the_strongest_words_count() -> None:
    words, others = [" Life", " is", " short"], [" Das", " Leben", " ist"]
    recording = seen(weights_on([1, 2, 0]), words, key_tokens=others)
    assert cell_of(recording, "previous token") == (0, 1)


def test_a_text_without_words_opens_at_its_last_token() -> None:
    assert cell_of(seen(weights_on([0, 0]), ["[CLS]", "[SEP]"]), "self") == (0, None)
    assert cell_of(seen(weights_on([0, 0]), ["[CLS]", "."]), "self") == (1, None)


def test_a_page_opens_on_the_head_that_says_most_about_the_words() -> None:
    keys = [0, 2, 4, 7, 2, 3, 4, 2, 0, 0]
    weights = torch.stack((weights_on([0, *range(9)]), weights_on(keys)))
    recording = seen(weights, TEXT)
    opened, notable = openings(recording, kinds_of(recording))
    assert (opened.head, opened.key) == (1, keys[opened.query])
    assert [one.head for one in notable] == [0]


def test_a_page_opens_on_no_head_in_which_all_tokens_look_at_one_word() -> None:
    keys = [0, 2, 4, 7, 2, 3, 4, 2, 0, 0]
    weights = torch.stack((weights_on([4] * 10, 0.95), weights_on(keys, 0.8)))
    recording = seen(weights, TEXT)
    opened, _ = openings(recording, kinds_of(recording))
    assert (opened.head, opened.key) == (1, keys[opened.query])


def test_a_page_opens_at_a_word_that_looks_at_another() -> None:
    weights = torch.stack((weights_on([*range(10)]), weights_on([0, 1, 2, 3, 4, 3, 6, 7, 8, 9])))
    recording = seen(weights, TEXT)
    scores = {"uniform": 0.2}
    heads = [regard.analysis.head_kinds.Head(0, at, "mixed", 0.9, scores) for at in range(2)]
    assert openings(recording, [heads])[0] == Opening(layer=0, head=1, query=5, key=3)


def test_what_is_asked_for_is_opened() -> None:
    recording = seen(torch.stack((weights_on([0, *range(9)]), weights_on([0] * 10))), TEXT)
    kinds = kinds_of(recording)
    assert openings(recording, kinds, (0, 1))[0].head == 1
    assert openings(recording, kinds, (0, None))[0].layer == 0
    layers = {"a": recording[0], "b": recording[0]}
    both = regard.Recording(layers, query_tokens=recording.query_tokens)
    kinds = kinds_of(both)
    assert openings(both, kinds, among=[1])[0].layer == 1
    assert openings(both, kinds, (1, None))[0].layer == 1


def test_a_page_opens_on_no_head_whose_pattern_the_text_does_not_show() -> None:
    recording = seen(weights_on([0, *range(9)]).repeat(3, 1, 1), TEXT)
    kinds = [[head("duplicate token"), head("retrieval", number=1), head("previous token", 0.6, 2)]]
    assert openings(recording, kinds)[0].head == 2
    assert openings(recording, [kinds[0][:2]])[0] == Opening(layer=0, head=0, query=7, key=None)


def test_a_head_without_a_kind_has_no_cell() -> None:
    recording = seen(weights_on([0] * 10), TEXT)
    assert openings(recording, [[None]]) == (blind_opening(recording), [])
    assert blind_opening(recording) == Opening(layer=0, head=0, query=7, key=None)


def test_a_picture_opens_at_the_head_whose_class_token_looks_at_one_part_of_it() -> None:
    part = torch.zeros(6, 6)
    part[1:3, 2:5] = 1
    one = torch.zeros(6, 6)
    one[4, 4] = 1
    apart = torch.zeros(6, 6)
    apart[::2, ::3] = 1
    rows = [one, torch.ones(6, 6), part, apart]  # a patch, all, a part of 6 patches, 6 apart
    weights = torch.zeros(1, 4, 37, 37)
    for head, row in enumerate(rows):
        weights[0, head, :, 1:] = (row / row.sum()).flatten()
    words = ["[CLS]", *(f" {at // 6},{at % 6}" for at in range(36))]
    recording = seen(weights, words).with_pictures(
        [regard.images.Picture(96, 96)], regard.grid(range(1, 37), 6, 6)
    )
    kinds = kinds_of(recording)
    opened, _ = openings(recording, kinds)
    assert (opened.head, opened.query) == (2, 0)
    assert opened.key is not None
    assert part.flatten()[opened.key - 1] == 1
    assert openings(recording, kinds, (0, 3))[0].head == 3


def test_a_page_of_a_picture_opens_at_a_word_after_it() -> None:
    recording = pictured.language()
    opened, _ = openings(recording, kinds_of(recording))
    assert opened.query > max(recording.grids[0].tokens)
