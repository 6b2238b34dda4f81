"""Recordings of a model that vLLM serves, compared with transformers' eager attention."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
import regard.vllm

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

PROMPTS = [
    "w1 w2 w3 w1 w2",
    "w9 w8 w7 w6 w5 w4 w3 w2",
    " ".join(f"w{number % 100}" for number in range(90)),
]
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def start(folder: Path, load_llm: Start) -> Iterator[Start]:
    """Start vLLM with some options; only one runs at a time, and it is kept for the next test."""
    running: dict[str, Any] = {}

    def start(**options: Any) -> Any:
        if repr(options) not in running:
            running.clear()
            gc.collect()
            running[repr(options)] = load_llm(folder, **options)
        return running[repr(options)]

    yield start
    running.clear()
    gc.collect()


def params(**options: Any) -> Any:
    return vllm.SamplingParams(
        **{"max_tokens": 12, "temperature": 0, "ignore_eos": True, **options}
    )


def ids_of(output: Any) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


@pytest.fixture(scope="module")
def eager(folder: Path) -> Callable[[list[int]], tuple[torch.Tensor, ...]]:
    """The weights of each layer for prompt and answer, (1, num_heads, tokens, tokens)."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()

    def weights(ids: list[int]) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return model(torch.tensor([ids[:-1]]), output_attentions=True).attentions

    return weights


OPTIONS = {
    "eager": {},
    "chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 4, "enable_chunked_prefill": True},
    "preempted": {"num_gpu_blocks_override": 6, "block_size": 32, "max_model_len": 128},
    "compiled": {"enforce_eager": False},
    "tensor-parallel": {"tensor_parallel_size": 2},
    "more workers than key heads": {"tensor_parallel_size": 4},
    # vLLM 0.32 for CPUs fails to run two stages with enforce_eager.
    "pipeline-parallel": {"pipeline_parallel_size": 2, "enforce_eager": False},
    "speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
        },
        "async_scheduling": False,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_equal_eager_attention_and_answers_do_not_change(
    options: dict[str, Any], start: Start, eager: Any
) -> None:
    llm = start(**options)
    before = llm.generate(PROMPTS, params(), use_tqdm=False)
    with regard.vllm.observe(llm) as seen:
        outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    after = llm.generate(PROMPTS, params(), use_tqdm=False)
    assert list(map(ids_of, before)) == list(map(ids_of, outputs)) == list(map(ids_of, after))
    assert len(seen) == len(PROMPTS)
    for output in outputs:
        recording = seen[output]
        assert len(recording) == 3
        for matrix, weights in zip(recording.values(), eager(ids_of(output)), strict=True):
            torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)


def test_a_recording_has_the_tokens_of_prompt_and_answer(start: Start) -> None:
    llm = start()
    (seen,) = regard.vllm.record(llm, PROMPTS[:1], params(max_tokens=3))
    assert seen.model == Path(llm.llm_engine.vllm_config.model_config.model).name
    assert "".join(token.text for token in seen.query_tokens or ()).startswith("w1 w2 w3 w1 w2 ")
    assert seen[0].shape == (1, 4, 7, 7)


def test_layers_and_heads_can_be_chosen(start: Start) -> None:
    llm = start()
    (whole,) = regard.vllm.record(llm, PROMPTS[:1], params())
    (part,) = regard.vllm.record(llm, PROMPTS[:1], params(), layers=[2], heads=[3, 0])
    (layer,) = part.layers
    assert (layer.model_index(0), layer.head(0), layer.head(1)) == (2, 0, 3)
    assert torch.equal(part[0].to_dense(), whole[2].to_dense()[:, [0, 3]])


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"heads": [4]}, r"heads is \[4\], and layer 'model.layers.0.*' has 4 heads"),
        ({"layers": [3]}, r"layers is \[3\], and no layer is at place 3"),
    ],
)
def test_what_is_not_there_is_refused(
    chosen: dict[str, list[int]], text: str, start: Start
) -> None:
    with pytest.raises(regard.RegardError, match=text):
        regard.vllm.record(start(), PROMPTS[:1], params(), **chosen)
    regard.vllm.record(start(), PROMPTS[:1], params())  # and the next one is recorded


def test_each_of_several_answers_has_a_recording(start: Start, eager: Any) -> None:
    llm, several = start(), params(n=3, temperature=1.0, seed=5)
    before = llm.generate(PROMPTS, several, use_tqdm=False)
    with regard.vllm.observe(llm) as seen:
        outputs = llm.generate(PROMPTS, several, use_tqdm=False)
    assert len(seen) == 3 * len(PROMPTS)
    for plain, output in zip(before, outputs, strict=True):
        for at, answer in enumerate(output.outputs):
            assert plain.outputs[at].token_ids == answer.token_ids
            weights = eager([*output.prompt_token_ids, *answer.token_ids])
            for matrix, expected in zip(seen[output, at].values(), weights, strict=True):
                torch.testing.assert_close(matrix.to_dense(), expected, rtol=0, atol=1e-4)
    with pytest.raises(regard.RegardError, match=r"has 3 answers\.\n.*seen\[output, 2\]"):
        seen[outputs[0]]
    assert len(regard.vllm.record(llm, PROMPTS[:1], several)) == 3


def test_a_second_recording_at_once_is_refused(start: Start) -> None:
    llm = start()
    with regard.vllm.observe(llm) as seen:
        with (
            pytest.raises(regard.RegardError, match="another recording is under way"),
            regard.vllm.observe(llm),
        ):
            pass
        (output,) = llm.generate(PROMPTS[:1], params(), use_tqdm=False)
    assert len(seen[output]) == 3


def test_requests_are_written_to_the_disk_as_they_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = start()
    with regard.vllm.observe(llm):
        llm.generate(PROMPTS, params(), use_tqdm=False)
        llm.generate(PROMPTS[:1], params(), use_tqdm=False)
        # The last one may still be written while the next step runs.
        assert len(list(tmp_path.glob("*/*.safetensors"))) in (len(PROMPTS), len(PROMPTS) + 1)
    # An engine that starts here has sockets of its own beside.
    assert list(tmp_path.glob("regard-*")) == []


def test_a_disk_error_ends_the_recording_and_not_the_answers(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    llm = start()
    outputs: list[Any] = []

    def watch() -> None:
        with regard.vllm.observe(llm):
            (folder,) = tmp_path.glob("regard-*")
            folder.rmdir()
            for _ in range(2):
                outputs[:] = llm.generate(PROMPTS, params(), use_tqdm=False)

    with pytest.raises(regard.RegardError, match="a worker of vLLM stopped recording"):
        watch()
    assert [len(ids_of(output)) for output in outputs] == [17, 20, 102]
    assert len(regard.vllm.record(llm, PROMPTS[:1], params())) == 1


def test_a_prompt_in_the_prefix_cache_is_recorded(start: Start, eager: Any) -> None:
    llm = start(block_size=32)
    long = PROMPTS[2:]
    (before,) = llm.generate(long, params(), use_tqdm=False)
    (seen,) = regard.vllm.record(llm, long, params())
    for matrix, weights in zip(seen.values(), eager(ids_of(before)), strict=True):
        torch.testing.assert_close(matrix.to_dense(), weights, rtol=0, atol=1e-4)


def test_a_request_that_reads_the_prefix_cache_nevertheless_is_refused(start: Start) -> None:
    """The request goes to the engine below the recorder, which could not keep it from reading."""
    llm = start(block_size=32)
    llm.generate(PROMPTS[2:], params(), use_tqdm=False)
    with regard.vllm.observe(llm) as seen:
        del llm.llm_engine.add_request
        (output,) = llm.generate(PROMPTS[2:], params(), use_tqdm=False)
        llm.llm_engine.add_request = llm.llm_engine.add_request
    with pytest.raises(regard.RegardError, match=r"lacks 64 of its tokens: .*prefix cache"):
        seen[output]


def test_a_salt_of_its_own_does_not_keep_answers_from_reading_each_others_keys(
    start: Start,
) -> None:
    """So regard lets a recorded request read nothing from the cache, instead of salting it."""
    llm, several = start(block_size=32), params(n=2, temperature=1.0, seed=5)
    prompt = {"prompt": PROMPTS[2], "cache_salt": "of this request"}
    with regard.vllm.observe(llm) as seen:
        del llm.llm_engine.add_request
        (output,) = llm.generate([prompt], several, use_tqdm=False)
        llm.llm_engine.add_request = llm.llm_engine.add_request
    with pytest.raises(regard.RegardError, match=r"lacks 64 of its tokens: .*prefix cache"):
        print(seen[output, 0], seen[output, 1])
    assert len(regard.vllm.record(llm, [prompt], several)) == 2


def test_workers_without_the_plugin_are_refused(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    llm = start(block_size=64)
    with pytest.raises(regard.RegardError, match=r"did not load regard's plugin\.\n.*VLLM_PLUGINS"):
        regard.vllm.record(llm, PROMPTS[:1])
