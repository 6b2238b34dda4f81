"""The cost of lazy attentions of transformers: time of a forward, memory of a generation."""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case, Effort, Measured, need
from benchmarks.observe import with_its_heap
from benchmarks.turns import Work, ratio

__all__ = ["CASES"]

MIB = 2**20
PROMPT, NEW = 1024, 128
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
# Llama 3 8B in bfloat16, with a text of 32,768 tokens and 256 new ones.
LAYERS, HEADS, KV_HEADS, DIM, BYTES = 32, 32, 8, 128, 2
LONG, MORE = 32768, 256


@cache
def llama(kind: str, **sizes: int) -> Any:
    """A small Llama with random weights."""
    need("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000, **SIZES, **sizes},
        max_position_embeddings=8192,
    )
    config._attn_implementation = kind
    return LlamaForCausalLM(config).eval()


def forward(effort: Effort) -> Measured:
    """Return the time of a forward with lazy attentions in forwards without attentions."""
    from regard.transformers import lazy

    model = llama("sdpa", num_hidden_layers=4, num_key_value_heads=8)
    ids = torch.randint(1000, (1, effort.tokens))

    def work(asks: bool) -> Work:
        def run() -> object:
            with torch.no_grad(), lazy(model) if asks else nullcontext():
                return model(ids, use_cache=False, output_attentions=asks)

        return run

    repetitions = max(15, effort.repetitions) if effort.repetitions > 1 else 1
    return ratio(work(True), work(False), repetitions)


def held(attentions: Iterable[Iterable[Any]]) -> int:
    """The bytes of all tensors that the attentions of a generation hold."""
    tensors = [
        tensor
        for step in attentions
        for matrix in step
        for tensor in ([matrix] if isinstance(matrix, Tensor) else matrix.source.tensors)
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def generation(effort: Effort, *, lazily: bool) -> Measured:
    """MiB that the attentions of a prompt and of 128 new tokens hold."""
    from regard.transformers import lazy

    model = llama("sdpa" if lazily else "eager")
    with torch.no_grad(), lazy(model) if lazily else nullcontext():
        output = model.generate(
            torch.randint(1000, (1, effort.tokens)),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_attentions=True,
            eos_token_id=None,
            pad_token_id=0,
        )
    mib = held(output.attentions) / MIB
    return Measured(mib, 1, mib, mib)


def calculated(_: Effort, *, lazily: bool) -> Measured:
    """MiB that the attentions of a long generation would hold, by their sizes."""
    rows = sum(LONG + new for new in range(1, MORE))
    dense = LAYERS * HEADS * (LONG**2 + rows)
    # The growing key has room for an eighth more.
    sparse = LAYERS * (HEADS + KV_HEADS * 9 / 8) * (LONG + MORE) * DIM
    mib = (sparse if lazily else dense) * BYTES / MIB
    return Measured(mib, 1, mib, mib)


CASES = (
    Case("outputs", "forward", "forwards without them", forward, (512, 2048)),
    with_its_heap(
        Case("outputs", "forward", "forwards without them", forward, (2048,), {2048: 1.03})
    ),
    *(
        Case("outputs", f"{name}, {kind}", "MiB", partial(measure, lazily=lazily), (length,))
        for name, measure, length in (
            (f"generation of {NEW} tokens", generation, PROMPT),
            (f"Llama 3 8B, generation of {MORE} tokens, calculated", calculated, LONG),
        )
        for kind, lazily in (("lazy", True), ("eager", False))
    ),
)
