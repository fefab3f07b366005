"""Requests with images in the engine: a tiny random vision-language model, whose answers say nothing.

    python examples/describe_image.py

A real model needs its processor instead of `prompt`: `processor(text=..., images=..., return_tensors="pt")`.
"""

import torch
from transformers import CLIPVisionConfig, GenerationConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import hf_paged

IMAGE = 199  # the placeholder of a feature

text = LlamaConfig(
    vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
vision = CLIPVisionConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)
torch.manual_seed(0)
model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)).eval()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)


def prompt(question: list[int]) -> list[int]:
    """An image of 4 x 4 patches, and a question about it."""
    return [5, *[IMAGE] * 16, 6, *question]


def picture(shade: float) -> torch.Tensor:
    """Pixels [1, 3, 32, 32] of a square on a ground."""
    pixels = torch.full((1, 3, 32, 32), shade)
    pixels[:, 0, 8:24, 8:24] = 1.0
    return pixels


config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
with hf_paged.Engine(model, hf_paged.CacheConfig(memory="16MiB", block_size=4)) as engine:
    for name, pixels, question in (
        ("a picture", picture(0.1), [20, 21, 22]),
        ("another one", picture(0.9), [20, 21, 22]),
        ("the same, with another question", picture(0.9), [30, 31]),
    ):
        request = engine.add_request(prompt(question), config, inputs={"pixel_values": pixels})
        answer: list[int] = []
        cached = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished and output.error is None:
                    answer, cached = output.outputs[0].token_ids, output.metrics.num_cached_tokens
        print(f"{name}: {answer}, {cached} tokens of the prompt found in the cache")
    stats = engine.stats()
    print(f"{stats.encoder_inputs} images encoded, {stats.encoder_hits} found")
