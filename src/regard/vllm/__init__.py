"""Record the attention of a model that vLLM serves, one recording for each request.

A recording::

    import regard.vllm
    from vllm import LLM

    llm = LLM("some/model", enforce_eager=True)
    (seen,) = regard.vllm.record(llm, ["Life is short, eat dessert first"])
    seen[3].entropy()

``regard.vllm.Server(url)`` records requests to a running ``vllm serve``.
"""

from regard.vllm.finished_requests import Requests
from regard.vllm.offline import observe, record
from regard.vllm.server import Server

__all__ = ["Requests", "Server", "observe", "record"]
