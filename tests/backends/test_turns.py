"""Blocks on several threads: the same numbers, the errors of a thread, nothing left behind."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import regard
from regard.backends import sweep as blocks
from regard.backends.parallel import in_turns

CPU = torch.device("cpu")


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
    found = [*A.reduce(*reductions), *A.reduce(regard.TopK(3), backend="blocks")]
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
    in_turns(range(100), lambda: lambda item: item * item, taken.append, CPU)
    assert taken == [item * item for item in range(100)]


def test_no_worker_goes_on_before_its_answer_is_taken(threads: int) -> None:
    def worker() -> Callable[[int], list[int]]:
        memory = [0]

        def answer(item: int) -> list[int]:
            memory[0] = item
            return memory

        return answer

    taken: list[int] = []
    in_turns(range(100), worker, lambda memory: taken.append(memory[0]), CPU)
    assert taken == list(range(100))


def test_an_error_in_a_thread_is_raised_and_ends_the_others(threads: int) -> None:
    def answer(item: int) -> int:
        if item == 7:
            raise ZeroDivisionError("item 7")
        return item

    taken: list[int] = []
    with pytest.raises(ZeroDivisionError, match="item 7"):
        in_turns(range(10**6), lambda: answer, taken.append, CPU)
    assert taken == list(range(7))


def test_an_error_while_taking_is_raised(threads: int) -> None:
    def take(item: int) -> None:
        raise ZeroDivisionError(f"item {item}")

    with pytest.raises(ZeroDivisionError, match="item 0"):
        in_turns(range(10**6), lambda: lambda item: item, take, CPU)


def test_nothing_is_left_behind(threads: int) -> None:
    in_turns(range(10), lambda: lambda item: item, lambda _: None, CPU)
    seen: list[int] = []
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert [torch.get_num_threads(), *seen] == [threads, threads]
    assert not [each for each in threading.enumerate() if each.name.startswith("regard")]
