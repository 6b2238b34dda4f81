"""What is compiled for one text serves the next: which kernels Triton asks for, none compiled."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import compiling
import regard

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

import triton


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The keys of all kernels that launches ask Triton for."""
    keys: set[str] = set()

    def ask(*, key: str, **_: Any) -> bool:
        keys.add(key)
        return True  # it is there already, so Triton compiles nothing

    monkeypatch.setattr(compiling, "_report", lambda _: None)
    # Of another device than those that other tests compile for: what is there is not asked for.
    monkeypatch.setattr(compiling._Compiler, "get_current_device", lambda _: 0)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", ask)
    monkeypatch.setattr("regard.backends.triton.triton_backend.unavailable_reason", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with compiling.only_compiled(90):
        yield keys


def ask_for_words(length: int) -> None:
    """The mass of words on words of a text, and of longer parts."""
    draw = random.Random(length)
    ends = [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + draw.choice((1, 2, 5, 11, 30, 150))))
    query, key = torch.empty(1, 8, length, 64), torch.empty(1, 2, length, 64)
    A = regard.attend(query.bfloat16(), key.bfloat16(), mask=regard.Causal())
    A.reduce(regard.Segments(list(pairwise(ends))), backend="triton")


def test_words_of_a_first_text_take_few_kernels(asked_for: set[str]) -> None:
    ask_for_words(611)
    assert len(asked_for) == 1 + 4 * 4 + 1  # rows, four widths by four, and what adds


def test_words_of_later_texts_take_no_kernels_of_their_own(asked_for: set[str]) -> None:
    for length in (611, 640):  # of a length that is a multiple of 16, and not
        ask_for_words(length)
    before = set(asked_for)
    for length in (1003, 768, 4000):
        ask_for_words(length)
    assert asked_for == before
