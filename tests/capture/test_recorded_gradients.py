"""Gradients through a recording: which training they survive, and where none can flow."""

import copy
import gc
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from models import ids, noise

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "vocab_size": 53,
}


def llama(kind: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=kind))


def entropy(weights: Tensor) -> Tensor:
    return -(weights.clamp_min(1e-30).log() * weights).sum(-1)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def expected() -> dict[str, Tensor]:
    """Those of the same loss of eager attention."""
    model = llama("eager")
    output = model(input_ids=ids(), labels=ids(), output_attentions=True, use_cache=False)
    (output.loss + 0.1 * entropy(output.attentions[1]).mean()).backward()
    return gradients(model)


def regularised(
    prepare: Callable[[LlamaForCausalLM], object] = nn.Module.train,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Tensor]:
    model = llama().train()
    prepare(model)
    with around(), regard.observe(model) as seen:
        loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
    (loss + 0.1 * seen[1].entropy().mean()).backward()
    return gradients(model)


def check_close(found: dict[str, Tensor], wanted: dict[str, Tensor], atol: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=atol, rtol=1e-4)


def test_a_regulariser_trains_the_model() -> None:
    found, query = regularised(), "model.layers.1.self_attn.q_proj.weight"
    check_close(found, expected())
    model = llama().train()
    model(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
    assert not torch.allclose(gradients(model)[query], found[query], rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpoints_that_are_not_reentrant_change_nothing() -> None:
    def checkpointed(model: LlamaForCausalLM) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    check_close(regularised(checkpointed), regularised())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused() -> None:
    def checkpointed(model: LlamaForCausalLM) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()

    with pytest.raises(regard.RegardError, match="Checkpoint with use_reentrant=False"):
        regularised(checkpointed)


class Checkpointed(nn.Module):
    """Attention whose scores no variable holds, in a checkpoint."""

    def __init__(self, scores: Callable[[Tensor, Tensor], Tensor], *, reentrant: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scores, self.reentrant = scores, reentrant

    def attend(self, x: Tensor) -> Tensor:
        return self.scores(self.query(x), self.key(x)).softmax(-1) @ x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_reentrant_checkpoint_without_a_backward_pass_is_recorded(
    context: Callable[[], AbstractContextManager[object]],
) -> None:
    model = Checkpointed(lambda query, key: query @ key.mT, reentrant=True)
    with regard.observe(model) as seen, context():
        model(noise(2, 5, 8).requires_grad_())
    assert len(seen) == 1


VECTOR = torch.linspace(-1, 1, 16)


@pytest.mark.parametrize(
    "scores",
    [
        pytest.param(lambda query, key: query @ key.mT, id="product"),
        pytest.param(lambda query, key: torch.einsum("bqd,bkd->bqk", query, key), id="einsum"),
        pytest.param(lambda query, key: query @ (key * 2).mT / 3, id="scaled"),
        pytest.param(
            lambda query, key: (
                torch.cat(
                    [each.expand(-1, 5, 5, -1) for each in (query[:, :, None], key[:, None])], -1
                ).tanh()
                @ VECTOR
            ),
            id="pairs and a vector",
        ),
    ],
)
def test_gradients_reach_what_a_checkpoint_forgets(
    scores: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model, x = Checkpointed(scores, reentrant=False), noise(2, 5, 8)
    weights = scores(model.query(x), model.key(x)).softmax(-1)
    wanted = torch.autograd.grad(weights.square().sum(), [*model.parameters()])
    with regard.observe(model) as seen:
        model(x)
    given = torch.autograd.grad(seen[0].to_dense().square().sum(), [*model.parameters()])
    torch.testing.assert_close(given, wanted, atol=1e-6, rtol=1e-4)


def test_autocast_rounds_and_changes_nothing_else() -> None:
    def around() -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)

    check_close(regularised(around=around), expected(), atol=3e-2)


def test_one_model_is_distilled_into_another() -> None:
    teacher, student = llama(), llama()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(noise(*parameter.shape) * 0.05)
    with torch.no_grad(), regard.observe(teacher) as wanted:
        teacher(input_ids=ids())
    with regard.observe(student) as seen:
        student(input_ids=ids())
    sum(regard.kl(wanted[layer], seen[layer]).mean() for layer in seen).backward()
    eager = llama("eager")
    own = eager(input_ids=ids(), output_attentions=True).attentions
    losses = [
        (
            wanted[place].to_dense()
            * (wanted[place].to_dense().clamp_min(1e-30) / each.clamp_min(1e-30)).log()
        )
        .sum(-1)
        .mean()
        for place, each in enumerate(own)
    ]
    sum(losses).backward()
    found = gradients(student)
    for name, gradient in gradients(eager).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3)


def test_gradients_flow_inside_the_block_too() -> None:
    model = llama()
    with regard.observe(model) as seen:
        model(input_ids=ids())
        seen[0].entropy().sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_a_value_has_its_gradients() -> None:
    model = llama()
    with regard.observe(model, keep="qkv") as seen:
        model(input_ids=ids())
    (seen[0] @ seen.value(0)).sum().backward()
    assert model.model.layers[0].self_attn.v_proj.weight.grad is not None


def test_some_heads_and_queries_have_their_gradients() -> None:
    model = llama()
    with regard.observe(model, heads=[1], queries=slice(-2, None)) as seen:
        model(input_ids=ids())
    assert seen[0].shape == (2, 1, 2, 7)
    seen[0].entropy().sum().backward()
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    assert grad is not None
    assert grad[8:16].abs().sum() > 0
    assert grad[16:].abs().sum() == grad[:8].abs().sum() == 0


class Overwritten(nn.Module):
    """Attention whose query is changed in place when it has attended."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        query = self.project(x)
        output = scaled_dot_product_attention(query, query * 1, x)
        (query.data if self.hidden else query).mul_(2)
        return output


@pytest.mark.parametrize("hidden", [False, True], ids=["noticed by autograd", "hidden"])
def test_what_is_overwritten_later_has_its_numbers_and_gradients(hidden: bool) -> None:
    torch.manual_seed(0)
    model, x = Overwritten(hidden=hidden), noise(1, 2, 5, 8)
    with regard.observe(model) as seen:
        model(x)
    query = model.project(x)
    expected = regard.attend(query, query * 1)
    assert torch.equal(seen[0].to_dense(), expected.to_dense())
    found, wanted = (
        torch.autograd.grad(each.entropy().sum(), model.project.weight)[0]
        for each in (seen[0], expected)
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, nullcontext])
def test_without_gradients_there_is_no_graph(
    around: Callable[[], AbstractContextManager[object]],
) -> None:
    model = llama().requires_grad_(around is not nullcontext)
    with around(), regard.observe(model) as seen:
        model(input_ids=ids())
    assert not seen[0].entropy().requires_grad


def seen_step_by_step(model: nn.Module) -> regard.Recording:
    cache = None
    with regard.observe(model) as seen:
        for place in range(3):
            output = model(input_ids=ids()[:, place : place + 1], past_key_values=cache)
            cache = output.past_key_values
    return seen


def test_calls_that_are_put_together_have_no_graph_and_say_so() -> None:
    message = "no gradients flow through the recording of 'model.layers.0.self_attn', 'model"
    with pytest.warns(UserWarning, match=message):
        seen = seen_step_by_step(llama())
    assert seen[0].shape == (2, 4, 3, 3)
    assert not seen[0].entropy().requires_grad


def test_a_graph_is_saved_and_copied_as_numbers(tmp_path) -> None:
    model = llama()
    with regard.observe(model) as seen:
        model(input_ids=ids())
    seen.save(tmp_path / "run.safetensors")
    loaded = regard.load(tmp_path / "run.safetensors")
    assert torch.equal(loaded[1].to_dense(), seen[1].to_dense())
    assert not loaded[1].entropy().requires_grad


def test_copies_of_a_model_are_apart() -> None:
    model = llama()
    twin = copy.deepcopy(model)
    with regard.observe(model) as seen:
        model(input_ids=ids())
    seen[1].entropy().sum().backward()
    assert not gradients(twin)


@pytest.mark.full
@pytest.mark.parametrize("with_gradients", [False, True])
def test_many_recordings_leave_nothing(with_gradients: bool) -> None:
    model = llama()

    def once() -> None:
        with torch.set_grad_enabled(with_gradients), regard.observe(model) as seen:
            model(input_ids=ids())
        if with_gradients:
            seen[0].entropy().sum().backward()
            model.zero_grad()

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for _ in range(50):
        once()
    before = resident()
    for _ in range(500):
        once()
    assert resident() - before < 5e6


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def of_copy(x: Tensor) -> Tensor:
    return Reversed.apply(x)


@pytest.mark.parametrize("moment", ["scores", "scaled", "weights"])
@pytest.mark.parametrize("change", [of_copy, hooked], ids=["function", "hook"])
def test_gradients_that_a_model_changes_flow_through_the_recording(
    change: Callable[[Tensor], Tensor], moment: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).mT
            scores = change(scores) if moment == "scores" else scores
            scores = change(scores / 2) if moment == "scaled" else scores
            self.weights = scores.softmax(-1)
            self.weights = change(self.weights) if moment == "weights" else self.weights
            return self.weights @ x

    with regard.observe(model := Model()) as seen:
        model(torch.randn(2, 5, 8))
    factor = torch.linspace(0, 1, 5)
    expected, given = (
        torch.autograd.grad((each * factor).sum(), list(model.parameters()), retain_graph=True)
        for each in (model.weights, seen[0].to_dense())
    )
    torch.testing.assert_close(given, expected)
