"""Lines of scripts for `outputs.attentions`, on lazy matrices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard


def even(heads: int = 3) -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, heads, 5, 4, generator=generator) for _ in range(2))
    return regard.attend(query, key, mask=regard.Causal())


IDIOMS: dict[str, Callable[[regard.AttentionMatrix | Tensor], Tensor]] = {
    "the mean of the heads": lambda a: a.mean(1)[0, 2],
    "the mean of the heads of one text": lambda a: a[0].mean(0)[2:4, 1:],
    "the last row of the mean": lambda a: a.mean(dim=1)[:, -1, :],
    "a part of the mean, and then of it": lambda a: a.mean(1)[0][3],
    "the mean times a value": lambda a: a.mean(1) @ torch.arange(10.0).view(5, 2),
    "the mean times a vector": lambda a: a.mean(1) @ torch.arange(5.0),
    "a vector times the mean": lambda a: torch.arange(5.0) @ a.mean(1),
    "the transposed mean": lambda a: a.mean(1).mT @ torch.arange(10.0).view(5, 2),
    "the last row": lambda a: a[..., -1, :],
    "one head after the other": lambda a: torch.stack([head[-1] for head in a[0]]),
    "bertviz": lambda a: torch.stack([each.squeeze(0) for each in (a, a)]),
    "detach, cpu, to": lambda a: a.detach().cpu().to(torch.float64)[0, 0, 1],
    "its size": lambda a: torch.tensor([*a.size(), a.size(-1), a.ndim, len(a.shape)]),
}


@pytest.mark.parametrize("idiom", IDIOMS.values(), ids=IDIOMS)
def test_scripts_for_weights_run_on_matrices(
    idiom: Callable[[regard.AttentionMatrix | Tensor], Tensor],
) -> None:
    torch.testing.assert_close(idiom(even()), idiom(even().to_dense()), check_dtype=False)


def test_the_mean_of_all_heads_as_a_tensor() -> None:
    torch.testing.assert_close(even().mean(1).to_dense(), even().to_dense().mean(1))
    assert even().mean(1).shape == (1, 5, 5)
    with pytest.raises(MemoryError, match="to_dense"):
        even().mean(1).to_dense(limit=10)


def test_a_mean_over_no_axis_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"dim is 7[\s\S]*Use axes from -4 to 3"):
        even().mean(7)


def test_a_row_is_not_squeezed() -> None:
    with pytest.raises(ValueError, match=r"its last two axes stay\.\n    Take a row"):
        even().squeeze(-1)


@pytest.mark.parametrize("function", [torch.cat, torch.sort, torch.log])
def test_what_would_form_the_matrix_says_what_to_ask(function: Callable[..., object]) -> None:
    argument = [even(), even()] if function is torch.cat else even()
    with pytest.raises(TypeError, match=r"it holds no numbers\.\n    "):
        function(argument)
