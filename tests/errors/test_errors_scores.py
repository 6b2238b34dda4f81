"""Errors of what is done to scores, word for word: biases, score_mod, softcap, sinks, weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import regard

X = torch.zeros(2, 4, 3, 5)
SHAPE = "(2, 4, 3, 3)"


def attending(**options: object) -> Callable[[], object]:
    return lambda: regard.attend(X, X, **options)


def one_answer(answer: Callable[[Tensor], object]) -> Callable[..., object]:
    return lambda score, b, h, q_idx, kv_idx: answer(score)  # noqa: ARG005


CALLED_AS = "    It is called as score_mod(score, b, h, q_idx, kv_idx) with scalar tensors"
OTHERWISE = (
    "    A mask_mod(b, h, q_idx, kv_idx) goes to mask=, a position bias such as ALiBi to bias=."
)
LEARNED = torch.zeros(4, requires_grad=True)

# id: (what is called, kind of error, its whole text)
ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "bias-is-a-callable": (
        attending(bias=max),
        TypeError,
        "bias is a builtin_function_or_method; it must be a floating tensor, numbers added to the "
        "scores, or a position bias such as ALiBi(num_heads).\n"
        "    A bool tensor (True = may attend) goes to mask=, a callable to score_mod=.",
    ),
    "bias-is-a-class": (
        attending(bias=regard.ALiBi),
        TypeError,
        "bias is the class ALiBi; it must be an instance.\n    Use ALiBi(...).",
    ),
    "alibi-of-another-number-of-heads": (
        attending(bias=regard.ALiBi(3)),
        ValueError,
        f"slopes has shape (3,); a matrix of shape {SHAPE} needs (4,), one slope for each head.\n"
        "    For the slopes of the paper use ALiBi(4).",
    ),
    "alibi-of-no-heads": (
        lambda: regard.ALiBi(0),
        ValueError,
        "slopes is 0; it must be at least 1.\n    Pass for example slopes=1.",
    ),
    "slopes-is-a-list": (
        lambda: regard.ALiBi([0.5]),
        TypeError,
        "slopes is a list; it must be the number of heads, or a floating tensor (num_heads,).\n"
        "    Use torch.tensor(slopes), or ALiBi(num_heads).",
    ),
    "slopes-of-integers": (
        lambda: regard.ALiBi(torch.ones(4, dtype=torch.int64)),
        TypeError,
        "slopes is int64; attention needs a floating dtype.\n    Use slopes.float().",
    ),
    "table-of-another-number-of-heads": (
        attending(bias=regard.T5Bias(torch.zeros(4, 32))),
        ValueError,
        f"table has shape (4, 32); a matrix of shape {SHAPE} needs (num_buckets, 4), a number for "
        "each bucket and head.\n    Pass the weight of the model's relative_attention_bias.",
    ),
    "table-is-a-list": (
        lambda: regard.T5Bias([[0.5]]),
        TypeError,
        "table is a list; it must be a tensor of shape (num_buckets, num_heads).\n"
        "    Use torch.as_tensor(table).",
    ),
    "table-of-few-buckets": (
        attending(bias=regard.T5Bias(torch.zeros(3, 4))),
        ValueError,
        "table has 3 buckets; bidirectional=True needs at least 4.\n    T5 has 32.",
    ),
    "table-of-one-bucket": (
        attending(bias=regard.T5Bias(torch.zeros(1, 4), bidirectional=False)),
        ValueError,
        "table has 1 buckets; bidirectional=False needs at least 2.\n    T5 has 32.",
    ),
    "max-distance-too-small": (
        attending(bias=regard.T5Bias(torch.zeros(32, 4), max_distance=8)),
        ValueError,
        "max_distance is 8; with 32 buckets it must be more than 8, the distances with a bucket of "
        "their own.\n    T5 has max_distance=128.",
    ),
    "max-distance-is-a-fraction": (
        lambda: regard.T5Bias(torch.zeros(32, 4), max_distance=8.5),
        TypeError,
        "max_distance is a float; it must be a whole number.\n"
        "    Pass an int, for example max_distance=1.",
    ),
    "softcap-is-text": (
        attending(softcap="50"),
        TypeError,
        "softcap is a str; it must be a number.\n"
        "    Leave it out for scores without a bound; Gemma 2 has softcap=50.0.",
    ),
    "softcap-is-true": (
        attending(softcap=True),
        TypeError,
        "softcap is a bool; it must be a number.\n"
        "    Leave it out for scores without a bound; Gemma 2 has softcap=50.0.",
    ),
    "softcap-of-0": (
        attending(softcap=0),
        ValueError,
        "softcap is 0; it must be positive and finite.\n"
        "    Leave it out for scores without a bound; Gemma 2 has softcap=50.0.",
    ),
    "softcap-is-nan": (
        attending(softcap=float("nan")),
        ValueError,
        "softcap is nan; it must be positive and finite.\n"
        "    Leave it out for scores without a bound; Gemma 2 has softcap=50.0.",
    ),
    "sink-bias-is-a-number": (
        attending(sink_bias=1.0),
        TypeError,
        "sink_bias is a float; it must be a tensor of shape (num_heads,).\n"
        "    Use torch.as_tensor(sink_bias).",
    ),
    "sink-bias-of-another-number-of-heads": (
        attending(sink_bias=torch.zeros(3)),
        ValueError,
        f"sink_bias has shape (3,); a matrix of shape {SHAPE} needs (4,), one logit for each "
        "head.\n    One number, a tensor without axes, stands for all heads.",
    ),
    "sink-bias-device": (
        attending(sink_bias=torch.zeros(4, device="meta")),
        ValueError,
        "sink_bias is on meta and the query is on cpu; both must be on one device.\n"
        "    Use sink_bias.to(query.device).",
    ),
    "score-mod-is-a-number": (
        attending(score_mod=3),
        TypeError,
        "score_mod is an int; it must be a callable, score_mod(score, b, h, q_idx, kv_idx).\n"
        + OTHERWISE,
    ),
    "score-mod-is-a-position-bias": (
        attending(score_mod=regard.ALiBi(4)),
        TypeError,
        "score_mod is an ALiBi; it must be a callable, score_mod(score, b, h, q_idx, kv_idx).\n"
        + OTHERWISE,
    ),
    "score-mod-is-a-mask-mod": (
        attending(score_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),  # noqa: ARG005
        TypeError,
        "score_mod takes (b, h, q_idx, kv_idx); it must take 5 scalar tensors, "
        "score_mod(score, b, h, q_idx, kv_idx).\n" + OTHERWISE,
    ),
    "score-mod-returns-bool": (
        attending(score_mod=one_answer(lambda score: score > 0)),
        TypeError,
        "score_mod returns bool; it must return the new score, one number.\n" + OTHERWISE,
    ),
    "score-mod-returns-a-float": (
        attending(score_mod=one_answer(lambda _: 1.0)),
        ValueError,
        "score_mod returns a float; it must return the new score, one number, as a tensor.\n"
        + CALLED_AS
        + ".",
    ),
    "score-mod-returns-nothing": (
        attending(score_mod=one_answer(lambda _: None)),
        ValueError,
        "score_mod returns None; it must return the new score, one number, as a tensor.\n"
        + CALLED_AS
        + ".",
    ),
    "score-mod-returns-two-numbers": (
        attending(score_mod=one_answer(lambda score: torch.stack([score, score]))),
        ValueError,
        "score_mod returns a tensor of shape (2,); it must return the new score, one number, as a "
        "tensor.\n" + CALLED_AS + ".",
    ),
    "score-mod-raises": (
        attending(score_mod=lambda score, b, h, q_idx, kv_idx: score + X[0, 0][kv_idx, q_idx + 3]),  # noqa: ARG005
        ValueError,
        "score_mod raised IndexError: index 5 is out of bounds for dimension 1 with size 5\n"
        + CALLED_AS
        + " and must return the new score, one number. Choose with torch.where, not with if.",
    ),
    "score-mod-learns": (
        attending(score_mod=lambda score, b, h, *_: score + LEARNED[h]),  # noqa: ARG005
        ValueError,
        "score_mod uses a tensor that requires a gradient; none would flow to it.\n"
        "    Detach that tensor, or pass what it adds to the scores as bias=.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_call_says_what_came_and_what_to_do(
    call: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


def test_an_error_inside_score_mod_keeps_its_cause() -> None:
    with pytest.raises(ValueError, match="score_mod raised ZeroDivisionError") as caught:
        attending(score_mod=one_answer(lambda score: score * (1 / 0)))()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("number", [np.int64(2), torch.tensor(2)], ids=["numpy", "tensor"])
def test_a_whole_number_of_numpy_or_torch_is_one(number: int) -> None:
    A = regard.attend(X, X)
    assert A.topk(number).indices.shape[-1] == 2
    assert A.diagonal(number).shape[-1] == 1
    assert A.pool(number, number).shape[-2:] == (2, 2)
