"""Models that take more than text: what of them runs on packed rows, what through the dense view, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import hf_paged

TEXT = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip


def randomised(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    result: torch.Tensor = model.generate(input_ids=ids, attention_mask=mask, **options)
    return result


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and attention_mask int64 [3, 9], left-padded."""
    ids = torch.randint(6, 90, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :6] = 0
    return ids * mask, mask


def test_text_only_requests_to_a_vision_language_model_are_packed() -> None:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_index=98,
    )
    model = randomised(transformers.LlavaForConditionalGeneration(config))
    ids, mask = prompts()
    for options in ({}, {"num_beams": 3}):
        plain = generate(model, ids, mask, **options)
        with hf_paged.record_calls() as records:
            assert torch.equal(generate(model, ids, mask, cache_implementation="paged", **options), plain)
        assert (records[0].route, records[0].reason) == ("engine", None)
    # With an image they are not.
    ids[:, 4:8] = 98
    ids = torch.cat([ids, torch.full((3, 12), 98)], dim=1)
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    plain = generate(model, ids, mask, pixel_values=pixels)
    with hf_paged.record_calls() as records:
        paged = generate(model, ids, mask, pixel_values=pixels, cache_implementation="paged")
    assert torch.equal(paged, plain)
    assert records[0].route == "hf_loop" and "mm_encoder_outputs" in records[0].reason


def test_features_of_a_model_that_is_refused_are_not_taken_for_token_ids() -> None:
    config = transformers.WhisperConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=20, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=[],
        begin_suppress_tokens=[],
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with pytest.raises(hf_paged.UnsupportedModelError, match=r"encoder-decoder model.*call generate without"):
        model.generate(torch.randn(1, 8, 40), cache_implementation="paged", max_new_tokens=4)
