"""Shares of parts where answers alone were kept, or where the tokens say what is one text."""

import re
from typing import Any

import pytest
import torch

import regard

PARTS = {"question": (1, 3), "document": (3, 8)}


def matrix() -> regard.AttentionMatrix:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 2, 11, 5, generator=generator)
    return regard.attend(query, key)


def kept(*answers: regard.Reduction) -> regard.Recording:
    A = matrix()
    seen = regard.Recording({})
    seen.add("a", None, answers=[(each, A.reduce(each)) for each in answers], shape=A.shape)
    return seen


@pytest.mark.parametrize(
    ("seen", "have"),
    [
        pytest.param(kept(regard.Entropy()), "none", id="none"),
        pytest.param(
            kept(regard.Segments(PARTS)), "{'question': (1, 3), 'document': (3, 8)}", id="others"
        ),
        pytest.param(
            kept(regard.Segments({"end": (8, 11)}, {"all": (0, 11)})),
            "{'all': (0, 11)}, asked by {'end': (8, 11)}",
            id="others of the queries",
        ),
    ],
)
def test_parts_that_were_not_kept_are_told_those_that_were(
    seen: regard.Recording, have: str
) -> None:
    message = (
        "layer 'a' has no answer for {'start': (0, 4)}, and its query and key were not kept; the "
        f"parts that were kept are {have}.\n    Observe the model again with "
        'regard.Segments(parts) in keep=[...], or with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(seen, {"start": (0, 4)})


def test_without_sinks_query_and_key_are_needed() -> None:
    message = (
        "layer 'a' has answers only, Entropy(); its query and key were not kept.\n"
        '    Observe the model again with keep="qk".'
    )
    with pytest.raises(regard.RegardError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(kept(regard.Entropy()), PARTS, sinks=False)


def test_a_kept_answer_is_found_by_lists_and_by_queries_that_are_the_parts() -> None:
    seen = kept(regard.Segments(PARTS))
    lists: Any = {name: list(span) for name, span in PARTS.items()}
    assert torch.equal(
        regard.segment_shares(seen, lists, queries=PARTS).weights,
        regard.segment_shares(seen, PARTS).weights,
    )


def test_parts_of_another_text_are_no_parts_of_the_queries() -> None:
    tokens = [f"{place}" for place in range(11)]
    seen = regard.Recording({"a": matrix()}).with_tokens(tokens[::-1], tokens)
    message = (
        "queries is None; it must be given where query_tokens and key_tokens differ.\n"
        "    Give the parts of the queries, {name: (start, stop)}, counted from the first query "
        "that was kept."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        regard.segment_shares(seen, PARTS)
    assert regard.segment_shares(seen, PARTS, queries=PARTS).weights.shape == (1, 2, 2, 2)
