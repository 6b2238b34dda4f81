"""Whoever computes for many: the newest first, each once, none that nobody waits for."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from regard.view.server import request_queue as desk
from regard.view.server.request_queue import Answer, Busy, Desk


def at_desk(test: Callable[[Desk], Any], room: int = 100) -> Any:
    """What a coroutine gives that works with a desk of one thread."""

    async def run() -> Any:
        one = Desk(threads=1, room=room)
        try:
            return await test(one)
        finally:
            one.close()

    # A thread of its own: a browser of another test keeps a loop running in this one.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()


def plain(text: str, *, final: bool = False) -> Answer:
    return Answer(text.encode(), "text/plain", final=final)


class Slow:
    """Work that goes on until it is let go, or nobody waits for it."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def named(self, name: str) -> Callable[[Callable[[], bool]], Answer]:
        def work(wanted: Callable[[], bool]) -> Answer:
            self.order.append(name)
            self.begun.set()
            while wanted() and not self.go_on.wait(0.01):
                pass
            self.order.append(f"{name} {'done' if wanted() else 'left'}")
            return plain(name)

        return work


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to that")


def test_the_newest_question_is_answered_first() -> None:
    slow = Slow()

    async def test(one: Desk) -> None:
        asked = [asyncio.ensure_future(one.ask("first", slow.named("first")))]
        await until(slow.begun.is_set)
        for name in ("second", "third"):
            asked.append(asyncio.ensure_future(one.ask(name, slow.named(name))))
            await asyncio.sleep(0)
        slow.go_on.set()
        await asyncio.gather(*asked)

    at_desk(test)
    assert [name for name in slow.order if "done" not in name] == ["first", "third", "second"]


def test_one_question_of_many_is_computed_once() -> None:
    slow = Slow()
    slow.go_on.set()

    async def test(one: Desk) -> list[Answer]:
        return await asyncio.gather(*(one.ask("tile", slow.named("tile")) for _ in range(200)))

    assert {answer.content for answer in at_desk(test)} == {b"tile"}
    assert slow.order == ["tile", "tile done"]


def test_what_nobody_waits_for_ends_and_blocks_nobody() -> None:
    slow = Slow()

    async def test(one: Desk) -> Answer:
        left = [asyncio.ensure_future(one.ask(name, slow.named(name))) for name in "ab"]
        await until(slow.begun.is_set)
        for each in left:
            each.cancel()
        return await one.ask("c", lambda _: plain("c"))

    assert at_desk(test).content == b"c"
    assert len(slow.order) == 2  # one of the two had begun, and was told to end
    assert slow.order[1].endswith("left")


def test_an_answer_goes_on_while_one_of_two_waits() -> None:
    slow = Slow()

    async def test(one: Desk) -> Answer:
        first, second = (
            asyncio.ensure_future(one.ask("tile", slow.named("tile"))) for _ in range(2)
        )
        await until(slow.begun.is_set)
        first.cancel()
        await asyncio.sleep(0.02)
        slow.go_on.set()
        return await second

    assert at_desk(test).content == b"tile"


def test_an_error_is_told_to_everybody_who_asked_and_is_not_kept() -> None:
    async def test(one: Desk) -> list[object]:
        def fails(_: Callable[[], bool]) -> Answer:
            raise ValueError("no")

        asked = (one.ask("x", fails) for _ in range(2))
        told = await asyncio.gather(*asked, return_exceptions=True)
        return [*told, (await one.ask("x", lambda _: plain("yes"))).content]

    *told, then = at_desk(test)
    assert [str(error) for error in told] == ["no", "no"]
    assert then == b"yes"


@pytest.mark.parametrize(
    ("final", "size", "times"),
    [
        pytest.param(True, 40, 1, id="kept"),
        pytest.param(False, 40, 2, id="not final"),
        pytest.param(True, 101, 2, id="too large"),
        pytest.param(True, 60, 2, id="let go for another"),
    ],
)
def test_final_answers_are_kept_while_there_is_room(final: bool, size: int, times: int) -> None:
    computed: list[str] = []

    async def test(one: Desk) -> None:
        def work(_: Callable[[], bool]) -> Answer:
            computed.append("x")
            return plain("x" * size, final=final)

        await one.ask("x", work)
        await one.ask("y", lambda _: plain("y" * 50, final=True))
        await one.ask("x", work)

    at_desk(test)
    assert len(computed) == times


def test_more_questions_than_will_ever_be_answered_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(desk, "_MOST_WAITING", 2)
    slow = Slow()

    async def test(one: Desk) -> list[object]:
        asked = [asyncio.ensure_future(one.ask(name, slow.named(str(name)))) for name in range(4)]
        await asyncio.sleep(0.05)
        slow.go_on.set()
        return await asyncio.gather(*asked, return_exceptions=True)

    assert [type(answer) for answer in at_desk(test)] == [Answer, Answer, Answer, Busy]
