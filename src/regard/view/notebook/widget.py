"""The page in a notebook, asking the kernel for what it shows: for recordings of any size.

Answers are computed on threads beside the kernel's own, so that a cell can run meanwhile; questions
reach them between cells.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import anywidget
import traitlets

from regard.recording.recording import Recording
from regard.view.export.page_template import bundled
from regard.view.notebook.page_frame import HEIGHT, SANDBOX, framed, notebook_pages
from regard.view.notebook.widget_messages import reply
from regard.view.tiles.page_answers import Answers
from regard.view.tiles.page_questions import QUESTIONS, Threads

__all__ = ["PageWidget", "view"]

_MIB = 2**20
_MOST_WAITING = 1000


class PageWidget(anywidget.AnyWidget):  # pyright: ignore[reportUntypedBaseClass]
    """A widget that shows a recording.

    Args:
        seen: what was seen, each of its layers with query and key.
        title: what stands at the top of the page.

    Attributes:
        still: the page with small maps alone, for where no kernel answers; None where they would
            take too long.
    """

    _esm = bundled("widget.js")
    page = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    sandbox = traitlets.Unicode(SANDBOX).tag(sync=True)
    height = traitlets.Unicode(str(HEIGHT)).tag(sync=True)

    def __init__(self, seen: Recording, title: str) -> None:
        # First, for a widget that cannot be made is closed all the same.
        self._answers = Answers(seen, limit=128 * _MIB)
        self._threads = Threads()
        self._waiting: set[str] = set()
        live, self.still = notebook_pages(seen, title)
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
            asked = QUESTIONS.get(str(question.get("kind")), QUESTIONS["row"])
            self._threads.submit(asked, partial(self._answer, question, name))
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
        self._threads.close()
        self._answers.close()
        super().close()


def view(seen: Recording, title: str) -> dict[str, Any]:
    """Return the MIME bundle of a widget that shows a recording.

    Args:
        seen: what was seen.
        title: what stands at the top of the page.
    """
    widget: Any = PageWidget(seen, title)
    media = widget._repr_mimebundle_()[0]
    return media if widget.still is None else media | {"text/html": framed(widget.still, title)}
