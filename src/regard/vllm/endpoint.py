"""Recordings of requests to ``vllm serve``: a route of its own, and a field for vLLM's routes.

vLLM loads it if VLLM_PLUGINS names regard. Each request needs the token of REGARD_TOKEN.
"""

import asyncio
import hmac
import os
import re
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from regard.errors import RegardError
from regard.vllm.finished_requests import Requests

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Numbers = Annotated[list[_Number], msgspec.Meta(min_length=1)]


class _Chosen(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    layers: _Numbers | None = None
    heads: _Numbers | None = None


class _Asked(_Chosen):
    """The body of a request to /regard/record, in JSON."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | _Numbers
    settings: dict[str, Any] = {}


class _Field(_Chosen):
    """The part of ``vllm_xargs`` that is regard's, without its prefix ``regard_``."""

    regard: str


class Endpoint:
    """An endpoint plugin of vLLM.

    ``/regard/record`` answers a prompt as ``/v1/completions`` does, and replies with the recording,
    a safetensors file. vLLM's own routes reply as always; if ``vllm_xargs`` has the token as
    ``regard``, the recording is kept in REGARD_FOLDER, under the id of the reply.
    """

    name = "regard"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None
        self._generate: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route; vLLM calls this as it builds its application."""
        app.add_route("/regard/record", self._reply, methods=["POST"])

    async def init_state(self, engine_client: Any, state: object, args: object) -> None:
        """Keep the engine, and see the requests of vLLM's routes; vLLM calls this once it runs."""
        self._engine, self._generate = engine_client, engine_client.generate
        engine_client.generate = self._answer

    def _answer(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        """Answer a request as the engine does, and record it if it has the field."""
        extra: dict[str, Any] = getattr(sampling_params, "extra_args", None) or {}
        field = {name: extra[name] for name in extra if name.startswith("regard")}
        if not field:
            return self._generate(prompt, sampling_params, request_id, **options)
        params = sampling_params.clone()
        params.extra_args = {name: extra[name] for name in extra if name not in field} or None
        return self._keep(field, request_id, prompt, params, **options)

    async def _keep(
        self, field: dict[str, Any], name: str, prompt: Any, params: Any, **options: Any
    ) -> AsyncGenerator[Any]:
        """Yield the outputs of a request, and keep a recording of each answer in REGARD_FOLDER.

        Raises:
            ValueError: the field is invalid, has another token, or its file has no place.
        """
        try:
            named = {name.removeprefix("regard_"): value for name, value in field.items()}
            asked = msgspec.convert(named, _Field)
        except msgspec.ValidationError as error:
            raise ValueError(f"vllm_xargs is invalid: {error}.") from None
        if not _is_token(asked.regard):
            raise ValueError(_OTHER_TOKEN)
        kept = os.environ.get("REGARD_FOLDER")
        if not kept:
            raise ValueError(
                "the server keeps no recordings.\n    Start it with REGARD_FOLDER, or send the "
                "prompt to /regard/record, which replies with the recording."
            )
        path = Path(kept) / f"{name}.safetensors"
        if not re.fullmatch(r"[\w.-]+", name) or any(Path(kept).glob(f"{name}.*")):
            raise ValueError(f"{name!r} names no new file.\n    Choose another X-Request-Id.")
        with TemporaryDirectory(prefix="regard-") as folder:
            recorded = self._record(folder, path, asked, prompt, params, **options)
            async with aclosing(recorded) as outputs:
                async for output in outputs:
                    yield output

    async def _reply(self, request: Request) -> Response:
        """Reply with a recording, or with one sentence."""
        try:
            if not _is_token(request.headers.get("authorization", "").removeprefix("Bearer ")):
                return _error(401, _OTHER_TOKEN)
            asked = msgspec.json.decode(await request.body(), type=_Asked)
            if asked.settings.get("n", 1) != 1:
                raise ValueError(
                    "n must be 1.\n    Send a request for each answer, with its own seed."
                )
            params = import_module("vllm.sampling_params").SamplingParams(**asked.settings)
            is_text = isinstance(asked.prompt, str)
            prompt: Any = asked.prompt if is_text else {"prompt_token_ids": asked.prompt}
            with ExitStack() as stack:
                folder = stack.enter_context(TemporaryDirectory(prefix="regard-"))
                path = Path(folder) / "reply.safetensors"
                async with aclosing(self._record(folder, path, asked, prompt, params)) as outputs:
                    async for _ in outputs:
                        if await request.is_disconnected():
                            raise RegardError("the client went away")
                cleanup = BackgroundTask(stack.pop_all().close)
            return FileResponse(path, media_type="application/octet-stream", background=cleanup)
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            return _error(400, f"the request is invalid: {error}")
        except (RegardError, OSError) as error:
            return _error(500, str(error))

    async def _record(
        self, folder: str, path: Path, asked: _Chosen, prompt: Any, params: Any, **options: Any
    ) -> AsyncGenerator[Any]:
        """Yield the outputs of a request, and save a recording of each answer before the end."""
        name, call = f"regard{uuid4().hex}", self._engine.collective_rpc
        chosen = [each and sorted(set(each)) for each in (asked.layers, asked.heads)]
        # Keys from the cache never pass the recorder.
        params.skip_reading_prefix_cache = True
        answers, read = defaultdict[int, list[int]](list), list[int]()
        ranks: list[dict[str, Any]] = await call("regard_start", args=(folder, *chosen, name))
        stopped: list[dict[str, Any]] = []
        try:
            requests = Requests(self._engine.get_tokenizer(), ranks, *chosen)
            async with aclosing(self._generate(prompt, params, name, **options)) as outputs:
                async for output in outputs:
                    read = output.prompt_token_ids or read
                    for answer in output.outputs:
                        if params.output_kind.name != "DELTA":
                            answers[answer.index].clear()
                        answers[answer.index] += answer.token_ids
                    yield output
        finally:
            if "refused" not in ranks[0]:
                stopped = await asyncio.shield(call("regard_stop", args=(name,)))
        await asyncio.to_thread(requests.read, stopped)
        each = [SimpleNamespace(token_ids=answers[index]) for index in sorted(answers)]
        finished = SimpleNamespace(request_id=name, prompt_token_ids=read, outputs=each)
        for index in range(len(each)):
            seen = await asyncio.to_thread(requests.__getitem__, (finished, index))
            target = path if len(each) == 1 else path.with_suffix(f".{index}.safetensors")
            await asyncio.to_thread(seen.save, target)


_OTHER_TOKEN = (
    "the token is not that of the server.\n    Set REGARD_TOKEN, a secret of your own, for the "
    "server and for this client."
)


def _is_token(given: str) -> bool:
    token = os.environ.get("REGARD_TOKEN", "")
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())


def _error(code: int, text: str) -> Response:
    return JSONResponse({"error": {"message": text}}, code)
