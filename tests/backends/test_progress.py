"""``progress`` and ``cancelled`` of ``reduce``: called between blocks, on the caller's thread."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

import regard
from regard.reductions.products import Output

X = torch.randn(4, 1100, 8)
CAUSAL = regard.attend(X, X, mask=regard.Causal())
WINDOW = regard.attend(X, X, mask=regard.SlidingWindow(50, 50))
PADDED = regard.attend(X[:, None], X[:, None], mask=regard.Padding([900, 100, 5, 1100]))

QUESTIONS: dict[str, Callable[..., Any]] = {
    "sweep": lambda **calls: CAUSAL.reduce(regard.Entropy(), backend="sweep", **calls),
    "cpu": lambda **calls: CAUSAL.reduce(regard.Entropy(), backend="cpu", **calls),
    "dense": lambda **calls: CAUSAL.reduce(regard.Entropy(), backend="dense", **calls),
    "one fused call": lambda **calls: CAUSAL.reduce(Output(X), backend="sdpa", **calls),
    "folded band": lambda **calls: WINDOW.reduce(Output(X), backend="sdpa", **calls),
    "by sequence": lambda **calls: PADDED.reduce(Output(X[:, None]), backend="sdpa", **calls),
}
questions = pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())


@questions
def test_progress_counts_up_to_all_blocks_on_the_calling_thread(ask: Callable[..., Any]) -> None:
    calls: list[tuple[int, int]] = []
    threads: set[int] = set()

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        threads.add(threading.get_ident())

    answer = ask(progress=progress)
    assert torch.equal(answer, ask())
    assert threads == {threading.get_ident()}
    counts = [done for done, _ in calls]
    assert counts == sorted(set(counts))
    assert calls[-1][0] == calls[-1][1] >= 1
    assert len({total for _, total in calls}) == 1


@questions
def test_a_question_that_is_cancelled_at_once_does_no_block(ask: Callable[..., Any]) -> None:
    done: list[int] = []
    with pytest.raises(CancelledError, match=r"reduce\(\) was cancelled after 0 of \d+ blocks"):
        ask(progress=lambda count, _: done.append(count), cancelled=lambda: True)
    assert done == []


@pytest.mark.parametrize("backend", ["sweep", "cpu"])
def test_a_question_can_be_cancelled_in_the_middle(backend: str) -> None:
    done: list[int] = []
    with pytest.raises(CancelledError, match="cancelled after"):
        CAUSAL.reduce(
            regard.Entropy(),
            backend=backend,
            progress=lambda count, _: done.append(count),
            cancelled=lambda: bool(done),
        )
    assert len(done) == 1


def test_a_question_is_not_cancelled_once_it_is_answered() -> None:
    x = torch.zeros(2, 1)
    asked: list[bool] = []
    answer = regard.attend(x, x).reduce(
        regard.Sum(-2), cancelled=lambda: asked.append(True) or False
    )
    assert asked == [True]
    assert answer.tolist() == [1.0, 1.0]


@questions
def test_an_error_of_progress_ends_the_pass(ask: Callable[..., Any]) -> None:
    def progress(done: int, total: int) -> None:
        raise ZeroDivisionError(done)

    with pytest.raises(ZeroDivisionError):
        ask(progress=progress)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("regard")]


def test_progress_of_a_question_with_gradients_counts_the_forward_pass() -> None:
    query = X.clone().requires_grad_()
    counts: list[int] = []
    answer = regard.attend(query, X).reduce(
        regard.Entropy(), progress=lambda done, _: counts.append(done)
    )
    before = len(counts)
    answer.sum().backward()
    assert before == len(counts) > 0
    assert query.grad is not None


def test_wrong_functions_are_refused_before_any_work() -> None:
    with pytest.raises(TypeError, match="progress is an int; it must be a function of two numbers"):
        CAUSAL.reduce(regard.Entropy(), progress=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cancelled is a bool; it must be a function without"):
        CAUSAL.reduce(regard.Entropy(), cancelled=True)  # type: ignore[arg-type]
