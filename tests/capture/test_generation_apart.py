"""Answers of generation's steps that do not join: where they stand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from recording_files import changed
from regard.reductions.block import Block

NAME = "model.layers.0.self_attn"
SENTENCE = (
    f"layer '{NAME}' has no answer to {regard.Pool(2, 2)!r} over all calls; "
    "answers that do not join stand apart, call by call.\n"
    f"    Ask the layers '{NAME}[0:5]', '{NAME}[5:6]'."
)


class Nothing(regard.Reduction):
    """A reduction that is not regard's own."""

    def start(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        return ()

    def update(self, block: Block) -> Any:
        return ()

    def finish(self, buffers: Any, shape: torch.Size) -> Any:
        return 0.0


def written(path: Path | None = None, *more: regard.Reduction) -> regard.Recording:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 11}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    keep = [regard.Entropy(), regard.Pool(2, 2), *more]
    with regard.observe(model, keep=keep, path=path) as seen:
        model.generate(torch.arange(3, 8)[None], max_new_tokens=2, min_new_tokens=2)
    return seen


def refusal(seen: regard.Recording) -> str:
    with pytest.raises(regard.RegardError) as caught:
        seen.layers[0].reduce(regard.Pool(2, 2))
    return str(caught.value)


def test_an_answer_that_stands_apart_says_where() -> None:
    assert refusal(written()) == SENTENCE


def test_a_file_says_where_answers_stand_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    written().save(path)
    loaded = regard.load(path)
    assert refusal(loaded) == SENTENCE
    [(reduction, names)] = loaded.layers[0].apart.items()
    assert reduction == regard.Pool(2, 2)
    assert [loaded.part([name]).layers[0].shape[-2:] for name in names] == [(5, 5), (1, 6)]


def test_a_recording_that_was_written_as_it_ran_says_where_answers_stand_apart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.safetensors"
    assert refusal(written(path)) == refusal(regard.load(path)) == SENTENCE


def test_a_layer_of_answers_is_saved_without_where_those_stand_that_no_file_can_hold(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.safetensors"
    seen = written(None, Nothing())
    assert len(seen.layers[0].apart) == 2
    seen.part([NAME]).save(path)
    assert list(regard.load(path).layers[0].apart) == [regard.Pool(2, 2)]


def test_a_file_of_before_it_said_where_answers_stand_apart_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    written().save(path)
    changed(path, lambda about: [layer.pop("apart") for layer in about["layers"]])
    assert not regard.load(path).layers[0].apart
