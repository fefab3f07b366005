"""Tiny random models that take images, with prompts whose placeholders have features."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers as tf

IMAGE, VIDEO, START, END = 199, 198, 197, 196
VOCAB = 200
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


class Row(NamedTuple):
    """A prompt, and what the processor returns beside it."""

    ids: list[int]
    inputs: dict[str, torch.Tensor]


def doubled(row: Row) -> Row:
    """The row for a model in float64."""
    return Row(row.ids, {name: x.double() if x.is_floating_point() else x for name, x in row.inputs.items()})


Rows = Callable[[torch.Generator], list[Row]]


def _rows(per_image: int, inputs: Callable[[torch.Tensor, int, torch.Generator], dict[str, torch.Tensor]]) -> Rows:
    """Prompts with one image, two images, and one image after more text."""

    def made(generator: torch.Generator) -> list[Row]:
        found = []
        for length, places in ((9, [3]), (30, [2, 16]), (27, [17])):
            length += per_image
            ids = torch.randint(3, 190, (1, length), generator=generator)
            places = [places[0], *(place + per_image for place in places[1:])]
            for place in places:
                ids[:, place - 1], ids[:, place : place + per_image] = START, IMAGE
                if place + per_image < length:
                    ids[:, place + per_image] = END
            found.append(Row(ids[0].tolist(), inputs(ids, len(places), generator)))
        return found

    return made


def _pixels(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, 16, 16, generator=generator)}


def _patches(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Of Qwen's processors: an image of 4 x 6 patches, merged by 2 x 2."""
    return {
        "pixel_values": torch.randn(24 * count, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 6]] * count),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def _with_types(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_pixels(ids, count, generator), "token_type_ids": (ids == IMAGE).long()}


def _prefix(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """All tokens of the prompt attend to one another."""
    return {**_pixels(ids, count, generator), "token_type_ids": torch.zeros_like(ids)}


def _sized(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_pixels(ids, count, generator), "image_sizes": torch.tensor([[16, 16]] * count)}


def _frames(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(1, count, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, count, 16, 16, dtype=torch.bool)}


_GRID: dict[str, Any] = {
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 4, "depth": 2, "hidden_size": 32,
}  # fmt: skip
_MARKS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}


def _llama() -> Any:
    return tf.LlamaConfig(**TEXT)


def llava() -> Any:
    config = tf.LlavaConfig(text_config=_llama(), vision_config=tf.CLIPVisionConfig(**VISION), image_token_id=IMAGE)
    return tf.LlavaForConditionalGeneration(config)


def mistral3() -> Any:
    vision = tf.PixtralVisionConfig(**VISION, head_dim=8)
    config = tf.Mistral3Config(
        text_config=tf.MistralConfig(**TEXT, sliding_window=None), vision_config=vision, image_token_id=IMAGE,
        spatial_merge_size=1,
    )  # fmt: skip
    return tf.Mistral3ForConditionalGeneration(config)


def idefics3() -> Any:
    config = tf.Idefics3Config(
        text_config=_llama(), vision_config={**VISION, "max_position_embeddings": 16}, image_token_id=IMAGE,
        scale_factor=1,
    )  # fmt: skip
    return tf.Idefics3ForConditionalGeneration(config)


def qwen2_vl() -> Any:
    vision = {**_GRID, "embed_dim": 32}
    return tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_MARKS)
    )


def qwen2_5_vl() -> Any:
    vision = {**_GRID, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    return tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": _MROPE}, vision_config=vision, **_MARKS)
    )


def qwen3_vl() -> Any:
    vision = {
        **_GRID, "out_hidden_size": 32, "intermediate_size": 64, "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 16,
    }  # fmt: skip
    text = {**TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
    return tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_MARKS))


def gemma3(window: int = 64) -> Any:
    text = {
        **TEXT, "sliding_window": window, "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    }  # fmt: skip
    config = tf.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_index=START,
        eoi_token_index=END,
    )  # fmt: skip
    return tf.Gemma3ForConditionalGeneration(config)


def gemma4() -> Any:
    text = {
        **TEXT, "num_hidden_layers": 3, "sliding_window": 6, "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "full_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 4, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 16,
    }  # fmt: skip
    config = tf.Gemma4Config(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=195,
        boi_token_id=START, eoi_token_id=END,
    )  # fmt: skip
    return tf.Gemma4ForConditionalGeneration(config)


def _placed(ids: torch.Tensor, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Of Gemma 4's processor: 4 x 4 patches and where they are."""
    side = torch.arange(4)
    places = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(1, 16, 2)
    return {
        "pixel_values": torch.rand(count, 16, 48, generator=generator),
        "image_position_ids": places.repeat(count, 1, 1),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def paligemma2() -> Any:
    text = tf.Gemma2Config(
        **TEXT, sliding_window=64, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    )
    config = tf.PaliGemmaConfig(
        text_config=text, vision_config=VISION, image_token_id=IMAGE, projection_dim=32, hidden_size=32
    )
    return tf.PaliGemmaForConditionalGeneration(config)


def paligemma() -> Any:
    config = tf.PaliGemmaConfig(
        text_config=tf.GemmaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, projection_dim=32,
        hidden_size=32,
    )  # fmt: skip
    return tf.PaliGemmaForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], Any], Rows]] = {
    "llava": (llava, _rows(4, _pixels)), "mistral3": (mistral3, _rows(4, _sized)),
    "idefics3": (idefics3, _rows(4, _frames)), "qwen2_vl": (qwen2_vl, _rows(6, _patches)),
    "qwen2_5_vl": (qwen2_5_vl, _rows(6, _patches)), "qwen3_vl": (qwen3_vl, _rows(6, _patches)),
    "gemma3": (gemma3, _rows(4, _with_types)), "gemma3, a short window": (partial(gemma3, 6), _rows(4, _with_types)),
    "gemma3, images longer than the window": (partial(gemma3, 3), _rows(4, _with_types)),
    "gemma4": (gemma4, _rows(4, _placed)), "paligemma2": (paligemma2, _rows(4, _prefix)),
    "paligemma": (paligemma, _rows(4, _prefix)),
}  # fmt: skip
"""By name: a model, and its prompts."""


def build(make: Callable[[], Any]) -> Any:
    """A model in fp32 and eval mode, whose greedy text is not one repeated token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
            if parameter.dim() > 1 and not parameter.any():  # a projector that is learned from zero
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def batch_of(rows: list[Row]) -> dict[str, torch.Tensor]:
    """The rows, padded on the left."""
    longest = max(len(row.ids) for row in rows)

    def padded(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(value, (longest - len(value), 0)) for value in values])

    batch = {
        "input_ids": padded([torch.tensor(row.ids) for row in rows]),
        "attention_mask": padded([torch.ones(len(row.ids), dtype=torch.int64) for row in rows]),
    }
    for name in rows[0].inputs:
        values = [row.inputs[name] for row in rows]
        if name.endswith("type_ids"):
            batch[name] = padded([value[0] for value in values])
        else:  # MiniCPM-V has the patches of all images in a row
            batch[name] = torch.cat(values, -1 if name == "pixel_values" and "target_sizes" in rows[0].inputs else 0)
    return batch
