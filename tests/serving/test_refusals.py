"""Options of vLLM under which attention is not recorded; a stand-in takes the place of a worker."""

from types import SimpleNamespace
from typing import Any

import pytest

import regard.vllm
from regard.vllm.worker import regard_start


class Graphs:
    """The mode of CUDA graphs."""

    def __init__(self, *, full: bool) -> None:
        self.full, self.name = full, "FULL" if full else "PIECEWISE"

    def has_full_cudagraphs(self) -> bool:
        return self.full


def config(device: str = "cuda", **changed: Any) -> SimpleNamespace:
    options = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
        "cudagraph_mode": Graphs(full=False),
        "speculative_config": None,
        "async_scheduling": True,
        **changed,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**options),
        compilation_config=SimpleNamespace(**options),
        scheduler_config=SimpleNamespace(**options),
        speculative_config=options["speculative_config"],
        cache_config=SimpleNamespace(**options),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size is above 1; set it to 1"),
        (
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size is above 1; set it to 1",
        ),
        (
            {"pass_config": SimpleNamespace(fuse_rope_kvcache=True)},
            "its kernel rotates the keys itself; set fuse_rope_kvcache=False in its pass_config",
        ),
        (
            {"kv_sharing_fast_prefill": True},
            "layers skip tokens of the prompt; set kv_sharing_fast_prefill=False",
        ),
        ({"use_ubatching": True}, "batches run in parts; set enable_dbo=False"),
        (
            {"cudagraph_mode": Graphs(full=True)},
            "full CUDA graphs run the model without Python; set enforce_eager=True or "
            'compilation_config={"cudagraph_mode": "PIECEWISE"}',
        ),
        (
            {"speculative_config": object()},
            "speculation is scheduled ahead of its answers; set async_scheduling=False",
        ),
    ],
    ids=["data", "context", "rope", "shared keys", "parts", "graphs", "speculation"],
)
def test_an_option_is_refused_with_what_to_set(changed: dict[str, Any], text: str) -> None:
    worker = SimpleNamespace(vllm_config=config(**changed))
    assert regard_start(worker, "folder", None, None) == {"refused": text}


def test_breakable_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    refused = regard_start(SimpleNamespace(vllm_config=config()), "folder", None, None)["refused"]
    assert refused.endswith("never tried; set VLLM_USE_BREAKABLE_CUDAGRAPH=0")


def test_a_folder_on_another_machine_is_refused() -> None:
    worker = SimpleNamespace(vllm_config=config())
    text = "its workers see no folder /nowhere; they must run on the machine of the server"
    assert regard_start(worker, "/nowhere", None, None) == {"refused": text}


def test_something_that_is_no_llm_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^llm is a str; it must be a vllm\.LLM\.\n"):
        regard.vllm.record("some/model", ["A prompt"])
