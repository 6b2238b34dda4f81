"""The questions of the page, for a server or a notebook: msgspec checks what each must have."""

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec
import torch
from msgspec.structs import asdict
from torch import Tensor

from regard.view.tiles import protocol
from regard.view.tiles.head_tiles import Place, WrongQuestionError
from regard.view.tiles.packing import memory
from regard.view.tiles.page_answers import Answers, Wanted


def answered(
    kind: str, parameters: Mapping[str, Any], answers: Answers, wanted: Wanted
) -> tuple[dict[str, Any], list[bytes]]:
    """Return the answer to a question of some kind: what JSON can hold, and numbers as bytes.

    Raises:
        RegardError: it asks for what is not there, which its first line says.
        Gone: it is not wanted any more.
    """
    given = {name: _value(name, each) for name, each in parameters.items()}
    try:
        asked: Any = msgspec.convert(given, cast(Any, protocol.QUESTIONS[kind][0]), strict=False)
    except msgspec.ValidationError as error:
        raise WrongQuestionError(_said(error)) from error
    how = asdict(asked)
    if isinstance(asked, protocol.OfHead):
        how["which"] = protocol.OfHead(how.pop("layer"), how.pop("head"), how.pop("hidden"))
    if isinstance(asked, protocol.Tile):
        how["place"] = Place(how.pop("level"), how.pop("row"), how.pop("column"))
    found: Any = getattr(answers, kind)(**how, wanted=wanted)
    parts: Any = asdict(found) if isinstance(found, msgspec.Struct) else found
    if isinstance(parts, Tensor):
        parts = {"values": parts}
    arrays = {name: each for name, each in parts.items() if isinstance(each, Tensor)}
    content = {name: each for name, each in parts.items() if name not in arrays}
    return msgspec.to_builtins(content), [_as_sent(each) for each in arrays.values()]


def _as_sent(numbers: Tensor) -> bytes:
    """Return little-endian float32; of a mask, a byte each."""
    return memory(numbers.to(torch.uint8) if numbers.dtype == torch.bool else numbers.float())


def _value(name: str, given: Any) -> Any:
    """Return a parameter of an address as what it says; lists are JSON there."""
    if name not in ("queries", "keys") or not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given


def _said(error: msgspec.ValidationError) -> str:
    """Return what is wrong with a request, in ASCII."""
    text = str(error).replace("`", "'")
    return f"the question cannot be read: {ascii(text)[1:-1][:200]}."
