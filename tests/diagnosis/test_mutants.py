"""Mutants of right attention: what breaks a law is never called right."""

import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attention_corpus import cases
from attention_mutants import Mutant, mutants_of
from regard import check

# Models of other packages, and code that has no line of attention of its own.
_LEFT_OUT = ("hf_", "torch_", "nn_", "regard", "notebook")
_COUNT = 560
_PARTS = 8

# These are called right and are no equivalent, or cannot be known to be one, by the reason.
ALLOWED = {
    "the parameter only begins elsewhere": {
        "head_weights_apart",
        "temperature_per_head",
        "cosine_attention",
    },
    "other slopes or the other sign of a bias by distance are somebody's choice": {
        "alibi",
        "shared_heads_with_slopes",
        "relative_distances",
        "relative_distances_sdpa",
    },
    "other angles, and another order of the turned pairs, are a choice": {"rotary"},
    "sizes that are equal on what is tried: head_dim and heads, queries and keys": {
        "output_einsum_then_sum",
        "rectangular_tril",
        "blocks_of_keys",
    },
    "a function of scores, which the laws of attention do not try": {
        "masked_softmax",
        "masked_softmax_lengths",
        "masked_softmax_given_mask",
        "given_scores",
    },
    "a layer or its bias is learned, so that its sign is free": {
        "output_einsum_then_sum",
        "biases_beside_matrices",
        "block_with_norms",
    },
    "masks of (batch, 1, queries, keys) are taken as well": {"source_mask_of_pairs"},
    "lengths of one axis keep their shape": {"d2l_style"},
}
# A shape, a dtype or a length is read from another tensor that has the same.
_SAME = {"q becomes k", "k becomes v", "v becomes q"}


def _chosen() -> list[Mutant]:
    right = [c for c in cases("right") if not c.path.stem.startswith(_LEFT_OUT)]
    every = [mutant for case in right for mutant in mutants_of(case)]
    random.Random(0).shuffle(every)
    return every[:_COUNT]


def is_allowed(mutant: Mutant) -> bool:
    """Return True if a mutant may be called right."""
    if any(mutant.case.path.stem in files for files in ALLOWED.values()):
        return True
    line = mutant.case.path.read_text().splitlines()[mutant.line - 1]
    reads = any(word in line for word in (".shape", ".size(", "type_as", ".dtype", ".device"))
    return mutant.change in _SAME and reads


class _TooLong(BaseException):
    pass


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """End code that never comes back."""

    def end(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict_of(mutant: Mutant, folder: Path) -> str:
    """Return the verdict on a mutant, or the name of what it raised."""
    torch.manual_seed(0)
    try:
        with limited(60):
            call = mutant.write(folder).call()
            return check(*call.args, **call.kwargs, expect=mutant.case.intention).verdict
    except (Exception, SystemExit, _TooLong) as error:  # noqa: BLE001  # a mutant may raise anything
        return type(error).__name__


@pytest.mark.full
def test_there_are_500_mutants() -> None:
    assert len(_chosen()) >= 500


@pytest.mark.full
def test_a_mutant_is_another_file(tmp_path: Path) -> None:
    mutant = _chosen()[0]
    assert mutant.write(tmp_path).path.read_text() != mutant.case.path.read_text()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(_PARTS))
def test_no_mutant_that_breaks_a_law_is_called_right(part: int, tmp_path: Path) -> None:
    verdicts = [(mutant, verdict_of(mutant, tmp_path)) for mutant in _chosen()[part::_PARTS]]
    right = [m.name for m, verdict in verdicts if verdict == "right" and not is_allowed(m)]
    assert right == []
    assert Counter(verdict for _, verdict in verdicts)["wrong"] > len(verdicts) // 3
