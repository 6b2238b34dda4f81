"""Positions: the papers' formulas written out, at odd lengths, at offsets and in every dtype."""

from math import cos, sin

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.nn import LearnedPositions, RotaryPositions, SelfAttention, SinusoidalPositions

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYERS = [
    pytest.param(SinusoidalPositions(6), id="sinusoidal"),
    pytest.param(LearnedPositions(6, 50), id="learned"),
    pytest.param(RotaryPositions(6), id="rotary"),
]
FLOAT32 = {"rtol": 1e-6, "atol": 1e-6}  # a few operations on numbers near 1


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def sinusoid(position: int, number: int, embed_dim: int, base: float = 10_000.0) -> float:
    """Vaswani et al. 2017, section 3.5, one number at a time."""
    angle = position / base ** (2 * (number // 2) / embed_dim)
    return cos(angle) if number % 2 else sin(angle)


# What all three share


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shape_and_dtype_are_kept(layer: nn.Module, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 7, 6, dtype=dtype)
    assert layer(x).shape == x.shape
    assert layer(x).dtype == dtype


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_an_offset_continues_where_an_earlier_part_ended(layer: nn.Module, offset: int) -> None:
    x = torch.randn(2, 20, 6)
    assert torch.equal(layer(x[:, offset:], offset=offset), layer(x)[:, offset:])


@pytest.mark.parametrize("layer", LAYERS)
def test_one_token_has_a_position_too(layer: nn.Module) -> None:
    x = torch.randn(1, 6)
    assert torch.equal(layer(x, offset=4), layer(x.expand(5, 6))[4:])


@pytest.mark.parametrize(
    "layer", [SinusoidalPositions(6), RotaryPositions(6)], ids=["sinusoidal", "rotary"]
)
def test_what_is_not_learned_is_not_in_the_state_dict(layer: nn.Module) -> None:
    assert list(layer.state_dict()) == []


@pytest.mark.parametrize(
    "make", [SinusoidalPositions, RotaryPositions], ids=["sinusoidal", "rotary"]
)
def test_a_model_in_half_precision_keeps_exact_angles(
    make: type[SinusoidalPositions | RotaryPositions],
) -> None:
    """Frequencies kept as a buffer would be rounded by .to(): positions near 1000 would be lost."""
    x = torch.ones(1001, 6)
    assert torch.equal(make(6).to(torch.bfloat16)(x), make(6)(x))


# Sinusoidal


@pytest.mark.parametrize("embed_dim", [1, 2, 7, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_sinusoidal_adds_the_papers_sines_and_cosines(embed_dim: int, tokens: int) -> None:
    x = torch.randn(3, tokens, embed_dim)
    waves = [[sinusoid(p, i, embed_dim) for i in range(embed_dim)] for p in range(tokens)]
    torch.testing.assert_close(
        SinusoidalPositions(embed_dim)(x), x + torch.tensor(waves), **FLOAT32
    )


def test_sinusoidal_is_right_at_position_100_000() -> None:
    """In float32 the angle itself would be off by up to 0.004."""
    added = SinusoidalPositions(8)(torch.zeros(1, 8), offset=99_999)[0]
    expected = torch.tensor([sinusoid(99_999, i, 8) for i in range(8)])
    torch.testing.assert_close(added, expected, **FLOAT32)


def test_another_base_turns_at_another_speed() -> None:
    added = SinusoidalPositions(4, base=100.0)(torch.zeros(3, 4))[2]
    expected = torch.tensor([sinusoid(2, i, 4, base=100.0) for i in range(4)])
    torch.testing.assert_close(added, expected, **FLOAT32)


# Learned


def test_learned_adds_its_vectors_in_order() -> None:
    positions, x = LearnedPositions(6, 9), torch.randn(2, 5, 6)
    assert torch.equal(positions(x, offset=4), x + positions.weight[4:9])


def test_only_the_positions_in_use_learn() -> None:
    positions = LearnedPositions(6, 9)
    positions(torch.randn(2, 5, 6), offset=1).sum().backward()
    assert positions.weight.grad is not None
    assert positions.weight.grad[:, 0].tolist() == [0, 2, 2, 2, 2, 2, 0, 0, 0]


# Rotary


def test_rotary_multiplies_pairs_as_complex_numbers() -> None:
    """Su et al. 2021, equation 15: number pair i at position p times exp(i p / base^(2i/dim))."""
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    speed = torch.tensor([10_000 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
    angle = torch.arange(7)[:, None] * speed
    turn = torch.polar(torch.ones_like(angle), angle)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * turn)
    torch.testing.assert_close(RotaryPositions(6)(x), expected.flatten(-2), rtol=1e-14, atol=1e-14)


def test_the_first_position_is_not_turned() -> None:
    x = torch.randn(1, 6)
    assert torch.equal(RotaryPositions(6)(x), x)


def test_turning_keeps_lengths() -> None:
    x = torch.randn(7, 6)
    torch.testing.assert_close(RotaryPositions(6)(x).norm(dim=-1), x.norm(dim=-1), **FLOAT32)


@pytest.mark.parametrize("offset", [0, 5, 100_000])
@pytest.mark.parametrize("distance", [-6, -1, 0, 3])
def test_scores_see_the_distance_of_query_and_key_only(distance: int, offset: int) -> None:
    """The same query and the same key at every position: each diagonal is one number."""
    query, key = torch.randn(2, 1, 6).expand(2, 9, 6)
    rotary = RotaryPositions(6)
    turned = rotary(query, offset=offset), rotary(key, offset=offset)
    diagonal = regard.attend(*turned).scores.to_dense().diagonal(distance)
    first = regard.attend(rotary(query), rotary(key)).scores
    at_start = first[0, distance] if distance >= 0 else first[-distance, 0]
    torch.testing.assert_close(diagonal, at_start.expand_as(diagonal), rtol=1e-5, atol=1e-5)


def test_rotary_is_llamas_up_to_the_order_of_the_numbers() -> None:
    """Hugging Face's Llama pairs i with i + head_dim/2 and calls the turned half rotate_half."""
    x = torch.randn(7, 6)
    order = torch.tensor([0, 2, 4, 1, 3, 5])  # even numbers first: pairs come to lie i + 3 apart
    angle = torch.arange(7.0)[:, None] * torch.tensor([10_000 ** (-2 * i / 6) for i in range(3)])
    cosine, sine = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    llama = x[:, order]
    rotate_half = torch.cat((-llama[:, 3:], llama[:, :3]), dim=-1)
    expected = llama * cosine + rotate_half * sine
    torch.testing.assert_close(RotaryPositions(6)(x)[:, order], expected, **FLOAT32)


def permuted_output_is_output_permuted(layer: SelfAttention, x: Tensor) -> bool:
    order = torch.tensor([3, 0, 2, 4, 1])
    return torch.allclose(layer(x[order]), layer(x)[order], atol=1e-5)


def test_without_positions_attention_does_not_see_the_order() -> None:
    assert permuted_output_is_output_permuted(SelfAttention(6), torch.randn(5, 6))


def test_with_rotary_positions_it_does() -> None:
    layer = SelfAttention(6, positions=RotaryPositions(6))
    assert not permuted_output_is_output_permuted(layer, torch.randn(5, 6))
