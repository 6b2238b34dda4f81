"""Trials, on heads that are made to do what a trial looks for, and against the dense matrix."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard import trials

VOCABULARY = 300


class Heads(nn.Module):
    """Causal attention whose heads look where their names say; remembers what it read."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        self.read: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.read.append(ids)
        tokens = F.one_hot(ids, VOCABULARY).float()
        before = F.pad(tokens, (0, 0, 1, -1))
        keys = {"induction": before, "duplicate token": tokens, "none": torch.zeros_like(tokens)}
        key = torch.stack([keys[kind] for kind in self.kinds], 1)
        query = 40 * tokens[:, None].expand_as(key)
        return F.scaled_dot_product_attention(query, key, query, is_causal=True, scale=1.0)


def words(text: str, add_special_tokens: bool) -> dict[str, Any]:
    """Each word and mark has the number of its letters' sum: a few share one."""
    assert not add_special_tokens
    pieces = text.replace(".", " . ").replace(":", " : ").split()
    return {"input_ids": [sum(map(ord, piece)) % VOCABULARY for piece in pieces]}


# Random tokens that come twice


def test_an_induction_head_and_a_duplicate_token_head_are_known() -> None:
    trial = trials.repeated_tokens(Heads("induction", "duplicate token", "none"), length=20,
                                   vocabulary=range(VOCABULARY))  # fmt: skip
    scores = trial.scores["Heads"]
    assert scores["induction"][0] == pytest.approx(1.0)
    # It looks at itself as much: both are the same token.
    assert scores["duplicate token"][1] == pytest.approx(0.5)
    even = sum(1 / (q + 1) for q in range(20, 40)) / 20
    assert scores["induction"][2] == pytest.approx(even)
    assert scores["duplicate token"][2] == pytest.approx(even)
    assert scores["duplicate token"][0] < 1e-6
    assert scores["induction"][1] < 1e-6


@pytest.mark.parametrize("start", [(), (7,), (7, 8, 9)], ids=str)
def test_the_scores_are_the_diagonals_of_the_second_half(start: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    n = 11
    embedding = nn.Embedding(VOCABULARY, 16)
    model = nn.Sequential(embedding, regard.nn.SelfAttention(16, num_heads=2))
    read: list[Tensor] = []
    embedding.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    options = {"vocabulary": range(VOCABULARY), "start": start, "length": n, "texts": 3, "seed": 5}
    trial, again = (trials.repeated_tokens(model, **options) for _ in range(2))
    ids, same_ids = read
    assert torch.equal(ids, same_ids)
    assert trial == again
    assert ids.shape == (3, len(start) + 2 * n)
    assert ids[:, : len(start)].tolist() == [list(start)] * 3
    assert torch.equal(ids[:, len(start) : len(start) + n], ids[:, -n:])
    assert all(len(set(text)) == n for text in ids[:, -n:].tolist())
    dense = model[1].weights(embedding(ids)).to_dense().double()
    for kind, offset in (("induction", 1 - n), ("duplicate token", -n)):
        expected = dense.diagonal(offset, dim1=-2, dim2=-1)[..., -n:].mean((0, 2))
        assert trial.scores["1"][kind] == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize(("first", "start"), [(4, [4]), (30, []), (None, [])])
def test_a_hugging_face_model_says_its_vocabulary_and_its_first_token(
    first: int | None, start: list[int]
) -> None:
    model = Heads("none")
    text = type("Text", (), {"vocab_size": 30, "bos_token_id": first})()
    model.config = type("Config", (), {"get_text_config": lambda _: text})()
    trials.repeated_tokens(model, length=30, texts=1)
    ids = model.read[0][0].tolist()
    assert ids[:-60] == start
    assert sorted(ids[-60:-30]) == sorted(ids[-30:]) == list(range(30))


# A needle


def starts_of(ids: list[int], part: list[int]) -> list[int]:
    """Where a part begins."""
    return [i for i in range(len(ids)) if ids[i : i + len(part)] == part]


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_score_is_the_weight_that_each_answer_token_is_found_with(depth: float) -> None:
    model = Heads("induction", "none")
    trial = trials.needle(model, words, length=200, depths=[depth], start=[3, 5])
    expected: list[Tensor] = []
    for ids, (_, answer, question) in zip(list(model.read), trials._NEEDLES, strict=True):
        text = ids[0].tolist()
        assert len(text) == 200
        assert text[:2] == [3, 5]
        answer_ids = words(answer, False)["input_ids"]
        key, last = starts_of(text, answer_ids)
        assert last + len(answer_ids) == 200
        [question_start] = starts_of(text, words(question, False)["input_ids"])
        assert question_start < last
        with regard.observe(model) as seen:
            model(ids)
        rows = torch.arange(len(answer_ids))
        expected.append(seen[0].to_dense()[0, :, last - 1 + rows, key + rows].double().mean(-1))
    means = torch.stack(expected).mean(0)
    assert trial.scores["Heads"]["retrieval"] == pytest.approx(means.tolist(), rel=1e-5)
    assert means[0] > 20 * means[1]


def test_every_needle_is_hidden_at_every_depth() -> None:
    model = Heads("none")
    trials.needle(model, words, length=300, depths=[0.0, 0.5, 1.0])
    found = [starts_of(ids[0].tolist(), words(parts[1], False)["input_ids"])[0]
             for parts, start in zip(trials._NEEDLES, (0, 3, 6), strict=True)
             for ids in model.read[start : start + 3]]  # fmt: skip
    assert len(model.read) == 9
    for start in (0, 3, 6):
        assert found[start] < 20 < 100 < found[start + 1] < 180 < 240 < found[start + 2]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        pytest.param(
            trials.repeated_tokens,
            "vocabulary is None, and Heads has no config that says how many token ids there are.\n"
            "    Pass for example vocabulary=range(50_000).",
            id="no vocabulary",
        ),
        *(
            pytest.param(
                lambda model, n=n: trials.repeated_tokens(model, vocabulary=range(4), length=n),
                f"length is {n}; it must be from 2 to the 4 token ids that there are.\n"
                "    Random tokens are drawn once each.",
                id=f"length {n}",
            )
            for n in (1, 5)
        ),
        *(
            pytest.param(
                lambda model, depths=depths: trials.needle(model, words, depths=depths),
                f"depths has {depths}; each must be from 0 to 1, and there must be one.\n"
                "    Pass for example depths=[0.5].",
                id=f"depths {depths}",
            )
            for depths in ([], [1.5], [-0.1])
        ),
        pytest.param(
            lambda model: trials.needle(model, words, length=20),
            "length is 20; needle, question and answer alone have 43 tokens.\n"
            "    Pass for example length=512.",
            id="no room",
        ),
    ],
)
def test_a_trial_that_cannot_run_is_refused(run: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(Heads("none"))


# With the text of a recording


def test_a_trial_names_the_heads_of_a_recording_of_the_same_model() -> None:
    model = Heads("induction", "none")
    trial = trials.repeated_tokens(model, vocabulary=range(VOCABULARY), length=20)
    with regard.observe(model) as seen:
        model(torch.arange(9)[None])
    assert regard.heads(seen, trial)["kind"][0] == "induction"
