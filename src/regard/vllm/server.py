"""A model that ``vllm serve`` serves, reached over HTTP."""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from regard.errors import RegardError, kind_text

__all__ = ["Answer", "Server", "Text"]

_START = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls regard.vllm.Recorder "
    "--no-enable-prefix-caching --enforce-eager"
)


@dataclass(frozen=True)
class Text:
    """One answer to a prompt.

    Attributes:
        text: the text.
        token_ids: the ids of its tokens.
    """

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """The answers to a prompt, with the names that vLLM's ``RequestOutput`` has.

    Attributes:
        request_id: the server's name of the request.
        prompt_token_ids: the ids of the tokens of the prompt.
        outputs: the answers.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Text]


class Server:
    """A running ``vllm serve`` on this machine, in place of a ``vllm.LLM``.

    The server must be started in development mode, with regard's worker extension::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls regard.vllm.Recorder

    Development mode lets everybody who reaches the server call methods of its workers, so start
    it only where nobody else can reach it.

    Args:
        url: the address of the server, such as ``"http://localhost:8000"``.
        timeout: the longest time to wait for a reply, in seconds.

    Raises:
        ValueError: url is not an address of HTTP.
        RegardError: no vLLM answers there.

    Example:
        A server must run::

            server = regard.vllm.Server("http://localhost:8000")
            (seen,) = regard.vllm.record(server, ["One prompt"], {"max_tokens": 32})
    """

    def __init__(self, url: str, *, timeout: float = 600) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ValueError(
                f"url is {url!r}; it must be an address such as 'http://localhost:8000'."
            )
        self.url, self._timeout = url.rstrip("/").removesuffix("/v1"), timeout
        with self._understood():
            self._model = str(self._ask("/v1/models", None)["data"][0]["id"])

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Call a method of each worker, and return what each gives back.

        Args:
            method: its name.
            args: what JSON can hold.

        Raises:
            RegardError: the server has no such method, or does not let it be called.
        """
        with self._understood():
            return self._ask("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def generate(
        self, prompts: str | Sequence[str], settings: Mapping[str, Any] | None = None, **_: Any
    ) -> list[Answer]:
        """Let the server answer prompts, one after the other.

        Args:
            prompts: texts.
            settings: of ``/v1/completions``, such as ``{"max_tokens": 32, "temperature": 0}``.

        Raises:
            TypeError: settings is not a mapping.
            RegardError: the server refuses a prompt or a setting.
        """
        if settings is not None and not isinstance(settings, Mapping):
            raise TypeError(
                f"sampling_params is {kind_text(settings)}; for a server it must be a dict, such "
                'as {"max_tokens": 32}.'
            )
        answers: list[Answer] = []
        for prompt in [prompts] if isinstance(prompts, str) else prompts:
            own = {"model": self._model, "prompt": prompt, "return_token_ids": True}
            with self._understood():
                reply = self._ask("/v1/completions", {**(settings or {}), **own})
                texts = [Text(choice["text"], choice["token_ids"]) for choice in reply["choices"]]
                ids = reply["choices"][0]["prompt_token_ids"]
                answers.append(Answer(f"{reply['id']}-0", ids, texts))
        return answers

    @contextmanager
    def _understood(self) -> Generator[None]:
        """Refuse a reply that is not as vLLM's."""
        try:
            yield
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise RegardError(f"{self.url} does not answer as vLLM does: {error!r}.") from None

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """Return the reply to a request: GET without a body, else POST."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=self._timeout) as reply:
                return json.load(reply)
        except HTTPError as error:
            raise RegardError(self._refusal(path, error)) from None
        except (URLError, TimeoutError, ConnectionError) as error:
            reason = getattr(error, "reason", error)
            raise RegardError(
                f"{self.url} does not answer: {reason}.\n    Start vLLM with: {_START}"
            ) from None

    def _refusal(self, path: str, error: HTTPError) -> str:
        if path != "/collective_rpc":
            return f"{self.url}{path} answers {error.code}: {_said(error)}"
        if error.code == 404:
            return (
                f"{self.url} runs without vLLM's development mode, which lets regard reach its "
                f"workers.\n    Start it with: {_START}"
            )
        return (
            f"the workers of {self.url} cannot be called: {_said(error)}\n"
            f"    Start it with regard's worker extension: {_START}"
        )


def _said(error: HTTPError) -> str:
    """Return the server's own message, in one line."""
    text = error.read(10_000).decode(errors="replace")
    try:
        reply = json.loads(text)
        text = str(reply["error"]["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:300] or str(error.reason)
