"""A device with a queue of its own is not waited for: nobody looks at a number while it works.

Without a GPU the same code runs on tensors of the meta device.
"""

import operator
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import oracle
import regard
import waiting
from models import LLAMA, MODELS
from regard.reductions.largest import _largest_unseen


@pytest.fixture
def nothing_waits() -> Iterator[None]:
    with waiting.refused():
        yield


def numbers(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


# The fifth query may attend to nothing.
PAIRS = (torch.arange(121).reshape(11, 11) % 3 > 0) & (torch.arange(11) != 4)[:, None]
MASKS = {
    "none": lambda _: None,
    "causal": lambda _: regard.Causal(),
    "window": lambda _: regard.SlidingWindow(2, 1),
    "keep": lambda device: regard.Keep(PAIRS.to(device)),
}
ASKED = {
    "logsumexp": regard.LogSumExp(),
    "max score": regard.MaxScore(),
    "entropy": regard.Entropy(),
    "sum of rows": regard.Sum(-1),
    "sum of columns": regard.Sum(-2),
    "pool": regard.Pool(3, 4),
    "topk": regard.TopK(3),
    "top 1": regard.TopK(1),
    "segments": regard.Segments([(0, 2), (5, 11)], [(0, 7), (7, 11)]),
    "diagonal": regard.Diagonal(-1),
}


def matrix(device: str, mask: str, dtype: torch.dtype = torch.float32) -> regard.AttentionMatrix:
    """4 heads on 2 key heads, 11 tokens."""
    query, key = numbers(device, 2, 4, 11, 8), numbers(device, 2, 2, 11, 8)
    return regard.attend(query.to(dtype), key.to(dtype), mask=MASKS[mask](device))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("asked", ASKED)
def test_no_reduction_waits_for_the_device(asked: str, mask: str, request: Any) -> None:
    on_device = matrix("meta", mask)
    request.getfixturevalue("nothing_waits")
    on_device.reduce(ASKED[asked])


LOSSES = [regard.kl, regard.cross_entropy, regard.js]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_loss_waits_for_the_device(loss: Any, mask: str, request: Any) -> None:
    one, other = matrix("meta", "none"), matrix("meta", mask)
    request.getfixturevalue("nothing_waits")
    loss(one, other)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_on_a_device_is_that_of_the_cpu(
    loss: Any, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = matrix("cpu", "causal"), matrix("cpu", mask)
    expected = loss(one, other)
    waiting.as_on_a_device(monkeypatch)
    oracle.assert_close(loss(one, other), expected, 1e-6)


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize(
    ("looks", "error"),
    [
        (lambda tensor: bool(tensor.any()), RuntimeError),
        (lambda tensor: tensor[tensor > 0], NotImplementedError),
        (lambda tensor: tensor.tolist(), NotImplementedError),
        (lambda tensor: torch.tensor([1], device=tensor.device), waiting.Waited),
        (lambda tensor: torch.as_tensor([1], device=tensor.device), waiting.Waited),
        (lambda tensor: tensor.new_tensor([1]), waiting.Waited),
        (lambda tensor: torch.full((2,), tensor[0]), RuntimeError),
        (lambda tensor: torch.ones(2).to(tensor.device), waiting.Waited),
        (lambda tensor: tensor.copy_(torch.ones(3)), waiting.Waited),
        (lambda tensor: tensor[[0, 2]], waiting.Waited),
        (lambda tensor: tensor[torch.tensor([0, 2])], waiting.Waited),
        (lambda tensor: operator.setitem(tensor, [0, 2], 1.0), waiting.Waited),
    ],
    ids=[
        *("bool", "index", "tolist", "tensor", "as_tensor", "new_tensor", "full", "to", "copy_"),
        *("places", "places on the cpu", "set places"),
    ],
)
def test_whoever_waits_is_noticed(looks: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        looks(torch.empty(3, device="meta"))


@pytest.mark.usefixtures("nothing_waits")
@pytest.mark.parametrize(
    "goes_on",
    [
        lambda tensor: torch.full((2,), 1.0, device=tensor.device),
        lambda tensor: torch.as_tensor(tensor, device=tensor.device),
        lambda tensor: torch.ones(2).to(tensor.device, non_blocking=True),
        lambda tensor: tensor[torch.zeros(2, dtype=torch.int64, device=tensor.device)],
        lambda tensor: tensor + torch.tensor(1.0),
    ],
    ids=["full", "as_tensor", "to", "places", "a number beside it"],
)
def test_whoever_does_not_wait_is_left_alone(goes_on: Any) -> None:
    goes_on(torch.empty(3, device="meta"))


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What PyTorch's watch is set to; it warns the first time, as that of a GPU does."""
    modes: list[str] = []

    def set_to(mode: str) -> None:
        modes.append(mode)
        if len(modes) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature and", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_to)
    return modes


def test_the_watch_of_a_gpu_ends_with_its_block(modes: list[str]) -> None:
    with waiting.refused_by_cuda():
        assert modes == ["error"]
    assert modes == ["error", "default"]


def test_the_watch_of_a_gpu_ends_when_something_waited(modes: list[str]) -> None:
    with pytest.raises(RuntimeError, match="waits"), waiting.refused_by_cuda():
        raise RuntimeError("a synchronizing operation waits")
    assert modes == ["error", "default"]


def test_the_watch_of_a_gpu_ends_when_it_could_not_begin(
    modes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PROTOTYPE", "other words")
    with pytest.raises(UserWarning, match="Synchronization"), waiting.refused_by_cuda():
        pass
    assert modes == ["error", "default"]


# On a GPU the same, by PyTorch's own watch, and the numbers of the CPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "sweep"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("asked", ASKED)
def test_a_gpu_is_not_waited_for_and_answers_as_the_cpu_does(
    asked: str, mask: str, backend: str | None
) -> None:
    on_device = matrix("cuda", mask)
    with waiting.refused_by_cuda():
        answer = on_device.reduce(ASKED[asked], backend=backend)
    expected = matrix("cpu", mask).reduce(ASKED[asked])
    for one, other in zip(_tensors(answer), _tensors(expected), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mask",
    [regard.Padding([11, 4]), regard.PrefixLM([3, 0]), regard.Documents([0] * 5 + [1] * 6)],
    ids=["padding", "prefix", "documents"],
)
def test_a_mask_is_read_once(mask: regard.Mask) -> None:
    on_device = regard.attend(numbers("cuda", 2, 4, 11, 8), numbers("cuda", 2, 2, 11, 8), mask=mask)
    first = on_device.entropy()
    with waiting.refused_by_cuda():
        second = on_device.entropy()
    torch.testing.assert_close(first, second)


def _tensors(answer: Any) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


# While a model runs

LOOKS = (
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "cpu",
    "equal",
    "item",
    "nonzero",
    "tolist",
)
PACKAGE, TORCH = (Path(module.__file__).parent for module in (regard, torch))


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """From where in regard a number is looked at; not by a mode, since observe suspends modes."""
    places: set[str] = set()

    def watched(name: str, look: Any) -> Any:
        def looking(*args: Any, **kwargs: Any) -> Any:
            callers = (Path(frame.filename) for frame in reversed(traceback.extract_stack()))
            caller = next(c for c in callers if c != Path(__file__) and TORCH not in c.parents)
            if PACKAGE in caller.parents:
                places.add(f"{caller.relative_to(PACKAGE).as_posix()}: {name}")
            return look(*args, **kwargs)

        return looking

    for name in LOOKS:
        monkeypatch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
    for name in ("equal", "nonzero"):
        monkeypatch.setattr(torch, name, watched(name, getattr(torch, name)))
    return places


UNMASKED = ["llama, grouped heads", "gpt2", "gpt-neox", "vit", "bert"]
ANSWERS = {"keep": [regard.TopK(2), regard.Entropy(), regard.Sum(-2), regard.Pool(3, 2)]}


@pytest.mark.gpu
@pytest.mark.parametrize("name", UNMASKED)
def test_watching_a_forward_on_a_gpu_waits_for_nothing(name: str) -> None:
    case = MODELS[name]
    # In float32, PyTorch has no fused kernel for grouped heads on a GPU.
    model = case.model().cuda().bfloat16()
    inputs = {
        which: tensor.cuda().bfloat16() if tensor.is_floating_point() else tensor.cuda()
        for which, tensor in case.inputs.items()
    }
    with torch.no_grad():
        model(**inputs)  # what is made once
        torch.cuda.synchronize()
        with waiting.refused_by_cuda(), regard.observe(model, **ANSWERS) as seen:
            model(**inputs)
    assert seen.kept


@pytest.mark.gpu
def test_answers_kept_on_a_gpu_are_those_of_the_cpu_in_little_memory() -> None:
    torch.manual_seed(0)
    heads = LLAMA["num_attention_heads"]  # not grouped, for a fused kernel in float32
    changed = {"max_position_embeddings": 8192, "num_key_value_heads": heads}
    config = LlamaConfig(**{**LLAMA, **changed})
    model, given = LlamaForCausalLM(config).eval(), torch.arange(8192)[None] % LLAMA["vocab_size"]
    kept = list[dict[regard.Reduction, Any]]()
    for device in ("cpu", "cuda"):
        model, given = model.to(device), given.to(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with torch.no_grad(), regard.observe(model, **ANSWERS) as seen:
            model.model(given)
        kept.append(next(iter(seen.kept.values())))
    matrix_bytes = 4 * heads * 8192**2
    assert torch.cuda.max_memory_allocated() < matrix_bytes / 4
    for reduction, expected in kept[0].items():
        answer = kept[1][reduction]
        for one, other in zip(_tensors(answer), _tensors(expected), strict=True):
            if one.is_floating_point():  # keys whose weights nearly tie may change places
                torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", UNMASKED)
@pytest.mark.parametrize(
    "options", [pytest.param(ANSWERS, id="reductions"), pytest.param({}, id="query and key")]
)
def test_watching_a_forward_looks_at_no_number(
    options: dict[str, Any], name: str, looked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting.as_on_a_device(monkeypatch)
    case = MODELS[name]
    model = case.model()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model(**case.inputs)
    assert seen.layers
    assert looked == set()


def test_a_look_is_noticed(looked: set[str]) -> None:
    regard.attend(numbers("cpu", 3, 2), numbers("cpu", 3, 2)).entropy()
    assert any(place.startswith("reductions/block.py: ") for place in looked)


# What a device does instead of looking, with numbers that can be looked at

SPECIAL = [0.0, -0.0, 1.5, -1.5, 3e38, -3e38, 1e-40, -1e-40, torch.inf, -torch.inf, torch.nan]


@given(st.data())
def test_the_largest_are_found_without_a_look(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 40))
    rows = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=columns, max_size=columns))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    scores = torch.tensor([rows, rows[::-1]], dtype=dtype)
    k = data.draw(st.integers(1, columns))
    stable = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    assert torch.equal(_largest_unseen(scores, k), stable)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("asked", ASKED)
def test_what_a_device_does_is_what_the_cpu_does(
    asked: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = matrix("cpu", mask).reduce(ASKED[asked])
    waiting.as_on_a_device(monkeypatch)
    answer = matrix("cpu", mask).reduce(ASKED[asked])
    for one, other in zip(_tensors(answer), _tensors(expected), strict=True):
        oracle.assert_close(one, other, 1e-6)
