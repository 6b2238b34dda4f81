"""Recordings of finished requests, from the files that the workers of vLLM have written."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from regard.errors import RegardError
from regard.masks import Causal, SlidingWindow
from regard.matrix.attention_matrix import attend
from regard.recording.layers import Answers, InMemory, Layer, Origin, Refusal
from regard.recording.recording import Recording
from regard.scores.position_bias import ALiBi
from regard.text.tokens import tokens_of


class Requests:
    """The recordings of vLLM's requests, by vLLM's own output.

    They are in memory once the block of ``observe`` has ended.

    Args:
        tokenizer: that of the model.
        ranks: what each worker returned as it began to record.
        layers: the places of the layers that were chosen; None for all.
        heads: the heads that are kept; None for all.

    Raises:
        RegardError: nothing is recorded, or a layer or head that was chosen is missing.
    """

    def __init__(
        self,
        tokenizer: Any,
        ranks: Sequence[dict[str, Any]],
        layers: list[int] | None,
        heads: list[int] | None,
    ) -> None:
        reason = next((rank["refused"] for rank in ranks if "refused" in rank), None)
        reason = reason or _missing(ranks, layers, heads)
        if reason is not None:
            raise RegardError(f"vLLM's attention cannot be recorded: {reason}.")
        self._tokenizer, self._ranks, self._heads = tokenizer, ranks, heads
        # By request: the tensors of each worker, and the number of tokens that they lack.
        self._parts: dict[str, tuple[list[dict[str, Tensor]], int]] = {}

    def read(self, stopped: Sequence[dict[str, Any]]) -> None:
        """Read the files of all workers, in the order of ``ranks``.

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
        for internal in dict.fromkeys(name for rank in stopped for name in rank["files"]):
            # A stage without a chosen layer has no file.
            files = [rank["files"].get(internal, (None, 0)) for rank in stopped]
            parts = [{} if path is None else load_file(path) for path, _ in files]
            # vLLM adds eight random letters to the id that it gives to the caller.
            request = internal.rpartition("-")[0] or internal
            self._parts[request] = parts, max(missing for _, missing in files)

    def __getitem__(self, request: Any) -> Recording:
        """Return the recording of an answer.

        Args:
            request: vLLM's ``RequestOutput``; or ``(output, 1)`` for its second answer.

        Raises:
            KeyError: it was not answered inside the block.
            RegardError: a part of its text did not run, or it has several answers and no number.
        """
        has_number = isinstance(request, tuple)
        output, at = cast(tuple[Any, int | None], request if has_number else (request, None))
        answers = output.outputs
        if at is None and len(answers) > 1:
            raise RegardError(
                f"request {output.request_id!r} has {len(answers)} answers.\n"
                f"    Choose one: seen[output, 0] to seen[output, {len(answers) - 1}]."
            )
        name = str(output.request_id) if len(answers) == 1 else f"{at}_{output.request_id}"
        return self._recording(name, [*output.prompt_token_ids, *answers[at or 0].token_ids])

    def __len__(self) -> int:
        """Return the number of requests, in which each answer counts."""
        return len(self._parts)

    def _recording(self, request: str, ids: list[int]) -> Recording:
        """Return the recording of a request, whose last token did not run."""
        parts, missing = self._parts[request]
        queries = [part[name] for part in parts for name in part if name.endswith("query")]
        length = len(ids) - 1
        missing += max(0, length - min(map(len, queries)))
        if missing:
            raise RegardError(
                f"request {request!r} lacks {missing} of its tokens: vLLM took their keys from its "
                "prefix cache, or ran them without Python.\n"
                "    Start vLLM with enable_prefix_caching=False and enforce_eager=True."
            )
        has_encoder = any(layer["cross"] for rank in self._ranks for layer in rank["layers"])
        tokens = None if has_encoder else tokens_of(self._tokenizer, ids)[:length]
        recording = Recording({}, model=Path(self._ranks[0]["model"]).name, query_tokens=tokens)
        for stage in sorted({rank["stage"] for rank in self._ranks}):
            places = [at for at, rank in enumerate(self._ranks) if rank["stage"] == stage]
            places.sort(key=lambda at: self._ranks[at]["heads_rank"])
            of_heads = [self._ranks[at] for at in places]
            for layers in zip(*(rank["layers"] for rank in of_heads), strict=True):
                recording.put(self._layer(layers, [parts[at] for at in places], length))
            refused = of_heads[0]["refused_layers"]
            recording.refused += [Refusal(name, None, reason) for name, reason in refused]
        return recording

    def _layer(
        self, layers: Sequence[dict[str, Any]], parts: Sequence[dict[str, Tensor]], length: int
    ) -> Layer:
        """Return a layer, of which each worker of its stage has recorded some heads."""
        about = layers[0]
        names = f"{about['place']}.query", f"{about['keys']}.key"
        query, key = (
            (parts[0][name] if len(parts) == 1 else torch.cat([part[name] for part in parts], 1))
            for name in names
        )
        query, key = query[:length].transpose(0, 1), key.transpose(0, 1)
        key = key if about["cross"] else key[:, :length]
        if self._heads is not None:
            group = about["num_heads"] * len(layers) // key.shape[0]
            key = key[[head // group for head in self._heads]]
        slopes, sinks = (self._by_head(layers, name) for name in ("slopes", "sinks"))
        window = about["window"]
        causal = Causal() if window is None else SlidingWindow(window - 1, 0)
        matrix = attend(
            query[None],
            key[None],
            scale=about["scale"],
            mask=None if about["cross"] else causal,
            softcap=about["softcap"] or None,
            bias=None if slopes is None else ALiBi(slopes),
            sink_bias=None if sinks is None else sinks.to(query.dtype),
        )
        origin = Origin(about["place"], None if self._heads is None else tuple(self._heads))
        return Layer(about["name"], matrix.shape, InMemory(matrix), Answers(), origin)

    def _by_head(self, layers: Sequence[dict[str, Any]], name: str) -> Tensor | None:
        """Return a number for each kept head, from the lists of all workers of a stage."""
        if layers[0][name] is None:
            return None
        numbers = torch.tensor([each for layer in layers for each in layer[name]], device="cpu")
        return numbers if self._heads is None else numbers[list(self._heads)]


def _missing(
    ranks: Sequence[dict[str, Any]], layers: list[int] | None, heads: list[int] | None
) -> str | None:
    """Return why a layer or head that is named cannot be recorded, or None."""
    recorded = [layer for rank in ranks for layer in rank["layers"]]
    refused = [tuple(layer) for rank in ranks for layer in rank["refused_layers"]]
    if not recorded and refused:
        return f"layer {refused[0][0]!r} is the first, and {refused[0][1]}"
    missing = set(layers or ()) - {layer["place"] for layer in recorded}
    if missing or not recorded:
        return f"layers is {layers}, and no layer is at place {min(missing, default=0)}"
    split = 1 + max(rank["heads_rank"] for rank in ranks)
    for layer in recorded:
        total = layer["num_heads"] * split
        if heads is not None and not all(0 <= head < total for head in heads):
            return f"heads is {heads}, and layer {layer['name']!r} has {total} heads"
    return None
