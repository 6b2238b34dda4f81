"""The attention layers of a model that vLLM runs, and the reasons to refuse some of them."""

import os
from importlib import import_module
from typing import Any

import torch


def find_layers(
    worker: Any,
) -> tuple[list[dict[str, Any]], dict[int, Any], list[tuple[str, str]]]:
    """Find the attention layers of a worker, in their order in the model.

    Returns:
        A description of each layer that can be recorded, which JSON can hold; the module of each,
        by its place in the model; the name of each other layer, and the reason.
    """
    base = import_module("vllm.model_executor.layers.attention_layer_base").AttentionLayerBase
    all_layers = import_module("vllm.config").get_layers_from_vllm_config(worker.vllm_config, base)
    attention = {
        name: layer
        for name, layer in all_layers.items()
        if not getattr(layer, "is_draft_layer", False)
    }
    places = {name: at for at, name in enumerate(attention, _layers_before(len(attention)))}
    layers, modules, refused = list[dict[str, Any]](), dict[int, Any](), list[tuple[str, str]]()
    for name, layer in attention.items():
        reason = _refusal_of_layer(layer)
        keys = places.get(getattr(layer, "kv_sharing_target_layer_name", None) or name)
        if reason is None and keys not in (places[name], *modules):
            reason = "it shares the keys of a layer that is refused"
        if reason is not None:
            refused.append((name, reason))
        else:
            modules[places[name]] = layer
            numbers = {"name": name, "place": places[name], "keys": keys}
            layers.append({**numbers, **_facts(layer)})
    return layers, modules, refused


def _layers_before(count: int) -> int:
    """Return the number of layers in the earlier stages of pipeline parallelism."""
    stages = import_module("vllm.distributed.parallel_state").get_pp_group()
    if stages.world_size == 1:
        return 0
    counts: list[Any] = [0] * stages.world_size
    torch.distributed.all_gather_object(counts, count, group=stages.cpu_group)
    return sum(counts[: stages.rank_in_group])


def _facts(layer: Any) -> dict[str, Any]:
    """Return the parameters of a layer's attention."""
    window, softcap = layer.sliding_window, getattr(layer.impl, "logits_soft_cap", None)
    slopes, sinks = (getattr(layer.impl, name, None) for name in ("alibi_slopes", "sinks"))
    return {
        "num_heads": layer.num_heads,
        "cross": layer.attn_type != "decoder",
        "scale": float(layer.impl.scale),
        "window": None if window is None else int(window),
        "softcap": float(softcap or 0),
        "slopes": None if slopes is None else slopes.flatten().tolist(),
        "sinks": None if sinks is None else sinks.flatten().tolist(),
    }


def refusal_of(config: Any) -> str | None:
    """Return why nothing can be recorded under a configuration, and which option to set."""
    parallel, compilation = config.parallel_config, config.compilation_config
    for size in ("data", "decode_context", "prefill_context"):
        if getattr(parallel, f"{size}_parallel_size", 1) > 1:
            return f"{size}_parallel_size is above 1; set it to 1"
    if getattr(parallel, "use_ubatching", False):
        return "batches run in parts; set enable_dbo=False"
    mode = compilation.cudagraph_mode
    if str(config.device_config.device_type) == "cuda" and mode is not None:
        breaks = os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "").lower() in ("1", "true")
        if mode.has_full_cudagraphs():
            return (
                "full CUDA graphs run the model without Python; set enforce_eager=True or "
                'compilation_config={"cudagraph_mode": "PIECEWISE"}'
            )
        if breaks and mode.name != "NONE":
            return "breakable CUDA graphs were never tried; set VLLM_USE_BREAKABLE_CUDAGRAPH=0"
    if config.speculative_config is not None and config.scheduler_config.async_scheduling:
        return "speculation is scheduled ahead of its answers; set async_scheduling=False"
    passes = vars(getattr(compilation, "pass_config", object))
    fused = [name for name, on in passes.items() if "rope_kvcache" in name and on is True]
    if fused:
        return f"its kernel rotates the keys itself; set {fused[0]}=False in its pass_config"
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "layers skip tokens of the prompt; set kv_sharing_fast_prefill=False"
    return None


def _refusal_of_layer(layer: Any) -> str | None:
    """Return why a layer cannot be recorded, or None."""
    layers = import_module("vllm.model_executor.layers.attention")
    kinds = {layers.Attention: "decoder", layers.CrossAttention: "encoder_decoder"}
    if kinds.get(type(layer), "") != getattr(layer, "attn_type", None):
        return f"it is a {type(layer).__name__}, of which regard cannot record query and key"
    stored = str(layer.kv_cache_dtype)
    facts = {
        "its query is quantised": layer.query_quant is not None,
        f"it stores its keys as {stored}; set kv_cache_dtype to auto": stored
        not in ("auto", "bfloat16", "float16", "float32"),
        "it reads a prefix in both directions": getattr(layer, "use_mm_prefix", False),
        "its kernel has sinks that regard cannot read": layer.has_sink
        and getattr(layer.impl, "sinks", None) is None,
        "its ALiBi has square roots": getattr(layer, "use_alibi_sqrt", False),
        "its kernel attends in chunks": getattr(layer.impl, "chunk_lookback", -1) > -1,
    }
    return next((reason for reason, holds in facts.items() if holds), None)
