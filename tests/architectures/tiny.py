"""A tiny random fp32 model of every causal-LM type: 4 layers of its layer types, weights with a large spread."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn

NUM_LAYERS = 4
WINDOW = 8
VOCAB = 96

# By the name of a config field: what a tiny model has there. A hidden size of 64 is 4 heads of 16.
_SIZES: dict[str, Any] = {}


def _size(value: Any, *names: str) -> None:
    _SIZES.update(dict.fromkeys(names, value))


_size(VOCAB, "vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")
_size(
    64, "hidden_size", "hidden_size_global", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim",
    "word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "attention_hidden_size", "lru_width",
)  # fmt: skip
_size(
    4, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
    "swa_num_attention_heads",
)  # fmt: skip
_size(2, "num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_query_groups")
_size(16, "head_dim", "swa_head_dim", "kv_channels", "dim_head", "d_head", "attention_head_size", "v_head_dim")
_size(16, "qk_nope_head_dim", "index_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim")
_size(8, "qk_rope_head_dim", "rotary_dim")
_size(24, "qk_head_dim", "q_lora_rank")
_size(16, "kv_lora_rank", "o_lora_rank", "hc_lowrank", "gated_norm_rank", "adapter_rank", "laurel_rank")
_size(
    NUM_LAYERS, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
_size(
    96, "intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "dff", "dim_ff", "ffn_hidden_size",
    "d_inner", "feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "n_inner",
)  # fmt: skip
_size(
    32, "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "shared_experts_intermediate_size", "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size",
    "hidden_size_per_layer_input", "router_hidden_size", "moe_latent_size",
)  # fmt: skip
_size(4, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_size(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_size(1, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num")
_size(1, "topk_group", "n_group", "num_expert_group", "num_nextn_predict_layers")
_size(1, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "prefix_dense_sliding_window_pattern")
_size(NUM_LAYERS - 1, "moe_layer_end_index")
_size(
    256, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length", "max_target_positions",
    "context_length",
)  # fmt: skip
_size(64, "original_max_position_embeddings", "max_source_positions")
_size(
    WINDOW, "sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size",
    "local_attention", "local_attention_window_len", "index_topk", "keep_window_size", "rel_extent",
)  # fmt: skip
_size(2, "sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers", "no_rope_layer_interval")
_size(2, "layer_group_size", "attn_layer_period", "num_kv_shared_layers", "interleave_moe_layer_step")
_size(0, "max_window_layers", "dropout", "attention_dropout", "hidden_dropout")
_size(1, "attn_layer_offset")
_size(2, "index_n_heads", "linear_num_key_heads", "linear_num_heads")
_size(4, "linear_num_value_heads")
_size(2, "index_topk_blocks")
_size(4, "index_block_size")
_size(8, "mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank", "chunk_size")
_size(8, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_size(16, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
_size(1, "mamba_n_groups", "n_groups", "mamba_ngroups", "o_groups")
_size(8, "mamba_chunk_size", "block_size")
_size(4, "n_layers_per_attn_res_block", "num_blocks")
_size(16, "floor_scale", "log_scaling_n_floor", "index_local_blocks")
_size(16, "query_pre_attn_scalar", "d_rel", "shape_embed_dim", "pronunciation_embed_dim", "ple_embed_dim")
_size(VOCAB, "shape_vocab_size", "pronunciation_vocab_size", "ngram_vocab_size_base")
_size(2, "heads_per_ngram", "split_ngram_parts", "num_codebooks", "mamba_expand", "num_layers_per_stack")
_size(4, "prompt_length", "prompt_mid_dim", "make_ngram_vocab_size_divisible_by", "block_multiple_of")
_size(32, "position_bias_num_buckets", "position_bias_max_distance")
_size(96, "encoder_hash_byte_group_vocab")
# Parts that text generation does not run: as small as they go.
_size(32, "image_size")

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "sep_token_id": 3}
_TOKENS |= {"forced_eos_token_id": None, "forced_bos_token_id": None, "start_token_id": 1, "cls_token_id": 4}
_TOKENS |= {"eod_token_id": 3, "unk_index": 3, "mask_index": 5, "mask_token_id": 5}

# What the rules above cannot know about a type.
_SPECIAL: dict[str, dict[str, Any]] = {}


def special(model_type: str, **fields: Any) -> None:
    _SPECIAL.setdefault(model_type, {}).update(fields)


# Fields that a checkpoint always sets and some classes leave open.
_REQUIRED = ("num_key_value_heads", "head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")


def _specials() -> None:
    special("bamba", attn_layer_indices=[1, 3])
    special("blt", num_hidden_layers=NUM_LAYERS)
    special(
        "dots3_note", vision_config={"adapter_in_dim": 64, "adapter_out_dim": 64},
        audio_config={"adapter_input_size": 64, "adapter_output_size": 64},
    )  # fmt: skip
    attention = {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}
    special("dbrx", attn_config=attention, ffn_config={"ffn_hidden_size": 64})
    special("falcon_h1", mamba_d_ssm=128)
    special("fun_asr_nano", adaptor_config={"intermediate_size": 16})
    special("gpt_neo", attention_types=[[["global", "local"], 2]])
    special("granitemoehybrid", layer_types=["mamba", "attention", "mamba", "attention"])
    special("hrm_text", num_hidden_layers=2, num_layers_per_stack=None, H_cycles=2, L_cycles=2)
    for name in ("lfm2", "lfm2_moe"):
        special(name, layer_types=["conv", "full_attention"] * 2)
    special("mamba2", num_heads=8)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "llama_4_scaling_beta": 0.5}
    special("ministral3", rope_parameters=rope | {"original_max_position_embeddings": 16})
    for name in ("qwen4_exp", "qwen4_exp_text"):
        text = {
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
            "indexer_compress_ratio": 2, "eos_token_id": 2, "ple_layer_ids": [1, 3],
        }  # fmt: skip
        special(name, **({"text_config": text} if name == "qwen4_exp" else text))
    special("reformer", axial_pos_shape=[16, 16], axial_pos_embds_dim=[32, 32])
    special("xmod", default_language="en_XX")
    # Sections of half a head: time, height, width.
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    kinds = ["full_attention", "sliding_attention"]
    text = {"layer_types": kinds * 2, "rope_parameters": dict.fromkeys(kinds, mrope)}
    special("cohere_compass_text", **text)
    special("cohere_compass", text_config=text)
    special(
        "deepseek_ocr2",
        text_config={"n_group": None, "topk_group": None, "mlp_layer_types": ["dense", "sparse"] * 2},
        vision_config={
            "sam_config": {
                "hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 32, "patch_size": 4, "window_size": 4, "global_attn_indexes": [1], "mlp_ratio": 2.0,
                "downsample_channels": [48, 64], "initializer_range": 0.02,
            },
        },
    )  # fmt: skip
    special(
        "granite_docling",
        vision_config={
            "out_hidden_size": 64, "scale_factor": 2, "patch_size": 8, "deepstack_visual_indexes": [0, 1, 2],
            "use_fine_route": True,
        },
    )  # fmt: skip
    special("glm5_next", text_config={"index_kpool": 2})
    special("inkling2", vision_config={"text_hidden_size": 64})
    # Looped models: layers 1 and 2 run in several passes, each with K/V of its own.
    special(
        "dory", num_hidden_layers=4, n_input_layers=1, n_recurrent_layers=2, n_output_layers=1, n_recurrent_loops=3,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    looped = {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3,
              "layer_types": ["hybrid_sliding", "hybrid"] * 2, "loop_gate_rank": 16}  # fmt: skip
    special("inkling2_loop_text", **looped)
    special("inkling2_loop", text_config=looped, vision_config={"text_hidden_size": 64})
    special("led", attention_window=16, max_encoder_position_embeddings=512, max_decoder_position_embeddings=128)
    special("llama4", vision_config={"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64,
                                     "vision_output_dim": 64})  # fmt: skip
    special(
        "chameleon", vocabulary_map={"<image>": 95} | {f"IMGIMG{chr(65 + i)}Z": 10 + i for i in range(8)},
        vq_config={"embed_dim": 16, "num_embeddings": 8, "latent_channels": 32, "resolution": 32, "base_channels": 32,
                   "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1},
    )  # fmt: skip
    special(
        "emu3",
        vocabulary_map={"<image>": 95, "<|extra_200|>": 90} | {f"<|visual token {i:06d}|>": 10 + i for i in range(8)},
        vq_config={"codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "hidden_size": 32,
                   "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [3],
                   "temporal_downsample_factor": 1},
    )  # fmt: skip
    special("muse_spark", audio_config={
        "out_hidden_size": 64, "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2,
        "patch_sizes": [8, 4],
    })  # fmt: skip
    special(
        "granite4_vision", image_grid_pinpoints=[[32, 64], [64, 32]], downsample_rate="1/2",
        deepstack_layer_map=[[-2, 0], [-1, 1]], spatial_target_layers=[0, 1, 2, 3],
        vision_feature_select_strategy="default",
    )  # fmt: skip
    special("xlstm", num_blocks=4, num_hidden_layers=4, qk_dim_factor=1.0)
    for name in ("zamba", "zamba2"):
        special(name, attention_hidden_size=128, attention_head_dim=32, num_key_value_heads=4)
    special("zaya", num_experts_per_tok=1)
    for name in ("qwen2", "qwen2_moe", "qwen3"):
        layers = ["full_attention", "sliding_attention"] * 2
        special(name, use_sliding_window=True, sliding_window=WINDOW, layer_types=layers)
    half = [1.0] * 8
    for name in ("phi3", "phimoe"):  # switches from short to long factors during the generation
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": half, "long_factor": [2.0] * 8}
        rope |= {"original_max_position_embeddings": 32, "short_mscale": 1.0, "long_mscale": 1.1}
        special(name, original_max_position_embeddings=32, rope_parameters=rope)
    for name in (
        "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "ernie4_5_vl_moe",
    ):  # fmt: skip
        special(name, text_config={"rope_parameters": mrope})
    special("qwen2_vl", vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64})
    for name in ("kosmos-2", "kosmos-2.5"):
        sizes = {"embed_dim": 64, "layers": NUM_LAYERS, "ffn_dim": 96, "attention_heads": 4}
        special(name, text_config=sizes, latent_query_num=4)
    special("step3p7", text_config={"sliding_window": WINDOW})
    special("minimax_m3_vl_text", layer_types=["full_attention", "minimax_m3_sparse"] * 2)
    special("gemma4_text", num_kv_shared_layers=2)
    special("moonshine_streaming", num_key_value_heads=4)
    special("pp_formulanet", vision_config={"decoder_hidden_size": 64})
    special("pix2struct", text_config={"d_kv": 16}, vision_config={"d_kv": 16})
    for name in ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder"):
        special(name, decoder={"is_decoder": True, "add_cross_attention": True})


def _layer_types(types: list[str]) -> list[str]:
    """Every layer type at least once, in order, repeated up to NUM_LAYERS."""
    kinds = list(dict.fromkeys(types))
    return [kinds[i % len(kinds)] for i in range(max(NUM_LAYERS, len(kinds)))]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def shrink(config: Any) -> dict[str, Any]:
    """Keyword arguments that make a tiny config of the class of `config`."""
    fields: dict[str, Any] = {}
    values = config.to_dict()
    for name, value in values.items():
        if name in _TOKENS:
            if value is not None:
                fields[name] = _TOKENS[name]
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types") and value:
            fields[name] = _layer_types(value)
        elif (_is_size(value) and name in _SIZES) or (value is None and name in _REQUIRED):
            fields[name] = _SIZES[name]
        elif name == "rope_parameters" and value and "mrope_section" in value:
            parts = 8 * value.get("partial_rotary_factor", 1.0)
            fields[name] = {**value, "mrope_section": [int(parts / 2), int(parts / 4), int(parts / 4)]}
        elif isinstance(value, float) and "drop" in name:
            fields[name] = 0.0
        elif name in config.sub_configs and value is not None:
            fields[name] = shrink(getattr(config, name)) | {"model_type": getattr(config, name).model_type}
    if "kv_lora_rank" in values:  # latent attention: a KV head per head, rotary parts of their own size
        fields |= {"num_key_value_heads": 4, "head_dim": _SIZES["qk_rope_head_dim"]}
    return fields


_specials()


def tiny_config(model_type: str, *, as_decoder: bool = True) -> Any:
    """as_decoder: encoder families attend causally and keep a cache; of seq2seq families only the decoder is used."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    cls = CONFIG_MAPPING[model_type]
    fields = shrink(cls())
    for name, value in copy.deepcopy(_SPECIAL.get(model_type, {})).items():  # configs add fields to their dicts
        if isinstance(value, dict) and isinstance(fields.get(name), dict):
            fields[name] = {**fields[name], **value}
        else:
            fields[name] = value
    config = cls(**fields)
    if as_decoder:
        config.is_decoder = True
        config.is_encoder_decoder = False
    if getattr(config, "attn_logit_softcapping", None) is not None:
        config._attn_implementation = "eager"  # SDPA, the default of some releases, drops the soft cap
    for part in (config, config.get_text_config(decoder=True)):
        part.tie_word_embeddings = False  # a tied model tends to repeat its last token
    return config


# Auto classes whose models generate tokens but are not causal language models; they take other inputs besides text.
_OTHER_TASKS = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM", "VISUAL_QUESTION_ANSWERING", "RNNT", "TDT",
)  # fmt: skip


@functools.cache
def other_classes() -> dict[str, str]:
    """Class name -> model type of every class that generates and is not in the causal-LM mapping."""
    import transformers
    from transformers.models.auto import modeling_auto

    causal = set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    found: dict[str, str] = {}
    for task in _OTHER_TASKS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).items():
            for name in [names] if isinstance(names, str) else names:
                cls = getattr(transformers, name, None)
                if name not in causal and cls is not None and cls.can_generate():
                    found.setdefault(name, model_type)
    return found


def tiny_model(name: str, seed: int = 0) -> Any:
    """An eval-mode fp32 model on the CPU: a type of the causal-LM mapping, or a class of `other_classes`."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.manual_seed(seed)
    is_causal = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config = tiny_config(name if is_causal else other_classes()[name], as_decoder=is_causal)
    cls = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] if is_causal else name)
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        # A composite config whose causal-LM class takes the text part alone.
        config = config.get_text_config(decoder=True)
    model = cls(config).float().eval()
    redraw(model, seed)
    generation = model.generation_config
    for name in ("max_length", "max_new_tokens", "eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(generation, name, None)
    for name in ("suppress_tokens", "begin_suppress_tokens", "cache_implementation"):
        setattr(generation, name, None)
    generation.pad_token_id = 0
    return model


_MIXERS = ("att", "mamba", "mixer", "conv")  # modules that mix tokens; others must not dominate their outputs
_QK = ("q_", "k_", "query", "key", "qkv", "c_attn", "q.", "k.")


@torch.no_grad()
def redraw(model: nn.Module, seed: int) -> None:
    """Small embeddings, so that the layers determine the logits; larger weights in modules that mix tokens."""
    generator = torch.Generator().manual_seed(seed + 1)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.numel() == 0 or "A_log" in name or "dt_" in name or name.endswith(("_scale", "scalar")):
            continue
        if name.endswith(("sqk", "s_gate", "lambda_1", "lambda_2")):  # nGPT multiplies them by 50
            continue
        if id(parameter) in embeddings:
            parameter.copy_(noise * 0.5)
        elif parameter.ndim >= 2 and "norm" not in name:
            fan_in = parameter.shape[-1] if parameter.ndim == 2 else parameter[0].numel() // max(parameter.shape[1], 1)
            gain = 2.5 if any(part in name for part in _QK) else 1.5 if any(part in name for part in _MIXERS) else 1.2
            # Remove the mean: the constant part of ReLU-like activations would hide differences between tokens.
            if min(parameter.shape[-2:]) > 8:
                noise -= noise.mean(-1, keepdim=True)
                noise -= noise.mean(-2, keepdim=True)
            parameter.copy_(noise * gain / math.sqrt(max(fan_in, 1)))
        else:
            parameter.add_(noise * 0.1)
