"""Tiny random models of the classes that generate text from media, and prompts with a placeholder for each feature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationConfig

from hf_paged.features.media.media import sound_encoder
from hf_paged.features.media.media_encoders import features_of
from tests.architectures.tiny import redraw, tiny_config
from tests.architectures.vision import Row

TOKENS = {"image": 95, "video": 94, "audio": 93}
START, END = 92, 91
_TYPES = {"image": 1, "video": 2, "audio": 3}
Inputs = dict[str, torch.Tensor]
Make = Callable[..., Inputs]
Small = Sequence[bool]


class Case(NamedTuple):
    """cls: the class. make: (config, number of media, generator) -> what a processor returns; for a model that takes
    media of several sizes it has an argument `small`: for each medium, whether it is the small one. spans: into how
    many parts the placeholders of a medium are cut, each between a start and an end. fields: of the config, by dotted
    names. token: the placeholder, if it is not that of the kind."""

    cls: str
    model_type: str
    kind: str
    make: Make
    spans: int = 1
    fields: Mapping[str, Any] = MappingProxyType({})
    token: int | None = None


def _size(config: Any) -> int:
    size = getattr(getattr(config, "vision_config", config), "image_size", 32)
    return size if isinstance(size, int) else size[0]


def _patch(config: Any, frames: bool) -> int:
    """Values of a patch."""
    vision = config.vision_config
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    channels = next((n for name in ("in_channels", "in_chans", "num_channels") if (n := getattr(vision, name, 0))), 3)
    per_frame = next((n for name in ("temporal_patch_size", "patch_temporal") if (n := getattr(vision, name, 0))), 1)
    return channels * patch**2 * (per_frame if frames else 1)


def pixels(config: Any, count: int, g: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(count, 3, _size(config), _size(config), generator=g)}


def _sizes(count: int, small: Small, large_one: Any, small_one: Any) -> list[Any]:
    return [small_one if number < len(small) and small[number] else large_one for number in range(count)]


def sized(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    """Padded, as processors do it, to the largest."""
    size = _size(config)
    sizes = _sizes(count, small, [size, size], [size // 2, size])
    values = pixels(config, count, g)["pixel_values"]
    for value, (height, _) in zip(values, sizes):
        value[:, height:] = 0
    return {"pixel_values": values[:, :, : max(height for height, _ in sizes)], "image_sizes": torch.tensor(sizes)}


def tiles(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    """The small one has wide margins, which the model takes away."""
    size = _size(config)
    values = torch.randn(count, 3, 3, size, size, generator=g)
    return {"pixel_values": values, "image_sizes": torch.tensor(_sizes(count, small, [size, size], [size // 2, size]))}


def masked(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    size = _size(config)
    mask = torch.ones(1, count, size, size, dtype=torch.bool)
    values = pixels(config, count, g)["pixel_values"][None]
    for number, height in enumerate(_sizes(count, small, size, size // 2)):
        mask[0, number, height:], values[0, number, :, height:] = False, 0
    return {"pixel_values": values, "pixel_attention_mask": mask}


def _grids(count: int, small: Small, frames: int) -> tuple[torch.Tensor, int]:
    """And the number of all patches."""
    grid = torch.tensor(_sizes(count, small, [frames, 4, 4], [frames, 2, 6]))
    return grid, int(grid.prod(dim=1).sum())


def patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    grid, number = _grids(count, small, 1)
    return {"pixel_values": torch.randn(number, _patch(config, True), generator=g), "image_grid_thw": grid}


def flat_patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    grid, number = _grids(count, small, 1)
    return {"pixel_values": torch.randn(number, _patch(config, False), generator=g), "image_grid_thw": grid}


def square_patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    flat = flat_patches(config, count, g, small)
    side, values = config.vision_config.patch_size, flat["pixel_values"]
    return {**flat, "pixel_values": values.reshape(len(values), -1, side, side)}


def merged_patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    return {**flat_patches(config, count, g, small), "image_merge_sizes": torch.tensor([2] * count)}


def listed_patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    shapes = torch.tensor(_sizes(count, small, [4, 4], [2, 6]))
    mask = (torch.arange(16) < shapes.prod(dim=1)[:, None]).long()
    values = torch.randn(count, 16, _patch(config, False), generator=g) * mask[..., None]
    return {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def video_patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    grid, number = _grids(count, small, 2)
    values = torch.randn(number, _patch(config, True), generator=g)
    return {"pixel_values_videos": values, "video_grid_thw": grid}


def merged_video(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    grid, number = _grids(count, small, 2)
    values = torch.randn(number, _patch(config, False), generator=g)
    return {"pixel_values_videos": values, "video_grid_thw": grid, "video_merge_sizes": torch.tensor([2] * count)}


def omni_video(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    return {**video_patches(config, count, g, small), "video_second_per_grid": torch.ones(count)}


def frames(number: int) -> Make:
    def make(config: Any, count: int, g: torch.Generator) -> Inputs:
        return {"pixel_values_videos": torch.randn(count, number, 3, _size(config), _size(config), generator=g)}

    return make


def mel(length: int, bins: int = 128, mask: str | None = None, last: bool = False) -> Make:
    """last: the bins are the last dimension."""

    def make(config: Any, count: int, g: torch.Generator) -> Inputs:
        shape = (count, length, bins) if last else (count, bins, length)
        return {"input_features": torch.randn(*shape, generator=g)}

    if mask is None:
        return make

    def make_masked(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
        lengths = torch.tensor(_sizes(count, small, length, length // 2))
        return {**make(config, count, g), mask: (torch.arange(length) < lengths[:, None]).long()}

    return make_masked


def granite(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    """The mask is that of 14 features, of which the last is none."""
    mask = torch.arange(14) < torch.tensor(_sizes(count, small, 13, 8))[:, None]
    return {"input_features": torch.randn(count, 64, 160, generator=g), "input_features_mask": mask}


def hybrid(config: Any, count: int, g: torch.Generator) -> Inputs:
    return {**pixels(config, count, g), "high_res_pixel_values": torch.randn(count, 3, 32, 32, generator=g)}


def stacked(config: Any, count: int, g: torch.Generator) -> Inputs:
    """Of Granite Docling: a row of tiles."""
    values = pixels(config, count, g)["pixel_values"][None]
    return {"pixel_values": values, "pixel_attention_mask": torch.ones(1, count, dtype=torch.bool)}


def fuyu(config: Any, count: int, g: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(count, 6, 3 * config.patch_size**2, generator=g)}


def square_video(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    """Of one frame: transformers has as many features for several frames as for one, and then divides them wrongly."""
    images = square_patches(config, count, g, small)
    return {"pixel_values_videos": images["pixel_values"], "video_grid_thw": images["image_grid_thw"]}


def whole_patches(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    """Of Inkling 2: a patch for each feature."""
    side, grid = 2 * config.vision_config.patch_size, torch.tensor(_sizes(count, small, [1, 2, 3], [1, 2, 2]))
    return {
        "pixel_values": torch.randn(int(grid.prod(dim=1).sum()), side, side, 3, generator=g),
        "image_grid_thw": grid,
    }


def strips(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    """Of MiniCPM-V: the patches of all images in a row."""
    side = config.vision_config.patch_size
    sizes = torch.tensor(_sizes(count, small, [4, 8], [4, 4]), dtype=torch.int32)
    values = torch.randn(1, 3, side, side * int(sizes.prod(dim=1).sum()), generator=g)
    return {"pixel_values": values, "target_sizes": sizes}


def moss(config: Any, count: int, g: torch.Generator, small: Small = ()) -> Inputs:
    features = torch.randn(count, config.audio_config.num_mel_bins, 128, generator=g)
    mask = (torch.arange(128) < torch.tensor(_sizes(count, small, 50, 26))[:, None]).long()
    return {"input_features": features, "input_features_mask": mask, "padding_mask": torch.ones(count, 640)}


def spark_sound(config: Any, count: int, g: torch.Generator) -> Inputs:
    return {"input_values": torch.randn(count, 96, generator=g)}


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def _of(name: str, model_type: str, *media: tuple[Any, ...], suffix: str = "ForConditionalGeneration") -> list[Case]:
    return [Case(name + suffix, model_type, *each) for each in media]


_IMAGE, _GRID = ("image", pixels), ("image", patches)
_VIDEO, _VIDEO_BY_FRAME = ("video", video_patches), ("video", video_patches, 2)
_GLM_VIDEO = ("video", video_patches, 2, {}, TOKENS["image"])
_EARS = {"audio_config.intermediate_size": 256}
_OMNI = {"text_config.rope_parameters": _MROPE}
_OMNI_IMAGE, _OMNI_VIDEO = ("image", patches, 1, _OMNI), ("video", omni_video, 1, _OMNI)
_OMNI_SOUND = ("audio", mel(100, mask="feature_attention_mask"), 1, _OMNI)
_ERNIE = {"text_config.rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}}
_GRANITE = {"encoder_config.hidden_dim": 64, "projector_config.encoder_hidden_size": 64, "window_size": 10}
_KIMI = {"projection_hidden_size": 64}
_MUSE = {"out_hidden_size": 256, "projector_hidden_size": 64}
_MUSE_IMAGE, _MUSE_VIDEO = ("image", patches, 1, _MUSE), ("video", video_patches, 1, _MUSE)
_HUNYUAN = {"text_config.rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2, 2]}}
_LFM = {"text_config.layer_types": ["conv", "full_attention"] * 2}
_ALIKE = [
    ([_IMAGE],
     "AyaVision/aya_vision Cohere2Vision/cohere2_vision DeepseekVL/deepseek_vl GotOcr2/got_ocr2 InternVL/internvl "
     "Janus/janus Llava/llava Ovis2/ovis2 QianfanOCR/qianfan_ocr Step3p7/step3p7 VipLlava/vipllava "
     "Chameleon/chameleon"),
    ([_GRID, _VIDEO],
     "Exaone4_5_/exaone4_5 HyperCLOVAXVisionV2/hyperclovax_vision_v2 MiniMaxM3Sparse/minimax_m3_vl "
     "Qwen2VL/qwen2_vl Qwen2_5_VL/qwen2_5_vl Lfm3Vl/lfm3_vl Dots3Note/dots3_note"),
    ([_GRID, _VIDEO_BY_FRAME],
     "Cosmos3Omni/cosmos3_omni Qwen3VL/qwen3_vl Qwen3VLMoe/qwen3_vl_moe CohereCompass/cohere_compass "
     "Qwen3_5/qwen3_5 Qwen3_5Moe/qwen3_5_moe Qwen4Exp/qwen4_exp"),
    ([_GRID, _GLM_VIDEO], "Glm46V/glm46v Glm4v/glm4v GlmOcr/glm_ocr"),
    ([("image", sized)], "LightOnOcr/lighton_ocr Mistral3/mistral3 Emu3/emu3 MistralLarge4/mistral_large4"),
    ([("image", masked)], "Idefics2/idefics2 Idefics3/idefics3 SmolVLM/smolvlm"),
    ([("image", tiles)], "LlavaNext/llava_next Granite4Vision/granite4_vision"),
    ([("image", strips)], "MiniCPMOcr/minicpm_ocr MiniCPMV4_6/minicpmv4_6 MiniCPMV4_7/minicpmv4_7"),
    ([_OMNI_IMAGE, _OMNI_VIDEO, _OMNI_SOUND],
     "Qwen2_5OmniThinker/qwen2_5_omni_thinker Qwen3OmniMoeThinker/qwen3_omni_moe_thinker"),
]  # fmt: skip
"""Media, and class/type of those that take them as they are."""
_EVERY = [
    *(case for media, names in _ALIKE for name in names.split() for case in _of(*name.split("/"), *media)),
    *_of("Cosmos3Edge", "cosmos3_edge", ("image", flat_patches), _VIDEO_BY_FRAME),
    *_of("Glm4vMoe", "glm4v_moe", ("image", patches, 1, {"text_config.rope_parameters.mrope_section": [2, 1, 1]})),
    *_of("Lfm2Vl", "lfm2_vl", ("image", listed_patches, 1, _LFM)),
    *_of("LlavaNextVideo", "llava_next_video", ("image", tiles), ("video", frames(8))),
    *_of("LlavaOnevision", "llava_onevision", ("image", tiles), ("video", frames(8))),
    *_of("PaddleOCRVL", "paddleocr_vl", ("image", square_patches)),
    *_of("VideoLlama3", "video_llama_3", ("image", merged_patches), ("video", merged_video)),
    *_of("VideoLlava", "video_llava", _IMAGE, ("video", frames(2))),
    *_of("Qwen3ASR", "qwen3_asr", ("audio", mel(100, mask="input_features_mask"))),
    *_of("Qwen2Audio", "qwen2_audio", ("audio", mel(128, mask="feature_attention_mask"))),
    *_of("Voxtral", "voxtral", ("audio", mel(128), 1, _EARS)),
    *_of("GlmAsr", "glmasr", ("audio", mel(128, mask="input_features_mask"), 1, _EARS)),
    *_of("AudioFlamingo3", "audioflamingo3", ("audio", mel(128, mask="input_features_mask"))),
    *_of("GraniteSpeech", "granite_speech", ("audio", granite, 1, _GRANITE)),
    *_of("GraniteSpeechPlus", "granite_speech_plus", ("audio", granite, 1, _GRANITE)),
    *_of("FunAsrNano", "fun_asr_nano", ("audio", mel(32, 560, mask="input_features_mask", last=True))),
    *_of("Aria", "aria", ("image", pixels, 1, {"projector_patch_to_query_dict": {16: 4}})),
    *_of("HunYuanVL", "hunyuan_vl", ("image", patches, 1, _HUNYUAN)),
    *_of("DeepseekVLHybrid", "deepseek_vl_hybrid", ("image", hybrid)),
    # The forward of 5.24.0 reads a field that its text model's output lacks.
    *([] if transformers.__version__ == "5.24.0" else _of("Llama4", "llama4", _IMAGE)),
    *_of("Fuyu", "fuyu", ("image", fuyu), suffix="ForCausalLM"),
    *_of("Kimi_K25", "kimi_k25", ("image", square_patches, 1, _KIMI), ("video", square_video, 1, _KIMI)),
    *_of("MuseGlimmer", "muse_glimmer", _MUSE_IMAGE, _MUSE_VIDEO),
    *_of("MuseSpark", "muse_spark", _MUSE_IMAGE, _MUSE_VIDEO, ("audio", spark_sound)),
    *_of("DeepseekOcr2", "deepseek_ocr2", ("image", pixels, 1, {"text_config.max_position_embeddings": 1024})),
    *_of("GraniteDocling", "granite_docling", ("image", stacked)),
    *_of("MossTranscribeDiarize", "moss_transcribe_diarize", ("audio", moss)),
    *_of("Glm5Next", "glm5_next", ("image", patches, 1, {"video_start_token_id": 1, "video_end_token_id": 2})),
    *_of("Inkling2", "inkling2", ("image", whole_patches)),
    *_of("Ernie4_5_VLMoe", "ernie4_5_vl_moe", ("image", patches, 1, _ERNIE), ("video", video_patches, 1, _ERNIE)),
]
CASES = {f"{case.model_type}-{case.kind}": case for case in _EVERY}
_SPARSE = {"text_config.layer_types": ["full_attention", "minimax_m3_sparse"] * 2}
CASES["minimax_m3_vl, sparse-image"] = CASES["minimax_m3_vl-image"]._replace(fields=_SPARSE)


def config_of(case: Case) -> Any:
    config = tiny_config(case.model_type)
    vision, hidden = getattr(config, "vision_config", None), config.get_text_config().hidden_size
    parts = [part for part in (config, vision, getattr(config, "audio_config", None)) if part is not None]
    named: dict[str, Any] = {f"{kind}_token_{end}": token for kind, token in TOKENS.items() for end in ("id", "index")}
    for kind in ("vision", *TOKENS):
        named |= {f"{kind}_start_token_id": START, f"{kind}_end_token_id": END}
    if "omni" in case.model_type:  # its positions depend on which medium begins
        other = "vision" if case.kind == "audio" else "audio"
        named |= {f"{other}_start_token_id": 1, f"{other}_end_token_id": 2}
    named |= {"vision_feature_layers": [-1, -2], "image_grid_pinpoints": [[32, 64], [64, 32]]}
    for name, value in named.items():
        if hasattr(config, name) or ("omni" in case.model_type and name.endswith(("start_token_id", "end_token_id"))):
            setattr(config, name, value)
    for part in parts:
        for name in ("out_hidden_size", "text_hidden_size", "projection_dim", "output_dim", "output_size"):
            if hasattr(part, name):
                setattr(part, name, hidden)
    if vision is not None:
        own: dict[str, Any] = {
            "depth": 2, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1], "insert_layer_id": 0,
        }  # fmt: skip
        own["image_size"] = [32, 32] if isinstance(getattr(vision, "image_size", 0), (list, tuple)) else 32
        if hasattr(vision, "patch_size") and not hasattr(vision, "temporal_patch_size"):
            own["patch_size"] = 8 if isinstance(vision.patch_size, int) else [8, 8]
        for name, value in own.items():
            if hasattr(vision, name):
                setattr(vision, name, value)
        if isinstance(getattr(vision, "window_size", None), int):
            vision.window_size = 4 * vision.patch_size
    for path, value in case.fields.items():
        *outer, name = path.split(".")
        part = config
        for each in outer:
            part = part[each] if isinstance(part, dict) else getattr(part, each)
        part.__setitem__(name, value) if isinstance(part, dict) else setattr(part, name, value)
    return config


def build(case: Case) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, case.cls)(config_of(case)).float().eval()
    redraw(model, 0)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@torch.no_grad()
def _num_features(model: Any, case: Case, **size: Small) -> int:
    inputs = case.make(model.config, 1, torch.Generator().manual_seed(1), **size)
    own = getattr(model.base_model, f"get_{case.kind}_features", None)
    encode: Any = sound_encoder(model) if own is None else own
    names = inspect.signature(encode).parameters
    output = encode(**{name: value for name, value in inputs.items() if name in names}, return_dict=True)
    if "input_features_mask" in inputs and "input_features_mask" not in names:
        return int(inputs["input_features_mask"].sum())
    return len(features_of(output).pooled)


def takes_sizes(case: Case) -> bool:
    return "small" in inspect.signature(case.make).parameters


def rows(model: Any, case: Case, *, sizes: bool = False) -> list[Row]:
    """Prompts with one medium, two, and one after more text. sizes: the second of two, and the last one, are small."""
    generator = torch.Generator().manual_seed(2)
    counts = [_num_features(model, case)] * 2
    if sizes:
        counts[1] = _num_features(model, case, small=[True])
    token = TOKENS[case.kind] if case.token is None else case.token
    takes_types = "mm_token_type_ids" in inspect.signature(type(model).forward).parameters
    made = []
    for length, first, media in ((9, 3, [0]), (30, 3, [0, sizes]), (27, 17, [sizes])):
        widths = [counts[medium] + 2 * (case.spans - 1) for medium in media]
        ids = torch.randint(3, 90, (1, length + sum(widths)), generator=generator)
        types = torch.zeros_like(ids)
        for medium, width in zip(media, widths):
            per_span = counts[medium] // case.spans
            for at in range(first, first + width, per_span + 2):
                ids[:, at - 1], ids[:, at + per_span] = START, END
                ids[:, at : at + per_span], types[:, at : at + per_span] = token, _TYPES[case.kind]
            first += width + 5
        small = {"small": list(map(bool, media))} if sizes else {}
        inputs = case.make(model.config, len(media), generator, **small)
        made.append(Row(ids[0].tolist(), {**inputs, "mm_token_type_ids": types} if takes_types else inputs))
    return made
