"""Blocks on several threads: the same numbers, the errors of a thread, nothing left behind."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.backends import parallel
from regard.backends import sweep as blocks
from regard.backends.parallel import map_in_order
from regard.masks.mask import Points


@pytest.fixture(params=[2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_SIZE", 64)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    monkeypatch.setattr(blocks, "MAX_ROWS", 4)


def answers(query: Tensor, key: Tensor) -> list[Tensor]:
    A = regard.attend(query, key, mask=regard.Causal())
    reductions = (regard.Entropy(), regard.Sum(-2), regard.Pool(5, 5), regard.Diagonal(-1))
    found = [*A.reduce(*reductions), *A.reduce(regard.TopK(3), backend="sweep")]
    loss = sum(answer.square().sum() for answer in found[:4])
    return [*found, *torch.autograd.grad(loss, (query, key))]


@pytest.mark.usefixtures("small_blocks")
def test_several_threads_give_the_numbers_of_one_bit_for_bit() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(2, 3, 37, 4, requires_grad=True) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = answers(query, key)
    torch.set_num_threads(3)
    found = answers(query, key)
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("small_blocks", "threads")
def test_inference_mode_reaches_the_threads() -> None:
    x = torch.randn(37, 4)
    with torch.inference_mode():
        entropy = regard.attend(x, x).entropy()
    torch.testing.assert_close(entropy, regard.attend(x, x).entropy())


def test_answers_come_in_the_order_of_the_items(threads: int) -> None:
    taken: list[int] = []
    map_in_order(range(100), lambda: lambda item: item * item, taken.append, threaded=True)
    assert taken == [item * item for item in range(100)]


@pytest.mark.sampled(1)
def test_threads_wait_for_an_answer_that_takes_long(threads: int) -> None:
    begun: list[int] = []
    ahead: list[int] = []

    def answer(item: int) -> int:
        begun.append(item)
        if item == 0:
            time.sleep(0.3)  # the other threads answer thousands of items in this time
            ahead.append(len(begun))
        return item

    taken: list[int] = []
    map_in_order(range(10**4), lambda: answer, taken.append, threaded=True)
    assert taken == list(range(10**4))
    assert 2 < ahead[0] <= 8 * threads


def test_an_error_in_a_thread_is_raised_and_ends_the_others(threads: int) -> None:
    def answer(item: int) -> int:
        if item == 7:
            raise ZeroDivisionError("item 7")
        return item

    taken: list[int] = []
    with pytest.raises(ZeroDivisionError, match="item 7"):
        map_in_order(range(10**6), lambda: answer, taken.append, threaded=True)
    assert taken == list(range(7))


def test_an_error_while_taking_is_raised(threads: int) -> None:
    def take(item: int) -> None:
        raise ZeroDivisionError(f"item {item}")

    with pytest.raises(ZeroDivisionError, match="item 0"):
        map_in_order(range(10**6), lambda: lambda item: item, take, threaded=True)


@pytest.mark.usefixtures("small_blocks", "threads")
@pytest.mark.parametrize("backend", ["sweep", "cpu"])
def test_an_error_before_the_first_block_of_a_thread_is_raised(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no thread")

    monkeypatch.setattr(parallel, "_start_thread", fail)
    x = torch.randn(1100, 4)
    with pytest.raises(ZeroDivisionError, match="no thread"):
        regard.attend(x, x).reduce(regard.Entropy(), backend=backend)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("first_failure", [1, 2])
def test_a_thread_that_cannot_start_is_an_error(
    first_failure: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, count = threading.Thread.start, itertools.count(1)

    def start_some(thread: threading.Thread) -> None:
        if thread.name.startswith("regard") and next(count) >= first_failure:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    # A thread that answered all items by itself would need no other one.
    slow = CalledOnThreads(lambda _: time.sleep(0.05))
    x = torch.randn(37, 4)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        regard.attend(x, x).reduce(slow, backend="sweep")


def test_nothing_is_left_behind(threads: int) -> None:
    map_in_order(range(10), lambda: lambda item: item, lambda _: None, threaded=True)
    assert torch.get_num_threads() == threads
    assert surroundings() == Surroundings(threads, flushes=False)
    assert not [each for each in threading.enumerate() if each.name.startswith("regard")]


class Surroundings(NamedTuple):
    """What PyTorch has set for a thread."""

    threads: int
    flushes: bool

    @classmethod
    def here(cls) -> "Surroundings":
        smallest = torch.tensor([1e-40])
        return cls(torch.get_num_threads(), flushes=(smallest * 1.0).item() == 0)


def surroundings() -> Surroundings:
    """What PyTorch has set for a new thread."""
    seen: list[Surroundings] = []
    later = threading.Thread(target=lambda: seen.append(Surroundings.here()))
    later.start()
    later.join()
    return seen[0]


class Called(regard.Reduction):
    """Calls a function for each block."""

    def __init__(self, function: Callable[[regard.Block], None]) -> None:
        self.function = function

    def start(
        self, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, ...]:
        return ()

    def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
        self.function(block)
        return ()

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> None:
        return None


class CalledOnThreads(Called):
    thread_safe = True


@pytest.mark.usefixtures("small_blocks")
def test_a_thread_that_starts_during_a_sweep_is_like_any_other(threads: int) -> None:
    swept, started = threading.Event(), threading.Event()
    seen: list[Surroundings] = []

    def user() -> None:
        swept.wait(60)
        seen.extend((Surroundings.here(), surroundings()))
        started.set()

    def update(_: regard.Block) -> None:
        assert Surroundings.here() == Surroundings(1, flushes=True)
        swept.set()
        started.wait(60)

    other = threading.Thread(target=user)
    other.start()
    x = torch.zeros(37, 4)
    regard.attend(x, x).reduce(CalledOnThreads(update))
    other.join()
    assert seen == [Surroundings(threads, flushes=False)] * 2


@pytest.mark.usefixtures("small_blocks")
def test_the_updates_of_a_users_reduction_run_one_by_one_on_the_calling_thread(
    threads: int,
) -> None:
    seen: list[tuple[int, threading.Thread, Surroundings]] = []

    def update(block: regard.Block) -> None:
        seen.append((block.box.rows.start, threading.current_thread(), Surroundings.here()))

    x = torch.zeros(37, 4)
    regard.attend(x, x).reduce(Called(update), regard.Entropy())
    rows = [row for row, _, _ in seen]
    assert len(rows) > threads
    assert rows == sorted(rows)
    assert {thread for _, thread, _ in seen} == {threading.current_thread()}
    assert {here for _, _, here in seen} == {Surroundings(threads, flushes=False)}


class Kept(regard.Bias):
    """A user's bias and mask, which record the threads that they run on."""

    def __init__(self, record: Callable[[], None]) -> None:
        self.record = record

    def bind(self, shape: torch.Size, device: torch.device) -> "Kept":
        return self

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def map(self, function: Callable[[Tensor], Tensor]) -> "Kept":
        return self

    def along(self, distance: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        self.record()
        return -distance.abs().float()


@dataclass(frozen=True, eq=False, repr=False)
class Even(regard.Mask):
    """A user's mask."""

    record: Callable[[], None]

    def bind(self, shape: torch.Size, device: torch.device) -> "Even":
        return self

    def allows(self, points: Points) -> Tensor:
        self.record()
        return points.kv_idx % 2 == 0

    def key_bounds(
        self, leading: tuple[slice, ...], rows: slice, shape: torch.Size
    ) -> regard.masks.KeyBounds:
        self.record()
        return regard.masks.KeyBounds(slice(0, shape[-1]), slice(0, 0))

    @property
    def text(self) -> str:
        return "Even()"


Record = Callable[[], None]


def calling(record: Record, answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(*arguments: Tensor) -> Tensor:
        record()
        return answer(*arguments)

    return function


X = torch.randn(37, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)


def with_score_mod(record: Record) -> regard.AttentionMatrix:
    return regard.attend(X, X, score_mod=calling(record, lambda score, *_: score * 2))


def even_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx % 2 == 0


def number(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx) / 7.0


# Each computes an answer with a function of a user.
USERS: dict[str, Callable[[Record], Tensor]] = {
    "score-mod": lambda record: with_score_mod(record).entropy(),
    "bias": lambda record: regard.attend(X, X, bias=Kept(record)).entropy(),
    "mask": lambda record: regard.attend(X, X, mask=Even(record)).entropy(),
    "mask-mod": lambda record: regard.attend(X, X, mask=calling(record, even_key)).entropy(),
    "masks-joined": lambda record: regard.attend(
        X, X, mask=regard.Causal() & ~(Even(record) & regard.Padding(9))
    ).entropy(),
    "rows": lambda record: regard.attend(
        X, X, mask=regard.masks.RowSlice(Even(record), 0, 40)
    ).entropy(),
    "weighted-sum": lambda record: regard.weighted_sum(
        regard.attend(X, X), calling(record, number)
    ),
    "divergence": lambda record: regard.kl(regard.attend(X, X), with_score_mod(record)),
    "divergence-mask": lambda record: regard.js(
        regard.attend(X, X), regard.attend(X, X, mask=Even(record))
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("small_blocks", "threads")
@pytest.mark.parametrize("name", USERS)
def test_the_functions_of_a_user_run_on_the_calling_thread(name: str) -> None:
    threads: list[str] = []
    answer = USERS[name](lambda: threads.append(threading.current_thread().name))
    forward = len(threads)
    answer.sum().backward()
    assert len(threads) > forward > 3
    assert set(threads) == {threading.current_thread().name}


BUILT_IN: dict[str, dict[str, Any]] = {
    "padding": {"mask": regard.Padding(30)},
    "masks-joined": {"mask": ~(regard.SlidingWindow(3, 0) & regard.Documents([0] * 37))},
    "prefix-or-keep": {"mask": regard.PrefixLM(3) | torch.ones(37, 37, dtype=torch.bool)},
    "rows": {"mask": regard.masks.RowSlice(regard.Causal(), 0, 40)},
    "alibi": {"bias": regard.ALiBi(torch.tensor([0.5]))},
    "t5": {"bias": regard.T5Bias(torch.zeros(8, 1))},
    "bias": {"bias": torch.zeros(37, 37), "softcap": 3.0, "sink_bias": torch.zeros(1)},
}


@pytest.mark.usefixtures("small_blocks", "threads")
@pytest.mark.parametrize("name", BUILT_IN)
def test_masks_and_biases_of_regard_run_on_several_threads(name: str) -> None:
    names: list[str] = []
    slow = CalledOnThreads(lambda _: names.append(threading.current_thread().name))
    regard.attend(X, X, **BUILT_IN[name]).reduce(slow)
    assert all(name.startswith("regard") for name in names)


def test_a_mask_and_a_bias_that_are_declared_safe_run_on_several_threads(
    small_blocks: None, threads: int
) -> None:
    names: list[str] = []

    def record() -> None:
        names.append(threading.current_thread().name)

    class SafeBias(Kept):
        thread_safe = True

    class SafeEven(Even):
        thread_safe = True

    regard.attend(X, X, bias=SafeBias(record), mask=SafeEven(record)).entropy()
    assert any(name.startswith("regard") for name in names)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("small_blocks", "threads")
def test_without_the_numbers_of_a_thread_blocks_come_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key = (torch.randn(2, 3, 37, 4, requires_grad=True) for _ in range(2))
    expected = answers(query, key)
    ignore = parallel._ignore
    monkeypatch.setattr(parallel, "_number_setters", lambda: (ignore, ignore))
    torch.testing.assert_close(answers(query, key), expected)
