"""Tokens that a model reads before anybody knows whether they stay: those of assisted decoding.

transformers' ``generate`` lets an assistant, or the prompt itself, guess what comes next, reads all
guesses in one call, and takes those back that the model would not have written. Its own variables
say how many it has guessed, and, once it has gone on, how many stay.

Anybody else who takes keys back may have read what he took back, as one who weighs two answers.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import cast

from torch import Tensor

from regard.tracing.tracer import Operation, apart

__all__ = ["Guesses", "frame_of"]

_READS = "_assisted_decoding"
_MAKES = "get_candidates"


class Guesses:
    """How many of the queries that run are guesses, and how many of these stay.

    Example:
        >>> from regard.capture.speculative_tokens import Guesses
        >>> Guesses().among(5)
        0
    """

    def __init__(self) -> None:
        self._guessed: Tensor | None = None  # what was read last, with its guesses
        self._written = 0  # how many tokens of it are no guesses
        self._waiting: list[Callable[[int], None]] = []

    def among(self, q_len: int) -> int:
        """How many of the queries of the attention that runs now are guesses, the last ones.

        Args:
            q_len: how many queries there are. Only those of the text that is written can be
                guesses: a tower for pictures has others.
        """
        frame = frame_of(_READS, _MAKES, "generate")  # the others: what an assistant reads
        if frame is None or frame.f_code.co_name != _READS:
            return 0
        local = frame.f_locals
        written, guessed = local.get("input_ids"), local.get("candidate_input_ids")
        if not isinstance(written, Tensor) or not isinstance(guessed, Tensor):
            return 0
        if q_len != _tokens_of(local.get("model_inputs")):
            return 0
        if guessed is not self._guessed:
            # Of guesses that were left alone, as by an exception, nobody will ever know.
            self._guessed, self._written = guessed, written.shape[-1]
            self._waiting.clear()
        return guessed.shape[-1] - written.shape[-1]

    def are_made_here(self) -> bool:
        """Whether a model guesses with its own first layers, as LayerSkip does; it reads again."""
        making, reading = frame_of(_MAKES), frame_of(_READS)
        if making is None or reading is None:
            return False
        maker = getattr(making.f_locals.get("self"), "assistant_model", None)
        return maker is reading.f_locals.get("self")

    def when_known(self, tell: Callable[[int], None]) -> None:
        """Let somebody be told how many of the guesses of the call that runs stay."""
        self._waiting.append(tell)

    def hear(self, operation: Operation) -> None:
        """Tell how many guesses stay as soon as it is known.

        Args:
            operation: that has just run.
        """
        written = operation.local(_READS, "input_ids") if self._waiting else None
        if not isinstance(written, Tensor) or written.shape[-1] == self._written:
            return
        waiting, self._waiting = self._waiting, []
        # Behind the guesses that stay there is one token more, which the model wrote itself.
        count = written.shape[-1] - self._written - 1
        with apart():
            for tell in waiting:
                tell(count)


def frame_of(*functions: str) -> FrameType | None:
    """The innermost frame of one of these functions of transformers that runs this, if any.

    Example:
        >>> from regard.capture.speculative_tokens import frame_of
        >>> frame_of("generate") is None
        True
    """
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name in functions:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] == "transformers":
                return frame
        frame = frame.f_back
    return None


def _tokens_of(inputs: object) -> int | None:
    """How many tokens a model is given to read."""
    if not isinstance(inputs, dict):
        return None
    for name in ("decoder_input_ids", "inputs_embeds", "input_ids"):
        given = cast("dict[str, object]", inputs).get(name)
        if isinstance(given, Tensor):
            return given.shape[1]
    return None
