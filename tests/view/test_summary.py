"""What each token attends to, against the mean of the dense matrices."""

import pytest
import torch
from torch import Tensor

import regard
from regard.view.terminal import summary
from regard.view.terminal.summary import Summary, summarise

N = 11
Selection = tuple[int | None, int | None]


def tokens(specials: tuple[int, ...] = (0, N - 1)) -> list[regard.Token]:
    return [regard.Token(f" t{place}", special=place in specials) for place in range(N)]


def random_recording(specials: tuple[int, ...] = (0, N - 1)) -> regard.Recording:
    torch.manual_seed(1)
    layers = {
        f"layer {place}": regard.attend(torch.randn(1, heads, N, 4), torch.randn(1, heads, N, 4))
        for place, heads in enumerate((3, 2))
    }
    return regard.Recording(layers, model="random", query_tokens=tokens(specials))


def dense_mean(recording: regard.Recording, selection: Selection) -> Tensor:
    matrices = [recording[layer].to_dense()[0].double() for layer in recording]
    layer, head = selection
    if layer is not None:
        matrices = [matrices[layer]]
    if head is not None:
        matrices = [matrices[0][head : head + 1]]
    return torch.cat(matrices).mean(0)


SELECTIONS = [
    pytest.param((None, None), 5, id="all"),
    pytest.param((1, None), 2, id="layer"),
    pytest.param((0, 2), 1, id="head"),
]


@pytest.mark.parametrize("at_once", [1, 60, 2**24])
@pytest.mark.parametrize(("selection", "count"), SELECTIONS)
def test_shares_are_the_mean_of_the_selected_heads(
    selection: Selection, count: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "_WEIGHTS_AT_ONCE", at_once)
    recording = random_recording()
    answer = summarise(recording, *selection, top=4)
    best = dense_mean(recording, selection).topk(4)
    assert answer.num_selected == count
    for row, values, places in zip(answer.rows, *best, strict=True):
        assert [share.token for share in row.top] == places.tolist()
        assert [share.share for share in row.top] == pytest.approx(values.tolist(), rel=1e-5)


def test_without_sinks_the_shares_are_renormalised() -> None:
    recording = random_recording()
    answer = summarise(recording, top=N)
    mean = dense_mean(recording, (None, None))
    assert answer.sinks == (0, N - 1)
    text = mean[:, 1:-1]
    expected = (text / text.sum(-1, keepdim=True)).sort(descending=True)
    for row, values, places in zip(answer.rows, *expected, strict=True):
        assert [share.token - 1 for share in row.top_text] == places.tolist()
        assert [share.share for share in row.top_text] == pytest.approx(values.tolist(), rel=1e-5)
        assert row.on_sinks == pytest.approx(1 - float(text[row.token].sum()), rel=1e-5)


def test_the_strongest_look_is_at_another_token_that_is_no_sink() -> None:
    recording = random_recording()
    others = dense_mean(recording, (None, None)).fill_diagonal_(0)[:, 1:-1].amax(-1)
    found = [row.strongest for row in summarise(recording).rows]
    assert found == pytest.approx(others.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("length", "share", "sinks"),
    [
        pytest.param(9, 0.5, (0,), id="sink"),
        pytest.param(9, 0.3, (), id="no sink: even causal attention gives as much"),
        pytest.param(300, 0.2, (0,), id="sink of a long text"),
        pytest.param(300, 0.1, (), id="no sink of a long text"),
    ],
)
def test_a_first_token_that_draws_attention_is_a_sink(
    length: int, share: float, sinks: tuple[int, ...]
) -> None:
    weights = torch.full((1, length, length), (1 - share) / (length - 1))
    weights[..., 0] = share
    matrix = regard.AttentionMatrix.from_weights(weights)
    answer = summarise(regard.Recording({"layer": matrix}, query_tokens=["word"] * length))
    assert answer.sinks == sinks


def test_a_token_that_sees_only_the_sink_looks_at_nothing_else() -> None:
    x = torch.zeros(1, N, 1)
    matrix = regard.attend(x, x, mask=regard.Causal())
    row = summarise(regard.Recording({"layer": matrix}, query_tokens=tokens((0,)))).rows[0]
    assert (row.top_text, row.on_sinks, row.strongest) == ((), 1.0, 0.0)
    assert [(share.token, share.share) for share in row.top] == [(0, 1.0)]


@pytest.mark.parametrize("shape", [(N, 2), (3, N, 2), (1, 3, N, 2)], ids=str)
def test_a_recording_may_have_any_leading_axes(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    answer = summarise(regard.Recording({"layer": regard.attend(x, x)}, query_tokens=tokens(())))
    assert answer.rows[4].top[0].share == pytest.approx(1 / N)


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[tuple[int, int]] = []
    summarise(random_recording(), progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1] == (2 + N, 2 + N)


# What cannot be shown


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        pytest.param((2, None), "layer is 2; random has layers 0 to 1.", id="layer"),
        pytest.param((-1, None), "layer is -1; random has layers 0 to 1.", id="negative layer"),
        pytest.param((1, 2), "head is 2; layer 1 of random has heads 0 to 1.", id="head"),
    ],
)
def test_a_layer_or_head_that_is_not_there_is_refused(selection: Selection, message: str) -> None:
    with pytest.raises(ValueError, match=" is ") as refusal:
        summarise(random_recording(), *selection)
    assert str(refusal.value) == message


def test_a_recording_without_tokens_is_refused() -> None:
    x = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="recording has no tokens"):
        summarise(regard.Recording({"layer": regard.attend(x, x)}))


def test_a_summary_is_plain_numbers() -> None:
    answer: Summary = summarise(random_recording())
    assert all(type(share.share) is float for row in answer.rows for share in row.top)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        pytest.param(
            (2, 1, N, N),
            f"layer 'layer' has shape (2, 1, {N}, {N}); one text is looked at, a batch of 1.",
            id="two texts",
        ),
        pytest.param(
            (1, N, 5),
            f"layer 'layer' has q_len {N} and kv_len 5; what is looked at is a text that attends "
            "to itself.",
            id="another text",
        ),
    ],
)
def test_only_one_text_that_attends_to_itself_is_shown(
    shape: tuple[int, ...], message: str
) -> None:
    matrix = regard.AttentionMatrix.from_weights(torch.full(shape, 1 / shape[-1]))
    keys = [regard.Token("k")] * shape[-1]
    seen = regard.Recording({"layer": matrix}, query_tokens=tokens(), key_tokens=keys)
    with pytest.raises(ValueError, match="layer") as refusal:
        summarise(seen)
    assert str(refusal.value) == message
