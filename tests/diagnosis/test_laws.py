"""Laws of attention on faults that no catalogue lists: each is wrong by the right law."""

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import check
from regard.diagnosis.report import Report


class Heads(nn.Module):
    """Right; each test changes one thing."""

    def __init__(self, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.2)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, _ = x.shape
        return self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def merge(self, output: Tensor) -> Tensor:
        return self.out(output.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(self.dropout(self.weigh(q, k)) @ v)


class ScalesItsInput(Heads):
    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return super().forward(x)


class CountsItsCalls(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class ExponentiatesLargeScores(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
        return weights / weights.sum(-1, keepdim=True)


class DetachesItsWeights(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return super().weigh(q, k).detach()


class KeepsAnUnusedProjection(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)


class DropsScores(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = self.dropout(q @ k.mT / q.shape[-1] ** 0.5)
        return self.merge(scores.softmax(-1) @ v)


class DropsScoresBeforeANorm(Heads):
    """What is dropped goes through a norm at last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = self.dropout(q @ k.mT / q.shape[-1] ** 0.5)
        y = self.merge(scores.softmax(-1) @ v)
        y += x
        return self.norm(y)


class DropsWeightsBeforeANorm(Heads):
    """Right: what is dropped goes through a norm; the input is dropped as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        q, k, v = self.split(x)
        y = self.merge(self.dropout(self.weigh(q, k)) @ v)
        y += x
        return self.norm(y)


class DropsItsQueries(Heads):
    """Right: what was dropped meets keys that were not."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(self.weigh(self.dropout(q), k) @ v)


class DropsMaskedScores(Heads):
    """-inf that is dropped is NaN."""

    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        later = torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool()
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return self.dropout(scores).softmax(-1)


@pytest.mark.full
def test_numbers_that_are_nan_in_training_alone_are_wrong() -> None:
    report = check(DropsMaskedScores())
    assert broken(report) == {"training"}, report
    assert report.findings[0].code == "return self.dropout(scores).softmax(-1)"


@pytest.mark.full
def test_dropout_before_a_norm_is_judged_by_what_the_norm_takes() -> None:
    report = check(DropsScoresBeforeANorm())
    assert [finding.name for finding in report.findings] == ["training"], report
    assert "that _softmax gives" in report.findings[0].detail
    for layer in (DropsWeightsBeforeANorm(), DropsItsQueries()):
        right = check(layer)
        assert right.verdict == "right", right
        outcomes = {result.law.name: result.outcome for result in right.laws}
        assert outcomes["training"] == "held"


class ForgetsToScaleUp(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = self.weigh(q, k)
        if self.training:
            weights = weights * (torch.rand_like(weights) > 0.2)
        return self.merge(weights @ v)


class SqueezesAwayTheBatch(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class KnowsOneLength(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 7, 16))


class NormsOverTheBatch(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class HalvesItsWeights(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return super().weigh(q, k) * 0.5


class SoftensTwice(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return super().weigh(q, k).softmax(-1)


class AddsTheWeightsOfTheMean(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return super().weigh(q, k) + 0.1


class ScalesByTheNumberOfTokens(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / k.shape[-2] ** 0.5).softmax(-1)


class HidesWithATinyNumber(Heads):
    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -3.0).softmax(-1)


def test_the_layer_that_the_others_change_is_right() -> None:
    report = check(Heads())
    assert report.verdict == "right", report
    outcomes = {result.law.name: result.outcome for result in report.laws}
    assert {n for n, outcome in outcomes.items() if outcome != "held"} == {
        "cache",
        "padding",
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("layer", "law"),
    [
        (ScalesItsInput, "pure"),
        (CountsItsCalls, "pure"),
        (ExponentiatesLargeScores, "large"),
        (DetachesItsWeights, "gradient"),
        (KeepsAnUnusedProjection, "gradient"),
        (DropsScores, "training"),
        (ForgetsToScaleUp, "training"),
        (SqueezesAwayTheBatch, "runs"),
        (KnowsOneLength, "runs"),
        (NormsOverTheBatch, "samples"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_law_makes_it_wrong(layer: type[nn.Module], law: str) -> None:
    report = check(layer())
    assert report.verdict != "right", report
    assert law in broken(report), report
    assert report.verdict == "wrong", report


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (HalvesItsWeights, "a row sums to 0.5"),
        (AddsTheWeightsOfTheMean, "a row sums to"),
        (SoftensTwice, "the scores are no multiple of query · key, plus numbers"),
        (ScalesByTheNumberOfTokens, "the formula differs by"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_weights_are_no_verdict_and_the_numbers_are_told(
    layer: type[nn.Module], reason: str
) -> None:
    report = check(layer())
    assert report.verdict == "cannot tell", report
    assert reason in report.missing


def test_a_number_that_hides_nothing_is_told() -> None:
    report = check(HidesWithATinyNumber())
    [finding] = report.faults
    assert finding.name == "mask-fill-value"
    assert finding.detail == "Scores of masked keys are -3; only -inf hides them."
    assert finding.code == "return scores.masked_fill(later, -3.0).softmax(-1)"


def broken(report: Report) -> set[str]:
    return {result.law.name for result in report.laws if result.outcome == "broken"}


class Cached(Heads):
    """Right with ``order=1``; with -1 the new keys stand before the old ones."""

    def __init__(self, order: int, offset: int = 0) -> None:
        super().__init__()
        self.order, self.offset = order, offset

    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        if past is not None:
            k, v = (torch.cat([a, b][:: self.order], 2) for a, b in zip(past, (k, v), strict=True))
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril(k.shape[2] - q.shape[2] - (self.offset if past is not None else 0))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return self.merge(scores.softmax(-1) @ v), (k, v)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layer", "outcome"),
    [(Cached(1), "held"), (Cached(-1), "broken"), (Cached(1, 1), "broken")],
    ids=["right", "new keys before the old ones", "mask too short"],
)
def test_a_cache_gives_what_the_whole_call_gives(layer: nn.Module, outcome: str) -> None:
    # The order of keys changes nothing for one token, and hides others from the first of two.
    report = check(layer, causal=True)
    outcomes = {result.law.name: result.outcome for result in report.laws}
    assert outcomes["cache"] == outcome, report
    assert report.verdict == ("right" if outcome == "held" else "wrong"), report
    if outcome == "broken":  # the line that first uses the cache
        assert "torch.cat([a, b]" in report.findings[0].code, report


class TakesManyOptions(Heads):
    calls = 0

    def forward(  # as models of Hugging Face take them
        self,
        x: Tensor,
        bias: Tensor | None = None,
        position_ids: Tensor | None = None,
        past: Tensor | None = None,
        *,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> Tensor:
        TakesManyOptions.calls += 1
        return super().forward(x)


@pytest.mark.full
def test_options_that_take_no_cache_cost_few_calls() -> None:
    check(TakesManyOptions())
    assert TakesManyOptions.calls <= 65, TakesManyOptions.calls


class OneAtATime(Cached):
    def forward(
        self, x: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.split(x)
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
        is_causal = q.shape[2] > 1
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.merge(out), (k, v)


def test_a_cache_for_one_token_at_a_time_is_right_with_a_note() -> None:
    report = check(OneAtATime(1), causal=True)
    assert report.verdict == "right", report
    assert "With a cache it takes one new token at a time." in report.notes


class CachedWithAGate(Cached):
    """Holds a projection that no call uses, with a cache or without one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gate = nn.Linear(16, 16)


class GatedByAnOptionalInput(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        output = super().forward(x)
        return output if other is None else output * self.gate(other)


@pytest.mark.full
def test_an_unused_projection_beside_an_optional_cache_is_wrong() -> None:
    report = check(CachedWithAGate(), causal=True)
    assert report.verdict == "wrong", report
    assert [finding.name for finding in report.faults] == ["gradient"]
    assert report.faults[0].detail.startswith("gate.weight, gate.bias have no influence")


def test_a_projection_of_an_optional_input_is_no_verdict() -> None:
    report = check(GatedByAnOptionalInput())
    assert report.verdict == "cannot tell", report
    assert "without other: pass an example call that has one" in str(report)


def without_projections(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


def scaled_without_projections(x: Tensor) -> Tensor:
    later = torch.ones(x.shape[-2], x.shape[-2]).triu(1) > 0
    return (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1) @ x


WEIGHTS = [torch.randn(12, 8) for _ in range(3)]


def of_weights_around_it(x: Tensor) -> Tensor:
    q, k, v = (x @ weight for weight in WEIGHTS)
    return torch.softmax(q @ k.T / 8**0.5, dim=-1) @ v


def test_a_function_with_weights_of_its_file_is_right() -> None:
    report = check(of_weights_around_it, args=(torch.randn(6, 12),))
    assert report.verdict == "right", report


def test_attention_without_projections_is_right() -> None:
    unscaled = regard.spec(scale=1.0)
    assert check(without_projections).verdict == "different"
    assert check(without_projections, expect=unscaled).ok
    assert check(without_projections, args=(torch.rand(6, 3),), expect=unscaled).ok
    assert check(scaled_without_projections).ok


def test_an_output_with_exchanged_axes_is_no_verdict() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    args = tuple(torch.rand(3, 2, 7, 4, 8))
    report = check(attention, args=args, axes="batch tokens heads dim")
    assert report.verdict == "cannot tell"
    assert "return output.transpose(1, 2)" in report.missing


def test_an_output_with_its_tokens_last_is_wrong() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).mT

    report = check(attention)
    assert (report.verdict, broken(report)) == ("wrong", {"runs"})


def test_a_broken_law_without_a_name_is_called_a_law() -> None:
    text = str(check(CountsItsCalls()))
    assert "pure (law)" in text
    assert "Formula:  f(x) = f(x), and x is as it was" in text


@pytest.mark.full
def test_the_line_of_the_first_operation_that_breaks_the_law_is_given() -> None:
    finding = check(ExponentiatesLargeScores()).findings[0]
    assert (finding.name, finding.code) == (
        "large",
        "weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()",
    )


def in_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax over tiles of keys, with what came before rescaled."""
    most = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    total, output = torch.zeros_like(most), torch.zeros_like(q)
    for start in range(0, k.shape[-2], 3):
        scores = q @ k[..., start : start + 3, :].mT * q.shape[-1] ** -0.5
        new = torch.maximum(most, scores.amax(-1))
        part, kept = (scores - new[..., None]).exp(), (most - new).exp()
        total = total * kept + part.sum(-1)
        output = output * kept[..., None] + part @ v[..., start : start + 3, :]
        most = new
    return output / total[..., None]


def test_a_softmax_in_tiles_is_right() -> None:
    assert check(in_tiles).ok


def without_the_last_tile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    whole = max(3, k.shape[-2] // 3 * 3)
    return in_tiles(q, k[..., :whole, :], v[..., :whole, :])


def of_the_first_tokens(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return in_tiles(q, k[..., :6, :], v[..., :6, :])


@pytest.mark.full
def test_last_tokens_that_no_token_sees_are_never_right() -> None:
    report = check(without_the_last_tile, causal=False)
    assert report.verdict == "cannot tell"
    assert report.missing.startswith("It could be read up to the"), report
    assert check(without_the_last_tile).verdict == "cannot tell"
    assert check(of_the_first_tokens, causal=False).verdict == "cannot tell"


class SharesOneValueHead(Heads):
    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        return q, k, v[:, :1].expand_as(v)


def test_a_part_of_a_parameter_without_influence_is_wrong() -> None:
    report = check(SharesOneValueHead())
    assert report.faults[0].detail.startswith("Numbers 36 to 47 of 48 along axis 0 of qkv.weight")


class AtTheStartOfTraining(Heads):
    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_layer_of_zeros_hides_nothing() -> None:
    layer = AtTheStartOfTraining()
    assert check(layer).verdict == "right"
    assert not layer.out.weight.any()


class ExchangesOutputs(Heads):
    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)
        return torch.cat([rows[:, :1], rows[:, 1:-1].flip(1), rows[:, -1:]], 1)


def test_outputs_in_another_order_than_the_tokens_are_wrong() -> None:
    report = check(ExchangesOutputs())
    assert [finding.name for finding in report.faults] == ["output"], report


class KeepsItsMask(Heads):
    """The mask of a call stays for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("visible", torch.ones(64, 64, dtype=torch.bool))

    def forward(self, x: Tensor, key_padding: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        visible = self.visible[: x.shape[1], : x.shape[1]]
        if key_padding is not None:
            visible &= key_padding.bool().all(dim=0)
            visible |= torch.eye(x.shape[1], dtype=torch.bool)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.merge(scores.softmax(-1) @ v)


def test_a_mask_that_is_kept_for_the_next_call_is_wrong() -> None:
    report = check(KeepsItsMask())
    assert [finding.name for finding in report.faults] == ["pure"], report
    assert "A call depends on the key_padding of the call before it." in str(report)
    assert "without effect" not in str(report)


class HalfMask(Heads):
    """The number of masked keys is -inf in half precision, and 0 times it is NaN."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(x)
        fill = torch.tensor(-1e9).half()
        scores = q @ k.mT / q.shape[-1] ** 0.5 + (1 - mask[:, None, None].half()) * fill
        return self.merge(scores.to(q.dtype).softmax(-1) @ v)


@pytest.mark.full
def test_half_precision_that_overflows_inside_is_wrong() -> None:
    report = check(HalfMask(), means={"mask": "True keeps"})
    assert report.verdict == "wrong", report
    assert "Half precision inside it makes numbers that are not finite" in str(report)


class Cross(nn.Module):
    """Attention over another text; the number of its tokens is that of the queries by mistake."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.q, self.kv, self.mistake = nn.Linear(16, 16), nn.Linear(16, 32), mistake

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        context = context[:, : x.shape[1]] if self.mistake == "cut" else context
        count = x.shape[1] if self.mistake == "view" else context.shape[1]
        q, (k, v) = self.q(x), self.kv(context).chunk(2, -1)
        k, v = (t.reshape(len(x), count, 16) for t in (k, v))
        return (q @ k.mT / 4).softmax(-1) @ v


@pytest.mark.parametrize(
    ("mistake", "verdict"), [("", "right"), ("view", "wrong"), ("cut", "cannot tell")]
)
def test_a_text_that_is_attended_to_may_have_another_length(mistake: str, verdict: str) -> None:
    report = check(Cross(mistake))
    assert report.verdict == verdict, report
    assert mistake != "view" or "7 tokens that attend to 9 others" in str(report)
    assert mistake != "cut" or "attended to only" in report.missing


class SumsOverKeys(Heads):
    """Each weight meets the query's own value, so that queries and keys count for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(torch.einsum("bhij,bhid->bhid", self.weigh(q, k), v))


class Apart(SumsOverKeys):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        _, _, v = super().split(x)
        parts = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (self.q_proj(x), self.k_proj(x)))
        return (*parts, v)


def test_weights_that_count_for_nothing_are_no_mixed_up_projection() -> None:
    report = check(Apart())
    assert report.verdict == "wrong", report
    assert "wrong-projection" not in {finding.name for finding in report.faults}
