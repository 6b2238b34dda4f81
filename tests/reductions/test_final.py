"""Classes that backends recognise by their type cannot be subclassed."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest
import torch

import regard
from regard.backends.backend import Backend
from regard.backends.sweep import Sweep
from regard.scores.given_scores import GivenScores
from regard.scores.score_source import Scores

ROOTS = {"regard.Reduction": regard.Reduction, "Scores": Scores, "regard.Bias": regard.Bias,
         "regard.Mask": regard.Mask, "Backend": Backend}  # fmt: skip


def built_in(root: type) -> Iterator[type]:
    """The concrete classes of the package below an abstract class."""
    for each in root.__subclasses__():
        if each.__module__.startswith("regard.") and not inspect.isabstract(each):
            yield each
        yield from built_in(each)


@pytest.fixture(scope="module")
def all_modules() -> None:
    for module in pkgutil.walk_packages(regard.__path__, "regard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_every_concrete_class_of_the_package_is_final(root: type, all_modules: None) -> None:
    classes = list(built_in(root))
    assert len(classes) > 1
    assert [each for each in classes if not vars(each).get("__final__", False)] == []


@pytest.mark.parametrize(
    ("base", "name", "root"),
    [
        pytest.param(regard.Output, "an Output", "regard.Reduction", id="reduction"),
        pytest.param(GivenScores, "a GivenScores", "Scores", id="scores"),
        pytest.param(regard.ALiBi, "an ALiBi", "regard.Bias", id="bias"),
        pytest.param(regard.Causal, "a Causal", "regard.Mask", id="mask"),
        pytest.param(Sweep, "a Sweep", "Backend", id="backend"),
    ],
)
def test_a_final_class_refuses_a_subclass(base: type, name: str, root: str) -> None:
    with pytest.raises(TypeError) as raised:
        type("Mine", (base,), {})
    assert str(raised.value) == (
        f"Mine subclasses {base.__name__}, which is final; backends may ignore what Mine "
        f"overrides.\n    Subclass {root} instead, and call the methods of {name} from yours."
    )


def test_a_reduction_that_calls_a_final_one_is_answered_by_its_own_update() -> None:
    class Twice(regard.Reduction):
        def __init__(self, value: torch.Tensor) -> None:
            self.output = regard.Output(value)

        def start(
            self, shape: torch.Size, dtype: torch.dtype, device: torch.device
        ) -> tuple[torch.Tensor, ...]:
            return self.output.start(shape, dtype, device)

        def update(self, block: regard.Block) -> tuple[regard.Contribution, ...]:
            return tuple(part._replace(value=2 * part.value) for part in self.output.update(block))

        def finish(self, buffers: tuple[torch.Tensor, ...], shape: torch.Size) -> torch.Tensor:
            return self.output.finish(buffers, shape)

    x = torch.randn(3, 2)
    A = regard.attend(x, x)
    torch.testing.assert_close(A.reduce(Twice(x)), 2 * (A @ x))
