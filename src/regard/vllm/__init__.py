"""Record the attention of a model that vLLM serves, one recording for each request.

Start vLLM with regard's worker extension, and record::

    import regard.vllm
    from vllm import LLM

    llm = LLM("some/model", worker_extension_cls="regard.vllm.Recorder", enforce_eager=True)
    (seen,) = regard.vllm.record(llm, ["Life is short, eat dessert first"])
    seen[3].entropy()

``regard.vllm.Server(url)`` takes the place of ``llm`` for a model of ``vllm serve``.

vLLM computes as before. Its workers copy the query and the key of each attention layer.
"""

from regard.vllm.requests import Requests, observe, record
from regard.vllm.server import Server
from regard.vllm.worker import Recorder

__all__ = ["Recorder", "Requests", "Server", "observe", "record"]
