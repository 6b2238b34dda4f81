"""The part of the recorder that runs inside the workers of vLLM.

``register`` gives ``regard_start`` and ``regard_stop`` to the workers, and ``collective_rpc`` calls
them by name. Each attention layer passes its query and key to ``impl.forward``, also under
torch.compile; this call is wrapped while a recording is under way. The tokens of a batch belong to
several requests, in the order of the batch of vLLM's model runner.
"""

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from regard.vllm.attention_layers import find_layers, refusal_of


def regard_start(
    worker: Any,
    folder: str,
    layers: list[int] | None,
    heads: list[int] | None,
    request: str | None = None,
) -> dict[str, Any]:
    """Begin to record, and return a description of the layers, or why nothing is recorded.

    Args:
        worker: a worker of vLLM.
        folder: where to write the query and key of each finished request.
        layers: places of the layers to record; None for all.
        heads: numbers of the heads to record, in the whole model; None for all.
        request: the id of the request to record; None for all requests.
    """
    reason = refusal_of(worker.vllm_config)
    if reason is None and not Path(folder).is_dir():
        reason = f"its workers see no folder {folder}; they must run on the machine of the server"
    if reason is not None:
        return {"refused": reason}
    taps = worker._regard_taps = getattr(worker, "_regard_taps", None) or _Taps(worker)
    if request in taps.watches:
        return {"refused": "another recording is under way; leave its block first"}
    split = worker.vllm_config.parallel_config.tensor_parallel_size
    about = {
        "model": str(worker.vllm_config.model_config.model),
        "rank": worker.rank,
        "stage": worker.rank // split,
        "heads_rank": worker.rank % split,
        "layers": [each for each in taps.layers if layers is None or each["place"] in layers],
        "refused_layers": taps.refused,
    }
    taps.watches[request] = _Watch(Path(folder), about, heads, request)
    return about


def regard_stop(worker: Any, request: str | None = None) -> dict[str, Any]:
    """End a recording; return the file of each request, and the error that ended it, if any."""
    taps = worker._regard_taps
    watch = taps.watches.pop(request)
    if not taps.watches:
        taps.wrapped.close()
        worker._regard_taps = None
    watch.finish(list(watch.rows))
    return {"files": watch.files, "error": watch.error}


def register() -> None:
    """Give these methods to the workers of vLLM; each process of vLLM calls this as it starts."""
    try:
        base = import_module("vllm.v1.worker.worker_base").WorkerBase
    except (ImportError, AttributeError) as error:
        # Everybody who has vLLM and regard runs this: vLLM must start nevertheless.
        logging.getLogger(__name__).warning("regard cannot record this vLLM: %s", error)
        return
    base.regard_start, base.regard_stop = regard_start, regard_stop


class _Watch:
    """One recording: of all requests, or of one."""

    def __init__(
        self, folder: Path, about: dict[str, Any], heads: list[int] | None, request: str | None
    ) -> None:
        # By request: the file, and the number of tokens without rows.
        self.files: dict[str, tuple[str, int]] = {}
        self.error: str | None = None
        # By request and name of the tensor: the position of the first row, and the rows.
        self.rows: dict[str, dict[str, list[tuple[int, Tensor]]]] = {}
        self._folder, self._rank, self._request = folder, about["rank"], request
        # The heads of this worker to keep of each query, None for all; keys are kept whole.
        self.tensors: dict[str, list[int] | None] = {}
        for layer in about["layers"]:
            first = about["heads_rank"] * layer["num_heads"]
            of_rank = range(first, first + layer["num_heads"])
            kept = None if heads is None else [head - first for head in heads if head in of_rank]
            self.tensors[f"{layer['place']}.query"] = kept
            self.tensors[f"{layer['keys']}.key"] = None

    def wants(self, request: str) -> bool:
        """Return True if this recording is of a request: ``0_`` and its id and eight letters."""
        name = request.rpartition("-")[0].rpartition("_")[2]
        return self.error is None and self._request in (None, name)

    def add(self, request: str, name: str, start: int, rows: Tensor) -> None:
        """Keep the rows of a tensor whose first one is that of the token at ``start``."""
        if name in self.tensors and self.wants(request):
            heads = self.tensors[name]
            chosen = rows.clone() if heads is None else rows[:, heads]
            self.rows.setdefault(request, defaultdict(list))[name].append((start, chosen))

    def finish(self, requests: Iterable[str]) -> None:
        """Write requests that have ended to the disk, so that their memory is free again."""
        for request in requests:
            if request in self.rows and self.error is None:
                try:
                    self._write(request, self.rows.pop(request))
                except Exception as error:  # noqa: BLE001 - vLLM must go on
                    self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the recording with an error; other recordings and the engine go on."""
        self.error = f"{type(error).__name__}: {error}"
        self.rows.clear()

    def _write(self, request: str, tensors: dict[str, list[tuple[int, Tensor]]]) -> None:
        missing, joined = 0, dict[str, Tensor]()
        for name, pieces in tensors.items():
            end = max(start + len(rows) for start, rows in pieces)
            first = pieces[0][1]
            joined[name] = first.new_empty(end, *first.shape[1:])
            seen = torch.zeros(end, dtype=torch.bool, device="cpu")
            # Later rows replace earlier ones: tokens that were computed again, or guessed wrongly.
            # A row that is never written is missing, and its request is refused.
            for start, rows in pieces:
                at = slice(start, start + len(rows))
                joined[name][at], seen[at] = rows, True
            missing = max(missing, int((~seen).sum()))
        path = self._folder / f"{len(self.files)}.rank{self._rank}.safetensors"
        save_file(joined, path)
        self.files[request] = str(path), missing


class _Taps:
    """The wrapped calls of one worker, which copy queries and keys for all its recordings."""

    def __init__(self, worker: Any) -> None:
        self.watches: dict[str | None, _Watch] = {}
        self.layers, modules, self.refused = find_layers(worker)
        self._of_encoder = {f"{each['keys']}.key" for each in self.layers if each["cross"]}
        self._worker = worker
        self._calls: list[tuple[str, Tensor]] = []
        self._total = 0  # tokens of the batch that runs, if one of its requests is recorded
        self._names: Collection[str] = ()
        self._error: Exception | None = None
        self.wrapped = ExitStack()
        for place, module in modules.items():
            self._wrap(module.impl, place)
        self._wrap_steps()

    def _wrap(self, impl: Any, number: int) -> None:
        forward = impl.forward

        def recorded(layer: Any, query: Tensor, key: Any, *args: Any, **kwargs: Any) -> Any:
            if self._total and self._error is None:
                try:
                    for name, tensor in ((f"{number}.query", query), (f"{number}.key", key)):
                        # The keys of an encoder come once, in the first step of a decoder.
                        if name in self._names and tensor is not None:
                            end = None if name in self._of_encoder else self._total  # no padding
                            self._calls.append((name, tensor[:end].detach().to("cpu", copy=True)))
                except Exception as error:  # noqa: BLE001 - vLLM must go on
                    self._error = error
            return forward(layer, query, key, *args, **kwargs)

        impl.forward = recorded
        self.wrapped.callback(delattr, impl, "forward")

    def _wrap_steps(self) -> None:
        worker, run = self._worker, self._worker.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            for watch in self.watches.values():
                watch.finish(scheduled.finished_req_ids)
            counts: dict[str, int] = scheduled.num_scheduled_tokens
            recording = [watch for watch in self.watches.values() if any(map(watch.wants, counts))]
            self._calls.clear()
            self._error = None
            self._names = {name for watch in recording for name in watch.tensors}
            self._total = scheduled.total_num_scheduled_tokens if recording else 0
            try:
                answer = run(scheduled, *args, **kwargs)
            finally:
                self._total = 0
            try:
                if self._error is not None:
                    raise self._error
                self._split(scheduled, recording)
            except Exception as error:  # noqa: BLE001 - vLLM must go on
                for watch in recording:
                    watch.fail(error)
            return answer

        worker.execute_model = execute_model
        self.wrapped.callback(delattr, worker, "execute_model")

    def _split(self, scheduled: Any, recording: list[_Watch]) -> None:
        """Give the rows of all layers to the recordings of their requests."""
        if not self._calls:
            return
        runner = self._worker.model_runner
        batch = getattr(runner, "input_batch", None) or runner.execute_model_state.input_batch
        cached = scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        requests = batch.req_ids[: len(scheduled.num_scheduled_tokens)]
        tokens = [(each, starts[each], scheduled.num_scheduled_tokens[each]) for each in requests]
        new = [each for each in requests if self._of_encoder and starts[each] == 0]
        sounds = {each: runner.requests[each].mm_features or () for each in new}
        encoded = [(each, 0, sum(s.mm_position.length for s in sounds[each])) for each in new]
        for name, rows in self._calls:
            parts, first = encoded if name in self._of_encoder else tokens, 0
            if len(rows) != sum(count for _, _, count in parts):
                raise RuntimeError("a batch ran in parts")
            for request, start, count in parts:
                for watch in recording:
                    watch.add(request, name, start, rows[first : first + count])
                first += count
        self._calls.clear()
