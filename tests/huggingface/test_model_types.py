"""lazy on every model type of transformers: eager's weights, and no other bit changes.

model_sweep compares each type. docs/model_types.md has the verdicts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from huggingface.model_sweep import (
    MEANINGS,
    prepare,
    verdict_of,
    verdicts_of_page,
    version_of_page,
)
from regard import AttentionMatrix
from regard.scores.given_scores import GivenScores
from regard.transformers import lazy_models
from regard.transformers.matrices import fused_matrix
from small_transformers import TYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        Version(transformers.__version__) < Version(version_of_page()),
        reason="the page is about a newer version of transformers",
    ),
]

SAMPLE = {
    "llama": "a decoder with grouped heads",
    "sam": "refused for the model inside",
    "gpt_oss": "sink biases, eager alone",
    "gemma2": "a softcap, eager alone",
    "deepseek_v3": "value_dim is not head_dim",
    "bert": "an encoder",
    "parakeet_encoder": "a kernel that is called with names",
    "t5": "an encoder and decoder with position biases",
    "bart": "cross attentions",
    "nllb-moe": "a decoder that builds its own causal mask",
    "vit": "pictures",
    "segformer": "pictures of which keys are pooled",
    "clip": "pictures and text",
    "wav2vec2": "sounds",
    "llava": "text of a model that sees",
    "qwen2_vl": "positions of three axes",
    "jamba": "attention beside a state space",
    "bloom": "dense attentions of its own",
    "falcon": "refused",
    "resnet": "no attentions",
}
"""Types of the ordinary tests, and why."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    prepare()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(each, marks=() if each in SAMPLE else pytest.mark.full, id=each)
        for each in TYPES
    ],
)
def test_lazy_attentions_are_those_of_eager_attention(model_type: str) -> None:
    verdict = verdict_of(model_type)
    assert verdict.verdict != "differs", verdict.why
    assert verdict.verdict == verdicts_of_page()[model_type], verdict.why


def _with_other_weights(*args: Any) -> Any:
    output, matrix = fused_matrix(*args)
    weights = matrix.to_dense() ** 1.001
    weights = weights / weights.sum(-1, keepdim=True)
    return output, AttentionMatrix(GivenScores(weights, are_weights=True))


def _without_rows(*args: Any) -> Any:
    output, matrix = fused_matrix(*args)
    return output, AttentionMatrix(GivenScores(matrix.to_dense() * 0, are_weights=True))


def _with_other_output(*args: Any) -> Any:
    output, matrix = fused_matrix(*args)
    return output * (1 + 2**-23), matrix


def _dense(*args: Any) -> Any:
    output, matrix = fused_matrix(*args)
    return output, matrix.to_dense()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (_with_other_weights, "does not give its output"),
        (_without_rows, "is off by"),
        (_with_other_output, "has other bits"),
    ],
)
def test_the_comparison_finds_faults(
    wrong: Callable[..., Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_models, "fused_matrix", wrong)
    verdict = verdict_of("llama")
    assert verdict.verdict == "differs"
    assert why in verdict.why


def test_dense_weights_are_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_models, "fused_matrix", _dense)
    assert verdict_of("llama").verdict == "dense"


@pytest.mark.skipif(
    transformers.__version__ != version_of_page(), reason="the page is of another transformers"
)
def test_the_page_has_every_type() -> None:
    assert sorted(verdicts_of_page()) == TYPES


def test_no_type_of_the_page_differs() -> None:
    verdicts = verdicts_of_page()
    assert set(verdicts.values()) <= MEANINGS.keys()
    assert [name for name, verdict in verdicts.items() if verdict == "differs"] == []


def test_at_least_500_types_were_built() -> None:
    verdicts = verdicts_of_page().values()
    assert sum(verdict != "not built" for verdict in verdicts) >= 500
