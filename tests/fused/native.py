"""Models whose layers native kernels compute on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Configs, and how many of their two layers the kernels compute.
KNOWN = {
    "llama": (lambda: transformers.LlamaConfig(**SIZES), 2),
    "llama-biased": (lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), 2),
    "qwen2": (lambda: transformers.Qwen2Config(**SIZES), 2),
    "qwen3": (lambda: transformers.Qwen3Config(**SIZES), 2),
    "mistral": (lambda: transformers.MistralConfig(**SIZES, sliding_window=8), 2),
    # One layer sees all, the other a window: two groups of blocks.
    "qwen3-windows": (
        lambda: transformers.Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        2,
    ),
    # Its second layer does not rotate; a step of one token could not tell.
    "smollm3": (lambda: transformers.SmolLM3Config(**SIZES, no_rope_layers=[1, 0]), 1),
    # It scales what its layers add to the residual.
    "granite": (lambda: transformers.GraniteConfig(**SIZES, residual_multiplier=0.5), 0),
    "llama-gelu": (lambda: transformers.LlamaConfig(**SIZES, hidden_act="gelu"), 0),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**SIZES, sliding_window=8), 0),
}


def build(config: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide errors
            parameter.data += torch.randn_like(parameter) * 0.2
    return model
