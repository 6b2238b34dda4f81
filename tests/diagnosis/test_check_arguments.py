"""Arguments, tables and returned matrices that do not do what they are for."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import regard


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
    return query, query.flip(-1) + 1, query * 2 - 1


def _weights(query: Tensor, key: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)


def _ignores_angles(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _weights(query, key) @ value


def _ignores_bias(query: Tensor, key: Tensor, value: Tensor, rel_bias: Tensor) -> Tensor:
    return _weights(query, key) @ value


def _ignores_documents(query: Tensor, key: Tensor, value: Tensor, doc_ids: Tensor) -> Tensor:
    return _weights(query, key) @ value


def _ignores_scale(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    return _weights(query, key) @ value


_ANGLES = torch.arange(7.0)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]).repeat(2)


@pytest.mark.parametrize(
    ("function", "others", "expected", "fact"),
    [
        pytest.param(
            _ignores_angles,
            (_ANGLES.cos(), _ANGLES.sin()),
            regard.spec(positions="rotary"),
            "positions",
            id="angles",
        ),
        pytest.param(
            _ignores_bias, (torch.randn(3, 7, 7),), regard.spec(bias="given"), "bias", id="bias"
        ),
        pytest.param(
            _ignores_documents,
            (torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1]]),),
            regard.spec(documents=("doc_ids",)),
            "documents",
            id="documents",
        ),
        pytest.param(_ignores_scale, (0.125,), regard.spec(scale=0.125), "wrong-scale", id="scale"),
    ],
)
def test_an_argument_that_is_expected_to_have_influence_and_has_none_is_wrong(
    function: Any, others: tuple[Any, ...], expected: Any, fact: str
) -> None:
    report = regard.check(function, args=(*_qkv(), *others), expect=expected)
    assert [finding.name for finding in report.faults] == [fact], report
    assert regard.check(function, args=(*_qkv(), *others)).verdict == "right"


class _Appends(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, past: list[Tensor] = []) -> Tensor:  # noqa: B006  # the mistake
        q, k, v = self.qkv(x).chunk(3, -1)
        past.append(k)
        return _weights(q, k) @ v


def test_a_default_that_a_call_changes_is_wrong_and_is_put_back() -> None:
    report = regard.check(_Appends, 16)
    assert report.findings[0].name == "pure"
    assert "A call changes the default of past" in report.findings[0].detail
    assert _Appends.forward.__defaults__ == ([],)


def _near(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    far = torch.ones(query.shape[-2], query.shape[-2]).tril(-4) > 0
    later = torch.ones_like(far).triu(1)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(far | later, float("-inf")).softmax(-1) @ value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [True, None])
def test_a_window_is_a_fact_and_wrong_if_another_one_is_expected(causal: bool | None) -> None:
    report = regard.check(_near, causal=causal)
    assert report.verdict == "right"
    assert "causal, a window of 4 keys" in str(report)
    for window, verdict in ((4, "right"), (3, "wrong"), (None, "wrong"), (regard.ANY, "right")):
        expected = regard.spec(causal=True, window=window)
        assert regard.check(_near, causal=causal, expect=expected).verdict == verdict


def test_words_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="means has 'masc'; the arguments are query, key, value"):
        regard.check(_near, means={"masc": "True hides"})
    with pytest.raises(ValueError, match="means\\['query'\\] is 'foo'; say 'True keeps'"):
        regard.check(_near, means={"query": "foo"})
    with pytest.raises(ValueError, match="axes of query are 'foo bar', and its shape is"):
        regard.check(_near, args=_qkv(), axes="foo bar")


def _by_position(scores: Tensor, values: Tensor, /) -> Tensor:
    return scores.softmax(-1) @ values


def test_arguments_by_position_alone_are_passed_so() -> None:
    assert regard.check(_by_position).verdict == "right"


def _added(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return (query @ key.mT / query.shape[-1] ** 0.5 + mask).softmax(-1) @ value


def _shifted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(mask.roll(1, -1), -torch.inf).softmax(-1) @ value


@pytest.mark.full
def test_numbers_that_are_added_to_the_scores_are_a_mask() -> None:
    report = regard.check(_added)
    assert report.verdict == "right", report
    assert "mask is added to the scores" in str(report)


def test_a_mask_that_follows_no_rule_is_asked_for() -> None:
    report = regard.check(_shifted)
    assert report.verdict == "cannot tell", report
    assert "pass means={'mask': 'True keeps'}" in report.missing


class _Cross(nn.Module):
    """Attention to a context of another width."""

    def __init__(self, dim: int, context_dim: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(dim, 8), nn.Linear(context_dim, 16)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = self.kv(context).chunk(2, -1)
        scores = self.q(x) @ key.mT / 8**0.5
        return (scores if mask is None else scores + mask).softmax(-1) @ value


@pytest.mark.full
def test_the_width_of_a_context_is_found_in_the_layers() -> None:
    report = regard.check(_Cross, 24, 12)
    assert report.verdict == "right", report


def _seen(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(~visible, -1e9).softmax(-1) @ value


def _unseen(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    return _seen(query, key, value, ~visible)


def _of_words(query: Tensor, key: Tensor, value: Tensor, is_word: Tensor) -> Tensor:
    return _seen(query, key, value, is_word[:, :, None])


def _of_starts(query: Tensor, key: Tensor, value: Tensor, is_start: Tensor) -> Tensor:
    """is_start: (batch, tokens), True for the first token of a document."""
    return _seen(query, key, value, ~is_start[:, None])


@pytest.mark.parametrize(
    ("function", "argument", "names"),
    [
        (_seen, "visible", []),
        (_unseen, "visible", ["mask-inverted"]),
        (_of_words, "is_word", ["padding-on-queries"]),
    ],
)
def test_a_mask_whose_name_says_nothing_is_declared(
    function: Any, argument: str, names: list[str]
) -> None:
    report = regard.check(function, means={argument: "True keeps"})
    assert [finding.name for finding in report.faults] == names, report
    assert report.verdict == ("wrong" if names else "right"), report


def test_an_argument_that_marks_tokens_is_no_mask() -> None:
    with pytest.raises(ValueError, match="_of_starts needs is_start"):
        regard.check(_of_starts)


class _Graph(nn.Module):
    """adjacency: (batch, n, n), bool; adjacency[b, i, j] is True if node i may look at node j."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.is_turned = is_turned
        self.qkv = nn.Linear(16, 48)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        query, key, value = self.qkv(nodes).chunk(3, -1)
        return _seen(query, key, value, adjacency.mT if self.is_turned else adjacency)


@pytest.mark.parametrize(("is_turned", "names"), [(False, []), (True, ["adjacency"])])
def test_a_mask_of_pairs_that_is_turned_round_is_no_softmax_along_a_wrong_axis(
    is_turned: bool, names: list[str]
) -> None:
    generator = torch.Generator().manual_seed(3)
    adjacency = (torch.rand(2, 6, 6, generator=generator) > 0.5) | torch.eye(6, dtype=torch.bool)
    args = torch.randn(2, 6, 16, generator=generator), adjacency
    report = regard.check(_Graph, is_turned=is_turned, args=args, causal=False)
    assert [finding.name for finding in report.faults] == names, report
    assert report.verdict == ("wrong" if names else "right"), report


def _needs_its_mask(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    hidden = cast(Tensor, key_padding_mask)[:, None]
    return scores.masked_fill(hidden, -1e30).softmax(-1) @ value


def test_a_mask_that_may_not_be_left_out_is_noted() -> None:
    report = regard.check(_needs_its_mask)
    assert report.verdict == "right"
    assert "It does not run without key_padding_mask, whose default is None." in str(report)


def _hides_behind_lengths(scores: Tensor, valid_lens: Tensor) -> Tensor:
    """scores: (batch, heads, queries, keys); valid_lens: (batch,), at least 1."""
    keys = torch.arange(scores.shape[-1])
    hidden = keys >= valid_lens[:, None, None, None]
    return scores.masked_fill(hidden, -1e6).softmax(-1)


def test_a_function_of_scores_with_lengths_is_judged_without_an_example() -> None:
    assert regard.check(_hides_behind_lengths).verdict == "right"
    example = (torch.randn(2, 3, 5, 7), torch.tensor([6, 4]))
    with pytest.raises(ValueError, match="leave args and kwargs out"):
        regard.check(_hides_behind_lengths, args=example)


class InChunks(nn.Module):
    """Causal attention inside chunks of 4 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        keep = (at <= at[:, None]) & (at // 4 == at[:, None] // 4)
        if doc_ids is not None:
            keep = keep & (doc_ids[:, None] == doc_ids[..., None])
        return nn.functional.scaled_dot_product_attention(query, key, value, keep)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [True, None])
def test_causal_chunks_are_right(causal: bool | None) -> None:
    report = regard.check(InChunks, causal=causal)
    assert report.verdict == "right"
    assert "causal, chunks of 4 keys" in str(report)


def test_an_argument_that_was_left_out_is_noted() -> None:
    said = "The laws were tried without doc_ids: pass an example call to try that."
    assert said in regard.check(InChunks).notes
    left = regard.check(InChunks, args=(torch.randn(2, 7, 16),)).notes
    assert "The laws were tried without doc_ids, as the example leaves out." in left


def test_weights_that_are_nan_are_refused() -> None:
    layer = InChunks()
    nn.init.constant_(layer.qkv.weight, float("nan"))
    with pytest.raises(ValueError, match=r"qkv\.weight of InChunks holds NaN"):
        regard.check(layer)


def _with_padding_of_rows(
    query: Tensor, key: Tensor, value: Tensor, pad: Tensor | None = None
) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if pad is not None:
        scores = scores.masked_fill(pad[:, :, None], -1e9)
    return scores.softmax(-1) @ value


def test_pad_is_a_padding_mask() -> None:
    assert regard.check(_with_padding_of_rows).findings[0].name == "padding-on-queries"


def test_args_and_means_of_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="pass words by argument"):
        regard.check(_with_padding_of_rows, means="True hides")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass args=\(x,\)"):
        regard.check(_with_padding_of_rows, args=torch.randn(2, 7, 8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes no argument by name"):
        regard.check(nn.Module())


class WithFlag(nn.Module):
    """Attention that hides keys if it is asked to."""

    def __init__(self, hides_below: bool = False) -> None:
        super().__init__()
        self.qkv, self.hides_below = nn.Linear(16, 48), hides_below

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if causal:
            later = torch.ones_like(scores).triu(1).bool()
            scores = scores.masked_fill(later.mT if self.hides_below else later, -torch.inf)
        return scores.softmax(-1) @ value


def _with_other_flag(q: Tensor, k: Tensor, v: Tensor, sharp: bool = False) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores * 9 if sharp else scores).softmax(-1) @ v


def test_a_flag_that_was_not_set_is_noted() -> None:
    report = regard.check(_with_other_flag)
    assert (report.verdict, report.notes) == ("right", ("It was tried with sharp=False alone.",))


def test_causal_sets_the_flag_of_a_modules_call() -> None:
    assert "It was tried with causal=False alone." in regard.check(WithFlag).notes
    assert ", causal (line" in str(regard.check(WithFlag, causal=True))
    assert regard.check(WithFlag(hides_below=True), causal=True).findings[0].name == "mask-inverted"


async def _async(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


@pytest.mark.parametrize(
    ("thing", "options", "error", "match"),
    [
        (_with_padding_of_rows, {"causal": "yes"}, TypeError, "must be True, False or None"),
        (_with_padding_of_rows, {"kwargs": {"pad": ...}}, ValueError, "pad is `...`"),
        (_async, {}, ValueError, "_async is async"),
        (nn.functional.scaled_dot_product_attention, {}, ValueError, "is a builtin"),
    ],
    ids=["causal", "unfilled", "async", "builtin"],
)
def test_what_cannot_be_called_as_it_is_is_refused(
    thing: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        regard.check(thing, **options)


class _Decoder(nn.Module):
    def __init__(self, *, attends_to_itself: bool) -> None:
        super().__init__()
        self.attends_to_itself = attends_to_itself
        self.to_itself, self.to_text = (
            nn.MultiheadAttention(16, 2, batch_first=True) for _ in "12"
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.to_itself(x, x, x)[0]
        text = x if self.attends_to_itself else memory
        return x + self.to_text(x, text, text)[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("attends_to_itself", "verdict"), [(False, "right"), (True, "wrong")])
def test_another_text_that_moves_no_output_is_wrong(attends_to_itself: bool, verdict: str) -> None:
    report = regard.check(_Decoder, attends_to_itself=attends_to_itself)
    assert report.verdict == verdict
    assert ("Other numbers in memory move no output." in str(report)) == attends_to_itself


class _Translator(nn.Module):
    def __init__(self, *, first: int) -> None:
        super().__init__()
        self.first = first
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, memory_lengths: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).mT / 4
        hidden = torch.arange(memory.shape[1]) >= memory_lengths[:, None] + self.first
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        return scores.softmax(-1) @ self.value(memory)


@pytest.mark.parametrize(("first", "verdict"), [(0, "right"), (1, "wrong")])
def test_lengths_of_another_text_are_those_of_its_tokens(first: int, verdict: str) -> None:
    expected = regard.spec(causal=False, padding={"memory_lengths": "lengths"})
    report = regard.check(_Translator, first=first, expect=expected)
    assert report.verdict == verdict
    assert [finding.name for finding in report.faults] == ["memory_lengths"] * first


class _BiasByDistance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.table = nn.Parameter(torch.randn(2, 127))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        query, key, value = self.qkv(x).view(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4)
        distance = torch.arange(t) - torch.arange(t)[:, None]
        scores = query @ key.mT / 8**0.5 + self.table[:, distance + 63]
        return (scores.softmax(-1) @ value).transpose(1, 2).reshape(b, t, 16)


def test_a_table_may_be_looked_up_along_any_of_its_axes() -> None:
    expected = regard.spec(causal=False, heads=2, positions="table")
    assert regard.check(_BiasByDistance, expect=expected).verdict == "right"
