"""What the GPU's benchmark checks before it times anything holds in Triton's interpreter, too."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

# Kernels compute with infinities where nothing is stored; NumPy warns where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_kernel_is_right_in_bfloat16(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    correctness = importlib.import_module("benchmarks.gpu.correctness")
    size = importlib.import_module("benchmarks.gpu.size").Size(67, 16, 1, causal, num_heads=2)
    asked = correctness.TIMED | correctness.ALONE
    found = list(correctness.checked(size, asked, "cpu", "triton"))
    assert [(each.name, each.error) for each in found if not each.right] == []
    assert len(found) == len(asked)
