"""Options of vLLM under which attention is not recorded; a stand-in takes the place of a worker."""

from types import SimpleNamespace
from typing import Any

import pytest

import regard.vllm


class Graphs:
    """The mode of CUDA graphs."""

    def __init__(self, *, full: bool) -> None:
        self.full = full

    def has_full_cudagraphs(self) -> bool:
        return self.full


def config(device: str = "cuda", kv_heads: int = 2, **changed: Any) -> SimpleNamespace:
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
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: kv_heads),
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is above 1; set it to 1"),
        ({"data_parallel_size": 2}, "data_parallel_size is above 1; set it to 1"),
        (
            {"decode_context_parallel_size": 2},
            "decode_context_parallel_size is above 1; set it to 1",
        ),
        (
            {"tensor_parallel_size": 4},
            "tensor_parallel_size is 4, more than the 2 key heads; set fewer",
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
    ids=["pipeline", "data", "context", "key heads", "parts", "graphs", "speculation"],
)
def test_an_option_is_refused_with_what_to_set(changed: dict[str, Any], text: str) -> None:
    worker: Any = regard.vllm.Recorder()
    worker.vllm_config = config(**changed)
    assert worker.regard_start("folder", None, None) == {"refused": text}


def test_something_that_is_no_llm_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^llm is a str; it must be a vllm\.LLM\.\n"):
        regard.vllm.record("some/model", ["A prompt"])
