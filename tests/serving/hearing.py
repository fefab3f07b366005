"""A tiny model that hears, with a tokenizer and a feature extractor of windows of one second."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.encoder_models import whisper

RATE = 16_000


def extractor() -> Any:
    """Of windows of one second."""
    return transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=160)


SPECIAL = {
    50: "<|endoftext|>", 51: "<|startoftranscript|>", 52: "<|en|>", 53: "<|de|>", 54: "<|translate|>",
    55: "<|transcribe|>", 57: "<|startofprev|>", 60: "<|notimestamps|>",
}  # fmt: skip
"""In the order that published checkpoints have: texts below, times above."""


def tokenizer() -> Any:
    vocab = {SPECIAL.get(i, f"<|{(i - 61) * 0.02:.2f}|>" if i > 60 else chr(33 + i)): i for i in range(99)}
    made = transformers.WhisperTokenizer(vocab=vocab, merges=[])
    made.add_special_tokens({"additional_special_tokens": [*SPECIAL.values()]})
    return made


def model(**settings: Any) -> Any:
    made = whisper(
        eos_token_id=50, pad_token_id=50, bos_token_id=50, decoder_start_token_id=51, prev_sot_token_id=57,
        lang_to_id={"<|en|>": 52, "<|de|>": 53}, task_to_id={"translate": 54, "transcribe": 55}, max_length=24,
        **settings,
    )  # fmt: skip
    return made


def noise(seconds: float) -> Any:
    return torch.randn(int(RATE * seconds), generator=torch.Generator().manual_seed(1)).numpy()
