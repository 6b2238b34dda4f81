"""A running ``vllm serve``, reached over HTTP."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from regard.errors import RegardError, check_path
from regard.recording.file_reader import load
from regard.recording.file_writer import check_replaceable
from regard.recording.recording import Recording

_START = "VLLM_PLUGINS=regard REGARD_TOKEN=a-secret-of-yours vllm serve MODEL"


class Server:
    """A running ``vllm serve`` with regard's plugin, on this or another machine.

    Args:
        url: the address of the server, such as ``"http://localhost:8000"``.
        token: the server's REGARD_TOKEN; that of this process when left out.
        timeout: the longest time to wait for a part of the reply, in seconds.

    Raises:
        ValueError: url is not an address of HTTP, or there is no token.

    Example:
        The server was started as ``VLLM_PLUGINS=regard REGARD_TOKEN=secret vllm serve MODEL``::

            server = regard.vllm.Server("http://localhost:8000", token="secret")
            seen = server.record("One prompt", "run.safetensors", max_tokens=32)
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 600) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(
                f"url is {url!r}; it must be an address such as 'http://localhost:8000'."
            )
        self.url, self._timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._token = token or os.environ.get("REGARD_TOKEN", "")
        if not (self._token.isascii() and self._token.isprintable() and self._token):
            raise ValueError(
                "token is missing, or has characters that a header of HTTP cannot hold.\n"
                "    Set REGARD_TOKEN to the token with which the server was started."
            )

    def record(
        self,
        prompt: str | Sequence[int],
        path: str | os.PathLike[str],
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        **settings: Any,
    ) -> Recording:
        """Let the server answer a prompt, and save the attention of prompt and answer.

        Args:
            prompt: a text, or the ids of its tokens.
            path: the file, ``run.safetensors``. It is written once all of it has arrived.
            layers: places of the layers to keep; all when left out.
            heads: numbers of the heads to keep; all when left out.
            settings: vLLM's sampling parameters, such as ``max_tokens=32`` and ``temperature=0``.

        Returns:
            The recording, which reads the file.

        Raises:
            RegardError: no vLLM answers, it has no plugin or another token, it refuses the request,
                or its reply ends too early.

        Example:
            A server must run::

                regard.vllm.Server("http://localhost:8000").record("A prompt", "run.safetensors")
        """
        target = check_path(path)
        check_replaceable(target)
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "layers": None if layers is None else list(layers),
            "heads": None if heads is None else list(heads),
            "settings": settings,
        }
        with TemporaryDirectory(prefix=".regard-", dir=target.parent) as folder:
            part = Path(folder) / "part.safetensors"
            self._download(body, part)
            load(part)  # refuses a file that is damaged
            part.replace(target)
        return load(target)

    def _download(self, body: Mapping[str, Any], part: Path) -> None:
        request = Request(
            f"{self.url}/regard/record",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"},
        )
        try:
            with urlopen(request, timeout=self._timeout) as reply, part.open("wb") as file:
                shutil.copyfileobj(reply, file)
                size = int(reply.headers.get("Content-Length") or -1)
        except HTTPError as error:
            if error.code in (404, 405):
                raise RegardError(
                    f"{self.url} runs without regard's plugin.\n    Install regard beside vLLM and "
                    f"start it with: {_START}"
                ) from None
            raise RegardError(f"{self.url} refuses the request: {_told(error)}") from None
        except (URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise RegardError(
                f"{self.url} does not answer: {reason}.\n    Start vLLM with: {_START}"
            ) from None
        except (HTTPException, ValueError) as error:
            raise RegardError(f"{self.url} does not answer as vLLM does: {error!r}.") from None
        if part.stat().st_size != size:
            raise RegardError(
                f"the reply of {self.url} was cut after {part.stat().st_size:,} of {size:,} bytes."
                "\n    Send the request again."
            )


def _told(reply: Any) -> str:
    """Return the server's own message: the sentence of regard's plugin, or the text, cut."""
    text = reply.read(10_000).decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300] or str(getattr(reply, "reason", ""))
