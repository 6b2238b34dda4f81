"""Record what a ``vllm.LLM`` in this process answers."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from regard.errors import RegardError, kind_text
from regard.recording.recording import Recording
from regard.vllm.finished_requests import Requests


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
        llm: a ``vllm.LLM``.
        prompts: as for ``llm.generate``.
        sampling_params: as for ``llm.generate``.
        layers: places of the layers to keep; all when left out.
        heads: numbers of the heads to keep; all when left out.

    Returns:
        One recording for each answer, in the order of the prompts; several in a row for ``n=2``.
        Its matrices have shape (1, num_heads, tokens, tokens), and its tokens are those of prompt
        and answer. The last token of an answer is not read, so it is not among them. The keys of
        cross-attention are an encoder's, and a recording with such layers has no tokens.

    Raises:
        TypeError: llm is not a ``vllm.LLM``.
        RegardError: vLLM was started with an option under which attention cannot be recorded; the
            message says which option to set.

    Example:
        A model needs a GPU or the CPU build of vLLM::

            llm = LLM("some/model", enforce_eager=True)
            first, second = regard.vllm.record(llm, ["One prompt", "Another"])
    """
    with observe(llm, layers=layers, heads=heads) as seen:
        outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    return [seen[output, at] for output in outputs for at in range(len(output.outputs))]


@contextmanager
def observe(
    llm: Any, *, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> "Generator[Requests]":
    """Record what vLLM answers inside the block.

    Requests inside the block read nothing from vLLM's prefix cache, because keys from the cache
    never pass the recorder.

    Args:
        llm: a ``vllm.LLM``.
        layers: as in ``record``.
        heads: as in ``record``.

    Yields:
        The recordings. After the block, ``seen[output]`` is that of one of vLLM's outputs.

    Raises:
        TypeError: llm is not a ``vllm.LLM``.
        RegardError: as in ``record``.

    Example:
        A model needs a GPU or the CPU build of vLLM::

            with regard.vllm.observe(llm, layers=[0, 1]) as seen:
                outputs = llm.generate(prompts)
            seen[outputs[0]]
    """
    if not hasattr(llm, "llm_engine") or not hasattr(llm, "collective_rpc"):
        raise TypeError(
            f"llm is {kind_text(llm)}; it must be a vllm.LLM.\n"
            '    Pass LLM("some/model"). To record a request to vllm serve use '
            'regard.vllm.Server("http://localhost:8000").'
        )
    with TemporaryDirectory(prefix="regard-") as folder:
        chosen = [None if each is None else sorted(set(each)) for each in (layers, heads)]
        try:
            ranks: list[dict[str, Any]] = llm.collective_rpc("regard_start", args=(folder, *chosen))
        except Exception as error:
            if "regard_start" not in str(error):
                raise
            raise RegardError(
                "vLLM's workers did not load regard's plugin.\n"
                "    Add regard to VLLM_PLUGINS, and uninstall other plugins of this name."
            ) from None
        stopped: list[dict[str, Any]] = []
        try:
            requests = Requests(llm.get_tokenizer(), ranks, *chosen)
            with _without_cache(llm.llm_engine):
                yield requests
        finally:
            if "refused" not in ranks[0]:
                stopped = llm.collective_rpc("regard_stop")
        requests.read(stopped)


@contextmanager
def _without_cache(engine: Any) -> Generator[None]:
    """Let new requests read nothing from the prefix cache.

    A ``cache_salt`` would not do: all answers to one prompt share it, and read each other's keys.
    """
    add = engine.add_request

    def add_request(name: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(params, "skip_reading_prefix_cache"):
            params = params.clone()
            params.skip_reading_prefix_cache = True
        return add(name, prompt, params, *args, **kwargs)

    engine.add_request = add_request
    try:
        yield
    finally:
        del engine.add_request
