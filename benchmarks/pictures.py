"""The price of one question about a long picture: text to image in a Qwen2-VL, in CPU seconds.

    python -m benchmarks.pictures            # 16,384 image tokens, one thread: some minutes
    python -m benchmarks.pictures --quick    # 1,024 image tokens, to see whether it runs

The model has random weights and few layers. Its number of tokens and the size of its heads are
real. The price is compared with the forward pass of one layer of the language model, and with the
plain product of the same rows in PyTorch, both on the same query and key.
"""

import sys
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

__all__ = ["main"]

PATCH, MERGED = 14, 2
HEADS, KV_HEADS, HEAD_DIM = 12, 2, 128
AFTER = 8  # words of the text after the picture
LAST = "model.language_model.layers.1.self_attn"


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process for some work."""
    start = process_time()
    work()
    return process_time() - start


def middle(work: Callable[[], object], rounds: int = 5) -> float:
    """Return the median CPU seconds of some rounds, after one that is not counted."""
    work()
    return median(seconds(work) for _ in range(rounds))


def model_and_inputs(side: int) -> tuple[Any, dict[str, Any]]:
    """Return a small Qwen2-VL, and the inputs of a text with a picture of side x side tokens."""
    import torch
    import transformers

    torch.manual_seed(0)
    vision = {"depth": 1, "embed_dim": 64, "num_heads": 1, "hidden_size": HEADS * HEAD_DIM}
    text = {
        "vocab_size": 99,
        "hidden_size": HEADS * HEAD_DIM,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    ids = {"image_token_id": 90, "video_token_id": 91}
    ids |= {"vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config=text, **ids)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    patches = (MERGED * side) ** 2
    row = [5, 92, *[90] * side**2, 93, *range(6, 6 + AFTER)]
    inputs = {
        "input_ids": torch.tensor([row]),
        "attention_mask": torch.ones(1, len(row), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([[int(each == 90) for each in row]]),
        "image_grid_thw": torch.tensor([[1, MERGED * side, MERGED * side]]),
        "pixel_values": torch.randn(patches, 3 * 2 * PATCH**2),
    }
    return model, inputs


def main(arguments: list[str]) -> None:
    """Print the prices."""
    import torch

    import regard

    torch.set_num_threads(1)
    side = 32 if "--quick" in arguments else 128
    model, inputs = model_and_inputs(side)
    with torch.inference_mode(), regard.observe(model) as seen:
        run = seconds(lambda: model(**inputs, logits_to_keep=1))
    size = MERGED * PATCH * side
    picture = regard.images.Picture(size, size)
    grid = regard.grid(range(2, 2 + side**2), side, side)
    one = seen.part([LAST]).with_pictures([picture], grid)
    matrix = one[0]
    query, key, length = matrix.source.query, matrix.source.key, matrix.shape[-1]
    value = torch.randn_like(key)

    def forward() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    def plain(count: int) -> Any:
        rows = query[..., -count:, :].unflatten(1, (KV_HEADS, -1)).flatten(2, 3)
        return (rows @ key.mT * HEAD_DIM**-0.5).softmax(-1)

    sys.stdout.write(
        f"{side**2:,} image tokens, {HEADS} heads, {KV_HEADS} of keys, of {HEAD_DIM} numbers\n"
        f"the model's forward with its recording       {run:8.3f} s\n"
    )
    attention = seconds(forward)
    sys.stdout.write(f"fused attention of one layer                 {attention:8.3f} s\n")
    for count in (1, AFTER):
        last = list(range(length - count, length))
        price = middle(lambda last=last: one.image(0, query=last))
        bare = middle(lambda count=count: plain(count))
        sys.stdout.write(
            f"{count} text tokens to the picture, all heads      {price:8.3f} s\n"
            f"    the rows alone, in plain PyTorch         {bare:8.3f} s\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
