"""The cost of `regard.Monitor` beside a training step, in CPU seconds.

    python -m benchmarks.training            # two models, a results file: some minutes
    python -m benchmarks.training --quick    # one round of the small model, to see whether it runs

An observed step, a step with ``rows=64`` and a plain one alternate, and a ratio is that of the
medians. CPU seconds do not count the time that other programs take. With ``every=100`` a training
takes ``1 + (ratio - 1) / 100`` of its time, and what the monitor takes on the other steps.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

# Threads that wait for others must not count as busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

import regard
from benchmarks.machine import commit, description, file_name

__all__ = ["main"]

RESULTS = Path(__file__).parent / "results" / "training"
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
# The name of a case, the model, the texts of a batch, the tokens of a text, and the rounds.
CASES = (
    ("4 layers of 8 heads", SMALL, 8, 256, 15),
    ("4 layers of 8 heads", SMALL, 2, 1024, 9),
    ("SmolLM2-135M", SMOLLM2, 2, 256, 5),
    ("SmolLM2-135M", SMOLLM2, 1, 1024, 5),
)


def step_of(config: dict[str, Any], texts: int, tokens: int) -> tuple[Any, Callable[..., float]]:
    """Return a model with random weights, and a function that gives a step's CPU seconds."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(config["vocab_size"], (texts, tokens))

    def step(block: AbstractContextManager[object]) -> float:
        start = process_time()
        with block:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return process_time() - start

    return model, step


def measure(folder: Path, config: dict[str, Any], texts: int, tokens: int, rounds: int) -> Any:
    """Return the seconds of a plain step, and the ratios of observed ones."""
    model, step = step_of(config, texts, tokens)
    whole = regard.Monitor(model, folder / "whole", every=1)
    some = regard.Monitor(model, folder / "some", every=1, rows=64)
    taken = [
        (step(nullcontext()), step(whole(turn)), step(some(turn))) for turn in range(rounds + 1)
    ]
    plain, observed, of_rows = (median(column) for column in zip(*taken[1:], strict=True))
    rare = regard.Monitor(model, every=10**9)
    start = process_time()
    for turn in range(1, 10_001):
        with rare(turn):
            pass
    idle = (process_time() - start) / 10_000
    ratio = observed / plain
    return {
        "plain_step_seconds": round(plain, 4),
        "observed_step": round(ratio, 3),
        "observed_step_of_64_rows": round(of_rows / plain, 3),
        "training_with_every_100": round(1 + (ratio - 1) / 100 + 0.99 * idle / plain, 4),
        "other_steps_microseconds": round(1e6 * idle, 2),
    }


def main(arguments: Sequence[str]) -> None:
    """Measure and print; write the results file unless it was a quick run."""
    quick = "--quick" in arguments
    found: list[dict[str, Any]] = []
    for name, config, texts, tokens, rounds in CASES[: 1 if quick else None]:
        with TemporaryDirectory() as folder:
            numbers = measure(Path(folder), config, texts, tokens, 1 if quick else rounds)
        found.append({"model": name, "texts": texts, "tokens": tokens, **numbers})
        print(found[-1], flush=True)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        about = {"machine": description(), "commit": commit(), "cases": found}
        (RESULTS / file_name()).write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
