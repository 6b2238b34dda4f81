"""The Triton kernels follow the table of ``docs/numerics.md``."""

import pytest
import torch

from special_numbers import differing_on

pytest.importorskip("triton", reason="the kernels need triton: pip install 'regard[gpu]'")

# Kernels compute with infinities where nothing is stored; NumPy warns where a GPU does not.
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|All-NaN slice) encountered"),
]

ANSWERED = ("logsumexp", "entropy", "topk", "sum-keys", "sum-queries", "pool", "segments",
            "transposed-output")  # fmt: skip


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("mask", ["none", "causal", "documents", "keep"])
def test_the_kernels_follow_the_table(mask: str, sinks: bool, device: torch.device) -> None:
    # No kernel looks for NaN in an operand, so that operands are finite here.
    assert differing_on(device, ANSWERED, mask, "triton", sinks=sinks) == []
    # The pass over the rows finds one key by itself.
    assert differing_on(device, ["entropy", "topk-1"], mask, "triton", sinks=sinks) == []
