"""The part of the recorder that runs inside the workers of vLLM.

vLLM mixes ``Recorder`` into its worker class and calls its methods by name. Each attention layer
passes its query and key to ``impl.forward``, also under torch.compile; this call is wrapped. The
tokens of a batch belong to several requests, in the order of the batch of vLLM's model runner.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from regard.text.tokens import Token, tokens_of

__all__ = ["Recorder"]


class Recorder:
    """A worker extension: ``LLM(model, worker_extension_cls="regard.vllm.Recorder")``.

    ``regard.vllm.record`` and ``regard.vllm.observe`` call its methods.
    """

    def regard_start(
        self, folder: str, layers: list[int] | None, heads: list[int] | None
    ) -> dict[str, Any]:
        """Begin to record, and return a description of the layers, or why nothing is recorded.

        Args:
            folder: where to write the query and key of each finished request.
            layers: places of the layers to record; None for all.
            heads: numbers of the heads to record, in the whole model; None for all.
        """
        worker: Any = self
        reason = _refusal(worker.vllm_config)
        watch = getattr(worker, "_regard_watch", None)
        if reason is None and not Path(folder).is_dir():
            reason = f"its workers see no folder {folder}; record on the machine that serves"
        elif reason is None and watch is not None:
            if watch.folder.is_dir():
                reason = (
                    "another recording is under way; leave its block first, or if its process was "
                    f"killed, delete {watch.folder}"
                )
            else:
                watch.stop()
        if reason is not None:
            return {"refused": reason}
        worker._regard_watch = _Watch(worker, Path(folder), layers, heads)
        return worker._regard_watch.about

    def regard_tokens(self, ids: list[int]) -> list[Token]:
        """Return the tokens of a request with their text, from the first worker."""
        worker: Any = self
        if worker.rank:
            return []
        config = worker.vllm_config.model_config
        return list(tokens_of(_of_vllm("tokenizers").cached_tokenizer_from_config(config), ids))

    def regard_stop(self) -> dict[str, Any]:
        """End the recording; return the file of each request, and what went wrong."""
        worker: Any = self
        watch, worker._regard_watch = worker._regard_watch, None
        return watch.stop()


class _Rows(NamedTuple):
    """The query and key of a few neighbouring tokens of a request, in one layer."""

    start: int
    query: Tensor
    key: Tensor


class _Watch:
    """A recording that is under way in one worker."""

    def __init__(
        self, worker: Any, folder: Path, layers: list[int] | None, heads: list[int] | None
    ) -> None:
        self.folder = folder
        self._worker = worker
        self._calls: list[tuple[int, Tensor, Tensor]] = []
        self._rows: dict[str, dict[int, list[_Rows]]] = defaultdict(lambda: defaultdict(list))
        self._files: dict[str, str] = {}
        self._total = 0  # tokens of the batch that runs
        self._error: str | None = None
        self._undo: list[Callable[[], None]] = []
        self.about: dict[str, Any] = {
            "model": str(worker.vllm_config.model_config.model),
            "rank": worker.rank,
            "layers": [],
            "refused_layers": [],
        }
        for place, (name, layer) in enumerate(_attention_layers(worker.vllm_config)):
            reason = _layer_refusal(layer)
            if reason is not None:
                self.about["refused_layers"].append((name, reason))
            elif layers is None or place in layers:
                own = _own_heads(layer, heads, worker.rank)
                self.about["layers"].append(_description(name, place, layer, own))
                self._wrap(layer.impl, len(self.about["layers"]) - 1, own)
        self._wrap_steps()

    def _wrap(self, impl: Any, number: int, heads: list[int] | None) -> None:
        forward = impl.forward

        def recorded(layer: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._total and self._error is None:
                few = query[: self._total], key[: self._total]  # the batch may be padded
                if heads is not None:
                    group = query.shape[1] // key.shape[1]
                    few = few[0][:, heads], few[1][:, [head // group for head in heads]]
                copies = [each.detach().to("cpu", copy=True) for each in few]
                self._calls.append((number, copies[0], copies[1]))
            return forward(layer, query, key, *args, **kwargs)

        impl.forward = recorded
        self._undo.append(lambda: delattr(impl, "forward"))

    def _wrap_steps(self) -> None:
        worker = self._worker
        run = worker.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._safely(self._finish, scheduled.finished_req_ids)
            self._calls.clear()
            self._total = scheduled.total_num_scheduled_tokens
            try:
                answer = run(scheduled, *args, **kwargs)
            finally:
                self._total = 0
            self._safely(self._split, scheduled)
            return answer

        worker.execute_model = execute_model
        self._undo.append(lambda: delattr(worker, "execute_model"))

    def _safely(self, act: Callable[[Any], None], argument: Any) -> None:
        """Act; an error ends the recording, and not the engine that serves other requests."""
        if self._error is None:
            try:
                act(argument)
            except Exception as error:  # noqa: BLE001 - vLLM must go on
                self._error = f"{type(error).__name__}: {error}"
                self._rows.clear()

    def _split(self, scheduled: Any) -> None:
        """Give the rows of all layers to the requests of the batch."""
        if not self._calls:
            return
        runner = self._worker.model_runner
        batch = getattr(runner, "input_batch", None) or runner.execute_model_state.input_batch
        cached = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts: dict[str, int] = scheduled.num_scheduled_tokens
        for number, query, key in self._calls:
            if len(query) != sum(counts.values()):
                raise RuntimeError("a batch ran in parts")
            first = 0
            for request in batch.req_ids[: len(counts)]:
                some = slice(first, first + counts[request])
                rows = _Rows(starts[request], query[some].clone(), key[some].clone())
                self._rows[request][number].append(rows)
                first = some.stop
        self._calls.clear()

    def _finish(self, requests: Any) -> None:
        """Write the requests that have ended to the disk, so that their memory is free again."""
        for request in requests:
            if request in self._rows:
                self._write(request, self._rows.pop(request))

    def _write(self, request: str, layers: dict[int, list[_Rows]]) -> None:
        tensors: dict[str, Tensor] = {}
        missing = 0
        for number, rows in layers.items():
            end = max(each.start + len(each.query) for each in rows)
            query, key = (
                part.new_zeros(end, *part.shape[1:]) for part in (rows[0].query, rows[0].key)
            )
            seen = torch.zeros(end, dtype=torch.bool, device="cpu")
            # Later rows replace earlier ones: tokens that were computed again, or guessed wrongly.
            for start, some_query, some_key in rows:
                at = slice(start, start + len(some_query))
                query[at], key[at], seen[at] = some_query, some_key, True
            missing = max(missing, int((~seen).sum()))
            tensors |= {f"{number}.query": query, f"{number}.key": key}
        path = self.folder / f"{len(self._files)}.rank{self._worker.rank}.safetensors"
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata={"missing": json.dumps(missing)})
        part.replace(path)
        self._files[request] = str(path)

    def stop(self) -> dict[str, Any]:
        for undo in self._undo:
            undo()
        self._safely(self._finish, list(self._rows))
        return {"files": self._files, "error": self._error}


def _attention_layers(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each attention layer, in their order in the model."""
    base = _of_vllm("model_executor.layers.attention_layer_base").AttentionLayerBase
    found = _of_vllm("config").get_layers_from_vllm_config(config, base)
    for name, layer in found.items():
        if not getattr(layer, "is_draft_layer", False):
            yield name, layer


def _of_vllm(module: str) -> Any:
    """Import a module of vLLM, which only a worker of vLLM has for certain."""
    return import_module(f"vllm.{module}")


def _own_heads(layer: Any, heads: list[int] | None, rank: int) -> list[int] | None:
    """Return which of a worker's heads to record, counted from its first one; None for all."""
    if heads is None:
        return None
    first = rank * layer.num_heads
    return [head - first for head in heads if first <= head < first + layer.num_heads]


def _description(name: str, place: int, layer: Any, heads: list[int] | None) -> dict[str, Any]:
    window = layer.sliding_window
    return {
        "name": name,
        "place": place,
        "num_heads": layer.num_heads,
        "kept": layer.num_heads if heads is None else len(heads),
        "scale": float(layer.impl.scale),
        "window": None if window is None else int(window),
        "softcap": float(getattr(layer.impl, "logits_soft_cap", None) or 0.0),
    }


def _refusal(config: Any) -> str | None:
    """Return why nothing can be recorded under this configuration, and which option to set."""
    parallel, compilation = config.parallel_config, config.compilation_config
    sizes = ("pipeline", "data", "decode_context", "prefill_context")
    for size in sizes:
        if getattr(parallel, f"{size}_parallel_size", 1) > 1:
            return f"{size}_parallel_size is above 1; set it to 1"
    ranks, kv_heads = parallel.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if ranks > kv_heads:
        return f"tensor_parallel_size is {ranks}, more than the {kv_heads} key heads; set fewer"
    if getattr(parallel, "use_ubatching", False):
        return "batches run in parts; set enable_dbo=False"
    mode = compilation.cudagraph_mode
    on_gpu = str(config.device_config.device_type) == "cuda"
    if on_gpu and mode is not None and mode.has_full_cudagraphs():
        return (
            "full CUDA graphs run the model without Python; set enforce_eager=True or "
            'compilation_config={"cudagraph_mode": "PIECEWISE"}'
        )
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        return "speculation is scheduled ahead of its answers; set async_scheduling=False"
    return None


def _layer_refusal(layer: Any) -> str | None:
    """Return why a layer cannot be recorded, or None."""
    if type(layer) is not _of_vllm("model_executor.layers.attention").Attention:
        return f"it is a {type(layer).__name__}, of which regard cannot record query and key"
    if layer.attn_type != "decoder":
        return f"its kind of attention is {layer.attn_type}; regard records decoders"
    facts = {
        "it shares the keys of another layer": layer.kv_sharing_target_layer_name is not None,
        "it has sinks": layer.has_sink,
        "it has ALiBi": getattr(layer.impl, "alibi_slopes", None) is not None,
        "its query is quantised": layer.query_quant is not None,
        "it reads a prefix in both directions": getattr(layer, "use_mm_prefix", False),
    }
    return next((reason for reason, holds in facts.items() if holds), None)
