"""Every tensor that regard creates names its device, so that a default device moves none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "regard"
FACTORIES = frozenset(
    {"arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones"}
    | {"rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices"}
    | {"triu_indices", "zeros"}
)
# A parameter goes where the user's own parameters go.
OF_THE_USER = {"nn/positions.py": 1}


def without_device(code: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name)) if (
                name in FACTORIES
                and not any(keyword.arg in ("device", None) for keyword in node.keywords)
            ):
                yield node


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("torch.zeros(3)", 1),
        ("torch.zeros(3, device='cpu')", 0),
        ("torch.zeros(3, **options)", 0),
        ("torch.zeros_like(x)", 0),
        ("f(torch.arange(3), torch.tensor([1]))", 2),
    ],
)
def test_the_check_sees_a_missing_device(code: str, count: int) -> None:
    assert len(list(without_device(code))) == count


def test_every_tensor_names_its_device() -> None:
    # check sets the default device for all that it runs (diagnosis/inputs/isolation.py).
    found = {
        str(path.relative_to(SOURCE)): len(list(without_device(path.read_text())))
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "diagnosis"
    }
    assert {path for path, count in found.items() if count > OF_THE_USER.get(path, 0)} == set()
