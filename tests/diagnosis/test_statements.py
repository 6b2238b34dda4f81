"""What a report says beside its verdict: pins that pin, facts of the whole, notes that are true."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from cases import full_but


class Attention(nn.Module):
    def __init__(self, diagonal: int = 1, rotates: str = "") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.diagonal, self.rotates = diagonal, rotates

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        angles = torch.arange(x.shape[1])[:, None] * 100.0 ** -(torch.arange(4) / 4)
        angles = torch.cat([angles, angles], -1)

        def rotated(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

        q, k, v = (
            rotated(t) if n in self.rotates else t for n, t in zip("qkv", (q, k, v), strict=True)
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(self.diagonal)
        scores = (q @ k.mT / 8**0.5).masked_fill(later, -torch.inf)
        return self.out((scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).flatten(2))


class Language(nn.Module):
    """Two layers behind a table of positions."""

    def __init__(self, piece: int | None = None) -> None:
        super().__init__()
        self.piece = piece
        self.words, self.places = nn.Embedding(50, 24), nn.Embedding(64, 24)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(24, 50)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        x = self.words(ids) + self.places(positions % (self.piece or len(positions)))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.full
def test_positions_of_a_model_are_expected_of_the_whole() -> None:
    expected = regard.spec(causal=True, heads=3, positions="learned")
    assert regard.check(Language(), expect=expected).ok
    report = regard.check(Language(), expect=regard.spec(causal=True, positions="rotary"))
    assert [finding.name for finding in report.faults] == ["positions"], report


@pytest.mark.full
def test_positions_that_start_again_are_told() -> None:
    report = regard.check(Language(piece=4), expect=regard.spec(positions="learned"))
    assert [finding.name for finding in report.faults] == ["positions"] * len(report.faults)
    assert "added to the input, the same for tokens 1 and 5" in str(report)
    assert regard.check(Language(piece=4)).verdict == "different"


class Mixed(nn.Module):
    """Attention whose tokens first read those before them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        conv, gru = nn.Conv1d(24, 24, 3), nn.GRU(24, 24, batch_first=True)
        self.kind, self.mix = kind, conv if kind == "convolution" else gru
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            past = nn.functional.pad(x.transpose(1, 2), (2, 0))
            return self.attention(self.mix(past).transpose(1, 2))
        return self.attention(self.mix(x)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["convolution", "gru"])
def test_tokens_that_read_others_before_the_attention_have_no_added_positions(kind: str) -> None:
    report = regard.check(Mixed(kind), expect=regard.spec(causal=True, positions=None))
    assert report.ok, report
    assert "positions added" not in str(report.computes)
    assert "queries that follow from several tokens" in str(report.computes)


class Turned(Attention):
    """Attention whose keys are counted from 1."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        angles = torch.arange(1 + x.shape[1])[:, None] * 100.0 ** -(torch.arange(4) / 4)

        def rotated(t: Tensor, angles: Tensor) -> Tensor:
            (first, second), cos, sin = t.chunk(2, -1), angles.cos(), angles.sin()
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        scores = rotated(q, angles[:-1]) @ rotated(k, angles[1:]).mT / 8**0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_positions_that_queries_and_keys_count_otherwise_are_told() -> None:
    report = regard.check(Turned(), expect=regard.spec(positions="rotary"))
    assert [finding.name for finding in report.faults] == ["positions"], report
    assert "queries from 0 on and keys from 1 on" in str(report)


def test_no_difference_is_called_none() -> None:
    report = regard.check(lambda q, k, v: (q @ k.mT / q.shape[-1] ** 0.5).tril().softmax(-1) @ v)
    assert "0e+00" not in str(report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("diagonal", [1, 3])
def test_a_pin_pins(diagonal: int) -> None:
    pin = regard.check(Attention, diagonal).pin
    assert pin.startswith(f"regard.check(Attention, {diagonal}, expect=")
    assert eval(pin, {"regard": regard, "Attention": Attention}).ok, pin


@pytest.mark.sampled(1)
@pytest.mark.parametrize("diagonal", [0, 2], ids=["without itself", "one ahead"])
def test_code_with_a_mistake_that_no_spec_names_has_no_pin(diagonal: int) -> None:
    report = regard.check(Attention(diagonal))
    assert (report.verdict, report.pin) == ("different", "")
    assert str(report).endswith("nothing does, as no spec has causal-off-by-one.")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rotates", ["qkv", "v"])
def test_values_that_are_rotated_are_told(rotates: str) -> None:
    positions = "rotary" if "q" in rotates else None
    expected = regard.spec(causal=True, heads=3, positions=positions)
    report = regard.check(Attention(rotates=rotates), expect=expected)
    assert "values" in {finding.name for finding in report.faults}, report
    assert regard.check(Attention(rotates="qk"), expect=regard.spec(positions="rotary")).ok


def test_a_numpy_mask_of_an_example_is_read() -> None:
    def attend(q: Any, k: Any, v: Any, valid: Any) -> Any:
        scores = np.einsum("bid,bjd->bij", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(valid[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("bij,bjd->bid", weights / weights.sum(-1, keepdims=True), v)

    drawn = np.random.RandomState(0)
    valid = np.arange(6) < np.array([[6], [4]])
    args = (*(drawn.randn(2, 6, 8) for _ in range(3)), valid)
    report = regard.check(attend, args=args, expect=regard.spec(padding={"valid": "True keeps"}))
    assert report.ok, report


def with_numbers_added(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    scores = scores if mask is None else scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


@pytest.mark.full
def test_a_numpy_mask_that_is_added_is_read() -> None:
    assert "mask is added to the scores" in str(regard.check(with_numbers_added))
    meant = regard.spec(padding={"mask": "True keeps"})
    names = [f.name for f in regard.check(with_numbers_added, expect=meant).faults]
    assert names == ["mask-added-as-numbers"]


@pytest.mark.parametrize("heads", [1, 2])
def test_lengths_that_are_repeated_in_another_order_are_told(heads: int) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        b, t, d = q.shape
        q, k, v = (x.view(b, t, heads, -1).transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.mT / (d // heads) ** 0.5).flatten(0, 1 if heads > 1 else 2)
        hidden = torch.arange(t) >= lengths.repeat(heads if heads > 1 else t)[:, None]
        hidden = hidden[:, None] if heads > 1 else hidden
        weights = scores.masked_fill(hidden, -torch.inf).view(b, heads, t, t).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(b, t, d)

    report = regard.check(attention)
    assert [finding.name for finding in report.faults] == ["mask-of-another-sample"], report


def test_scores_that_are_capped_behind_their_mask_hide_nothing() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -1e9)
        return (20 * torch.tanh(scores / 20)).softmax(-1) @ v

    [finding] = regard.check(attention).faults
    assert finding.name == "mask-fill-value"
    assert finding.detail == "Scores of masked keys are -20; only -inf hides them."


def test_values_of_grouped_heads_in_another_order_are_told() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    example = (torch.rand(2, 4, 7, 8), *torch.rand(2, 2, 2, 7, 8))
    names = {f.name for f in regard.check(attention, args=example).faults}
    assert names == {"kv-heads-repeated-in-wrong-order"}


def test_a_leak_of_code_that_is_not_read_is_told() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.relu(q @ k.mT).softmax(-1) @ v.roll(1, 1)

    report = regard.check(attention, expect=regard.spec(causal=True))
    assert "not-causal" in {finding.name for finding in report.faults}, report
    assert regard.check(attention).verdict == "cannot tell"


def test_a_function_of_scores_that_takes_any_batch_has_no_note() -> None:
    assert regard.check(lambda scores: scores.softmax(-1)).findings == ()
    report = regard.check(lambda scores: scores.softmax(1))
    assert [finding.name for finding in report.findings] == ["unbatched-only"]


class Latents(nn.Module):
    """Three learned queries read the tokens."""

    def __init__(self, scale: float = 8**-0.5, learns_keys: bool = False) -> None:
        super().__init__()
        self.latents, self.scale = nn.Parameter(torch.randn(3, 24)), scale
        self.learns_keys = learns_keys
        self.q, self.kv, self.out = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        reads, is_read = (x, latents) if self.learns_keys else (latents, x)
        q, k, v = (
            t.unflatten(-1, (3, 8)).transpose(1, 2)
            for t in (self.q(reads), *self.kv(is_read).chunk(2, -1))
        )
        weights = (self.scale * q @ k.mT).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_learned_queries_are_told() -> None:
    report = regard.check(Latents(), args=(torch.randn(2, 7, 24),), expect=regard.spec(heads=3))
    assert report.ok, report
    assert "3 learned queries" in str(report.computes)


def test_a_mistake_beside_learned_queries_is_told() -> None:
    example = (torch.randn(2, 7, 24),)
    report = regard.check(Latents(scale=24**-0.5), args=example, expect=regard.spec(heads=3))
    assert [finding.name for finding in report.faults] == ["scale-by-embed-dim"], report


def test_learned_keys_are_no_tokens() -> None:
    report = regard.check(Latents(learns_keys=True), args=(torch.randn(2, 7, 24),))
    assert report.verdict == "cannot tell", report
    assert "keys or values follow from no token" in report.missing


@pytest.mark.full
def test_a_rule_by_which_most_queries_see_no_key_is_not_stated() -> None:
    """A mask that begins anew for each piece of the queries is no band."""

    def in_pieces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces: list[Tensor] = []
        for piece in q.split(4, -2):
            mask = torch.ones(piece.shape[-2], k.shape[-2], dtype=torch.bool).tril()
            scores = (piece @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
            pieces.append(scores.softmax(-1) @ v)
        return torch.cat(pieces, -2)

    report = regard.check(in_pieces)
    assert report.verdict == "cannot tell", report
    report = regard.check(in_pieces, expect=regard.spec(causal=True))
    assert [finding.name for finding in report.faults] == ["mask"], report


def test_keys_of_the_past_alone_are_not_called_later_ones() -> None:
    def before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(-3)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -1e9)
        return scores.softmax(-1) @ v

    report = regard.check(before, expect=regard.spec(causal=True))
    assert [finding.name for finding in report.faults] == ["mask"], report
    assert "keys that stand at least 3 before the query" in str(report)


class Decoder(nn.Module):
    """A decoder reads its source in the manner of Luong: the values are the source itself."""

    def __init__(self, *, has_values: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.value = nn.Linear(16, 16) if has_values else None

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = (self.query(x) @ self.key(memory).mT / 4).softmax(-1)
        return weights @ memory


@pytest.mark.full
def test_values_that_are_not_projected_are_free_unless_a_projection_is_idle() -> None:
    expected = regard.spec(causal=False)
    assert regard.check(Decoder(has_values=False), expect=expected).ok
    assert regard.check(Decoder(has_values=False)).verdict == "different"
    for expect in (expected, None):
        report = regard.check(Decoder(has_values=True), expect=expect)
        assert [finding.name for finding in report.faults] == ["wrong-values"], report


class Opaque(nn.Module):
    """Attention whose layers have names that say nothing."""

    def __init__(self, *, is_mixed_up: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.is_mixed_up = is_mixed_up

    def forward(self, x: Tensor) -> Tensor:
        scores = self.a(x) @ (self.a if self.is_mixed_up else self.b)(x).mT / 4
        return scores.softmax(-1) @ self.c(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("expect", [None, regard.spec(causal=False)])
def test_a_layer_that_is_used_twice_is_named_whatever_its_name_is(expect: Any) -> None:
    report = regard.check(Opaque(is_mixed_up=True), expect=expect)
    assert [finding.name for finding in report.faults] == ["wrong-projection"], report
    assert regard.check(Opaque(is_mixed_up=False), expect=expect).ok


class InPlace(nn.Module):
    """Inference code, which runs without gradients alone: it writes into parts of a split."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(16, 48), scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(16, -1)
        return (q.mul_(self.scale) @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(("scale", "names"), [(0.25, []), (1.0, ["no-scale"])])
def test_code_that_takes_no_gradients_is_read(scale: float, names: list[str]) -> None:
    report = regard.check(InPlace(scale), expect=regard.spec(causal=False))
    assert [finding.name for finding in report.faults] == names, report
    assert "Its gradients were not judged" in " ".join(report.notes)


def halves(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 100.0 ** -(
        torch.arange(0, x.shape[-1], 2) / x.shape[-1]
    )
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def neighbours(x: Tensor) -> Tensor:
    pairs = halves(torch.cat([x[..., ::2], x[..., 1::2]], -1)).chunk(2, -1)
    return torch.stack(pairs, -1).flatten(-2)


def first_half(x: Tensor) -> Tensor:
    return torch.cat([halves(x[..., :4]), x[..., 4:]], -1)


def second_half(x: Tensor) -> Tensor:
    return torch.cat([x[..., :4], halves(x[..., 4:])], -1)


def reversed_halves(x: Tensor) -> Tensor:
    return halves(x.flip(-1)).flip(-1)


TURNS = (halves, neighbours, first_half, second_half, reversed_halves)
TURNED = {f"{one.__name__}-{two.__name__}": (one, two) for one in TURNS for two in TURNS}


class TurnedApart(nn.Module):
    def __init__(self, query: Any, key: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.turn_query, self.turn_key = query, key

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (self.turn_query(q) @ self.turn_key(k).mT / 8**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("turns", full_but(TURNED, "halves-halves", "neighbours-halves"))
def test_rotations_are_of_the_same_columns_of_queries_and_keys(turns: tuple[Any, Any]) -> None:
    query, key = turns
    report = regard.check(TurnedApart(query, key), expect=regard.spec(positions=regard.ANY))
    assert report.computes is not None
    facts = report.computes.facts
    if query is key:
        assert report.ok, report
        assert "rotary positions of" in str(facts)
    else:
        assert "rotary positions of" not in str(facts), report


class LaterKeys(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        keep = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()
        if attention_mask is not None:
            keep = keep & attention_mask[:, None].bool()
        scores = (q @ k.mT / 24**0.5).masked_fill(~keep, torch.finfo(q.dtype).min)
        return self.out(scores.softmax(-1) @ v)


def test_a_mask_argument_that_hides_the_last_keys_is_no_window() -> None:
    report = regard.check(LaterKeys())
    assert report.computes is not None
    assert "the query's own and later keys" in str(report.computes.facts)
    assert "window" not in str(report.computes.facts)


class Gated(Attention):
    """Causal attention with a gate that every token moves."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(1, keepdim=True).sigmoid()


def test_a_leak_beside_causal_attention_is_told_where_nothing_is_expected() -> None:
    report = regard.check(Gated())
    assert report.verdict == "different"
    (finding,) = report.findings
    assert str(finding).startswith("causal (difference)")
    assert "output 1 moves with token 2, by another way" in str(finding)
    assert regard.check(Gated(), causal=True).verdict == "wrong"
    assert regard.check(Attention()).ok
    assert report.pin == "expect=regard.spec(heads=3)"
    assert regard.check(Gated(), expect=regard.spec(heads=3)).ok


def test_a_dtype_of_few_bits_inside_is_told() -> None:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query.half() @ key.half().mT).to(query.dtype)
        return (scores / query.shape[-1] ** 0.5).softmax(-1) @ value

    report = regard.check(attention)
    assert report.computes is not None
    assert report.computes.domain.endswith(", with float64 in place of float16")


class Wide(nn.Module):
    """A projection of everything, whose values are not used, beside a layer that is not named."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(16, 16 + 4 + 4 + 64)
        self.out, self.up = nn.Linear(16, 16), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, _, rest = self.fused(x).split((16, 4, 4, 64), -1)
        query = query.unflatten(-1, (4, 4)).transpose(1, 2)
        weights = (query @ key[:, None].mT / 2).softmax(-1)
        mixed = (weights @ key[:, None]).transpose(1, 2).flatten(2)
        return self.out(mixed) + self.up(rest.relu())


@pytest.mark.full
def test_a_few_idle_columns_of_a_wide_projection_are_wrong_whatever_is_expected() -> None:
    for expect in (None, regard.spec(heads=4, kv_heads=1)):
        report = regard.check(Wide(), expect=expect)
        assert [finding.name for finding in report.faults] == ["wrong-values"], report


class Cross(nn.Module):
    """A layer whose projection of the keys is not used, and that takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor, memory_padding: Tensor | None = None) -> Tensor:
        scores = self.wq(x) @ self.wv(memory).mT / 4
        if memory_padding is not None:
            scores = scores.masked_fill(memory_padding[:, None], -torch.inf)
        return scores.softmax(-1) @ self.wv(memory)


def test_an_idle_projection_is_wrong_also_beside_a_mask_that_check_makes() -> None:
    report = regard.check(Cross())
    assert [finding.name for finding in report.faults] == ["wrong-projection"], report


class Sunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        weights = (query @ key.mT / 4).softmax(-1)
        return (weights * weights) @ value


def test_what_could_not_be_read_names_lines_alone() -> None:
    report = regard.check(Sunk())
    assert report.verdict == "cannot tell"
    assert "the weights of the softmax (line " in report.missing
    assert ".py" not in report.missing


class LowNumbers(Attention):
    """A mask of low numbers without the query's own key, so that the first query sees all."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        low = torch.full((x.shape[1], x.shape[1]), -1e4).triu()
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + low).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_query_without_a_key_that_sees_every_key_is_told() -> None:
    report = regard.check(LowNumbers())
    assert "or every key where it leaves none" in str(report.computes), report


class BiasOfPlaces(Attention):
    """A bias that is laid out by samples where its rows are those of heads."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        slopes = torch.tensor([0.5, 0.25, 0.125]).repeat_interleave(len(x)).view(len(x), 3)
        bias = slopes[:, :, None, None] * torch.arange(x.shape[1])
        weights = (q @ k.mT / 8**0.5 + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_sample_that_its_place_in_the_batch_moves_attends_to_no_other_one() -> None:
    report = regard.check(BiasOfPlaces())
    assert [finding.name for finding in report.findings] == ["samples"], report
    assert "whatever the other one holds" in report.findings[0].detail


class Reversed(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
        weights = (q @ k.mT / 8**0.5).masked_fill(past, -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [True, False, regard.ANY])
def test_a_causal_mask_the_wrong_way_round_has_its_name_whatever_is_expected(causal: Any) -> None:
    report = regard.check(Reversed(), expect=regard.spec(causal=causal))
    assert [finding.name for finding in report.findings] == ["mask-inverted"]
