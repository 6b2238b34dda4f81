"""The error and the warning for attention that is not recorded: module, line and reason."""

import inspect
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from models import ImportedByName, Stack, noise


def refusal(model: nn.Module, run: Callable[[], object]) -> str:
    with pytest.raises(regard.RegardError) as caught, regard.observe(model) as seen:
        run()
    assert len(seen) == 0
    return str(caught.value)


NOT_RUN = """none of its modules ran a product of matrices in the block, on this thread.
    Run the model inside the block, without torch.compile, on the thread that opened it."""


def run_outside(_: nn.Module) -> None:
    noise(3, 5) @ noise(5, 3)


def run_on_another_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=model, args=(noise(3, 7, 22),))
    thread.start()
    thread.join()


def run_compiled(_: nn.Module) -> None:
    torch.compile(lambda x: 2 * x, backend="eager")(noise(3, 5))


@pytest.mark.parametrize("run", [run_outside, run_on_another_thread, run_compiled])
def test_a_model_that_did_not_run_on_this_thread_is_an_error(
    run: Callable[[nn.Module], None],
) -> None:
    model = Stack()
    assert refusal(model, lambda: run(model)) == f"no attention was seen in Stack; {NOT_RUN}"


class Multihead(nn.Module):
    """PyTorch's own module, on its fast path and off it."""

    def __init__(self, fast: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(22, 2, batch_first=True).train(not fast)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(
    ("model", "given"),
    [
        pytest.param(nn.Linear(22, 2), noise(3, 22), id="no attention in it"),
        pytest.param(ImportedByName(), noise(3, 0, 22), id="no tokens"),
        pytest.param(ImportedByName(), noise(0, 3, 22), id="no texts"),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_model_without_attention_over_tokens_says_so(
    model: nn.Module, given: Tensor, mode: Callable[[], Any]
) -> None:
    with mode():
        said = refusal(model, lambda: model(given))
    assert said == (
        f"no attention was seen in {type(model).__name__}; its modules ran, and ran no attention "
        "that observe recognises.\n"
        "    observe sees softmax attention that PyTorch or flash-attn runs on this thread, and no "
        "other kernels or compiled functions."
    )


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("given", [noise(3, 0, 22), noise(0, 3, 22)], ids=["tokens", "texts"])
def test_a_layer_without_tokens_is_named_beside_a_recorded_one(
    given: Tensor, *, fast: bool
) -> None:
    model = nn.ModuleList([Multihead(fast), regard.nn.SelfAttention(22)])
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        with regard.observe(model) as seen:
            model[0](given)
            model[1](noise(1, 3, 22))
    assert re.search(r"'0.attention' .* (of no|without) tokens", str(caught[0].message))
    assert list(seen) == ["1"]


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.sigmoid(q @ k.mT / 3)
    return weights @ v  # value


def rectified(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).relu() ** 2
    return torch.einsum("bij,bjd->bid", weights, v)  # value


def decayed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Retention: decay in place of a softmax."""
    decay = 0.9 ** (torch.arange(5)[:, None] - torch.arange(5)).float()
    return (q @ k.mT) * decay.tril() @ v  # value


def unnormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.exp(q @ k.mT / 9) @ v  # value


def bare(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention in the order of softmax attention."""
    return (q @ k.mT) @ v  # value


def bare_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqd,bkd->bqk", q, k)
    return torch.einsum("bqk,bkd->bqd", scores, v)  # value


def running(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A running maximum and a running sum over blocks of keys, as flash attention has them."""
    top, total, out = torch.full((2, 5, 1), -torch.inf), torch.zeros(2, 5, 1), torch.zeros(2, 5, 22)
    for start in (0, 2, 4):
        scores = q @ k[:, start : start + 2].mT
        highest = torch.maximum(top, scores.amax(-1, keepdim=True))
        powers, shrunk = (scores - highest).exp(), (top - highest).exp()
        total = total * shrunk + powers.sum(-1, keepdim=True)
        out = out * shrunk + powers @ v[:, start : start + 2]  # value
        top = highest
    return out / total


class Unlike(nn.Module):
    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.query, self.key = nn.Linear(22, 22), nn.Linear(22, 22)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.query(x), self.key(x), x)


def line(way: Callable[..., object]) -> str:
    lines, start = inspect.getsourcelines(way)
    return f"{__file__}:{next(start + i for i, text in enumerate(lines) if '# value' in text)}"


def named(way: Callable[..., object]) -> str:
    of_scores = rf"scores meet a value \({re.escape(line(way))}\) without a softmax"
    of_exponentials = rf"exponentials of scores \({re.escape(__file__)}:\d+\) multiply a value"
    return f"({of_scores}|{of_exponentials})"


SUM, LEAST = r"a row sums to \d+(\.\d+)?", r"the least of them is -\d+(\.\d+)?"
UNLIKE = [
    pytest.param(sigmoid, SUM, id="sigmoid"),
    pytest.param(rectified, SUM, id="relu"),
    pytest.param(decayed, f"({SUM}|{LEAST})", id="decay"),
    pytest.param(bare, LEAST, id="nothing"),
    pytest.param(bare_einsum, LEAST, id="nothing, einsum"),
    pytest.param(unnormalised, SUM, id="exponentials"),
    pytest.param(running, SUM, id="running sums"),
]
REMEDY = "observe keeps attention whose weights are a softmax of query times key."
SURROUNDINGS = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", SURROUNDINGS, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(("way", "fault"), UNLIKE)
def test_attention_without_a_softmax_is_named_where_it_is_alone(
    way: Callable[..., Tensor], fault: str, mode: Callable[[], Any]
) -> None:
    model = nn.Sequential(nn.ReLU(), Unlike(way))
    with mode():
        message = refusal(model, lambda: model(noise(2, 5, 22)))
    how = rf"{named(way)}: {fault}"
    expected = rf"no attention was seen in Sequential; in '1', {how}\.\n    {REMEDY}"
    assert re.fullmatch(expected, message)


@pytest.mark.parametrize(("way", "fault"), UNLIKE)
def test_attention_without_a_softmax_is_warned_of_beside_others(
    way: Callable[..., Tensor], fault: str
) -> None:
    model, x = nn.Sequential(Softmax(), Unlike(way)), noise(2, 5, 22)
    expected = model(x)
    how = rf"{named(way)}: {fault}"
    message = rf"^'1' has attention that is not recorded: {how}\. {REMEDY}$"
    with pytest.warns(UserWarning, match=message) as caught, regard.observe(model) as seen:
        output = model(x)
    assert caught[0].filename == __file__
    assert torch.equal(output, expected)
    assert list(seen) == ["0"]


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


def test_several_modules_without_a_softmax_are_counted() -> None:
    model = nn.Sequential(Softmax(), *(Unlike(sigmoid) for _ in range(3)))
    with (
        pytest.warns(UserWarning, match=f"{SUM}, and 2 more modules likewise"),
        regard.observe(model),
    ):
        model(noise(2, 5, 22))


def positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The product of scores and positions is part of an attention."""
    near = (q @ k.mT / 3).sigmoid() @ v
    return ((q + near) @ k.mT).softmax(-1) @ v


def filters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products with what is no activation."""
    return (q @ v.new_ones(22, 4).mul_(0.5).add_(1)).sum() + (q @ k.mT).mean() * v


class Transformed(nn.Module):
    """A transform of signals by constant matrices, as a filter bank is, and attention elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("there", noise(22, 7))
        self.register_buffer("back", noise(7, 22))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.there).abs() @ self.back


class Mixed(nn.Module):
    """Several streams of features, mixed by factors that a layer gives, as AltUp does."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Linear(22, 4)

    def forward(self, x: Tensor) -> Tensor:
        streams = x.expand(2, *x.shape[-3:]).permute(1, 2, 3, 0)
        mixed = streams @ self.factors(streams[..., 0]).unflatten(-1, (2, 2))
        mixed = mixed.permute(3, 0, 1, 2) + x
        mixed[1:] += mixed[:1].sin()
        return mixed


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(nn.Sequential(Mixed(), Mixed()), id="mixed streams"),
        pytest.param(Unlike(positions), id="a part of an attention"),
        pytest.param(Unlike(filters), id="no third factor"),
        pytest.param(Transformed(), id="buffers"),
        pytest.param(nn.Bilinear(22, 22, 22), id="parameters"),
    ],
)
def test_what_is_no_attention_gives_no_warning(model: nn.Module) -> None:
    whole = nn.ModuleList([Softmax(), model])
    given = [noise(2, 5, 22)] * (2 if isinstance(model, nn.Bilinear) else 1)
    with warnings.catch_warnings(), regard.observe(whole) as seen:
        warnings.simplefilter("error")
        whole[0](noise(2, 5, 22))
        model(*given)
    assert "0" in seen
