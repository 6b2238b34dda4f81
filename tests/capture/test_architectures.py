"""Real architectures: observe changes no bit of them and sees the weights of eager attention.

The oracle is the model itself with eager attention and ``output_attentions=True``: what each of its
attention modules returns beside its output, by the name of the module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard
from architectures import ARCHITECTURES, Architecture

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "with gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
RUNS = [
    pytest.param(name, kind, surroundings, id=f"{name}-{kind}-{surroundings}")
    for name, architecture in ARCHITECTURES.items()
    for kind in architecture.kinds
    for surroundings in SURROUNDINGS
]


def tensors(output: object) -> list[Tensor]:
    """Every tensor in what a model returns."""
    if isinstance(output, Tensor):
        return [output]
    items = output.values() if isinstance(output, dict) else output
    if not isinstance(items, tuple | list | type({}.values())):
        return []
    return [tensor for item in items for tensor in tensors(item)]


def are_weights(item: object) -> bool:
    """Whether something is (batch, num_heads, q_len, kv_len), or without heads their mean.

    Rows sum to 1, or to less where a sink has its share.
    """
    if not isinstance(item, Tensor) or item.ndim not in (3, 4) or not item.is_floating_point():
        return False
    sums = item.sum(-1)
    return bool((item >= 0).all() and (sums > 0).all() and (sums < 1 + 1e-4).all())


def weights_returned(model: nn.Module) -> dict[str, Tensor]:
    """Fills with what each attention module of an eager model returns, when the model has run."""
    by_module: dict[str, Tensor] = {}

    def hook(module: str) -> Callable[..., None]:
        def take(_module: nn.Module, _inputs: object, output: object) -> None:
            for item in output if isinstance(output, tuple) else ():
                if are_weights(item) and not any(item is earlier for earlier in by_module.values()):
                    by_module[module] = item

        return take

    for module_name, module in model.named_modules():
        module.register_forward_hook(hook(module_name))
    return by_module


@cache
def eager_weights(name: str) -> dict[str, Tensor]:
    """What each attention module of the eager model returns, and it is what the model returns."""
    architecture = ARCHITECTURES[name]
    model = architecture.build("eager")
    by_module = weights_returned(model)
    with torch.no_grad():
        output = model(**architecture.inputs, output_attentions=True)
    returned = [t for key, value in output.items() if "attentions" in key for t in tensors(value)]
    assert all(any(t is weights for weights in by_module.values()) for t in returned)
    return by_module


class Run(NamedTuple):
    plain: list[Tensor]
    observed: list[Tensor]
    seen: regard.Recording


@cache
def run(name: str, kind: str, surroundings: str) -> Run:
    architecture = ARCHITECTURES[name]
    model = architecture.build(kind)
    with SURROUNDINGS[surroundings]():
        plain = tensors(model(**architecture.inputs))
        with regard.observe(model) as seen:
            observed = tensors(model(**architecture.inputs))
    return Run(plain, observed, seen)


@pytest.mark.parametrize(("name", "kind", "surroundings"), RUNS)
def test_no_bit_of_the_output_changes(name: str, kind: str, surroundings: str) -> None:
    plain, observed, _ = run(name, kind, surroundings)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))


@pytest.mark.parametrize(("name", "kind", "surroundings"), RUNS)
def test_every_layer_has_its_name_and_the_weights_of_eager_attention(
    name: str, kind: str, surroundings: str
) -> None:
    seen, expected = run(name, kind, surroundings).seen, eager_weights(name)
    assert sorted(seen) == sorted(expected)
    for layer, weights in expected.items():
        dense = seen[layer].to_dense()
        dense = dense if weights.ndim == 4 else dense.mean(1)  # nn.MultiheadAttention gives that
        # 1e-5: two float32 models whose rounding differs from layer to layer
        torch.testing.assert_close(dense, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{kind}")
        for name, architecture in ARCHITECTURES.items()
        for kind in architecture.kinds
    ],
)
def test_the_repr_says_what_the_layers_did(architecture: str, kind: str) -> None:
    seen = run(architecture, kind, "no_grad").seen
    first, last = ARCHITECTURES[architecture].says
    assert repr(seen[0]).endswith(f"{first})")
    assert repr(seen[-1]).endswith(f"{last})")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{kind}")
        for name, architecture in ARCHITECTURES.items()
        for kind in architecture.kinds
    ],
)
def test_gradients_through_a_recording_are_those_of_eager_attention(name: str, kind: str) -> None:
    architecture = ARCHITECTURES[name]
    model, eager = architecture.build(kind), architecture.build("eager")
    expected = weights_returned(eager)
    eager(**architecture.inputs, output_attentions=True)
    with regard.observe(model) as seen:
        model(**architecture.inputs)
    generator = torch.Generator().manual_seed(0)
    losses = [torch.zeros(()), torch.zeros(())]
    for layer, weights in expected.items():
        dense = seen[layer].to_dense()
        dense = dense if weights.ndim == 4 else dense.mean(1)
        of = torch.randn(weights.shape, generator=generator)
        losses = [
            loss + (of * each).sum() for loss, each in zip(losses, (dense, weights), strict=True)
        ]
    for loss in losses:
        loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    for (parameter, own), (_, other) in zip(
        model.named_parameters(), eager.named_parameters(), strict=True
    ):
        found, wanted = (
            torch.zeros_like(each) if each.grad is None else each.grad for each in (own, other)
        )
        largest = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(
            found,
            wanted,
            atol=1e-5 * largest,
            rtol=0,
            msg=lambda text, at=parameter: f"{at}: {text}",
        )


def test_a_changed_bit_would_be_seen() -> None:
    plain = torch.ones(3)
    assert not torch.equal(plain, plain + 2**-22)


def test_every_architecture_that_the_goals_name_is_here() -> None:
    named = "Llama, Mistral, Gemma 2, Gemma 3, gpt-oss, Qwen 3, GPT-2, GPT-NeoX, Phi, OLMo, BERT"
    named += ", RoBERTa, DistilBERT, T5, BART, Whisper, ViT, CLIP, SigLIP, LLaVA"
    here = [name.split(",")[0] for name in ARCHITECTURES]
    assert set(named.split(", ")) <= set(here)
    assert all(isinstance(case, Architecture) and case.inputs for case in ARCHITECTURES.values())
