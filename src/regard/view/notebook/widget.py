"""The page in a notebook, asking the kernel for what it shows: for recordings of any size.

A question of the page is ``{"id": 7, "kind": "row", "layer": 0, "head": 3, ...}``. Its answer has
the same id, what has a structure as JSON, and numbers as bytes beside it; or ``error``, one
sentence. Answers are computed on threads beside the kernel's own, so that a cell can run meanwhile;
questions reach them between cells.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anywidget
import traitlets

from regard.errors import RegardError
from regard.recording.recording import Recording
from regard.view.export.page_file import means_page
from regard.view.export.page_template import bundled, filled_template
from regard.view.notebook.page_frame import HEIGHT, SANDBOX, framed
from regard.view.tiles.manifest import live_layers, manifest
from regard.view.tiles.page_answers import Answers, Gone, Wanted
from regard.view.tiles.page_opening import blind_opening
from regard.view.tiles.page_questions import answered
from regard.view.tiles.protocol import QUESTIONS

_MIB = 2**20
_MOST_WAITING = 1000
_MOST_THREADS = 40  # as Starlette has
_QUICK = ("row", "tile", "steps")  # have threads of their own: the page may ask for many columns
_MOST_WEIGHTS = 2**28  # whose means take a few seconds


class PageWidget(anywidget.AnyWidget):  # pyright: ignore[reportUntypedBaseClass]
    """A widget that shows a recording.

    Attributes:
        still: the page with means of blocks alone, for where no kernel answers; None where they
            would take too long.
    """

    _esm = bundled("widget.js")
    page = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    sandbox = traitlets.Unicode(SANDBOX).tag(sync=True)
    height = traitlets.Unicode(str(HEIGHT)).tag(sync=True)

    def __init__(self, seen: Recording, title: str) -> None:
        # First, for a widget that cannot be made is closed all the same.
        seen = seen.apart()
        self._answers = Answers(seen, limit=128 * _MIB)
        self._quick, self._long = (
            ThreadPoolExecutor(count, "regard") for count in (len(_QUICK), _MOST_THREADS)
        )
        self._waiting: set[str] = set()
        live, self.still = _pages(seen, title)
        super().__init__(page=live, title=title)
        self.on_msg(self.take)

    def take(self, _: object, question: Mapping[str, Any], __: object) -> None:
        """Handle a message of the page: a question, its cancellation, or a ping."""
        name = str(question.get("id"))
        if question.get("kind") == "listens":
            self.send({"id": question.get("id")})
        elif question.get("kind") == "forget":
            self._waiting.discard(name)
        elif len(self._waiting) < _MOST_WAITING:
            self._waiting.add(name)
            threads = self._quick if question.get("kind") in _QUICK else self._long
            threads.submit(self._answer, question, name)
        else:
            self.send({"id": question.get("id"), "error": "too much is asked at once."})

    def _answer(self, question: Mapping[str, Any], name: str) -> None:
        answer = reply(self._answers, question, lambda: name in self._waiting)
        if answer is not None and name in self._waiting:
            self._waiting.discard(name)
            self.send(*answer)

    def close(self) -> None:
        """Stop the background work, and close the widget."""
        self._waiting.clear()
        for threads in (self._quick, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
        self._answers.close()
        super().close()


def view(seen: Recording, title: str) -> dict[str, Any]:
    """Return the MIME bundle of a widget that shows a recording."""
    widget: Any = PageWidget(seen, title)
    media = widget._repr_mimebundle_()[0]
    return media if widget.still is None else media | {"text/html": framed(widget.still, title)}


def reply(
    answers: Answers, question: Mapping[str, Any], wanted: Wanted
) -> tuple[dict[str, Any], list[bytes]] | None:
    """Return the answer to one message, or None if it was cancelled."""
    name, kind = {"id": question.get("id")}, question.get("kind")
    if not isinstance(kind, str) or kind not in QUESTIONS:
        return {**name, "error": f"kind is {kind!r}; nothing of that kind is known."}, []
    parameters = {str(key): question[key] for key in question.keys() - {"id", "kind"}}
    try:
        content, arrays = answered(kind, parameters, answers, wanted)
    except Gone:
        return None
    except RegardError as error:
        return {**name, "error": str(error).partition("\n")[0]}, []
    except Exception as error:  # noqa: BLE001 - as of a server: the page waits for it
        said = f"regard could not answer: {type(error).__name__}: {error}"
        return {**name, "error": said}, []
    return {**name, **content}, arrays


def _pages(seen: Recording, title: str) -> tuple[str, str | None]:
    """Return the page that asks the kernel, and the one of block means, if they are fast."""
    layers, still = live_layers(seen), None
    if sum(seen[layer.name].shape.numel() for layer in layers) <= _MOST_WEIGHTS:
        still, summarised = means_page(seen, title=title)
        for layer, means in zip(layers, summarised, strict=True):
            layer.overview = means.overview
    first = manifest(seen, layers, title=title, opened=blind_opening(seen))
    return "".join(filled_template(first)), still
