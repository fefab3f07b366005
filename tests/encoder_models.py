"""Tiny random encoder-decoder models, made once per process, whose text is not one repeated token, and their inputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 99
PAD, BOS, EOS = 0, 1, 2

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False}, "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3}, "beam samples": {"do_sample": True, "num_beams": 3},
}  # fmt: skip

_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 80,
    "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": EOS,
    "forced_eos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "pad_token_id": PAD,
    "eos_token_id": EOS, "decoder_start_token_id": PAD, "tie_word_embeddings": False,
}  # fmt: skip
_SPEECH = {**_BART, "max_target_positions": 64, "decoder_start_token_id": 3, "begin_suppress_tokens": None}


def _whisper() -> Any:
    config = transformers.WhisperConfig(**_SPEECH, num_mel_bins=8, max_source_positions=50)
    return transformers.WhisperForConditionalGeneration(config)


def _speech2text() -> Any:
    sizes = {"input_feat_per_channel": 8, "input_channels": 1, "conv_channels": 16, "max_source_positions": 100}
    return transformers.Speech2TextForConditionalGeneration(transformers.Speech2TextConfig(**_SPEECH, **sizes))


def _moonshine() -> Any:
    config = transformers.MoonshineConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        encoder_num_key_value_heads=4, decoder_num_key_value_heads=2, decoder_start_token_id=BOS, bos_token_id=BOS,
        eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.MoonshineForConditionalGeneration(config)


def _speech_mbart() -> Any:
    sound = transformers.Wav2Vec2Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, feat_proj_dropout=0.0,
    )  # fmt: skip
    decoder = transformers.MBartConfig(**(_BART | {"encoder_layers": 2}), add_cross_attention=True, is_decoder=True)
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(sound, decoder)
    config.pad_token_id, config.decoder_start_token_id = PAD, BOS
    return transformers.SpeechEncoderDecoderModel(config=config)


def _composite(decoder: Any) -> Any:
    vision = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    config.pad_token_id, config.decoder_start_token_id = PAD, BOS
    return transformers.VisionEncoderDecoderModel(config=config)


def _vision_gpt2() -> Any:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return _composite(transformers.GPT2Config(**sizes, add_cross_attention=True, bos_token_id=BOS, eos_token_id=EOS))


def _trocr() -> Any:
    sizes = {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}
    sizes |= {"decoder_ffn_dim": 48, "max_position_embeddings": 64, "cross_attention_hidden_size": 32}
    return _composite(transformers.TrOCRConfig(**sizes, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS))


def _text(cls: str, config: str, **sizes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, cls)(getattr(transformers, config)(**sizes))


_MODELS: dict[str, Callable[[], Any]] = {
    "bart": _text("BartForConditionalGeneration", "BartConfig", **_BART),
    "mbart": _text("MBartForConditionalGeneration", "MBartConfig", **_BART),
    "marian": _text("MarianMTModel", "MarianConfig", **_BART),
    "pegasus": _text("PegasusForConditionalGeneration", "PegasusConfig", **_BART),
    "blenderbot": _text("BlenderbotForConditionalGeneration", "BlenderbotConfig", **_BART),
    "plbart": _text("PLBartForConditionalGeneration", "PLBartConfig", **_BART),
    "m2m100": _text("M2M100ForConditionalGeneration", "M2M100Config", **_BART),
    "t5": _text("T5ForConditionalGeneration", "T5Config", **_T5),
    "umt5": _text("UMT5ForConditionalGeneration", "UMT5Config", **_T5), "whisper": _whisper,
    "speech2text": _speech2text, "moonshine": _moonshine, "speech-mbart": _speech_mbart, "vision-gpt2": _vision_gpt2,
    "trocr": _trocr,
}  # fmt: skip
NAMES = tuple(_MODELS)


@functools.cache
def model(name: str) -> Any:
    torch.manual_seed(0)
    made = _MODELS[name]().float().eval()
    generator = torch.Generator().manual_seed(1)
    for path, parameter in made.named_parameters():
        if parameter.dim() > 1 and parameter.numel() > 4:
            # Tokens must not outweigh positions and the encoder's states, or the text repeats its last token.
            spread = 0.7 if "position" in path else 0.3 if "embed" in path or "shared" in path else None
            parameter.data = torch.randn(parameter.shape, generator=generator)
            parameter.data *= 1.8 / parameter[0].numel() ** 0.5 if spread is None else spread
    config = made.generation_config
    config.pad_token_id, config.eos_token_id = PAD, EOS
    if config.decoder_start_token_id is None:
        config.decoder_start_token_id = made.config.decoder_start_token_id
    return made


def inputs(name: str, rows: int = 4) -> dict[str, torch.Tensor]:
    """Inputs of `generate`: texts of different lengths, or recordings or images."""
    generator = torch.Generator().manual_seed(2)
    kind = model(name).main_input_name
    if name == "whisper":
        return {kind: torch.randn(rows, 8, 100, generator=generator)}
    if name == "speech2text":
        mask = torch.ones(rows, 40, dtype=torch.int64)
        mask[-1, 25:] = 0
        return {kind: torch.randn(rows, 40, 8, generator=generator), "attention_mask": mask}
    if name == "moonshine":
        mask = torch.ones(rows, 4000, dtype=torch.int64)
        mask[-1, 2500:] = 0
        return {kind: torch.randn(rows, 4000, generator=generator), "attention_mask": mask}
    if name == "speech-mbart":
        return {kind: torch.randn(rows, 400, generator=generator)}
    if kind == "pixel_values":
        return {kind: torch.randn(rows, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, VOCAB, (rows, 21), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, 21 - 5 * row % 17 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def whisper(**settings: Any) -> Any:
    """A copy that knows languages, tasks and times. settings: of its generation config."""
    made = copy.deepcopy(model("whisper"))
    config = made.generation_config
    config.no_timestamps_token_id, config.is_multilingual, config.max_initial_timestamp_index = 60, True, 5
    config.lang_to_id, config.task_to_id = {"<|en|>": 4, "<|de|>": 5}, {"transcribe": 6, "translate": 7}
    config.alignment_heads, config.return_timestamps = [[0, 1], [1, 2]], False
    config.forced_decoder_ids, config.prev_sot_token_id = None, 8
    vars(config).update(settings)
    return made
