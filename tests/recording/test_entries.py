"""One entry of a batch, by itself: its matrices and answers, with the text and the origin."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from models import MODELS
from regard.reductions.block import Block

ASKED = [regard.TopK(2), regard.Entropy(), regard.Sum(-2), regard.Pool(3, 2), regard.Diagonal(-1)]


def seen_by(name: str, **options: Any) -> regard.Recording:
    case = MODELS[name]
    model = case.model()
    with torch.no_grad(), regard.observe(model, **options) as seen:
        model(**case.inputs)
    return seen


@pytest.mark.parametrize("index", [0, 1, -1])
@pytest.mark.parametrize("name", ["bert padded", "llama, grouped heads", "t5 padded"])
def test_an_entry_has_the_weights_that_it_has_in_the_batch(name: str, index: int) -> None:
    seen = seen_by(name)
    one = seen.entry(index)
    assert list(one) == list(seen)
    for layer, matrix in seen.items():
        expected = matrix.to_dense()[index][None]
        # 1e-6: weights of at most 1 in float32, of blocks that begin elsewhere
        torch.testing.assert_close(one[layer].to_dense(), expected, atol=1e-6, rtol=0)


def test_the_answers_that_were_kept_are_those_of_the_entry() -> None:
    seen = seen_by("bert", keep=ASKED)
    for whole, one in zip(seen.layers, seen.entry(1).layers, strict=True):
        assert one.shape == (1, *whole.shape[1:])
        for reduction in ASKED:
            pair = whole.reduce(reduction), one.reduce(reduction)
            parts = zip(*pair, strict=True) if isinstance(pair[0], regard.Top) else [pair]
            assert all(torch.equal(all_of_them[1:2], own) for all_of_them, own in parts)


def test_tokens_origin_and_queries_stay(tmp_path: Path) -> None:
    seen = seen_by("bert", layers=[1], heads=[2], queries=slice(-3, None)).with_tokens(
        list("abcdefg")
    )
    seen.save(tmp_path / "run.safetensors")
    for recording in (seen, regard.load(tmp_path / "run.safetensors")):
        one = recording.entry(1)
        assert one.model == "BertModel"
        assert (one.query_tokens, one.key_tokens) == (seen.query_tokens, seen.key_tokens)
        [layer] = one.layers
        assert (layer.model_index(0), layer.head(0), layer.positions) == (1, 2, range(4, 7))


def test_an_entry_can_be_asked_what_a_batch_cannot() -> None:
    seen = seen_by("bert")
    with pytest.raises(ValueError, match=r"Take one of them, seen\.entry\(0\)\.$"):
        regard.segment_shares(seen, {"all": (0, 7)})
    assert regard.segment_shares(seen.entry(0), {"all": (0, 7)}).total() == pytest.approx(1)


class Whole(regard.Reduction):
    """The sum over everything, the batch included."""

    def start(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        return (torch.zeros(1, dtype=dtype, device=device),)

    def update(self, block: Block) -> Any:
        return (regard.Contribution((slice(0, 1),), block.weights.sum()[None]),)

    def finish(self, buffers: tuple[Tensor, ...], shape: torch.Size) -> Any:
        return buffers[0]

    def __repr__(self) -> str:
        return "Whole()"


@pytest.mark.parametrize(
    ("name", "options", "index", "error", "message"),
    [
        pytest.param(
            *("no batch", {}, 0, ValueError),
            "layer 'ImportedByName' has shape (2, 7, 7); it has no batch, whose entry could be "
            "taken.\n"
            "    It is one text already: ask it as it is.",
            id="no batch",
        ),
        pytest.param(
            *("bert", {"layers": [0]}, 2, IndexError),
            "index 2 is out of range for axis 0 of length 2.\n    Use -2 to 1.",
            id="no such entry",
        ),
        pytest.param(
            *("bert", {"layers": [0]}, "1", TypeError),
            "index is a str; it must be a whole number.\n    Pass an int, for example index=1.",
            id="no number",
        ),
        pytest.param(
            *("bert", {"layers": [0], "keep": [Whole()]}, 0, regard.RegardError),
            "layer 'encoder.layer.0.attention.self' has an answer to Whole() that is not one for "
            "each entry of the batch.\n    Observe the model again with one text.",
            id="an answer about all",
        ),
    ],
)
def test_what_is_no_entry_is_an_error(
    name: str, options: dict[str, Any], index: Any, error: type[Exception], message: str
) -> None:
    seen = seen_by(name, **options)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        seen.entry(index)
