"""The route ``/regard/record`` of ``vllm serve``, which records one request.

vLLM loads it if VLLM_PLUGINS names regard. Each request needs the token of REGARD_TOKEN.
"""

import asyncio
import hmac
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from regard.errors import RegardError
from regard.recording.recording import Recording
from regard.vllm.attention_layers import of_vllm
from regard.vllm.finished_requests import Requests

__all__ = ["Endpoint"]

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Numbers = Annotated[list[_Number], msgspec.Meta(min_length=1)]


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request, in JSON."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | _Numbers
    layers: _Numbers | None = None
    heads: _Numbers | None = None
    settings: dict[str, Any] = {}


class Endpoint:
    """An endpoint plugin of vLLM.

    A request is answered as by ``/v1/completions``; the reply is the recording, a safetensors file.
    With REGARD_FOLDER the server keeps the file in that folder, and the reply is its path.
    """

    name = "regard"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route; vLLM calls this as it builds its application."""
        app.add_route("/regard/record", self._reply, methods=["POST"])

    async def init_state(self, engine_client: Any, state: object, args: object) -> None:
        """Keep the engine; vLLM calls this once it runs."""
        self._engine = engine_client

    async def _reply(self, request: Request) -> Response:
        """Reply with a recording, or with one sentence."""
        try:
            token = os.environ.get("REGARD_TOKEN", "")
            given = request.headers.get("authorization", "").encode()
            if not token or not hmac.compare_digest(given, f"Bearer {token}".encode()):
                return _error(
                    401,
                    "the token is not that of the server.\n    Set REGARD_TOKEN, a secret of your "
                    "own, for the server and for this client.",
                )
            asked = msgspec.json.decode(await request.body(), type=_Asked)
            params = _settings_of(asked)
            temporary = TemporaryDirectory(prefix="regard-")
            try:
                seen = await self._record(request, temporary.name, asked, params)
                name = f"{uuid4().hex}.safetensors"
                path = Path(os.environ.get("REGARD_FOLDER") or temporary.name) / name
                await asyncio.to_thread(seen.save, path)
            except BaseException:
                temporary.cleanup()
                raise
        except msgspec.MsgspecError as error:
            return _error(400, f"the request is invalid: {error}.")
        except (ValueError, TypeError) as error:
            return _error(400, str(error))
        except (RegardError, OSError) as error:
            return _error(500, str(error))
        cleanup = BackgroundTask(temporary.cleanup)
        if path.parent != Path(temporary.name):
            return JSONResponse({"path": str(path)}, background=cleanup)
        return FileResponse(path, media_type="application/octet-stream", background=cleanup)

    async def _record(self, request: Request, folder: str, asked: _Asked, params: Any) -> Recording:
        """Let vLLM answer a prompt, and return the recording."""
        name, call, output = f"regard{uuid4().hex}", self._engine.collective_rpc, None
        layers, heads = (each and sorted(set(each)) for each in (asked.layers, asked.heads))
        is_text = isinstance(asked.prompt, str)
        prompt: Any = asked.prompt if is_text else {"prompt_token_ids": asked.prompt}
        ranks: list[dict[str, Any]] = await call("regard_start", args=(folder, layers, heads, name))
        stopped: list[dict[str, Any]] = []
        try:
            requests = Requests(self._engine.get_tokenizer(), ranks, layers, heads)
            async for latest in self._engine.generate(prompt, params, name):
                output = latest
                if await request.is_disconnected():
                    raise RegardError("the client went away")
        finally:
            if "refused" not in ranks[0]:
                stopped = await asyncio.shield(call("regard_stop", args=(name,)))
        await asyncio.to_thread(requests.read, stopped)
        return await asyncio.to_thread(requests.__getitem__, output)


def _settings_of(asked: _Asked) -> Any:
    """Return the sampling parameters of a request.

    Raises:
        ValueError: one of them is invalid, or asks for several answers.
        TypeError: vLLM has no such sampling parameter.
    """
    settings: dict[str, Any] = {"max_tokens": 16, **asked.settings}
    if settings.get("n", 1) != 1:
        raise ValueError("n must be 1.\n    Send a request for each answer, with its own seed.")
    params = of_vllm("sampling_params").SamplingParams(**settings)
    params.skip_reading_prefix_cache = True  # keys from the cache never pass the recorder
    return params


def _error(code: int, text: str) -> Response:
    return JSONResponse({"error": {"message": text}}, code)
