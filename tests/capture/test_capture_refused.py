"""A refused layer is nowhere in the recording, and its module, line and reason are."""

import inspect
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from models import Heads, noise


class Plain(Heads):
    """Attention as it should be."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return x + ((query @ key.mT * 0.3).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Thresholded(Heads):
    """Weights whose small ones are set to 0 after the softmax: rows do not sum to 1."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        weights = (query @ key.mT * 0.3).softmax(-1)
        weights = torch.where(weights < 0.1, 0.0, weights)
        return x + (weights @ value).transpose(1, 2).flatten(2)


class Unmet(Heads):
    """Weights that meet no value in a product."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        weights = (query @ key.mT).softmax(-1)
        return x + (weights[..., None] * value[:, :, None]).mean(-2).transpose(1, 2).flatten(2)


class InTurn(Heads):
    """Attention that is as it should be but in one of its calls."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self.refused, self.calls = refused, 0

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        scale = torch.nan if self.calls == self.refused else 1.0
        self.calls += 1
        return x + F.scaled_dot_product_attention(query, key, value, scale=scale).sum()


def refused(model: nn.Module, **options: Any) -> regard.Recording:
    """What is left in the recording of a model of which the module '1' is refused."""
    with (
        torch.no_grad(),
        pytest.raises(regard.RegardError, match="the attention of '1' cannot be kept"),
        regard.observe(model, strict=True, **options) as seen,
    ):
        model(noise(3, 7, 22))
    return seen


COUNTED = [Thresholded, Unmet]
KEEP: dict[str, Any] = {
    "query and key": "qk",
    "value": "qkv",
    "answers": [regard.Entropy(), regard.TopK(2)],
    "answers to one call each": [regard.Pool(2, 2)],
}


@pytest.mark.parametrize("layer", [Thresholded, Unmet])
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_a_refused_layer_is_not_in_the_recording(layer: Callable[[], nn.Module], keep: Any) -> None:
    seen = refused(nn.Sequential(Plain(), layer(), Plain()), keep=keep)
    assert list(seen.shapes) == ["0", "2"]
    assert list(seen.kept) == ([] if isinstance(keep, str) else ["0", "2"])


@pytest.mark.parametrize("layer", COUNTED)
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_the_layers_after_a_refused_one_keep_their_number(
    layer: Callable[[], nn.Module], keep: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.safetensors"
    seen = refused(nn.Sequential(Plain(), layer(), Plain()), keep=keep, path=path)
    for recording in (seen, regard.load(path)):
        assert list(recording.shapes) == ["0", "2"]
        numbers = [layer.model_index(index) for index, layer in enumerate(recording.layers)]
        assert numbers == [0, 2]


def test_where_all_was_refused_there_is_no_file(tmp_path: Path) -> None:
    refused(nn.Sequential(nn.Identity(), Thresholded()), path=tmp_path / "run.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_one_refused_call_of_a_module_leaves_none_of_its_calls(call: int, keep: Any) -> None:
    again = InTurn(call)
    seen = refused(nn.Sequential(Plain(), again, nn.Sequential(again, again)), keep=keep)
    assert list(seen.shapes) == ["0"]


@pytest.mark.parametrize("layer", COUNTED)
def test_a_refused_layer_still_counts_among_the_layers(layer: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(Plain(), layer(), Plain(), layer())
    assert list(refused(model, layers=[1, 2])) == ["2"]
    with torch.no_grad(), regard.observe(model, layers=[0, 2]) as seen:
        model(noise(3, 7, 22))
    assert list(seen) == ["0", "2"]


@pytest.mark.parametrize("layer", [Thresholded, Unmet])
@pytest.mark.parametrize("layers", [["0"], [0], ["0", "2"]], ids=str)
def test_a_layer_that_cannot_be_kept_and_is_not_selected_is_no_error(
    layer: Callable[[], nn.Module], layers: list[str | int]
) -> None:
    model = nn.Sequential(Plain(), layer(), Plain())
    with torch.no_grad(), regard.observe(model, layers=layers) as seen:
        model(noise(3, 7, 22))
    assert list(seen) == ["0", "2"][: len(layers)]


def test_one_warning_names_what_was_refused_and_the_rest_is_kept() -> None:
    model = nn.Sequential(Plain(), Thresholded(), Plain(), Unmet())
    with (
        pytest.warns(UserWarning, match="cannot be kept") as caught,
        torch.no_grad(),
        regard.observe(model) as seen,
    ):
        model(noise(3, 7, 22))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert list(seen) == ["0", "2"]
    lines, start = inspect.getsourcelines(Thresholded.forward)
    softmax = next(start + i for i, text in enumerate(lines) if "softmax" in text)
    first, second = seen.refused
    assert (first.module, first.line) == ("1", f"{__file__}:{softmax}")
    assert f"when they multiply the value ({__file__}:{softmax + 2}): a row sums to" in first.reason
    assert second.module == "3"
    assert second.reason.startswith(f"the weights of the softmax ({__file__}:")
    assert "met no value" in second.reason
    assert first.reason in str(caught[0].message)


def test_a_fused_call_that_is_refused_has_its_line() -> None:
    model = nn.Sequential(Plain(), InTurn(0))
    with (
        pytest.warns(UserWarning, match="cannot be kept"),
        torch.no_grad(),
        regard.observe(model) as seen,
    ):
        model(noise(3, 7, 22))
    lines, start = inspect.getsourcelines(InTurn.forward)
    call = next(start + i for i, text in enumerate(lines) if "scaled_dot" in text)
    assert [refusal.line for refusal in seen.refused] == [f"{__file__}:{call}"]


@pytest.mark.parametrize("as_it_ran", [False, True], ids=["saved", "written as it ran"])
@pytest.mark.filterwarnings("ignore:the attention of '1' cannot be kept")
def test_a_file_says_what_was_refused(as_it_ran: bool, tmp_path: Path) -> None:
    model, path = nn.Sequential(Plain(), Thresholded()), tmp_path / "run.safetensors"
    with torch.no_grad(), regard.observe(model, path=path if as_it_ran else None) as seen:
        model(noise(3, 7, 22))
    if not as_it_ran:
        seen.save(path)
    loaded = regard.load(path)
    loaded.save(tmp_path / "again.safetensors")
    again = regard.load(tmp_path / "again.safetensors")
    assert loaded.refused == again.refused == loaded.part([0]).refused == seen.refused
    (refusal,) = loaded.refused
    assert (refusal.module, refusal.line is None, refusal.reason == "") == ("1", False, False)


def test_a_recording_of_which_nothing_was_refused_says_so() -> None:
    model = nn.Sequential(Plain())
    with torch.no_grad(), regard.observe(model, strict=True) as seen:
        model(noise(3, 7, 22))
    assert seen.refused == []


class Growing(nn.Module):
    """Runs layers of attention, which may be added."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Plain()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


ADD: dict[str, tuple[Callable[[Growing], object], list[str]]] = {
    "one more": (
        lambda model: model.layers.append(Plain()),
        ["layers.0", "layers.0#2", "layers.1"],
    ),
    "another in its place": (
        lambda model: model.layers.__setitem__(0, Plain()),
        ["layers.0", "layers.0#2"],
    ),
}


@pytest.mark.parametrize(("add", "names"), ADD.values(), ids=ADD)
def test_a_module_that_is_added_inside_the_block_has_its_own_name(
    add: Callable[[Growing], object], names: list[str]
) -> None:
    model = Growing()
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(3, 7, 22))
        add(model)
        model(noise(3, 7, 22))
    assert list(seen) == names


def test_a_module_that_is_added_has_its_own_name_where_the_block_is_left_by_an_exception() -> None:
    model = Growing()
    with torch.no_grad(), suppress(KeyError), regard.observe(model) as seen:
        model.layers.append(Plain())
        model(noise(3, 7, 22))
        raise KeyError
    assert list(seen) == ["layers.0", "layers.1"]


class Makes(Heads):
    """Attention of a module that makes parts of itself while it runs."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always, self.ran = always, False

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        if self.always or not self.ran:
            self.last, self.ran = nn.Softmax(-1), True
        weights = self.last(query @ key.mT * 0.3)
        return x + (weights @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("always", [False, True], ids=["once", "at each call"])
def test_a_module_may_make_a_part_of_itself_while_it_runs(always: bool) -> None:
    model = nn.Sequential(Makes(always=always), Makes(always=always))
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(3, 7, 22))
    assert list(seen) == ["0", "1"]


class Hides(nn.Module):
    """Runs attention that is none of its registered modules."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Plain()]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


def test_a_module_outside_the_model_has_the_name_of_the_module_that_runs_it() -> None:
    model = nn.Sequential(Plain(), Hides())
    with torch.no_grad(), regard.observe(model) as seen:
        model(noise(3, 7, 22))
    assert list(seen) == ["0", "1"]


class Router(nn.Module):
    """A softmax of what a layer makes of its input, over the outputs of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(22, 5), nn.Linear(22, 5 * 22)

    def forward(self, x: Tensor) -> Tensor:
        return (self.route(x).softmax(-1)[..., None] * self.experts(x).unflatten(-1, (5, 22))).sum(
            -2
        )


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(22, 22), Router], ids=["linear", "router"])
def test_a_module_without_attention_may_be_added_inside_the_block(
    layer: Callable[[], nn.Module], mode: Callable[[], Any]
) -> None:
    model = Growing()
    with mode(), regard.observe(model) as seen:
        model.layers.append(layer())
        model(noise(3, 7, 22))
    assert list(seen) == ["layers.0"]


def test_a_block_that_is_left_by_an_exception_keeps_no_refused_layer() -> None:
    model = nn.Sequential(Plain(), Thresholded())
    with torch.no_grad(), suppress(KeyError), regard.observe(model) as seen:
        model(noise(3, 7, 22))
        raise KeyError
    assert list(seen) == ["0"]


def test_a_matrix_of_given_scores_is_recorded() -> None:
    class Given(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.AttentionMatrix.from_scores(x @ x.mT) @ x

    model, x = Given(), noise(2, 5, 6)
    with torch.no_grad(), regard.observe(model) as seen:
        model(x)
    assert torch.equal(seen[0].to_dense(), (x @ x.mT).softmax(-1))


class OfItself(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


def nested(model: nn.Module) -> object:
    parts = [torch.randn(5, 8), torch.randn(3, 8)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        return model(torch.nested.nested_tensor(parts))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        pytest.param(nested, "query is a nested tensor", id="nested"),
        pytest.param(
            lambda model: torch.func.jacfwd(lambda x: model(x).sum())(torch.randn(2, 5, 8)),
            "it ran in forward-mode differentiation",
            id="jacfwd",
        ),
        pytest.param(
            lambda model: torch.func.jvp(model, (torch.randn(2, 5, 8),), (torch.ones(2, 5, 8),)),
            "it ran in forward-mode differentiation",
            id="jvp",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_layers_by_hand_are_refused_by_the_way_they_ran(
    run: Callable[[nn.Module], object], reason: str
) -> None:
    model = nn.ModuleList([OfItself(), regard.nn.SelfAttention(8)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", regard.RefusedWarning)
        with regard.observe(model) as seen:
            run(model[0])
            model[1](torch.randn(1, 3, 8))
    assert list(seen) == ["1"]
    assert reason in seen.refused[0].reason
    assert [refusal.module for refusal in seen.refused] == ["0"]
