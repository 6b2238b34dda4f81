"""Recordings of the requests that vLLM has answered."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open
from torch import Tensor

from regard.errors import RegardError, kind_text
from regard.masks import Causal, SlidingWindow
from regard.matrix.attention_matrix import AttentionMatrix, attend
from regard.recording.layers import Answers, InMemory, Layer, Origin, Refusal
from regard.recording.recording import Recording
from regard.recording.shard import Shard
from regard.text.tokens import Token
from regard.vllm.server import Server

__all__ = ["Requests", "observe", "record"]

_EXTENSION = "regard.vllm.Recorder"


def record(
    llm: Any,
    prompts: Any,
    sampling_params: Any = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> list[Recording]:
    """Let vLLM answer prompts, and return a recording of each prompt and its answer.

    Args:
        llm: ``vllm.LLM(model, worker_extension_cls="regard.vllm.Recorder")``, or a ``Server``.
        prompts: as for ``llm.generate``.
        sampling_params: as for ``llm.generate``, with ``n=1``; for a ``Server`` a dict.
        layers: places of the layers to keep; all when left out.
        heads: numbers of the heads to keep; all when left out.

    Returns:
        One recording for each prompt, in their order. Its matrices have shape
        (1, num_heads, tokens, tokens), and its tokens are those of prompt and answer. The last
        token of an answer is not read, so it is not among them.

    Raises:
        TypeError: llm is not a ``vllm.LLM`` and not a ``Server``.
        RegardError: vLLM was started with an option under which attention cannot be recorded; the
            message says which option to set.

    Example:
        A model needs a GPU or the CPU build of vLLM::

            llm = LLM("some/model", worker_extension_cls="regard.vllm.Recorder")
            first, second = regard.vllm.record(llm, ["One prompt", "Another"])
    """
    with observe(llm, layers=layers, heads=heads) as seen:
        outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    return [seen[output] for output in outputs]


@contextmanager
def observe(
    llm: Any, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> "Generator[Requests]":
    """Record what vLLM answers inside the block.

    Args:
        llm: ``vllm.LLM(model, worker_extension_cls="regard.vllm.Recorder")``, or a ``Server``.
        layers: places of the layers to keep; all when left out.
        heads: numbers of the heads to keep; all when left out.

    Yields:
        The recordings. After the block, ``seen[output]`` is that of one of vLLM's outputs.

    Raises:
        TypeError: llm is not a ``vllm.LLM`` and not a ``Server``.
        RegardError: as in ``record``.

    Example:
        A model needs a GPU or the CPU build of vLLM::

            with regard.vllm.observe(llm, layers=[0, 1]) as seen:
                outputs = llm.generate(prompts)
            seen[outputs[0]]
    """
    _check(llm)
    with TemporaryDirectory(prefix="regard-") as folder:
        places = [None if chosen is None else sorted(set(chosen)) for chosen in (layers, heads)]
        ranks: list[dict[str, Any]] = llm.collective_rpc("regard_start", args=(folder, *places))
        refused = next((rank["refused"] for rank in ranks if "refused" in rank), None)
        refused = refused or _nothing_kept(ranks, *places)
        requests = Requests(llm, ranks, places[1])
        try:
            if refused is None:
                yield requests
        finally:
            stopped: list[dict[str, Any]] = []
            if "refused" not in ranks[0]:
                stopped = llm.collective_rpc("regard_stop")
        if refused is not None:
            raise RegardError(f"vLLM's attention cannot be recorded: {refused}.")
        requests.read(stopped)


def _nothing_kept(
    ranks: Sequence[dict[str, Any]], layers: list[int] | None, heads: list[int] | None
) -> str | None:
    """Return why a layer or head that is asked for cannot be recorded, or None."""
    found = [rank["layers"] for rank in ranks]
    if not found[0] and ranks[0]["refused_layers"]:
        name, reason = ranks[0]["refused_layers"][0]
        return f"layer {name!r} is the first, and {reason}"
    missing = set(layers or ()) - {layer["place"] for layer in found[0]}
    if missing or not found[0]:
        return f"layers is {layers}, and no layer is at place {min(missing, default=0)}"
    for of_ranks in zip(*found, strict=True):
        total = sum(layer["num_heads"] for layer in of_ranks)
        if heads is not None and not all(0 <= head < total for head in heads):
            return f"heads is {heads}, and layer {of_ranks[0]['name']!r} has {total} heads"
    return None


class Requests(Mapping[str, Recording]):
    """The recordings of vLLM's requests, by request id or by vLLM's own output.

    They are in memory once the block of ``observe`` has ended.
    """

    def __init__(
        self, llm: Any, ranks: Sequence[dict[str, Any]], heads: Sequence[int] | None
    ) -> None:
        self._llm, self._heads = llm, heads
        self._ranks = sorted(ranks, key=lambda rank: rank.get("rank", 0))
        self._parts: dict[str, list[dict[str, Tensor]]] = {}
        self._missing: dict[str, int] = {}

    def read(self, stopped: Sequence[dict[str, Any]]) -> None:
        """Read the files of all workers.

        Raises:
            RegardError: a worker failed.
        """
        for rank in stopped:
            if rank["error"] is not None:
                raise RegardError(
                    f"a worker of vLLM stopped recording: {rank['error']}.\n"
                    "    The answers are complete. Free memory or disk space, or record fewer "
                    "layers= or heads=."
                )
        for internal in stopped[0]["files"]:
            parts: list[dict[str, Tensor]] = []
            # vLLM adds eight random letters to the id that it gives to the caller.
            request = internal.rpartition("-")[0] or internal
            for rank in stopped:
                opened: Any = safe_open(rank["files"][internal], "pt")
                with opened as file:
                    parts.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
                    self._missing[request] = json.loads(file.metadata()["missing"])
            self._parts[request] = parts

    def __getitem__(self, request: Any) -> Recording:
        """Return the recording of a request.

        Args:
            request: vLLM's ``RequestOutput``; or its id, without which tokens are not known, and
                tokens that were guessed and not taken may follow the answer.

        Raises:
            KeyError: it was not answered inside the block.
            RegardError: a part of its text did not run, or it has several answers.
        """
        answers = getattr(request, "outputs", None)
        name = str(request if answers is None else request.request_id)
        if answers is not None and len(answers) != 1:
            raise RegardError(
                f"request {name!r} has {len(answers)} answers; regard records one.\n"
                "    Set n=1 in its SamplingParams."
            )
        parts = self._parts[name]
        if self._missing[name]:
            raise RegardError(
                f"request {name!r} lacks {self._missing[name]} of its tokens: vLLM took their keys "
                "from its prefix cache.\n"
                "    Set skip_reading_prefix_cache=True in its SamplingParams, or start with "
                "enable_prefix_caching=False."
            )
        length = next(iter(parts[0].values())).shape[0]
        tokens = None
        if answers is not None:
            ids = [*request.prompt_token_ids, *answers[0].token_ids]
            length = min(length, len(ids) - 1)
            told = self._llm.collective_rpc("regard_tokens", args=(ids,))[0]
            tokens = [Token(*token) for token in told[:length]]
        title = Path(self._ranks[0]["model"]).name
        whole = Recording.merge(
            self._recording(name, rank, part, length) for rank, part in enumerate(parts)
        )
        recording = Recording({}, model=title, query_tokens=tokens)
        recording.refused = whole.refused
        for layer in whole.layers:
            recording.put(layer)
        return recording

    def _recording(
        self, request: str, rank: int, tensors: Mapping[str, Tensor], length: int
    ) -> Recording:
        """Return the heads that one worker has recorded of a request."""
        about, ranks = self._ranks[rank], len(self._ranks)
        recording, without = Recording({}), list[str]()
        for number, layer in enumerate(about["layers"]):
            first = rank * layer["num_heads"]
            own = range(first, first + layer["num_heads"])
            heads = tuple(head for head in own if self._heads is None or head in self._heads)
            if not heads:
                without.append(layer["name"])
                continue
            query, key = (tensors[f"{number}.{role}"][:length] for role in ("query", "key"))
            matrix, kept = _matrix(layer, query, key), Answers()
            is_whole = self._heads is None and ranks == 1
            origin = Origin(layer["place"], None if is_whole else heads)
            recording.put(Layer(layer["name"], matrix.shape, InMemory(matrix), kept, origin))
        place = rank, ranks
        recording.shard = Shard(request, rank, heads=place, without=tuple(without))
        reasons = about["refused_layers"]
        recording.refused += [Refusal(name, None, reason) for name, reason in reasons]
        return recording

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of the requests."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._parts)


def _matrix(about: dict[str, Any], query: Tensor, key: Tensor) -> AttentionMatrix:
    """Return a layer's matrix from its query and key, (tokens, heads, head_dim)."""
    window = about["window"]
    return attend(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        scale=about["scale"],
        mask=Causal() if window is None else SlidingWindow(window - 1, 0),
        softcap=about["softcap"] or None,
    )


def _check(llm: Any) -> None:
    if isinstance(llm, Server):
        return  # whose workers say themselves whether they know the extension
    config = getattr(getattr(llm, "llm_engine", None), "vllm_config", None)
    if config is None or not hasattr(llm, "collective_rpc"):
        raise TypeError(
            f"llm is {kind_text(llm)}; it must be a vllm.LLM.\n"
            f'    Pass LLM("some/model", worker_extension_cls="{_EXTENSION}"), or '
            'regard.vllm.Server("http://localhost:8000").'
        )
    extension = config.parallel_config.worker_extension_cls
    if extension not in (_EXTENSION, "regard.vllm.worker.Recorder"):
        raise RegardError(
            "vLLM was started without regard's worker extension.\n"
            f'    Start it with LLM(..., worker_extension_cls="{_EXTENSION}").'
        )
